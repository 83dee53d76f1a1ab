"""Checkpoint layouts of draft heads: find the layout of a checkpoint and rename its tensors.

Each project stores draft heads under different tensor names. A `Layout` maps the names of one
project to specbench's names. Each method defines its layouts in its `head.py`. A `LoadedHead`
contains one transformer layer and some tensors outside this layer. specbench uses these names:

* `layer.*`: the layer, with transformers' names for Llama;
* `enorm`, `hnorm`: norms of the token embedding and of the features, before they are concatenated;
* `fc_norm`, `fc`: norm of the concatenated features, and the matrix that projects the input to the
  layer's width;
* `norm`, `lm_head`, `embed_tokens`: final norm, output matrix and embedding, if the head does not
  use the target's;
* `d2t`, `t2d`: draft vocabulary, as offsets to the target's ids and as a mask over these ids.

The layouts of these projects are known: github.com/SafeAILab/EAGLE, vllm-project/speculators,
sgl-project/SpecForge and XiaomiMiMo/MiMo. MTP layers inside the checkpoints of Qwen3-Next, DeepSeek
and GLM have the names that vllm-project/vllm expects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specbench_cli.api import EnvironmentFault

DROPPED = ""
"""Value in `Layout.renames` for a tensor that is not loaded, such as a copy of a target's
matrix."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Checkpoint layout in which a project stores draft heads.

    Attributes:
        kind: Kind of the head, such as "eagle3".
        name: Name of the layout in messages.
        pattern: Regular expression. A checkpoint has this layout if `pattern` matches a tensor name
            and `excludes` matches no tensor name.
        renames: Map from prefixes of stored names to specbench's names. The longest matching prefix
            is used. `{n}` stands for the layer number, which a group of `pattern` captures.
        excludes: Regular expression for tensor names that this layout never contains.
        in_target: Whether the head is stored inside the target's checkpoint.
        hidden_first: Order of the concatenated input of the matrix `fc`: True for [features,
            embedding], False for [embedding, features].
        norms_minus_one: Whether the files store norm weights w as w - 1.
        required: Required tensors besides those of the layer, by specbench's names.
    """

    kind: str
    name: str
    pattern: str
    renames: Mapping[str, str]
    excludes: str = ""
    in_target: bool = False
    hidden_first: bool = False
    norms_minus_one: bool = False
    required: tuple[str, ...] = ("fc.weight",)


SAME_NAMES = {name: name for name in ("fc.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")}
"""Renames for tensors whose stored name is the same as specbench's."""

TARGET_COPIES = {"embed_tokens.": DROPPED, "lm_head.": DROPPED}
"""Renames that skip copies of the target's matrices, which many checkpoints contain."""

DRAFT_VOCABULARY = {"d2t": "d2t", "t2d": "t2d"}
"""Renames for the draft vocabulary."""


def add_prefix(prefix: str, renames: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `renames` with a prefix before each stored tensor name."""
    return {prefix + stored_name: own_name for stored_name, own_name in renames.items()}


_REQUIRED_WEIGHTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Weights that every Llama layer has."""

_OPTIONAL_WEIGHTS = (
    *(f"self_attn.{part}_proj.bias" for part in "qkvo"),
    *(f"self_attn.{part}_norm.weight" for part in "qk"),
    "input_layernorm.weight",
)

_UNSUPPORTED = {
    "experts": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    "kv_a_proj": "attention with a latent cache",
}
"""Parts of tensor names in unsupported layers, and a description of these layers."""


def find_layout(
    folder: Path, names: Mapping[str, Tensor], layouts: Sequence[Layout]
) -> tuple[Layout, str]:
    """Return the layout of a checkpoint and the layer number in its tensor names ("" if they have
    none).

    Raises:
        EnvironmentFault: The layout is unknown.
    """
    for layout in layouts:
        found = [match for name in names if (match := re.fullmatch(layout.pattern, name))]
        if found and not any(re.fullmatch(layout.excludes, name) for name in names):
            return layout, min(("".join(match.groups()) for match in found), key=_number)
    examples = ", ".join(sorted(names)[:6])
    raise EnvironmentFault(
        f"{folder}: unknown layout of a draft head: {len(names)} tensors such as {examples};"
        f" known layouts: {'; '.join(layout.name for layout in layouts)}",
        "specbench list methods eagle",
    )


def _number(digits: str) -> int:
    return int(digits or 0)


def rename_tensors(
    folder: Path, layout: Layout, layer_number: str, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint under specbench's names.

    Args:
        layer_number: Layer number in the tensor names, as text.
        weights: Tensors of the checkpoint.

    Raises:
        EnvironmentFault: A tensor is missing or unknown.
    """
    renames = {
        stored_name.replace("{n}", layer_number): own_name
        for stored_name, own_name in layout.renames.items()
    }
    tensors = {}
    for name in weights:
        prefixes = [stored_name for stored_name in renames if name.startswith(stored_name)]
        if not prefixes:
            if layout.in_target:
                continue
            raise _unknown_tensor(folder, layout, name)
        stored_name = max(prefixes, key=len)
        if renames[stored_name] == DROPPED or name.endswith("rotary_emb.inv_freq"):
            continue
        own_name = renames[stored_name] + name[len(stored_name) :]
        if own_name.startswith("layer.") and not _in_layer(own_name.removeprefix("layer.")):
            raise _unknown_tensor(folder, layout, name)
        add_one = layout.norms_minus_one and own_name.endswith("norm.weight")
        tensors[own_name] = weights[name].float() + 1.0 if add_one else weights[name]
    missing = [
        f"layer.{name}.weight"
        for name in _REQUIRED_WEIGHTS
        if f"layer.{name}.weight" not in tensors
    ]
    missing += [name for name in layout.required if name not in tensors]
    if missing:
        raise EnvironmentFault(
            f"{folder}: {layout.name}: missing tensors: {', '.join(missing)}",
            "specbench list methods",
        )
    return tensors


def to_stored_names(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a head under the names of a layout (the inverse of
    `rename_tensors`).
    """
    stored_name = {
        own_name: name for name, own_name in layout.renames.items() if own_name != DROPPED
    }
    found = {}
    for name, tensor in tensors.items():
        own_name = max((own_name for own_name in stored_name if name.startswith(own_name)), key=len)
        found[stored_name[own_name] + name[len(own_name) :]] = tensor
    return found


def _in_layer(name: str) -> bool:
    return name in _OPTIONAL_WEIGHTS or name.removesuffix(".weight") in _REQUIRED_WEIGHTS


def _unknown_tensor(folder: Path, layout: Layout, name: str) -> EnvironmentFault:
    what = next((what for sign, what in _UNSUPPORTED.items() if sign in name), None)
    return EnvironmentFault(
        f"{folder}: {layout.name}: unsupported tensor {name}"
        + (f" ({what})" if what else "")
        + "; supported are heads with one dense Llama layer",
        "specbench list methods",
    )

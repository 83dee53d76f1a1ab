"""Checkpoint layouts of draft heads: how a layout is recognised and its tensors are renamed.

The `head.py` of each method maps the tensor names of other projects. A head in any layout is loaded
as `LoadedHead`: one transformer layer and its surrounding tensors, under these names:

* `layer.*`: the layer, with transformers' names for Llama;
* `enorm`, `hnorm`: norms of the token embedding and of the features before they are joined;
* `fc_norm`, `fc`: norm of the concatenated features, and the matrix that projects the input to the
  layer's width;
* `norm`, `lm_head`, `embed_tokens`: final norm, output matrix and embedding, if the head has its
  own;
* `d2t`, `t2d`: draft vocabulary, as offsets to the target's ids and as a mask over them.

Names and conventions are those of github.com/SafeAILab/EAGLE, vllm-project/speculators,
sgl-project/SpecForge and XiaomiMiMo/MiMo. For the layers of Qwen3-Next, DeepSeek and GLM inside
target checkpoints, they are those of vllm-project/vllm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specbench_cli.api import EnvironmentFault

DROPPED = ""
"""New name of a tensor that is not needed, such as a copy of the target's or a table."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout in which one family of checkpoints stores a head.

    Attributes:
        kind: Kind of the head (`Artifact.kind`).
        name: Name of the layout in messages.
        mark: Pattern of a tensor name that identifies the layout, together with `lacks`.
        lacks: Pattern of a tensor name that files in this layout do not have.
        renames: Map from name prefixes of the layout to our names. `{n}` is the text that `mark`
            matched. The longest prefix wins.
        in_target: Whether the target's checkpoint contains the head among its own tensors.
        hidden_first: Whether `fc` reads the features before the embedding.
        centred: Whether norm weights are stored minus one.
        needs: Required tensors besides the layer's, by our names.
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
"""Tensors that have the same name in other projects."""

TARGET_COPIES = {"embed_tokens.": DROPPED, "lm_head.": DROPPED}
"""Matrices of the target, of which many checkpoints contain a copy."""

DRAFT_VOCABULARY = {"d2t": "d2t", "t2d": "t2d"}
"""Draft vocabulary of a head that uses the target's output matrix."""


def add_prefix(prefix: str, renames: Mapping[str, str]) -> dict[str, str]:
    """Return the renames with a prefix before each of the layout's names."""
    return {prefix + theirs: ours for theirs, ours in renames.items()}


_WEIGHTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Weights that every layer has."""

_MAY_HAVE = (
    *(f"self_attn.{part}_proj.bias" for part in "qkvo"),
    *(f"self_attn.{part}_norm.weight" for part in "qk"),
    "input_layernorm.weight",
)

_OTHERS = {
    "experts": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    "kv_a_proj": "attention with a latent cache",
}
"""Names that identify layers that are not Llama's, and what these layers are."""


def find_layout(
    folder: Path, names: Mapping[str, Tensor], layouts: Sequence[Layout]
) -> tuple[Layout, str]:
    """Return the layout, and the text that its `mark` matched."""
    for layout in layouts:
        found = [match for name in names if (match := re.fullmatch(layout.pattern, name))]
        if found and not any(re.fullmatch(layout.excludes, name) for name in names):
            return layout, min(("".join(match.groups()) for match in found), key=_number)
    shown = ", ".join(sorted(names)[:6])
    raise EnvironmentFault(
        f"{folder}: no head's layout is known with tensors like {shown}"
        f" ({len(names)} in all); known are {'; '.join(layout.name for layout in layouts)}",
        "specbench list methods eagle",
    )


def _number(digits: str) -> int:
    return int(digits or 0)


def rename_tensors(
    folder: Path, layout: Layout, caught: str, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the head's tensors under our names.

    Raises:
        EnvironmentFault: A tensor is missing or unknown.
    """
    renames = {theirs.replace("{n}", caught): ours for theirs, ours in layout.renames.items()}
    tensors = {}
    for name in weights:
        fits = [theirs for theirs in renames if name.startswith(theirs)]
        if not fits:
            if layout.in_target:
                continue
            raise _unknown_tensor(folder, layout, name)
        theirs = max(fits, key=len)
        if renames[theirs] == DROPPED or name.endswith("rotary_emb.inv_freq"):
            continue
        ours = renames[theirs] + name[len(theirs) :]
        if ours.startswith("layer.") and not _in_layer(ours.removeprefix("layer.")):
            raise _unknown_tensor(folder, layout, name)
        less_one = layout.norms_minus_one and ours.endswith("norm.weight")
        tensors[ours] = weights[name].float() + 1.0 if less_one else weights[name]
    missing = [f"layer.{name}.weight" for name in _WEIGHTS if f"layer.{name}.weight" not in tensors]
    missing += [name for name in layout.required if name not in tensors]
    if missing:
        raise EnvironmentFault(
            f"{folder}: {layout.name} without {', '.join(missing)}", "specbench list methods"
        )
    return tensors


def to_stored_names(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a head's tensors under the names of a layout, the inverse of `rename_tensors`."""
    theirs = {ours: name for name, ours in layout.renames.items() if ours != DROPPED}
    found = {}
    for name, tensor in tensors.items():
        ours = max((ours for ours in theirs if name.startswith(ours)), key=len)
        found[theirs[ours] + name[len(ours) :]] = tensor
    return found


def _in_layer(name: str) -> bool:
    return name in _MAY_HAVE or name.removesuffix(".weight") in _WEIGHTS


def _unknown_tensor(folder: Path, layout: Layout, name: str) -> EnvironmentFault:
    what = next((what for sign, what in _OTHERS.items() if sign in name), None)
    return EnvironmentFault(
        f"{folder}: {layout.name} with {name}"
        + (f": {what}" if what else "")
        + "; heads of one dense Llama-like layer are computed here",
        "specbench list methods",
    )

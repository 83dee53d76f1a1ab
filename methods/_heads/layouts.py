"""Checkpoint layouts of draft heads: how files are recognised, and their tensors renamed.

How others name their tensors, each head's own file says. Whatever the layout, a head is read as
`LoadedHead`: one transformer layer and what is around it, under these names:

* `layer.*`: the layer, named as transformers names a Llama's;
* `enorm`, `hnorm`: norms of the token's embedding and of the features before they meet;
* `fc_norm`, `fc`: norm of features laid side by side, and the matrix that brings the input to the
  layer's width;
* `norm`, `lm_head`, `embed_tokens`: final norm, output matrix, embedding, where it has its own;
* `d2t`, `t2d`: its vocabulary as offsets to the target's ids, and as a mask over them.

Names and conventions are those of github.com/SafeAILab/EAGLE, vllm-project/speculators,
sgl-project/SpecForge, XiaomiMiMo/MiMo and, for Qwen3-Next's, DeepSeek's and GLM's layers inside
target checkpoints, vllm-project/vllm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specbench_cli.api import EnvironmentFault

DROPPED = ""
"""What a tensor is renamed to that is not needed: a copy of the target's, or a table."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one family of checkpoints stores a head.

    Attributes:
        kind: the head's kind (`Artifact.kind`).
        name: for people.
        mark: pattern of a tensor's name that no other layout has, or none but such as `lacks` tells
            apart.
        lacks: pattern of a tensor's name that files in this layout do not have.
        renames: beginnings of names, to ours; `{n}` is what `mark` caught; the longest wins.
        in_target: whether the head lies inside the target's checkpoint, among its other tensors.
        hidden_first: whether `fc` reads the features before the embedding.
        centred: whether norms are stored less one.
        needs: tensors, by our names, that are there beside the layer's.
    """

    kind: str
    name: str
    mark: str
    renames: Mapping[str, str]
    lacks: str = ""
    in_target: bool = False
    hidden_first: bool = False
    centred: bool = False
    needs: tuple[str, ...] = ("fc.weight",)


OWN = {name: name for name in ("fc.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")}
"""Tensors that others name as we do."""

COPIES = {"embed_tokens.": DROPPED, "lm_head.": DROPPED}
"""The target's matrices, which many checkpoints hold once more."""

CUT = {"d2t": "d2t", "t2d": "t2d"}
"""A part of the target's vocabulary: what a head says by the target's own output matrix."""


def add_prefix(prefix: str, renames: Mapping[str, str]) -> dict[str, str]:
    """The renames where all of their names begin with a prefix."""
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
"""What every layer has."""

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
"""Signs of layers that are not a Llama's, and what they are."""


def find_layout(
    folder: Path, names: Mapping[str, Tensor], layouts: Sequence[Layout]
) -> tuple[Layout, str]:
    """The layout, and what its mark caught."""
    for layout in layouts:
        found = [match for name in names if (match := re.fullmatch(layout.mark, name))]
        if found and not any(re.fullmatch(layout.lacks, name) for name in names):
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
    """The head's tensors under our names; raises EnvironmentFault for one that has no place."""
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
        less_one = layout.centred and ours.endswith("norm.weight")
        tensors[ours] = weights[name].float() + 1.0 if less_one else weights[name]
    missing = [f"layer.{name}.weight" for name in _WEIGHTS if f"layer.{name}.weight" not in tensors]
    missing += [name for name in layout.needs if name not in tensors]
    if missing:
        raise EnvironmentFault(
            f"{folder}: {layout.name} without {', '.join(missing)}", "specbench list methods"
        )
    return tensors


def to_stored_names(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors as a layout names them: what `renamed` takes back."""
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

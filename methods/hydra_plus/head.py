"""The draft head of Hydra++.

Zachary Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109, section 4.

Prefix attention: one Llama layer of its own reads the rows h_0 ... h_t that the target's output
matrix reads, and what leaves it behind a norm, h*_t, is read in place of h_t by Hydra's heads: head
k reads [h*_t, E(y_0), ..., E(y_k)]. They have further blocks, and learn the target's distributions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape, LoadedHead, head_mismatch
from methods._heads.layer import PrefixLayerHead
from methods._heads.layouts import DROPPED, Layout
from methods._heads.module import HeadOutput, PrefixHead
from methods._heads.recipe import HeadRecipe, Objective, TargetStatistics
from methods.hydra.head import make_mlp
from specbench_cli.api import Decoder

_PREFIX = "prefix_embeding_layer."  # the authors' spelling
_LEVELS, _BLOCKS, _EMBEDS, _HEAD_DIM = 4, 2, 16, 16
"""Of heads that are trained here; the authors' have 4 blocks and read embeddings as they are."""


class HydraPlus(PrefixHead):
    """The torch module. One that is trained here speaks through the target's output matrix; each of
    the authors' heads has its own.

    Args:
        blocks: of each head. embeds: see `HydraHeads`. outputs: whether the heads have output
            matrices.
    """

    kind: ClassVar[str] = "hydra++"
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            kind,
            "Hydra++ (zankner)",
            r"prefix_embeding_layer\.layers\.0\.self_attn\.q_proj\.weight",
            {
                f"{_PREFIX}layers.0.": "layer.",
                f"{_PREFIX}norm.": "norm.",
                f"{_PREFIX}embed_tokens.": DROPPED,
                "hydra_mlp.": "heads.",
                "hydra_lm_head.": "outputs.",
                "down.": "down.",
            },
            needs=("norm.weight", "heads.0.1.linear.weight"),
        ),
    )
    config: ClassVar[Mapping[str, Any]] = {
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hydra_num_heads": _LEVELS,
        "hydra_num_layers": _BLOCKS,
    }
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus=500,
        replies=500,
        losses={"paper": Objective(_LEVELS, decay=1.0), "ttt": Objective(_LEVELS)},
        mlp=64,
    )

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        has: Collection[str] = (),
        *,
        levels: int = _LEVELS,
        blocks: int = _BLOCKS,
        embeds: int | None = None,
        outputs: int = 0,
    ) -> None:
        super().__init__(shape, rope, has)
        width, self.levels = shape.hidden_size, levels
        self.down = None if embeds is None else nn.Linear(width, embeds, bias=False)
        wide = [width + (level + 1) * (embeds or width) for level in range(levels)]
        self.heads = nn.ModuleList(make_mlp(reads, width, blocks, before=True) for reads in wide)
        each = range(levels if outputs else 0)
        self.outputs = nn.ModuleList(
            nn.Sequential(nn.Identity(), nn.Linear(width, outputs)) for _ in each
        )

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """With narrow attention, and embeddings brought to few numbers."""
        wide = min(_HEAD_DIM, shape.head_dim)
        return cls(replace(shape, head_dim=wide), rope, embeds=min(_EMBEDS, shape.hidden_size))

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Sizes, by the tensors; the heads must read rows of this target's."""
        d, given = target.hidden_size, files.tensors
        levels = 1 + max(int(name.split(".")[1]) for name in given if name.startswith("heads."))
        blocks = sum(n.startswith("heads.0.") and n.endswith("linear.weight") for n in given)
        down = given.get("down.weight")
        output = given.get("outputs.0.1.weight")
        found, due = given["heads.0.1.linear.weight"].shape, d + (d if down is None else len(down))
        if files.shape.hidden_size != d or tuple(found) != (d, due):
            what = f"the first head is {list(found)}; this target's rows of {d} need {[d, due]}"
            raise head_mismatch(files, what)
        if output is not None and len(output) != target.vocab_size:
            what = f"output matrices have {len(output)} rows, this target {target.vocab_size} ids"
            raise head_mismatch(files, what)
        return {
            "levels": levels,
            "blocks": blocks,
            "embeds": None if down is None else len(down),
            "outputs": 0 if output is None else len(output),
        }

    def step(self, embedded: Tensor, rows: Tensor) -> HeadOutput:
        """The head of the level reads h* and the path's tokens: `rows` and one token more."""
        read = torch.cat((rows, embedded if self.down is None else self.down(embedded)), -1)
        return HeadOutput(read, self.heads[self.level(read)](read))

    def level(self, read: Tensor) -> int:
        """Whose turn it is: the first head reads h* and one embedding."""
        width = self.shape.hidden_size
        token = width if self.down is None else self.down.out_features
        return (read.shape[-1] - width) // token - 1


class HydraPlusHead(PrefixLayerHead):
    """The head in decoding."""

    kind: ClassVar[str] = HydraPlus.kind
    module: ClassVar[type[PrefixHead]] = HydraPlus

    def _compute_logits(self, out: HeadOutput) -> Tensor:
        steps = self.steps
        assert isinstance(steps, HydraPlus)
        if not steps.outputs:
            return super()._compute_logits(out)
        logits: Tensor = steps.outputs[steps.level(out.hidden)](out.normed)
        return logits

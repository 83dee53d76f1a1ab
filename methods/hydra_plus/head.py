"""Draft head of Hydra++.

Zachary Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109, section 4.

Prefix attention: one Llama layer reads the target's last hidden states h_0, ..., h_t. Its normed
output h*_t replaces h_t in Hydra's heads. Head k = 0, 1, ... reads [h*_t, E(y_0), ..., E(y_k)],
with the embeddings E of the last committed token y_0 and of k draft tokens. Each head has several
blocks, and is trained on the target's distributions.
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
"""Sizes of the heads that specbench trains: number of heads, blocks per head, width of the
projected embeddings, `head_dim` of the prefix attention. The authors use 4 blocks and no
projection."""


class HydraPlus(PrefixHead):
    """Hydra++'s draft heads with their prefix attention, as a torch module for training.

    Heads that specbench trains use the target's output matrix. In the authors' checkpoints, each
    head has its own output matrix.

    Args:
        levels: Number of heads.
        blocks: Number of blocks per head.
        embeds: Width to which token embeddings are projected. None means no projection.
        outputs: Number of rows of each head's output matrix. 0 if the heads use the target's output
            matrix.
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
            required=("norm.weight", "heads.0.1.linear.weight"),
        ),
    )
    config: ClassVar[Mapping[str, Any]] = {
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hydra_num_heads": _LEVELS,
        "hydra_num_layers": _BLOCKS,
    }
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=500,
        reply_updates=500,
        losses={"paper": Objective(_LEVELS, decay=1.0), "ttt": Objective(_LEVELS)},
        mlp=64,
    )

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        tensor_names: Collection[str] = (),
        *,
        levels: int = _LEVELS,
        blocks: int = _BLOCKS,
        embeds: int | None = None,
        outputs: int = 0,
    ) -> None:
        super().__init__(shape, rope, tensor_names)
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
        """Return an untrained head.

        Its prefix attention layer is small, and token embeddings are projected to a smaller width.
        """
        wide = min(_HEAD_DIM, shape.head_dim)
        return cls(replace(shape, head_dim=wide), rope, embeds=min(_EMBEDS, shape.hidden_size))

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return further constructor arguments: sizes that the shapes of the tensors determine.

        Raises:
            EnvironmentFault: The shapes do not match the target.
        """
        d, given = target.hidden_size, files.tensors
        levels = 1 + max(int(name.split(".")[1]) for name in given if name.startswith("heads."))
        blocks = sum(n.startswith("heads.0.") and n.endswith("linear.weight") for n in given)
        down = given.get("down.weight")
        output = given.get("outputs.0.1.weight")
        found, due = given["heads.0.1.linear.weight"].shape, d + (d if down is None else len(down))
        if files.shape.hidden_size != d or tuple(found) != (d, due):
            what = f"the first head has shape {list(found)}; this target needs {[d, due]}"
            raise head_mismatch(files, what)
        if output is not None and len(output) != target.vocab_size:
            what = (
                f"output matrices have {len(output)} rows; this target has {target.vocab_size} ids"
            )
            raise head_mismatch(files, what)
        return {
            "levels": levels,
            "blocks": blocks,
            "embeds": None if down is None else len(down),
            "outputs": 0 if output is None else len(output),
        }

    def step(self, embedded: Tensor, rows: Tensor) -> HeadOutput:
        """Run the head of this draft step.

        It reads the output h* of the prefix attention, and the embeddings of all tokens of the
        path.
        """
        read = torch.cat((rows, embedded if self.down is None else self.down(embedded)), -1)
        return HeadOutput(read, self.heads[self.level(read)](read))

    def level(self, read: Tensor) -> int:
        """Return the index of the head for an input of this width.

        Head 0 reads h* (the output of the prefix attention) and one embedding. Head 1 reads h* and
        two embeddings, and so on.
        """
        width = self.shape.hidden_size
        token = width if self.down is None else self.down.out_features
        return (read.shape[-1] - width) // token - 1


class HydraPlusHead(PrefixLayerHead):
    """Hydra++'s draft heads for decoding."""

    kind: ClassVar[str] = HydraPlus.kind
    module: ClassVar[type[PrefixHead]] = HydraPlus

    def _compute_logits(self, out: HeadOutput) -> Tensor:
        steps = self.steps
        assert isinstance(steps, HydraPlus)
        if not steps.outputs:
            return super()._compute_logits(out)
        logits: Tensor = steps.outputs[steps.level(out.hidden)](out.normed)
        return logits

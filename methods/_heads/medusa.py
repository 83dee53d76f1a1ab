"""The draft heads of Medusa.

Tianle Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads,
ICML 2024, arXiv:2401.10774, section 2.1.

Head k reads the row h that the target's output matrix reads, and says the token k + 2 places
behind it: U_k (h + SiLU(W_k h + b_k)). W_k begins with zeros and U_k with the target's output
matrix, so that a head begins by saying the target's own next token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from methods._heads.files import fill
from specbench_cli.api import (
    Decoder,
    FeatureHead,
    Field,
    MethodParams,
    Template,
    Weights,
    best_tree,
    tree_of_choices,
)

PUBLISHED = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
"""Tensors of the authors' checkpoints: head, place in it, of a block (`linear`) or the matrix."""


MC_SIM_7B_63 = tuple(
    tuple(map(int, ranks))
    for ranks in (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12"
        " 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050"
        " 15 101 021 90 060 0001 16 070"
    ).split()
)
"""The tree `mc_sim_7b_63` of Medusa's and Hydra's code, each node by the ranks on its path, in the
order in which its search took them: so its first n are its best n, and no node lacks its parent."""


KMASK2_8LAYER_TREE = tuple(
    (*map(int, node), rank)
    for node, n in (
        entry.split(":")
        for entry in (
            ":20 0:10 1:2 2:2 3:1 00:10 01:2 02:2 03:1 10:2 20:1 30:1 000:10 001:2 002:1 010:2"
            " 011:1 020:1 021:1 030:1 100:2 200:1 300:1 0000:10 0001:2 0002:1 0010:1 0020:1"
            " 0100:1 0200:1 0300:1 1000:1 2000:1 3000:1 00000:9 00001:2 00002:1 00010:1 00011:1"
            " 00020:1 00100:1 00200:1 01000:1 02000:1 03000:1 10000:1 20000:1 30000:1 000000:9"
            " 000001:2 000002:1 000010:1 000100:1 001000:1 002000:1 010000:1 020000:1 030000:1"
            " 100000:1 200000:1 0000000:8 0000001:2 0000002:1 0000010:1 0000011:1 0000020:1"
            " 0000100:1 0001000:1 0010000:1 0020000:1 0100000:1 0200000:1 0300000:1"
            " 1000000:1 2000000:1"
        ).split()
    )
    for rank in range(int(n))
)
"""The tree `kmask2_8layer_tree` of Falcon's code, level by level; above, how many children each of
its inner nodes has."""


class TreeParams(MethodParams):
    """Parameters of a static tree."""

    tree: Literal["likeliest", "mc_sim_7b_63"] = Field(
        "likeliest",
        description="made of the likeliest ranks; or the tree of Medusa's and Hydra's code for 7B"
        " models, the first `nodes` of its 63, as deep as there are heads",
    )


def static_tree(tree: str, nodes: int, depth: int, width: int | None = None) -> Template:
    """The tree of that name, of at most so many nodes (a published one's first), levels, and
    children of a node."""
    if tree == "likeliest":
        return best_tree(nodes, depth=depth, width=width)
    known = {"mc_sim_7b_63": MC_SIM_7B_63, "kmask2_8layer_tree": KMASK2_8LAYER_TREE}
    return tree_of_choices(known[tree][:nodes]).within(depth, width or nodes)


class MedusaHeads(FeatureHead):
    """All heads side by side: one product for the blocks of all, one for their matrices.

    Args:
        levels: how many heads.
        blocks: residual blocks a head; the authors' have one.
        own_output: whether each head has an output matrix of its own, as in the paper; without one
            all share the target's, which holds most of what a small model's heads would weigh.
    """

    kind: ClassVar[str] = "medusa"
    trained: ClassVar[Mapping[str, Any]] = {"own_output": False}

    def __init__(
        self, target: Decoder, levels: int = 4, blocks: int = 1, own_output: bool = True
    ) -> None:
        super().__init__(target, levels=levels, blocks=blocks, own_output=own_output)
        width = self.width
        self.weight = nn.Parameter(torch.zeros(blocks, levels, width, width))
        self.bias = nn.Parameter(torch.zeros(blocks, levels, 1, width))
        self.output = None
        if own_output:
            self.output = nn.Parameter(torch.empty(levels, self.vocab_size, width))
            self.output.data.copy_(output_matrix(target).expand_as(self.output))

    def forward(self, rows: Tensor) -> Tensor:
        """See `FeatureHead.forward`."""
        moved = rows.expand(self.sizes["levels"], *rows.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            moved = moved + silu(torch.baddbmm(bias, moved, weight.mT))
        return self.target.unembed(moved) if self.output is None else moved @ self.output.mT

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Ours, or the authors' (github.com/FasterDecoding/Medusa): `K.B.linear` for the blocks of
        head K, its matrix behind them."""
        weights = Weights(folder)
        found = {name: match for name in weights if (match := PUBLISHED.fullmatch(name))}
        if not found:
            return super().load(folder, decoders)
        levels = 1 + max(int(match[1]) for match in found.values())
        blocks = 1 + max((int(match[2]) for match in found.values() if match[3]), default=0)
        sizes = {"levels": levels, "blocks": blocks}
        head = cls.sized(decoders["target"], sizes, weights, folder)
        assert head.output is not None
        places = {}
        for at in range(levels):
            places[f"{at}.{blocks}.weight"] = head.output[at]
            for block in range(blocks):
                places[f"{at}.{block}.linear.weight"] = head.weight[block, at]
                places[f"{at}.{block}.linear.bias"] = head.bias[block, at, 0]
        named = {name.removeprefix("medusa_head."): weights[name] for name in weights}
        fill(places, named, f"{folder.name}: Medusa heads (FasterDecoding)", cls.kind)
        return head.ready()


def output_matrix(target: Decoder) -> Tensor:
    """The target's output matrix, [V, width], on the CPU, read off what it makes of unit rows."""
    ones = torch.eye(target.hidden_size, device=target.device, dtype=target.dtype)
    with torch.no_grad():
        return target.unembed(ones).T.contiguous().cpu()

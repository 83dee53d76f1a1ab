"""Draft heads of Hydra.

Zachary Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109, section 3.

Head k reads the hidden state h before the target's output matrix, and the target's embeddings of
the last committed token and of the k tokens drafted after it, x = [h, E(y_0), ..., E(y_k)]. It
predicts y_{k+1} as U_k (A_k x + SiLU(B_k x)). B_k starts at zero. Further blocks z + SiLU(C z) may
follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from methods._heads.files import copy_tensors
from methods.medusa.head import read_output_matrix
from specbench_cli.api import Decoder, EnvironmentFault, LevelOutput, SequentialHead, Weights

PUBLISHED = re.compile(r"hydra_(mlp|lm_head)\.(\d+)\.((\d+)\.)?.*")
"""Tensor names of the authors' checkpoints: the head, and the block in it."""


class HydraHeads(SequentialHead):
    """Draft heads, one per level.

    Args:
        levels: Number of heads.
        blocks: Number of blocks per head. The first maps its input to the target's width; further
            blocks are residual.
        own_output: Whether each head has its own output matrix, as in the paper. Otherwise all
            share the target's.
        embeds: Width of a shared projection of the embeddings, which keeps the heads of small
            models small. None: no projection, as in the paper.
    """

    kind: ClassVar[str] = "hydra"
    trained: ClassVar[Mapping[str, Any]] = {"own_output": False, "embeds": 32}

    def __init__(
        self,
        target: Decoder,
        levels: int = 4,
        blocks: int = 1,
        own_output: bool = True,
        embeds: int | None = None,
    ) -> None:
        super().__init__(target, levels=levels, blocks=blocks, own_output=own_output, embeds=embeds)
        width = target.hidden_size
        self.down = None if embeds is None else nn.Linear(width, embeds, bias=False)
        wide = [self.width + (level + 1) * (embeds or width) for level in range(levels)]
        self.heads = nn.ModuleList(make_mlp(reads, width, blocks) for reads in wide)
        self.outputs = nn.ModuleList()
        if own_output:
            self.outputs.extend(nn.Linear(width, self.vocab_size) for _ in range(levels))
            first = {"weight": read_output_matrix(target), "bias": torch.zeros(self.vocab_size)}
            for output in self.outputs.children():
                output.load_state_dict(first)

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> LevelOutput:  # type: ignore[override]
        """See `SequentialHead.forward`. The hidden output is everything that the head read."""
        embedded = self.target.embed(ids)
        read = torch.cat((rows, embedded if self.down is None else self.down(embedded)), -1)
        moved = self.heads[level](read)
        say = self.outputs[level] if self.outputs else self.target.unembed
        return LevelOutput(say(moved), read)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load our format, or the authors' (github.com/zankner/Hydra, `hydra_head_arch` "mlp").
        Only the prefixes of their tensor names differ."""
        weights, who = Weights(folder), "Hydra heads (zankner)"
        if any(name.startswith("prefix_embeding_layer.") for name in weights):
            raise EnvironmentFault(
                f"{folder.name} holds heads of Hydra++, which read a layer of their own",
                f"specbench run -m hydra++ --set hydra++.head={folder}",
            )
        found = [match for name in weights if (match := PUBLISHED.fullmatch(name))]
        if not found:
            return super().load(folder, decoders)
        told = _config(folder)
        read_below, blind = told.get("hidden_state_offset", 0), not told.get("grounded_heads", True)
        if read_below or blind:
            rows = f"read the rows of {read_below} layers below the last (hidden_state_offset)"
            odd = "read no drafted token (grounded_heads is false)" if blind else rows
            raise EnvironmentFault(
                f"{folder.name}: {who} that {odd}; here they read the last layer's, and all tokens"
                " drafted before",
                "give the folder of another: --set hydra.head=DIR",
            )
        levels = 1 + max(int(match[2]) for match in found)
        blocks = 1 + max((int(match[4]) for match in found if match[1] == "mlp"), default=0)
        sizes = {"levels": levels, "blocks": blocks}
        head = cls.from_sizes(decoders["target"], sizes, weights, folder)
        begins = {"heads.": "hydra_mlp.", "outputs.": "hydra_lm_head."}
        named = head.state_dict().items()
        copy_tensors(
            {
                begins[(own := f"{name.partition('.')[0]}.")] + name.removeprefix(own): place
                for name, place in named
            },
            weights,
            f"{folder.name}: {who}",
            "hydra",
        )
        return head.ready()


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


class FirstBlock(nn.Module):
    """A x + SiLU(B x). Starts as the first `width` numbers of its input."""

    def __init__(self, reads: int, width: int) -> None:
        super().__init__()
        self.res_connection, self.linear = nn.Linear(reads, width), nn.Linear(reads, width)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.res_connection.weight.data.fill_diagonal_(1.0)

    def forward(self, read: Tensor) -> Tensor:
        """Return [n, width]."""
        moved: Tensor = self.res_connection(read) + silu(self.linear(read))
        return moved


class ResidualBlock(nn.Module):
    """z + SiLU(C z). Starts as z."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rows: Tensor) -> Tensor:
        """Return [n, width]."""
        return rows + silu(self.linear(rows))


def make_mlp(reads: int, width: int, blocks: int, *, before: bool = False) -> nn.Sequential:
    """Return a head without its output matrix.

    `before` inserts a placeholder for dropout before each block, as in Hydra++'s checkpoints, where
    blocks have odd numbers.
    """
    each = [FirstBlock(reads, width), *(ResidualBlock(width) for _ in range(blocks - 1))]
    if not before:
        return nn.Sequential(*each)
    return nn.Sequential(*(part for block in each for part in (nn.Identity(), block)))

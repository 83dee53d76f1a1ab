"""The draft heads of Hydra.

Zachary Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109, section 3.

Head k reads the row h that the target's output matrix reads, beside the target's embeddings of the
last committed token and of the k tokens drafted behind it, x = [h, E(y_0), ..., E(y_k)], and says
y_{k+1}: U_k (A_k x + SiLU(B_k x)). B_k begins with zeros. Further blocks z + SiLU(C z) may follow.
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
"""Tensors of the authors' checkpoints: head, and block in it."""


class HydraHeads(SequentialHead):
    """One head a level.

    Args:
        levels: how many heads.
        blocks: how many there are in a head: the first brings all that is read to the target's
            width, further ones are residual.
        own_output: whether each head has an output matrix of its own, as in the paper; without one
            all share the target's.
        embeds: width to which one matrix brings all embeddings before they are read, which keeps
            heads of a small model small; None: read as they are, as in the paper.
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
        """See `SequentialHead.forward`; what it leaves is all that it read."""
        embedded = self.target.embed(ids)
        read = torch.cat((rows, embedded if self.down is None else self.down(embedded)), -1)
        moved = self.heads[level](read)
        say = self.outputs[level] if self.outputs else self.target.unembed
        return LevelOutput(say(moved), read)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Ours, or the authors' (github.com/zankner/Hydra, `hydra_head_arch` "mlp"): their names
        are ours but for what they begin with."""
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
        head = cls.sized(decoders["target"], sizes, weights, folder)
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
    """A x + SiLU(B x). Begins with the first `width` numbers that it reads."""

    def __init__(self, reads: int, width: int) -> None:
        super().__init__()
        self.res_connection, self.linear = nn.Linear(reads, width), nn.Linear(reads, width)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.res_connection.weight.data.fill_diagonal_(1.0)

    def forward(self, read: Tensor) -> Tensor:
        """[n, width]."""
        moved: Tensor = self.res_connection(read) + silu(self.linear(read))
        return moved


class ResidualBlock(nn.Module):
    """z + SiLU(C z). Begins with z."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rows: Tensor) -> Tensor:
        """[n, width]."""
        return rows + silu(self.linear(rows))


def make_mlp(reads: int, width: int, blocks: int, *, before: bool = False) -> nn.Sequential:
    """A head up to its output matrix; `before`: with a place for dropout before each block, as in
    Hydra++'s checkpoints, whose blocks have odd numbers."""
    each = [FirstBlock(reads, width), *(ResidualBlock(width) for _ in range(blocks - 1))]
    if not before:
        return nn.Sequential(*each)
    return nn.Sequential(*(part for block in each for part in (nn.Identity(), block)))

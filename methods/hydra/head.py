"""Draft heads of Hydra.

Zachary Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109, section 3.

Head k = 0, 1, ... reads x = [h, E(y_0), ..., E(y_k)]. h is the target's last hidden state. E is the
target's embedding, y_0 is the last committed token, and y_1, ..., y_k are the draft tokens after
it. Head k predicts y_{k+1} with the logits U_k (A_k x + SiLU(B_k x)). Further residual blocks z +
SiLU(C z) may precede the output matrix U_k.
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
"""Pattern of tensor names in the authors' checkpoints. Groups 2 and 4 are the head and its
block."""


class HydraHeads(SequentialHead):
    """Hydra's draft heads, one per draft level.

    Args:
        target: Target that the heads draft for.
        levels: Number of heads.
        blocks: Number of blocks per head. The first one maps the input to the target's hidden size.
            Further blocks are residual blocks.
        own_output: Whether each head has its own output matrix, as in the paper. If False, all
            heads use the target's output matrix.
        embeds: Width to which all embeddings are projected, so that the heads of small models stay
            small. None means no projection, as in the paper.
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
        input_widths = [self.width + (level + 1) * (embeds or width) for level in range(levels)]
        self.heads = nn.ModuleList(
            make_mlp(input_width, width, blocks) for input_width in input_widths
        )
        self.outputs = nn.ModuleList()
        if own_output:
            self.outputs.extend(nn.Linear(width, self.vocab_size) for _ in range(levels))
            first = {"weight": read_output_matrix(target), "bias": torch.zeros(self.vocab_size)}
            for output in self.outputs.children():
                output.load_state_dict(first)

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> LevelOutput:  # type: ignore[override]
        """Run head `level`. Return the logits, and the input of the head as hidden output."""
        embedded = self.target.embed(ids)
        read = torch.cat((rows, embedded if self.down is None else self.down(embedded)), -1)
        hidden = self.heads[level](read)
        unembed = self.outputs[level] if self.outputs else self.target.unembed
        return LevelOutput(unembed(hidden), read)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load heads in the format of specbench or of the authors' code.

        The authors' code is github.com/zankner/Hydra, with `hydra_head_arch` "mlp". Its tensor
        names have other prefixes.
        """
        weights, source = Weights(folder), "Hydra heads (zankner)"
        if any(name.startswith("prefix_embeding_layer.") for name in weights):
            raise EnvironmentFault(
                f"{folder.name} contains the heads of Hydra++, which have a prefix attention layer",
                f"specbench run -m hydra++ --set hydra++.head={folder}",
            )
        found = [match for name in weights if (match := PUBLISHED.fullmatch(name))]
        if not found:
            return super().load(folder, decoders)
        config = _config(folder)
        offset, grounded = config.get("hidden_state_offset", 0), config.get("grounded_heads", True)
        if offset or not grounded:
            setting = f"hidden_state_offset is {offset}" if grounded else "grounded_heads is false"
            raise EnvironmentFault(
                f"{folder.name}: {source}: {setting}; supported are heads that read the last hidden"
                " state (hidden_state_offset 0) and all drafted tokens (grounded_heads true)",
                "use other heads: --set hydra.head=DIR",
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
            f"{folder.name}: {source}",
            "hydra",
        )
        return head.ready()


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


class FirstBlock(nn.Module):
    """Block A x + SiLU(B x) of a Hydra head.

    Before training it returns the first `width` numbers of x.
    """

    def __init__(self, input_width: int, width: int) -> None:
        super().__init__()
        self.res_connection, self.linear = (
            nn.Linear(input_width, width),
            nn.Linear(input_width, width),
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.res_connection.weight.data.fill_diagonal_(1.0)

    def forward(self, read: Tensor) -> Tensor:
        """Return the output [n, width] for the input [n, input_width]."""
        rows: Tensor = self.res_connection(read) + silu(self.linear(read))
        return rows


class ResidualBlock(nn.Module):
    """Residual block z + SiLU(C z) of a Hydra head. Before training it returns z."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output for the input, both [n, width]."""
        return rows + silu(self.linear(rows))


def make_mlp(input_width: int, width: int, blocks: int, *, before: bool = False) -> nn.Sequential:
    """Return the blocks of a head, without its output matrix.

    Args:
        input_width: Width of the input.
        width: Hidden size of the target.
        blocks: Number of blocks.
        before: Whether to insert an identity module before each block. Checkpoints of Hydra++ have
            dropout there, so their blocks have odd numbers.
    """
    each = [FirstBlock(input_width, width), *(ResidualBlock(width) for _ in range(blocks - 1))]
    if not before:
        return nn.Sequential(*each)
    return nn.Sequential(*(part for block in each for part in (nn.Identity(), block)))

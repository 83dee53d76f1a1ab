"""The mask token of SPACE.

Hanling Yi, Feng Lin, Hongbin Li, Peiyang Ning, Xiaotian Yu, Rong Xiao: Generation Meets
Verification: Accelerating Large Language Model Inference with Smart Parallel Auto-Correct Decoding,
Findings of ACL 2024, arXiv:2402.11809; files as github.com/cteant/SPACE publishes them.

One embedding, which stands k times behind the last token: mask j says the token behind its own
place, and sees the text and the masks before it. The target learns to answer masks: it is
fine-tuned (`tuned`), so that it is another model, whose plain decoding is the baseline.

The paper fine-tunes all weights. Here every matrix of the layers gets a low-rank addition (LoRA, Hu
et al., arXiv:2106.09685), in PEFT's files: a small target's is a twentieth of its weights, and
`--target FOLDER` adds it to them. The mask is a vector of its own and no row of the vocabulary, so
that nobody can say it; of a published checkpoint it is the row `PUBLISHED_MASK`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from specbench_cli.api import Decoder, EnvironmentFault, LookAhead

PUBLISHED_MASK = 32002
"""The mask's id in the authors' checkpoints of Vicuna, behind the 32,000 tokens and two others."""


class MaskToken(LookAhead):
    """The embedding, [width].

    Args:
        levels: masks behind each token, k in the paper.
        layer: the first that they go through.
    """

    kind: ClassVar[str] = "space"
    tuned: ClassVar[int] = 8

    def __init__(self, target: Decoder, levels: int = 5, layer: int = 0) -> None:
        super().__init__(target, levels, layer)
        ids = torch.arange(min(target.vocab_size, 256), device=target.device)
        like = target.embed(ids).float().std().cpu()  # of the tokens that there are
        self.mask = nn.Parameter(like * torch.randn(target.hidden_size))

    def forward(self, rows: Tensor) -> Tensor:
        """See `LookAhead.forward`: the same behind every token."""
        return self.mask.expand(len(rows), self.sizes["levels"], -1)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Ours, or the authors' checkpoint, which the target must be."""
        file, target = folder / "config.json", decoders["target"]
        ids = json.loads(file.read_text("utf-8")).get("vocab_size") if file.is_file() else None
        if ids is None:
            return super().load(folder, decoders)
        if not PUBLISHED_MASK < ids == target.vocab_size:
            raise EnvironmentFault(
                f"{folder.name} has {ids} ids, the target {target.vocab_size}; the mask token of a"
                f" published checkpoint of SPACE is its id {PUBLISHED_MASK}, and it is the target",
                "the same to --target and to --set space.head; or specbench train space",
            )
        head = cls(target)
        head.mask.data.copy_(target.embed(torch.tensor([PUBLISHED_MASK], device=target.device))[0])
        return head.ready()

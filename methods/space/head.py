"""Mask token of SPACE.

Hanling Yi, Feng Lin, Hongbin Li, Peiyang Ning, Xiaotian Yu, Rong Xiao: Generation Meets
Verification: Accelerating Large Language Model Inference with Smart Parallel Auto-Correct Decoding,
Findings of ACL 2024, arXiv:2402.11809. File formats are those of github.com/cteant/SPACE.

The mask is one embedding, repeated k times after the last token. Mask j predicts the token after
its own position, from the text and the masks before it. The target is fine-tuned (`tuned`) to fill
masks, so it is another model, and the baseline is that model's plain decoding.

The paper fine-tunes all weights. Here every matrix of the layers gets a low-rank update (LoRA, Hu
et al., arXiv:2106.09685), in PEFT's file format. For a small target this is a twentieth of its
weights, and `--target FOLDER` applies it. The mask is a separate vector, not a row of the
vocabulary, so the target can never generate it. In a published checkpoint it is the row
`PUBLISHED_MASK`.
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
"""Id of the mask in the authors' checkpoints of Vicuna, after the 32,000 tokens and two others."""


class MaskToken(LookAhead):
    """Embedding of the mask, [width].

    Args:
        levels: Number of masks after each token, k in the paper.
        layer: First layer that processes the masks.
    """

    kind: ClassVar[str] = "space"
    tuned: ClassVar[int] = 8

    def __init__(self, target: Decoder, levels: int = 5, layer: int = 0) -> None:
        super().__init__(target, levels, layer)
        ids = torch.arange(min(target.vocab_size, 256), device=target.device)
        like = target.embed(ids).float().std().cpu()  # magnitude of existing embeddings
        self.mask = nn.Parameter(like * torch.randn(target.hidden_size))

    def forward(self, rows: Tensor) -> Tensor:
        """See `LookAhead.forward`. The masks are the same after every token."""
        return self.mask.expand(len(rows), self.sizes["levels"], -1)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load our format, or the authors' checkpoint, which must then also be the target."""
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

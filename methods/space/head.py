"""Mask token of SPACE.

Hanling Yi, Feng Lin, Hongbin Li, Peiyang Ning, Xiaotian Yu, Rong Xiao: Generation Meets
Verification: Accelerating Large Language Model Inference with Smart Parallel Auto-Correct Decoding,
Findings of ACL 2024, arXiv:2402.11809. File formats are those of github.com/cteant/SPACE.

The mask token follows the last token k times. Mask j = 1, ..., k predicts the token after its own
position, from the text and the masks before it. The model is fine-tuned to fill masks. The
fine-tuned model is the target of the run, and vanilla decodes with it too.

The paper fine-tunes all weights. specbench trains a low-rank update of every matrix in the layers
(LoRA, Hu et al., arXiv:2106.09685) and stores it in PEFT's file format. The option `--target
FOLDER` applies the update. The embedding of the mask is a separate vector, so the target can never
generate the mask. In the authors' checkpoints, row `PUBLISHED_MASK` of the embedding is the mask.
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
"""Id of the mask token in the authors' Vicuna checkpoints."""


class MaskToken(LookAhead):
    """Embedding of SPACE's mask token, [hidden].

    Args:
        target: Fine-tuned target.
        levels: Number of masks after each token (k in the paper).
        layer: Number of the first layer that processes the masks.
    """

    kind: ClassVar[str] = "space"
    tuned: ClassVar[int] = 8

    def __init__(self, target: Decoder, levels: int = 5, layer: int = 0) -> None:
        super().__init__(target, levels, layer)
        ids = torch.arange(min(target.vocab_size, 256), device=target.device)
        scale = target.embed(ids).float().std().cpu()  # magnitude of the target's embeddings
        self.mask = nn.Parameter(scale * torch.randn(target.hidden_size))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the mask embeddings that follow each token, [n, levels, hidden]."""
        return self.mask.expand(len(rows), self.sizes["levels"], -1)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the mask token from specbench's format, or from a checkpoint of the authors.

        Raises:
            EnvironmentFault: The folder is a checkpoint of the authors, and the target of the run
                is another model.
        """
        file, target = folder / "config.json", decoders["target"]
        ids = json.loads(file.read_text("utf-8")).get("vocab_size") if file.is_file() else None
        if ids is None:
            return super().load(folder, decoders)
        if not PUBLISHED_MASK < ids == target.vocab_size:
            raise EnvironmentFault(
                f"{folder.name} has {ids} token ids, and the target has {target.vocab_size}; a"
                " checkpoint of the authors must be the target, and contain token"
                f" {PUBLISHED_MASK}",
                "use the same folder for --target and --set space.head, or: specbench train space",
            )
        head = cls(target)
        head.mask.data.copy_(target.embed(torch.tensor([PUBLISHED_MASK], device=target.device))[0])
        return head.ready()

"""Draft head of P-EAGLE.

Mude Hui et al.: P-EAGLE: Parallel-Drafting EAGLE with Scalable Training, 2026, arXiv:2602.01469. A
checkpoint has the format that vLLM reads: the tensors of EAGLE-3, the tensor `mask_hidden` [1,
layers * width], and `ptd_token_id` in config.json.

P-EAGLE extends EAGLE-3's head by masks. The masks predict the second and later draft tokens in the
same forward. Mask k = 1, 2, ... is k positions after position t. At this mask, the embedding of the
mask token replaces the unknown token, and the learned vector `mask_hidden` replaces the target's
hidden states. The mask attends to the text up to t and to earlier masks, and predicts token t + 2 +
k.

Differs from the paper: heads have one layer (the paper uses up to four layers, and specbench
rejects such files). Training uses all masks after every position. The paper drops many of the later
masks to save memory. The mask token is the last id of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from methods._heads.files import HeadShape, LoadedHead
from methods._heads.layouts import Layout
from methods._heads.module import DraftHead, HeadOutput
from methods._heads.recipe import HeadRecipe, Objective
from methods._heads.slots import HeadInput
from methods.eagle3.head import Eagle3, Eagle3Head
from specbench_cli.api import Decoder, Features, LayerReader, ModelInput, ModelOutput

MASKED = "mask_hidden"


class PEagle(Eagle3):
    """P-EAGLE's draft head as a torch module, for training.

    Args:
        mask: Token id of the mask. None means the last id of the vocabulary.
        eagle3: Further arguments of `Eagle3`.
    """

    kind: ClassVar[str] = "p-eagle"
    layouts: ClassVar[tuple[Layout, ...]] = tuple(
        replace(
            each,
            kind="p-eagle",
            name=each.name.replace("EAGLE-3", "P-EAGLE"),
            excludes="",
            renames={**each.renames, MASKED: MASKED},
            required=(*each.required, MASKED),
        )
        for each in Eagle3.layouts
    )
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=60,
        reply_updates=240,
        sequences=2,
        losses={"paper": Objective(steps=5, text_labels=True), "ttt": Objective(steps=5)},
        mlp=384,
        draft_vocab_size=2048,
    )

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        tensor_names: Collection[str] = (),
        *,
        mask: int | None = None,
        **eagle3: Any,
    ) -> None:
        super().__init__(shape, rope, tensor_names, **eagle3)
        self.mask = eagle3["own"].size - 1 if mask is None else mask
        rows = torch.randn(1, self.fc.in_features)
        self.mask_hidden = nn.Parameter(rows if self.size is None else rows * self.size)

    def file_config(self) -> dict[str, Any]:
        """Return the entries that training adds to config.json, with the mask token, as vLLM
        expects.
        """
        return {**super().file_config(), "parallel_drafting": True, "ptd_token_id": self.mask}

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return the constructor arguments of `Eagle3`, and the id of the mask token."""
        mask = files.read_token_id(files.config, "ptd_token_id", target)
        return {**super().init_args(files, target), "mask": mask}

    def forward(self, x: HeadInput) -> HeadOutput:
        """Run one draft step. Later steps read `mask_hidden` in place of the head's own output."""
        if x.slots is None:
            x = x._replace(features=self.project_features(self.mask_hidden).expand_as(x.features))
        return super().forward(x)


class PEagleHead(Eagle3Head):
    """P-EAGLE's draft head for decoding.

    The input of a forward has n rows of hidden states and n + k token ids: the next token of each
    row, and k masks. The forward returns logits at the last of the n tokens and at each mask. It
    drops the KV entries of the masks.

    Attributes:
        mask: Token id of the mask.
    """

    kind: ClassVar[str] = PEagle.kind
    module: ClassVar[type[DraftHead]] = PEagle
    parallel: ClassVar[bool] = True
    predicts_own_position: ClassVar[bool] = False

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        super()._read_extra_weights(read, module)
        assert isinstance(module, PEagle)
        self.mask, self._masked = module.mask, read.get(MASKED)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run one forward. Return the logits at the last token and at the masks."""
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        if not isinstance(x, Features):
            raise ValueError(f"{self.name} needs Features as input, not {type(x).__name__}")
        n, k, start = x.rows.shape[1], x.ids.shape[1] - x.rows.shape[1], state.length()
        rows = torch.cat((x.rows, self._masked.expand(1, k, -1)), 1)
        positions = None if logits_at is None else torch.arange(n - 1, n + k, device=self.device)
        out = super().execute(model_input._replace(x=Features(x.ids, rows), logits_at=positions))
        state.rollback(0, start + n)
        return out

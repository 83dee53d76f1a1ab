"""Draft model of Chimera.

Ziqian Zeng, Jiahong Yu, Qianshi Pang, Zihao Wang, Huiping Zhuang, Hongen Shao, Xiaofeng Zou:
Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all
Tokens, arXiv:2402.15758, section 3.

The trigram encoder maps the embeddings of the last three tokens to z = W_2 SiLU(W_1 [E(x_-2),
E(x_-1), E(x_0)]). The full context encoder is one Llama layer over [H_1 ... H_n, z_1 ... z_k]. H
are the target's last hidden states of all committed tokens. z are the encodings of the last
committed token and of the tokens drafted after it. Each attends to everything before it. The
layer's output at z_i is o_i, and head i predicts the next token from [H_n, o_i].

The authors' head i is a matrix U_i [V, 2 width] that starts as two copies of the output matrix.
Ours is U_i = U M_i, with the target's own U and M_i [width, 2 width], which starts by reading only
H_n. Their code adds the input of SiLU to its output; this implementation follows the paper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from methods._heads.files import LoadedHead
from methods._heads.layouts import DRAFT_VOCABULARY, Layout
from methods._heads.module import HeadOutput
from methods._heads.recipe import HeadRecipe, Objective
from methods._heads.slots import HeadInput, LlamaLayer, PastKeyValues, gather_slots
from methods._heads.unfused import TwoStepHead, UnfusedHead
from methods._heads.vocabulary import HeadVocabulary
from specbench_cli.api import Decoder

LEVELS = 3


class Chimera(TwoStepHead):
    """Chimera's draft model as a torch module. `fc` is W_1 and `last` is W_2."""

    kind: ClassVar[str] = "chimera"
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            kind,
            "Chimera (specbench)",
            r"heads\.0\.weight",
            DRAFT_VOCABULARY
            | {
                "trigram.0.": "fc.",
                "trigram.1.": "last.",
                "context.": "layer.",
                "heads.": "mixed.",
            },
        ),
    )
    config: ClassVar[Mapping[str, Any]] = {"architectures": ["ChimeraHeads"]}
    hidden_widths: ClassVar[int] = 3
    lookback: ClassVar[int] = 2
    levels = LEVELS
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=20,
        reply_updates=80,
        sequences=2,
        mlp=96,
        losses={
            "paper": Objective(steps=LEVELS, decay=1.0, text_labels=True),
            "ttt": Objective(LEVELS),
        },
    )

    def build(self, has: Collection[str]) -> None:
        """See `DraftHead.build`."""
        width = self.shape.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.last = nn.Linear(width, width, bias=False)
        self.layer = LlamaLayer(width, self.shape, self.rope, has, normed=True)
        self.mixed = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(LEVELS))

    def init_weights(self, std: float) -> None:
        """Initialise the heads so that they first predict the target's next token."""
        super().init_weights(std)
        for head in self.mixed:
            assert isinstance(head, nn.Linear)
            nn.init.eye_(head.weight)

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return the draft vocabulary. All sizes follow from the tensors."""
        return {"own": HeadVocabulary.from_files(files, target)}

    def project_context(
        self, embedded: Tensor, features: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of H [sequences, n, width] at their positions."""
        return self.layer.self_attn.project_kv(self._normed(features), places)

    def concatenate_trigrams(self, embedded: Tensor, places: Tensor) -> Tensor:
        """Return the last three embeddings at each of n positions, [sequences, n, 3 width].

        Before the start of the text the first embedding is repeated.
        """
        at = torch.arange(embedded.shape[1], device=embedded.device)
        backs = [(at - places.clamp(max=back)).clamp(min=0) for back in (2, 1)]
        before = [gather_slots(embedded, back) for back in backs]
        return torch.cat((*before, embedded), -1)

    def draft_from_trigrams(
        self, grams: Tensor, features: Tensor, places: Tensor, past: PastKeyValues
    ) -> HeadOutput:
        """Draft the next tokens after slots whose last three embeddings are `grams`.

        Args:
            grams: [sequences, slots, 3 width].
            features: H_n of each slot.
            places: Positions of the drafted rows.
        """
        z = self.last(silu(self.fc(grams)))
        rows, attention = self._normed(z), self.layer.self_attn
        past.own.append(attention.project_kv(rows, places))
        o = z + attention(rows, places, past)
        o = o + self.layer.mlp(self.layer.post_attention_layernorm(o))
        head = self.mixed[min(len(past.own), LEVELS) - 1]
        width = features.shape[-1]
        return HeadOutput(
            torch.cat((features, grams[..., width:]), -1), head(torch.cat((features, o), -1))
        )

    def draft_first(self, x: HeadInput) -> HeadOutput:
        """See `TwoStepHead`. `HeadOutput.hidden` is H_n and the last two embeddings."""
        assert x.slots is not None
        grams = gather_slots(self.concatenate_trigrams(x.embedded, x.positions), x.slots)
        places = x.positions.gather(1, x.slots) + 1
        return self.draft_from_trigrams(grams, gather_slots(x.features, x.slots), places, x.past)

    def draft_next(self, x: HeadInput) -> HeadOutput:
        """See `TwoStepHead`."""
        width = x.embedded.shape[-1]
        grams = torch.cat((x.features[..., width:], x.embedded), -1)
        return self.draft_from_trigrams(grams, x.features[..., :width], x.positions + 1, x.past)

    def _normed(self, rows: Tensor) -> Tensor:
        assert self.layer.input_layernorm is not None
        normed: Tensor = self.layer.input_layernorm(rows)
        return normed


class ChimeraHead(UnfusedHead):
    """Head in decoding: the same module."""

    kind: ClassVar[str] = Chimera.kind
    module: ClassVar[type[TwoStepHead]] = Chimera

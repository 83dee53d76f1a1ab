"""Draft model of Chimera.

Ziqian Zeng, Jiahong Yu, Qianshi Pang, Zihao Wang, Huiping Zhuang, Hongen Shao, Xiaofeng Zou:
Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all
Tokens, arXiv:2402.15758, section 3.

Trigram encoder: z = W_2 SiLU(W_1 [E(x_-2), E(x_-1), E(x_0)]), from the embeddings E of the last
three tokens. Full context encoder: one Llama layer over [H_1, ..., H_n, z_1, ..., z_k]. H_1 to H_n
are the target's last hidden states of the committed tokens. z_1 belongs to the last committed
token, and z_2, z_3, ... to the tokens drafted after it. Attention is causal. Head i predicts the
next token from [H_n, o_i], where o_i is the output of the layer at z_i.

In the authors' code, head i is a matrix U_i [vocab, 2 * width], which starts as two copies of the
target's output matrix. Here it is U M_i, with the target's output matrix U and a trained matrix M_i
[width, 2 * width]. M_i is initialised so that the head reads only H_n. The authors' code also adds
the input of SiLU to the output of SiLU. This implementation follows the paper and does not.
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
    """Chimera's draft model as a torch module, for training.

    The module docstring defines the symbols: `fc` is W_1, `last` is W_2, and `mixed` are the M_i.
    """

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

    def build(self, tensor_names: Collection[str]) -> None:
        """Create the submodules of the head.

        The constructor of the base class calls this method.
        """
        width = self.shape.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.last = nn.Linear(width, width, bias=False)
        self.layer = LlamaLayer(width, self.shape, self.rope, tensor_names, normed=True)
        self.mixed = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(LEVELS))

    def init_weights(self, std: float) -> None:
        """Initialise each head so that it repeats the target's prediction before training."""
        super().init_weights(std)
        for head in self.mixed:
            assert isinstance(head, nn.Linear)
            nn.init.eye_(head.weight)

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return the draft vocabulary as constructor argument."""
        return {"own": HeadVocabulary.from_files(files, target)}

    def project_context(
        self, embedded: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the full context H, the target's last hidden states."""
        return self.layer.self_attn.project_kv(self._normed(features), positions)

    def concatenate_trigrams(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Return the last three embeddings at each position, [sequences, n, 3 * width].

        Before the start of the text, the embedding of the first token is used.
        """
        at = torch.arange(embedded.shape[1], device=embedded.device)
        backs = [(at - positions.clamp(max=back)).clamp(min=0) for back in (2, 1)]
        before = [gather_slots(embedded, back) for back in backs]
        return torch.cat((*before, embedded), -1)

    def draft_from_trigrams(
        self, grams: Tensor, features: Tensor, positions: Tensor, past: PastKeyValues
    ) -> HeadOutput:
        """Run one draft step. A slot is a position of the text to draft from.

        Args:
            grams: Embeddings of the last three tokens, [sequences, slots, 3 * width].
            features: Target's last hidden state at each slot, [sequences, slots, width].
            positions: Positions of the drafted rows.
        """
        z = self.last(silu(self.fc(grams)))
        rows, attention = self._normed(z), self.layer.self_attn
        past.own.append(attention.project_kv(rows, positions))
        o = z + attention(rows, positions, past)
        o = o + self.layer.mlp(self.layer.post_attention_layernorm(o))
        head = self.mixed[min(len(past.own), LEVELS) - 1]
        width = features.shape[-1]
        return HeadOutput(
            torch.cat((features, grams[..., width:]), -1), head(torch.cat((features, o), -1))
        )

    def draft_first(self, x: HeadInput) -> HeadOutput:
        """Run the first draft step.

        `HeadOutput.hidden` contains the target's last hidden state and the last two embeddings.
        """
        assert x.slots is not None
        grams = gather_slots(self.concatenate_trigrams(x.embedded, x.positions), x.slots)
        positions = x.positions.gather(1, x.slots) + 1
        return self.draft_from_trigrams(grams, gather_slots(x.features, x.slots), positions, x.past)

    def draft_next(self, x: HeadInput) -> HeadOutput:
        """Run a later draft step."""
        width = x.embedded.shape[-1]
        grams = torch.cat((x.features[..., width:], x.embedded), -1)
        return self.draft_from_trigrams(grams, x.features[..., :width], x.positions + 1, x.past)

    def _normed(self, rows: Tensor) -> Tensor:
        assert self.layer.input_layernorm is not None
        normed: Tensor = self.layer.input_layernorm(rows)
        return normed


class ChimeraHead(UnfusedHead):
    """Chimera's draft model for decoding."""

    kind: ClassVar[str] = Chimera.kind
    module: ClassVar[type[TwoStepHead]] = Chimera

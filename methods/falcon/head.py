"""Draft head of Falcon.

Xiangxiang Gao, Weisheng Xie, Yiwei Xiang, Feng Ji: Falcon: Faster and Parallel Inference of Large
Language Models through Enhanced Semi-Autoregressive Drafting and Custom-Designed Decoding Tree,
AAAI 2025, arXiv:2412.12639.

A pair consists of the feature f_j, which is the target's last hidden state, and the token x_{j+1},
as in EAGLE. One pass over the last k pairs (a block) predicts the next k features. The pairs go
through an LSTM of two layers, and then through one Llama layer with the relaxed causal mask: the
pairs of a block attend to each other and to all earlier pairs. The output at pair j is f_{j+k},
which the target's output matrix maps to the logits of x_{j+k+1}. As in the paper, k is 2.

Differs from the paper: the LSTM reads the last k pairs only and has width `INNER`. Its output is
added to a linear map of the pair. In the authors' code the LSTM runs over the batch dimension by
mistake, so it does not connect tokens. specbench's training does not show future tokens to the head
(no glancing).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from methods._heads.layouts import DRAFT_VOCABULARY, Layout
from methods._heads.module import HeadOutput
from methods._heads.recipe import HeadRecipe, Objective
from methods._heads.slots import HeadInput, LlamaLayer, PastKeyValues, gather_slots
from methods._heads.unfused import TwoStepHead, UnfusedHead

BLOCK, INNER = 2, 64
"""The block size k, and the width of the LSTM."""


class Falcon(TwoStepHead):
    """Falcon's draft head as a torch module, for training.

    One pass predicts k features. A pair is a feature with the next token. `HeadOutput.hidden`
    concatenates the k features of the last pass, the k - 1 pairs before them, and the embeddings of
    the tokens drafted from these features so far.
    """

    kind: ClassVar[str] = "falcon"
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            kind,
            "Falcon (specbench)",
            r"lstm\.0\.weight_ih",
            DRAFT_VOCABULARY
            | {"fc.": "fc.", "lstm.": "lstm.", "up.": "up.", "layers.0.": "layer."},
        ),
    )
    config: ClassVar[Mapping[str, Any]] = {"architectures": ["FalconHead"]}
    hidden_widths: ClassVar[int] = BLOCK + 2 * (BLOCK - 1)
    lookback: ClassVar[int] = 2 * (BLOCK - 1)
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=20,
        reply_updates=80,
        sequences=2,
        mlp=256,
        losses={
            "paper": Objective(steps=BLOCK, decay=1.0, ce=0.1, feature=1.0, noise=0.2),
            "ttt": Objective(steps=2 * BLOCK, feature=0.1),
        },
    )

    def build(self, tensor_names: Collection[str]) -> None:
        """Create the submodules of the head.

        The constructor of the base class calls this method.
        """
        width = self.shape.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.lstm = nn.ModuleList(nn.LSTMCell(reads, INNER) for reads in (2 * width, INNER))
        self.up = nn.Linear(INNER, width, bias=False)
        self.layer = LlamaLayer(width, self.shape, self.rope, tensor_names, normed=False)

    def encode_pairs(self, windows: Tensor) -> Tensor:
        """Run the LSTM on pairs of a feature and the next token.

        Return the layer's input, [..., width].

        Args:
            windows: The last k pairs at each position, [..., k, 2 * width].
        """
        steps = list(windows.flatten(0, -3).unbind(1))
        for cell in self.lstm:
            state = None
            for at, step in enumerate(steps):
                state = cell(step, state)
                steps[at] = state[0]
        rows: Tensor = self.fc(windows[..., -1, :])
        return rows.add(self.up(steps[-1]).unflatten(0, windows.shape[:-2]))

    def encode_text(self, pairs: Tensor, positions: Tensor) -> Tensor:
        """Run the LSTM on all pairs of a text. Return the layer's input, [sequences, n, width].

        A pair is a feature with the next token. Before the start of the text, the first pair is
        repeated.

        Args:
            pairs: [sequences, n, 2 * width].
            positions: Positions of the pairs, [sequences, n].
        """
        at = torch.arange(pairs.shape[1], device=pairs.device)
        ago = [positions.clamp(max=back) for back in reversed(range(BLOCK))]
        return self.encode_pairs(
            torch.stack([gather_slots(pairs, (at - each).clamp(min=0)) for each in ago], 2)
        )

    def project_context(
        self, embedded: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the text."""
        rows = self.encode_text(torch.cat((embedded, features), -1), positions)
        return self.layer.self_attn.project_kv(rows, positions)

    def run_block(self, rows: Tensor, positions: Tensor, past: PastKeyValues) -> Tensor:
        """Run the layer on blocks of k pairs, and return the next k features of each block.

        Args:
            rows: Input of the layer, [sequences, slots, k, width]. The result has the same shape.
            positions: Positions of the pairs, [sequences, slots, k].
            past: Keys and values that the pairs attend to, including those of the block itself.
        """
        layer, pairs = self.layer, zip(rows.unbind(2), positions.unbind(2), strict=True)
        outputs = [
            layer.add_residuals(row, layer.self_attn(row, place, past)) for row, place in pairs
        ]
        return torch.stack(outputs, 2)

    def run_first_block(self, x: HeadInput) -> Tensor:
        """Run the head on the last k pairs before each slot.

        Return `HeadOutput.hidden` without embeddings of draft tokens.
        """
        assert x.slots is not None
        pairs, positions, slots = torch.cat((x.embedded, x.features), -1), x.positions, x.slots
        rows, at = self.encode_text(pairs, positions), positions.gather(1, slots)
        back = [at.clamp(max=ago) for ago in reversed(range(BLOCK))]
        of_block = torch.stack([gather_slots(rows, slots - ago) for ago in back], 2)
        features = self.run_block(of_block, torch.stack([at - ago for ago in back], 2), x.past)
        tail = [gather_slots(pairs, slots - ago) for ago in back[1:]]
        return torch.cat((features.flatten(2), *tail), -1)

    def run_next_block(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, past: PastKeyValues
    ) -> Tensor:
        """Run the head on the k tokens drafted since its previous pass.

        Return `HeadOutput.hidden` without embeddings of draft tokens.

        Args:
            hidden: `HeadOutput.hidden` of the previous pass.
            embedded: Embeddings of the k tokens, [sequences, slots, k, width].
            positions: Position of the last token, [sequences, slots].
        """
        width = embedded.shape[-1]
        features = hidden[..., : BLOCK * width].unflatten(-1, (BLOCK, width))
        tail = hidden[..., BLOCK * width :].unflatten(-1, (BLOCK - 1, 2 * width))
        pairs = torch.cat((tail, torch.cat((embedded, features), -1)), 2)
        rows = self.encode_pairs(pairs.unfold(2, BLOCK, 1).transpose(-1, -2))
        each = positions[..., None] + torch.arange(1 - BLOCK, 1, device=hidden.device)
        for row, place in zip(rows.unbind(2), each.unbind(2), strict=True):
            past.own.append(self.layer.self_attn.project_kv(row, place))
        outputs = self.run_block(rows, each, past)
        return torch.cat((outputs.flatten(2), pairs[:, :, 1 - BLOCK or BLOCK :].flatten(2)), -1)

    def draft_first(self, x: HeadInput) -> HeadOutput:
        """Run the head once to predict k features. Return the first feature."""
        hidden = self.run_first_block(x)
        return HeadOutput(hidden, hidden[..., : x.embedded.shape[-1]])

    def draft_next(self, x: HeadInput) -> HeadOutput:
        """Return the next of the k predicted features. Run the head again if all k are used."""
        width = x.embedded.shape[-1]
        hidden = torch.cat((x.features, x.embedded), -1)
        drafted = hidden[..., self.hidden_widths * width :].unflatten(-1, (-1, width))
        done = drafted.shape[2] % BLOCK
        if not done:
            hidden = self.run_next_block(
                hidden[..., : self.hidden_widths * width], drafted, x.positions, x.past
            )
        return HeadOutput(hidden, hidden[..., done * width : (done + 1) * width])


class FalconHead(UnfusedHead):
    """Falcon's draft head for decoding.

    The first forward drafts k tokens after the committed text. A later forward reads k draft tokens
    of each path, and drafts k tokens after each path.
    """

    kind: ClassVar[str] = Falcon.kind
    block_size: ClassVar[int] = BLOCK
    module: ClassVar[type[TwoStepHead]] = Falcon
    head: Falcon

    def draft_first(self, x: HeadInput) -> HeadOutput:
        """Run the head on the committed text.

        Return one row for each of the k predicted features.
        """
        return self._split_block(self.head.run_first_block(x))

    def draft_next(self, x: HeadInput) -> HeadOutput:
        """Run the head on k draft tokens per path. Return one row for each predicted feature."""
        past, n, tokens = x.past, BLOCK, x.embedded.unflatten(1, (-1, BLOCK))
        mine = PastKeyValues(past.mask[:, :, ::BLOCK], past.text)
        mine.own += [(keys[:, :, ::BLOCK], values[:, :, ::BLOCK]) for keys, values in past.own]
        rows, positions = x.features[:, ::BLOCK], x.positions[:, ::BLOCK] + BLOCK
        hidden = self.head.run_next_block(rows, tokens, positions, mine)
        past.own[:] = [(k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)) for k, v in mine.own]
        return self._split_block(hidden)

    def _split_block(self, hidden: Tensor) -> HeadOutput:
        features = hidden[..., : BLOCK * self.hidden_size].unflatten(-1, (BLOCK, -1)).flatten(1, 2)
        return HeadOutput(hidden.repeat_interleave(BLOCK, 1), features)

"""Draft head of Falcon.

Xiangxiang Gao, Weisheng Xie, Yiwei Xiang, Feng Ji: Falcon: Faster and Parallel Inference of Large
Language Models through Enhanced Semi-Autoregressive Drafting and Custom-Designed Decoding Tree,
AAAI 2025, arXiv:2412.12639.

Like EAGLE's head, it joins the feature f_j, which the target's output matrix reads, and the token
x_{j+1} to a pair. But one pass over the last k pairs predicts the next k features. Pairs go through
an LSTM of two layers, then one Llama layer under the relaxed causal mask: the k pairs of a block
attend to each other and to everything before. The output at pair j is f_{j+k}, which gives the
logits of x_{j+k+1}.

As in the paper: all of the above, and k = 2. Differs from the paper: the LSTM runs over the k pairs
up to its own, has width `INNER`, and adds to a linear map of the pair. The authors' LSTM takes the
batch for the sequence, so it does not recur over tokens. There is no glancing: training with the
published loss (`paper`) and with `ttt`, which drafts from the head's own features, shows no future
tokens.
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
"""k, the number of features per pass, and the width of the LSTM."""


class Falcon(TwoStepHead):
    """Falcon's head as a torch module.

    `HeadOutput.hidden` contains the k features of a pass, the k - 1 pairs before them, and the
    embeddings of their tokens that were drafted since.
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

    def build(self, has: Collection[str]) -> None:
        """See `DraftHead.build`."""
        width = self.shape.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.lstm = nn.ModuleList(nn.LSTMCell(reads, INNER) for reads in (2 * width, INNER))
        self.up = nn.Linear(INNER, width, bias=False)
        self.layer = LlamaLayer(width, self.shape, self.rope, has, normed=False)

    def encode_pairs(self, windows: Tensor) -> Tensor:
        """Return the layer's input [..., width] from the last k pairs [..., k, 2 width] at each
        position."""
        steps = list(windows.flatten(0, -3).unbind(1))
        for cell in self.lstm:
            state = None
            for at, step in enumerate(steps):
                state = cell(step, state)
                steps[at] = state[0]
        rows: Tensor = self.fc(windows[..., -1, :])
        return rows.add(self.up(steps[-1]).unflatten(0, windows.shape[:-2]))

    def encode_text(self, pairs: Tensor, places: Tensor) -> Tensor:
        """Return `rows` for a text's pairs [sequences, n, 2 width]. Before the start the first is
        repeated."""
        at = torch.arange(pairs.shape[1], device=pairs.device)
        ago = [places.clamp(max=back) for back in reversed(range(BLOCK))]
        return self.encode_pairs(
            torch.stack([gather_slots(pairs, (at - each).clamp(min=0)) for each in ago], 2)
        )

    def project_context(
        self, embedded: Tensor, features: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of a text."""
        rows = self.encode_text(torch.cat((embedded, features), -1), places)
        return self.layer.self_attn.project_kv(rows, places)

    def run_block(self, rows: Tensor, places: Tensor, past: PastKeyValues) -> Tensor:
        """Run a pass and return the features of the next k positions, in the shape of `rows`.

        Args:
            rows: [sequences, slots, k, width].
            places: [sequences, slots, k].
            past: Keys and values that the rows attend to, including their own.
        """
        layer, pairs = self.layer, zip(rows.unbind(2), places.unbind(2), strict=True)
        made = [layer.add_residuals(row, layer.self_attn(row, place, past)) for row, place in pairs]
        return torch.stack(made, 2)

    def run_first_block(self, x: HeadInput) -> Tensor:
        """Run the first pass after the `slots` of a text, and return its output."""
        assert x.slots is not None
        pairs, places, slots = torch.cat((x.embedded, x.features), -1), x.positions, x.slots
        rows, at = self.encode_text(pairs, places), places.gather(1, slots)
        back = [at.clamp(max=ago) for ago in reversed(range(BLOCK))]
        of_block = torch.stack([gather_slots(rows, slots - ago) for ago in back], 2)
        features = self.run_block(of_block, torch.stack([at - ago for ago in back], 2), x.past)
        tail = [gather_slots(pairs, slots - ago) for ago in back[1:]]
        return torch.cat((features.flatten(2), *tail), -1)

    def run_next_block(
        self, left: Tensor, embedded: Tensor, places: Tensor, past: PastKeyValues
    ) -> Tensor:
        """Run a further pass over k drafted tokens, and return its output.

        Args:
            left: Output of the previous pass.
            embedded: Embeddings of the tokens, [sequences, slots, k, width].
            places: Position of the last token, [sequences, slots].
        """
        width = embedded.shape[-1]
        features = left[..., : BLOCK * width].unflatten(-1, (BLOCK, width))
        tail = left[..., BLOCK * width :].unflatten(-1, (BLOCK - 1, 2 * width))
        pairs = torch.cat((tail, torch.cat((embedded, features), -1)), 2)
        rows = self.encode_pairs(pairs.unfold(2, BLOCK, 1).transpose(-1, -2))
        each = places[..., None] + torch.arange(1 - BLOCK, 1, device=left.device)
        for row, place in zip(rows.unbind(2), each.unbind(2), strict=True):
            past.own.append(self.layer.self_attn.project_kv(row, place))
        made = self.run_block(rows, each, past)
        return torch.cat((made.flatten(2), pairs[:, :, 1 - BLOCK or BLOCK :].flatten(2)), -1)

    def draft_first(self, x: HeadInput) -> HeadOutput:
        """See `TwoStepHead`. This step is a pass."""
        left = self.run_first_block(x)
        return HeadOutput(left, left[..., : x.embedded.shape[-1]])

    def draft_next(self, x: HeadInput) -> HeadOutput:
        """See `TwoStepHead`. Every k-th step is a pass. The other steps read its output."""
        width = x.embedded.shape[-1]
        left = torch.cat((x.features, x.embedded), -1)
        drafted = left[..., self.hidden_widths * width :].unflatten(-1, (-1, width))
        done = drafted.shape[2] % BLOCK
        if not done:
            left = self.run_next_block(
                left[..., : self.hidden_widths * width], drafted, x.positions, x.past
            )
        return HeadOutput(left, left[..., done * width : (done + 1) * width])


class FalconHead(UnfusedHead):
    """Head in decoding. A forward drafts k tokens after the text, or after every k rows fed."""

    kind: ClassVar[str] = Falcon.kind
    block_size: ClassVar[int] = BLOCK
    module: ClassVar[type[TwoStepHead]] = Falcon
    head: Falcon

    def draft_first(self, x: HeadInput) -> HeadOutput:
        """See `UnfusedHead`."""
        return self._split_block(self.head.run_first_block(x))

    def draft_next(self, x: HeadInput) -> HeadOutput:
        """See `UnfusedHead`."""
        past, n, tokens = x.past, BLOCK, x.embedded.unflatten(1, (-1, BLOCK))
        mine = PastKeyValues(past.mask[:, :, ::BLOCK], past.text)
        mine.own += [(keys[:, :, ::BLOCK], values[:, :, ::BLOCK]) for keys, values in past.own]
        rows, places = x.features[:, ::BLOCK], x.positions[:, ::BLOCK] + BLOCK
        left = self.head.run_next_block(rows, tokens, places, mine)
        past.own[:] = [(k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)) for k, v in mine.own]
        return self._split_block(left)

    def _split_block(self, left: Tensor) -> HeadOutput:
        features = left[..., : BLOCK * self.hidden_size].unflatten(-1, (BLOCK, -1)).flatten(1, 2)
        return HeadOutput(left.repeat_interleave(BLOCK, 1), features)

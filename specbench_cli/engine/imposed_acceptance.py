"""Imposed acceptance: each forward runs as usual, then its logits are replaced.

With the new logits, verification accepts draft tokens at a rate that the user sets
(`--acceptance`). This is for benchmarks of models with random weights. Without it, their draft
tokens would never be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import Decoder, ModelInput
from specbench_cli.engine.types import ModelOutput, Tokens
from specbench_cli.errors import MethodFault

NUM_CHOICES = 8
"""Number of ids per row that get new logits. A draft model can draft only these."""
TOP_LOGIT, LOGIT_STEP = 1e4, 1e2
"""Logit of the best id, and the gap to each next one.

The gap is so large that the distribution is one-hot at any temperature."""


class _ImposedAcceptance(Decoder):
    """Mixin for decoder classes that replaces the logits of each forward.

    See the function `impose_acceptance`.
    """

    imposed: tuple[float, int]

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward, then replace its logits by logits that give the imposed acceptance."""
        (b, n), seqs = model_input.shape, model_input.seqs
        begin = [model_input.state.position(seq) for seq in (range(b) if seqs is None else seqs)]
        out = super().execute(model_input)
        if out.logits is None:
            return out
        rows, positions = torch.arange(n, device=self.device), model_input.positions
        if positions is None:
            positions = torch.tensor(begin, device=self.device)[:, None] + rows
        if isinstance(model_input.logits_at, Tensor):
            rows = model_input.logits_at
        elif model_input.logits_at == "last":
            rows = rows[-1:]
        self._set_logits(
            out.logits, model_input.x, positions, rows, runs_all_layers=model_input.runs_all_layers
        )
        return out

    @torch.inference_mode()
    def forward_batch(
        self, parts: Sequence[ModelInput], *, captured_layers: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """Run a forward over several sequences, then replace its logits."""
        begin = [part.state.position() for part in parts]
        outs = super().forward_batch(parts, captured_layers=captured_layers)
        for part, at, out in zip(parts, begin, outs, strict=True):
            if out.logits is not None:
                rows = torch.arange(part.shape[1], device=self.device)
                positions = (at + rows)[None] if part.positions is None else part.positions
                rows = rows[-out.logits.shape[1] :]
                self._set_logits(out.logits, part.x, positions, rows, runs_all_layers=True)
        return outs

    def exit_logits(self, rows: Tensor) -> Tensor:
        """Raise MethodFault. The new logits depend on token ids, which are unknown at an early
        exit.
        """
        raise _unsupported_input(self.name)

    def _set_logits(
        self, logits: Tensor, x: Any, positions: Tensor, rows: Tensor, runs_all_layers: bool
    ) -> None:
        """Replace the logits [b, r, V] that belong to the rows [r] of the input."""
        if type(x) is not Tokens:
            raise _unsupported_input(self.name)
        chance, size = self.imposed
        ids, at = x.ids.index_select(1, rows), positions.expand(x.ids.shape).index_select(1, rows)
        right = _hash_ids(ids, at, 1) % size
        if self.name == "target" and runs_all_layers:
            logits.scatter_(-1, right[..., None], TOP_LOGIT)
            return
        if chance < 1:  # rank of the right token in the draft's order, geometrically distributed
            drawn = (_hash_ids(ids, at, 2).double() + 0.5) / (1 << 31)
            rank = (drawn.log() / log1p(-chance)).long() if chance else right * 0 + NUM_CHOICES
        else:
            rank = right * 0
        slots = torch.arange(NUM_CHOICES, device=self.device)
        others = (right[..., None] + 1 + slots) % size
        chosen = torch.where(slots == rank[..., None], right[..., None], others)
        values = (TOP_LOGIT - LOGIT_STEP * slots).to(logits.dtype).expand(chosen.shape)
        logits.scatter_(-1, chosen, values)


def impose_acceptance(decoder: Decoder, chance: float, vocabulary: int) -> Decoder:
    """Impose an acceptance rate on a decoder. Change its class in place, and return it.

    A hash of the last token and its position determines the "right" next token. The target always
    predicts the right token. A draft model ranks the right token r-th with probability chance * (1
    - chance)^r, where r starts at 0. Another hash of the same token and position draws r. So the
    target accepts the draft model's first choice with probability `chance`. In a tree, it accepts
    each further sibling with probability `chance` if all siblings before it were rejected. A draft
    model that consists of some target layers behaves like any other draft model.

    Args:
        decoder: The decoder to change. It verifies if its name is "target". All other decoders
            draft.
        chance: Acceptance probability of the draft model's first choice.
        vocabulary: Smallest vocabulary size of the run's models.
    """
    if vocabulary <= NUM_CHOICES:
        raise ValueError(
            f"a vocabulary of {vocabulary} ids is too small: imposed acceptance needs more than"
            f" {NUM_CHOICES}"
        )
    kind = type(decoder)
    made: Any = type(kind.__name__, (_ImposedAcceptance, kind), {})
    decoder.__class__ = made
    decoder.imposed = (chance, vocabulary)  # type: ignore[attr-defined]
    return decoder


def _unsupported_input(name: str) -> MethodFault:
    return MethodFault(
        f"--acceptance sets logits by the tokens that a model reads, but {name} was run on hidden"
        " states",
        "leave out --acceptance for methods that continue from hidden states",
    )


def _hash_ids(ids: Tensor, positions: Tensor, salt: int) -> Tensor:
    """Return 31-bit hashes of token ids and positions. int64 overflow is intended here."""
    z = ids * 6364136223846793005 + positions * 1442695040888963407 + salt * 2862933555777941757
    for shift in (31, 29):
        z = (z ^ (z >> shift)) * 7046029254386353131
    return (z ^ (z >> 32)) & 0x7FFFFFFF

"""DEL: self-speculative decoding with a dynamic exit layer.

Hossein Entezari Zarch, Lei Gao, Chaoyi Jiang, Murali Annavaram: DEL: Context-Aware Dynamic Exit
Layer for Efficient Self-Speculative Decoding, COLM 2025, arXiv:2504.05598.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from specbench_cli.api import (
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Pick,
    Session,
    Tokens,
    host,
)


class DelParams(MethodParams):
    """Parameters of `Del`."""

    length: int = Field(
        12, ge=1, description="maximum number of draft tokens per step (d in the paper)"
    )
    every: int = Field(
        1,
        ge=1,
        description="distance between two exits, in layers; the first exit follows the first layer",
    )
    keep: float = Field(
        0.95,
        ge=0,
        le=1,
        description="factor by which the weight of a step decreases with each later step (w in"
        " the paper)",
    )
    stop: bool = Field(
        True, description="stop drafting when the exit's confidence is below its threshold"
    )


def best_exit(alpha: Sequence[float], cost: Sequence[float], most: int) -> tuple[int, int]:
    """Return the exit layer (as an index) and the draft length with the highest TPL
    (token-per-layer).

    For exit l and draft length d, TPL(l, d) = (1 - alpha_l^(d + 1)) / (1 - alpha_l) / (1 + d
    cost_l). It is the expected number of tokens in the time of one target forward. Draft length 0
    is plain decoding, with TPL 1.

    Args:
        alpha: Acceptance rate of the tokens that each exit drafts.
        cost: Cost of a draft token of each exit, as a share of a target forward.
        most: Maximum draft length.
    """
    place, length, best = 0, 0, 1.0
    for at, (chance, share) in enumerate(zip(alpha, cost, strict=True)):
        tokens = 1.0  # the target's own token
        for d in range(1, most + 1):
            tokens += chance**d
            if tokens / (1.0 + d * share) > best:
                place, length, best = at, d, tokens / (1.0 + d * share)
    return place, length


class Del(Method):
    """DEL: chooses the exit layer and the draft length from the measured acceptance of each exit.

    Lossless because the choice to draft another token depends only on earlier steps, on tokens
    already drawn, and on the distribution of the next token, before that token is drawn. Each token
    is then verified against the target by speculative sampling.
    Differs from the paper: the cost of a draft token is its share of the weights, including the
    output matrix. In sampling, the acceptance rate of an exit is sum min(p, q), not token
    agreement. The authors' code was not available, so two details are specbench's own: the
    acceptance rate alpha starts at 0.5, and the confidence threshold is the midpoint described in
    step 2.

    One step:
    1. Choose the exit layer E and the draft length d with the highest token-per-layer (TPL, see
       `best_exit`) at the current acceptance rates alpha.
    2. Draft up to d tokens with layers 1 to E, on the target's own KV cache. Stop before a token if
       the exit's confidence is below a threshold: the midpoint between the mean confidence at
       accepted tokens and the mean confidence at rejected tokens.
    3. (engine) Run the layers after E on the hidden states that layer E returned; verify; commit.
    4. Shadow tokens: apply the final norm and the output matrix to the hidden states of every exit
       at the root and at accepted tokens. Update each exit's acceptance rate, and its confidence at
       accepted and at rejected tokens. Earlier steps decay by the factor `keep`.
    """

    name: ClassVar[str] = "del"
    family: ClassVar[str] = "the target itself, or a part of it"
    proposed_in: ClassVar[tuple[str, ...]] = ("entezarizarch2025del",)
    Params: ClassVar[type[MethodParams]] = DelParams
    params: DelParams

    def start(self, session: Session) -> None:
        """Capture the hidden states of all exit layers, and reset the statistics."""
        exits = range(1, session.target.n_layers, self.params.every)
        if exits:
            session.capture_layers([end - 1 for end in exits])
        self.parts = [session.partial(layers=(0, end), keep=True) for end in exits]
        self.n = 2.0  # weighted number of tokens; initially one accepted and one rejected
        # Decayed sums over tokens, one value per exit layer.
        self.accepted_weight = [1.0] * len(exits)
        self.accepted_confidence = [0.0] * len(exits)
        self.rejected_confidence = [0.0] * len(exits)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        picks = list[Pick]()
        alpha = [weight / self.n for weight in self.accepted_weight]
        at, length = best_exit(alpha, [part.portion for part in self.parts], self.params.length)
        x = session.pending_tokens(session.state.length())
        while len(picks) < min(length, limit):
            out = self.parts[at].forward(x, session.state)
            confidence = host.number(out.rows.softmax(-1).max()) if self.params.stop else 1.0
            if self.params.stop and confidence < self._stop_threshold(at):
                break
            picks.append(session.pick(out, len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def _stop_threshold(self, at: int) -> float:
        accepted, rejected = self.accepted_weight[at], self.n - self.accepted_weight[at]
        mean_accepted = self.accepted_confidence[at] / max(accepted, 1e-9)
        mean_rejected = self.rejected_confidence[at] / max(rejected, 1e-9)
        return (mean_accepted + mean_rejected) / 2

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 4 of the class docstring."""
        if not self.parts:
            return
        n, k, w = len(outcome.committed), len(self.parts), self.params.keep
        early_logits = session.target.exit_logits(
            session.features(n).unflatten(1, (k, -1)).transpose(0, 1)
        )
        rows, first = session.verified_logits()[:n], len(session.output()) - n
        if session.sampling.draws:
            accepted = torch.minimum(session.warp(rows), session.warp(early_logits)).sum(-1)
        else:
            target_tokens = session.scores(rows, first).argmax(-1)
            early_tokens = torch.stack(
                [session.scores(each, first).argmax(-1) for each in early_logits]
            )
            accepted = (early_tokens == target_tokens).to(early_logits.dtype)
        confidence = early_logits.softmax(-1).amax(-1)
        sums = host.numbers(
            torch.stack((accepted, accepted * confidence, confidence - accepted * confidence)).sum(
                -1
            )
        )
        self.n = w * self.n + n
        statistics = (self.accepted_weight, self.accepted_confidence, self.rejected_confidence)
        for values, new in zip(statistics, sums, strict=True):
            values[:] = [w * old + more for old, more in zip(values, new, strict=True)]

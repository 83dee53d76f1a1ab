"""Sorted speculative decoding (S2D): one draft model with nested sub-models, for several targets.

Parsa Kavehzadeh, Mohammadreza Pourreza, Mojtaba Valipour, Tinashu Zhu, Haoli Bai, Ali Ghodsi,
Boxing Chen, Mehdi Rezagholizadeh: S2D: Sorted Speculative Decoding For More Efficient Deployment of
Nested Large Language Models, 2024, arXiv:2407.01955.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch

from specbench_cli.api import (
    Draft,
    DraftModelMethod,
    Field,
    Hidden,
    Input,
    MethodParams,
    ModelOutput,
    Outcome,
    Pick,
    Session,
    Tokens,
    Widths,
    host,
)


class S2dParams(MethodParams):
    """Parameters of `S2d`."""

    exits: Widths | None = Field(
        None,
        description="numbers of draft layers after which a token may be drafted, such as 6,9;"
        " by default half and three quarters of the layers; the last layer is always"
        " an exit",
    )
    threshold: float = Field(
        0.7,
        ge=0,
        description="minimum probability of a sub-model's most likely token for which it"
        " drafts; 0 uses the smallest sub-model only, above 1 the whole draft only",
    )
    length: int = Field(5, ge=1, description="number of draft tokens per step")


class S2d(DraftModelMethod):
    """S2D: the first layers of the draft model draft if they are confident, else more layers do.

    Lossless because the choice of sub-model depends only on distributions, before the token is
    drawn. A sub-model is the first n layers of the draft model. Each token is verified with the
    distribution of the sub-model that drafted it.
    Differs from the paper in one open point: the paper does not define how a layer treats earlier
    tokens that skipped it. Here a layer first processes the hidden states of these tokens. All
    exits share one threshold.

    Any draft model works. A draft model trained with `specbench train draft --sorted` predicts
    tokens well at its exits. This training does not use the target. One draft model therefore
    serves all targets with the same vocabulary.

    One step:
    1. x is the pending tokens: the tokens that the draft model has not processed.
    2. Run the layers of the first sub-model on x. Compute its distribution P with the final norm
       and the output matrix. If max P reaches the threshold, or no layers remain, draw a token from
       P. Otherwise run the layers of the next sub-model on all hidden states that they have not
       processed.
    3. Repeat step 2 with the drawn token as x, until `length` tokens are drafted.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. Drop the KV entries of rejected tokens, and the stored hidden states of these tokens.
    """

    name: ClassVar[str] = "s2d"
    aliases: ClassVar[tuple[str, ...]] = ("sorted",)
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("kavehzadeh2024s2d",)
    Params: ClassVar[type[MethodParams]] = S2dParams
    params: S2dParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Prefill all layers of the draft model."""
        super().start(session)
        n: int = self.model.n_layers
        exits = self.params.exits or (-(-n // 2), -(-3 * n // 4))
        self.spans = list(pairwise((0, *sorted({end for end in exits if end < n}), n)))
        # Hidden states [1, 1, hidden] that wait for a deeper sub-model. There is one entry per
        # sub-model except the last.
        self.waiting = [list[torch.Tensor]() for _ in self.spans[1:]]

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        x, picks = session.pending_tokens(self.state.length()), list[Pick]()
        while len(picks) < min(limit, self.params.length):
            picks.append(session.pick(self._run_until_confident(x), len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def _run_until_confident(self, x: Input) -> ModelOutput:
        """Return the output of the first sub-model that is confident enough: step 2 of the class
        docstring.
        """
        for span, waiting in zip(self.spans, self.waiting, strict=False):
            out = self.model.forward(x, self.state, layers=span, early=True)
            waiting.extend(out.hidden.split(1, 1))
            if host.number(out.rows.softmax(-1).max()) >= self.params.threshold:
                return out
            x = Hidden(torch.cat(waiting, 1))
            waiting.clear()
        return self.model.forward(x, self.state, layers=self.spans[-1])

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 5 of the class docstring."""
        super().observe(session, outcome)
        read = [self.state.length(0, first) for first, _ in self.spans]
        for waiting, (left, entered) in zip(self.waiting, pairwise(read), strict=True):
            del waiting[left - entered :]

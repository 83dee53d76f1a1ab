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
    """S2D: the first layers of the draft model draft if they are confident, else deeper ones do.

    Exact because the choice of sub-model depends only on distributions, before the token is drawn.
    Each token is verified with the distribution of the sub-model that it was drawn from.
    Differs from the paper, which does not say what a layer reads where earlier tokens skipped it:
    here a layer first processes all hidden states of the tokens that skipped it. All exits share
    one threshold.

    Any draft model works. One trained with `specbench train draft --sorted` can predict tokens at
    its exits. The target is not involved in that training: one draft serves all targets that share
    its vocabulary.

    One step:
    1. x is the draft's pending tokens.
    2. Run x through the first sub-model's layers, and read its distribution P through the final
       norm and the output matrix. If max P reaches the threshold, or no layers remain, draw from P.
       Otherwise run the next layers on all hidden states that they have not processed.
    3. Continue with the drawn token as x, `length` times.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. Drop the KV entries of rejected tokens, and their hidden states that deeper sub-models have
       not processed.
    """

    name: ClassVar[str] = "s2d"
    aliases: ClassVar[tuple[str, ...]] = ("sorted",)
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("kavehzadeh2024s2d",)
    Params: ClassVar[type[MethodParams]] = S2dParams
    params: S2dParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Prefill all layers of the draft."""
        super().start(session)
        n: int = self.model.n_layers
        exits = self.params.exits or (-(-n // 2), -(-3 * n // 4))
        self.spans = list(pairwise((0, *sorted({end for end in exits if end < n}), n)))
        # After each sub-model except the last: hidden states [1, 1, hidden] that the next has not
        # processed.
        self.waiting = [list[torch.Tensor]() for _ in self.spans[1:]]

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        x, picks = session.pending_tokens(self.state.length()), list[Pick]()
        while len(picks) < min(limit, self.params.length):
            picks.append(session.pick(self._run_until_confident(x), len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def _run_until_confident(self, x: Input) -> ModelOutput:
        """Carry out step 2, and return the output of the first sub-model that is confident
        enough."""
        for span, waiting in zip(self.spans, self.waiting, strict=False):
            out = self.model.forward(x, self.state, layers=span, early=True)
            waiting.extend(out.hidden.split(1, 1))
            if host.number(out.rows.softmax(-1).max()) >= self.params.threshold:
                return out
            x = Hidden(torch.cat(waiting, 1))
            waiting.clear()
        return self.model.forward(x, self.state, layers=self.spans[-1])

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Update the state of the method after verification: step 5 of the class docstring."""
        super().observe(session, outcome)
        read = [self.state.length(0, first) for first, _ in self.spans]
        for waiting, (left, entered) in zip(self.waiting, pairwise(read), strict=True):
            del waiting[left - entered :]

"""SWIFT: on-the-fly self-speculative decoding with skipped layers.

Heming Xia, Yongqi Li, Jun Zhang, Cunxiao Du, Wenjie Li: SWIFT: On-the-Fly Self-Speculative Decoding
for LLM Inference Acceleration, ICLR 2025, arXiv:2410.06916.
"""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from methods.swift.search import SearchParams, SetSearch
from specbench_cli.api import (
    ROOT,
    SUBLAYERS,
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Partial,
    Session,
    Tokens,
    hash_key,
    host,
)

SIBLINGS = (  # (minimum confidence, number of siblings), for greedy decoding and for sampling
    ((0.95, 3), (0.8, 5), (0.5, 8), (0.0, 10)),
    ((0.95, 1), (0.8, 3), (0.5, 5), (0.0, 10)),
)


class SwiftParams(SearchParams):
    """Parameters of `Swift`."""

    skip: float = Field(
        0.45,
        ge=0,
        lt=1,
        description="share of the inner sublayers that are skipped (r in the paper: 0.45)",
    )
    depth: int = Field(
        25,
        ge=1,
        description="maximum number of draft tokens in a row, which is the number of levels of"
        " the tree (authors' code: 25)",
    )
    width: int = Field(10, ge=1, description="maximum number of siblings of a token")
    least: float = Field(
        0.8,
        ge=0,
        le=1,
        description="drafting stops when the confidence is below this value (authors' code: 0.8)",
    )
    window: int = Field(
        32,
        ge=1,
        description="number of output tokens on which sets of sublayers are scored (W in the"
        " paper: 32)",
    )


class Swift(Method):
    """SWIFT: the target drafts without some sublayers, which a search selects during decoding.

    Lossless because the skipped sublayers depend only on earlier steps. In sampling, recursive
    rejection tests children in the order of their draws without replacement. In greedy decoding and
    coupled sampling (all methods share the Gumbel noise), a child is accepted if and only if the
    target chooses it.
    A set is the set of skipped sublayers.
    Differs from the authors' code: the token after a fully accepted draft follows the same
    temperature, top-k and top-p as other tokens. The best set is scored again on each request's
    text. Sets are scored on the target's own KV cache, without a copy. The first set has the same
    size as all others.

    One step:
    1. Draft with the target, without the sublayers of the best set, on the target's own KV cache.
       Each token gets siblings: more siblings if the draft is less confident. Draft the next token
       after the first sibling. Stop at low confidence.
    2. (engine) One target forward over the root and all tokens; verify; commit.
    3. Until the search ends, score one other set of the same size. The set is chosen at random, or
       by Bayesian optimisation every `every` tries. The score is the share of W output tokens that
       the target predicts correctly with this set, in one forward. Keep the set if its score is
       higher than that of the best set.
    """

    name: ClassVar[str] = "swift"
    family: ClassVar[str] = "the target itself, or a part of it"
    proposed_in: ClassVar[tuple[str, ...]] = ("xia2025swift",)
    Params: ClassVar[type[MethodParams]] = SwiftParams
    params: SwiftParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def start(self, session: Session) -> None:
        """Start with the best set of skipped sublayers so far.

        The first set skips every second layer.
        """
        params = self.params
        inner = list(product(range(1, session.target.n_layers - 1), SUBLAYERS))
        first = sorted(inner, key=lambda sublayer: sublayer[0] % 2 == 0)
        new = SetSearch(inner, first[: int(params.skip * len(inner))], params)
        self.search: SetSearch[Any] = session.memory.setdefault("found", new)
        session.reserve(max(params.depth * params.width, params.window))
        self.part, self.score = session.partial(skip=self.search.best), -1.0

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: step 1 of the class docstring."""
        params, most = self.params, min(self.params.width, session.target.vocab_size)
        tokens, parents, distributions, node = list[Tensor](), list[int](), list[Tensor](), ROOT
        x = session.pending_tokens(session.state.length())
        for ahead in range(min(params.depth, limit)):
            rows = self.part.forward(x, session.state).rows
            sure = host.number(rows.softmax(-1).max())
            wide = min(most, next(n for low, n in SIBLINGS[session.sampling.draws] if sure > low))
            children, q = session.branch(rows, wide, how="without_replacement", ahead=ahead)
            tokens.append(children[0])
            parents += [node] * wide
            distributions += [] if q is None else [q[0]] * wide
            node = len(parents) - wide
            if sure < params.least:
                break
            x = Tokens(children[:, :1])
        return session.tree(torch.cat(tokens) if tokens else (), tuple(parents), distributions)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Score another set of skipped sublayers: step 3 of the class docstring."""
        search = self.search
        if search.is_finished or len(session.output()) <= self.params.window:
            return
        if self.score < 0:  # not scored on this text yet
            self.score = self._score_set(session, self.part)
        if self.score < self.params.enough:
            chosen = search.propose(hash_key("swift", session.sampling.seed, len(search.tried)))
            part = session.partial(skip=chosen)
            score = self._score_set(session, part)
            if search.record_score(chosen, score, best_score=self.score):
                self.part, self.score = part, score

    def _score_set(self, session: Session, part: Partial) -> float:
        """Return the share of W output tokens that the target predicts correctly without some
        sublayers.
        """
        output = session.output()[: self.params.window + 1]
        rows = part.rescore(output[:-1], len(session.tokens()) - len(session.output()))
        rows = rows if session.sampling.draws else session.scores(rows, 1)
        right = rows.argmax(-1) == host.ids(output[1:], rows.device)
        return float(host.number(right.double().mean()))

"""SWIFT: on-the-fly self-speculative decoding by skipped layers.

Heming Xia, Yongqi Li, Jun Zhang, Cunxiao Du, Wenjie Li: SWIFT: On-the-Fly Self-Speculative Decoding
for LLM Inference Acceleration, ICLR 2025, arXiv:2410.06916.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import product
from typing import ClassVar, Literal

import torch
from torch import Tensor

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
    host,
    key_of,
)

SIBLINGS = (  # of a token, by how sure the draft is: chosen ones, and drawn ones
    ((0.95, 3), (0.8, 5), (0.5, 8), (0.0, 10)),
    ((0.95, 1), (0.8, 3), (0.5, 5), (0.0, 10)),
)


class SwiftParams(MethodParams):
    """Parameters of `Swift`."""

    skip: float = Field(
        0.45, ge=0, lt=1, description="share of the inner sublayers passed over (r)"
    )
    depth: int = Field(25, ge=1, description="most draft tokens in a row: levels of the tree")
    width: int = Field(10, ge=1, description="most siblings of a token")
    least: float = Field(0.8, ge=0, le=1, description="drafting stops where it is less sure")
    window: int = Field(32, ge=1, description="tokens of an output that sets are scored on (W)")
    every: int = Field(25, ge=1, description="so often the optimiser proposes, else chance")
    tries: int = Field(1000, ge=1, description="sets that are scored in a run, at most")
    patience: int = Field(300, ge=1, description="sets in a row that are no better end the search")
    enough: float = Field(0.93, ge=0, le=1, description="a score that ends the search")


class Swift(Method):
    """SWIFT: the target drafts without some of its sublayers; which ones is searched meanwhile.

    Exact because what is passed over was settled by earlier steps; children are drawn without
    replacement and tested in that order by recursive rejection; in greedy and coupled decoding one
    stands iff it is the target's own choice. The warped law is used wherever a token is committed
    (the authors' code takes raw logits where nothing was rejected).
    Differs from the authors' code: the best set is scored anew on each request's text, not held
    against scores of other texts; sets are scored behind the target's own rows, of which none is
    copied; the first set is as large as all others.

    One step:
    1. Draft on the target's own rows without the set's sublayers: each token gets siblings, the
       more the less sure the draft is; go on behind the first; stop where it is not sure.
    2. (engine) One target forward over the root and all tokens; verify; commit.
    3. Until one of three rules ends the search, score a set of the same size: one by chance, and
       every so often one by Bayesian optimisation (Gaussian process, upper confidence bound). The
       score is how often it says the next token over the output's first W + 1, in one forward
       behind the prompt. Keep it if it beats the best.
    """

    name: ClassVar[str] = "swift"
    Params: ClassVar[type[MethodParams]] = SwiftParams
    params: SwiftParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def start(self, session: Session) -> None:
        """Take the best set so far; at first every second layer."""
        params, inner = self.params, range(1, session.target.n_layers - 1)
        self.sublayers = list(product(inner, SUBLAYERS))
        self.n = int(params.skip * len(self.sublayers))
        order = sorted(range(len(self.sublayers)), key=lambda at: self.sublayers[at][0] % 2 == 0)
        self.found = session.memory.setdefault("found", {"best": order[: self.n], "tried": []})
        session.reserve(max(params.depth * params.width, params.window))
        self.part, self.score = self._part(session, self.found["best"]), -1.0

    def propose(self, session: Session, limit: int) -> Draft:
        """Step 1."""
        params, drawn = self.params, session.sampling.draws
        tokens, parents, laws, node = list[Tensor](), list[int](), list[Tensor](), ROOT
        x = session.since(session.state.length())
        for ahead in range(min(params.depth, limit)):
            rows = self.part.forward(x, session.state).rows
            sure = host.number(rows.softmax(-1).max())
            wide = next(n for least, n in SIBLINGS[drawn] if sure > least)
            wide = min(wide, params.width, session.target.vocab_size)
            children, q = session.branch(rows, wide, how="wor", ahead=ahead)
            tokens.append(children[0])
            parents += [node] * wide
            node = len(parents) - wide
            if q is not None:
                laws.append(q.expand(wide, -1))
            if sure < params.least:
                break
            x = Tokens(children[:, :1])
        if not tokens:
            return session.chain(())
        tree = session.tree(torch.cat(tokens), tuple(parents))
        return Draft(tree.tokens, tree.parents, "wor", torch.cat(laws)) if laws else tree

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Step 3."""
        params, tried = self.params, self.found["tried"]
        lately = [better for *_, better in tried[-params.patience :]]
        over = len(tried) >= params.tries or (len(lately) == params.patience and not any(lately))
        if over or not self.n or len(session.output()) <= params.window:
            return
        if self.score < 0:  # of the best, on this text
            self.score = self._scored(session, self.part)
        if self.score >= params.enough:
            return
        chance = random.Random(key_of("swift", session.sampling.seed, len(tried)))
        chosen = sorted(chance.sample(range(len(self.sublayers)), self.n))
        if tried and len(tried) % params.every == 0:
            chosen = self._suggested(tried)
        part = self._part(session, chosen)
        score = self._scored(session, part)
        tried.append((chosen, score, score > self.score))
        if score > self.score:
            self.found["best"], self.part, self.score = chosen, part, score

    def _part(self, session: Session, chosen: Sequence[int]) -> Partial:
        return session.partial(skip=[self.sublayers[at] for at in chosen])

    def _scored(self, session: Session, part: Partial) -> float:
        """How often a part of the target says what follows, over W tokens read in one forward."""
        said = session.output()[: self.params.window + 1]
        rows = part.reread(said[:-1], len(session.tokens()) - len(session.output()))
        if not session.sampling.draws:
            rows = session.scores(rows, 1)
        return float(
            host.number((rows.argmax(-1) == host.ids(said[1:], rows.device)).double().mean())
        )

    def _suggested(self, tried: Sequence[tuple[list[int], float, bool]]) -> list[int]:
        """The set that the optimiser would try next: the n largest of its numbers."""
        from bayes_opt import BayesianOptimization, acquisition  # takes seconds

        names = [f"{at:04}" for at in range(len(self.sublayers))]
        bound = acquisition.UpperConfidenceBound(kappa=2.5)
        search = BayesianOptimization(
            None,
            dict.fromkeys(names, (0.0, 1.0)),
            bound,
            random_state=1,
            verbose=0,
            allow_duplicate_points=True,
        )
        search.set_gp_params(alpha=1e-2)
        with redirect_stdout(None):  # it tells of every duplicate, whatever `verbose` says
            for chosen, score, _ in tried:
                search.register({name: float(at in chosen) for at, name in enumerate(names)}, score)
        point = search.suggest()
        return sorted(sorted(range(len(names)), key=lambda at: -point[names[at]])[: self.n])

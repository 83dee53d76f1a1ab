"""Recursive speculative decoding with stochastic beam search (RSD-S).

Wonseok Jeon, Mukul Gagrani, Raghavv Goel, Junyoung Park, Mingu Lee, Christopher Lott: Recursive
Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement, 2024,
arXiv:2402.14160. Stochastic beam search: Wouter Kool, Herke van Hoof, Max Welling: Stochastic Beams
and Where to Find Them, ICML 2019, arXiv:1903.06059.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from specbench_cli.api import (
    ROOT,
    Draft,
    Field,
    Levels,
    Method,
    MethodParams,
    Outcome,
    Session,
    host,
)

Node = tuple[int, int, float]  # parent's index among the beams, token, log-probability of the path


class RsdSParams(MethodParams):
    """Parameters of `RsdS`."""

    width: int = Field(
        4, ge=1, description="number of nodes per level, which are the beams (W in the paper)"
    )
    depth: int = Field(
        4,
        ge=1,
        description="number of levels of the tree (L in the paper); each takes one draft forward",
    )


class RsdS(Method):
    """RSD-S: stochastic beam search draws each level of the tree, as paths without replacement.

    Lossless because each draw first chooses a parent, which depends only on earlier draws. It then
    draws the token from the draft model's distribution q without the earlier siblings. The children
    of a node are therefore the first draws without replacement from q. Recursive rejection tests
    them in that order. In greedy decoding and coupled sampling (all methods share the Gumbel
    noise), the method is plain beam search, and a child is accepted if and only if the target
    chooses it.
    Differs from the paper: no Gumbel keys are computed. Taking the W largest keys is equivalent to
    drawing W paths one after another without replacement (Kool et al.). The method draws the paths
    in this way.

    One step. It starts with the root as the only beam. Steps 1 and 2 repeat for each of L levels:
    1. The draft model processes the beams. This gives the distribution q after each beam.
    2. Draw W paths that are one token longer. They are the next level and the next beams. The
       probability of a beam is the share of probability mass that no earlier draw covers.
    3. (engine) One target forward over the root and all nodes; recursive rejection; commit.
    4. Keep the draft model's KV entries of accepted nodes.
    """

    name: ClassVar[str] = "rsd-s"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("jeon2024rsd",)
    Params: ClassVar[type[MethodParams]] = RsdSParams
    params: RsdSParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and prefill the draft model."""
        self.levels = Levels.of_draft(session, nodes=self.params.width * self.params.depth)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        levels, tokens, parents, distributions = (
            self.levels,
            list[int](),
            list[int](),
            list[Tensor](),
        )
        beams, kept = [ROOT], [(0, ROOT, 0.0)]
        for ahead in range(min(self.params.depth, limit)):
            above, last, phi = zip(*kept, strict=True)
            new = session.pending_tokens(levels.state.length())
            out = levels.feed(last, above) if ahead else levels.begin(new)  # step 1
            if session.sampling.draws:  # step 2
                q = session.warp(out.rows)
                kept = self._draw_paths(session, q, phi)
                distributions.append(
                    q.index_select(0, host.ids([beam for beam, *_ in kept], q.device))
                )
            else:
                kept = self._best(session, out.rows, phi, ahead)
            parents += [beams[node[0]] for node in kept]
            tokens += [node[1] for node in kept]
            beams = [*range(len(tokens) - len(kept), len(tokens))]
        return session.tree(tokens, tuple(parents), distributions)

    def _draw_paths(self, session: Session, q: Tensor, phi: Sequence[float]) -> list[Node]:
        """Draw the next level of the tree from the beams (step 2 of the class docstring).

        Args:
            session: Session of the request.
            q: Distribution after each beam, [m, vocab].
            phi: Log-probability of each beam.
        """
        distribution, mass = q.double(), [math.exp(value) for value in phi]
        pool = torch.zeros_like(distribution)  # weights from which each path is drawn
        kept, reached = list[Node](), 0  # the first `reached` beams have a child
        for _ in range(min(self.params.width, host.number((distribution > 0).sum()))):
            if reached < len(mass):  # rounding must not make it less than the mass of later beams
                rest = max(1.0 - sum(mass[:reached]), sum(mass[reached:]))
                pool[reached] = distribution[reached] * rest
            flat = session.random.categorical((pool / pool.sum()).flatten())
            path, p = host.to_numbers(flat, distribution.flatten().gather(0, flat[None]))
            beam, token = divmod(path, distribution.shape[1])
            if beam == reached:
                pool[beam], reached = distribution[beam] * mass[beam], reached + 1
            pool[beam, token].zero_()
            kept.append((beam, token, phi[beam] + math.log(p)))
        return kept

    def _best(self, session: Session, rows: Tensor, phi: Sequence[float], ahead: int) -> list[Node]:
        """Choose the next level of the tree by beam search, in greedy decoding and coupled
        sampling.
        """
        width, found = min(self.params.width, session.target.vocab_size), list[Node]()
        best, gains = session.candidate_lists(rows, width, ahead=ahead)
        for beam, (ids, values) in enumerate(zip(best, gains, strict=True)):
            found += [(beam, x, phi[beam] + g) for x, g in zip(ids, values, strict=True)]
        possible = (node for node in found if node[2] > -math.inf)
        return sorted(possible, key=lambda node: -node[2])[: self.params.width]

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 4 of the class docstring.

        The draft model processed the nodes in their order. It did not process the deepest level.
        """
        self.levels.keep(outcome.path)

"""Sequoia: scalable, robust and hardware-aware speculative decoding.

Zhuoming Chen, Avner May, Ruslan Svirschevski, Yuhsun Huang, Max Ryabinin, Zhihao Jia, Beidi Chen:
Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding, 2024, arXiv:2402.12374.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar, Literal

from specbench_cli.api import (
    AUTO,
    Draft,
    Field,
    GrownTree,
    Levels,
    Method,
    MethodParams,
    Nodes,
    Outcome,
    Session,
    fill,
    max_nodes,
    tree_of_choices,
)


class SequoiaParams(MethodParams):
    """Parameters of `Sequoia`."""

    nodes: Nodes = Field(
        16,
        description="number of nodes of the tree, or auto: chosen from the measured costs of"
        " forwards",
    )
    depth: int = Field(
        8, ge=1, description="maximum number of levels of the tree; each takes one draft forward"
    )
    width: int = Field(8, ge=1, description="maximum number of children of a node")
    profile: int = Field(
        64, ge=1, description="number of steps of a run in which acceptance rates are measured"
    )


class BestTrees:
    """Dynamic program for the static tree with the highest expected number of accepted tokens.

    Args:
        a: Acceptance rates by rank: entry r is the rate of the (r + 1)-th child that is tested.
    """

    def __init__(self, a: Sequence[float]) -> None:
        @cache
        def best(m: int, depth: int, k: int = 0) -> tuple[float, int]:
            found = [(0.0, 0)]  # options: no child of rank k, or one whose subtree has y nodes
            for y in range(1, m + 1 if depth and k < len(a) else 0):
                value = a[k] * (1.0 + best(y - 1, depth - 1)[0]) + best(m - y, depth, k + 1)[0]
                found.append((value, y))
            return max(found, key=lambda pair: pair[0])

        self.best = best  # value of m nodes on `depth` levels, using children k, k + 1, ...

    def nodes(self, m: int, depth: int, *above: int, k: int = 0) -> Iterator[tuple[int, ...]]:
        """Yield the nodes of the best tree with m nodes and at most `depth` levels.

        A node is written as the ranks of the children on its path.

        Args:
            above: Path of the parent of all nodes.
            k: Rank of the first child of this parent.
        """
        if y := self.best(m, depth, k)[1]:
            yield (*above, k)
            yield from self.nodes(y - 1, depth - 1, *above, k)
            yield from self.nodes(m - y, depth, *above, k=k + 1)


class Sequoia(Method):
    """Sequoia: the best static tree for the measured acceptance rate of each rank.

    Lossless because the shape of the tree depends only on earlier steps. Children are drawn without
    replacement and tested in that order by recursive rejection. In greedy decoding and coupled
    sampling (all methods share the Gumbel noise) a child is accepted if and only if the target
    chooses it.
    Differs from the authors' code: acceptance is measured in the first steps of a run. Every step
    draws new random numbers. The authors' code reuses the random numbers of a prompt.

    1. In the first `profile` steps the tree is a root with `width` children. Count how often the
       child of each rank is accepted.
    2. Then choose the best tree of `nodes` nodes, only once. With `nodes=auto`, choose the size and
       depth with the most expected tokens per time. A step takes the time of one draft model
       forward per level and one target forward.
    3. In every step: draw each node's children without replacement, level by level; (engine) verify
       by recursive rejection; commit; keep the draft model's KV entries of accepted nodes.
    """

    name: ClassVar[str] = "sequoia"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("chen2024sequoia",)
    Params: ClassVar[type[MethodParams]] = SequoiaParams
    params: SequoiaParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"
    uses_costs = property(lambda self: self.params.nodes == AUTO)

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and prefill the draft model."""
        largest = max(max_nodes(self.params.nodes), self.params.width)
        self.levels = Levels.of_draft(session, nodes=largest)
        self.accepted_ranks = session.memory.setdefault(
            "stood", []
        )  # rank of the accepted child per step, `width` if none

    def propose(self, session: Session, limit: int) -> Draft:
        """Draw the tree of one decoding step: step 3 of the class docstring."""
        tree = session.memory.get("tree") or tree_of_choices((k,) for k in range(self.params.width))
        tree = tree.truncate(limit, session.target.vocab_size)
        self.grown = GrownTree(session.chain(()), ())
        if tree.nodes:
            first = self.levels.begin(session.pending_tokens(self.levels.state.length()))
            self.grown = fill(tree, self.levels, first, session, how="without_replacement")
        return self.grown.draft

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Count accepted ranks, choose the tree, and keep the KV entries of accepted nodes."""
        self.levels.keep(self.grown.rows(outcome.path))
        if "tree" not in session.memory and self.grown.draft.nodes:
            self.accepted_ranks.append(outcome.path[0] if outcome.path else self.params.width)
            if len(self.accepted_ranks) == self.params.profile:
                session.memory["tree"] = tree_of_choices(self._plan(session))

    def _plan(self, session: Session) -> Iterator[tuple[int, ...]]:
        m, depth, width = max_nodes(self.params.nodes), self.params.depth, self.params.width
        trees = BestTrees(
            [self.accepted_ranks.count(k) / len(self.accepted_ranks) for k in range(width)]
        )

        def rate(size: tuple[int, int]) -> float:
            drafting = size[1] * session.draft_cost(self.levels.model)
            return (1.0 + trees.best(*size)[0]) / (drafting + session.verify_cost(size[0] + 1))

        if self.params.nodes == AUTO:
            m, depth = max(((n, d) for n in range(1, m + 1) for d in range(1, depth + 1)), key=rate)
        return trees.nodes(m, depth)

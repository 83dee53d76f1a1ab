"""STAND: stochastic adaptive n-gram drafting.

Woomin Song, Saket Dingliwal, Sai Muralidhar Jayanthi, Bhavana Ganesh, Jinwoo Shin, Aram Galstyan,
Sravan Babu Bodapati: Accelerated Test-Time Scaling with Model-Free Speculative Sampling, EMNLP
2025, arXiv:2506.04708. The tree's shape: Tianle Cai et al.: Medusa, ICML 2024, arXiv:2401.10774.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from specbench_cli.api import (
    ROOT,
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Session,
    host,
    ranking,
)
from specbench_cli.api import best_tree as medusa_tree

Path = tuple[int, ...]


class StandParams(MethodParams):
    """Parameters of `Stand`."""

    order: int = Field(4, ge=1, description="maximum length of the n-gram to look up, in tokens")
    kept: int = Field(
        10, ge=1, description="maximum number of next tokens that are stored per n-gram"
    )
    nodes: int = Field(40, ge=1, description="number of nodes of the tree")
    depth: int = Field(8, ge=1, description="number of levels of the tree")
    scope: Literal["run", "prompt"] = Field(
        "run", description="keep the table for the whole run, or for one prompt"
    )
    memory: int = Field(
        100_000,
        ge=1,
        description="maximum number of n-grams in the table; the oldest is removed first",
    )


class Stand(Method):
    """STAND: drafts from the mean of the target's distributions after the same n-gram.

    Lossless because siblings are drawn without replacement from the distribution that verification
    uses, and tested in the order of their draws. The number of children of a node does not depend
    on the tokens that are drawn as its children. In greedy decoding and coupled sampling (all
    methods share the Gumbel noise) a child is accepted if and only if the target chooses it.
    Differs from the paper: the tree is built as in Medusa, and not fitted to example problems. Only
    distributions at committed tokens enter the table. Drawing without replacement is Gumbel top-k.
    In coupled sampling, the draft uses the same Gumbel noise as the target.

    With `scope=run`, data from earlier prompts is kept. The speed of a prompt then depends on
    earlier prompts, but its output does not. The table has at most `memory` n-grams with `kept`
    tokens each.

    One step. A table maps each n-gram to the mean of the target's distributions after it (over few
    tokens) and a count:
    1. Level by level, use the distribution of the longest known n-gram at the end of a node's path.
       Draw children without replacement, as many as the static tree has at this node. A node
       without a known n-gram has no children.
    2. (engine) One target forward over the last committed token and the tree; verify; commit.
    3. For each committed token and each n-gram that ends before it, update the mean distribution
       with the target's most likely tokens. Keep only the most likely tokens.
    """

    name: ClassVar[str] = "stand"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("song2025stand",)
    Params: ClassVar[type[MethodParams]] = StandParams
    params: StandParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def start(self, session: Session) -> None:
        """Take the n-gram table from the run's memory, and reserve space for the draft tree."""
        shape = medusa_tree(self.params.nodes, depth=self.params.depth)
        self.children = Counter(node[:-1] for node in shape.nodes)
        session.reserve(len(shape.nodes))
        memory = session.memory if self.params.scope == "run" else {}
        self.table: dict[Path, tuple[int, dict[int, float]]] = memory.setdefault(
            "distributions", {}
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: step 1 of the class docstring."""
        ids, parents, distributions = list[int](), list[int](), list[Tensor]()
        fed: list[
            tuple[int, Path, Path]
        ] = [  # per node: index, ranks on its path, last tokens of its path
            (ROOT, (), tuple(session.tokens()[-self.params.order :]))
        ]
        for ahead in range(min(limit, self.params.depth)):
            above = [
                (*node, distribution)
                for node in fed
                if (distribution := self._distribution(node)) is not None
            ]
            if not above:
                break
            counts = [
                min(self.children[ranks], len(distribution)) for _, ranks, _, distribution in above
            ]
            rows = torch.full((len(above), session.target.vocab_size), -math.inf)
            for row, (*_, distribution) in zip(rows, above, strict=True):
                row[list(distribution)] = torch.tensor(list(distribution.values())).log()
            rows = host.send(rows, session.device)
            drawn, q = session.branch(rows, max(counts), how="without_replacement", ahead=ahead)
            fed = []
            for at, tokens in enumerate(host.numbers(drawn)):
                parent, ranks, before, _ = above[at]
                for rank, token in enumerate(tokens[: counts[at]]):
                    fed.append((len(ids), (*ranks, rank), (*before, token)[-self.params.order :]))
                    ids.append(token)
                    parents.append(parent)
                    distributions += [] if q is None else [q[at]]
        return session.tree(ids, tuple(parents), distributions)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 3 of the class docstring."""
        text, n, kept = session.tokens(), len(outcome.committed), self.params.kept
        at = host.ids([0, *(node + 1 for node in outcome.path)][:n], session.device)
        rows = session.verified_logits().index_select(0, at).float().log_softmax(-1)
        top_tokens = zip(*ranking.top_lists(rows, min(kept, rows.shape[-1])), strict=True)
        for end, (logs, best) in enumerate(top_tokens, start=len(text) - n):
            new = {token: math.exp(log) for token, log in zip(best, logs, strict=True)}
            for length in range(1, min(self.params.order, end) + 1):
                gram = tuple(text[end - length : end])
                times, old = self.table.get(gram, (0, {}))
                both = {x: (times * old.get(x, 0) + new.get(x, 0)) / (times + 1) for x in old | new}
                top = sorted(both.items(), key=lambda item: -item[1])[:kept]
                self.table[gram] = times + 1, {x: p for x, p in top if p > 0}
        while len(self.table) > self.params.memory:
            del self.table[next(iter(self.table))]

    def _distribution(self, node: tuple[int, Path, Path]) -> Mapping[int, float] | None:
        """Return the table's distribution for a node: that of the longest known n-gram on its path.

        Return None if no n-gram is known, or if the node has no children in the tree.
        """
        _, ranks, before = node
        grams = (before[first:] for first in range(len(before) if self.children[ranks] else 0))
        return next((self.table[gram][1] for gram in grams if gram in self.table), None)

"""Clover: a draft head with a recurrent state over the drafted tokens.

Bin Xiao, Chunan Shi, Xiaonan Nie, Fan Yang, Xiangwei Deng, Lei Su, Weipeng Chen, Bin Cui: Clover:
Regressive Lightweight Speculative Decoding with Sequential Knowledge, 2024, arXiv:2405.00263.
"""

from __future__ import annotations

from math import exp
from typing import ClassVar, NamedTuple

from methods.clover.head import CloverHead
from specbench_cli.api import (
    ROOT,
    AcceptParams,
    Artifact,
    Draft,
    Field,
    Levels,
    Method,
    MethodParams,
    Session,
)


class CloverParams(AcceptParams, MethodParams):
    """Parameters of `Clover`."""

    head: str = Field(
        "auto",
        description="draft head: auto (the default head of the target), a folder or a hub id",
    )
    nodes: int = Field(16, ge=1, description="maximum number of nodes of the tree")
    depth: int = Field(4, ge=1, description="maximum number of levels of the tree")
    width: int = Field(8, ge=1, description="maximum number of children of a node")
    nucleus: float = Field(
        0.95,
        gt=0,
        le=1,
        description="children are dropped after the most likely ones that together have this"
        " probability",
    )
    share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="children are dropped if their probability is below this share of the best"
        " child's",
    )


class CloverNode(NamedTuple):
    """Node of the draft tree.

    Attributes:
        log_prob: Log-probability of the node's path.
        parent_row: Index of the parent among the nodes of the last forward of the head.
        parent: Index of the parent in the draft tree.
    """

    log_prob: float
    parent_row: int
    parent: int
    token: int


class Clover(Method):
    """Clover: regressive attention over drafted tokens, and a tree pruned to a budget.

    Lossless because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise that all methods share). Nodes are the most likely tokens at their parent, not drawn at
    random. A node is accepted with the probability that the target gives its token. In greedy
    decoding and coupled sampling, it is accepted if and only if the target chooses the same token.
    With `accept=typical` the method is not exact, and specbench reports it as lossy.
    Differs from the paper, which covers only greedy decoding: no draft exceeds the remaining token
    budget, and parts of the head follow Clover-2, the successor of Clover.

    One step:
    1. The augmenting block, one layer of the head, reads the target's hidden states of the
       committed tokens. Regressive attention combines its output with the last committed token.
    2. Token level: keep a node's most likely children up to `nucleus` probability, and none with
       less than `share` of the best child's probability.
    3. Tree level: keep the most likely paths. Whole tree: keep at most `nodes` nodes.
    4. Update each parent's state with the node's token by regressive attention, one call per level.
    5. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "clover"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("xiao2024clover",)
    Params: ClassVar[type[MethodParams]] = CloverParams
    params: CloverParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = CloverHead
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "depth", "width"})

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and capture the hidden states that the head reads."""
        self.levels = Levels.of_head(session, *self.artifacts(), nodes=self.params.nodes)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 4 of the class docstring."""
        params, levels = self.params, self.levels
        width, depth = min(params.width, session.target.vocab_size), min(params.depth, limit)
        tree, level = list[CloverNode](), [CloverNode(0.0, 0, ROOT, ROOT)]
        if depth < 1:
            return session.chain(())
        out = levels.begin(session.pending_features(levels.state.length()))
        for ahead in range(depth):
            tokens, logs = session.candidate_lists(out.rows, width, ahead=ahead)
            first = len(tree) - len(level) if ahead else ROOT  # index of the level's first node
            found = [
                CloverNode(node.log_prob + log, at, first + at, token)
                for at, node in enumerate(level)
                for token, log in self._prune_children(tokens[at], logs[at])
            ]
            found.sort(key=lambda node: -node.log_prob)
            level = sorted(found[: params.nodes - len(tree)], key=lambda node: node.parent_row)
            tree += level
            if len(tree) == params.nodes or ahead + 1 == depth or not level:
                break
            out = levels.feed([node.token for node in level], [node.parent_row for node in level])
        levels.drop()
        return session.tree([node.token for node in tree], tuple(node.parent for node in tree))

    def _prune_children(self, tokens: list[int], logs: list[float]) -> list[tuple[int, float]]:
        """Return the children of a node that the token level keeps (step 2 in the docstring of the
        class).
        """
        least, before, kept = self.params.share * exp(logs[0]), 0.0, []
        for token, log in zip(tokens, logs, strict=True):
            if before >= self.params.nucleus or not exp(log) > least * (log < logs[0]):
                break
            kept.append((token, log))
            before += exp(log)
        return kept

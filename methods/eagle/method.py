"""EAGLE: autoregression on features, and a static draft tree.

Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang: EAGLE: Speculative Sampling Requires Rethinking
Feature Uncertainty, ICML 2024, arXiv:2401.15077.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from methods.eagle.head import EagleHead
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    Levels,
    Method,
    MethodParams,
    Session,
    best_tree,
    host,
    tree_of_choices,
    tree_of_widths,
)

AUTHORS = tree_of_choices(
    tuple(map(int, ranks))
    for ranks in (
        "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100"
        "  0000 0001 0002  00000 00001"
    ).split()
)
"""Tree of the authors' code. Each node is the ranks of the children on its path."""


class EagleParams(MethodParams):
    """Parameters of `Eagle`."""

    head: str = Field(
        "auto",
        description="draft head: auto (the default head of the target), a folder or a hub id",
    )
    shape: Literal["tree", "chain"] = Field(
        "tree", description="draft a static tree, or a chain of the most likely tokens"
    )
    depth: int = Field(
        5,
        ge=1,
        description="maximum number of levels; each takes one forward of the head (authors'"
        " tree: 5)",
    )
    nodes: int = Field(
        25,
        ge=1,
        description="number of nodes of the tree; 25 is the tree of the authors' code, other"
        " sizes are built from the ranks that are most likely to be accepted",
    )


class Eagle(Method):
    """EAGLE: a one-layer head predicts the target's next features, and drafts a static tree.

    Lossless because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise that all methods share). The nodes are the head's most likely tokens, not drawn at random.
    A node is accepted with the probability that the target gives its token. In greedy decoding and
    coupled sampling, it is accepted if and only if the target chooses the same token.
    Differs from the paper: in sampling, children are the most likely tokens and not drawn at
    random. The authors' current code does the same. No draft exceeds the remaining token budget.

    One step:
    1. The head reads the new committed tokens, each with the target's feature of the previous
       token. Drop the head's KV entries of earlier draft tokens.
    2. Level by level, the head ranks the children of each node. Take the children that the static
       tree contains. Then the head reads the nodes that have children, each with the feature that
       it predicted for the parent.
    3. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "eagle"
    aliases: ClassVar[tuple[str, ...]] = ("eagle1",)
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("li2024eagle",)
    Params: ClassVar[type[MethodParams]] = EagleParams
    params: EagleParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = EagleHead
    paper_params: ClassVar[Mapping[str, Any]] = {"nodes": 25}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"shape", "depth", "nodes"})

    def start(self, session: Session) -> None:
        """Choose the draft tree, reserve space for it, and capture the features that the head
        reads.
        """
        params = self.params
        if params.shape == "chain":
            whole = tree_of_widths((1,) * params.depth)
        elif params.nodes == len(AUTHORS.nodes):
            whole = AUTHORS
        else:
            whole = best_tree(params.nodes, depth=params.depth)
        self.tree = whole.truncate(params.depth, session.target.vocab_size)
        # EAGLE's head reads the target's last hidden states, which are the input of the output
        # matrix.
        self.levels = Levels.of_head(session, *self.artifacts(), nodes=len(self.tree.nodes))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        if limit < 1:
            return session.chain(())
        levels = self.levels
        # Step 1: Run the head on the features of committed tokens. The last output row ranks the
        # root's children.
        out = levels.begin(session.pending_features(levels.state.length()))
        # Step 2: Draft level by level. Only nodes that have children are run through the head.
        tree = self.tree.truncate(limit, session.target.vocab_size)
        tokens: list[host.Ids] = []
        for ahead, level in enumerate(tree.levels()):
            children, _ = session.branch(out.rows, level.width, how="deterministic", ahead=ahead)
            tokens.append(level.select_tokens(children))
            if level.fed:  # the nodes that have children
                out = levels.feed(level.select_fed(tokens[-1]), level.fed_parents)
        levels.drop()
        if self.params.shape == "chain":
            return session.chain(host.concatenate(tokens))
        return session.tree(host.concatenate(tokens), tree.parents)

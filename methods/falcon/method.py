"""Falcon: semi-autoregressive drafting, with several tokens per pass of the head.

Xiangxiang Gao, Weisheng Xie, Yiwei Xiang, Feng Ji: Falcon: Faster and Parallel Inference of Large
Language Models through Enhanced Semi-Autoregressive Drafting and Custom-Designed Decoding Tree,
AAAI 2025, arXiv:2412.12639.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from methods._heads.trees import static_tree
from methods.falcon.head import FalconHead
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    Levels,
    Method,
    MethodParams,
    Session,
    host,
)

KMASK2_8LAYER_TREE = tuple(
    (*map(int, node), rank)
    for node, n in (
        entry.split(":")
        for entry in (
            ":20 0:10 1:2 2:2 3:1 00:10 01:2 02:2 03:1 10:2 20:1 30:1 000:10 001:2 002:1 010:2"
            " 011:1 020:1 021:1 030:1 100:2 200:1 300:1 0000:10 0001:2 0002:1 0010:1 0020:1"
            " 0100:1 0200:1 0300:1 1000:1 2000:1 3000:1 00000:9 00001:2 00002:1 00010:1 00011:1"
            " 00020:1 00100:1 00200:1 01000:1 02000:1 03000:1 10000:1 20000:1 30000:1 000000:9"
            " 000001:2 000002:1 000010:1 000100:1 001000:1 002000:1 010000:1 020000:1 030000:1"
            " 100000:1 200000:1 0000000:8 0000001:2 0000002:1 0000010:1 0000011:1 0000020:1"
            " 0000100:1 0001000:1 0010000:1 0020000:1 0100000:1 0200000:1 0300000:1"
            " 1000000:1 2000000:1"
        ).split()
    )
    for rank in range(int(n))
)
"""Tree `kmask2_8layer_tree` of Falcon's code, level by level.

The entries above give the number of children of each inner node.
"""


class FalconParams(MethodParams):
    """Parameters of `Falcon`."""

    head: str = Field(
        "auto",
        description="draft head: auto (the default head of the target), a folder or a hub id",
    )
    depth: int = Field(
        4, ge=1, description="maximum number of levels of the tree; one pass of the head drafts two"
    )
    nodes: int = Field(
        24,
        ge=1,
        description="number of nodes of the tree; of the authors' tree, the first nodes are used",
    )
    width: int = Field(8, ge=1, le=20, description="maximum number of children of a node")
    tree: Literal["likeliest", "kmask2_8layer_tree"] = Field(
        "likeliest",
        description="shape of the tree: built from the ranks that are most likely to be"
        " accepted (likeliest), or the authors' tree",
    )


class Falcon(Method):
    """Falcon: a head predicts a block of features per pass, and drafts a tree block by block.

    Lossless because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise that all methods share). Nodes are the head's most likely tokens, not drawn at random. A
    node is accepted with the probability that the target gives its token. In greedy decoding and
    coupled sampling, it is accepted if and only if the target chooses the same token.
    Differs from the authors' code: verification uses the target's own distribution. After full
    acceptance, the authors' code draws the next token at temperature 1. No draft exceeds the
    remaining token budget.

    One step:
    1. The head reads the new committed tokens, each with the target's feature of the previous
       token. One pass over the last k pairs of feature and token predicts k features.
    2. Feature i = 1, ..., k of a block ranks the tokens of its level i. The ranking is the same for
       all parents. Take the children that the static tree contains.
    3. After the last level of a block, each node with children ends a path of k tokens. In one
       pass, the head reads these paths with the features that ranked their tokens. It predicts the
       next k features after each path. Continue with step 2.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "falcon"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("gao2024falcon",)
    Params: ClassVar[type[MethodParams]] = FalconParams
    params: FalconParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = FalconHead
    tunable: ClassVar[frozenset[str] | None] = frozenset({"depth", "nodes", "width"})
    paper_params: ClassVar[Mapping[str, Any]] = {
        "tree": "kmask2_8layer_tree",
        "nodes": 165,
        "depth": 8,
        "width": 20,
    }

    def start(self, session: Session) -> None:
        """Choose the draft tree, reserve space for it, and capture the features that the head
        reads.
        """
        depth, width = self.params.depth, min(self.params.width, session.target.vocab_size)
        tree, nodes = self.params.tree, self.params.nodes
        self.tree = static_tree(tree, nodes, depth, width, choices=KMASK2_8LAYER_TREE)
        self.levels = Levels.of_head(session, *self.artifacts(), nodes=len(self.tree.nodes))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        tree = self.tree.truncate(limit, self.params.width)
        if not tree.nodes:
            return session.chain(())
        out = self.levels.begin(session.pending_features(self.levels.state.length()))
        k = len(out.rows)
        block: tuple[int, ...] = (0,)  # parent block of each fed node
        path: list[host.Ids] = []  # tokens of those nodes in their own block, by level
        tokens: list[host.Ids] = []
        for ahead, level in enumerate(tree.levels()):
            # Step 2: All nodes of one block have the same ranking of children at this level.
            ranked, _ = session.branch(
                out.rows[ahead % k :: k], level.width, how="deterministic", ahead=ahead
            )
            tokens.append(level.select_tokens(host.take(ranked, block)))
            if not level.fed:
                break
            path = [host.take(above, level.fed_parents) for above in path]
            path.append(level.select_fed(tokens[-1]))
            block = tuple(block[above] for above in level.fed_parents)
            # Step 3: Run the head on each path of k tokens, one row per token. Children of a path
            # read the output of its last row.
            if len(path) == k:
                rows = tuple(k * above + k - 1 if ahead >= k else 0 for above in block)
                parents = tuple(row for row in rows for _ in range(k))
                out = self.levels.feed(host.interleave(path), parents)
                block, path = tuple(range(len(block))), []
        self.levels.drop()
        return session.tree(host.concatenate(tokens), tree.parents)

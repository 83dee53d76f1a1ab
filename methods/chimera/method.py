"""Chimera: a draft model with a trigram encoder and a full context encoder.

Ziqian Zeng, Jiahong Yu, Qianshi Pang, Zihao Wang, Huiping Zhuang, Hongen Shao, Xiaofeng Zou:
Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all
Tokens, arXiv:2402.15758.
"""

from __future__ import annotations

from typing import ClassVar

from methods.chimera.head import LEVELS, ChimeraHead
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    Levels,
    Method,
    MethodParams,
    Session,
    best_tree,
    fill,
)


class ChimeraParams(MethodParams):
    """Parameters of `Chimera`."""

    head: str = Field(
        "auto",
        description="draft model: auto (the default one of the target), a folder or a hub id",
    )
    depth: int = Field(
        LEVELS,
        ge=1,
        le=LEVELS,
        description="number of levels of the tree; each takes one forward and one head",
    )
    nodes: int = Field(
        24,
        ge=1,
        description="number of nodes of the tree, which is built from the ranks that are most"
        " likely to be accepted",
    )
    width: int = Field(8, ge=1, le=10, description="maximum number of children of a node")


class Chimera(Method):
    """Chimera: drafts from the last three tokens and the target's hidden states of the text.

    Lossless because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise that all methods share). Nodes are the draft model's most likely tokens, not drawn at
    random. A node is accepted with the probability that the target gives its token. In greedy
    decoding and coupled sampling, it is accepted if and only if the target chooses the same token.
    Differs from the authors' code: verification uses the target's own distribution at every
    temperature. The tree is built as in Medusa, and each node has its own trigram; the authors'
    code follows only the most likely token. No draft exceeds the remaining token budget.

    One step:
    1. Full context: compute keys and values of the target's hidden states of new committed tokens.
    2. Encode the trigram that ends in the last committed token. The layer attends to the full
       context, and output head 1 ranks the next tokens.
    3. Level by level, take the children that the tree selects from the ranking at their parent. The
       trigram of each node attends to the full context and to its ancestors. At level i = 1, 2,
       ..., output head i + 1 ranks the children.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "chimera"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("zeng2024chimera",)
    Params: ClassVar[type[MethodParams]] = ChimeraParams
    params: ChimeraParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = ChimeraHead
    tunable: ClassVar[frozenset[str] | None] = frozenset({"depth", "nodes", "width"})

    def start(self, session: Session) -> None:
        """Choose the draft tree, reserve space for it, and capture the hidden states that the head
        reads.
        """
        depth, width = self.params.depth, min(self.params.width, session.target.vocab_size)
        self.tree = best_tree(self.params.nodes, depth=depth, width=width)
        self.levels = Levels.of_head(session, *self.artifacts(), nodes=len(self.tree.nodes))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        tree = self.tree.truncate(limit, self.params.width)
        if not tree.nodes:
            return session.chain(())
        levels = self.levels
        # Steps 1 and 2: Add the keys and values of new committed tokens, and rank the first draft
        # tokens.
        first = levels.begin(session.pending_features(levels.state.length()))
        # Step 3: Fill the tree. The keys and values of draft tokens are dropped afterwards.
        draft = fill(tree, levels, first, session).draft
        levels.drop()
        return draft

"""Token Recycling.

Xianzhen Luo, Yixuan Wang, Qingfu Zhu, Zhiming Zhang, Xuanyu Zhang, Qing Yang, Dongliang Xu: Turning
Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling, ACL 2025,
arXiv:2408.08696. The tree's shape: Tianle Cai et al.: Medusa, ICML 2024, arXiv:2401.10774.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from specbench_cli.api import (
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Session,
    best_tree,
    host,
    ranking,
)


class TokenRecyclingParams(MethodParams):
    """Parameters of `TokenRecycling`."""

    width: int = Field(8, ge=1, le=10, description="tokens kept after each token (k)")
    nodes: int = Field(80, ge=1, description="size of the tree")
    depth: int = Field(6, ge=1, description="levels of the tree")
    scope: Literal["run", "prompt"] = Field(
        "run", description="what is kept lives for a pass over all prompts, or for one prompt"
    )


class TokenRecycling(Method):
    """Token Recycling: stores the target's likely successors of each token, and drafts a tree.

    Exact because the tree is a function of the past: its tokens are point masses, each of which
    stands with the target's own probability of it.
    Differs from the authors' code: which decodes greedily alone; the tree has their size, depth and
    width, and the shape that Medusa's construction gives it; of the rows of one token that a step
    made, the highest node's is kept, where theirs is any; the last step's are kept too.

    With scope `run` how fast a prompt is, never what comes out, depends on those before it. The
    matrix takes 8 bytes for each of the vocabulary's tokens and `width`, however long it runs.

    One step, with the matrix M[token] of the `width` likeliest next tokens, zeros at first:
    1. The tree: a node of rank r below a token x holds M[x][r]. Level after level, from the root.
    2. (engine) One target forward over the last committed token and the tree; verify; commit.
    3. For the root and each node, accepted or not, M[its token] = the best tokens of the target's
       logits there.
    """

    name: ClassVar[str] = "token-recycling"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("luo2025recycling",)
    Params: ClassVar[type[MethodParams]] = TokenRecyclingParams
    params: TokenRecyclingParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def start(self, session: Session) -> None:
        """The matrix as it was left, or an empty one; room for the tree."""
        params, vocab = self.params, session.target.vocab_size
        self.width = min(params.width, vocab)
        self.shape = best_tree(params.nodes, depth=params.depth, width=self.width)
        session.reserve(len(self.shape.nodes))
        kept = session.memory if params.scope == "run" else {}
        if "next" not in kept:
            empty = torch.zeros(vocab, self.width, dtype=torch.int64, device=session.device)
            kept["next"] = empty
        self.next: Tensor = kept["next"]

    def propose(self, session: Session, limit: int) -> Draft:
        """Step 1."""
        shape = self.shape.truncate(limit, self.width)
        above = host.ids(session.tokens()[-1:], session.device)  # the nodes that have children
        self.known = [above]  # the tokens of the root and all nodes
        for level in shape.levels():
            tokens = level.select_tokens(self.next.index_select(0, above))
            self.known.append(_sent(tokens, session))
            above = _sent(level.select_fed(tokens), session)
        return session.tree(torch.cat(self.known[1:] or [above[:0]]), shape.parents)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Step 3."""
        known, best = torch.cat(self.known), ranking.top_indices(session.verified(), self.width)
        places = torch.arange(len(known), device=known.device)
        last = torch.where(known[:, None] == known, places, -1).amax(1)  # of each one's equals
        self.next.index_copy_(0, known, best.index_select(0, last))


def _sent(tokens: list[int] | Tensor, session: Session) -> Tensor:
    return tokens if isinstance(tokens, Tensor) else host.ids(tokens, session.device)

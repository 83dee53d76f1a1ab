"""Token Recycling: drafts from the target's earlier candidates for the next token.

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

    width: int = Field(
        8,
        ge=1,
        le=10,
        description="number of next tokens that are stored per token (k in the paper: 8)",
    )
    nodes: int = Field(80, ge=1, description="number of nodes of the tree (paper: 80)")
    depth: int = Field(6, ge=1, description="number of levels of the tree (paper: 6)")
    scope: Literal["run", "prompt"] = Field(
        "run", description="keep the stored tokens for the whole run, or for one prompt"
    )


class TokenRecycling(Method):
    """Token Recycling: drafts a tree from earlier candidates of the target after each token.

    Lossless because the tree depends only on earlier tokens. Its tokens are not drawn at random. A
    draft token is accepted with the probability that the target gives it.
    Differs from the authors' code, which supports only greedy decoding. The tree has the same size,
    depth and width as in the authors' code, but is built as in Medusa. If several nodes of a step
    have the same token, the candidates at the last of these nodes are stored. The authors' code
    stores the candidates of an arbitrary one. Candidates of the last step are stored too.

    With `scope=run`, data from earlier prompts is kept. The speed of a prompt then depends on
    earlier prompts, but its output does not. The matrix takes 8 * `width` bytes per token of the
    vocabulary.

    One step. The adjacency matrix M contains the `width` most likely next tokens after each token,
    and is initially zero:
    1. Build the tree from the root, level by level. The child of rank r after a token x is M[x][r].
    2. (engine) One target forward over the last committed token and the tree; verify; commit.
    3. For the root and each node, accepted or not, set M[x] to the most likely tokens of the
       target's logits at the node, where x is the token of the node.
    """

    name: ClassVar[str] = "token-recycling"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("luo2025recycling",)
    Params: ClassVar[type[MethodParams]] = TokenRecyclingParams
    params: TokenRecyclingParams
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def start(self, session: Session) -> None:
        """Take the adjacency matrix from the run's memory, or create it.

        Reserve space for the draft tree.
        """
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
        """Return the draft of one decoding step: step 1 of the class docstring."""
        shape = self.shape.truncate(limit, self.width)
        above = host.ids(
            session.tokens()[-1:], session.device
        )  # tokens of the nodes that have children
        self.known = [above]  # the tokens of the root and all nodes
        for level in shape.levels():
            tokens = level.select_tokens(self.next.index_select(0, above))
            self.known.append(_to_ids(tokens, session))
            above = _to_ids(level.select_fed(tokens), session)
        return session.tree(torch.cat(self.known[1:] or [above[:0]]), shape.parents)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 3 of the class docstring."""
        known, best = (
            torch.cat(self.known),
            ranking.top_indices(session.verified_logits(), self.width),
        )
        places = torch.arange(len(known), device=known.device)
        last = torch.where(known[:, None] == known, places, -1).amax(
            1
        )  # last node with the same token
        self.next.index_copy_(0, known, best.index_select(0, last))


def _to_ids(tokens: list[int] | Tensor, session: Session) -> Tensor:
    return tokens if isinstance(tokens, Tensor) else host.ids(tokens, session.device)

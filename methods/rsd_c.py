"""Recursive speculative decoding with constant branching (RSD-C).

Wonseok Jeon, Mukul Gagrani, Raghavv Goel, Junyoung Park, Mingu Lee, Christopher Lott: Recursive
Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement, 2024,
arXiv:2402.14160.
"""

from __future__ import annotations

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
    Widths,
)


class RsdCParams(MethodParams):
    """Parameters of `RsdC`."""

    width: int = Field(2, ge=1, description="number of children of each node (branching factor)")
    depth: int = Field(
        3,
        ge=1,
        description="number of levels of the tree (L in the paper); each takes one draft forward",
    )
    widths: Widths | None = Field(
        None,
        description="number of children of each node, level by level, such as 4,2,1 (b in the"
        " paper); by default `width` at each of `depth` levels",
    )


class RsdC(Method):
    """RSD-C: all nodes of a level have the same number of children, drawn without replacement.

    Lossless because recursive rejection tests siblings in the order of their draws. A child x is
    accepted with probability min(1, r(x) / d(x)). d is the draft model's distribution q without the
    earlier siblings. r is the target's distribution p for the first child. Each rejection changes r
    to norm(max(r - d, 0)). If all children are rejected, the next token is drawn from the last r.
    In greedy decoding and coupled sampling (all methods share the Gumbel noise), the children are
    the draft model's most likely tokens. A child is accepted if and only if the target chooses it.
    Differs from the paper: a node never has more children than the vocabulary has tokens. If too
    few tokens have positive probability, the other children are drawn uniformly from the remaining
    tokens.

    One step:
    1. The draft model processes its pending tokens, which gives the root's distribution.
    2. Draw b children of every node of the level, one after another without replacement. b is set
       per level.
    3. The draft model processes these children in one forward. Each child attends only to its own
       ancestors. This gives the distributions of the next level. Continue with step 2.
    4. (engine) One target forward over the last committed token and all nodes; recursive rejection;
       commit.
    5. Keep the draft model's KV entries of accepted nodes.
    """

    name: ClassVar[str] = "rsd-c"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("jeon2024rsd",)
    Params: ClassVar[type[MethodParams]] = RsdCParams
    params: RsdCParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and prefill the draft model."""
        params, most = self.params, session.target.vocab_size
        widths = params.widths or (params.width,) * params.depth
        self.widths = [min(width, most) for width in widths]
        sizes = [1]
        for width in self.widths:
            sizes.append(sizes[-1] * width)
        self.levels = Levels.of_draft(session, nodes=sum(sizes[1:]), fed=sum(sizes[1:-1]))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        widths, levels = self.widths[:limit], self.levels
        tokens, parents, distributions = list[Tensor](), list[int](), list[Tensor]()
        level, above = (
            [ROOT],
            list[int](),
        )  # nodes of the newest level; indices of their parents in the level above
        for ahead, width in enumerate(widths):
            # Steps 1 and 3: Get the draft model's distributions at the newest nodes.
            if ahead:
                out = levels.feed(tokens[-1], above)
            else:
                out = levels.begin(session.pending_tokens(levels.state.length()))
            # Step 2: Draw x_1 from q, x_2 from q without x_1, and so on, for all nodes of the level
            # at once.
            children, q = session.branch(out.rows, width, how="without_replacement", ahead=ahead)
            tokens.append(children.flatten())
            if q is not None:
                distributions.append(q.repeat_interleave(width, 0))
            above = [place for place in range(len(level)) for _ in range(width)]
            parents += [level[place] for place in above]
            level = [*range(len(parents) - len(above), len(parents))]
        if not tokens:
            return session.chain(())
        return session.tree(torch.cat(tokens), tuple(parents), distributions)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 5 of the class docstring.

        The draft model processed the nodes in their order. It did not process the deepest level.
        """
        self.levels.keep(outcome.path)

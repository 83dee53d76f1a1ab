"""A minimal tree method, as a plug-in: a complete tree of the draft model's children.

Chain drafts of `sps` widened: at every node `width` tokens instead of one, to `depth` levels. It
shows how a method drafts level by level, and what verification of trees must bear.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.verify.tree import ROOT


class PlainTreeParams(MethodParams):
    """Parameters of `PlainTree`."""

    width: int = Field(2, ge=1, description="children of every node")
    depth: int = Field(2, ge=1, description="levels of the tree")
    law: Literal["point", "iid", "wor"] = Field(
        "wor", description="children under rejection: likeliest, drawn with or without replacement"
    )


class PlainTree(Method):
    """A complete tree from the draft model, verified in one target forward.

    Exact because at every node one child stands by a rule that, with the token in place of
    rejected ones, draws from the target's law; in greedy and coupled decoding a child stands iff
    it is the target's own choice.

    One step:
    1. Feed the draft the committed tokens that it has not seen; choose the root's children.
    2. For each further level, feed it the last level's nodes, each seeing its own ancestors alone,
       and choose theirs.
    3. (engine) One target forward over the last committed token and all nodes; verify; commit.
    4. Keep the draft's rows of the nodes that stood.
    """

    name: ClassVar[str] = "plain-tree"
    Params: ClassVar[type[MethodParams]] = PlainTreeParams
    params: PlainTreeParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Make room for the largest tree and prefill the draft."""
        nodes = sum(self.params.width**level for level in range(1, self.params.depth + 1))
        session.reserve(nodes)
        model = session.draft()
        self.levels = Levels(session, model, session.new_state(model, slack=nodes))
        self.levels.begin(session.since(0))

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        width, how = self.params.width, self.params.law
        depth = min(self.params.depth, limit)
        if depth < 1:
            return session.chain(())
        out = self.levels.begin(session.since(self.levels.state.length()))
        tokens, laws = [], []
        parents: list[int] = []
        level = [ROOT]
        for ahead in range(depth):
            if ahead:
                out = self.levels.feed(tokens[-1], [at // width for at in range(len(level))])
            children, q = session.branch(out.logits[0], width, how=how, ahead=ahead)
            tokens.append(children.flatten())
            if q is not None:
                laws.append(q.repeat_interleave(width, 0))
            above, level = level, [len(parents) + child for child in range(len(level) * width)]
            parents += [node for node in above for _ in range(width)]
        if not laws:
            return Draft(torch.cat(tokens), tuple(parents))
        return Draft(torch.cat(tokens), tuple(parents), law=how, q=torch.cat(laws))

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Step 4: nodes are numbered as they are fed; the deepest level never is."""
        self.levels.keep(outcome.path)

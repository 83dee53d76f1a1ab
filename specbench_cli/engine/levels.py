"""Drafting level by level: one forward for all nodes of a tree's level, whoever drafts.

Each node sees the committed rows, its own ancestors and itself, at the position it has on its own
path. The rows of a state are those of the committed text, then those of the nodes in the order in
which they were fed; a tree's deepest level is never fed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specbench_cli.engine.decoder import State
from specbench_cli.engine.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Features, Out, Tokens


class Levels:
    """A model's state while a tree is drafted with it, a step of decoding after another.

    A step: `begin`, then `feed` for each further level, then, once the target has decided, `keep`
    or `drop`. Nothing here waits for the device.

    Args:
        session: the request that is drafted for.
        model: a draft model, or a head.
        state: a state of it with room for the nodes fed in a step beyond the text; `Levels` alone
            writes to it.

    Attributes:
        fed: nodes fed since `begin`.
    """

    def __init__(self, session: Session, model: Metered, state: State) -> None:
        self._session, self.model, self.state = session, model, state
        self._eyes: dict[int, Tensor] = {}
        self.fed = self._depth = 0
        self._text = self._root = 0  # length of the text, and its last token's position, at `begin`
        self._seen: Tensor | None = None  # what each node of the last level sees
        self._left: Tensor | None = None  # what a head's last forward left: the root's, a level's
        self._forget()

    def begin(self, x: Tokens | Features) -> Out:
        """Feed committed tokens that the state has not seen, and keep their rows.

        Args:
            x: `session.since(state.length())`, or a head's `session.unread(state.length())`; the
                prompt, to begin with.
        Returns:
            logits [1, 1, V] after the last of them: the root's, from which its children come.
        """
        out = self.model.forward(x, self.state)
        self.state.commit(0, range(x.ids.shape[1]))
        self._forget()
        self._left = out.hidden[0, -1:] if isinstance(x, Features) else None
        return out

    def feed(
        self,
        tokens: Tensor,
        parents: Tensor,
        rows: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Out:
        """One forward over n nodes of the next level.

        Args:
            tokens: [n] int64.
            parents: [n] int64, each one's parent by its place in the last `feed`; the first level's
                parent is the root, whatever is given.
            rows: [n, w], for heads: features of the parents; default: what the head's own forward
                over them left (`Out.hidden`).
            mask: [n, fed + n] bool, which of the nodes fed so far and of these each one sees, where
                it is known (a template's); default: what its parent sees, and itself.
        Returns:
            logits [1, n, V] of the nodes' children.
        """
        n = tokens.shape[0]
        if rows is None and self._left is not None:
            above = self._left
            rows = above.index_select(0, parents) if self.fed else above.expand(n, -1)
        x = Tokens(tokens[None]) if rows is None else Features(tokens[None], rows[None])
        self._depth, self.fed = self._depth + 1, self.fed + n
        if self.fed == self._depth:  # a chain so far, as any text
            out = self.model.forward(x, self.state, logits_at="all")
        else:
            mask = self._sight(n, parents) if mask is None else mask
            at = torch.full((1, n), self._root + self._depth, device=tokens.device)
            out = self.model.forward(x, self.state, positions=at, mask=mask, logits_at="all")
        self._seen = mask
        if self._left is not None:
            self._left = out.hidden[0]
        return out

    def keep(self, path: Iterable[int]) -> None:
        """Keep the rows of accepted nodes, once the session has committed them.

        Args:
            path: the nodes from the root's child down, by their places in the order of feeding; a
                node that was not fed ends it. Of the last committed token, which roots the next
                tree, no row is kept.
        """
        most = len(self._session.tokens()) - self._text - 1
        rows: list[int] = []
        for node in path:
            if not 0 <= node < self.fed or len(rows) == most:
                break
            rows.append(node)
        self.state.commit(0, rows)
        self._forget()

    def drop(self) -> None:
        """Forget all nodes: a head's rows are made anew of the target's true features."""
        self.keep(())

    def _forget(self) -> None:
        """No nodes: the last row that is kept is the root's, or comes before it."""
        self._text = len(self._session.tokens())
        self._root = self.state.length() - 1  # its position: rows of text stand at their index
        self._depth = self.fed = 0
        self._seen = self._left = None

    def _sight(self, n: int, parents: Tensor) -> Tensor:
        """What n new nodes see of all nodes: what their parents see, and themselves."""
        if n not in self._eyes:
            self._eyes[n] = torch.eye(n, dtype=torch.bool, device=parents.device)
        if self._depth == 1:
            return self._eyes[n]
        if self._seen is None:  # above them is a chain
            seen = torch.ones(n, self._depth - 1, dtype=torch.bool, device=parents.device)
        else:
            seen = self._seen.index_select(0, parents)
        return torch.cat((seen, self._eyes[n]), 1)

"""Logits processors: what changes the target's logits by the output before them.

A processor comes before temperature and cuts (`sampling`), and is part of what an output is held
against: vanilla is processed likewise, and so are the rows that verdicts go by. It is applied in
one place, where a draft is decided, so that no method knows of it: a node's row is processed by the
text that leads to the node. Drafts need none of it to be exact: a token that the processed target
cannot say has probability 0 there, and is rejected. Chains that are picked token by token
(`Session.pick`) leave such tokens out all the same where that is cheap; q is then the distribution
of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class LogitsProcessor(ABC):
    """Changes logits by the output before them, and by nothing else; the same for a whole run."""

    @abstractmethod
    def begin(self) -> RequestProcessor:
        """What processes one request, from before its first token."""

    def process_output(self, rows: Tensor, ids: Sequence[int]) -> Tensor:
        """The logits [n, V] that each of an output's n tokens was chosen from, processed."""
        return self.begin()(rows, (), ids[:-1])


class RequestProcessor(ABC):
    """A processor at work on one request; remembers what it has read of the output."""

    @abstractmethod
    def __call__(
        self,
        rows: Tensor,
        output: Sequence[int],
        tokens: Sequence[int],
        parents: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Logits at the end of an output and behind the nodes of a draft, processed.

        Args:
            rows: [r, V], of the root and the first r - 1 nodes; left as they are.
            output: ids that were committed; begins with that of the call before.
            tokens: ids of the draft's nodes.
            parents: of the nodes, as in `Draft`; None for a chain.
        Returns:
            [r, V]; of a node that the output cannot come to, whatever there is.
        Raises:
            MethodFault: the output is none that the processed target can say.
        """

    def process_draft(self, rows: Tensor, output: Sequence[int], path: Sequence[int]) -> Tensor:
        """A draft model's logits behind a path of draft tokens, without what the target cannot say
        there, where that is known without a forward: it would be rejected. Else as they are.

        Args:
            rows: [1, V].
            path: ids from the root down.
        """
        return rows

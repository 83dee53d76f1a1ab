"""Logits processors: changes of the target's logits that depend on the output before them.

A processor runs before temperature and cuts (`sampling`). It is part of the target's definition:
vanilla and the verdicts on outputs use it too. The engine applies it when it decides a draft, so
methods need not know it: a node's row is processed with the text that leads to the node. Drafts are
exact without it: a token that the processed target forbids has probability 0 and is rejected.
Chains that are chosen token by token (`Session.pick`) skip forbidden tokens if that is cheap. Then
q is the distribution without them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class LogitsProcessor(ABC):
    """Change of logits that depends only on the output before them. The same for a whole run."""

    @abstractmethod
    def begin(self) -> RequestProcessor:
        """Return the processor of one request, before its first token."""

    def process_output(self, rows: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the processed logits [n, V] that each of an output's n tokens was chosen from."""
        return self.begin()(rows, (), ids[:-1])


class RequestProcessor(ABC):
    """Logits processor of one request. It keeps the state of the output so far."""

    @abstractmethod
    def __call__(
        self,
        rows: Tensor,
        output: Sequence[int],
        tokens: Sequence[int],
        parents: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return the processed logits at the end of an output and after the nodes of a draft.

        Args:
            rows: [r, V], of the root and the first r - 1 nodes. They are not changed.
            output: Committed ids. It begins with the output of the last call.
            tokens: Ids of the draft's nodes.
            parents: Parents of the nodes, as in `Draft`. None for a chain.

        Returns:
            [r, V]. Rows of nodes that the output cannot reach are undefined.

        Raises:
            MethodFault: the processed target cannot generate the output.
        """

    def process_draft(self, rows: Tensor, output: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return a draft model's logits without tokens that the target would reject.

        This is optional: the default returns the rows unchanged.

        Args:
            rows: [1, V].
            path: Draft tokens from the root down.
        """
        return rows

"""Base classes of logits processors, which change the target's logits depending on the output.

A processor, such as a grammar, runs before temperature, top-k and top-p. It is part of the target:
plain decoding uses it too, and outputs are judged with it. The engine applies it when it verifies a
draft, so methods need not know about it. A draft may contain a token that the processor forbids:
the token then has probability 0 and is rejected.

When `Session.pick` chooses a draft token, it may leave out forbidden tokens (`process_draft`). The
draft distribution q is then the one without them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class LogitsProcessor(ABC):
    """Logits processor of a run. A change of logits may depend only on the output before them."""

    @abstractmethod
    def begin(self) -> RequestProcessor:
        """Return a processor for a new request."""

    def process_output(self, rows: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the processed logits [n, V] for the positions of an output's n tokens."""
        return self.begin()(rows, (), ids[:-1])


class RequestProcessor(ABC):
    """Logits processor of one request, with a state for the output so far."""

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
            output: Committed ids. They extend the output of the last call.
            tokens: Ids of the draft's nodes.
            parents: Parents of the nodes, as in `Draft`. None for a chain.

        Returns:
            [r, V]. Rows after a forbidden token are undefined.

        Raises:
            MethodFault: the processed target cannot generate the output.
        """

    def process_draft(self, rows: Tensor, output: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return a draft model's logits, with -inf for tokens that the target would reject.

        This is optional. The default returns the rows unchanged.

        Args:
            rows: [1, V].
            path: Draft tokens from the root down.
        """
        return rows

"""Base classes of logits processors, which change the target's logits depending on the output.

A processor, such as a grammar mask, runs before temperature, top-k and top-p. It belongs to the
target: plain decoding uses it too, and audits apply it when they check outputs. The engine applies
the processor when it verifies a draft, so methods need not know about it. A draft may contain a
token that the processor forbids. This token then has probability 0 and is rejected.

When `Session.pick` chooses a draft token, it may leave out forbidden tokens (`process_draft`). The
draft distribution q then does not contain these tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class LogitsProcessor(ABC):
    """Logits processor of a run. It may change logits depending only on the output before them."""

    @abstractmethod
    def begin(self) -> RequestProcessor:
        """Return a processor for a new request."""

    def process_output(self, rows: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the processed logits [n, V] that predict the n tokens `ids` of an output."""
        return self.begin()(rows, (), ids[:-1])


class RequestProcessor(ABC):
    """Logits processor of one request. Its state depends on the output so far."""

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
            rows: Logits [r, V] of the root and the first r - 1 nodes. The function does not change
                them.
            output: Token ids of the output so far. It begins with the output of the last call.
            tokens: Token ids of the draft's nodes.
            parents: Index of each node's parent, -1 for the root. None for a chain.

        Returns:
            Logits [r, V]. Rows after a forbidden token are undefined.

        Raises:
            MethodFault: The target with this processor cannot generate the output.
        """

    def process_draft(self, rows: Tensor, output: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return a draft model's logits, with -inf for tokens that the target would reject.

        A subclass may omit this function. The default returns the logits unchanged.

        Args:
            rows: Logits [1, V].
            path: Draft tokens before this position, from the root down.
        """
        return rows

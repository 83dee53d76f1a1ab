"""Messages between workers: a few integers and, if needed, rows of distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specbench_cli.engine.types import Forward


@dataclass(frozen=True, slots=True)
class Message:
    """An order to a drafter, or its answer.

    Attributes:
        ints: Integers, such as tokens and lengths. Both sides define their meaning.
        rows: [k, V] float32, distributions that tokens were drawn from, or log-probabilities. None
            if no distribution is needed. The sender's rows are on its device; the receiver gets a
            copy on its own device.
    """

    ints: tuple[int, ...]
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes."""
        return 8 * len(self.ints) + (0 if self.rows is None else self.rows.nbytes)


@dataclass(slots=True)
class Reply:
    """Reply to an order, with or without an answer.

    Times are in ns of the monotonic clock, which all processes of a machine share.

    Attributes:
        number: Number of the order.
        message: The answer, or None.
        forwards: Forwards since the last reply.
        read_ns: Time when the worker read the order.
        sent_ns: Time when the worker sent this reply.
        received_ns: Time when the target read this reply.
    """

    number: int
    message: Message | None
    forwards: Sequence[Forward]
    read_ns: int
    sent_ns: int
    received_ns: int

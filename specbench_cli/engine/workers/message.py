"""Messages between the target's process and a drafter: integers, and rows of distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specbench_cli.engine.types import Forward


@dataclass(frozen=True, slots=True)
class Message:
    """An order from the method to its drafter, or the drafter's answer.

    Attributes:
        ints: Integers, such as tokens and lengths. The method defines their meaning.
        rows: float32 [k, V]: distributions that tokens were drawn from, or log-probabilities. None
            if none are needed. The receiver gets a copy on its own device.
    """

    ints: tuple[int, ...]
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes."""
        return 8 * len(self.ints) + (0 if self.rows is None else self.rows.nbytes)


@dataclass(slots=True)
class Reply:
    """Reply of a worker to an order, with or without an answer.

    Times are in ns of the monotonic clock, which all processes of a machine share.

    Attributes:
        number: Number of the order.
        message: The answer, or None.
        forwards: Forwards that the drafter has run since the last reply.
        read_ns: Time when the worker read the order.
        sent_ns: Time when the worker sent this reply.
        received_ns: Time when the target's process read this reply.
    """

    number: int
    message: Message | None
    forwards: Sequence[Forward]
    read_ns: int
    sent_ns: int
    received_ns: int

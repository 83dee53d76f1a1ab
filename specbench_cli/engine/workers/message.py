"""What workers tell each other: a few whole numbers and, where distributions matter, rows of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specbench_cli.engine.types import Forward


@dataclass(frozen=True, slots=True)
class Message:
    """An order to a drafter, or its answer.

    ints: what it is about, as the two sides agree on it: tokens, lengths.
    rows: [k, V] float32, the distributions that tokens were drawn from, or log-probabilities; None
        where no distribution is needed. On the sender's device; the receiver gets a copy of its
        own, on its device.
    """

    ints: tuple[int, ...]
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes to tell it."""
        return 8 * len(self.ints) + (0 if self.rows is None else self.rows.nbytes)


@dataclass(slots=True)
class Reply:
    """What comes back of every order, whether an answer is due or not. Times of the monotonic
    clock, which all processes of a machine share.

    number: the order's; message: the answer, if one is due.
    forwards: what was computed since the last reply.
    read_ns: when the order was read; sent_ns: when this was sent; heard_ns: when it was read.
    """

    number: int
    message: Message | None
    forwards: Sequence[Forward]
    read_ns: int
    sent_ns: int
    received_ns: int

"""Packing of chats into sequences of equal length, with little padding."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.errors import UsageError

N_WAITING = 32
"""Number of buffered chats to choose from. A larger number needs less padding."""
MAX_SKIPPED = 10_000
"""Number of consecutive chats that may be too long, before packing gives up."""


class EncodedChat(NamedTuple):
    """Token ids of a chat, and the loss weight of each token.

    Attributes:
        first_row: row of the chat's first token in the stored hidden states of all chats.
    """

    ids: list[int]
    weights: list[float]
    first_row: int = 0


class TrainingBatch(NamedTuple):
    """Batch of packed sequences. All tensors are [sequences, length].

    Attributes:
        inputs: token ids.
        targets: the next token of each input.
        weights: loss weight of each target.
        starts: for each input, the position of the first token of its chat. None means that each
            sequence is one chat.
        rows: row of each input in the stored hidden states. Rows of padding are arbitrary.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    starts: Tensor | None = None
    rows: Tensor | None = None

    def to_device(self, device: torch.device) -> "TrainingBatch":
        """Copy the batch to a device, without waiting for earlier work on it."""
        inputs, targets, weights = (host.send(part, device) for part in self[:3])
        rest = (None if part is None else host.send(part, device) for part in self[3:])
        return TrainingBatch(inputs, targets, weights, *rest)


class PackedChats(ABC):
    """Endless stream of chats, packed into batches.

    `state` and `restore` resume the stream exactly.

    Chats are not split, because an answer without its question would train the model to guess.
    """

    def __init__(self, padding: int) -> None:
        self._padding = padding
        self._waiting: list[EncodedChat] = []

    @abstractmethod
    def draw(self) -> EncodedChat:
        """Return the next chat."""

    @abstractmethod
    def get_position(self) -> dict[str, Any]:
        """Return the position in the stream as JSON."""

    @abstractmethod
    def seek(self, position: dict[str, Any]) -> None:
        """Continue at a position that an earlier call of `get_position` returned."""

    def batch(self, sequences: int, length: int) -> TrainingBatch:
        """Return the next batch of `sequences` x `length` tokens."""
        filled = [self._fill(length + 1) for _ in range(sequences)]
        ids, weights, starts, rows = (torch.tensor(part) for part in zip(*filled, strict=True))
        parts = (ids[:, :-1], ids[:, 1:], weights[:, 1:], starts[:, :-1], rows[:, :-1])
        return TrainingBatch(*(part.contiguous() for part in parts))

    def state(self) -> dict[str, Any]:
        """Return the position in the stream, and the chats that are drawn but not used yet, as
        JSON.
        """
        return {**self.get_position(), "waiting": self._waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a position that an earlier call of `state` returned."""
        position = dict(state)
        self._waiting = [EncodedChat(*chat) for chat in position.pop("waiting")]
        self.seek(position)

    def _fill(self, length: int) -> tuple[list[int], list[float], list[int], list[int]]:
        """Pack chats into one sequence.

        Return its token ids, loss weights, chat starts and row numbers.

        The first waiting chat that fits is added, until no chat fits. The rest is padding (about
        2%). Chats that are longer than a sequence are skipped.
        """
        ids, weights, starts, rows = list[int](), list[float](), list[int](), list[int]()
        waiting = self._waiting
        while True:
            while len(waiting) < N_WAITING:
                waiting.append(self._draw_within(length))
            begin = len(ids)
            room = length - begin
            first = next((i for i, chat in enumerate(waiting) if len(chat.ids) <= room), None)
            if first is None:
                padding = [self._padding] * room
                begins = starts + [begin] * room
                return ids + padding, weights + [0.0] * room, begins, rows + [0] * room
            chat = waiting.pop(first)
            ids += chat.ids
            weights += chat.weights
            starts += [begin] * len(chat.ids)
            rows += range(chat.first_row, chat.first_row + len(chat.ids))

    def _draw_within(self, length: int) -> EncodedChat:
        """Return the next chat that is not longer than a sequence.

        Raises:
            UsageError: there is no such chat.
        """
        for _ in range(MAX_SKIPPED):
            chat = self.draw()
            if len(chat.ids) <= length:
                return chat
        raise UsageError(
            f"{MAX_SKIPPED} consecutive chats are longer than a sequence of {length} tokens",
            "use a schedule with longer sequences",
        )

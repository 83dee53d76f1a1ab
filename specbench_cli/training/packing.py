"""Whole chats packed into sequences of one length, with almost no padding."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.errors import UsageError

N_WAITING = 32  # chats at hand to fill a sequence with: more leave less padding
MAX_SKIPPED = 10_000  # in a row, for being too long; then there is none that fits


class EncodedChat(NamedTuple):
    """A chat's token ids and the weight of each in the loss.

    first: the row of its first token, where features of all chats are kept.
    """

    ids: list[int]
    weights: list[float]
    first_row: int = 0


class TrainingBatch(NamedTuple):
    """Token ids `inputs` and `targets`, and the targets' `weights`, each [sequences, length].

    starts: [sequences, length], the place where each input's chat begins; None: a sequence is one.
    rows: [sequences, length], the inputs' rows where features are kept; of padding, any.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    starts: Tensor | None = None
    rows: Tensor | None = None

    def to_device(self, device: torch.device) -> "TrainingBatch":
        """The same on a device; what was launched there before is not waited for."""
        inputs, targets, weights = (host.send(part, device) for part in self[:3])
        rest = (None if part is None else host.send(part, device) for part in self[3:])
        return TrainingBatch(inputs, targets, weights, *rest)


class PackedChats(ABC):
    """An endless stream of chats as batches; `state` and `restore` continue it exactly.

    A chat is never cut: an answer whose question is out of sight would teach guessing.
    """

    def __init__(self, padding: int) -> None:
        self._padding = padding
        self._waiting: list[EncodedChat] = []

    @abstractmethod
    def draw(self) -> EncodedChat:
        """The next chat."""

    @abstractmethod
    def get_position(self) -> dict[str, Any]:
        """Where `draw` is, as JSON."""

    @abstractmethod
    def seek(self, place: dict[str, Any]) -> None:
        """Go to a place that `place` gave."""

    def batch(self, sequences: int, length: int) -> TrainingBatch:
        """The next `sequences` x `length` tokens; the target of each is the one that follows."""
        filled = [self._fill(length + 1) for _ in range(sequences)]
        ids, weights, starts, rows = (torch.tensor(part) for part in zip(*filled, strict=True))
        parts = (ids[:, :-1], ids[:, 1:], weights[:, 1:], starts[:, :-1], rows[:, :-1])
        return TrainingBatch(*(part.contiguous() for part in parts))

    def state(self) -> dict[str, Any]:
        """The place in the data as JSON."""
        return {**self.get_position(), "waiting": self._waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        place = dict(state)
        self._waiting = [EncodedChat(*chat) for chat in place.pop("waiting")]
        self.seek(place)

    def _fill(self, length: int) -> tuple[list[int], list[float], list[int], list[int]]:
        """Ids, weights, starts and rows of one sequence: of the waiting chats always the first
        that fits, then padding (about 2%).

        A chat longer than a whole sequence is passed over; stages with long ones read such too.
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
        """The next chat that fits in a sequence."""
        for _ in range(MAX_SKIPPED):
            chat = self.draw()
            if len(chat.ids) <= length:
                return chat
        raise UsageError(
            f"{MAX_SKIPPED} chats in a row are longer than a sequence of {length} tokens",
            "train on longer sequences",
        )

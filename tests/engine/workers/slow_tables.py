"""Test models that another process can import: a table and a drafter that are slow or fail."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch
from torch import Tensor

from specbench_cli.audit.models.table import TableDecoder
from specbench_cli.engine.types import ModelOutput
from specbench_cli.engine.workers.drafter import Drafter
from specbench_cli.engine.workers.message import Message
from specbench_cli.errors import EnvironmentFault


class SlowTable(TableDecoder):
    """Table that sleeps before every tenth forward, up to `most` seconds at random."""

    def __init__(self, name: str, table: Tensor, most: float) -> None:
        super().__init__(name, table)
        self._chance, self._most = random.Random(os.urandom(8)), most

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        if self._most and self._chance.random() < 0.1:
            time.sleep(self._chance.random() * self._most)
        return super().forward(*args, **kwargs)


class Echo(Drafter):
    """Drafter that answers with its order.

    An order of one number sleeps for that many ms. It gets no answer if the number is 0, and raises
    if it is negative.
    """

    def handle(self, message: Message) -> Message | None:
        x = torch.tensor([self.session.text[:1]])
        self.session.model.forward(
            type(self.session.pending_tokens(0))(x), self.session.new_state(self.session.model)
        )
        if len(message.ints) == 1:
            (ms,) = message.ints
            if ms < 0:
                raise ZeroDivisionError(f"no {ms}")
            time.sleep(ms / 1e3)
            if ms == 0:
                return None
        return message


def no_table() -> TableDecoder:
    """Raise, as a draft model that cannot be loaded."""
    raise EnvironmentFault("its folder is empty", hint="specbench list models")

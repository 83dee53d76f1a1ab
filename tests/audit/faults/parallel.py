"""Parallel methods with one thing wrong: what the audit must catch.

The first two were shipped in code that a paper's results are of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from methods.pearl import Pearl, PearlDrafter
from specbench_cli.engine.types import Origin, Outcome
from specbench_cli.engine.workers.message import Message


class ReturnsPending(Pearl):
    """Where the output's end comes within its draft, returns what was not verified."""

    def generate(self, session):
        verified = session.verify

        def verify_all_but_the_end(draft, rows, accept=None):
            if draft.nodes < 2 or draft.nodes <= session.max_draft_length():
                return verified(draft, rows, accept)
            ids, m = tuple(draft.tokens.tolist()), draft.nodes
            accepted: list[Origin] = ["accepted"] * m
            return Outcome(tuple(range(m)), ids, tuple(accepted), m)

        session.verify = verify_all_but_the_end
        yield from super().generate(session)


class TestsTwoWithOneNumber(Pearl):
    """Tests the first token of a window, and once it stands the second one, with one number."""

    def generate(self, session):
        session._chooser.random = _OneNumber(session.random)
        yield from super().generate(session)


class _OneNumber:
    """A number that was below a chance is below another one more often than not."""

    def __init__(self, random):
        self._random = random
        self.categorical = random.categorical
        self._below: Tensor | None = None  # what the last number is known to be below

    def bernoulli(self, a):
        chances = a
        if self._below is not None:
            chances = torch.cat(((a[:1] / self._below).clamp_max(1.0), a[1:]))
        stood = self._random.bernoulli(chances)
        alone = len(a) == 1 and self._below is None and bool(stood[0])
        self._below = a[:1] if alone else None
        return stood


class KeepsStaleRows(PearlDrafter):
    """Forgets nothing: rows of rejected tokens stay, and what follows them is fed behind."""

    def start(self):
        super().start()
        since = self.session.pending_tokens

        def newest(length):
            return since(min(length, len(self.session.text) - 1))

        self.state.rollback = lambda *_: None
        self.session.pending_tokens = newest


class DraftsFromStaleRows(Pearl):
    """Its drafter keeps rows of rejected tokens."""

    def generate(self, session):
        hire = session.start_worker

        def hire_another(kind, params):
            return hire(KeepsStaleRows, params)

        session.start_worker = hire_another
        yield from super().generate(session)


class TellsTooMuch(Pearl):
    """Tells its drafter of a rejected token as if it stood, before the one in its place."""

    def generate(self, session):
        hire = session.start_worker

        def hire_and_tell(kind, params):
            worker = hire(kind, params)
            send = worker.send

            def tell(message):
                stands, window, *told = message.ints
                send(Message((stands + len(told), window, *told)))

            worker.send = tell
            return worker

        session.start_worker = hire_and_tell
        yield from super().generate(session)

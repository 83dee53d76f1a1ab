"""Faulty methods that draft in parallel. The audit must catch all of them.

The first two faults are in published code of a paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from methods.pearl import Pearl, PearlDrafter
from specbench_cli.engine.types import Origin, Outcome
from specbench_cli.engine.workers.message import Message


class ReturnsUnverified(Pearl):
    """Method that returns unverified tokens if the output ends within its draft."""

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
    """Method that tests the first two tokens of a window with one random number."""

    def generate(self, session):
        session._chooser.random = _OneNumber(session.random)
        yield from super().generate(session)


class _OneNumber:
    """Random source that reuses the number of the last successful test."""

    def __init__(self, random):
        self._random = random
        self.categorical = random.categorical
        self._below: Tensor | None = None  # upper bound of the last number

    def bernoulli(self, a):
        chances = a
        if self._below is not None:
            chances = torch.cat(((a[:1] / self._below).clamp_max(1.0), a[1:]))
        accepted = self._random.bernoulli(chances)
        alone = len(a) == 1 and self._below is None and bool(accepted[0])
        self._below = a[:1] if alone else None
        return accepted


class KeepsStaleRows(PearlDrafter):
    """Drafter that keeps its state of rejected tokens, and feeds new tokens after it."""

    def start(self):
        super().start()
        since = self.session.pending_tokens

        def newest(length):
            return since(min(length, len(self.session.text) - 1))

        self.state.rollback = lambda *_: None
        self.session.pending_tokens = newest


class DraftsFromStaleRows(Pearl):
    """Method whose drafter keeps its state of rejected tokens."""

    def generate(self, session):
        hire = session.start_worker

        def hire_another(kind, params):
            return hire(KeepsStaleRows, params)

        session.start_worker = hire_another
        yield from super().generate(session)


class SendsRejectedTokens(Pearl):
    """Method that sends the rejected token to its drafter, followed by its replacement."""

    def generate(self, session):
        hire = session.start_worker

        def start_sending_rejected(kind, params):
            worker = hire(kind, params)
            send = worker.send

            def send_rejected(message):
                accepted, window, *tokens = message.ints
                send(Message((accepted + len(tokens), window, *tokens)))

            worker.send = send_rejected
            return worker

        session.start_worker = start_sending_rejected
        yield from super().generate(session)

"""Faulty methods that work outside the measured time, or that become faulty late.

The audit must catch all of them.
"""

from __future__ import annotations

import multiprocessing
import time
from threading import Event, Thread
from typing import ClassVar

import torch

from methods.mtp.method import Mtp
from methods.sps import Sps
from specbench_cli.engine.models.decoder import ModelInput
from specbench_cli.engine.types import Features, Outcome, Tokens
from tests.audit.faults.learning import Learning
from tests.audit.faults.verifies import Verifies

# ---- the clock ----------------------------------------------------------------------------------


class KnowsTheOutput(Sps):
    """Method that computes the target's whole greedy output before the first step, and drafts
    it."""

    def start(self, session):
        super().start(session)
        self.known = self.whole(session)

    def propose(self, session, limit):
        at = len(session.output())
        return session.chain(self.known[at : at + min(limit, self.params.levels)])

    def whole(self, session, model=None):
        """Return the greedy output, decoded without the meter.

        The decoder is called directly, not through its metered wrapper.
        """
        decoder = model or session.target.decoder
        state, x, ids = decoder.new_state(256), session.pending_tokens(0), list[int]()
        while len(ids) < session.requests[0].stop.max_new_tokens:
            token = decoder.forward(x, state).rows[-1:].argmax(-1)
            ids.append(int(token))
            x = Tokens(token[None])
        return ids


class RestartsTheHarness(Sps):
    """Method that restarts the clock after its draft model has read the prompt."""

    def start(self, session):
        super().start(session)
        session.harness.begin()


class RestartsTheClock(KnowsTheOutput):
    """Method that computes its whole output with a metered model, then resets both clocks."""

    def start(self, session):
        super().start(session)
        session.harness.meter.clock.restart()
        session.harness.text.start()

    def whole(self, session, model=None):
        """Return the greedy output of the draft model."""
        return super().whole(session, self.model)


class SetsTheClockBack(Sps):
    """Method that reports the time of the first token as that of the last one."""

    def observe(self, session, outcome):
        super().observe(session, outcome)
        session.harness.text.last_ns = session.harness.text.started_ns - 1


# ---- forwards -----------------------------------------------------------------------------------


class DraftsPastTheMeter(Sps):
    """Method that calls the draft's decoder directly, so that no forward is measured."""

    def start(self, session):
        super().start(session)
        self.model = session.draft().decoder


class DraftsInABatchPastTheMeter(Sps):
    """Method that calls `forward_batch` of the draft's decoder, so that no forward is measured."""

    def propose(self, session, limit):
        if not limit:
            return session.chain(())
        part = ModelInput(session.pending_tokens(self.state.length()), self.state)
        (out,) = session.draft().decoder.forward_batch([part])
        return session.chain_of_picks([session.pick(out)])


class RunsItsHeadTwice(Mtp):
    """Method that runs its head a second time on the newest features, unmeasured."""

    def observe(self, session, outcome):
        super().observe(session, outcome)
        head = session.artifact(*self.artifacts()).decoder
        newest = session.pending_tokens(len(session.tokens()) - 1)
        head.forward(Features(newest.ids, session.features()[None]), head.new_state(8))


class HidesForwards(Sps):
    """Method that removes the last forward of every step from the trace."""

    def observe(self, session, outcome):
        super().observe(session, outcome)
        del session.harness.meter.forwards[-1:]


class CallsTheModule(Learning):
    """Method that drafts one more token by the module of its draft, so the forward is not
    measured."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        self.model.module(torch.tensor([session.tokens()]))
        return draft


# ---- helpers ------------------------------------------------------------------------------------


class WorksInTheBackground(Sps):
    """Method that keeps a thread alive after `start`."""

    quit: ClassVar[Event] = Event()

    def start(self, session):
        super().start(session)
        self.quit.clear()
        Thread(target=self.quit.wait, args=(5.0,), daemon=True).start()


class DraftsInAThread(Sps):
    """Method that reads the text in a second thread while it drafts."""

    def propose(self, session, limit):
        model, state = session.draft(), session.new_state(session.draft())
        slowed = model.decoder.forward

        def slowly(*x, **how):
            time.sleep(0.002)
            return slowed(*x, **how)

        model.decoder.forward = slowly
        thread = Thread(target=model.forward, args=(session.pending_tokens(0), state))
        thread.start()
        draft = super().propose(session, limit)
        thread.join()
        model.decoder.forward = slowed
        return draft


class WorksInAProcess(Sps):
    """Method that starts a child process."""

    def start(self, session):
        super().start(session)
        context = multiprocessing.get_context("fork")
        context.Process(target=time.sleep, args=(3,), daemon=True).start()


# ---- right at first -----------------------------------------------------------------------------


class ForgetsFromTheSixth(Sps):
    """Method that halves its draft length from the sixth prompt on."""

    prompts = 0

    def start(self, session):
        super().start(session)
        self.prompts += 1

    def propose(self, session, limit):
        return super().propose(session, limit // 2 if self.prompts > 5 else limit)


class ForgetsFromTheSixteenth(ForgetsFromTheSixth):
    """Method that drafts nothing from the sixteenth prompt on."""

    def propose(self, session, limit):
        return Sps.propose(self, session, 0 if self.prompts > 15 else limit)


class BonusOfTheDraft(Verifies, Sps):
    """Method that commits a draft token as the bonus token once the output is long."""

    def verify(self, session, draft, rows, *accept):
        long = len(session.output()) > 60 and draft.nodes > 1
        outcome = self.verified(draft, rows, *accept)
        if not long or outcome.origin[-1] != "bonus":
            return outcome
        committed = (*outcome.committed[:-1], int(draft.tokens[0]))
        return Outcome(outcome.path, committed, outcome.origin, outcome.tested)


class LosesAWindow(Sps):
    """Method whose draft model reads only the last 256 tokens of a longer text."""

    def start(self, session):
        super().start(session)
        if len(session.tokens()) > 256:
            self.state.rollback(0, 0)
            ids = torch.tensor([session.tokens()[-256:]])
            self.model.forward(Tokens(ids), self.state, logits_at=None)


class UnverifiedWhenLong(Verifies, Sps):
    """Method that commits a rejected draft token once the text is long."""

    def verify(self, session, draft, rows, *accept):
        outcome = self.verified(draft, rows, *accept)
        if len(session.tokens()) <= 310 or not draft.nodes or outcome.path:
            return outcome
        return Outcome((0,), (int(draft.tokens[0]),), ("accepted",), 1)

"""Work out of the clock's sight, and methods that are right at first: what the audit must catch."""

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


class Foresees(Sps):
    """Knows all of the target's own output before the first step, and drafts that."""

    def start(self, session):
        """The target's greedy output, by forwards of its own."""
        super().start(session)
        self.known = self.whole(session)

    def propose(self, session, limit):
        """What comes next of it."""
        at = len(session.output())
        return session.chain(self.known[at : at + min(limit, self.params.levels)])

    def whole(self, session, model=None):
        """As many ids as the output may have; past the meter, by the decoder under its wrapper."""
        decoder = model or session.target.decoder
        state, x, ids = decoder.new_state(256), session.pending_tokens(0), list[int]()
        while len(ids) < session.requests[0].stop.max_new_tokens:
            token = decoder.forward(x, state).rows[-1:].argmax(-1)
            ids.append(int(token))
            x = Tokens(token[None])
        return ids


class BeginsAgain(Sps):
    """Starts the clock once its draft model has read the prompt, by the harness's own `begin`."""

    def start(self, session):
        super().start(session)
        session.harness.begin()


class RestartsTheClock(Foresees):
    """Has its whole output, metered, and then takes both clocks in hand."""

    def start(self, session):
        super().start(session)
        session.harness.meter.clock.restart()
        session.harness.text.start()

    def whole(self, session, model=None):
        """By the draft, behind its meter."""
        return super().whole(session, self.model)


class SetsTheClockBack(Sps):
    """Tells the time of the first token as that of the last one."""

    def observe(self, session, outcome):
        super().observe(session, outcome)
        session.harness.text.last_ns = session.harness.text.started_ns - 1


# ---- forwards -----------------------------------------------------------------------------------


class DraftsPastTheMeter(Sps):
    """Drafts with the decoder under its wrapper."""

    def start(self, session):
        super().start(session)
        self.model = session.draft().decoder


class DraftsInABatchPastTheMeter(Sps):
    """Feeds its draft by `forward_batch` of the decoder under its wrapper."""

    def propose(self, session, limit):
        if not limit:
            return session.chain(())
        part = ModelInput(session.pending_tokens(self.state.length()), self.state)
        (out,) = session.draft().decoder.forward_batch([part])
        return session.chain_of_picks([session.pick(out)])


class AsksItsHeadTwice(Mtp):
    """Has its head read the newest features once more than its meter knows."""

    def observe(self, session, outcome):
        super().observe(session, outcome)
        head = session.artifact(*self.artifacts()).decoder
        newest = session.pending_tokens(len(session.tokens()) - 1)
        head.forward(Features(newest.ids, session.features()[None]), head.new_state(8))


class StrikesForwardsOut(Sps):
    """Takes the last forward of every step out of the trace."""

    def observe(self, session, outcome):
        super().observe(session, outcome)
        del session.harness.meter.forwards[-1:]


class CallsTheModule(Learning):
    """Drafts one token more, by the module of its own copy instead of the copy."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        self.model.module(torch.tensor([session.tokens()]))
        return draft


# ---- helpers ------------------------------------------------------------------------------------


class WorksInTheBackground(Sps):
    """Has a thread at work as long as the method lives."""

    quit: ClassVar[Event] = Event()

    def start(self, session):
        super().start(session)
        self.quit.clear()
        Thread(target=self.quit.wait, args=(5.0,), daemon=True).start()


class DraftsInAThread(Sps):
    """Reads the text once more in a thread while it drafts, metered."""

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
    """Has a process at work beside it."""

    def start(self, session):
        super().start(session)
        context = multiprocessing.get_context("fork")
        context.Process(target=time.sleep, args=(3,), daemon=True).start()


# ---- right at first -----------------------------------------------------------------------------


class ForgetsFromTheSixth(Sps):
    """From the sixth prompt on drafts half as much."""

    prompts = 0

    def start(self, session):
        super().start(session)
        self.prompts += 1

    def propose(self, session, limit):
        return super().propose(session, limit // 2 if self.prompts > 5 else limit)


class ForgetsFromTheSixteenth(ForgetsFromTheSixth):
    """From the sixteenth prompt on drafts nothing."""

    def propose(self, session, limit):
        return Sps.propose(self, session, 0 if self.prompts > 15 else limit)


class BonusOfTheDraft(Verifies, Sps):
    """Once the output is long, commits the draft's own token behind a draft that stands."""

    def verify(self, session, draft, rows, *accept):
        long = len(session.output()) > 60 and draft.nodes > 1
        outcome = self.verified(draft, rows, *accept)
        if not long or outcome.origin[-1] != "bonus":
            return outcome
        committed = (*outcome.committed[:-1], int(draft.tokens[0]))
        return Outcome(outcome.path, committed, outcome.origin, outcome.tested)


class LosesAWindow(Sps):
    """Feeds its draft the last tokens alone of a text of more than 256."""

    def start(self, session):
        super().start(session)
        if len(session.tokens()) > 256:
            self.state.rollback(0, 0)
            ids = torch.tensor([session.tokens()[-256:]])
            self.model.forward(Tokens(ids), self.state, logits_at=None)


class UnverifiedWhenLong(Verifies, Sps):
    """Where the text is long and the draft is sure, commits it as it is, unverified."""

    def verify(self, session, draft, rows, *accept):
        outcome = self.verified(draft, rows, *accept)
        if len(session.tokens()) <= 310 or not draft.nodes or outcome.path:
            return outcome
        return Outcome((0,), (int(draft.tokens[0]),), ("accepted",), 1)

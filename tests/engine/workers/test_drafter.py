"""Draft sessions of workers, and the checks of what workers deliver."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from specbench_cli.audit.cases import Case
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Forward, SentMessage
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workers.child import _encode_forwards, decode_forwards
from specbench_cli.engine.workers.drafter import DRAFTER, Drafter, DraftSession
from specbench_cli.engine.workers.message import Message
from specbench_cli.errors import MethodFault

CPU = torch.device("cpu")
CASE = Case("near", make_table_pair("near", 5), Sampling("coupled", 1.0, seed=4), budget=9)


class Silent(Drafter):
    """Drafter that never answers."""

    def handle(self, message: Message) -> Message | None:
        return None


def desk_of(case: Case, **rest: object) -> tuple[DraftSession, object]:
    session = case.open(**rest)
    desk = session.start_worker(Silent, MethodParams()).session
    assert desk is not None
    return desk, session


def test_a_draft_session_has_the_prompt_and_its_own_states():
    desk, session = desk_of(CASE)
    assert desk.text == list(CASE.prompt) and desk.position == 0
    desk.text += [3, 4]
    assert desk.position == 2 and desk.pending_tokens(5).ids.tolist() == [[3, 4]]
    mine, theirs = desk.new_state(desk.model), session.new_state(session.draft())
    assert mine is not theirs and desk.states == [(desk.model.decoder, mine)]


def test_a_drafter_shares_the_targets_noise_and_has_its_own_draws():
    desk, session = desk_of(CASE)
    assert torch.equal(desk.chooser.noise(3, 2), session.noise(3, 2))
    distribution = torch.full((64, 97), 1 / 97)
    drawn = [
        SeededRandom(4, "p", 0, 1, CPU, worker=worker).categorical(distribution).tolist()
        for worker in (0, DRAFTER, DRAFTER)
    ]
    assert drawn[0] != drawn[1] == drawn[2]
    assert drawn[0] == SeededRandom(4, "p", 0, 1, CPU).categorical(distribution).tolist()


def test_with_a_given_random_source_an_inline_drafter_uses_it_too():
    source = SeededRandom(0, "given", 0, 1, CPU)
    desk, session = desk_of(CASE, random=source)
    assert desk.chooser is session._chooser and session.random is source


def test_times_of_another_worker_are_shifted_to_the_sessions_start():
    meter = Meter(CPU)
    zero = meter.clock.zero_ns
    forwards = [Forward("draft", "draft", 1, 1, 1, (0, 1), zero + 10, zero + 30)]
    meter.merge(forwards, used=False)
    meter.record_message(0, 1, zero + 5, zero + 9, 24)
    meter.resolve()
    (forward,) = meter.forwards
    assert (forward.t0_ns, forward.t1_ns, forward.used) == (10, 30, False)
    assert meter.messages == [SentMessage(0, 1, 5, 9, 24)]


def test_a_meter_hands_over_each_forward_once_with_process_wide_times():
    desk, _ = desk_of(CASE)
    before = time.perf_counter_ns()
    desk.model.forward(desk.pending_tokens(0), desk.new_state(desk.model))
    after = time.perf_counter_ns()
    (forward,) = desk.meter.take()
    assert before <= forward.t0_ns <= forward.t1_ns <= after and forward.worker == DRAFTER
    assert desk.meter.take() == []


def test_tokens_of_a_worker_make_a_chain_with_its_distributions():
    session = replace(CASE, sampling=Sampling("rejection", 1.0)).open()
    session.prefill()
    q = torch.full((2, 5), 0.2)
    draft = session.chain((1, 2), q)
    assert draft.tokens.tolist() == [1, 2] and draft.draw_mode == "independent" and draft.q is q
    with pytest.raises(MethodFault, match="id 5 at node 1"):
        session.chain((1, 5), q)
    with pytest.raises(MethodFault, match=r"must be \[2, 5\]"):
        session.chain((1, 2), q[:1])
    assert CASE.open().chain((1,), None).draw_mode == "deterministic"


def test_a_process_sends_its_forwards_unchanged():
    forwards = [
        Forward("draft", "prefill", DRAFTER, 1, 9, (0, 2), 10, 20, share=0.1 + 0.2),
        Forward("draft", "draft", DRAFTER, 3, 1, (0, 2), 30, 2**60),
    ]
    assert decode_forwards(tuple(_encode_forwards(forwards)), "draft", DRAFTER) == forwards


def test_a_worker_whose_draft_gives_nan_reports_it_instead_of_an_answer():
    meter = Meter(torch.device("cpu"))
    meter.record_logits("draft", None, torch.tensor([[0.0, torch.nan, 1.0]]))
    with pytest.raises(ArithmeticError, match="the logits of draft are not finite"):
        meter.take()
    assert meter.take() == []

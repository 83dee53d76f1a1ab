"""ATTS: the p-value, alpha of 0 and 1, and outputs that do not depend on the order of work."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from methods.atts import Atts, AttsParams, ConformalRule, p_value
from methods.vanilla import Vanilla
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.request import Request
from specbench_cli.engine.segments.token_accounting import unsettled_tokens
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, seed=3)
REJECTION = Sampling("rejection", 0.8, seed=3)
BUDGET = 9


@pytest.fixture(scope="module")
def requests(family):
    """Function that makes up to 48 requests."""

    def make(number):
        ids = (*family.prompts[number % 40][number // 40 :], number)
        return Request(f"tiny/{number}", 0, ids, StopRule(frozenset(), BUDGET))

    return [make(number) for number in range(48)]


@pytest.fixture(scope="module")
def space(family):
    return Workspace({role: family.decoders[name] for role, name in
                      (("target", "target"), ("draft", "near"))}, 96)  # fmt: skip


def known(n, seed=0):
    """Sorted scores."""
    memory = Memory()
    memory["scores"] = sorted(random.Random(seed).gauss(0.5, 0.5) for _ in range(n))
    return memory


def decode(session, **params):
    return list(Atts(AttsParams(**params)).generate(session))


def test_the_p_value_counts_ties_as_worse_scores():
    assert p_value(0.5, []) == 1
    assert p_value(2.0, [1.0, 2.0, 2.0, 3.0]) == (1 + 3) / 5
    assert p_value(9.0, [1.0, 2.0]) == 1 / 3
    assert p_value(0.0, [1.0, 2.0]) == 1


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6])
def test_a_share_alpha_of_exchangeable_scores_is_rejected(alpha):
    """With 40 calibration scores, the share floor(41 alpha) / 41 of random scores is rejected."""
    chance, rule, rejected, n = random.Random(1), ConformalRule(alpha=alpha), 0, 3000
    for _ in range(n):
        scores = sorted(chance.random() for _ in range(40))
        rejected += not rule.accepts(p_value(chance.random(), scores))
    due = int(alpha * 41) / 41
    low, high = binomtest(rejected, n).proportion_ci(0.999)
    assert low <= due <= high <= alpha + 0.05


@given(st.lists(st.floats(-5, 5)), st.lists(st.floats(-5, 5)), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_alpha_accepts_no_chunk_that_a_smaller_one_rejects(scores, calibrated, one, other):
    lax, strict = sorted((one, other))
    for score in scores:
        p = p_value(score, sorted(calibrated))
        assert ConformalRule(alpha=strict).accepts(p) <= ConformalRule(alpha=lax).accepts(p)


def test_logged_p_values_replay_to_the_same_decisions_and_larger_alphas_accept_fewer(
    space, requests
):
    logged = []
    for request in requests[:12]:
        steps = decode(Session(space, request, GREEDY, memory=known(40)), alpha=0.5, known=0, cap=4)
        logged += [
            (step.extra["grade"], step.extra["stood"]) for step in steps if step.extra.get("spans")
        ]
    assert all((p > 0.5) == accepted for p, accepted in logged)
    num_accepted = [
        sum(ConformalRule(alpha=at / 10).accepts(p) for p, _ in logged) for at in range(11)
    ]
    assert num_accepted == sorted(num_accepted, reverse=True) and num_accepted[10] == 0
    assert 0 < num_accepted[5] < num_accepted[0] == len(logged)


@pytest.mark.smoke
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
def test_at_alpha_1_48_outputs_are_vanillas(space, requests, sampling):
    for request in requests:
        plain = Session(space, request, sampling)
        list(Vanilla().generate(plain))
        due, session = plain.output(), Session(space, request, sampling, memory=known(9))
        decode(session, alpha=1, cap=5)
        assert session.output() == due


def test_at_alpha_0_every_chunk_is_accepted(space, requests):
    for request in requests[:4]:
        session = Session(space, request, GREEDY, memory=known(9))
        steps = decode(session, alpha=0, cap=5)
        assert all(step.extra.get("stood", True) for step in steps)
        assert list(session.harness.text.origin[1:-1]).count("plain") == 0


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_with_random_decisions_the_rate_of_chunks_is_accepted_and_nothing_is_learned(
    space, requests, rate
):
    judged = accepted = 0
    for request in requests[:24]:
        session = Session(space, request, GREEDY)
        for step in decode(session, rate=rate, cap=3):
            judged += step.extra.get("spans", 0)
            accepted += step.extra.get("stood", 0)
        assert not session.memory.get("scores")
    assert abs(accepted / judged - rate) <= (0.2 if 0 < rate < 1 else 0)
    assert Atts(AttsParams(rate=rate)).guarantee("greedy") == (
        "quality_only" if rate else "exact_tokens"
    )
    assert Atts(AttsParams(rate=rate, alpha=1)).guarantee("greedy") == "exact_tokens"


@pytest.mark.parametrize("sampling", [GREEDY, REJECTION], ids=lambda s: s.rule)
def test_texts_are_the_same_alone_in_a_batch_and_with_a_barrier(space, requests, sampling):
    alone, forwards = [], {}
    requests = [replace(each, stop=StopRule(frozenset(), 24)) for each in requests[10:16]]
    for request in requests:
        session = Session(space, request, sampling, memory=known(40))
        decode(session, alpha=0.5, known=0, cap=4)
        alone.append(session.output())
    for barrier in (False, True):
        batch = Batch(space, requests, sampling, memory=known(40))
        method = Atts(AttsParams(alpha=0.5, known=0, cap=4, barrier=barrier))
        with torch.inference_mode():
            extra = [step.extra for step in method.generate_batch(batch)]
        assert [session.output() for session in batch.sessions] == alone
        assert sum(each.get("spans", 0) for each in extra) > sum(
            each.get("stood", 0) for each in extra
        )
        forwards[barrier] = sum(each.model == "target" for each in batch.meter.forwards)
    assert forwards[False] < forwards[True]


def test_a_run_calibrates_on_the_first_chunks_of_its_first_prompts(space, requests):
    memory = Memory()
    for request in requests[:5]:
        decode(Session(space, request, GREEDY, memory=memory), known=3, cap=4)
    assert len(memory["scores"]) == 3 and memory["scores"] == sorted(memory["scores"])


@pytest.mark.parametrize("sampling", [GREEDY, REJECTION], ids=lambda s: s.rule)
def test_the_token_accounting_balances(space, requests, sampling):
    for request in requests[:4]:
        counts = Counter()
        session = Session(space, request, sampling, memory=known(40))
        for step in decode(session, alpha=0.6, cap=4, length=2):
            counts.update(step.extra)
        assert set(unsettled_tokens(counts).values()) == {0}
        assert counts["draft_kept"] + counts["target_kept"] == BUDGET

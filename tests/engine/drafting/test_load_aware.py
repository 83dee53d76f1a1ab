"""Draft lengths by load: compared with the best of all lengths for given forward costs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.engine.drafting.length_params import LengthParams
from specbench_cli.engine.drafting.length_rules import create_length_rule
from specbench_cli.engine.drafting.load_aware import PROBE_AFTER, expected_tokens
from specbench_cli.engine.drafting.smartspec import SmartSpecLength, best_lengths
from specbench_cli.engine.drafting.synergy import SynergyLength, best_length
from specbench_cli.engine.types import Outcome
from specbench_cli.errors import MethodFault


def line(constant, row):
    return lambda sequences: constant + row * sequences


def plane(constant, row):
    return lambda sequences, rows, even=True: constant + row * rows


def goodput(alphas, lengths, target, draft):
    levels = range(1, max(lengths) + 1)
    crowds = [sum(k >= level for k in lengths) for level in levels]
    time = target(len(lengths), sum(k + 1 for k in lengths)) + sum(map(draft, crowds))
    return sum(map(expected_tokens, alphas, lengths)) / time


def test_emitted_tokens_include_the_targets_own():
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(1, 4) == 5
    assert expected_tokens(0.5, 2) == 1.75


# ---- goodput ------------------------------------------------------------------------------------

CHANCES = st.lists(st.floats(0, 0.99), min_size=1, max_size=3)
PRICES = st.tuples(*[st.floats(0.01, 4)] * 4)


@settings(max_examples=60, deadline=None)
@given(CHANCES, PRICES)
def test_the_chosen_lengths_have_the_best_goodput(alphas, prices):
    target, draft = plane(*prices[:2]), line(*prices[2:])
    chosen = best_lengths(alphas, [4] * len(alphas), target, draft)
    best = max(
        goodput(alphas, lengths, target, draft)
        for lengths in itertools.product(range(5), repeat=len(alphas))
    )
    assert goodput(alphas, chosen, target, draft) == pytest.approx(best, rel=1e-9)


def test_nothing_is_drafted_if_nothing_is_accepted_or_rows_are_expensive():
    cheap = line(0.05, 0.0)
    assert best_lengths([0.0, 0.0], [8, 8], plane(1, 0.01), cheap) == [0, 0]
    assert best_lengths([0.8, 0.8], [8, 8], plane(0.01, 1), cheap) == [0, 0]  # compute-bound
    assert best_lengths([0.8, 0.8], [8, 8], plane(1, 0.001), cheap) == [8, 8]  # memory-bound
    assert best_lengths([0.9, 0.2], [3, 8], plane(1, 0.02), cheap)[0] == 3  # no more than the limit


def test_the_sequence_with_higher_acceptance_drafts_more():
    lengths = best_lengths([0.95, 0.6, 0.05], [16] * 3, plane(1, 0.08), line(0.05, 0.01))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2]


# ---- synergy ------------------------------------------------------------------------------------


def test_the_best_length_falls_to_zero_as_the_batch_grows():
    target, draft = plane(1, 0.05), line(0.1, 0.002)
    lengths = [best_length(0.8, crowd, 16, target, draft) for crowd in (1, 2, 4, 8, 16, 32, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 4 and lengths[-1] == 0


@given(st.floats(0.05, 0.95), PRICES, st.sampled_from((1, 3, 8)))
def test_the_looked_up_length_takes_the_least_time_per_token(alpha, prices, crowd):
    target, draft = plane(*prices[:2]), line(*prices[2:])

    def per_token(s):
        return (target(crowd, crowd * (s + 1)) + s * draft(crowd)) / expected_tokens(alpha, s)

    assert per_token(best_length(alpha, crowd, 12, target, draft)) == min(map(per_token, range(13)))


def test_several_sequences_may_cost_more_than_their_rows():
    draft = line(0.02, 0.0)
    rows_alone = plane(1, 0.01)

    def ragged(sequences, rows, even):  # a separate kernel if a sequence has more than one row
        return rows_alone(sequences, rows) + 0.5 * (rows > sequences > 1)

    assert best_length(0.3, 1, 8, ragged, draft) == best_length(0.3, 1, 8, rows_alone, draft) > 0
    assert best_length(0.3, 4, 8, rows_alone, draft) > 0 == best_length(0.3, 4, 8, ragged, draft)
    assert best_lengths([0.3] * 4, [8] * 4, ragged, draft) == [0] * 4


def test_different_lengths_are_chosen_only_if_their_gain_exceeds_their_cost():
    alphas, rooms, draft = [0.9, 0.6, 0.2], [6] * 3, line(0.05, 0.0)
    free = best_lengths(alphas, rooms, plane(1, 0.05), draft)
    assert len({*free}) == 3

    def dear(sequences, rows, even):
        return plane(1, 0.05)(sequences, rows) + (not even)

    shared = best_lengths(alphas, rooms, dear, draft)
    assert len({*shared}) == 1
    own = [goodput(alphas, [k] * 3, plane(1, 0.05), draft) for k in range(1, 7)]
    assert goodput(alphas, shared, plane(1, 0.05), draft) == pytest.approx(max(own))


# ---- rules --------------------------------------------------------------------------------------


class Harness:
    def __init__(self, session):
        self.batch_sessions, self.policy = (session,), None


class Text:
    """Session as a length rule sees it."""

    def __init__(self, limit=99):
        self.harness, self.left = Harness(self), limit

    def max_draft_length(self):
        return self.left


def outcome(accepted, tested):
    return Outcome(tuple(range(accepted)), (0,) * (accepted + 1), ("plain",), tested)


def step(rule, alpha, draw):
    """Run one step of a rule whose tokens are accepted with probability `alpha`."""
    rule.begin()
    accepted = next((at for at in range(rule.most) if draw.random() >= alpha), rule.most)
    rule.observe(outcome(accepted, min(accepted + 1, rule.most)))
    return rule.most


def test_the_acceptance_estimate_is_not_biased_by_the_chain_end():
    draw, rule = random.Random(1), SmartSpecLength(Text(), 3, 0.5, plane(1, 0.0), line(0.01, 0.0))
    drafted = accepted = 0
    for _ in range(4000):
        before = rule._accepted
        drafted += step(rule, 0.7, draw)
        accepted += rule._accepted - before
    assert rule.acceptance_rate(0.5) == pytest.approx(0.7, abs=0.015)
    assert accepted / drafted < 0.6  # accepted / drafted would be far too low


def test_after_steps_without_a_draft_one_token_is_tried():
    draw = random.Random(2)
    rule = SmartSpecLength(Text(), 8, 0.05, plane(1, 0.3), line(0.2, 0.0))
    lengths = [step(rule, 1.0, draw) for _ in range(30 * PROBE_AFTER)]
    assert lengths[: PROBE_AFTER + 1] == [0] * PROBE_AFTER + [1]
    assert max(lengths) > 1  # the trial showed that drafting pays
    hopeless = SmartSpecLength(Text(), 8, 0.05, plane(1, 0.3), line(0.2, 0.0))
    assert sum(step(hopeless, 0.0, draw) for _ in range(20 * (PROBE_AFTER + 1))) == 20


def test_one_rule_decides_for_all_sequences_of_a_batch():
    texts = [Text(), Text(limit=1), Text()]
    rules = [SmartSpecLength(text, 6, 0.8, plane(1, 0.001), line(0.01, 0.0)) for text in texts]
    for text in texts:
        text.harness.batch_sessions = texts
    for rule in rules:
        rule.begin()
    assert [rule.most for rule in rules] == [6, 1, 6]


def test_a_batch_size_between_two_table_entries_takes_the_larger_ones_length():
    def most(crowd):
        texts = [Text() for _ in range(crowd)]
        rules = [SynergyLength(text, 16, 0.8, plane(1, 0.05), line(0.1, 0.002)) for text in texts]
        for text in texts:
            text.harness.batch_sessions = texts
        for rule in rules:
            rule.begin()
        (length,) = {rule.most for rule in rules}
        return length

    lengths = {crowd: most(crowd) for crowd in (1, 2, 3, 4, 5, 8, 64, 65, 200)}
    assert lengths[3] == lengths[4] and lengths[5] == lengths[8]
    assert lengths[65] == lengths[200] == lengths[64]


def test_a_load_aware_rule_needs_a_drafting_model():
    params = LengthParams(length="synergy")
    assert params.by_load and params.levels == params.max
    with pytest.raises(MethodFault, match="needs the draft model"):
        create_length_rule(params, Text())

"""Draft length rules: each rule by hand, and that no rule changes the output."""

import pytest
import torch
from pydantic import ValidationError

from methods.sps import Sps
from specbench_cli.engine.drafting.length_params import LOAD_RULES, RULES, LengthParams
from specbench_cli.engine.drafting.length_rules import create_length_rule
from specbench_cli.engine.drafting.lengths import (
    DEFAULT_CONFIDENCE,
    AcceptanceHeadLength,
    ConfidenceLength,
    EntropyLength,
    FixedLength,
    HeuristicLength,
    OracleLength,
    learn_threshold,
)
from specbench_cli.engine.types import ModelOutput, Outcome
from specbench_cli.engine.verify.sampling import Sampling, warp

GREEDY = Sampling()
DISTRIBUTIONS = [
    GREEDY,
    Sampling("coupled", 0.8, seed=3),
    Sampling("rejection", 0.8, top_k=2, seed=3),
]
RULED = pytest.mark.parametrize("sampling", DISTRIBUTIONS, ids=lambda s: s.rule)


@pytest.fixture
def session(open_session, random_table):
    """Function that opens a session on tables of five tokens, with one committed token."""

    def make(sampling=GREEDY, eos=(), **rest):
        tables = random_table(5, 1), random_table(5, 2)
        opened = open_session(*tables, sampling=sampling, eos=eos, budget=40, **rest)
        opened.prefill()
        return opened

    return make


def outcome(accepted, tested):
    return Outcome(tuple(range(accepted)), (), (), tested)


def make_output(logits, hidden=None):
    """Return a draft model's output for one token."""
    rows = torch.tensor([[logits]])
    return ModelOutput(rows, rows if hidden is None else torch.tensor([[hidden]]))


def count_drafted(rule, *steps):
    """Return how many of the given (output, token) pairs a rule drafts."""
    rule.begin()
    for n, (out, token) in enumerate(steps, start=1):
        if not rule.should_continue(out, (torch.tensor([token]), None)):
            return n
    return len(steps)


EVEN = (make_output([0.0] * 5), 0)


# ---- fixed and heuristic ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_fixed_length_is_drafted_in_every_step(length):
    rule = FixedLength(length)
    assert [count_drafted(rule, *[EVEN] * 20) for _ in range(3)] == [length] * 3


def test_the_heuristic_adds_two_after_full_acceptance_and_subtracts_one_otherwise():
    rule, lengths = HeuristicLength(20), []
    for accepted in (True, True, False, False, True, False):
        lengths.append(count_drafted(rule, *[EVEN] * 20))
        rule.observe(outcome(lengths[-1] if accepted else lengths[-1] - 1, lengths[-1]))
    assert lengths == [5, 7, 9, 8, 7, 9]


def test_the_heuristic_stays_between_one_and_its_maximum():
    rule = HeuristicLength(8)
    for n in (5, 7, 8, 8):
        assert count_drafted(rule, *[EVEN] * 20) == n
        rule.observe(outcome(n, n))
    for n in (8, 7, 6, 5, 4, 3, 2, 1, 1):
        assert count_drafted(rule, *[EVEN] * 20) == n
        rule.observe(outcome(0, 1))


def test_a_draft_cut_by_the_budget_counts_with_its_real_length():
    rule = HeuristicLength(20)
    assert count_drafted(rule, EVEN, EVEN) == 2
    rule.observe(outcome(2, 2))
    assert rule.length == 7


# ---- confidence and entropy ---------------------------------------------------------------------


def output_with_probability(chance):
    """Return an output whose token 0, of five, has this probability."""
    return make_output(torch.tensor([chance, *[(1 - chance) / 4] * 4]).log().tolist()), 0


def test_drafting_stops_after_a_token_of_low_confidence(session):
    rule = ConfidenceLength(session(), 20, 0.4)
    assert (
        count_drafted(
            rule,
            output_with_probability(0.9),
            output_with_probability(0.41),
            output_with_probability(0.39),
            output_with_probability(0.9),
        )
        == 3
    )
    assert count_drafted(rule, output_with_probability(0.1), output_with_probability(0.9)) == 1


def test_confidence_is_that_of_the_drafted_token_not_of_the_most_likely(session):
    rule = ConfidenceLength(session(), 20, 0.4)
    assert (
        count_drafted(rule, (output_with_probability(0.9)[0], 1), output_with_probability(0.9)) == 1
    )


def test_a_threshold_of_zero_never_stops(session):
    rule = ConfidenceLength(session(), 20, 0.0)
    for _ in range(4):
        assert count_drafted(rule, *[(output_with_probability(0.99)[0], 3)] * 30) == 20
        rule.observe(outcome(0, 1))
    assert rule.threshold == 0.0


def test_a_drawn_tokens_confidence_is_from_the_distribution_it_was_drawn_from(session):
    rule = ConfidenceLength(session(DISTRIBUTIONS[2]), 20, 0.4)
    q = torch.tensor([[0.3, 0.7, 0.0, 0.0, 0.0]])
    rule.begin()
    assert not rule.should_continue(output_with_probability(0.9)[0], (torch.tensor([0]), q))
    assert rule.should_continue(output_with_probability(0.9)[0], (torch.tensor([1]), q))


def test_under_the_coupled_rule_the_distribution_is_warped(session):
    sampling = Sampling("coupled", 0.5, top_k=3, seed=1)
    rule = ConfidenceLength(session(sampling), 20, 0.4)
    out, _ = output_with_probability(0.5)
    expected = warp(out.logits[0, -1], sampling)
    torch.testing.assert_close(rule.distribution(out, (torch.tensor([0]), None)), expected)


def test_padding_of_the_drafts_vocabulary_is_ignored(session):
    rule = ConfidenceLength(session(), 20, 0.4)
    padded = make_output([*output_with_probability(0.9)[0].logits[0, 0].tolist(), 99.0])
    assert count_drafted(rule, (padded, 0), output_with_probability(0.1)) == 2


def test_the_learned_threshold_has_the_least_error_by_hand():
    # At 0.9 one of two tokens is accepted and none of four passes: 0 + 3/2. At 0.6 both are
    # accepted and one passes: 1/4.
    tested = [(0.1, False), (0.2, False), (0.3, False), (0.6, True), (0.7, False), (0.9, True)]
    assert learn_threshold(tested) == 0.6
    # A missed accepted token costs three times as much as a passed rejected one.
    tested = [(0.1, True), (0.2, False), (0.3, False), (0.4, False), (0.6, True), (0.9, True)]
    assert learn_threshold(tested) == 0.6  # 0 + 3/3 equals 3/3 + 0: the higher threshold
    tested = [(0.1, True), (0.2, False), (0.3, False), (0.4, False), (0.5, False), (0.9, True)]
    assert learn_threshold(tested) == 0.1  # 4/4 + 0 against 0 + 3/2
    tested = [(0.1, False), (0.2, False), (0.3, False), (0.4, False), (0.5, False), (0.9, True)]
    assert learn_threshold(tested) == 0.9  # 0 + 0


def test_equal_probabilities_are_on_the_same_side_of_a_threshold():
    tested = [(0.2, False), (0.2, False), (0.5, False), (0.5, True), (0.5, True), (0.5, True)]
    assert learn_threshold(tested) == 0.5
    # To pass the accepted token at 0.5 passes two more: 2/2 + 0 against 0 + 3/4.
    tested = [(0.5, False), (0.5, False), (0.5, True), (0.9, True), (0.9, True), (0.9, True)]
    assert learn_threshold(tested) == 0.9


@pytest.mark.parametrize(
    "tested",
    [
        [(0.2, False), (0.3, True), (0.4, True), (0.5, True), (0.6, True)],
        [(0.1 * n, True) for n in range(8)],
        [(0.1 * n, False) for n in range(8)],
        [],
    ],
)
def test_few_tokens_or_only_one_kind_set_no_threshold(tested):
    assert learn_threshold(tested) is None


def test_the_threshold_is_learned_from_tested_tokens_only(session):
    rule = ConfidenceLength(session(), 20, None)
    assert rule.threshold == DEFAULT_CONFIDENCE
    # Six tokens are drafted and the fifth is rejected, so the sixth was not tested.
    assert count_drafted(rule, *map(output_with_probability, (0.9, 0.8, 0.7, 0.6, 0.5, 0.45))) == 6
    rule.observe(outcome(4, 5))
    assert rule.threshold == DEFAULT_CONFIDENCE  # five are too few
    assert count_drafted(rule, *map(output_with_probability, (0.55, 0.52))) == 2
    rule.observe(outcome(2, 2))
    assert rule.threshold == pytest.approx(0.52)


def test_a_given_threshold_is_not_changed(session):
    rule = ConfidenceLength(session(), 20, 0.3)
    for _ in range(4):
        count_drafted(
            rule,
            output_with_probability(0.9),
            output_with_probability(0.8),
            output_with_probability(0.7),
        )
        rule.observe(outcome(1, 2))
    assert rule.threshold == 0.3


def test_drafting_stops_after_a_token_of_high_entropy(session):
    rule = EntropyLength(session(), 20, 1.0)
    certain = make_output([50.0, 0.0, 0.0, 0.0, 0.0]), 0
    assert count_drafted(rule, certain, certain, EVEN, certain) == 3  # log 5 = 1.6 nats
    assert count_drafted(EntropyLength(session(), 20, 1.7), *[EVEN] * 30) == 20


def test_an_entropy_of_a_distribution_with_zeros_is_finite(session):
    rule = EntropyLength(session(), 20, 1.0)
    assert count_drafted(rule, (make_output([0.0, 0.0, *[-torch.inf] * 3]), 0), EVEN) == 2


def test_the_default_entropy_threshold_is_one_and_a_half_nats(session):
    rule = EntropyLength(session(), 20, None)
    four = make_output([0.0, 0.0, 0.0, 0.0, -torch.inf]), 0  # log 4 = 1.39 nats, log 5 = 1.61
    assert count_drafted(rule, four, EVEN, four) == 2


# ---- acceptance head ----------------------------------------------------------------------------


def head(session, chances, threshold, least=1, most=20):
    """Return the rule with a head that predicts these probabilities in turn."""
    turn = iter(chances)
    return AcceptanceHeadLength(
        session, most, threshold, lambda rows: torch.tensor([next(turn)]), min_length=least
    )


def constant(chance):
    while True:
        yield chance


def test_a_head_that_predicts_nine_tenths_stops_at_five_with_a_threshold_of_three_tenths(session):
    assert count_drafted(head(session(), constant(0.9), 0.3), *[EVEN] * 20) == 5
    assert count_drafted(head(session(), constant(0.9), None), *[EVEN] * 20) == 5


def test_a_threshold_of_one_never_stops_early(session):
    assert count_drafted(head(session(), constant(0.0), 1.0), *[EVEN] * 30) == 20


def test_a_threshold_of_zero_stops_at_the_minimum_unless_the_head_is_certain(session):
    assert count_drafted(head(session(), constant(0.999), 0.0, least=2), *[EVEN] * 20) == 2
    assert count_drafted(head(session(), constant(1.0), 0.0, least=2), *[EVEN] * 30) == 20


def test_the_first_token_and_the_newest_are_not_scored(session):
    seen = []

    def predict(rows):
        seen.append(rows.tolist())
        return torch.tensor([1.0])

    rule = AcceptanceHeadLength(session(), 20, 0.3, predict)
    count_drafted(rule, *[(make_output([0.0] * 5, hidden=[float(n)]), 0) for n in range(4)])
    # Forward n reads token n - 1. The first forward reads a committed token.
    assert seen == [[[1.0]], [[2.0]], [[3.0]]]


def test_the_rejection_probability_restarts_with_every_chain(session):
    rule = head(session(), constant(0.9), 0.3)
    assert [count_drafted(rule, *[EVEN] * 20) for _ in range(3)] == [5, 5, 5]


def test_the_rejection_probability_of_tokens_below_the_minimum_counts(session):
    assert count_drafted(head(session(), [0.1, 1.0, 1.0, 1.0], 0.3, least=4), *[EVEN] * 20) == 4


# ---- oracle -------------------------------------------------------------------------------------


def test_the_oracle_stops_after_the_first_token_that_differs_from_vanillas(session):
    opened = session()
    opened.harness.reference = [*opened.output(), 3, 1, 4, 2]
    rule = OracleLength(opened, 20)
    tokens = [(make_output([0.0] * 5), token) for token in (3, 1, 0, 2)]
    assert count_drafted(rule, *tokens) == 3


def test_the_oracle_stops_after_the_end_of_vanillas_output(session):
    opened = session()
    opened.harness.reference = [*opened.output(), 3]
    assert count_drafted(OracleLength(opened, 20), (EVEN[0], 3), EVEN, EVEN) == 2


def test_without_vanillas_output_the_oracle_does_not_stop(session):
    assert count_drafted(OracleLength(session(), 6), *[EVEN] * 20) == 6


# ---- all rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [r for r in RULES if r not in ("heuristic", *LOAD_RULES)])
def test_nothing_is_drafted_after_an_eos_or_beyond_the_maximum(session, name):
    opened = session(eos=(0,))
    params = LengthParams(length=name, max=7, threshold=0.0 if name == "confidence" else 9.0)
    rule = create_length_rule(params, opened, lambda rows: torch.ones(1))
    other = make_output([0.0] * 5), 1
    assert count_drafted(rule, other, EVEN, other) == 2
    assert count_drafted(rule, *[other] * 20) == 7


@pytest.mark.parametrize("name", [3, *(r for r in RULES if r not in LOAD_RULES)])
@RULED
def test_each_drafted_token_is_checked_once(session, name, sampling):
    opened = session(sampling)
    model = opened.draft()
    state = opened.new_state(model)
    model.forward(opened.pending_tokens(0), state)
    rule = create_length_rule(
        LengthParams(length=name, max=6), opened, lambda rows: torch.tensor([0.8])
    )
    checked = []
    method, more = Sps(), rule.should_continue
    method.model, method.state, method.length = model, state, rule
    rule.should_continue = lambda out, pick: checked.append(int(pick[0])) or more(out, pick)
    for limit in (0, 1, 9):
        checked.clear()
        state.rollback(0, len(opened.tokens()) - 1)
        draft = method.propose(opened, limit)
        assert draft.tokens.tolist() == checked
        assert len(checked) <= min(limit, 6)
        assert (draft.q is None) == (not checked or not sampling.draws)


def test_levels_are_the_fixed_length_or_the_maximum():
    assert LengthParams(length=7, max=3).levels == 7
    assert LengthParams(length="entropy", max=3).levels == 3


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "few", None])
def test_a_length_is_a_number_or_a_rule(wrong):
    with pytest.raises(ValidationError, match="must be"):
        LengthParams(length=wrong)

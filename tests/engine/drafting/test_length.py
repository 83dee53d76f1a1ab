"""How long chains get: each rule by hand, and that no rule bends what comes out."""

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
    """A session on tables of five tokens that has committed its first token."""

    def make(sampling=GREEDY, eos=(), **rest):
        tables = random_table(5, 1), random_table(5, 2)
        made = open_session(*tables, sampling=sampling, eos=eos, budget=40, **rest)
        made.prefill()
        return made

    return make


def outcome(accepted, tested):
    return Outcome(tuple(range(accepted)), (), (), tested)


def said(logits, hidden=None):
    """A draft model's forward over one token."""
    rows = torch.tensor([[logits]])
    return ModelOutput(rows, rows if hidden is None else torch.tensor([[hidden]]))


def drafted(rule, *steps):
    """How many tokens a rule drafts of those given as (forward, token)."""
    rule.begin()
    for n, (out, token) in enumerate(steps, start=1):
        if not rule.should_continue(out, (torch.tensor([token]), None)):
            return n
    return len(steps)


EVEN = (said([0.0] * 5), 0)


# ---- fixed and heuristic ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_fixed_length_is_drafted_in_every_step(length):
    rule = FixedLength(length)
    assert [drafted(rule, *[EVEN] * 20) for _ in range(3)] == [length] * 3


def test_the_heuristic_adds_two_after_full_acceptance_and_takes_one_after_a_miss():
    rule, lengths = HeuristicLength(20), []
    for stood in (True, True, False, False, True, False):
        lengths.append(drafted(rule, *[EVEN] * 20))
        rule.observe(outcome(lengths[-1] if stood else lengths[-1] - 1, lengths[-1]))
    assert lengths == [5, 7, 9, 8, 7, 9]


def test_the_heuristic_stays_between_one_and_its_most():
    rule = HeuristicLength(8)
    for n in (5, 7, 8, 8):
        assert drafted(rule, *[EVEN] * 20) == n
        rule.observe(outcome(n, n))
    for n in (8, 7, 6, 5, 4, 3, 2, 1, 1):
        assert drafted(rule, *[EVEN] * 20) == n
        rule.observe(outcome(0, 1))


def test_a_draft_that_the_budget_cut_short_counts_as_it_was():
    rule = HeuristicLength(20)
    assert drafted(rule, EVEN, EVEN) == 2
    rule.observe(outcome(2, 2))
    assert rule.length == 7


# ---- confidence and entropy ---------------------------------------------------------------------


def sure(chance):
    """A forward whose token 0 has a chance, of five."""
    return said(torch.tensor([chance, *[(1 - chance) / 4] * 4]).log().tolist()), 0


def test_drafting_stops_behind_a_token_of_too_little_confidence(session):
    rule = ConfidenceLength(session(), 20, 0.4)
    assert drafted(rule, sure(0.9), sure(0.41), sure(0.39), sure(0.9)) == 3
    assert drafted(rule, sure(0.1), sure(0.9)) == 1


def test_confidence_is_in_the_token_and_not_in_the_likeliest(session):
    rule = ConfidenceLength(session(), 20, 0.4)
    assert drafted(rule, (sure(0.9)[0], 1), sure(0.9)) == 1


def test_a_threshold_of_zero_never_stops(session):
    rule = ConfidenceLength(session(), 20, 0.0)
    for _ in range(4):
        assert drafted(rule, *[(sure(0.99)[0], 3)] * 30) == 20
        rule.observe(outcome(0, 1))
    assert rule.threshold == 0.0


def test_the_distribution_of_a_drawn_token_is_the_one_it_was_drawn_from(session):
    rule = ConfidenceLength(session(DISTRIBUTIONS[2]), 20, 0.4)
    q = torch.tensor([[0.3, 0.7, 0.0, 0.0, 0.0]])
    rule.begin()
    assert not rule.should_continue(sure(0.9)[0], (torch.tensor([0]), q))
    assert rule.should_continue(sure(0.9)[0], (torch.tensor([1]), q))


def test_under_the_coupled_rule_the_distribution_is_warped(session):
    sampling = Sampling("coupled", 0.5, top_k=3, seed=1)
    rule = ConfidenceLength(session(sampling), 20, 0.4)
    out, _ = sure(0.5)
    expected = warp(out.logits[0, -1], sampling)
    torch.testing.assert_close(rule.distribution(out, (torch.tensor([0]), None)), expected)


def test_padding_of_the_drafts_vocabulary_has_no_confidence(session):
    rule = ConfidenceLength(session(), 20, 0.4)
    padded = said([*sure(0.9)[0].logits[0, 0].tolist(), 99.0])
    assert drafted(rule, (padded, 0), sure(0.1)) == 2


def test_the_threshold_learnt_errs_least_by_hand():
    # At 0.9: one of two stands, none of four passes: 0 + 3/2. At 0.6: both stand, one passes: 1/4.
    tested = [(0.1, False), (0.2, False), (0.3, False), (0.6, True), (0.7, False), (0.9, True)]
    assert learn_threshold(tested) == 0.6
    # To let one more stand is worth three times as much as to keep one more out.
    tested = [(0.1, True), (0.2, False), (0.3, False), (0.4, False), (0.6, True), (0.9, True)]
    assert learn_threshold(tested) == 0.6  # 0 + 3/3 as against 3/3 + 0: the higher one
    tested = [(0.1, True), (0.2, False), (0.3, False), (0.4, False), (0.5, False), (0.9, True)]
    assert learn_threshold(tested) == 0.1  # 4/4 + 0 as against 0 + 3/2
    tested = [(0.1, False), (0.2, False), (0.3, False), (0.4, False), (0.5, False), (0.9, True)]
    assert learn_threshold(tested) == 0.9  # 0 + 0


def test_equal_chances_lie_on_one_side_of_a_threshold():
    tested = [(0.2, False), (0.2, False), (0.5, False), (0.5, True), (0.5, True), (0.5, True)]
    assert learn_threshold(tested) == 0.5
    # To let the one at 0.5 stand lets two more pass: 2/2 + 0 as against 0 + 3/4.
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
def test_few_tokens_or_those_of_one_kind_teach_nothing(tested):
    assert learn_threshold(tested) is None


def test_the_threshold_is_learnt_from_tested_tokens_alone(session):
    rule = ConfidenceLength(session(), 20, None)
    assert rule.threshold == DEFAULT_CONFIDENCE
    # Six drafted, the fifth rejected: the one behind it was not tested.
    assert drafted(rule, *map(sure, (0.9, 0.8, 0.7, 0.6, 0.5, 0.45))) == 6
    rule.observe(outcome(4, 5))
    assert rule.threshold == DEFAULT_CONFIDENCE  # five are too few
    assert drafted(rule, *map(sure, (0.55, 0.52))) == 2
    rule.observe(outcome(2, 2))
    assert rule.threshold == pytest.approx(0.52)


def test_a_threshold_that_is_given_stays(session):
    rule = ConfidenceLength(session(), 20, 0.3)
    for _ in range(4):
        drafted(rule, sure(0.9), sure(0.8), sure(0.7))
        rule.observe(outcome(1, 2))
    assert rule.threshold == 0.3


def test_drafting_stops_behind_a_token_of_too_much_entropy(session):
    rule = EntropyLength(session(), 20, 1.0)
    certain = said([50.0, 0.0, 0.0, 0.0, 0.0]), 0
    assert drafted(rule, certain, certain, EVEN, certain) == 3  # log 5 = 1.6 nats
    assert drafted(EntropyLength(session(), 20, 1.7), *[EVEN] * 30) == 20


def test_an_entropy_of_a_distribution_with_zeros_is_finite(session):
    rule = EntropyLength(session(), 20, 1.0)
    assert drafted(rule, (said([0.0, 0.0, *[-torch.inf] * 3]), 0), EVEN) == 2


def test_without_a_threshold_an_entropy_of_one_and_a_half_nats_is_enough(session):
    rule = EntropyLength(session(), 20, None)
    four = said([0.0, 0.0, 0.0, 0.0, -torch.inf]), 0  # log 4 = 1.39 nats, log 5 = 1.61
    assert drafted(rule, four, EVEN, four) == 2


# ---- acceptance head ----------------------------------------------------------------------------


def head(session, chances, threshold, least=1, most=20):
    """The rule with a head that predicts what is given, in turn."""
    turn = iter(chances)
    return AcceptanceHeadLength(
        session, most, threshold, lambda rows: torch.tensor([next(turn)]), min_length=least
    )


def constant(chance):
    while True:
        yield chance


def test_a_head_that_says_nine_tenths_stops_at_five_by_a_threshold_of_three_tenths(session):
    assert drafted(head(session(), constant(0.9), 0.3), *[EVEN] * 20) == 5
    assert drafted(head(session(), constant(0.9), None), *[EVEN] * 20) == 5


def test_a_threshold_of_one_never_stops_early(session):
    assert drafted(head(session(), constant(0.0), 1.0), *[EVEN] * 30) == 20


def test_a_threshold_of_zero_stops_at_the_least_unless_the_head_is_sure(session):
    assert drafted(head(session(), constant(0.999), 0.0, least=2), *[EVEN] * 20) == 2
    assert drafted(head(session(), constant(1.0), 0.0, least=2), *[EVEN] * 30) == 20


def test_the_first_token_and_the_newest_are_not_scored(session):
    seen = []

    def predict(rows):
        seen.append(rows.tolist())
        return torch.tensor([1.0])

    rule = AcceptanceHeadLength(session(), 20, 0.3, predict)
    drafted(rule, *[(said([0.0] * 5, hidden=[float(n)]), 0) for n in range(4)])
    # Forward n is fed token n - 1, and the first one a committed token.
    assert seen == [[[1.0]], [[2.0]], [[3.0]]]


def test_every_chain_starts_with_no_doubt(session):
    rule = head(session(), constant(0.9), 0.3)
    assert [drafted(rule, *[EVEN] * 20) for _ in range(3)] == [5, 5, 5]


def test_the_doubt_of_tokens_below_the_least_counts(session):
    assert drafted(head(session(), [0.1, 1.0, 1.0, 1.0], 0.3, least=4), *[EVEN] * 20) == 4


# ---- oracle -------------------------------------------------------------------------------------


def test_the_oracle_stops_behind_the_first_token_that_vanilla_does_not_say(session):
    made = session()
    made.harness.reference = [*made.output(), 3, 1, 4, 2]
    rule = OracleLength(made, 20)
    tokens = [(said([0.0] * 5), token) for token in (3, 1, 0, 2)]
    assert drafted(rule, *tokens) == 3


def test_the_oracle_stops_behind_the_end_of_vanillas_output(session):
    made = session()
    made.harness.reference = [*made.output(), 3]
    assert drafted(OracleLength(made, 20), (EVEN[0], 3), EVEN, EVEN) == 2


def test_without_vanillas_output_the_oracle_drafts_on(session):
    assert drafted(OracleLength(session(), 6), *[EVEN] * 20) == 6


# ---- all rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [r for r in RULES if r not in ("heuristic", *LOAD_RULES)])
def test_nothing_is_drafted_behind_an_eos_or_beyond_the_most(session, name):
    made = session(eos=(0,))
    params = LengthParams(length=name, max=7, threshold=0.0 if name == "confidence" else 9.0)
    rule = create_length_rule(params, made, lambda rows: torch.ones(1))
    other = said([0.0] * 5), 1
    assert drafted(rule, other, EVEN, other) == 2
    assert drafted(rule, *[other] * 20) == 7


@pytest.mark.parametrize("name", [3, *(r for r in RULES if r not in LOAD_RULES)])
@RULED
def test_each_kept_token_is_asked_about_once_and_stays(session, name, sampling):
    made = session(sampling)
    model = made.draft()
    state = made.new_state(model)
    model.forward(made.pending_tokens(0), state)
    rule = create_length_rule(
        LengthParams(length=name, max=6), made, lambda rows: torch.tensor([0.8])
    )
    asked = []
    method, more = Sps(), rule.should_continue
    method.model, method.state, method.length = model, state, rule
    rule.should_continue = lambda out, pick: asked.append(int(pick[0])) or more(out, pick)
    for limit in (0, 1, 9):
        asked.clear()
        state.rollback(0, len(made.tokens()) - 1)
        draft = method.propose(made, limit)
        assert draft.tokens.tolist() == asked
        assert len(asked) <= min(limit, 6)
        assert (draft.q is None) == (not asked or not sampling.draws)


def test_levels_are_the_length_or_the_most_that_a_rule_may_draft():
    assert LengthParams(length=7, max=3).levels == 7
    assert LengthParams(length="entropy", max=3).levels == 3


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "few", None])
def test_a_length_is_a_number_or_a_rule(wrong):
    with pytest.raises(ValidationError, match="must be"):
        LengthParams(length=wrong)

"""Tests of verdicts: identical, near-tie or mismatch."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.processor import LogitsProcessor, RequestProcessor
from specbench_cli.engine.verify.sampling import Noise, Sampling, log_warp, warp_logits
from specbench_cli.judge.tolerance import CEILING, measure_tolerance
from specbench_cli.judge.verdict import (
    NonFiniteLogits,
    OutputJudge,
    cut_bounds,
    ends_correctly,
    requires_same_tokens,
)
from specbench_cli.store.schema import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 40
EOS = 1
BUDGET = 12
PROMPT = (5, 9, 14, 3, 22)
STOP = StopRule(frozenset({EOS}), BUDGET)
GREEDY = Sampling()
COUPLED = Sampling(rule="coupled", temperature=0.7, seed=3)
CUT = Sampling(rule="coupled", temperature=0.9, top_k=12, top_p=0.8, seed=3)
SAMPLINGS = pytest.mark.parametrize(
    "sampling", [GREEDY, COUPLED, CUT], ids=["greedy", "coupled", "cut"]
)


def make_tiny_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


TIED = (7, 8)


@pytest.fixture(scope="module")
def module() -> LlamaForCausalLM:
    """A model in which tokens 7 and 8 always tie, and are the best from the third token on."""
    module = make_tiny_model()
    with torch.no_grad():
        module.lm_head.weight[EOS] = 0.0
        row = module.lm_head.weight[decode(module, GREEDY, [])[3]].clone()
        for token in TIED:
            module.lm_head.weight[token] = 1.01 * row
    return module


@pytest.fixture(scope="module")
def tie(module):
    """The position of a tie in a greedy output, and the output with the other tied token."""
    reference = decode(module, GREEDY, [])
    position = next(i for i, token in enumerate(reference) if token in TIED)
    other = sum(TIED) - reference[position]
    return position, decode(module, GREEDY, [*reference[:position], other])


def scores(module, sampling: Sampling, ids: list[int]) -> torch.Tensor:
    """Return the decision scores of the token after `ids`."""
    with torch.no_grad():
        row = module(torch.tensor([[*PROMPT, *ids]])).logits[0, -1]
    if sampling.rule == "greedy":
        return row
    noise = Noise(sampling.seed, "test/1", 1, VOCAB, row.device)
    return log_warp(row, sampling) + noise.rows(len(ids), 1)[0]


def decode(module, sampling: Sampling, ids: list[int], *, stop: StopRule = STOP) -> list[int]:
    """Continue `ids` as vanilla does."""
    while stop.truncate((), ids)[1] is None:
        ids = [*ids, int(scores(module, sampling, ids).argmax())]
    return ids


@pytest.fixture
def judge(module):
    """Return a function that compares ids with the reference, by default vanilla's output."""

    def verdict(sampling, ids, reference=None, *, stop=STOP, oracle=lambda: module) -> Verdict:
        judge = OutputJudge(oracle, sampling, lambda: [list(range(2, 40))])
        reference = decode(module, sampling, [], stop=stop) if reference is None else reference
        return judge.compare(Request("test/1", 1, PROMPT, stop), reference, ids)

    return verdict


def fail() -> None:
    raise AssertionError("the oracle was loaded")


@SAMPLINGS
def test_equal_ids_are_identical_without_loading_the_oracle(module, judge, sampling):
    ids = decode(module, sampling, [])
    assert judge(sampling, ids, oracle=fail) == Verdict("identical")


@SAMPLINGS
@pytest.mark.parametrize("position", [0, 4, BUDGET - 1])
def test_wrong_token_is_a_mismatch_with_its_position(module, judge, sampling, position):
    reference = decode(module, sampling, [])
    best_scores = scores(module, sampling, reference[:position])
    best_scores[EOS] = -math.inf
    worse = best_scores.masked_fill(best_scores < best_scores.max() - 0.1, -math.inf)
    wrong = int(best_scores.masked_fill(worse.isfinite(), -math.inf).argmax())
    verdict = judge(sampling, decode(module, sampling, [*reference[:position], wrong]))
    assert (verdict.kind, verdict.position) == ("mismatch", position)
    assert verdict.expected == reference[position]
    assert verdict.gap == pytest.approx(float(best_scores.max() - best_scores[wrong]), abs=1e-4)


def test_other_tied_token_is_a_near_tie_without_a_gap(judge, tie):
    position, other = tie
    verdict = judge(GREEDY, other)
    assert (verdict.kind, verdict.position, verdict.expected) == ("near-tie", position, 7)
    assert verdict.gap == pytest.approx(0.0, abs=1e-6)


def test_a_wrong_token_after_a_tie_is_a_mismatch(module, judge, tie):
    position, other = tie
    wrong = int(scores(module, GREEDY, other[:-1]).argmin())
    verdict = judge(GREEDY, [*other[:-1], wrong])
    assert (verdict.kind, verdict.position) == ("mismatch", position)
    assert verdict.gap > 0.1


@SAMPLINGS
def test_outputs_with_a_wrong_end_are_mismatches(module, judge, sampling):
    reference = decode(module, sampling, [])
    assert judge(sampling, reference[:7], oracle=fail) == Verdict("mismatch", 7, None, reference[7])
    too_long = [*reference, 5]
    assert judge(sampling, too_long, oracle=fail) == Verdict("mismatch", BUDGET, None, None)
    assert judge(sampling, [], oracle=fail) == Verdict("mismatch", 0, None, reference[0])


def test_an_ignored_eos_is_a_mismatch(module, judge):
    plain = decode(module, GREEDY, [])
    stop = StopRule(frozenset({plain[5]}), BUDGET)
    reference = plain[: plain.index(plain[5]) + 1]
    verdict = judge(GREEDY, plain, stop=stop, oracle=fail)
    assert verdict == Verdict("mismatch", len(reference), None, None)
    assert judge(GREEDY, reference, stop=stop) == Verdict("identical")


def test_an_output_must_end_at_its_first_stop_string():
    stop = StopRule(frozenset(), 10, ("34",), lambda ids: "".join(map(str, ids)))
    assert ends_correctly([1, 2, 3, 4], stop)
    assert not ends_correctly([1, 2, 3, 4, 5], stop)
    assert not ends_correctly([1, 2, 3], stop)


def test_noise_of_another_prompt_is_a_mismatch(module, judge):
    ids: list[int] = []
    other = Noise(COUPLED.seed, "test/2", 1, VOCAB, torch.device("cpu"))
    while len(ids) < BUDGET:
        own = (
            scores(module, COUPLED, ids)
            - Noise(COUPLED.seed, "test/1", 1, VOCAB, torch.device("cpu")).rows(len(ids), 1)[0]
        )
        choice = own + other.rows(len(ids), 1)[0]
        choice[EOS] = -math.inf
        ids.append(int(choice.argmax()))
    assert judge(COUPLED, ids).kind == "mismatch"


@SAMPLINGS
def test_gaps_of_a_correct_output_are_within_the_tolerance(module, sampling):
    ids = decode(module, sampling, [])
    judge = OutputJudge(lambda: module, sampling, lambda: [list(range(2, 40))])
    gaps = judge.gaps(Request("test/1", 1, PROMPT, STOP), ids)
    assert len(gaps) == len(ids)
    assert all(0 <= gap < 1e-5 for gap in gaps)


def test_a_cut_token_is_a_mismatch(module, judge):
    """A cut token has probability 0, however large its noise is."""
    sampling = Sampling(rule="coupled", temperature=1.0, top_k=1, seed=3)
    reference = decode(module, sampling, [])
    open_scores = scores(module, Sampling(rule="coupled", temperature=1.0, seed=3), [])
    token_with_most_noise = int(open_scores.argmax())
    assert token_with_most_noise not in (reference[0], EOS)
    verdict = judge(sampling, decode(module, sampling, [token_with_most_noise]))
    assert (verdict.kind, verdict.position) == ("mismatch", 0)


def test_tied_tokens_at_the_cut_are_near_ties(module, judge, tie):
    """Top-1 keeps one of the tied tokens. Rounding decides which one."""
    sampling = Sampling(rule="coupled", temperature=1.0, top_k=1, seed=3)
    position, other = tie
    reference = decode(module, GREEDY, [])
    verdict = judge(sampling, other, reference)
    assert (verdict.kind, verdict.position) == ("near-tie", position)
    assert verdict.gap == pytest.approx(0.0, abs=1e-6)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6),
    st.integers(0, 6),
    st.floats(0.05, 1.0),
    st.sampled_from([0.0, 1e-3, 0.1]),
)
def test_cut_bounds_enclose_the_cut(logits, top_k, top_p, tolerance):
    sampling = Sampling(rule="coupled", temperature=1.0, top_k=top_k, top_p=top_p)
    rows = torch.tensor([logits]).log_softmax(-1)
    kept = warp_logits(rows, sampling).isfinite()
    floor, ceiling = cut_bounds(rows, sampling, tolerance)
    rounding = 1e-6
    assert (rows[kept] >= floor - rounding).all()
    assert (rows[~kept] <= ceiling + rounding).all()


@pytest.mark.parametrize("mass", [0.6, 0.9, 0.99])
def test_top_p_bounds_are_bounds_on_the_mass(mass):
    """The bound is on the probability mass: a mass of 0.9 does not become 1.2."""
    error = 0.3
    rows = torch.tensor([[mass, 1 - mass]]).log()
    min_mass = (
        (rows + torch.tensor([-error, error])).softmax(-1)[0, 0].item()
    )  # smallest mass of the first token
    for top_p, kept in ((min_mass + 1e-3, True), (min_mass - 1e-3, False)):
        floor, _ = cut_bounds(rows, Sampling("coupled", 1.0, top_p=top_p), error)
        assert (rows[0, 1] >= floor[0]).item() is kept


@SAMPLINGS
def test_the_reference_is_checked(module, sampling):
    judge = OutputJudge(lambda: module, sampling, lambda: [list(range(2, 40))])
    request = Request("test/1", 1, PROMPT, STOP)
    ids = decode(module, sampling, [])
    assert judge.judge_reference(request, ids) == Verdict("reference", gap=0.0)
    assert judge.facts() is None  # no tolerance was needed
    best_scores = scores(module, sampling, ids[:4])
    best_scores[EOS] = -math.inf
    wrong = decode(module, sampling, [*ids[:4], int(best_scores.argmin())])
    found = judge.judge_reference(request, wrong)
    assert (found.kind, found.position, found.expected) == ("mismatch", 4, ids[4])
    assert judge.judge_reference(request, ids[:7]) == Verdict("mismatch", 7, None, None)


def test_a_wrong_reference_has_no_near_ties(module, judge):
    best_scores = decode(module, GREEDY, [])
    row = scores(module, GREEDY, best_scores[:3])
    row[EOS] = -math.inf
    worse = decode(module, GREEDY, [*best_scores[:3], int(row.argmin())])
    verdict = judge(GREEDY, best_scores, worse)
    assert (verdict.kind, verdict.position) == ("mismatch", 3)
    assert verdict.gap > 0.1


def test_non_finite_logits_are_an_error(module, judge):
    best_scores = decode(module, GREEDY, [])
    other = [(best_scores[0] + 1) % VOCAB, *best_scores[1:]]

    class Nothing(torch.nn.Module):
        dtype, device = module.dtype, module.device

        def forward(self, input_ids, past_key_values=None, use_cache=False, logits_to_keep=0):
            out = module(input_ids)
            out.logits[:, -3:, 2] = math.nan
            return out

    with pytest.raises(NonFiniteLogits, match=f"output token {BUDGET - 3}: "):
        judge(GREEDY, other, best_scores, oracle=Nothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tolerance_is_twice_the_largest_difference_and_below_its_ceiling(dtype):
    found = measure_tolerance(make_tiny_model(dtype), [[5] * 30, list(range(2, 40))], positions=50)
    assert found.positions == 50
    assert found.ceiling == CEILING[dtype]
    assert 0 < found.value == min(2 * found.largest, found.ceiling)


def test_tolerance_needs_a_text(module):
    with pytest.raises(ValueError, match="at least one token"):
        measure_tolerance(module, [])


def test_coupled_tolerance_is_divided_by_the_temperature(module):
    greedy, coupled = (
        OutputJudge(lambda: module, sampling, lambda: [range(2, 40)])
        for sampling in (GREEDY, COUPLED)
    )
    assert coupled._allowed_gap == pytest.approx(greedy._allowed_gap / COUPLED.temperature)


def test_facts_have_the_tolerance_only_if_it_was_measured(module):
    judge = OutputJudge(lambda: module, GREEDY, lambda: [list(range(2, 40))])
    request = Request("test/1", 1, PROMPT, STOP)
    reference = decode(module, GREEDY, [])
    judge.compare(request, reference, reference)
    assert judge.facts() is None
    judge.compare(request, reference, [2] * BUDGET)
    assert judge.facts() == {
        "value": pytest.approx(2 * judge.facts()["largest"]),
        "largest": judge.facts()["largest"],
        "ceiling": 1e-3,
        "positions": 38,
    }


@pytest.mark.parametrize(
    ("guarantee", "rule", "judged"),
    [
        ("exact_tokens", "greedy", True),
        ("exact_tokens", "coupled", True),
        ("exact_law", "greedy", True),
        ("exact_law", "coupled", True),
        ("exact_law", "rejection", False),
        ("quality_only", "greedy", False),
        ("bounded", "coupled", False),
    ],
)
def test_only_guaranteed_tokens_are_compared(guarantee, rule, judged):
    assert requires_same_tokens(guarantee, rule) is judged


# ---- with a logits processor ----------------------------------------------------------------


class NoRepeats(LogitsProcessor):
    """A processor that forbids repeating the previous token."""

    def begin(self):
        return NoRepeat()


class NoRepeat(RequestProcessor):
    def __call__(self, rows, output, tokens, parents=None):
        before, rows = [*output[-1:], *tokens], rows.clone()
        first = 1 - bool(output)  # the first row has no previous token
        for at, token in enumerate(before, start=first):
            rows[at, token] = -math.inf
        return rows


def with_processor(sampling):
    return replace(sampling, processor=NoRepeats())


def decode_with_processor(module, sampling):
    """Return vanilla's output under the processor."""
    ids = []
    while STOP.truncate((), ids)[1] is None:
        row = scores(module, GREEDY, ids)[None]
        row = NoRepeat()(row, ids, ())
        if sampling.rule != "greedy":
            noise = Noise(sampling.seed, "test/1", 1, VOCAB, row.device)
            row = log_warp(row, sampling) + noise.rows(len(ids), 1)
        ids.append(int(row.argmax()))
    return ids


@SAMPLINGS
def test_reference_and_gaps_use_the_processed_logits(module, sampling):
    judge = OutputJudge(lambda: module, with_processor(sampling), lambda: [list(range(2, 40))])
    request, reference = Request("test/1", 1, PROMPT, STOP), decode_with_processor(module, sampling)
    assert judge.judge_reference(request, reference) == Verdict("reference", gap=0.0)
    assert max(judge.gaps(request, reference)) < 1e-5
    assert max(judge.flip_chances(request, reference)) <= 1.0
    assert all(
        -math.inf < each <= 0 for each in judge.compute_likelihood(request, reference).log_probs
    )


@SAMPLINGS
def test_a_token_that_the_processor_forbids_is_a_mismatch_without_a_gap(module, sampling):
    judge = OutputJudge(lambda: module, with_processor(sampling), lambda: [list(range(2, 40))])
    request, reference = Request("test/1", 1, PROMPT, STOP), decode_with_processor(module, sampling)
    wrong = [*reference[:4], reference[3]]
    wrong += [2 + at % 2 for at in range(BUDGET - len(wrong))]
    found = judge.compare(request, reference, wrong)
    assert (found.kind, found.position, found.gap) == ("mismatch", 4, None)
    assert all(-math.inf < each <= 0 for each in judge.compute_likelihood(request, wrong).log_probs)


def test_a_sampled_token_that_the_processor_forbids_is_a_mismatch(module):
    sampling = with_processor(Sampling("rejection", 1.0))
    judge = OutputJudge(lambda: module, sampling, lambda: [list(range(2, 40))])
    request = Request("test/1", 1, PROMPT, STOP)
    valid = [2 + at % 2 for at in range(BUDGET)]
    assert judge.judge_sampled(request, valid).kind == "unchecked"
    found = judge.judge_sampled(request, [*valid[:5], valid[4], *valid[:6]])
    assert (found.kind, found.position, found.gap) == ("mismatch", 5, None)

"""Tests of near-ties: their probabilities, and whether the batch width explains them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import ModelOutput
from specbench_cli.engine.verify.sampling import Noise, Sampling, log_warp
from specbench_cli.judge.neartie import MAX_GAP_ERROR, flip_chances, width_explains
from specbench_cli.judge.verdict import OutputJudge
from specbench_cli.stats.neartie import LEVEL, upper_tail
from specbench_cli.store.schema import Steps

VOCAB = 12
PROMPT = (3, 1, 4)
COUPLED = Sampling("coupled", 0.8, seed=2)


def chances(row, chosen, reach=1.0, kept=None):
    found = flip_chances(torch.tensor([row]), torch.tensor([[chosen]]), reach, kept)
    return found.item()


@pytest.mark.parametrize(
    ("gap", "chance"), [(0.0, 0.5), (0.5, 0.25), (1.0, 0.0), (7.0, 0.0), (-0.5, 0.75), (-3.0, 1.0)]
)
def test_probability_of_a_flip_falls_with_the_gap(gap, chance):
    assert chances([2.0, 2.0 - gap, -9.0], 0) == pytest.approx(chance)


def test_flip_probabilities_add_up_to_at_most_1():
    assert chances([1.0, 1.0, 1.0], 0) == 1.0
    assert chances([1.0] * 9, 0) == 1.0


def test_no_flip_without_rounding():
    assert chances([1.0, 1.0], 0, reach=0.0) == 0.0


def test_a_token_certainly_cut_has_no_flip_probability():
    inside = torch.tensor([[True, False, False]])
    assert chances([0.0, 5.0, -9.0], 0, kept=(inside, ~inside)) == 0.0


def test_a_token_at_the_cut_is_kept_half_of_the_time():
    inside, outside = torch.tensor([[True, False]]), torch.tensor([[False, False]])
    assert chances([0.0, 5.0], 0, kept=(inside, outside)) == 0.5
    assert chances([0.0, 5.0], 1, kept=(inside, outside)) == 0.5


@given(st.integers(0, 10**6))
def test_the_bound_holds_for_rounding_errors_within_the_reach(seed):
    """Each score has a uniform error of at most half of `reach`, so a gap has at most `reach`."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(5, generator=generator)
    errors = torch.rand(2000, 5, generator=generator) - 0.5
    flipped = ((row + errors).argmax(-1) != row.argmax()).double().mean().item()
    bound = chances(row.tolist(), int(row.argmax()))
    assert flipped <= bound + 4 * math.sqrt(0.25 / 2000)


class WidthDependentDecoder(Decoder):
    """A decoder whose choice depends on the number of tokens in a forward.

    For several tokens, token 7 is 1e-5 above token 6. For one token, it is 1e-5 below.
    """

    def __init__(self) -> None:
        self.name, self.vocab_size, self.n_layers, self.hidden_size = "target", VOCAB, 1, 1
        self.max_positions = 64
        self.device, self.dtype, self.weight_bytes = torch.device("cpu"), torch.float32, 0

    def new_state(self, capacity, n_seqs=1):
        return Rows(capacity)

    def forward(self, x, state, *, logits_at="last", **rest) -> ModelOutput:
        n = x.ids.shape[1]
        logits = torch.zeros(1, n, VOCAB)
        logits[..., 6] = 1.0
        logits[..., 7] = 1.0 + (1e-5 if n > 1 else -1e-5)
        state.written += n
        assert state.written <= state.capacity
        return ModelOutput(logits if logits_at == "all" else logits[:, -1:], torch.zeros(1, n, 1))


class Rows:
    """A KV cache that stores only its length."""

    by_row = True

    def __init__(self, capacity):
        self.capacity, self.written, self.kept = capacity, 0, 0

    def length(self, seq=0, layer=0):
        return self.written

    def commit(self, seq, path):
        self.kept += len(path)
        self.written = self.kept


def request(n):
    return Request("test/1", 1, PROMPT, StopRule(frozenset(), n))


def steps(*pairs):
    """Return the counters of steps, from pairs of drafted and committed tokens."""
    drafted, committed = ([pair[at] for pair in pairs] for at in (0, 1))
    accepted = [n - 1 for n in committed]
    return Steps(drafted, drafted, drafted, accepted, committed)


def test_a_choice_in_a_wide_block_is_explained_by_its_width():
    ids = [7, 7, 7, 6]  # the prompt is wide, then a block of 3, then one token alone
    assert width_explains(
        WidthDependentDecoder(), Sampling(), request(4), ids, steps((2, 2), (0, 1))
    )
    assert not width_explains(
        WidthDependentDecoder(), Sampling(), request(4), ids, steps((0, 1), (0, 1), (0, 1))
    )


def test_a_block_longer_than_the_output_is_padded():
    assert width_explains(WidthDependentDecoder(), Sampling(), request(3), [7, 7, 7], steps((9, 2)))


def test_width_is_checked_with_the_noise_of_coupled_sampling():
    rows = torch.zeros(3, VOCAB)
    rows[:, 6], rows[:, 7] = 1.0, 1.0 + 1e-5
    noise = Noise(COUPLED.seed, "test/1", 1, VOCAB, torch.device("cpu")).rows(0, 3)
    ids = (log_warp(rows, COUPLED) + noise).argmax(-1).tolist()
    assert width_explains(WidthDependentDecoder(), COUPLED, request(3), ids, steps((1, 2)))
    wrong = [(ids[0] + 1) % VOCAB, *ids[1:]]
    assert not width_explains(WidthDependentDecoder(), COUPLED, request(3), wrong, steps((1, 2)))


class FakeModule(torch.nn.Module):
    """A fake transformers module that always returns the same logits."""

    def __init__(self, row, rounding=1e-4):
        super().__init__()
        self.row, self.rounding = torch.tensor(row), rounding
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def forward(self, input_ids, past_key_values=None, use_cache=False, logits_to_keep=0):
        n = logits_to_keep or input_ids.shape[1]
        logits = self.row.expand(1, n, -1).clone()
        if use_cache:
            logits[..., 0] += self.rounding
        return type("Out", (), {"logits": logits, "past_key_values": None})()


ROW = [0.0] * 6 + [1.0, 1.0 - 1e-4] + [0.0] * 4


def judge(sampling=None, decoder=None, row=ROW):
    module = FakeModule(row)
    return OutputJudge(lambda: module, sampling or Sampling(), lambda: [[1, 2, 3]], decoder)


def test_flip_probabilities_of_vanillas_output_follow_from_its_gaps():
    found = judge().flip_chances(request(2), [6, 6])
    assert found == pytest.approx([0.375, 0.375], abs=1e-3)  # tolerance 2e-4, gap 1e-4


def test_a_near_tie_verdict_has_whether_width_explains_it():
    ids, reference = [7, 7], [6, 6]
    verdict = judge(decoder=WidthDependentDecoder()).compare(
        request(2), reference, ids, steps((1, 1))
    )
    assert (verdict.kind, verdict.rounding) == ("near-tie", True)
    verdict = judge(decoder=WidthDependentDecoder()).compare(
        request(2), reference, ids, steps((0, 1))
    )
    assert (verdict.kind, verdict.rounding) == ("near-tie", False)


def test_width_is_not_checked_without_steps():
    verdict = judge(decoder=WidthDependentDecoder()).compare(request(2), [6, 6], [7, 7])
    assert (verdict.kind, verdict.rounding) == ("near-tie", None)


def test_coupled_flip_probabilities_include_tokens_at_the_cut():
    sampling = Sampling("coupled", 1.0, top_k=1, seed=2)
    sure = [0.0] * 6 + [1.0, 0.5] + [0.0] * 4
    assert judge(sampling, row=sure).flip_chances(request(4), [6] * 4) == [0.0] * 4
    assert (
        min(judge(sampling).flip_chances(request(4), [6] * 4)) > 0.4
    )  # rounding decides which token is cut


def test_log_likelihood_uses_the_warped_distribution():
    sampling = Sampling("rejection", 0.5)
    distribution = (torch.tensor(ROW) / 0.5).log_softmax(-1)
    expected = float(distribution[6] + distribution[0])
    assert sum(judge(sampling).compute_likelihood(request(2), [6, 0]).log_probs) == pytest.approx(
        expected, abs=1e-5
    )


def test_log_likelihood_of_a_cut_token_is_finite():
    sampling = Sampling("rejection", 0.5, top_k=2)
    assert all(map(math.isfinite, judge(sampling).compute_likelihood(request(2), [6, 0]).log_probs))


@pytest.mark.parametrize("steps_allowed", [2, 3, 4])
def test_the_bound_holds_on_the_grid_of_half_precision(steps_allowed):
    """Scores are rounded to a grid. Ties are broken by the lower id, which is half of the time."""
    generator = torch.Generator().manual_seed(steps_allowed)
    for gap in range(steps_allowed + 1):
        errors = torch.randint(-steps_allowed, steps_allowed + 1, (4000,), generator=generator)
        flipped = (errors > gap).double().mean() + 0.5 * (errors == gap).double().mean()
        bound = chances([float(gap), 0.0], 0, reach=MAX_GAP_ERROR * steps_allowed)
        assert flipped <= bound + 4 * math.sqrt(0.25 / 4000)


def test_one_near_tie_within_the_tolerance_is_never_too_many():
    at_the_edge = chances([1.0, 0.0], 0, reach=MAX_GAP_ERROR * 1.0)
    assert upper_tail(1, [at_the_edge]) > 0.2 > LEVEL

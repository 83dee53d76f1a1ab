"""Warping compared with transformers', Philox with its published vectors, and the noise's
distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specbench_cli.engine.verify import sampling
from specbench_cli.engine.verify.sampling import Noise, Sampling, hash_key, log_warp, philox, warp

CPU = torch.device("cpu")


def sampled(temperature=1.0, **cuts):
    return Sampling("rejection", temperature, **cuts)


# ---- warping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_warping_equals_the_warpers_of_transformers(temperature, top_k, top_p, dtype):
    rows = 3 * torch.randn(64, 97, dtype=dtype, generator=torch.Generator().manual_seed(5))
    theirs = TemperatureLogitsWarper(temperature)(None, rows)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1.0:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = warp(rows, sampled(temperature, top_k=top_k, top_p=top_p))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs.softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(ours > 0, theirs.softmax(-1) > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_warped_in_float32(dtype):
    rows = torch.randn(4, 33, generator=torch.Generator().manual_seed(6)).to(dtype)
    rule = sampled(0.7, top_k=9, top_p=0.9)
    assert torch.equal(warp(rows, rule), warp(rows.float(), rule))
    assert warp(rows, rule).dtype == torch.float32


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=12),
    st.floats(0.05, 5),
    st.integers(0, 14),
    st.floats(0.01, 1),
)
@settings(deadline=None)
def test_a_warped_distribution_sums_to_one_and_keeps_the_most_likely_token(
    logits, temperature, top_k, top_p
):
    rows = torch.tensor(logits, dtype=torch.float64)
    p = warp(rows, sampled(temperature, top_k=top_k, top_p=top_p))
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert rows[p.argmax()] > rows.max() - 1e-9


def test_log_warp_is_the_logarithm_of_warp_with_minus_infinity_outside_the_cuts():
    rows = torch.randn(8, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    rule = sampled(0.6, top_k=5)
    assert torch.equal(log_warp(rows, rule).isinf(), warp(rows, rule) == 0)
    torch.testing.assert_close(log_warp(rows, rule).exp(), warp(rows, rule))


def test_all_tokens_tied_at_the_top_k_cut_are_kept():
    assert (warp(torch.tensor([2.0, 1.0, 1.0, 0.0]), sampled(top_k=2)) > 0).tolist() == [1, 1, 1, 0]


def test_of_tokens_tied_at_the_top_p_cut_the_lower_ids_are_kept():
    assert (warp(torch.zeros(4), sampled(top_p=0.6)) > 0).tolist() == [1, 1, 1, 0]


def test_a_token_after_a_mass_of_exactly_top_p_is_cut():
    assert warp(torch.zeros(2), sampled(top_p=0.5)).tolist() == [1.0, 0.0]


def test_tokens_of_probability_zero_stay_excluded():
    rows = torch.tensor([0.0, -math.inf, 1.0, -math.inf])
    p = warp(rows, sampled(0.5, top_k=3, top_p=0.9999999))
    assert p[1] == p[3] == 0
    assert p.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [("greedy", 1.0), ("rejection", 0.0), ("block", 0.0), ("coupled", 0.0)],
)
def test_a_rule_with_an_invalid_temperature_is_refused(rule, temperature):
    with pytest.raises(ValueError, match="temperature"):
        Sampling(rule, temperature)


def test_the_default_is_greedy_without_cuts_and_seed_0():
    assert Sampling() == Sampling("greedy", temperature=0.0, top_k=0, top_p=1.0, seed=0)


def test_rejection_and_block_verification_draw_their_tokens():
    rules = {"greedy": 0.0, "rejection": 1.0, "block": 1.0, "coupled": 1.0}
    draws = {rule for rule, temperature in rules.items() if Sampling(rule, temperature).draws}
    assert draws == {"rejection", "block"}


# ---- Philox -------------------------------------------------------------------------------------

# Random123's kat_vectors file: philox4x32, 10 rounds: counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.smoke
@pytest.mark.parametrize(("counter", "key", "result"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_answers(counter, key, result):
    low, high = words(key)
    assert philox(torch.tensor(words(counter)), low | high << 32).tolist() == words(result)


def test_philox_of_many_counters_equals_single_calls():
    counters = torch.randint(0, 1 << 32, (4, 3, 5), generator=torch.Generator().manual_seed(8))
    key = 0x0123456789ABCDEF
    each = [[philox(counters[:, i, j], key) for j in range(5)] for i in range(3)]
    assert torch.equal(
        philox(counters, key), torch.stack([torch.stack(row, -1) for row in each], -2)
    )


def philox_in_integers(counter, key):
    """Compute Philox with Python's integers, by its definition (Salmon et al. 2011, section
    3.3)."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_philox_equals_its_definition_in_integers(counter, key):
    assert philox(torch.tensor(counter), key).tolist() == philox_in_integers(counter, key)


# ---- noise --------------------------------------------------------------------------------------


def noise(seed=0, prompt="mini/3", turn=0, vocab=101):
    return Noise(seed, prompt, turn, vocab, CPU)


def test_noise_is_the_gumbel_transform_of_philox_words():
    rows = noise(seed=4, prompt="gsm8k/17", turn=1).rows(6, 1)[0]
    key = hash_key("noise", 4, "gsm8k/17", 1)
    for token in (0, 1, 2, 3, 4, 50, 100):
        word = philox_in_integers((token // 4, 6, 0, 0), key)[token % 4]
        expected = -math.log(-math.log((word + 0.5) / 2**32))
        assert rows[token].item() == pytest.approx(expected, rel=1e-6)


def test_keys_are_the_same_on_every_machine():
    assert hash_key("noise", 0, "mini/3", 0) == 0x8E6BD7CF1F5080EB


def test_keys_separate_their_parts():
    assert hash_key("a", "bc") != hash_key("ab", "c")
    assert hash_key("a", 1, 2) != hash_key("a", 12)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=30)
def test_a_rows_noise_does_not_depend_on_the_requested_block(calls):
    source = noise(vocab=13)
    single = {}
    for first, n in calls:
        rows = source.rows(first, n)
        assert rows.shape == (n, 13)
        for ahead in range(n):
            position = first + ahead
            if position not in single:
                single[position] = noise(vocab=13).rows(position, 1)[0]
            assert torch.equal(rows[ahead], single[position])


@pytest.mark.parametrize("vocabs", [(5, 101), (101, 128), (4096, 50_257), (40_000, 2_000_000)])
def test_a_token_has_the_same_noise_in_every_vocabulary(vocabs):
    small, large = (noise(vocab=vocab).rows(3, 4) for vocab in vocabs)
    assert torch.equal(small, large[:, : vocabs[0]])


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"prompt": "mini/4"}, {"turn": 1}], ids=lambda o: next(iter(o))
)
def test_every_part_of_the_key_changes_the_noise(other):
    assert (noise().rows(0, 8) != noise(**other).rows(0, 8)).float().mean() > 0.99


def test_positions_have_different_noise():
    rows = noise().rows(0, 64)
    assert len({tuple(row) for row in rows.tolist()}) == 64


def test_noise_follows_the_gumbel_distribution_and_is_independent_along_tokens_and_positions():
    rows = noise(seed=9, vocab=200).rows(0, 250).double()
    assert stats.kstest(rows.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    uniform = (-(-rows).exp()).exp()
    assert stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
    for shifted, kept in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
        assert stats.pearsonr(shifted.flatten().numpy(), kept.flatten().numpy()).pvalue > 1e-3


def test_the_argmax_of_log_probability_plus_noise_is_a_sample():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    drawn = (p.log() + noise(seed=3, vocab=4).rows(0, 20_000)).argmax(-1)
    assert stats.chisquare(torch.bincount(drawn, minlength=4), 20_000 * p).pvalue > 1e-3


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_noise_is_finite_float32_at_either_end_of_a_word(monkeypatch, word):
    monkeypatch.setattr(sampling, "philox", lambda counter, key: torch.full_like(counter, word))
    rows = noise().rows(0, 2)
    assert rows.dtype == torch.float32
    assert rows.isfinite().all()


def test_the_last_two_blocks_of_noise_are_cached(monkeypatch):
    computed = []

    def watched(counter, key):
        computed.append(int(counter[1, 0, 0]) // 32)
        return philox(counter, key)

    monkeypatch.setattr(sampling, "philox", watched)
    source = noise(vocab=13)
    for first, n in ((62, 2), (0, 1), (31, 2), (5, 1), (70, 1), (33, 1), (5, 1)):
        source.rows(first, n)
    assert computed == [1, 0, 2, 0]

"""Verification of chains as pure functions: matching, the residual, and rejection as
transformers'."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers.generation import utils as theirs

from specbench_cli.engine.verify.chain import match, rejection, residual

# ---- match --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=8), st.data())
def test_match_is_the_length_of_the_common_prefix(draft, data):
    m = len(draft)
    choices = data.draw(st.lists(st.integers(0, 2), min_size=m + 1, max_size=m + 1))
    expected = max(n for n in range(m + 1) if draft[:n] == choices[:n])
    assert match(draft, choices) == expected


def test_an_empty_draft_matches_nothing():
    assert match([], [4]) == 0


# ---- residual -----------------------------------------------------------------------------------


@st.composite
def distribution_pairs(draw):
    vocab = draw(st.integers(2, 6))
    weights = st.sampled_from([0.0, 1e-9, 0.01, 0.2, 1.0, 5.0])
    pair = torch.tensor(draw(arrays(float, (2, vocab), elements=weights)))
    pair[:, draw(st.integers(0, vocab - 1))] += 0.1  # no row is empty
    return pair / pair.sum(-1, keepdim=True)


@given(distribution_pairs())
@settings(deadline=None)
def test_the_residual_is_a_distribution_on_the_tokens_that_the_draft_proposes_too_rarely(pair):
    p, q = pair
    r = residual(p, q)
    assert r.sum().item() == pytest.approx(1.0)
    assert (r >= 0).all()
    if (p - q).abs().sum() > 1e-6:
        assert (r[p <= q] == 0).all()


@given(distribution_pairs())
@settings(deadline=None)
def test_accepting_and_the_residual_together_draw_from_the_target(pair):
    p, q = pair
    accepted = torch.minimum(p, q)
    whole = accepted + (1 - accepted.sum()) * residual(p, q)
    torch.testing.assert_close(whole, p, rtol=0, atol=1e-11)


def test_the_residual_of_equal_distributions_is_the_distribution():
    p = torch.tensor([0.2, 0.5, 0.3])
    assert torch.equal(residual(p, p), p)


def test_the_residual_with_a_row_of_zeros_is_the_distribution():
    p = torch.tensor([0.25, 0.5, 0.25])
    assert torch.equal(residual(p, torch.zeros(3)), p)


def test_the_residual_of_disjoint_distributions_is_the_distribution():
    p, q = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
    assert torch.equal(residual(p, q), p)


def test_the_residual_of_a_deterministic_token_is_the_distribution_without_it():
    p, q = torch.tensor([[0.2, 0.5, 0.3], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.4, 0.0, 0.6]))


def test_residuals_are_taken_row_by_row():
    pair = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(1))
    p, q = pair / pair.sum(-1, keepdim=True)
    rows = torch.stack([residual(a, b) for a, b in zip(p, q, strict=True)])
    torch.testing.assert_close(residual(p, q), rows)


# ---- rejection ----------------------------------------------------------------------------------


def distributions(m, vocab, seed, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2 * m + 1, vocab, generator=generator, dtype=torch.float64)
    return logits[:m], logits[m:]


def distribution_of_transformers(monkeypatch, tokens, q_logits, p_logits):
    """Return the exact distribution of (accepted, next) in transformers' verifier."""
    m = len(tokens)
    distribution = {}
    for accepted in range(m + 1):
        seen = {}

        def uniforms(ratio, accepted=accepted, seen=seen):
            seen["ratio"] = ratio.clamp_max(1.0)
            return torch.where(torch.arange(m) < accepted, 0.0, torch.inf)

        def draw(p, num_samples, seen=seen):
            seen["next"] = p[0]
            return torch.zeros(1, 1, dtype=torch.int64)

        monkeypatch.setattr(torch, "rand_like", uniforms)
        monkeypatch.setattr(torch, "multinomial", draw)
        theirs._speculative_sampling(tokens[None], q_logits[None], m, p_logits[None])
        chance = seen["ratio"][:accepted].prod()
        if accepted < m:
            chance = chance * (1 - seen["ratio"][accepted])
        if chance > 0:
            distribution |= {
                (accepted, i): float(chance * x) for i, x in enumerate(seen["next"]) if x > 0
            }
    return distribution


@pytest.mark.parametrize("seed", range(6))
def test_rejection_has_the_distribution_of_transformers_speculative_sampling(
    monkeypatch, exact_distribution, seed
):
    vocab, m = 4, 3
    q_logits, p_logits = distributions(m, vocab, seed)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    for ids in itertools.islice(itertools.product(range(vocab), repeat=m), seed, None, 7):
        tokens = torch.tensor(ids)
        expected = distribution_of_transformers(monkeypatch, tokens, q_logits, p_logits)
        distribution = exact_distribution(
            lambda random, t=tokens: tuple(map(int, rejection(t, q, p, random)))
        )
        assert distribution == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_token_after_a_draft_drawn_from_q_follows_the_target(exact_distribution, seed):
    q_logits, p_logits = distributions(2, 4, seed)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)

    def first_two(random):
        tokens = random.categorical(q)
        accepted, following = rejection(tokens, q, p, random)
        return (*tokens[:accepted].tolist(), following.item(), None)[:2]

    distribution = exact_distribution(first_two)
    firsts = [sum(x for ids, x in distribution.items() if ids[0] == i) for i in range(4)]
    assert firsts == pytest.approx(p[0].tolist(), abs=1e-12)
    # Given that the first draft token was accepted, the second position follows the target too.
    chance_accepted = {i: sum(distribution.get((i, j), 0.0) for j in range(4)) for i in range(4)}
    for i in range(4):
        assert chance_accepted[i] == pytest.approx(float(torch.minimum(p[0], q[0])[i]), abs=1e-12)
        expected = [chance_accepted[i] * x for x in p[1].tolist()]
        assert [distribution.get((i, j), 0.0) for j in range(4)] == pytest.approx(
            expected, abs=1e-12
        )


def test_a_deterministic_token_is_accepted_with_the_targets_probability(
    exact_distribution,
):
    p = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=torch.float64)
    distribution = exact_distribution(
        lambda random: tuple(map(int, rejection(torch.tensor([1]), None, p, random)))
    )
    expected = {(0, 0): 0.2, (0, 2): 0.3, (1, 0): 0.30, (1, 1): 0.15, (1, 2): 0.05}
    assert distribution == pytest.approx(expected)


def test_a_draft_from_the_targets_own_distribution_is_always_accepted(exact_distribution):
    p = distributions(3, 4, seed=1)[1].softmax(-1)
    distribution = exact_distribution(
        lambda random: int(rejection(random.categorical(p[:3]), p[:3], p, random)[0])
    )
    assert distribution == pytest.approx({3: 1.0})


def test_a_draft_token_of_target_probability_zero_is_never_accepted(exact_distribution):
    p = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.1, 0.8]], dtype=torch.float64)
    q = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    distribution = exact_distribution(
        lambda random: tuple(map(int, rejection(torch.tensor([2]), q, p, random)))
    )
    assert distribution == pytest.approx({(0, 0): 0.5, (0, 1): 0.5})


def test_without_a_draft_the_next_token_is_drawn_from_the_target(exact_distribution):
    p = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    empty = torch.empty(0, dtype=torch.int64)
    for q in (None, torch.empty(0, 3, dtype=torch.float64)):
        distribution = exact_distribution(
            lambda random, q=q: tuple(map(int, rejection(empty, q, p, random)))
        )
        assert distribution == pytest.approx({(0, 0): 0.2, (0, 1): 0.5, (0, 2): 0.3})


def test_rejection_returns_two_int64_scalars():
    p = torch.full((3, 4), 0.25)
    accepted, following = rejection(torch.tensor([1, 2]), None, p, AlwaysRejects())
    assert accepted.dtype == following.dtype == torch.int64
    assert accepted.shape == following.shape == ()


class AlwaysRejects:
    def categorical(self, p):
        return p.argmax(-1)

    def bernoulli(self, a):
        return torch.zeros_like(a, dtype=torch.bool)

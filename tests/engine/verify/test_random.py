"""The two random primitives: their distributions, and their keys."""

from collections import Counter

import pytest
import torch
from scipy import stats

from specbench_cli.engine.verify.random import SeededRandom

CPU = torch.device("cpu")


def make(seed=0, prompt="gsm8k/1", turn=0, pass_=1):
    return SeededRandom(seed, prompt, turn, pass_, CPU)


def test_categorical_samples_its_distribution():
    p = torch.tensor([0.5, 0.25, 0.15, 0.1])
    drawn = make().categorical(p.expand(20_000, 4))
    counts = torch.bincount(drawn, minlength=4)
    assert stats.chisquare(counts, 20_000 * p.double()).pvalue > 1e-3


def test_categorical_draws_one_index_per_row_of_any_shape():
    p = torch.eye(5)[None].expand(3, 5, 5)
    assert make().categorical(p).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert make().categorical(torch.eye(5)[2]).item() == 2


def test_categorical_never_draws_probability_zero():
    p = torch.tensor([0.0, 1e-6, 0.0, 1.0 - 1e-6, 0.0])
    assert set(make().categorical(p.expand(20_000, 5)).tolist()) <= {1, 3}


def test_bernoulli_counts_the_successes_before_the_first_failure():
    a = torch.tensor([0.6, 0.3, 0.9])
    random = make()
    runs = Counter()
    for _ in range(4_000):
        successes = random.bernoulli(a)
        run = int(successes.sum())
        assert successes.tolist() == [True] * run + [False] * (3 - run)
        runs[run] += 1
    distribution = [0.4, 0.6 * 0.7, 0.6 * 0.3 * 0.1, 0.6 * 0.3 * 0.9]
    counts = [runs[k] for k in range(4)]
    assert stats.chisquare(counts, [4_000 * x for x in distribution]).pvalue > 1e-3


def test_bernoulli_is_certain_at_zero_and_one():
    random = make()
    assert random.bernoulli(torch.ones(1_000)).all()
    assert not random.bernoulli(torch.zeros(1_000)).any()
    assert random.bernoulli(torch.ones(0)).shape == (0,)


def test_equal_keys_draw_equally():
    p = torch.full((50, 100), 0.01)
    assert torch.equal(make().categorical(p), make().categorical(p))


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"prompt": "gsm8k/2"}, {"turn": 1}, {"pass_": 2}],
    ids=lambda o: next(iter(o)),
)
def test_every_part_of_the_key_changes_the_draws(other):
    p = torch.full((50, 100), 0.01)
    assert not torch.equal(make().categorical(p), make(**other).categorical(p))


def test_the_global_generator_is_neither_used_nor_changed():
    p = torch.full((50, 100), 0.01)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make().categorical(p)
    make().bernoulli(torch.full((9,), 0.5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(make().categorical(p), first)

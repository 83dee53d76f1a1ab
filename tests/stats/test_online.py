"""Tests of the results of `benchmarks/studies/online.py` for a simulated stream."""

import numpy as np
import pytest

from benchmarks.studies.online import (
    DRAWS,
    RECOVERY,
    MeasuredStream,
    StreamSums,
    format_interval,
    prompts_to_recover,
)

N = 60


@pytest.fixture(scope="module")
def stream():
    """A stream of two topics with 30 prompts each.

    `learning` accepts 4 of 10 tokens on the first 10 prompts of a topic and 6 after that.
    `frozen` always accepts 5.
    """
    learning_tokens = np.where(np.arange(N) % 30 < 10, 4.0, 6.0)
    accepted_tokens = {"frozen": np.full(N, 5.0), "learning": learning_tokens}
    full, steps = np.full(N, 10.0), np.full(N, 2.0)
    rows = {
        label: StreamSums(accepted, full, accepted + steps, steps, full, 0 * full)
        for label, accepted in accepted_tokens.items()
    }
    weights = np.random.default_rng(1).exponential(size=(DRAWS, N))
    return MeasuredStream("shift", rows, [30], np.concatenate([np.ones((1, N)), weights]), 0, 0, 0)


def test_a_moving_mean_is_over_the_previous_prompts(stream):
    moving = stream.moving_acceptance("learning", 20)
    assert moving.shape == (1 + DRAWS, N - 19)
    assert (moving[0, 0], moving[0, 10], moving[0, 40]) == pytest.approx((0.5, 0.6, 0.6))
    assert stream.mean_between("MAT", "learning", 0, 20)[0] == pytest.approx(7 / 2)


def test_interval_is_from_the_bootstrap_and_has_no_width_for_equal_prompts(stream):
    assert format_interval(stream.moving_acceptance("frozen", 20)[:, 0]) == "0.50 [0.50, 0.50]"
    low, high = np.percentile(stream.moving_acceptance("learning", 20)[1:, 0], [2.5, 97.5])
    # With half of 20 prompts at 0.4 and half at 0.6, the standard error is 0.1 / sqrt(20 + 1).
    assert (low, high) == pytest.approx((0.457, 0.543), abs=0.004)


def test_recovery_is_the_number_of_prompts_after_a_change(stream):
    gain = stream.moving_acceptance("learning", RECOVERY) - stream.moving_acceptance(
        "frozen", RECOVERY
    )
    gain = gain[:1, 30 : N - RECOVERY + 1]
    assert gain.shape[1] == 11
    assert prompts_to_recover(gain, np.array([0.0])) == RECOVERY  # 10 at 0.4 and 10 at 0.6
    assert prompts_to_recover(gain, np.array([0.0501])) == RECOVERY + 6
    assert prompts_to_recover(gain, np.array([0.5])) == RECOVERY + 11

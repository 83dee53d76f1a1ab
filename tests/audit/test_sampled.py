"""Check of the real random generator, and its rate of false alarms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chisquare

from methods.sps import Sps, SpsParams
from methods.sps_tree import SpsTree, SpsTreeParams
from specbench_cli.audit.checks.sampled import pearson_p_value, sample_transitions
from specbench_cli.audit.subject import AuditSubject

SEEDS = 100
LEVEL = 0.05
TOKENS = 100


@pytest.mark.parametrize(
    ("method", "params"),
    [(Sps, SpsParams(length=2)), (SpsTree, SpsTreeParams(widths=(2,)))],
    ids=["chain", "tree"],
)
def test_false_alarms_over_many_seeds_are_within_the_99_percent_binomial_bound(method, params):
    subject = AuditSubject("studied", method, (params,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        ps = [
            sample_transitions(subject, params, seed=seed, tokens=TOKENS)[0]
            for seed in range(SEEDS)
        ]
    torch.set_num_threads(threads)
    alarms = sum(p < LEVEL for p in ps)
    low, high = binom.interval(0.99, SEEDS, LEVEL)
    assert low <= alarms <= high
    # P-values without a fault are uniform.
    assert chisquare(torch.histc(torch.tensor(ps), 5, 0, 1).tolist()).pvalue > 0.005


@given(st.lists(st.integers(1, 60), min_size=3, max_size=3))
def test_one_row_of_counts_gives_pearsons_test(counts):
    distribution = [0.2, 0.3, 0.5]
    expected = chisquare(counts, [sum(counts) * p for p in distribution]).pvalue
    assert pearson_p_value([counts], [distribution]) == pytest.approx(expected)


def test_a_row_without_counts_gives_no_p_value():
    assert pearson_p_value([[5, 5], [0, 0]], [[0.5, 0.5], [0.1, 0.9]]) == pytest.approx(1.0)

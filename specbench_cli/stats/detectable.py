"""Before a run: the smallest speedup difference that the comparison of its methods would find.

Runs of equal methods are simulated and compared as real ones are. In each, a pair of methods would
have been told apart if the one had been faster by `critical * se - (what noise made of it)` on the
log scale; the difference found with some power is that quantile of these.
"""

from __future__ import annotations

import math

import numpy as np

from specbench_cli.stats.bootstrap import PairedTimes, resample
from specbench_cli.stats.simultaneous import critical_value, standard_error

SPREAD = 0.25
"""Standard deviation between questions of the log ratio of two methods' times, where none is known:
draft-model and lookup methods on the embedded pair lie between 0.1 and 0.3."""
POWER = 0.8
_RESAMPLES = 299
_MAX_QUESTIONS = 200
"""Most questions simulated; beyond, the difference shrinks as 1 / sqrt(n)."""


def estimate_detectable_ratio(
    questions: int,
    methods: int,
    spread: float = SPREAD,
    *,
    families: int = 1,
    power: float = POWER,
    seed: int = 0,
) -> float | None:
    """The ratio of two methods' speeds, above 1, that is found with `power`.

    Args:
        questions: clusters, spread evenly over `families`.
        methods: rows compared at once, vanilla included; at least two.
        spread: see `SPREAD`.

    Returns:
        None where no difference, however large, would be found.
    """
    simulated = min(questions, _MAX_QUESTIONS)
    strata = np.arange(simulated) * families // simulated
    rng = np.random.default_rng(seed)
    needed = []
    for _ in range(max(4, 64 // methods)):
        noise = rng.normal(0, spread / math.sqrt(2), (methods, 1, simulated))
        times = PairedTimes(np.ones_like(noise), np.exp(noise), strata)
        bootstrap = resample(times, resamples=_RESAMPLES, seed=int(rng.integers(1 << 32)))
        limit = critical_value(bootstrap)
        if limit is None or not math.isfinite(limit):
            return None
        a, b = np.triu_indices(methods, 1)
        difference = bootstrap.theta[a] - bootstrap.theta[b]
        error = limit * standard_error(bootstrap.cov, a, b)
        needed += [error - difference, error + difference]
    log_ratio = float(np.quantile(np.concatenate(needed), power))
    return math.exp(log_ratio * math.sqrt(simulated / questions))

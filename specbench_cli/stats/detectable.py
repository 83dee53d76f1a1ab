"""Statistical power before a run: the smallest speedup difference that a planned run would find.

Runs of equally fast methods are simulated, and the methods are compared as in a real run. Two
methods of a simulated run would differ significantly if one were faster by another `critical * se -
(observed difference)` on the log scale. The module collects this value for all runs and pairs of
methods. For a power of 80%, the result is the 80% quantile of the values.
"""

from __future__ import annotations

import math

import numpy as np

from specbench_cli.stats.bootstrap import PairedTimes, resample
from specbench_cli.stats.simultaneous import critical_value, standard_error

SPREAD = 0.25
"""Default standard deviation of the log ratio of two methods' times, over questions. Methods with a
draft model or a lookup have 0.1 to 0.3 on the embedded models."""
POWER = 0.8
_RESAMPLES = 299
_MAX_QUESTIONS = 200
"""Maximum number of simulated questions. For more, the difference shrinks as 1 / sqrt(n)."""


def estimate_detectable_ratio(
    questions: int,
    methods: int,
    spread: float = SPREAD,
    *,
    families: int = 1,
    power: float = POWER,
    seed: int = 0,
) -> float | None:
    """Return the ratio of two methods' speeds, above 1, that is found with probability `power`.

    Args:
        questions: Number of questions (clusters), distributed evenly over the task families.
        methods: Number of methods in the run, including vanilla. At least two.
        spread: Standard deviation of a method's log speedup over questions, as in `SPREAD`.
        families: Number of task families.
        power: Probability of finding the difference.

    Returns:
        None if no difference, however large, would be found.
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

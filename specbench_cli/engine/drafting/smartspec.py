"""SmartSpec: choice of the draft lengths that maximize the goodput of a step.

Xiaoxuan Liu et al.: Optimizing Speculative Decoding for Serving Large Language Models Using Goodput
(SmartSpec, TurboSpec), 2024, arXiv:2406.14066.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from specbench_cli.engine.drafting.load_aware import (
    PRIOR_WEIGHT,
    DraftCost,
    LoadAwareLength,
    StepCost,
    expected_tokens,
)


def best_lengths(
    alphas: Sequence[float], max_lengths: Sequence[int], target: StepCost, draft: DraftCost
) -> list[int]:
    """Return the draft lengths k_i of n sequences that maximize the goodput of a step.

    Goodput is the expected number of committed tokens divided by the time of the step: sum_i
    tokens(alpha_i, k_i) / (t_target(n, n + sum_i k_i) + sum_j t_draft(number of i with k_i >= j)).

    A greedy search runs for each possible maximum length. It adds draft tokens in the order of
    their expected gains alpha_i^j, as long as goodput increases. The result is optimal if a forward
    costs a constant plus the same amount per row.

    Unlike the paper, the function also tries equal lengths. Unequal lengths may cost more than
    equal lengths with the same number of rows.

    Args:
        alphas: Acceptance probability of a draft token, for each sequence.
        max_lengths: Maximum number of draft tokens, for each sequence.
        target, draft: Functions that return the time of verification and of drafting.
    """
    n = len(alphas)
    best, most = [0] * n, n / target(n, n, True)
    for shared in range(1, max(max_lengths, default=0) + 1):
        lengths = [min(shared, max_length) for max_length in max_lengths]
        drafting = sum(draft(sum(k >= level for k in lengths)) for level in range(1, shared + 1))
        step = target(n, n + sum(lengths), len({*lengths}) == 1) + drafting
        goodput = sum(map(expected_tokens, alphas, lengths)) / step
        if goodput > most:
            best, most = lengths, goodput
    units = sorted(
        (
            (alpha**level, level, at)
            for at, alpha in enumerate(alphas)
            for level in range(1, max_lengths[at] + 1)
        ),
        key=lambda unit: (-unit[0], unit[1]),
    )
    before = 0.0
    for longest in range(1, max(max_lengths, default=0) + 1):
        lengths, counts = [0] * n, [0] * (longest + 1)
        tokens, rows, drafting, goodput, found = float(n), n, 0.0, 0.0, 0.0
        for gain, level, at in units:
            if level > longest:
                continue
            others = counts[level]
            spent = drafting + draft(others + 1) - (draft(others) if others else 0.0)
            last, goodput = goodput, (tokens + gain) / (target(n, rows + 1, n == 1) + spent)
            if goodput <= last and counts[longest]:
                break  # the remaining tokens have smaller gains
            tokens, rows, drafting = tokens + gain, rows + 1, spent
            counts[level] += 1
            lengths[at] = level
            found = max(found, goodput)
            if goodput > most:
                best, most = list(lengths), goodput
        if found < before:
            break  # goodput increases with the maximum length at first, then it decreases
        before = found
    return best


class SmartSpecLength(LoadAwareLength):
    """Draft length rule that maximizes goodput, from each sequence's acceptance rate so far.

    A sequence with few verified tokens has an uncertain acceptance rate. So its rate is shrunk
    towards the mean rate of the step, and that mean towards the parameter `acceptance`.
    """

    learns = True

    def choose_lengths(self, batch: Sequence[Self]) -> list[int]:
        """Return the draft lengths that maximize the goodput of the step."""
        accepted, tested = (
            sum(getattr(each, of) for each in batch) for of in ("_accepted", "_tested")
        )
        shared = (accepted + PRIOR_WEIGHT * self._prior_acceptance) / (tested + PRIOR_WEIGHT)
        alphas = [each.acceptance_rate(shared) for each in batch]
        max_lengths = [each.max_draft_tokens for each in batch]
        return best_lengths(alphas, max_lengths, self._target, self._draft)

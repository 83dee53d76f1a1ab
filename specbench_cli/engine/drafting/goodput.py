"""How many tokens are worth a draft, by what forwards cost and by how many sequences share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Verifying = Callable[[int, int, bool], float]
"""Time of a step of so many sequences, whose target forward has so many rows in all, as many of
each or not; any unit."""

Drafting = Callable[[int], float]
"""Time of a draft token more of each of so many sequences; the same unit."""


def emitted(alpha: float, k: int) -> float:
    """Tokens that a chain of k brings, the target's own included, where each stands with
    probability alpha: 1 + alpha + ... + alpha^k (Leviathan et al., arXiv:2211.17192)."""
    return k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def synergy(alpha: float, crowd: int, most: int, target: Verifying, draft: Drafting) -> int:
    """The length s at which a token takes the least time in a step of so many sequences:
    (t_target(b, b (s + 1)) + s t_draft(b)) / tokens(s). The shortest where several do.

    Qidong Su, Christina Giannoula, Gennady Pekhimenko: The Synergy of Speculative Decoding and
    Batching in Serving Large Language Models, 2023, arXiv:2310.18813.
    """
    return min(
        range(most + 1),
        key=lambda s: (target(crowd, crowd * (s + 1), True) + s * draft(crowd)) / emitted(alpha, s),
    )


def smartspec(
    alphas: Sequence[float], rooms: Sequence[int], target: Verifying, draft: Drafting
) -> list[int]:
    """The lengths k_i of a step of n with the most goodput, which is expected tokens over time:
    sum_i tokens(alpha_i, k_i) / (t_target(n, n + sum_i k_i) + sum_j t_draft(those with k_i >= j)).

    For each longest length, tokens are added in the order of their gains alpha_i^j as long as
    goodput grows; the best of all counts. That is optimal where forwards cost a constant and as
    much for every row. Differs from the paper: where lengths that differ cost more than as many
    rows in equal parts, they compete with the best length that all have.

    Xiaoxuan Liu et al.: Optimizing Speculative Decoding for Serving Large Language Models Using
    Goodput (SmartSpec, TurboSpec), 2024, arXiv:2406.14066.

    Args:
        alphas: chances that a draft token of a sequence stands.
        rooms: most tokens of each.
    """
    n = len(alphas)
    best, most = [0] * n, n / target(n, n, True)
    for shared in range(1, max(rooms, default=0) + 1):
        lengths = [min(shared, room) for room in rooms]
        drafting = sum(draft(sum(k >= level for k in lengths)) for level in range(1, shared + 1))
        step = target(n, n + sum(lengths), len({*lengths}) == 1) + drafting
        goodput = sum(map(emitted, alphas, lengths)) / step
        if goodput > most:
            best, most = lengths, goodput
    units = sorted(
        (
            (alpha**level, level, at)
            for at, alpha in enumerate(alphas)
            for level in range(1, rooms[at] + 1)
        ),
        key=lambda unit: (-unit[0], unit[1]),
    )
    before = 0.0
    for longest in range(1, max(rooms, default=0) + 1):
        lengths, crowds = [0] * n, [0] * (longest + 1)
        tokens, rows, drafting, goodput, found = float(n), n, 0.0, 0.0, 0.0
        for gain, level, at in units:
            if level > longest:
                continue
            others = crowds[level]
            spent = drafting + draft(others + 1) - (draft(others) if others else 0.0)
            last, goodput = goodput, (tokens + gain) / (target(n, rows + 1, n == 1) + spent)
            if goodput <= last and crowds[longest]:
                break  # later ones bring no more and cost as much
            tokens, rows, drafting = tokens + gain, rows + 1, spent
            crowds[level] += 1
            lengths[at] = level
            found = max(found, goodput)
            if goodput > most:
                best, most = list(lengths), goodput
        if found < before:
            break  # goodput first rises with the longest length, then falls
        before = found
    return best

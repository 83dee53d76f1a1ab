"""Lossless verification of chains, as pure functions.

Each function returns the number of accepted draft tokens, and some functions also return the next
token.

* `match` is for greedy decoding and coupled sampling. The target has chosen a token at each
  position (the argmax of its logits, or of log p + noise). Draft tokens are accepted as long as
  they equal the target's choices.
* `rejection` is speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023,
  algorithm 2). A draft token that was not drawn counts as drawn from a one-hot distribution.
* `block` is block verification.

The module `accept` contains the lossy rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_cli.engine.verify.random import Random


def match(
    draft: Sequence[int], choices: Sequence[int], passes: Sequence[bool] | None = None
) -> int:
    """Return the number of leading draft tokens that are kept.

    A token is kept if it equals the target's choice, or if an accept rule keeps it.

    Args:
        draft: m token ids.
        choices: m + 1 token ids, the target's choice at each position.
        passes: Which draft tokens the accept rule keeps (`decide.relaxed_mask`). None means that
            there is no accept rule.
    """
    n = 0
    while n < len(draft) and (draft[n] == choices[n] or (passes is not None and passes[n])):
        n += 1
    return n


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(p - q, 0)), the distribution of the token that replaces a rejected token.

    If max(p - q, 0) is zero everywhere, return p.

    Args:
        p, q: Distributions [..., V]. For a row of q with only zeros, the result is p.
    """
    excess = (p - q).clamp_min(0)
    mass = excess.sum(-1, keepdim=True)
    # If max(p - q, 0) is zero, p equals q up to rounding, and a rejection has probability 0. Return
    # p as the limit.
    empty = mass <= 1e-12
    return torch.where(empty, p, excess / mass.masked_fill(empty, 1.0))


def rejection(tokens: Tensor, q: Tensor | None, p: Tensor, random: Random) -> tuple[Tensor, Tensor]:
    """Verify a chain by speculative sampling, without waiting for the device.

    Args:
        tokens: int64 [m], the draft.
        q: [m, V], the draft distribution of each token. None for tokens that were not drawn.
        p: [m + 1, V], the target's distribution at each position, after temperature, top-k and
            top-p.
    Returns:
        (accepted, next), two int64 scalars: the number of accepted draft tokens, and the token
        after them. If a token was rejected, `next` is drawn from the residual distribution.
        Otherwise it is the bonus token, drawn from the target's distribution.
    """
    q, chances = _acceptance_probs(tokens, q, p)
    # `bernoulli` returns False after its first failure, so the sum is the number of accepted
    # tokens.
    accepted = random.bernoulli(chances).sum()
    return accepted, _draw_next(accepted, q, p, random)


def relaxed_rejection(
    tokens: Tensor, q: Tensor | None, p: Tensor, random: Random, passes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify a chain by speculative sampling with a lossy accept rule.

    Args:
        passes: bool [m], which tokens the accept rule keeps (`decide.relaxed_mask`).

    Returns:
        (taken, accepted, next). `taken` is bool [m]: which tokens the lossless rule accepted.
        `accepted` and `next` are scalars as in `rejection`.
    """
    q, chances = _acceptance_probs(tokens, q, p)
    # Call `bernoulli` once per token. A call for all tokens would stop at the first rejected token.
    # Verification must continue there if the accept rule keeps that token.
    taken = torch.cat([random.bernoulli(chance) for chance in chances.split(1)])
    accepted = (taken | passes).cumprod(0).sum()
    return taken, accepted, _draw_next(accepted, q, p, random)


def one_hot(tokens: Tensor, p: Tensor) -> Tensor:
    """Return a one-hot distribution for each of m tokens: [m, V], with the dtype and V of p [...,
    V].
    """
    distributions = p.new_zeros(tokens.shape[0], p.shape[-1])
    return distributions.scatter_(1, tokens[:, None], 1.0)


def _acceptance_probs(tokens: Tensor, q: Tensor | None, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the draft distributions q and the acceptance probability min(1, p/q) [m] of each
    token.
    """
    if q is None:
        q = one_hot(tokens, p)
    at = tokens[:, None]
    ratio = p[: tokens.shape[0]].gather(1, at)[:, 0] / q.gather(1, at)[:, 0]
    return q, ratio.clamp_max(1.0)


def _draw_next(accepted: Tensor, q: Tensor, p: Tensor, random: Random) -> Tensor:
    """Return the token after the accepted tokens: a replacement or the bonus token."""
    # Append a row of zeros to q. `residual` then also returns the bonus token's distribution.
    row = accepted[None]
    distribution = residual(p.index_select(0, row), F.pad(q, (0, 0, 0, 1)).index_select(0, row))
    return random.categorical(distribution)[0]


# ---- block verification -------------------------------------------------------------------------


def block(tokens: Tensor, q: Tensor | None, p: Tensor, random: Random) -> tuple[Tensor, Tensor]:
    """Verify a chain by block verification, without waiting for the device.

    Let c_0 = 1 and c_i = min(1, c_{i-1} p_i(x_i) / q_i(x_i)). At least i tokens are accepted with
    probability c_i. To achieve this, the prefixes of the chain are tested from the longest to the
    shortest, and the first prefix that passes is accepted. The whole chain of m tokens passes with
    probability c_m. The prefix of i < m tokens passes with probability s_i / (s_i + 1 - c_i). Here
    s_i is the sum of max(c_i p_{i+1} - q_{i+1}, 0), which is the unnormalized distribution of the
    next token.

    Args:
        tokens: int64 [m], the draft.
        q: [m, V], the distribution that each token was drawn from. None for tokens that were not
            drawn.
        p: [m + 1, V], the target's distribution at each position, after temperature, top-k and
            top-p.

    Returns:
        (accepted, next), two int64 scalars as in `rejection`.
    """
    m = tokens.shape[0]
    p = p.double()  # float32 is too imprecise for products of many ratios
    q = one_hot(tokens, p) if q is None else q.double()
    at = tokens[:, None]
    ratios = p[:m].gather(1, at)[:, 0] / q.gather(1, at)[:, 0]
    chances = [torch.ones_like(p[0, 0])]
    for ratio in ratios.unbind():
        chances.append((chances[-1] * ratio).clamp_max(1.0))
    c = torch.stack(chances)
    left = (c[:m, None] * p[:m] - q).clamp_min(0).sum(-1)
    lost = 1.0 - c[:m]
    # If left + lost is 0, a longer prefix is accepted with certainty. Use 1 instead of 0 / 0.
    passes = torch.cat((torch.where(lost > 0, left / (left + lost), 1.0), c[m:]))
    # Test the prefixes from the longest to the shortest: `bernoulli` stops at the first prefix that
    # passes. If no prefix passes, no token is accepted.
    accepted = m - random.bernoulli(1.0 - passes[1:].flip(0)).sum()
    row = accepted[None]
    # The next token has the distribution norm(max(c p - q, 0)), with c = c_i of the accepted
    # prefix. An accepted prefix has c > 0.
    distribution = residual(p[row], F.pad(q, (0, 0, 0, 1))[row] / c[row, None])
    return accepted, random.categorical(distribution)[0]

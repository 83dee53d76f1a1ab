"""Block verification of chains: the draft is judged as a whole, not token by token.

Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025, arXiv:2403.10444. Same
law as token-level rejection and never a shorter accepted length in expectation; among all
verifications that see the draft's own path alone, none accepts more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_cli.engine.random import Random
from specbench_cli.engine.verify import residual


def block(tokens: Tensor, q: Tensor | None, p: Tensor, random: Random) -> tuple[Tensor, Tensor]:
    """Verification of a chain, without a wait for the device; takes the place of `rejection`.

    With c_0 = 1 and c_i = min(1, c_{i-1} p_i(x_i) / q_i(x_i)), the chance that at least i tokens
    stand is c_i. The longest prefix to pass its own test stands: the whole block passes with
    probability c_m, the first i < m tokens with s_i / (s_i + 1 - c_i), where s_i is the mass of
    max(c_i p_{i+1} - q_{i+1}, 0), the law (up to its norm) of the token that then follows.

    Args:
        tokens: [m] int64, the draft.
        q: [m, V], the law that each token was drawn from; None for tokens chosen without a draw.
        p: [m + 1, V], the target's warped law at each position.
    Returns:
        (accepted, next): two int64 scalars, as of `rejection`.
    """
    m = tokens.shape[0]
    p = p.double()  # products of many ratios
    q = F.one_hot(tokens, p.shape[-1]).to(p) if q is None else q.double()
    at = tokens[:, None]
    ratios = p[:m].gather(1, at)[:, 0] / q.gather(1, at)[:, 0]
    chances = [torch.ones_like(p[0, 0])]
    for ratio in ratios.unbind():
        chances.append((chances[-1] * ratio).clamp_max(1.0))
    c = torch.stack(chances)
    left = (c[:m, None] * p[:m] - q).clamp_min(0).sum(-1)
    lost = 1.0 - c[:m]
    # 0 / 0: the laws agree and nothing was lost so far, so that a longer prefix stands for sure.
    passes = torch.cat((torch.where(lost > 0, left / (left + lost), 1.0), c[m:]))
    # From the longest prefix down to the empty one, which stands if no other does.
    accepted = m - random.bernoulli(1.0 - passes[1:].flip(0)).sum()
    row = accepted[None]
    # norm(max(c p - q, 0)); whatever is reached has c > 0.
    law = residual(p[row], F.pad(q, (0, 0, 0, 1))[row] / c[row, None])
    return accepted, random.categorical(law)[0]

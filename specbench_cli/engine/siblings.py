"""The children of one node, drawn from one law: independently, or without replacement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench_cli.engine.random import Random


def siblings(q: Tensor, width: int, random: Random, *, replacement: bool) -> Tensor:
    """Draw `width` tokens from each law, in the order in which verification tests them.

    Args:
        q: [r, V], a law for each of r nodes.
        width: at most V without replacement.
    Returns:
        [r, width] int64.
    """
    if replacement:
        return random.categorical(q[:, None].expand(-1, width, -1))
    drawn = torch.empty(q.shape[0], 0, dtype=torch.int64, device=q.device)
    for _ in range(width):
        drawn = torch.cat((drawn, random.categorical(remaining(q, drawn))[:, None]), 1)
    return drawn


def remaining(q: Tensor, drawn: Sequence[int] | Tensor) -> Tensor:
    """The law of the next draw without replacement, in float64.

    Where nothing of q is left, all tokens not drawn yet are equally likely (as in Sequoia, Chen et
    al. 2024, arXiv:2402.12374), so that up to V children can be drawn.

    Args:
        q: [..., V], the law of the first draw.
        drawn: the ids of the earlier draws, [..., k] for many laws.
    """
    at = torch.as_tensor(drawn, dtype=torch.int64, device=q.device)
    left = q.double().scatter(-1, at, 0.0)
    others = torch.ones_like(left).scatter(-1, at, 0.0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, others)
    return left / left.sum(-1, keepdim=True)

"""Random primitives of decoding: the functions `categorical` and `bernoulli`.

Methods and verification draw random numbers only with these two functions. So a test can replace
them to enumerate all outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.verify.sampling import hash_key


class Random(Protocol):
    """Source of all random numbers in decoding."""

    def categorical(self, p: Tensor) -> Tensor:
        """Draw one index from each probability distribution.

        Args:
            p: Distributions [..., V], non-negative with sum 1.

        Returns:
            Indices, int64 [...].
        """

    def bernoulli(self, a: Tensor) -> Tensor:
        """Run random trials in order until the first failure.

        Args:
            a: [n], success probability of each trial.

        Returns:
            bool [n]. Entries after the first failure are False. So the sum is the number of
            successes before the first failure.
        """


class SeededRandom:
    """Random primitives with a torch generator, seeded by (seed, prompt, turn, repeat, worker).

    Args:
        worker: Index of the worker that draws. The target's worker has index 0.
    """

    def __init__(
        self,
        seed: int,
        prompt_id: str,
        turn: int,
        pass_: int,
        device: torch.device,
        *,
        worker: int = 0,
    ) -> None:
        worker_key = (f"worker {worker}",) if worker else ()
        self._generator = torch.Generator(device)
        self._generator.manual_seed(
            hash_key("random", seed, prompt_id, turn, pass_, *worker_key) >> 1
        )

    def categorical(self, p: Tensor) -> Tensor:
        """Draw one index from each distribution, without a device sync.

        The index is argmax p / E with exponential noise E.
        """
        race = torch.empty_like(p).exponential_(generator=self._generator)
        return (p / race).argmax(-1)

    def bernoulli(self, a: Tensor) -> Tensor:
        """Run random trials in order until the first failure."""
        u = torch.empty_like(a).uniform_(generator=self._generator)
        return (u < a).cumprod(0).bool()


def draw_per_parent(chance: float, parents: Sequence[int], p: Tensor, random: Random) -> Tensor:
    """Return a random bool for each node, [m]. All children of one parent get the same value.

    Args:
        chance: Probability of True.
    """
    places = {parent: place for place, parent in enumerate(dict.fromkeys(parents))}
    distribution = host.send(torch.tensor((1 - chance, chance), dtype=p.dtype), p.device)
    own = host.ids([places[parent] for parent in parents], p.device)
    return random.categorical(distribution.expand(len(places), 2))[own].bool()

"""Random primitives of decoding: `categorical` and `bernoulli`.

Methods and verification use only these two, so a test can replace them to enumerate all outcomes.
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
        """Draw one index from each distribution.

        Args:
            p: [..., V], non-negative with sum 1.

        Returns:
            [...] int64.
        """

    def bernoulli(self, a: Tensor) -> Tensor:
        """Run trials in order until the first failure.

        Args:
            a: [n], success probability of each trial.

        Returns:
            [n] bool. Entries after the first failure are False, so the sum is the number of
            successes before it.
        """


class SeededRandom:
    """Random primitives with a torch generator, keyed by (seed, prompt, turn, repeat, worker).

    Args:
        worker: The worker that draws; 0 is the target's.
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
        """See `Random`. It is argmax p / E with exponential noise E, which needs no device sync."""
        race = torch.empty_like(p).exponential_(generator=self._generator)
        return (p / race).argmax(-1)

    def bernoulli(self, a: Tensor) -> Tensor:
        """See `Random`."""
        u = torch.empty_like(a).uniform_(generator=self._generator)
        return (u < a).cumprod(0).bool()


def draw_per_parent(chance: float, parents: Sequence[int], p: Tensor, random: Random) -> Tensor:
    """Return a random bool for each node, [m]. It is the same for all children of a parent.

    Args:
        chance: Probability of True.
    """
    places = {parent: place for place, parent in enumerate(dict.fromkeys(parents))}
    distribution = host.send(torch.tensor((1 - chance, chance), dtype=p.dtype), p.device)
    own = host.ids([places[parent] for parent in parents], p.device)
    return random.categorical(distribution.expand(len(places), 2))[own].bool()

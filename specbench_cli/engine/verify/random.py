"""The two random primitives of the project: `categorical` and `bernoulli`.

Methods and verification see these and nothing else, so a test can replace them by one that walks
every outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.verify.sampling import hash_key


class Random(Protocol):
    """Where all chance in decoding comes from."""

    def categorical(self, p: Tensor) -> Tensor:
        """One index per row: p [..., V] non-negative, rows sum to 1 -> [...] int64."""

    def bernoulli(self, a: Tensor) -> Tensor:
        """Trials in order until the first failure: a [n] in [0, 1] -> [n] bool.

        Trials after the first failure are not made and read False, so the sum of the result is the
        length of the run of successes.
        """


class SeededRandom:
    """The primitives on a torch generator, keyed by (seed, prompt, turn, pass, worker).

    Args:
        worker: who draws; 0 is the target's.
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
        """See `Random`; the exponential race: argmax p / E, without a wait for the device."""
        race = torch.empty_like(p).exponential_(generator=self._generator)
        return (p / race).argmax(-1)

    def bernoulli(self, a: Tensor) -> Tensor:
        """See `Random`."""
        u = torch.empty_like(a).uniform_(generator=self._generator)
        return (u < a).cumprod(0).bool()


def toss_per_parent(chance: float, parents: Sequence[int], p: Tensor, random: Random) -> Tensor:
    """Toss a coin for each parent. Return the result for each of its children, [m] bool."""
    places = {parent: place for place, parent in enumerate(dict.fromkeys(parents))}
    distribution = host.send(torch.tensor((1 - chance, chance), dtype=p.dtype), p.device)
    own = host.ids([places[parent] for parent in parents], p.device)
    return random.categorical(distribution.expand(len(places), 2))[own].bool()

"""Reference decoding of a table model: distributions and tokens, without the engine's code.

Warping is implemented again in plain Python, so that a fault of the engine does not also change the
reference. Only the keyed noise of coupled sampling comes from the engine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from functools import lru_cache

from torch import Tensor

from specbench_cli.audit.enumeration import Distribution
from specbench_cli.engine.verify.sampling import Noise, Sampling


class Reference:
    """Plain decoding of a table [V, V, V] under a decoding rule."""

    def __init__(self, table: Tensor, sampling: Sampling) -> None:
        self._table = table
        self._sampling = sampling
        self._distribution = lru_cache(maxsize=None)(self._compute)

    def distribution(self, before: int, last: int) -> Sequence[float]:
        """Return the distribution of the token after the tokens `before` and `last`.

        Temperature, top-k and top-p are applied.
        """
        return self._distribution(before, last)

    def joint_distribution(
        self, prompt: Sequence[int], eos: Collection[int], length: int
    ) -> Distribution:
        """Return the joint distribution of the first `length` tokens, by the chain rule."""
        distribution: dict[Hashable, float] = defaultdict(float)
        unfinished: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        while unfinished:
            output, weight = unfinished.pop()
            if len(output) == length or (output and output[-1] in eos):
                distribution[output] += weight
                continue
            for token, p in enumerate(self.distribution(*(*prompt, *output)[-2:])):
                if p > 0.0:
                    unfinished.append(((*output, token), weight * p))
        return distribution

    def decode(self, prompt_id: str, prompt: Sequence[int], n: int) -> list[int]:
        """Return the first n tokens under the greedy or coupled rule, ignoring EOS."""
        noise = self.noise(prompt_id, n)
        text = list(prompt)
        for position in range(n):
            before, last = text[-2:]
            text.append(self.choose_token(before, last, noise[position]))
        return text[len(prompt) :]

    def noise(self, prompt_id: str, n: int) -> Sequence[Sequence[float]]:
        """Return the noise [n, V] of coupled sampling for the first n output positions."""
        vocab, seed = self._table.shape[-1], self._sampling.seed
        rows: list[list[float]] = (
            Noise(seed, prompt_id, 0, vocab, self._table.device).rows(0, n).tolist()
        )
        return rows

    def choose_token(self, before: int, last: int, noise: Sequence[float]) -> int:
        """Return the token after the tokens `before` and `last` under the greedy or coupled rule.

        Args:
            noise: noise [V] of coupled sampling at the position of the returned token.
        """
        if self._sampling.rule == "greedy":
            scores = self._table[before, last].tolist()
        else:
            distribution = self.distribution(before, last)
            scores = [
                math.log(p) + g if p > 0.0 else -math.inf
                for p, g in zip(distribution, noise, strict=True)
            ]
        return max(range(len(scores)), key=scores.__getitem__)

    def accept_rule_probs(self, before: int, last: int) -> Sequence[float]:
        """Return the probabilities that an accept rule gets after the tokens `before` and `last`.

        They include temperature, top-k and top-p. Under the greedy rule they are the plain softmax.
        """
        if self._sampling.rule == "greedy":
            return _softmax(self._table[before, last].tolist())
        return self.distribution(before, last)

    def _compute(self, before: int, last: int) -> tuple[float, ...]:
        return warp_logits(self._table[before, last].tolist(), self._sampling)


def warp_logits(logits: Sequence[float], sampling: Sampling) -> tuple[float, ...]:
    """Apply temperature, top-k, top-p and softmax, in that order."""
    scores = [logit / sampling.temperature for logit in logits]
    if 0 < sampling.top_k < len(scores):
        floor = sorted(scores, reverse=True)[sampling.top_k - 1]
        scores = [score if score >= floor else -math.inf for score in scores]
    distribution = _softmax(scores)
    if sampling.top_p < 1.0:
        mass = 0.0
        for token in sorted(range(len(distribution)), key=lambda t: -distribution[t]):
            if mass >= sampling.top_p:
                scores[token] = -math.inf
            mass += distribution[token]
        distribution = _softmax(scores)
    return distribution


def _softmax(scores: Sequence[float]) -> tuple[float, ...]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def truncate_output(ids: Sequence[int], eos: Collection[int], budget: int) -> list[int]:
    """Return an output up to its first EOS, or up to the budget."""
    ends = [at + 1 for at, token in enumerate(ids) if token in eos]
    return list(ids[: min([*ends, budget])])

"""Choice of draft tokens from a draft model's logits, under the run's decoding rule.

Each session has a `Chooser`. Each worker that drafts in parallel has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.types import DrawMode
from specbench_cli.engine.verify import ranking
from specbench_cli.engine.verify import sampling as distribution
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.verify.siblings import remaining_distribution

Pick = tuple[Tensor, Tensor | None]
"""Draft tokens [n] int64, and the distributions [n, V] that they were drawn from.

The distributions are None if the tokens were not drawn."""


class Chooser:
    """Object that chooses draft tokens. The arguments `at` and `first` are positions in the output.

    Attributes:
        sampling: The decoding rule.
        random: Source of random numbers.
        vocab_size: The target's vocabulary size V.
    """

    def __init__(self, sampling: Sampling, random: Random, noise: Noise, vocab_size: int) -> None:
        self.sampling = sampling
        self.random = random
        self.vocab_size = vocab_size
        self._noise = noise

    def warp(self, rows: Tensor) -> Tensor:
        """Return the distributions of logits [..., V'], after the rule's temperature, top-k and
        top-p.
        """
        return distribution.warp(self.align(rows), self.sampling)

    def noise(self, first: int, n: int = 1) -> Tensor:
        """Return the Gumbel noise [n, V] of the output positions first to first + n - 1.

        Every method gets the same noise.
        """
        return self._noise.rows(first, n)

    def scores(self, rows: Tensor, first: int, depths: Sequence[int] | None = None) -> Tensor:
        """Return the scores of logits [n, V]. The token with the highest score in a row is chosen.

        Under greedy decoding the scores are the logits. Under coupled sampling they are the log
        probabilities plus noise.

        Args:
            depths: Offset of each row's position from `first`. Default: 0, 1, 2, ...
        """
        if self.sampling.rule == "greedy":
            return rows
        if depths is None:
            noise = self.noise(first, rows.shape[0])
        else:
            places = host.cached_ids(tuple(depths), rows.device)
            noise = self.noise(first, max(depths) + 1).index_select(0, places)
        return distribution.log_warp(rows, self.sampling) + noise

    def pick(self, rows: Tensor, at: int, depths: Sequence[int] | None = None) -> Pick:
        """Choose or draw a draft token from each row of logits [n, V'].

        If the tokens were drawn, the result also has the distributions.

        Args:
            at: Position of the first row's token. By default the tokens of later rows follow it.
            depths: Offset of each row's token from `at`.
        """
        rows = self.align(rows)
        if self.sampling.draws:
            q = self.warp(rows)
            return self.random.categorical(q), q
        return ranking.argmax(self.scores(rows, at, depths)), None

    def branch(
        self, rows: Tensor, width: int, at: int, how: DrawMode = "independent"
    ) -> tuple[Tensor, Tensor | None]:
        """Return children of the draft nodes of one level, as `Session.branch` does."""
        rows = self.align(rows)
        if not self.sampling.draws:
            scores = self.scores(rows, at, [0] * rows.shape[0])
            return ranking.top_indices(scores, width), None
        if how == "deterministic":
            return ranking.top_indices(rows, width), None
        q = self.warp(rows)
        return draw_siblings(q, width, self.random, replacement=how == "independent"), q

    def candidates(
        self, rows: Tensor, width: int, first: int, depths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the most probable children of each draft node. Nothing is drawn at random.

        `Session.candidates` calls this function.
        """
        values, tokens = ranking.top(self._log_probs(rows, first, depths), width)
        return tokens, values

    def candidate_lists(
        self, rows: Tensor, width: int, first: int, depths: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the result of `candidates` as lists."""
        values, tokens = ranking.top_lists(self._log_probs(rows, first, depths), width)
        return tokens, values

    def _log_probs(self, rows: Tensor, first: int, depths: Sequence[int]) -> Tensor:
        """Return the log-softmax [r, V] of the scores by which tokens are chosen."""
        rows = self.align(rows)
        if not self.sampling.draws:
            rows = self.scores(rows, first, depths)
        elif self.sampling.temperature != 1.0:
            rows = rows / self.sampling.temperature
        return rows.log_softmax(-1)

    def align(self, rows: Tensor) -> Tensor:
        """Truncate or pad logits [..., V'] to the target's vocabulary size V.

        Checkpoints with the same tokenizer may have different amounts of padding in their
        vocabulary.
        """
        width = self.vocab_size - rows.shape[-1]
        if width == 0:
            return rows
        return torch.nn.functional.pad(rows, (0, width), value=-torch.inf)


def draw_siblings(q: Tensor, width: int, random: Random, *, replacement: bool) -> Tensor:
    """Draw `width` tokens from each distribution, in the order in which verification tests them.

    Args:
        q: [r, V], a distribution for each of r nodes.
        width: Number of tokens per node. Without replacement, at most V.

    Returns:
        int64 [r, width].
    """
    if replacement:
        return random.categorical(q[:, None].expand(-1, width, -1))
    drawn = torch.empty(q.shape[0], 0, dtype=torch.int64, device=q.device)
    for _ in range(width):
        drawn = torch.cat((drawn, random.categorical(remaining_distribution(q, drawn))[:, None]), 1)
    return drawn

"""The verdict on one output: the reference's tokens, tokens that tie with them, or neither.

Two honest programs may part where two tokens score alike up to rounding, and from there on their
texts have nothing to do with each other. So an output that differs is judged by itself:
transformers' own module of the target reads it, and every token of it must be, up to the measured
tolerance, the best choice after the tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from specbench_cli.audit.neartie import REACH, flip_chances, width_explains
from specbench_cli.audit.oracle import Oracle
from specbench_cli.audit.tolerance import Tolerance, measure_tolerance
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Request
from specbench_cli.engine.types import Guarantee, Tokens
from specbench_cli.engine.verify.sampling import Noise, Rule, Sampling, log_warp
from specbench_cli.store.schema import Steps, Verdict


def is_judged(guarantee: Guarantee, rule: Rule) -> bool:
    """Whether an output has a token verdict at all; if not it is "unchecked".

    Where tokens are drawn a method promises a law and not tokens; lossy methods promise neither.
    """
    return guarantee == "exact_tokens" and rule in ("greedy", "coupled")


class Judge:
    """Gives verdicts. All that it costs is spent at the first output that differs.

    Args:
        oracle: builds transformers' own module of the target; called at most once.
        sampling: the run's decoding rule, greedy or coupled.
        texts: gives sequences of ids to measure the tolerance on.
        decoder: the target as vanilla runs it, to tell what width explains; None: nobody asks.
    """

    def __init__(
        self,
        oracle: Callable[[], Any],
        sampling: Sampling,
        texts: Callable[[], Iterable[Sequence[int]]],
        decoder: Decoder | None = None,
    ) -> None:
        self._build = oracle
        self._sampling = sampling
        self._texts = texts
        self._decoder = decoder
        self._tolerance: Tolerance | None = None

    def facts(self) -> dict[str, Any] | None:
        """The tolerance, for the run's manifest; None if no output needed one."""
        return None if self._tolerance is None else asdict(self._tolerance)

    @property
    def used(self) -> bool:
        """Whether an output differed."""
        return self._tolerance is not None

    def verdict(
        self,
        request: Request,
        reference: Sequence[int],
        ids: Sequence[int],
        steps: Steps | None = None,
    ) -> Verdict:
        """Compare an output with vanilla's.

        Args:
            request: what was decoded.
            reference: vanilla's output.
            ids: the output to judge.
            steps: how the engine came to it; None where it was not the engine.
        Returns:
            "identical"; "near-tie" if the output ends as it must and no token lacks more than the
            tolerance; else "mismatch". `position` is where the two first differ, `expected` the
            reference's token there (None where it had ended), and `gap` the largest of `gaps`,
            wherever in the output, since a bug may hide behind a tie. It is None for an output that
            ends wrongly, whose tokens are not looked at. `rounding` of a near-tie: whether width
            explains it.
        """
        if list(ids) == list(reference):
            return Verdict("identical")
        pairs = zip(ids, reference, strict=False)
        position = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        expected = reference[position] if position < len(reference) else None
        if not ends_rightly(ids, request.stop):
            return Verdict("mismatch", position, None, expected)
        gap = max(self.gaps(request, ids))
        if gap > self._allowed:
            return Verdict("mismatch", position, gap, expected)
        tie = Verdict("near-tie", position, gap, expected)
        if self._decoder is None or steps is None:
            return tie
        explained = width_explains(self._decoder, self._sampling, request, list(ids), steps)
        return replace(tie, rounding=explained)

    def gaps(self, request: Request, ids: Sequence[int]) -> list[float]:
        """What each token's decision score lacks of the best one after the tokens before it.

        Scores are logits (greedy) or log p_warped + noise (coupled). Of a token within the
        tolerance of a top-k or top-p cut nobody can say on which side it is: it may be chosen, and
        need not be beaten. One beyond the cut lacks its distance to the cut, if that is more.
        """
        rows = self._rows(request, ids)
        chosen = _column(ids, rows)
        if self._sampling.rule == "greedy":
            return _lack(rows, chosen)
        scores, decision = self._scores(request, rows)
        floor, ceiling = cut_bounds(scores, self._sampling, self._allowed)
        rivals = (scores > ceiling[:, None] + self._allowed).scatter_(-1, chosen, True)
        beaten = _lack(decision.masked_fill(~rivals, -math.inf), chosen)
        outside = (floor - scores.gather(-1, chosen)[:, 0]).tolist()
        return [max(pair) for pair in zip(beaten, outside, strict=True)]

    def chances(self, request: Request, ids: Sequence[int]) -> list[float]:
        """Of each position of an output of vanilla's, the chance at most that another program, as
        right as vanilla, chooses another token there."""
        rows = self._rows(request, ids)
        chosen, reach = _column(ids, rows), REACH * self._allowed
        if self._sampling.rule == "greedy":
            return _listed(flip_chances(rows, chosen, reach))
        scores, decision = self._scores(request, rows)
        floor, ceiling = cut_bounds(scores, self._sampling, reach)
        inside, outside = scores > ceiling[:, None] + reach, scores < floor[:, None] - reach
        return _listed(flip_chances(decision, chosen, reach, (inside, outside)))

    def log_probs(self, request: Request, ids: Sequence[int]) -> list[float]:
        """Natural logarithm of each output token's probability under the target's law: the warped
        one, and at temperature 0 the softmax of the logits. One forward.

        It is transformers' forward where tokens are drawn: what stands there in place of a verdict
        must not come from the engine that is judged. Elsewhere it is vanilla's own, if that is
        known. A token that the cuts leave out, by rounding or by a fault, counts with its
        probability before the cuts: one such token must not drown all others.
        """
        if not ids:
            return []
        own = None if self._sampling.draws else self._decoder
        rows = self._rows(request, ids) if own is None else _read(own, request, ids)
        chosen = _column(ids, rows)
        whole = (rows / (self._sampling.temperature or 1.0)).log_softmax(-1).gather(-1, chosen)
        if self._sampling.temperature:
            warped = log_warp(rows, self._sampling).gather(-1, chosen)
            whole = torch.where(warped.isfinite(), warped, whole)
        return _listed(whole[:, 0].double())

    @property
    def _allowed(self) -> float:
        """The tolerance in units of decision scores."""
        if self._tolerance is None:
            self._tolerance = measure_tolerance(self._oracle.module, self._texts())
        return self._tolerance.value / (self._sampling.temperature or 1.0)

    @cached_property
    def _oracle(self) -> Oracle:
        return Oracle(self._build())

    def _scores(self, request: Request, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities before the cuts, and with the keyed noise added: [n, V] each."""
        scores = (rows / self._sampling.temperature).log_softmax(-1)
        noise = Noise(
            self._sampling.seed, request.prompt_id, request.turn, rows.shape[-1], rows.device
        )
        return scores, scores + noise.rows(0, rows.shape[0])

    def _rows(self, request: Request, ids: Sequence[int]) -> Tensor:
        """Logits [n, V], float32, that each of the n tokens was chosen from."""
        return self._oracle.logits([*request.ids, *ids[:-1]], request.source, len(ids))


def ends_rightly(ids: Sequence[int], stop: StopRule) -> bool:
    """Whether an output ends at its first EOS or stop string, or exactly at the budget."""
    kept, finish = stop.cut((), ids)
    return finish is not None and kept == len(ids)


def cut_bounds(scores: Tensor, sampling: Sampling, tolerance: float) -> tuple[Tensor, Tensor]:
    """Where the top-k and top-p cuts may lie: the lowest score kept and the highest one left out.

    Args:
        scores: [n, V] log-probabilities before the cuts.
        tolerance: of the mass that top-p compares; scores off by so much move it by less.
    Returns:
        (floor [n], ceiling [n]): of tokens that the loosest reading keeps, the lowest score; of
        tokens that the strictest leaves out, the highest. -inf where there is no cut.
    """
    ordered = scores.sort(dim=-1, descending=True).values
    floor = ceiling = torch.full_like(scores[:, 0], -math.inf)
    if 0 < sampling.top_k < scores.shape[-1]:
        floor, ceiling = ordered[:, sampling.top_k - 1], ordered[:, sampling.top_k]
        ordered = ordered.masked_fill(ordered < floor[:, None], -math.inf)
    if sampling.top_p < 1.0:
        mass = ordered.softmax(-1)
        before = mass.cumsum(-1) - mass
        loose, strict = (before < sampling.top_p + slack for slack in (tolerance, -tolerance))
        lowest = ordered.masked_fill(~loose, math.inf).amin(-1)
        highest = ordered.masked_fill(strict, -math.inf).amax(-1)
        floor, ceiling = torch.maximum(floor, lowest), torch.maximum(ceiling, highest)
    return floor, ceiling


def _read(decoder: Decoder, request: Request, ids: Sequence[int]) -> Tensor:
    """Logits [n, V], float32, that a decoder gives for each of the n tokens."""
    text = torch.tensor([[*request.ids, *ids[:-1]]], device=decoder.device)
    last = torch.arange(len(request.ids) - 1, text.shape[1], device=decoder.device)
    state = request.state(decoder, text.shape[1])
    logits = decoder.forward(Tokens(text), state, logits_at=last).logits
    assert logits is not None
    return logits[0].float()


def _column(ids: Sequence[int], rows: Tensor) -> Tensor:
    return torch.tensor(list(ids), device=rows.device)[:, None]


def _lack(scores: Tensor, chosen: Tensor) -> list[float]:
    return _listed(scores.amax(-1) - scores.gather(-1, chosen)[:, 0])


def _listed(values: Tensor) -> list[float]:
    numbers: list[float] = values.tolist()
    return numbers

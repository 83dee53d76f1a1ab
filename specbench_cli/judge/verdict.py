"""The verdict on one output: the reference's tokens, tokens that tie with them, or neither.

Two honest programs may part where two tokens score alike up to rounding, and from there on their
texts have nothing to do with each other. So an output that differs is judged by itself:
transformers' own module of the target reads it, and every token of it must be, up to the measured
tolerance, the best choice after the tokens before it. Where the two part both tokens must be so,
and by the engine's own reading too. The reference is judged the same way, and outputs whose tokens
are drawn by what the target cannot say and by how likely it makes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import Guarantee, Rule, Tokens
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.judge.neartie import REACH, flip_chances, width_explains
from specbench_cli.judge.oracle import Oracle
from specbench_cli.judge.tolerance import Tolerance, measure_tolerance
from specbench_cli.stats.martingale import SMALLEST_TILT, TILTS
from specbench_cli.store.schema import LOSSLESS, Drafted, Likelihood, Steps, Verdict

LEAST = -12.0
"""Log-probabilities below are counted as this where outputs are compared with what was to be
expected (`stats.martingale`): what is rarer is a matter of rounding."""


_AT_ONCE = 1 << 22
"""Numbers of a distribution that are looked at together."""


class NotFinite(ArithmeticError):
    """Logits of the target that are no finite numbers, by transformers' own module or by ours.

    Attributes:
        at: the output token that was to be chosen from them.
    """

    def __init__(self, at: int) -> None:
        super().__init__(f"output token {at}: the target's logits are not finite")
        self.at = at


Both = tuple[Tensor, Tensor | None]
"""Logits [n, V] behind a prompt, and behind its weakened form; None without a contrast."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An output as the target reads it: natural logarithms of its tokens' probabilities, and how
    they lie to what was to be expected where the tokens are drawn."""

    log_probs: list[float]
    likelihood: Likelihood | None = None


def is_judged(guarantee: Guarantee, rule: Rule) -> bool:
    """Whether an output is compared with the reference's, token by token.

    A lossless promise means vanilla's very tokens wherever they are chosen and not drawn, whatever
    the method calls it; where tokens are drawn it means a distribution, and lossy methods promise
    neither.
    """
    return guarantee in LOSSLESS and rule in ("greedy", "coupled")


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
        drafts: Sequence[Drafted] | None = None,
    ) -> Verdict:
        """Compare an output with vanilla's.

        Args:
            request: what was decoded.
            reference: vanilla's output.
            ids: the output to judge.
            steps, drafts: how the engine came to it; None where it was not the engine.
        Returns:
            "identical"; "near-tie" if the output ends as it must and no token lacks more than the
            tolerance, nor vanilla's where the two part; else "mismatch". `position` is where the
            two first differ, `expected` the reference's token there (None where it had ended), and
            `gap` the largest of `gaps`, wherever in the output, since a bug may hide behind a tie.
            It is None for an output that ends wrongly, whose tokens are not looked at, and for one
            with a token that the processor forbids. `rounding` of a near-tie: whether width
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
        if gap <= self._allowed and expected is not None:
            gap = max(gap, self._tie(request, ids[:position], (ids[position], expected)))
        if not gap <= self._allowed:
            return Verdict("mismatch", position, _told(gap), expected)
        tie = Verdict("near-tie", position, gap, expected)
        if self._decoder is None or steps is None:
            return tie
        explained = width_explains(self._decoder, self._sampling, request, list(ids), steps, drafts)
        return replace(tie, rounding=explained)

    def reference(self, request: Request, ids: Sequence[int]) -> Verdict:
        """Judge the reference itself, by transformers' own rows of its text.

        Returns:
            "reference" with its `gap`: 0 where transformers chooses the same tokens, and then no
            tolerance is measured; "mismatch" where a token lacks more than that: at `position`,
            where `expected` is transformers' choice.
        """
        if not ends_rightly(ids, request.stop):
            return Verdict("mismatch", len(ids), None, None)
        both = self._reads(request, ids)
        rows = self._processed(self._mixed(both), ids)
        if self._choices(request, rows) == list(ids):
            return Verdict("reference", gap=0.0)
        gaps = self._least_gaps(request, both, ids)
        gap = max(gaps)
        if gap <= self._allowed:
            return Verdict("reference", gap=gap)
        at = gaps.index(gap)
        return Verdict("mismatch", at, _told(gap), self._choices(request, rows)[at])

    def drawn(self, request: Request, ids: Sequence[int]) -> Verdict:
        """Judge an output whose tokens are drawn, as far as tokens can be: it must end as it must,
        and hold none that the cuts leave out.

        Returns:
            "unchecked", since nothing more can be said of tokens; else "mismatch", `gap` being how
            far beyond the cut the token at `position` lies.
        """
        if not ends_rightly(ids, request.stop):
            return Verdict("mismatch", len(ids), None, None)
        read = self._reads(request, ids)
        scores, distribution = self._distribution(self._processed(self._mixed(read), ids))
        chosen = _column(ids, scores)
        if bool(distribution.gather(-1, chosen).isfinite().all()):
            return Verdict("unchecked")
        beyond = _least(
            self._beyond(self._distribution(self._processed(rows, ids))[0], chosen).tolist()
            for rows in self._around(read)
        )
        gap = max(beyond)
        if gap <= self._allowed:
            return Verdict("unchecked")
        return Verdict("mismatch", beyond.index(gap), _told(gap), None)

    def gaps(self, request: Request, ids: Sequence[int]) -> list[float]:
        """What each token's decision score lacks of the best one after the tokens before it.

        Scores are logits (greedy) or log p_warped + noise (coupled). Of a token within the
        tolerance of a top-k or top-p cut nobody can say on which side it is: it may be chosen, and
        need not be beaten. One beyond the cut lacks its distance to the cut, if that is more. So
        with a contrast's borders: of what the readings on both sides of them say, the least counts.
        """
        return self._least_gaps(request, self._reads(request, ids), ids)

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

    def read(self, request: Request, ids: Sequence[int]) -> Reading:
        """Read an output: each token's probability under the target's distribution (the warped one;
        at temperature 0 the softmax of the logits). One forward.

        It is transformers' forward where tokens are drawn: what stands there in place of a verdict
        must not come from the engine that is judged. Elsewhere it is vanilla's own, if that is
        known. A token that the processor or the cuts leave out, by rounding or by a fault, counts
        with its probability before them: one such token must not drown all others.

        Raises:
            NotFinite: the logits are not finite.
        """
        if not ids:
            return Reading([])
        drawn = self._sampling.draws
        if drawn or self._decoder is None:
            both = self._reads(request, ids)
        else:
            both = self._both(request, partial(_read, self._decoder, ids=ids, n=len(ids)))
        plain, _ = both
        rows, chosen = self._processed(self._mixed(both), ids), _column(ids, plain)
        heat = self._sampling.temperature
        distribution = self._distribution(rows)[1] if heat else rows.log_softmax(-1)
        own = distribution.gather(-1, chosen)
        if not bool(own.isfinite().all()):
            before = (plain / (heat or 1.0)).log_softmax(-1).gather(-1, chosen)
            own = torch.where(own.isfinite(), own, before)
        listed = _listed(own[:, 0].double())
        return Reading(listed, _likelihood(distribution, own) if drawn else None)

    @property
    def _allowed(self) -> float:
        """The tolerance in units of decision scores."""
        if self._tolerance is None:
            self._tolerance = measure_tolerance(self._oracle.module, self._texts())
        contrast = self._sampling.contrast
        grown = 1.0 if contrast is None else contrast.stretch
        return grown * self._tolerance.value / (self._sampling.temperature or 1.0)

    @cached_property
    def _oracle(self) -> Oracle:
        return Oracle(self._build())

    def _tie(self, request: Request, before: Sequence[int], tokens: Sequence[int]) -> float:
        """What the worse of two tokens after the same text lacks of the best, by transformers'
        reading and by the engine's."""
        text = [*before, tokens[0]]  # of which the last token's row alone is read
        readers: list[Callable[[Request], Tensor]] = [partial(self._said, ids=text, n=1)]
        if self._decoder is not None:
            readers.append(partial(_read, self._decoder, ids=text, n=1))
        readings = [self._both(request, read, len(before)) for read in readers]
        processor = self._sampling.processor
        found = []
        for reading in readings:
            around = self._around(reading)
            if processor is not None:
                around = [processor.begin()(row, before, ()) for row in around]
            for token in tokens:
                lacks = (self._gaps(request, row, [token], len(before)) for row in around)
                found += _least(lacks)
        return max(found)

    def _least_gaps(self, request: Request, both: Both, ids: Sequence[int]) -> list[float]:
        around = (self._processed(rows, ids) for rows in self._around(both))
        return _least(self._gaps(request, rows, ids) for rows in around)

    def _gaps(
        self, request: Request, rows: Tensor, ids: Sequence[int], first: int = 0
    ) -> list[float]:
        """As `gaps`, of rows [n, V] from output position `first` on."""
        chosen = _column(ids, rows)
        if self._sampling.rule == "greedy":
            return _lack(rows, chosen)
        scores, decision = self._scores(request, rows, first)
        _, ceiling = cut_bounds(scores, self._sampling, self._allowed)
        rivals = (scores > ceiling[:, None] + self._allowed).scatter_(-1, chosen, True)
        beaten = _lack(decision.masked_fill(~rivals, -math.inf), chosen)
        beyond = self._beyond(scores, chosen).tolist()
        return [max(pair) for pair in zip(beaten, beyond, strict=True)]

    def _choices(self, request: Request, rows: Tensor) -> list[int]:
        """The tokens that rows say, without any tolerance."""
        if self._sampling.rule != "greedy":
            scores, decision = self._scores(request, rows)
            floor, _ = cut_bounds(scores, self._sampling, 0.0)
            rows = decision.masked_fill(scores < floor[:, None], -math.inf)
        choices: list[int] = rows.argmax(-1).tolist()
        return choices

    def _beyond(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """How far each chosen token [n, 1] lies below the loosest reading of the cuts, [n]."""
        floor, _ = cut_bounds(scores, self._sampling, self._allowed)
        own = scores.gather(-1, chosen)[:, 0]
        return torch.where(own.isneginf(), math.inf, floor - own)  # what a processor forbids

    def _distribution(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities before and behind the cuts, [n, V] each; none of the engine's code."""
        scores = (rows / self._sampling.temperature).log_softmax(-1)
        floor, _ = cut_bounds(scores, self._sampling, 0.0)
        return scores, scores.masked_fill(scores < floor[:, None], -math.inf).log_softmax(-1)

    def _scores(self, request: Request, rows: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Log-probabilities before the cuts, and with the keyed noise added: [n, V] each."""
        scores = (rows / self._sampling.temperature).log_softmax(-1)
        noise = Noise(
            self._sampling.seed, request.prompt_id, request.turn, rows.shape[-1], rows.device
        )
        return scores, scores + noise.rows(first, rows.shape[0])

    def _rows(self, request: Request, ids: Sequence[int]) -> Tensor:
        """Logits [n, V], float32, that each of the n tokens was chosen from, processed. Raises
        NotFinite."""
        return self._processed(self._mixed(self._reads(request, ids)), ids)

    def _processed(self, rows: Tensor, ids: Sequence[int]) -> Tensor:
        processor = self._sampling.processor
        return rows if processor is None else processor.along(rows, ids)

    def _reads(self, request: Request, ids: Sequence[int]) -> Both:
        """As `_both`, of transformers' own module, behind the texts that the n tokens follow."""
        return self._both(request, partial(self._said, ids=ids, n=len(ids)))

    def _said(self, request: Request, ids: Sequence[int], n: int) -> Tensor:
        """Logits [n, V], float32, that transformers' module gives for the last n of some tokens."""
        return self._oracle.logits([*request.ids, *ids[:-1]], request.source, n)

    def _both(self, request: Request, read: Callable[[Request], Tensor], first: int = 0) -> Both:
        """What a model says to a request, and to its weakened prompt under a contrast; [n, V] each,
        from output position `first` on.

        Raises:
            NotFinite: logits are not finite.
        """
        contrast, plain = self._sampling.contrast, _finite(read(request), first)
        if contrast is None:
            return plain, None
        weak = replace(request, ids=contrast.weakened(request.ids))
        return plain, _finite(read(weak), first)

    def _mixed(self, both: Both) -> Tensor:
        """The logits that the target decides by, before a processor."""
        contrast, (plain, weak) = self._sampling.contrast, both
        if contrast is None or weak is None:
            return plain
        return contrast.contrasted(plain, weak)

    def _around(self, both: Both) -> list[Tensor]:
        """The same, on both sides of a contrast's borders, which rounding may move."""
        contrast, (plain, weak) = self._sampling.contrast, both
        if contrast is None or weak is None:
            return [plain]
        self._allowed  # noqa: B018  the tolerance is measured
        assert self._tolerance is not None
        near = contrast.around(plain.shape[-1], self._tolerance.value)
        return [each.contrasted(plain, weak) for each in (contrast, *near)]


def ends_rightly(ids: Sequence[int], stop: StopRule) -> bool:
    """Whether an output ends at its first EOS or stop string, or exactly at the budget: by none of
    the stop rule's own code, which every method's text went through."""

    def completes(n: int) -> bool:
        text = stop.decode(ids[:n]) if stop.decode is not None and stop.strings else ""
        return any(string in text for string in stop.strings)

    lengths = range(1, len(ids) + 1)
    ends = (n for n in lengths if ids[n - 1] in stop.eos or completes(n))
    return len(ids) == next(ends, stop.max_new_tokens) <= stop.max_new_tokens


def cut_bounds(scores: Tensor, sampling: Sampling, tolerance: float) -> tuple[Tensor, Tensor]:
    """Where the top-k and top-p cuts may lie: the lowest score kept and the highest one left out.

    Args:
        scores: [n, V] log-probabilities before the cuts.
        tolerance: of the scores. Where each is off by d at most, the odds of any mass m change by
            the factor e^2d at most, and m moves to m e^2d / (m e^2d + 1 - m): top-p may lie as far
            from where it was set.
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
        loose, strict = (before < _moved(sampling.top_p, by) for by in (tolerance, -tolerance))
        lowest = ordered.masked_fill(~loose, math.inf).amin(-1)
        highest = ordered.masked_fill(strict, -math.inf).amax(-1)
        floor, ceiling = torch.maximum(floor, lowest), torch.maximum(ceiling, highest)
    return floor, ceiling


def _moved(mass: float, by: float) -> float:
    """A mass once all scores in it are higher and all others lower by so much."""
    return mass / (mass + (1.0 - mass) * math.exp(-2.0 * by))


def _likelihood(distribution: Tensor, chosen: Tensor) -> Likelihood:
    """How the log-probabilities of drawn tokens, [n, 1], lie to those that a distribution [n, V]
    gives to be expected."""
    sums = torch.zeros(2 + len(TILTS), dtype=torch.float64, device=distribution.device)
    few = max(1, _AT_ONCE // distribution.shape[-1])
    for rows, own in zip(distribution.split(few), chosen.split(few), strict=True):
        p, steps = rows.exp().double(), rows.clamp_min(LEAST).double()
        mean = (p * steps).sum(-1, keepdim=True)
        steps -= mean
        found = [(own.double().clamp_min(LEAST) - mean).sum(), (p * steps * steps).sum()]
        for sign in (-1.0, 1.0):
            moment = (sign * SMALLEST_TILT * steps).exp()
            for _ in (tilt for tilt in TILTS if tilt * sign > 0.0):
                found.append((p * moment).sum(-1).log().sum())
                moment = moment * moment  # each tilt is twice the one before
        sums += torch.stack(found)
    excess, variance, *cumulants = sums.tolist()
    return Likelihood(excess, variance, cumulants)


def _read(decoder: Decoder, request: Request, ids: Sequence[int], n: int) -> Tensor:
    """Logits [n, V], float32, that a decoder gives for the last n of some tokens."""
    text = torch.tensor([[*request.ids, *ids[:-1]]], device=decoder.device)
    last = torch.arange(text.shape[1] - n, text.shape[1], device=decoder.device)
    state = request.state(decoder, text.shape[1])
    logits = decoder.forward(Tokens(text), state, logits_at=last).logits
    assert logits is not None
    return logits[0].float()


def _finite(rows: Tensor, first: int = 0) -> Tensor:
    """Rows [n, V], each with a greatest number that is one, from output position `first` on; raises
    NotFinite where there is none."""
    bad = ~rows.amax(-1).isfinite()
    if bool(bad.any()):
        raise NotFinite(first + int(bad.nonzero()[0, 0]))
    return rows


def _least(readings: Iterable[Sequence[float]]) -> list[float]:
    """Of several readings of the same positions, the least at each."""
    return [min(each) for each in zip(*readings, strict=True)]


def _column(ids: Sequence[int], rows: Tensor) -> Tensor:
    return torch.tensor(list(ids), device=rows.device)[:, None]


def _told(gap: float) -> float | None:
    """A gap as verdicts have it: none where a token cannot be chosen at all."""
    return gap if math.isfinite(gap) else None


def _lack(scores: Tensor, chosen: Tensor) -> list[float]:
    return _listed(scores.amax(-1) - scores.gather(-1, chosen)[:, 0])


def _listed(values: Tensor) -> list[float]:
    numbers: list[float] = values.tolist()
    return numbers

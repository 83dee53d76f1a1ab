"""Verdict on an output: identical to vanilla's output, a near-tie, or a mismatch.

Vanilla is plain decoding without a draft. Under greedy and coupled sampling, a lossless method must
generate the same tokens as vanilla. Coupled sampling adds the same random noise to the scores of
every method. The noise depends only on the seed and the position.

Two correct programs may still choose different tokens where two scores are equal up to rounding.
After that position, their texts have nothing in common. So an output that differs is judged on its
own. The transformers model of the target reads it. Every token must be the best choice, up to the
measured tolerance. At the first difference, both the output's token and vanilla's token must pass
this test. There they must pass it also with the engine's own logits. An output that passes is a
near-tie.

Vanilla's output is judged in the same way. Under other sampling rules, outputs are random. Then an
output fails if it contains a token that the target cannot generate. The likelihood of a random
output is stored.
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
from specbench_cli.judge.neartie import MAX_GAP_ERROR, flip_chances, width_explains
from specbench_cli.judge.oracle import Oracle
from specbench_cli.judge.tolerance import Tolerance, measure_tolerance
from specbench_cli.stats.martingale import SMALLEST_TILT, TILTS
from specbench_cli.store.schema import LOSSLESS, DraftedTokens, Likelihood, Steps, Verdict

MIN_LOG_PROB = -12.0
"""Smallest log-probability in likelihoods. Smaller ones are raised to this value, because they
depend on rounding (`stats.martingale`)."""


_CHUNK_SIZE = 1 << 22
"""Maximum number of probabilities that are processed at once, to limit memory."""


class NonFiniteLogits(ArithmeticError):
    """Error: the target's logits are not finite, in the transformers model or in the engine.

    Attributes:
        position: Index of the output token for which the logits were computed.
    """

    def __init__(self, at: int) -> None:
        super().__init__(f"output token {at}: the target's logits are not finite")
        self.position = at


LogitPair = tuple[Tensor, Tensor | None]
"""Logits [n, vocab] for a prompt, and for the weakened prompt that contrastive decoding compares
it with. The second is None without contrastive decoding."""


@dataclass(frozen=True, slots=True)
class OutputLikelihood:
    """Log-probabilities of an output's tokens under the target.

    likelihood: Comparison of the sum of the log-probabilities with the expected sum. None if tokens
        were not sampled.
    """

    log_probs: list[float]
    likelihood: Likelihood | None = None


def requires_same_tokens(guarantee: Guarantee, rule: Rule) -> bool:
    """Return True if a method must generate the same tokens as vanilla.

    Lossless methods must do so under greedy and coupled sampling. Under other sampling rules,
    lossless methods guarantee only the target's distribution. Lossy methods guarantee neither the
    tokens nor the distribution.
    """
    return guarantee in LOSSLESS and rule in ("greedy", "coupled")


class OutputJudge:
    """Judge of the outputs of a run.

    When the first output differs from vanilla's output, the judge loads the transformers model and
    measures the tolerance. If all outputs are identical, it does neither.

    Args:
        oracle: Function that builds the transformers model of the target. It is called at most
            once.
        sampling: Sampling settings of the run.
        texts: Function that returns the token sequences on which the tolerance is measured.
        decoder: The target as vanilla runs it, used to decide whether the width of forwards
            explains a near-tie. None skips this check.
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
        """Return the manifest entry about the tolerance.

        Return None if the tolerance was not measured.
        """
        return None if self._tolerance is None else asdict(self._tolerance)

    @property
    def was_needed(self) -> bool:
        """True if an output had to be judged with the measured tolerance."""
        return self._tolerance is not None

    def compare(
        self,
        request: Request,
        reference: Sequence[int],
        ids: Sequence[int],
        steps: Steps | None = None,
        drafts: Sequence[DraftedTokens] | None = None,
    ) -> Verdict:
        """Compare an output with vanilla's output.

        The gap of a token is the distance of its score from the best score at its position
        (`gaps`).

        Args:
            request: The decoded request.
            reference: Output of vanilla.
            ids: The output to judge.
            steps, drafts: Steps of the method and their drafts. None if another program decoded.

        Returns:
            A verdict of one of three kinds:

            - "identical": the tokens are equal.
            - "near-tie": the output ends correctly, and no gap exceeds the tolerance. The gap of
              vanilla's token at the first difference must not exceed the tolerance either.
              `rounding` is True if the width of the forwards explains the near-tie. It is None if
              this was not checked.
            - "mismatch": all other outputs.

            `position` is the index of the first difference. `expected` is vanilla's token there, or
            None if vanilla's output had already ended. `gap` is the largest gap in the whole
            output, because a bug may begin after a near-tie. `gap` is None if the output ends
            wrongly, or contains a token that the logits processor forbids.
        """
        if list(ids) == list(reference):
            return Verdict("identical")
        pairs = zip(ids, reference, strict=False)
        position = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        expected = reference[position] if position < len(reference) else None
        if not ends_correctly(ids, request.stop):
            return Verdict("mismatch", position, None, expected)
        gap = max(self.gaps(request, ids))
        if gap <= self._allowed_gap and expected is not None:
            gap = max(gap, self._tie_gap(request, ids[:position], (ids[position], expected)))
        if not gap <= self._allowed_gap:
            return Verdict("mismatch", position, _finite_or_none(gap), expected)
        tie = Verdict("near-tie", position, gap, expected)
        if self._decoder is None or steps is None:
            return tie
        explained = width_explains(self._decoder, self._sampling, request, list(ids), steps, drafts)
        return replace(tie, rounding=explained)

    def judge_reference(self, request: Request, ids: Sequence[int]) -> Verdict:
        """Judge vanilla's output with the logits of the transformers model.

        Returns:
            A verdict of one of two kinds:

            - "reference": every token is the best choice of the transformers model, up to the
              tolerance. `gap` is the largest distance of a token from the best score. If all tokens
              are the best choice, `gap` is 0, and no tolerance is measured.
            - "mismatch": `position` is the token with the largest distance. `expected` is the token
              that the transformers model chooses there.
        """
        if not ends_correctly(ids, request.stop):
            return Verdict("mismatch", len(ids), None, None)
        logits = self._read_with_oracle(request, ids)
        rows = self._process(self._apply_contrast(logits), ids)
        if self._chosen_tokens(request, rows) == list(ids):
            return Verdict("reference", gap=0.0)
        gaps = self._min_gaps(request, logits, ids)
        gap = max(gaps)
        if gap <= self._allowed_gap:
            return Verdict("reference", gap=gap)
        at = gaps.index(gap)
        return Verdict("mismatch", at, _finite_or_none(gap), self._chosen_tokens(request, rows)[at])

    def judge_sampled(self, request: Request, ids: Sequence[int]) -> Verdict:
        """Judge an output that was sampled at random.

        The output must end correctly. At each position, top-k and top-p must keep the token of the
        output.

        Returns:
            "unchecked" if the output passes, because a single output cannot prove the distribution.
            Otherwise "mismatch". Then `position` is the failing token. `gap` is the distance of its
            score from the lowest score that top-k and top-p keep.
        """
        if not ends_correctly(ids, request.stop):
            return Verdict("mismatch", len(ids), None, None)
        read = self._read_with_oracle(request, ids)
        scores, distribution = self._warp(self._process(self._apply_contrast(read), ids))
        chosen = _as_column(ids, scores)
        if bool(distribution.gather(-1, chosen).isfinite().all()):
            return Verdict("unchecked")
        distances = _elementwise_min(
            self._cut_distance(self._warp(self._process(rows, ids))[0], chosen).tolist()
            for rows in self._border_variants(read)
        )
        gap = max(distances)
        if gap <= self._allowed_gap:
            return Verdict("unchecked")
        return Verdict("mismatch", distances.index(gap), _finite_or_none(gap), None)

    def gaps(self, request: Request, ids: Sequence[int]) -> list[float]:
        """Return how far each token's score is below the best score at its position.

        Under greedy sampling, scores are logits. Under coupled sampling, they are log p + noise.

        Rounding may move the limits of top-k and top-p. So a token within the tolerance of a limit
        may be chosen. But it does not count as a better choice than another token. The gap of a
        token beyond a limit is at least its distance from the limit. The limit of contrastive
        decoding may also move. There, the gap is computed for a lower and a higher limit, and the
        smaller gap is returned.
        """
        return self._min_gaps(request, self._read_with_oracle(request, ids), ids)

    def flip_chances(self, request: Request, ids: Sequence[int]) -> list[float]:
        """Return an upper bound of the probability that rounding changes each token of an output.

        Args:
            request: The decoded request.
            ids: Output of vanilla.
        """
        rows = self._decision_logits(request, ids)
        chosen, reach = _as_column(ids, rows), MAX_GAP_ERROR * self._allowed_gap
        if self._sampling.rule == "greedy":
            return _to_list(flip_chances(rows, chosen, reach))
        scores, decision = self._coupled_scores(request, rows)
        floor, ceiling = cut_bounds(scores, self._sampling, reach)
        inside, outside = scores > ceiling[:, None] + reach, scores < floor[:, None] - reach
        return _to_list(flip_chances(decision, chosen, reach, (inside, outside)))

    def compute_likelihood(self, request: Request, ids: Sequence[int]) -> OutputLikelihood:
        """Compute each token's log-probability under the target's distribution, with one forward.

        The distribution includes temperature, top-k and top-p. At temperature 0, it is the softmax
        of the logits. Sampled outputs are read by the transformers model, so that the engine is not
        judged by its own logits. Other outputs are read by the engine's target model.

        Top-k, top-p or the logits processor may forbid a token of the output. Its probability would
        be 0, and the logarithm of 0 would make the sum useless. So its probability before these
        steps is used instead.

        Raises:
            NonFiniteLogits: the logits are not finite.
        """
        if not ids:
            return OutputLikelihood([])
        drawn = self._sampling.draws
        if drawn or self._decoder is None:
            logits = self._read_with_oracle(request, ids)
        else:
            logits = self._logit_pair(
                request, partial(_decoder_logits, self._decoder, ids=ids, n=len(ids))
            )
        plain, _ = logits
        rows, chosen = self._process(self._apply_contrast(logits), ids), _as_column(ids, plain)
        temperature = self._sampling.temperature
        distribution = self._warp(rows)[1] if temperature else rows.log_softmax(-1)
        own = distribution.gather(-1, chosen)
        if not bool(own.isfinite().all()):
            before = (plain / (temperature or 1.0)).log_softmax(-1).gather(-1, chosen)
            own = torch.where(own.isfinite(), own, before)
        log_probs = _to_list(own[:, 0].double())
        return OutputLikelihood(
            log_probs, _compare_likelihood(distribution, own) if drawn else None
        )

    @property
    def _allowed_gap(self) -> float:
        """Tolerance in units of the scores that choose a token. It is measured at the first use."""
        if self._tolerance is None:
            self._tolerance = measure_tolerance(self._oracle.module, self._texts())
        contrast = self._sampling.contrast
        scale = 1.0 if contrast is None else contrast.error_factor
        return scale * self._tolerance.value / (self._sampling.temperature or 1.0)

    @cached_property
    def _oracle(self) -> Oracle:
        return Oracle(self._build())

    def _tie_gap(self, request: Request, before: Sequence[int], tokens: Sequence[int]) -> float:
        """Return the largest gap of two tokens at one position, in the oracle and the engine.

        Args:
            before: Output tokens before this position.
            tokens: The two tokens.
        """
        # The logits at this position do not depend on the token at it. So the text may end with
        # either of the two tokens.
        text = [*before, tokens[0]]
        readers: list[Callable[[Request], Tensor]] = [partial(self._oracle_logits, ids=text, n=1)]
        if self._decoder is not None:
            readers.append(partial(_decoder_logits, self._decoder, ids=text, n=1))
        processor = self._sampling.processor
        found = []
        for read in readers:
            variants = self._border_variants(self._logit_pair(request, read, len(before)))
            if processor is not None:
                variants = [processor.begin()(row, before, ()) for row in variants]
            for token in tokens:
                gaps = (self._gaps(request, row, [token], len(before)) for row in variants)
                found += _elementwise_min(gaps)
        return max(found)

    def _min_gaps(self, request: Request, logits: LogitPair, ids: Sequence[int]) -> list[float]:
        variants = (self._process(rows, ids) for rows in self._border_variants(logits))
        return _elementwise_min(self._gaps(request, rows, ids) for rows in variants)

    def _gaps(
        self, request: Request, rows: Tensor, ids: Sequence[int], first: int = 0
    ) -> list[float]:
        """Return the gaps of n tokens from their logits, see `gaps`.

        Args:
            rows: [n, vocab] logits.
            ids: The n tokens.
            first: Position of the first of these tokens in the output.
        """
        chosen = _as_column(ids, rows)
        if self._sampling.rule == "greedy":
            return _gaps_to_best(rows, chosen)
        scores, decision = self._coupled_scores(request, rows, first)
        _, ceiling = cut_bounds(scores, self._sampling, self._allowed_gap)
        rivals = (scores > ceiling[:, None] + self._allowed_gap).scatter_(-1, chosen, True)
        beaten = _gaps_to_best(decision.masked_fill(~rivals, -math.inf), chosen)
        distances = self._cut_distance(scores, chosen).tolist()
        return [max(pair) for pair in zip(beaten, distances, strict=True)]

    def _chosen_tokens(self, request: Request, rows: Tensor) -> list[int]:
        """Return the token with the best score at each position, without a tolerance.

        Args:
            request: The decoded request.
            rows: [n, vocab] logits.
        """
        if self._sampling.rule != "greedy":
            scores, decision = self._coupled_scores(request, rows)
            floor, _ = cut_bounds(scores, self._sampling, 0.0)
            rows = decision.masked_fill(scores < floor[:, None], -math.inf)
        choices: list[int] = rows.argmax(-1).tolist()
        return choices

    def _cut_distance(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return how far each chosen token is below the lowest score that top-k and top-p keep.

        Args:
            scores: [n, vocab] log-probabilities before top-k and top-p.
            chosen: [n, 1] token ids.

        Returns:
            [n] distances. A distance is infinite if the logits processor forbids the token.
        """
        floor, _ = cut_bounds(scores, self._sampling, self._allowed_gap)
        own = scores.gather(-1, chosen)[:, 0]
        return torch.where(own.isneginf(), math.inf, floor - own)

    def _warp(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities before and after top-k and top-p, [n, vocab] each.

        This method does not use the engine's sampling code, because that code is being judged.
        """
        scores = (rows / self._sampling.temperature).log_softmax(-1)
        floor, _ = cut_bounds(scores, self._sampling, 0.0)
        return scores, scores.masked_fill(scores < floor[:, None], -math.inf).log_softmax(-1)

    def _coupled_scores(
        self, request: Request, rows: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of coupled sampling, before top-k and top-p.

        Args:
            rows: [n, vocab] logits.
            first: Position in the output of the first row.

        Returns:
            Two tensors [n, vocab]: the log-probabilities, and the log-probabilities plus noise.
        """
        scores = (rows / self._sampling.temperature).log_softmax(-1)
        noise = Noise(
            self._sampling.seed, request.prompt_id, request.turn, rows.shape[-1], rows.device
        )
        return scores, scores + noise.rows(first, rows.shape[0])

    def _decision_logits(self, request: Request, ids: Sequence[int]) -> Tensor:
        """Return the oracle's logits [n, vocab] float32 for n output tokens.

        The logits include contrastive decoding and the logits processor, if the run uses them.
        Raise NonFiniteLogits if the logits are not finite.
        """
        return self._process(self._apply_contrast(self._read_with_oracle(request, ids)), ids)

    def _process(self, rows: Tensor, ids: Sequence[int]) -> Tensor:
        processor = self._sampling.processor
        return rows if processor is None else processor.process_output(rows, ids)

    def _read_with_oracle(self, request: Request, ids: Sequence[int]) -> LogitPair:
        """Return the oracle's logits for the tokens of an output, see `_logit_pair`."""
        return self._logit_pair(request, partial(self._oracle_logits, ids=ids, n=len(ids)))

    def _oracle_logits(self, request: Request, ids: Sequence[int], n: int) -> Tensor:
        """Return the oracle's logits [n, vocab] float32 for the last n tokens of `ids`."""
        return self._oracle.logits([*request.ids, *ids[:-1]], request.source, n)

    def _logit_pair(
        self, request: Request, read: Callable[[Request], Tensor], first: int = 0
    ) -> LogitPair:
        """Return a model's logits for a request, and its logits for the weakened prompt.

        The logits for the weakened prompt are None unless the run uses contrastive decoding.

        Args:
            read: Function that returns the model's logits for a request.
            first: Position in the output of the first row of logits.

        Raises:
            NonFiniteLogits: the logits are not finite.
        """
        contrast, plain = self._sampling.contrast, _check_finite(read(request), first)
        if contrast is None:
            return plain, None
        weak = replace(request, ids=contrast.weaken(request.ids))
        return plain, _check_finite(read(weak), first)

    def _apply_contrast(self, logits: LogitPair) -> Tensor:
        """Return the logits after contrastive decoding, and before the logits processor."""
        contrast, (plain, weak) = self._sampling.contrast, logits
        if contrast is None or weak is None:
            return plain
        return contrast.apply(plain, weak)

    def _border_variants(self, logits: LogitPair) -> list[Tensor]:
        """Return the logits after contrastive decoding, in variants with slightly moved limits.

        Contrastive decoding removes tokens below a limit. Rounding may move this limit.
        """
        contrast, (plain, weak) = self._sampling.contrast, logits
        if contrast is None or weak is None:
            return [plain]
        self._allowed_gap  # noqa: B018  this measures the tolerance
        assert self._tolerance is not None
        near = contrast.borderline_variants(plain.shape[-1], self._tolerance.value)
        return [each.apply(plain, weak) for each in (contrast, *near)]


def ends_correctly(ids: Sequence[int], stop: StopRule) -> bool:
    """Return True if an output ends at its first EOS or stop string, or at the token limit.

    This function does not use the engine's code for stop rules, because that code is being judged
    too.
    """

    def completes(n: int) -> bool:
        text = stop.decode(ids[:n]) if stop.decode is not None and stop.strings else ""
        return any(string in text for string in stop.strings)

    lengths = range(1, len(ids) + 1)
    ends = (n for n in lengths if ids[n - 1] in stop.eos or completes(n))
    return len(ids) == next(ends, stop.max_new_tokens) <= stop.max_new_tokens


def cut_bounds(scores: Tensor, sampling: Sampling, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the range in which rounding may move the limit of top-k and top-p.

    Args:
        scores: [n, vocab] log-probabilities before top-k and top-p.
        tolerance: Largest rounding error d of a score. Suppose that a set of tokens has probability
            m. Rounding changes its odds by at most the factor e^2d. So m becomes at most m e^2d /
            (m e^2d + 1 - m). The limit of top-p moves by the same amount.

    Returns:
        (floor [n], ceiling [n]). The floor is the lowest score that may be kept. The ceiling is the
        highest score that may be removed. Both are -inf without top-k and top-p.
    """
    ordered = scores.sort(dim=-1, descending=True).values
    floor = ceiling = torch.full_like(scores[:, 0], -math.inf)
    if 0 < sampling.top_k < scores.shape[-1]:
        floor, ceiling = ordered[:, sampling.top_k - 1], ordered[:, sampling.top_k]
        ordered = ordered.masked_fill(ordered < floor[:, None], -math.inf)
    if sampling.top_p < 1.0:
        mass = ordered.softmax(-1)
        before = mass.cumsum(-1) - mass
        loose, strict = (before < _shift_mass(sampling.top_p, by) for by in (tolerance, -tolerance))
        lowest = ordered.masked_fill(~loose, math.inf).amin(-1)
        highest = ordered.masked_fill(strict, -math.inf).amax(-1)
        floor, ceiling = torch.maximum(floor, lowest), torch.maximum(ceiling, highest)
    return floor, ceiling


def _shift_mass(mass: float, by: float) -> float:
    """Return the probability of a set of tokens after their scores rise and all other scores fall.

    Args:
        mass: Probability of the set before the change.
        by: Amount by which the scores of the set rise, and all other scores fall.
    """
    return mass / (mass + (1.0 - mass) * math.exp(-2.0 * by))


def _compare_likelihood(distribution: Tensor, chosen: Tensor) -> Likelihood:
    """Compare the log-probabilities of sampled tokens with the expected log-probabilities.

    Args:
        distribution: [n, vocab] log-probabilities of all tokens.
        chosen: [n, 1] log-probabilities of the sampled tokens.

    Returns:
        The difference of the two sums, its variance, and its cumulants, see `stats.martingale`.
    """
    sums = torch.zeros(2 + len(TILTS), dtype=torch.float64, device=distribution.device)
    chunk = max(1, _CHUNK_SIZE // distribution.shape[-1])
    for rows, own in zip(distribution.split(chunk), chosen.split(chunk), strict=True):
        p, steps = rows.exp().double(), rows.clamp_min(MIN_LOG_PROB).double()
        mean = (p * steps).sum(-1, keepdim=True)
        steps -= mean
        found = [(own.double().clamp_min(MIN_LOG_PROB) - mean).sum(), (p * steps * steps).sum()]
        for sign in (-1.0, 1.0):
            moment = (sign * SMALLEST_TILT * steps).exp()
            for _ in (tilt for tilt in TILTS if tilt * sign > 0.0):
                found.append((p * moment).sum(-1).log().sum())
                moment = moment * moment  # the next tilt is twice this one
        sums += torch.stack(found)
    excess, variance, *cumulants = sums.tolist()
    return Likelihood(excess, variance, cumulants)


def _decoder_logits(decoder: Decoder, request: Request, ids: Sequence[int], n: int) -> Tensor:
    """Return a decoder's logits [n, vocab] float32 for the last n tokens of `ids`."""
    text = torch.tensor([[*request.ids, *ids[:-1]]], device=decoder.device)
    last = torch.arange(text.shape[1] - n, text.shape[1], device=decoder.device)
    state = request.state(decoder, text.shape[1])
    logits = decoder.forward(Tokens(text), state, logits_at=last).logits
    assert logits is not None
    return logits[0].float()


def _check_finite(rows: Tensor, first: int = 0) -> Tensor:
    """Return logits [n, vocab] unchanged. Raise NonFiniteLogits if a row's maximum is not finite.

    Args:
        first: Position in the output of the first row. The error message contains the position.
    """
    bad = ~rows.amax(-1).isfinite()
    if bool(bad.any()):
        raise NonFiniteLogits(first + int(bad.nonzero()[0, 0]))
    return rows


def _elementwise_min(readings: Iterable[Sequence[float]]) -> list[float]:
    """Return a list with the smallest value at each position among several lists."""
    return [min(each) for each in zip(*readings, strict=True)]


def _as_column(ids: Sequence[int], rows: Tensor) -> Tensor:
    return torch.tensor(list(ids), device=rows.device)[:, None]


def _finite_or_none(gap: float) -> float | None:
    """Return the gap. Return None for an infinite gap, because JSON has no infinity."""
    return gap if math.isfinite(gap) else None


def _gaps_to_best(scores: Tensor, chosen: Tensor) -> list[float]:
    return _to_list(scores.amax(-1) - scores.gather(-1, chosen)[:, 0])


def _to_list(values: Tensor) -> list[float]:
    numbers: list[float] = values.tolist()
    return numbers

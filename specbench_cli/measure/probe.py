"""The cost probe: times of forwards and of the host work between them on this machine.

Rounds (`probe_rounds`) are measured while a noise meter runs. A time is the mean over all quiet
rounds, without outliers. A median would be biased: times are skewed to the right, and the total
time of a run contains the long ones too.

Host times come from real sessions: plain steps, chains that cost nothing to draft, and the given
methods. Decode time minus forwards, divided by steps, is fitted by non-negative least squares to
a + b (draft forwards) + c (drafted tokens). Chains, each model that drafts trees, and each head are
fitted separately. Sessions are greedy, so the cost of sampling is not included.

If batches are probed, the time of a single sequence with the same number of rows is subtracted from
each forward. The cost of a further sequence is fitted to the rest by least squares. Host times of
batches are fitted like those of sessions, with the number of sequences as another variable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch

from specbench_cli.engine.loop import draft_and_verify
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Outcome
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import (
    TREES,
    BatchCost,
    BatchPoint,
    CostCurve,
    CostPoint,
    HostCost,
    HostPoint,
    ProbeNoise,
)
from specbench_cli.measure.probe_rounds import (
    NEW_TOKENS,
    PROMPT_LENGTH,
    BatchDecoding,
    ProbeGrid,
    ProbeRound,
    ProbeSamples,
    SessionDecoding,
)
from specbench_cli.measure.quiet import NOISE_LIMIT, MeasurementWindows

FULL_GRID = ProbeGrid(
    contexts=(16, 64, 256, 1024),
    chains=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 17, 20, 24, 32, 33, 48, 64),
    trees=(2, 4, 8, 16, 17, 32, 33, 64),
)
"""Points of a full probe, limited to contexts that the models support. 16 nodes and the root are 17
rows, and the 17th row costs more than the 16th."""

CHAIN_LENGTH = 8
"""Length of drafts that cost nothing to make."""

PLAIN, TREE_DRAFTS = ("plain", "chains", "vanilla", "sps"), ("sps-tree",)
"""Methods whose sessions give the host costs of a draft model's chains, and of its trees."""

OUTLIER_RANGE = 3.0
"""Interquartile ranges beyond which a time is an outlier (Tukey's outer fence, 1977)."""

ROUNDS = 24
MAX_NOISY_SHARE = 0.1
"""Share of noisy rounds above which a probe has no result."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    curves: dict[str, CostCurve]
    host: HostCost
    hosts: dict[str, HostCost]
    batch: BatchCost | None
    quietness: ProbeNoise

    @property
    def too_noisy(self) -> bool:
        """Return True if too many rounds were noisy to store the costs."""
        return self.quietness.void > MAX_NOISY_SHARE * self.quietness.rounds


class QuietSamples(NamedTuple):
    """Times of all quiet rounds, and the noise of the probe."""

    samples: ProbeSamples
    quietness: ProbeNoise


class PromptChain:
    """Drafter that proposes the first tokens of the prompt, at no cost."""

    def __init__(self, length: int) -> None:
        self._length = length

    def start(self, session: Session) -> None:
        """Prepare nothing."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the first tokens of the prompt as a chain."""
        return session.chain(session.tokens()[: min(self._length, limit)])

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Learn nothing."""


class ProbeSeries:
    """Rounds of a probe, measured one at a time after a warm-up round.

    Args:
        windows: Measurement windows of the rounds. Noisy rounds are left out.
        decodings: Functions that decode the sessions for host times, by name.
        prompts: Token ids that sessions and batches decode. Random by default.
        together: Functions that decode batches, by name.
        sampling: Sampling settings of whole steps.

    Attributes:
        warm_up_s: Seconds of the first round.

    Raises:
        UsageError: a model supports chains only.
    """

    def __init__(
        self,
        workspace: Workspace,
        windows: MeasurementWindows,
        session_decodings: Mapping[str, SessionDecoding],
        grid: ProbeGrid,
        *,
        seed: int,
        prompts: Sequence[Sequence[int]] = (),
        batch_decodings: Mapping[str, BatchDecoding] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        if chain_only := [each.name for each in workspace.decoders.values() if not each.trees]:
            raise UsageError(
                f"forwards of {' and '.join(chain_only)} cannot be measured:"
                " they take chains alone, and what is measured are trees too",
                "give numbers in place of auto, and predict for a pair of decoders with attention",
            )
        longest = max(grid.contexts)
        most = max([PROMPT_LENGTH, *map(len, prompts)])
        workspace.reserve(max(longest + grid.spare, most + NEW_TOKENS))
        models = (*workspace.decoders.values(), *workspace.heads.values())
        vocabulary = min(model.vocab_size for model in models)
        width = max(longest, PROMPT_LENGTH, grid.spare)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, width), generator=generator)
        texts = prompts or [ids[0, :PROMPT_LENGTH].tolist()]
        self._windows, self._seed = windows, seed
        self._round = partial(
            ProbeRound,
            workspace,
            grid,
            session_decodings,
            ids,
            texts,
            batch_decodings=batch_decodings,
            sampling=sampling,
        )
        self._rounds: list[ProbeRound] = []
        began = time.monotonic()
        # Warm up, so that lazy set-up, caches and clock rates do not affect the timed rounds.
        self._round(seed=seed).measure()
        self.warm_up_s = time.monotonic() - began

    def measure_round(self) -> None:
        """Measure one more round."""
        self._rounds.append(self._round(seed=self._seed + len(self._rounds) + 1))
        self._windows.run(self._rounds[-1])

    def quiet_samples(self) -> QuietSamples | None:
        """Return the times so far; None if no round was quiet."""
        self._windows.close()
        kept = [one for one in self._rounds if not one.noisy]
        if not kept:
            return None
        samples = ProbeSamples()
        for one in kept:
            samples.add(one.samples)
        shares = [one.other_cpu for one in kept if one.other_cpu is not None]
        return QuietSamples(
            samples,
            ProbeNoise(
                rounds=len(self._rounds),
                void=len(self._rounds) - len(kept),
                other_cpu=max(shares, default=None),
                noisy=any(share > NOISE_LIMIT for share in shares),
            ),
        )


class Probe:
    """Probe of all decoders and heads of a workspace. "target" verifies, all others draft.

    Args:
        windows: Measurement windows of the rounds. Noisy rounds are left out.
        drafting: Functions that decode sessions of drafting methods, by method and parameters.
        positions: Maximum number of positions of all models.
        prompts: Token ids that sessions and batches decode. Random by default.
        batches: Batch sizes.
        together: Functions that decode batches, by name.

    Raises:
        UsageError: the context of the models is too short, or a model supports chains only.
    """

    def __init__(
        self,
        workspace: Workspace,
        windows: MeasurementWindows,
        session_decodings: Mapping[str, SessionDecoding],
        *,
        positions: int,
        prompts: Sequence[Sequence[int]] = (),
        grid: ProbeGrid = FULL_GRID,
        batches: tuple[int, ...] = (),
        batch_decodings: Mapping[str, BatchDecoding] | None = None,
        seed: int = 0,
    ) -> None:
        contexts = tuple(context for context in grid.contexts if context + grid.spare <= positions)
        if not contexts:
            raise UsageError(
                f"models with {positions} positions cannot be probed: it takes"
                f" {grid.contexts[0] + grid.spare}",
                "choose another --target or --draft (see: specbench list models)",
            )
        decodings: dict[str, SessionDecoding] = {
            "plain steps": partial(draft_and_verify, PromptChain(0)),
            f"chains of {CHAIN_LENGTH}": partial(draft_and_verify, PromptChain(CHAIN_LENGTH)),
            **session_decodings,
        }
        self._workspace, self._batches = workspace, batches
        self._series = ProbeSeries(
            workspace,
            windows,
            decodings,
            replace(grid, contexts=contexts, batches=batches),
            seed=seed,
            prompts=[prompt for prompt in prompts if len(prompt) + NEW_TOKENS <= positions],
            batch_decodings=batch_decodings,
        )

    def measure_round(self) -> None:
        """Measure every point once more."""
        self._series.measure_round()

    def result(self) -> ProbeResult | None:
        """Return the costs from all rounds so far; None if no round was quiet."""
        found = self._series.quiet_samples()
        if found is None:
            return None
        lines = _fit_host_costs(found.samples)
        lone = build_curves(found.samples, self._workspace)
        return ProbeResult(
            curves=lone,
            host=lines.pop(""),
            hosts=lines,
            batch=_fit_batch_cost(found.samples, lone) if self._batches else None,
            quietness=found.quietness,
        )


def build_curves(samples: ProbeSamples, workspace: Workspace) -> dict[str, CostCurve]:
    """Return the curve of each model, the target first."""
    return {name: _build_curve(name, samples) for name in (*workspace.decoders, *workspace.heads)}


def _build_curve(model: str, samples: ProbeSamples) -> CostCurve:
    points: dict[str, list[CostPoint]] = {"prefills": [], "forwards": [], "trees": [], "lone": []}
    for at, times in sorted(samples.forwards.items()):
        if at.model == model:
            ns, spread = _trimmed_mean(times)
            point = CostPoint(
                n_tokens=at.n_tokens,
                context=at.context,
                ns=ns,
                spread=spread,
                samples=len(times),
            )
            kind = "lone" if at.lone else "trees" if at.tree else "forwards"
            points[kind if at.context else "prefills"].append(point)
    return CostCurve.model_validate(points)


def _fit_host_costs(samples: ProbeSamples) -> dict[str, HostCost]:
    """Return host costs: "" for chains of a draft model or none, TREES for its trees, others by
    method."""
    points: dict[str, list[HostPoint]] = {}
    for name, sessions in samples.hosts.items():
        ns, spread = _trimmed_mean([session.ns for session in sessions])
        point = HostPoint(
            name=name,
            drafts=mean(session.drafts for session in sessions),
            nodes=mean(session.nodes for session in sessions),
            ns=ns,
            spread=spread,
            samples=len(sessions),
        )
        method = name.partition(" ")[0]
        of = "" if method in PLAIN else TREES if method in TREE_DRAFTS else method
        points.setdefault(of, []).append(point)
    lines = {of: _fit_host_cost(some) for of, some in points.items() if of in ("", TREES)}
    for of, some in points.items():
        if of in lines:
            continue
        trees = any(session.trees for point in some for session in samples.hosts[point.name])
        base = lines.get(TREES if trees else "", lines[""])
        lines[of] = _fit_host_cost(some) if len(some) > 2 else _scale_host_cost(base, some)
    return lines


def _fit_host_cost(points: Iterable[HostPoint]) -> HostCost:
    """Fit host costs to points."""
    points = tuple(points)
    step, draft, node = _fit_shares(points, [(1.0, at.drafts, at.nodes) for at in points])
    return HostCost(step=step, draft=draft, node=node, points=points)


def _scale_host_cost(base: HostCost, points: Sequence[HostPoint]) -> HostCost:
    """Return host costs for too few points: the slopes of `base`, and a step cost that fits the
        points.

    If the slopes alone exceed the points, they are scaled down.
    """
    took = mean(at.ns for at in points)
    slopes = mean(base.draft * at.drafts + base.node * at.nodes for at in points)
    share = min(1.0, took / slopes) if slopes else 0.0
    return HostCost(
        step=max(0.0, took - slopes),
        draft=share * base.draft,
        node=share * base.node,
        points=tuple(points),
    )


def _fit_shares(
    points: Sequence[HostPoint | BatchPoint], loads: Sequence[tuple[float, ...]]
) -> list[float]:
    """Fit the non-negative cost of each part of a load. Relative errors are minimized, so that
    large batches do not dominate."""
    from scipy.optimize import nnls

    ns = np.array([max(point.ns, 1.0) for point in points])
    found, _ = nnls(np.array(loads) / ns[:, None], np.ones(len(points)))
    shares: list[float] = found.tolist()
    return shares


def _fit_batch_cost(samples: ProbeSamples, lone: Mapping[str, CostCurve]) -> BatchCost:
    """Fit the time of further sequences in shared forwards, and the host costs of batches."""
    left: dict[str, dict[tuple[int, int], list[float]]] = {}
    for model, n, rows, ns, context in samples.shared:
        if n > 1:
            more = ns - lone[model].ns(rows, context)
            left.setdefault(model, {}).setdefault((n - 1, rows), []).append(more)
    beside = {}
    for model, found in left.items():
        further = np.array([n for n, _ in found], dtype=float)
        added = np.array([_trimmed_mean(times)[0] for times in found.values()])
        beside[model] = max(0.0, float(further @ added / (further @ further)))
    points = tuple(
        BatchPoint(
            name=name,
            sequences=n,
            drafts=mean(batch.drafts for batch in batches),
            nodes=mean(batch.nodes for batch in batches),
            ns=_trimmed_mean([batch.ns for batch in batches])[0],
            samples=len(batches),
        )
        for (name, n), batches in sorted(samples.batches.items())
    )
    step, sequence, draft, node = _fit_shares(
        points, [(1.0, at.sequences, at.drafts, at.nodes) for at in points]
    )
    return BatchCost(
        most=max(at.sequences for at in points),
        beside=beside,
        step=step,
        sequence=sequence,
        draft=draft,
        node=node,
        points=points,
    )


def _trimmed_mean(times: Sequence[float]) -> tuple[float, float]:
    """Return the mean without outliers, and the interquartile range as a share of the median."""
    low, middle, high = np.percentile(times, (25, 50, 75)).tolist()
    reach = OUTLIER_RANGE * (high - low)
    return (
        mean(each for each in times if low - reach <= each <= high + reach),
        (high - low) / middle if middle else 0.0,
    )

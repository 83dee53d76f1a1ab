"""The cost probe: what forwards and the host's work between them cost on this machine.

Rounds (`probe_rounds`) are measured while a noise meter runs. A time is the mean over all quiet
rounds, without outliers. A median would be biased: times are skewed to the right, and the total
time of a run contains the long ones too.

The host's time is that of real sessions: plain steps, chains that cost nothing to draft, and the
drafting methods that are handed in. Decode time less forwards, divided by steps, is fitted by
non-negative least squares to a + b (draft forwards) + c (drafted tokens): one line for chains, one
for each model that drafts trees, one for each head. Sessions are greedy: what sampling adds
(temperature, cuts, noise) is not in it, nor what a method does that was not handed in.

Where batches are probed, further sequences of a forward cost what is left, by least squares, once
the curve's time for as many rows of one is taken off; the host's time of their steps is fitted as
that of sessions, with the number of sequences.
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
    CostPoint,
    Curve,
    HostCost,
    HostPoint,
    ProbeNoise,
)
from specbench_cli.measure.probe_rounds import (
    NEW_TOKENS,
    PROMPT,
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
"""What is kept of a machine; contexts are those that the models have room for. 16 nodes are 17 rows
with their root, and a 17th row costs more than a 16th."""

CHAIN_LENGTH = 8
"""Tokens of the drafts that cost nothing to make."""

PLAIN, TREE_DRAFTS = ("plain", "chains", "vanilla", "sps"), ("sps-tree",)
"""Whose sessions make the line of chains, and that of trees, of a draft model."""

OUTLIER_RANGE = 3.0
"""Interquartile ranges beyond which a time is another's doing (Tukey's outer fence, 1977)."""

ROUNDS = 24
MAX_NOISY_SHARE = 0.1
"""Of a probe's rounds; if noise took more there are no costs."""


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found."""

    curves: dict[str, Curve]
    host: HostCost
    hosts: dict[str, HostCost]
    batch: BatchCost | None
    quietness: ProbeNoise

    @property
    def too_noisy(self) -> bool:
        """Whether noise took so many rounds that these are no costs to keep."""
        return self.quietness.void > MAX_NOISY_SHARE * self.quietness.rounds


class QuietSamples(NamedTuple):
    """The times of all rounds that were quiet, and how quiet they were."""

    samples: ProbeSamples
    quietness: ProbeNoise


class PromptChain:
    """Drafts prompt tokens: as many as asked for, at no cost."""

    def __init__(self, length: int) -> None:
        self._length = length

    def start(self, session: Session) -> None:
        """Nothing to get ready."""

    def propose(self, session: Session, limit: int) -> Draft:
        """The first tokens of the prompt."""
        return session.chain(session.tokens()[: min(self._length, limit)])

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Nothing to learn."""


class ProbeSeries:
    """Rounds of a grid, one at a time, after one that warms up.

    Args:
        windows: who measures the rounds; rounds that it finds void are left out.
        decodings: by name, what decodes the sessions that time the host.
        prompts: ids that sessions and batches decode; by default random ones.
        together: by name, methods that decode batches.
        sampling: of steps that are timed as a whole.

    Attributes:
        warm_up_s: seconds that the first round took.

    Raises:
        UsageError: a model takes chains alone.
    """

    def __init__(
        self,
        workspace: Workspace,
        windows: MeasurementWindows,
        decodings: Mapping[str, SessionDecoding],
        grid: ProbeGrid,
        *,
        seed: int,
        prompts: Sequence[Sequence[int]] = (),
        together: Mapping[str, BatchDecoding] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        if chain_only := [each.name for each in workspace.decoders.values() if not each.trees]:
            raise UsageError(
                f"forwards of {' and '.join(chain_only)} cannot be measured:"
                " they take chains alone, and what is measured are trees too",
                "give numbers in place of auto, and predict for a pair of decoders with attention",
            )
        longest = max(grid.contexts)
        most = max([PROMPT, *map(len, prompts)])
        workspace.reserve(max(longest + grid.spare, most + NEW_TOKENS))
        models = (*workspace.decoders.values(), *workspace.heads.values())
        vocabulary = min(model.vocab_size for model in models)
        width = max(longest, PROMPT, grid.spare)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, width), generator=generator)
        texts = prompts or [ids[0, :PROMPT].tolist()]
        self._windows, self._seed = windows, seed
        self._round = partial(
            ProbeRound, workspace, grid, decodings, ids, texts, together=together, sampling=sampling
        )
        self._rounds: list[ProbeRound] = []
        began = time.monotonic()
        # Lazy set-up, caches and clocks are afterwards as they will be.
        self._round(seed=seed).measure()
        self.warm_up_s = time.monotonic() - began

    def measure_round(self) -> None:
        """Measure a round more."""
        self._rounds.append(self._round(seed=self._seed + len(self._rounds) + 1))
        self._windows.run(self._rounds[-1])

    def quiet_samples(self) -> QuietSamples | None:
        """The times so far; None if no round was quiet."""
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
    """Measures all decoders and heads of a workspace, a round at a time; "target" verifies, every
    other one drafts.

    Args:
        windows: who measures the rounds; rounds that it finds void are left out.
        drafting: by name, of a method and what sets it apart, what decodes sessions that tell what
            drafting costs the host.
        positions: rows that all models are made for.
        prompts: ids that sessions and batches decode; by default random ones.
        batches: sequences that are decoded together; together: by name, methods that decode them.

    Raises:
        UsageError: the models' context is too short, or one of them takes chains alone.
    """

    def __init__(
        self,
        workspace: Workspace,
        windows: MeasurementWindows,
        drafting: Mapping[str, SessionDecoding],
        *,
        positions: int,
        prompts: Sequence[Sequence[int]] = (),
        grid: ProbeGrid = FULL_GRID,
        batches: tuple[int, ...] = (),
        together: Mapping[str, BatchDecoding] | None = None,
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
            **drafting,
        }
        self._workspace, self._batches = workspace, batches
        self._series = ProbeSeries(
            workspace,
            windows,
            decodings,
            replace(grid, contexts=contexts, batches=batches),
            seed=seed,
            prompts=[prompt for prompt in prompts if len(prompt) + NEW_TOKENS <= positions],
            together=together,
        )

    def measure_round(self) -> None:
        """Measure every point once more."""
        self._series.measure_round()

    def result(self) -> ProbeResult | None:
        """The costs, by all rounds so far; None if no round was quiet."""
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


def build_curves(samples: ProbeSamples, workspace: Workspace) -> dict[str, Curve]:
    """Each model's, the target's first."""
    return {name: _build_curve(name, samples) for name in (*workspace.decoders, *workspace.heads)}


def _build_curve(model: str, samples: ProbeSamples) -> Curve:
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
    return Curve.model_validate(points)


def _fit_host_costs(samples: ProbeSamples) -> dict[str, HostCost]:
    """The host's lines: "" of chains of a draft model, or none, TREES of its trees, and of each
    other method its own."""
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
    """The line through points."""
    points = tuple(points)
    step, draft, node = _fit_shares(points, [(1.0, at.drafts, at.nodes) for at in points])
    return HostCost(step=step, draft=draft, node=node, points=points)


def _scale_host_cost(base: HostCost, points: Sequence[HostPoint]) -> HostCost:
    """A line through too few points: another one's slopes, and what a step takes more than these
    say, or as much less of them."""
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
    """What each part of a load takes, none below 0, of points' times; errors count as shares of
    these, so that many sequences do not say what one takes."""
    from scipy.optimize import nnls

    ns = np.array([max(point.ns, 1.0) for point in points])
    found, _ = nnls(np.array(loads) / ns[:, None], np.ones(len(points)))
    shares: list[float] = found.tolist()
    return shares


def _fit_batch_cost(samples: ProbeSamples, lone: Mapping[str, Curve]) -> BatchCost:
    """What is left of shared forwards' times, for each further sequence; and the host's plane."""
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
    """The mean of what lies within `FAR` interquartile ranges of the quartiles, and that range as a
    share of the median."""
    low, middle, high = np.percentile(times, (25, 50, 75)).tolist()
    reach = OUTLIER_RANGE * (high - low)
    return (
        mean(each for each in times if low - reach <= each <= high + reach),
        (high - low) / middle if middle else 0.0,
    )

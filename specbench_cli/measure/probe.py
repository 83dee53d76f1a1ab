"""Cost probe: measures the times of forwards, and of the host work between them, on this machine.

Forwards: a round (`probe_rounds`) times every forward once. The result is the mean over all rounds
that other programs did not disturb. Only times far outside the quartiles are dropped
(`_trimmed_mean`). Other long times are kept, because a run contains them too, and a median would
ignore them.

Host work: real prompts are decoded with several methods. The decode time without the forwards,
divided by the number of steps, is the host time of a step. It is modelled as a + b * (number of
draft forwards) + c * (number of drafted tokens). Non-negative least squares fits a, b and c.
Chains, trees and heads are fitted
separately. Decoding is greedy, so the cost of sampling is not included.

Batches: a forward over several sequences takes longer than a forward over one sequence with as many
tokens. A fit by least squares predicts this difference from the number of sequences. Host times of
batches are fitted like other host times, with the number of sequences as another variable.
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
"""Forwards of a full probe. Contexts that the models do not support are left out. A tree with 16
nodes and its root has 17 tokens. The step from 16 to 17 tokens costs more than others."""

CHAIN_LENGTH = 8
"""Length of the chains that a probe drafts at no cost, by copying the prompt."""

PLAIN, TREE_DRAFTS = ("plain", "chains", "vanilla", "sps"), ("sps-tree",)
"""Names of the decodings from which the host costs of chains, and of trees, are fitted."""

OUTLIER_RANGE = 3.0
"""A time is an outlier if it is this many interquartile ranges outside the quartiles (Tukey's outer
fence, 1977)."""

ROUNDS = 24
"""Number of rounds of a full probe."""
MAX_NOISY_SHARE = 0.1
"""If a larger share of the rounds is noisy, the costs are not stored."""


@dataclass(frozen=True)
class ProbeResult:
    """Costs that a probe measured, without facts about machine and models.

    The attributes have the same names and meanings as those of `Costs`.
    """

    curves: dict[str, CostCurve]
    host: HostCost
    hosts: dict[str, HostCost]
    batch: BatchCost | None
    quietness: ProbeNoise

    @property
    def too_noisy(self) -> bool:
        """True if too many rounds were noisy, so that the costs must not be stored."""
        return self.quietness.void > MAX_NOISY_SHARE * self.quietness.rounds


class QuietSamples(NamedTuple):
    """Times of all rounds that other programs did not disturb, and facts about this noise."""

    samples: ProbeSamples
    quietness: ProbeNoise


class PromptChain:
    """Drafter that drafts without computing: it proposes the first tokens of the prompt.

    Args:
        length: Number of draft tokens.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def start(self, session: Session) -> None:
        """Do nothing, because this drafter needs no preparation."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the first tokens of the prompt as a chain of draft tokens."""
        return session.chain(session.tokens()[: min(self._length, limit)])

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Do nothing, because this drafter does not learn."""


class ProbeSeries:
    """Series of probe rounds. Creating this object runs a warm-up round, whose times are discarded.

    Args:
        workspace: Decoders, heads and states.
        windows: Measurement windows, which detect disturbances by other programs. Disturbed rounds
            are not used.
        session_decodings: Functions that decode a prompt to measure host times, by name.
        grid: Forwards and batch sizes to measure.
        seed: Random seed for the order of measurements.
        prompts: Token ids of the prompts to decode. Default: one random prompt.
        batch_decodings: Functions that decode a batch of prompts, by name.
        sampling: Sampling settings for the timing of whole steps (`ProbeGrid.steps`).

    Attributes:
        warm_up_s: Duration of the warm-up round in seconds.

    Raises:
        UsageError: a model does not support draft trees.
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
                f"forwards of {' and '.join(chain_only)} cannot be measured: these models do not"
                " support trees, which a probe measures too",
                "set numbers instead of auto; specbench predict needs models with attention",
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
        # Run a warm-up round, so that lazy initialization, cold caches and low clock rates do not
        # affect the measured times.
        self._round(seed=seed).measure()
        self.warm_up_s = time.monotonic() - began

    def measure_round(self) -> None:
        """Measure one more round of the probe."""
        self._rounds.append(self._round(seed=self._seed + len(self._rounds) + 1))
        self._windows.run(self._rounds[-1])

    def quiet_samples(self) -> QuietSamples | None:
        """Return the times of all quiet rounds so far. Return None if all rounds were noisy."""
        self._windows.close()
        quiet = [each for each in self._rounds if not each.noisy]
        if not quiet:
            return None
        samples = ProbeSamples()
        for each in quiet:
            samples.add(each.samples)
        shares = [each.other_cpu for each in quiet if each.other_cpu is not None]
        return QuietSamples(
            samples,
            ProbeNoise(
                rounds=len(self._rounds),
                void=len(self._rounds) - len(quiet),
                other_cpu=max(shares, default=None),
                noisy=any(share > NOISE_LIMIT for share in shares),
            ),
        )


class Probe:
    """Probe that measures the costs of all models and heads in a workspace.

    The model "target" verifies. All other models and heads draft.

    Args:
        workspace: Decoders, heads and states.
        windows: Measurement windows, which detect disturbances by other programs. Disturbed rounds
            are not used.
        session_decodings: Functions that decode a prompt with a method. The keys are names of
            methods with parameters.
        positions: Maximum number of positions that all models support.
        prompts: Token ids of the prompts to decode. Default: one random prompt.
        grid: Forwards to measure.
        batches: Batch sizes to measure. Empty measures single sequences only.
        batch_decodings: Functions that decode a batch of prompts, by name.
        seed: Random seed for the order of measurements.

    Raises:
        UsageError: the context of the models is too short, or a model does not support draft
            trees.
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
                f"models with {positions} positions cannot be probed: a probe needs"
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
        """Measure one more round of the probe."""
        self._series.measure_round()

    def result(self) -> ProbeResult | None:
        """Return the costs from all rounds so far. Return None if all rounds were noisy."""
        found = self._series.quiet_samples()
        if found is None:
            return None
        host_costs = _fit_host_costs(found.samples)
        curves = build_curves(found.samples, self._workspace)
        return ProbeResult(
            curves=curves,
            host=host_costs.pop(""),
            hosts=host_costs,
            batch=_fit_batch_cost(found.samples, curves) if self._batches else None,
            quietness=found.quietness,
        )


def build_curves(samples: ProbeSamples, workspace: Workspace) -> dict[str, CostCurve]:
    """Return the forward times of each model and head. The target is first."""
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
    """Return the host costs of the kinds of steps, by key.

    The key "" has the costs of steps without a draft, and of steps in which the draft model drafts
    a chain. The key `TREES` has the costs of steps in which the draft model drafts a tree. The
    other keys are names of methods.
    """
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
        key = "" if method in PLAIN else TREES if method in TREE_DRAFTS else method
        points.setdefault(key, []).append(point)
    costs = {key: _fit_host_cost(own) for key, own in points.items() if key in ("", TREES)}
    for key, own in points.items():
        if key in costs:
            continue
        trees = any(session.trees for point in own for session in samples.hosts[point.name])
        base = costs.get(TREES if trees else "", costs[""])
        costs[key] = _fit_host_cost(own) if len(own) > 2 else _scale_host_cost(base, own)
    return costs


def _fit_host_cost(points: Iterable[HostPoint]) -> HostCost:
    """Fit the coefficients of the host time to measured points.

    The coefficients are the times per step, per draft forward and per drafted token.
    """
    points = tuple(points)
    step, draft, node = _fit_shares(points, [(1.0, at.drafts, at.nodes) for at in points])
    return HostCost(step=step, draft=draft, node=node, points=points)


def _scale_host_cost(base: HostCost, points: Sequence[HostPoint]) -> HostCost:
    """Return host costs for a method that has too few measured points for a fit.

    The costs per draft forward and per token are those of `base`. The cost per step is chosen to
    match the mean of the points. If the other costs alone exceed this mean, they are reduced.

    Args:
        base: Host costs of another method.
        points: Measured host times of the method.
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
    """Fit the cost per unit of each kind of work, at least 0.

    The fit minimizes relative errors, so that large batches do not dominate it.

    Args:
        points: Measured host times.
        loads: Units of each kind of work in a step, for each point. A unit is, for example, a draft
            forward.
    """
    from scipy.optimize import nnls

    ns = np.array([max(point.ns, 1.0) for point in points])
    found, _ = nnls(np.array(loads) / ns[:, None], np.ones(len(points)))
    shares: list[float] = found.tolist()
    return shares


def _fit_batch_cost(samples: ProbeSamples, curves: Mapping[str, CostCurve]) -> BatchCost:
    """Fit the time that each sequence after the first adds to a step of a batch.

    Args:
        samples: Measured times of a probe.
        curves: Forward times of single sequences, by model.
    """
    added_ns: dict[str, dict[tuple[int, int], list[float]]] = {}
    for model, n, rows, ns, context in samples.shared:
        if n > 1:
            difference = ns - curves[model].ns(rows, context)
            added_ns.setdefault(model, {}).setdefault((n - 1, rows), []).append(difference)
    ns_per_sequence = {}
    for model, found in added_ns.items():
        further = np.array([n for n, _ in found], dtype=float)
        added = np.array([_trimmed_mean(times)[0] for times in found.values()])
        ns_per_sequence[model] = max(0.0, float(further @ added / (further @ further)))
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
        beside=ns_per_sequence,
        step=step,
        sequence=sequence,
        draft=draft,
        node=node,
        points=points,
    )


def _trimmed_mean(times: Sequence[float]) -> tuple[float, float]:
    """Return the mean of times without outliers, and their spread.

    The spread is the interquartile range divided by the median.
    """
    low, middle, high = np.percentile(times, (25, 50, 75)).tolist()
    reach = OUTLIER_RANGE * (high - low)
    return (
        mean(each for each in times if low - reach <= each <= high + reach),
        (high - low) / middle if middle else 0.0,
    )

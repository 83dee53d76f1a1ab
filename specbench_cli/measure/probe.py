"""The cost probe: what forwards and the host's work between them cost on this machine.

A round visits every context length and there every number of new tokens, in a seeded random order,
so that a drift of the machine falls on all points alike. A visit is what a step of speculative
sampling does: some forwards of a draft model (the first over the 1 to 3 tokens that it has not
seen), then the target's, whose weights the draft has pushed out of the caches, then one transfer of
the decision to the host. States, decoders and clocks are those of a run. Prefills are timed where a
context is built up. Times are medians over all rounds that were quiet.

The host's time is that of real sessions: plain steps, chains that cost nothing to draft, and the
drafting methods that are handed in. Decode time less forwards, divided by steps, is fitted by
non-negative least squares to a + b (draft forwards) + c (drafted tokens). Sessions are greedy:
what sampling adds (temperature, cuts, noise) is not in it, nor what a method does of its own.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from specbench_cli.engine.loop import draft_and_verify
from specbench_cli.engine.meter import Meter, Metered
from specbench_cli.engine.sampling import Sampling
from specbench_cli.engine.session import Request, Session
from specbench_cli.engine.stop import StopRule
from specbench_cli.engine.types import Draft, Outcome, Step, Tokens
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import Curve, HostCost, HostPoint, Point, Quietness
from specbench_cli.measure.quiet import CEILING

GRID = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""New tokens of a target forward."""

CONTEXTS = (16, 64, 256, 1024)
"""Rows before them; those that the models' context has room for."""

CATCH_UP = (1, 2, 3)
"""New tokens of a draft model's first forward in a step."""

DRAFTED = 4
"""Draft forwards of a visit."""

CHAIN = 8
"""Tokens of the drafts that cost nothing to make."""

PROMPT, NEW_TOKENS = 64, 24
"""Of the sessions that time the host."""

ROUNDS = 24

_STRIDE = len(GRID)  # rows that the visits to a context keep: one each, as if all was rejected

Decoding = Callable[[Session], Iterable[Step]]
"""What decodes a session: a method's `generate`."""


class Windows(Protocol):
    """Has rounds measured while it watches the machine, again if need be."""

    def run(self, cell: Round) -> None:
        """Measure a round now, and perhaps again later."""

    def settle(self) -> None:
        """Decide on what is not decided yet."""


class HostSample(NamedTuple):
    """A session: its draft forwards, drafted tokens and host ns, all per step."""

    drafts: float
    nodes: float
    ns: float


@dataclass
class Samples:
    """Times in ns. forwards: by (model, context, new tokens), context 0 being a prefill."""

    forwards: dict[tuple[str, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    hosts: dict[str, list[HostSample]] = field(default_factory=lambda: defaultdict(list))

    def add(self, other: Samples) -> None:
        """Take in another round's."""
        for key, times in other.forwards.items():
            self.forwards[key] += times
        for name, sessions in other.hosts.items():
            self.hosts[name] += sessions


@dataclass(frozen=True)
class Measured:
    """What a probe found."""

    curves: dict[str, Curve]
    host: HostCost
    quietness: Quietness


class Chain:
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


class Round:
    """All points once, in an order of its own.

    Args:
        ids: [1, n] tokens of the forwards and, the first of them, prompt of the sessions.
        seed: of the order.

    Attributes:
        samples: the last measurement.
        other_cpu, void: the window's verdict, once it is settled.
    """

    def __init__(
        self,
        workspace: Workspace,
        contexts: Sequence[int],
        decodings: Mapping[str, Decoding],
        ids: Tensor,
        seed: int,
    ) -> None:
        self._workspace = workspace
        self._device = workspace.decoders["target"].device
        self._drafters = [role for role in workspace.decoders if role != "target"]
        self._contexts = contexts
        self._decodings = decodings
        self._ids = ids.to(self._device)
        self._prompt = tuple(ids[0, :PROMPT].tolist())
        self._seed = seed
        self.samples = Samples()
        self.other_cpu: float | None = None
        self.void = False

    def measure(self) -> None:
        """Time everything once; a later call replaces the earlier times."""
        rng = random.Random(self._seed)
        self.samples = Samples()
        gc.collect()
        gc.disable()
        try:
            for context in rng.sample(self._contexts, len(self._contexts)):
                self._visit(context, rng)
            for name in rng.sample(list(self._decodings), len(self._decodings)):
                self.samples.hosts[name].append(self._session(self._decodings[name]))
        finally:
            gc.enable()

    def settle(self, other_cpu: float | None, void: bool) -> None:
        """Take the window's verdict."""
        self.other_cpu, self.void = other_cpu, void

    def _visit(self, context: int, rng: random.Random) -> None:
        """The forwards after `context` rows, on average."""
        meter = Meter(self._device)
        models = {
            role: Metered(decoder, meter, role="verify" if role == "target" else "draft")
            for role, decoder in self._workspace.decoders.items()
        }
        states = {
            role: self._workspace.state(decoder, 0, 0)
            for role, decoder in self._workspace.decoders.items()
        }
        prompt = Tokens(self._ids[:, :context])
        for role in self._drafters:
            models[role].forward(prompt, states[role], logits_at=None)
        models["target"].forward(prompt, states["target"])
        state = states["target"]
        state.commit(0, range(context))
        state.truncate(0, context - _STRIDE // 2)
        for place, n in enumerate(rng.sample(GRID, len(GRID))):
            if self._drafters:
                role = self._drafters[place % len(self._drafters)]
                unseen = rng.choice(CATCH_UP)
                states[role].truncate(0, state.length() + 1 - unseen)
                x = Tokens(self._ids[:, :unseen])
                for _ in range(DRAFTED):
                    out = models[role].forward(x, states[role])
                    x = Tokens(cast(Tensor, out.logits)[:, -1].argmax(-1)[None])
            out = models["target"].forward(Tokens(self._ids[:, :n]), state, logits_at="all")
            cast(Tensor, out.logits)[0].argmax(-1).tolist()
            state.commit(0, (0,))
        meter.resolve()
        for f in meter.forwards:
            key = f.model, 0 if f.role == "prefill" else context, f.n_tokens
            self.samples.forwards[key].append(f.t1_ns - f.t0_ns)

    def _session(self, decoding: Decoding) -> HostSample:
        request = Request("probe", 1, self._prompt, StopRule(frozenset(), NEW_TOKENS))
        session = Session(self._workspace, request, Sampling())
        steps = list(decoding(session))
        session.meter.resolve()
        forwards = [f for f in session.meter.forwards if f.role != "prefill"]
        busy = sum(f.t1_ns - f.t0_ns for f in forwards)
        drafts = sum(f.model != "target" for f in forwards)
        nodes = sum(step.draft.nodes for step in steps if step.draft)
        host = max(0, session.last_ns - session.first_ns - busy)
        return HostSample(drafts / len(steps), nodes / len(steps), host / len(steps))


def probe(
    workspace: Workspace,
    windows: Windows,
    drafting: Mapping[str, Decoding],
    *,
    positions: int,
    seed: int = 0,
    rounds: int = ROUNDS,
    progress: Callable[[int], None] = lambda done: None,
) -> Measured | None:
    """Measure all decoders of a workspace; "target" verifies, every other one drafts.

    Args:
        windows: who measures the rounds; rounds that it finds void are left out.
        drafting: by name, methods whose sessions tell what drafting costs the host.
        positions: rows that all models are made for.
        progress: told the rounds done, between rounds.

    Returns:
        The costs; None if no round was quiet.

    Raises:
        UsageError: the models' context is too short.
    """
    contexts = [context for context in CONTEXTS if context + _STRIDE + GRID[-1] <= positions]
    if not contexts:
        raise UsageError(
            f"models with {positions} positions cannot be probed: it takes"
            f" {CONTEXTS[0] + _STRIDE + GRID[-1]}",
            "choose another --target or --draft (see: specbench list models)",
        )
    workspace.reserve(max(contexts[-1] + _STRIDE + GRID[-1], PROMPT + NEW_TOKENS))
    decodings: dict[str, Decoding] = {
        "plain steps": partial(draft_and_verify, Chain(0)),
        f"chains of {CHAIN}": partial(draft_and_verify, Chain(CHAIN)),
        **drafting,
    }
    vocabulary = min(decoder.vocab_size for decoder in workspace.decoders.values())
    width = max(contexts[-1], PROMPT, GRID[-1])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (1, width), generator=generator)
    first, *all_rounds = (
        Round(workspace, contexts, decodings, ids, seed + number) for number in range(rounds + 1)
    )
    first.measure()  # lazy set-up, caches and clocks are then as they will be
    for done, one in enumerate(all_rounds, start=1):
        windows.run(one)
        progress(done)
    windows.settle()
    kept = [one for one in all_rounds if not one.void]
    samples = Samples()
    for one in kept:
        samples.add(one.samples)
    if not kept:
        return None
    shares = [one.other_cpu for one in kept if one.other_cpu is not None]
    return Measured(
        curves={role: _curve(role, samples) for role in workspace.decoders},
        host=_host(samples),
        quietness=Quietness(
            rounds=rounds,
            void=rounds - len(kept),
            other_cpu=max(shares, default=None),
            noisy=any(share > CEILING for share in shares),
        ),
    )


def _curve(model: str, samples: Samples) -> Curve:
    points = [
        Point(n_tokens=n, context=context, ns=ns, spread=spread, samples=len(times))
        for (name, context, n), times in sorted(samples.forwards.items())
        if name == model
        for ns, spread in [_median(times)]
    ]
    return Curve(
        forwards=tuple(point for point in points if point.context),
        prefills=tuple(point for point in points if not point.context),
    )


def _host(samples: Samples) -> HostCost:
    points = []
    for name, sessions in samples.hosts.items():
        ns, spread = _median([session.ns for session in sessions])
        points.append(
            HostPoint(
                name=name,
                drafts=mean(session.drafts for session in sessions),
                nodes=mean(session.nodes for session in sessions),
                ns=ns,
                spread=spread,
                samples=len(sessions),
            )
        )
    loads = np.array([[1.0, point.drafts, point.nodes] for point in points])
    (step, draft, node), _ = nnls(loads, np.array([point.ns for point in points]))
    return HostCost(step=step, draft=draft, node=node, points=tuple(points))


def _median(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the interquartile range as a share of it."""
    low, middle, high = np.percentile(times, (25, 50, 75)).tolist()
    return middle, (high - low) / middle if middle else 0.0

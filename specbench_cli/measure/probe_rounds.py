"""A round of the cost probe: every point once, in an order of its own.

A round visits every context length and there every size of a target forward, in a seeded random
order, so that a drift of the machine falls on all points alike. A visit is what a step of
decoding does: some forwards of a draft model or head (the first over the 1 to 3 tokens that it has
not read), then the target's, whose weights they have pushed out of the caches, over a chain or a
tree, then one transfer of the decision to the host. Where no other model comes in between, the
target's weights are still there: some chains are timed once more right after another forward of
it. States, decoders and clocks are those of a run. Prefills are timed where a context is built up.
What the host does is timed in sessions and batches that decode prompts as a run does, so that
drafts stand and fall as there. Where steps are asked for, a few are timed of each number of
sequences and each length of their drafts.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.head import FeatureHead, Head, SequentialHead
from specbench_cli.engine.models.meter import Meter, Metered, MeteredHead
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Features, Input, ModelOutput, Step, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import ROOT, build_tree_mask
from specbench_cli.engine.workspace import Workspace
from specbench_cli.measure.step_timing import StepSample, time_steps

PROMPT, NEW_TOKENS = 64, 24
"""Of the sessions that time the host."""


SessionDecoding = Callable[[Session], Iterable[Step]]
"""What decodes a session: a method's `generate`."""

BatchDecoding = Callable[[Batch], Iterable[Step]]
"""What decodes a batch: a method's `generate_batch`."""


@dataclass(frozen=True)
class ProbeGrid:
    """The points of a probe.

    Attributes:
        contexts: rows before a forward.
        chains: new tokens of a target forward.
        trees: rows of a target forward over a tree, the root's included.
        lone: new tokens of a target forward that follows another one.
        catch_up: new tokens of a draft model's first forward in a step.
        levels: nodes of a level that a draft model is fed at once.
        drafted: draft forwards of a visit.
        batches: sequences that are decoded together.
        steps: sequences of the steps that are timed as a whole.
        lengths: draft tokens of each of them.
    """

    contexts: tuple[int, ...]
    chains: tuple[int, ...]
    trees: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    lone: tuple[int, ...] = (1, 4, 12)
    catch_up: tuple[int, ...] = (1, 2, 3)
    levels: tuple[int, ...] = (4, 8, 16)
    draft_forwards: int = 4
    batches: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    lengths: tuple[int, ...] = (0, 1, 2, 4, 6)

    @property
    def stride(self) -> int:
        """Rows that the visits to a context keep: one for each chain, as if all was rejected."""
        return len(self.chains)

    @property
    def spare(self) -> int:
        """Rows that a visit needs beyond its context."""
        drafted = max(self.catch_up) + (self.draft_forwards - 1) * max(self.levels, default=1)
        return self.stride + max(*self.chains, *self.trees, drafted)


class HostSample(NamedTuple):
    """A session: whether its drafts are trees; its draft forwards, drafted tokens and host ns, all
    per step."""

    trees: bool
    drafts: float
    nodes: float
    ns: float


class SharedForward(NamedTuple):
    """A forward that several sequences share: of which model, how many, their rows in all, ns, and
    the rows before them in the mean."""

    model: str
    sequences: int
    n_tokens: int
    ns: int
    context: float


class BatchSample(NamedTuple):
    """A batch: its draft forwards times the sequences in them, drafted tokens and host ns, all per
    step."""

    drafts: float
    nodes: float
    ns: float


class ForwardPoint(NamedTuple):
    """A point: a model's forward over n tokens, or a tree's n rows; context 0 is a prefill. lone:
    another forward of the model came right before it."""

    model: str
    context: int
    n_tokens: int
    tree: bool
    lone: bool = False


@dataclass
class ProbeSamples:
    """Times in ns."""

    forwards: dict[ForwardPoint, list[int]] = field(default_factory=lambda: defaultdict(list))
    hosts: dict[str, list[HostSample]] = field(default_factory=lambda: defaultdict(list))
    shared: list[SharedForward] = field(default_factory=list)
    batches: dict[tuple[str, int], list[BatchSample]] = field(
        default_factory=lambda: defaultdict(list)
    )
    steps: list[StepSample] = field(default_factory=list)

    def add(self, other: ProbeSamples) -> None:
        """Take in another round's."""
        for key, times in other.forwards.items():
            self.forwards[key] += times
        for name, sessions in other.hosts.items():
            self.hosts[name] += sessions
        self.shared += other.shared
        for at, found in other.batches.items():
            self.batches[at] += found
        self.steps += other.steps


class DraftProbe:
    """A draft model or head, fed what a step would feed it.

    Args:
        features: [1, n, width] what a head reads beside the ids [1, n]; None for draft models.
    """

    def __init__(
        self, model: Metered, state: State, ids: Tensor, features: Tensor | None, grid: ProbeGrid
    ) -> None:
        self._model, self._state, self._ids, self._features = model, state, ids, features
        self._grid = grid
        head = model.decoder
        self._together = head.together if isinstance(head, Head) else 1
        self._parallel = isinstance(head, Head) and head.parallel

    def prefill(self, context: int) -> None:
        """Read a prompt; of a head that is no prefill to the meter, as it comes later."""
        self._model.forward(self._text(context), self._state, logits_at=None, role="prefill")

    def chain(self, length: int, rng: random.Random) -> None:
        """Draft a chain after `length` rows of text."""
        out = self._begin(length, rng)
        for _ in range(0 if self._parallel else self._grid.draft_forwards - 1):
            token = cast(Tensor, out.logits)[:, -1].argmax(-1)[None]
            tokens = token.repeat(1, self._together)
            out = self._model.forward(self._after(out, tokens), self._state)

    def tree(self, length: int, rng: random.Random) -> None:
        """Draft a tree level by level, all levels of one width."""
        out = self._begin(length, rng)
        if self._parallel:
            return
        width = rng.choice(self._grid.levels) * self._together
        mask = torch.eye(width, dtype=torch.bool, device=self._ids.device)
        for _ in range(self._grid.draft_forwards - 1):
            positions = torch.full((1, width), self._state.length(), device=self._ids.device)
            out = self._model.forward(
                self._after(out, self._ids[:, :width]),
                self._state,
                positions=positions,
                mask=mask,
                logits_at="all",
            )

    def _begin(self, length: int, rng: random.Random) -> ModelOutput:
        unseen = rng.choice(self._grid.catch_up)
        self._state.rollback(0, length + 1 - unseen)
        if not self._parallel:
            return self._model.forward(self._text(unseen), self._state)
        assert self._features is not None
        ids = self._ids[
            :, : unseen + self._grid.draft_forwards
        ]  # those beyond the features are masks
        x = Features(ids, self._features[:, :unseen])
        return self._model.forward(x, self._state, logits_at="all")

    def _text(self, n: int) -> Input:
        ids = self._ids[:, :n]
        return Tokens(ids) if self._features is None else Features(ids, self._features[:, :n])

    def _after(self, out: ModelOutput, ids: Tensor) -> Input:
        """Drafted tokens [1, n]; a head reads them beside its own last row."""
        if self._features is None:
            return Tokens(ids)
        return Features(ids, out.hidden[:, -1:].repeat(1, ids.shape[1], 1))


class StatelessHeadProbe:
    """A head without a state, which reads a row where a step would have it: once, before all else.

    Its forwards cost the same after any text; they are counted at each context, and a prefill, for
    what reads costs of models with states.

    Args:
        features: [n, width], what it reads; ids: [n] tokens, for one that reads those too.
    """

    def __init__(
        self, head: FeatureHead, meter: Meter, features: Tensor, ids: Tensor, grid: ProbeGrid
    ) -> None:
        self._head, self._features, self._grid = MeteredHead(head, meter), features, grid
        self._ids = ids
        self._first = MeteredHead(head, meter, role="prefill")

    def prefill(self, context: int) -> None:
        """A row at the text's beginning."""
        self._call(self._first, 1)

    def chain(self, length: int, rng: random.Random) -> None:
        """A row, as every step has it."""
        self._call(self._head, 1)

    def tree(self, length: int, rng: random.Random) -> None:
        """A row, and several at once."""
        self.chain(length, rng)
        self._call(self._head, rng.choice(self._grid.levels))

    def _call(self, head: MeteredHead, n: int) -> None:
        """A forward over n rows; of a head that is called once a level, one of each level's."""
        rows = self._features[:n]
        if not isinstance(head.head, SequentialHead):
            head(rows)
            return
        for level in range(head.head.sizes["levels"]):
            rows = head(rows, self._ids[:n], level).rows


class ProbeRound:
    """All points once.

    Args:
        decodings: by name, what decodes the sessions that time the host.
        ids: [1, n] tokens of the forwards.
        prompts: that sessions and batches decode; a round's sessions all decode one.
        seed: of the order, and which prompt is a round's.
        together: by name, what decodes the grid's batches.
        sampling: of the steps that are timed as a whole.

    Attributes:
        samples: the last measurement.
        other_cpu, void: the window's verdict, once it is settled.
    """

    def __init__(
        self,
        workspace: Workspace,
        grid: ProbeGrid,
        decodings: Mapping[str, SessionDecoding],
        ids: Tensor,
        prompts: Sequence[Sequence[int]],
        seed: int,
        together: Mapping[str, BatchDecoding] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._sampling = sampling or Sampling()
        self._workspace = workspace
        self._target = workspace.decoders["target"]
        self._device = self._target.device
        self._models = {**workspace.decoders, **workspace.heads}
        self._grid = grid
        self._decodings, self._together = decodings, together or {}
        self._ids = ids.to(self._device)
        self._prompt = tuple(ids[0, :PROMPT].tolist())
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._seed = seed
        self.samples = ProbeSamples()
        self.other_cpu: float | None = None
        self.noisy = False

    def measure(self) -> None:
        """Time everything once; a later call replaces the earlier times."""
        rng = random.Random(self._seed)
        contexts, names = self._grid.contexts, list(self._decodings)
        self.samples = ProbeSamples()
        gc.collect()
        gc.disable()
        try:
            for context in rng.sample(contexts, len(contexts)):
                self._time_forwards(context, rng)
            for name in rng.sample(names, len(names)):
                self.samples.hosts[name].append(self._time_session(self._decodings[name]))
            batches = [(name, n) for name in self._together for n in self._grid.batches]
            for name, n in rng.sample(batches, len(batches)):
                self.samples.batches[name, n].append(self._time_batch(self._together[name], n))
            for n in rng.sample(self._grid.steps, len(self._grid.steps)):
                self.samples.steps += time_steps(
                    self._workspace, n, self._grid.lengths, self._prompt, self._sampling, rng
                )
        finally:
            gc.enable()

    def finish(self, other_cpu: float | None, noisy: bool) -> None:
        """Take the window's verdict."""
        self.other_cpu, self.noisy = other_cpu, noisy

    def _time_forwards(self, context: int, rng: random.Random) -> None:
        """The forwards after `context` rows, on average."""
        grid, meter = self._grid, Meter(self._device)
        drafters = [
            self._create_draft_probe(model, meter)
            for name, model in self._models.items()
            if name != "target"
        ]
        for drafter in drafters:
            drafter.prefill(context)
        target = Metered(self._target, meter, role="verify")
        state = self._workspace.state(self._target, 0, 0)
        target.forward(Tokens(self._ids[:, :context]), state)
        state.commit(0, range(context))
        state.rollback(0, context - grid.stride // 2)
        points = [(n, False) for n in grid.chains] + [(n, True) for n in grid.trees]
        trees = set()  # which of all forwards are the target's over trees
        for place, (n, tree) in enumerate(rng.sample(points, len(points))):
            length = state.length()
            for drafter in _select_probes(drafters, place, len(points)):
                (drafter.tree if tree else drafter.chain)(length, rng)
            x = Tokens(self._ids[:, :n])
            if tree:
                trees.add(len(meter.forwards))
                mask, depths = build_tree_mask(_binary_tree(n - 1), self._device)
                positions = (depths + length)[None]
                out = target.forward(x, state, positions=positions, mask=mask, logits_at="all")
            else:
                out = target.forward(x, state, logits_at="all")
            cast(Tensor, out.logits)[0].argmax(-1).tolist()
            if tree:
                state.rollback(0, length)
            else:
                state.commit(0, (0,))
        lone = len(meter.forwards)
        for n in rng.sample(grid.lone, len(grid.lone)):
            length = state.length()
            out = target.forward(Tokens(self._ids[:, :n]), state, logits_at="all")
            cast(Tensor, out.logits)[0].argmax(-1).tolist()
            state.rollback(0, length)
        meter.resolve()
        for at, f in enumerate(meter.forwards):
            before = 0 if f.role == "prefill" else context
            point = ForwardPoint(f.model, before, f.n_tokens, at in trees, at >= lone)
            self.samples.forwards[point].append(f.t1_ns - f.t0_ns)

    def _create_draft_probe(
        self, model: Decoder | FeatureHead, meter: Meter
    ) -> DraftProbe | StatelessHeadProbe:
        features = None
        if isinstance(model, Head | FeatureHead):
            width = len(model.taps) * self._target.hidden_size
            shape = (1, self._ids.shape[1], width)
            features = torch.zeros(shape, dtype=self._target.dtype, device=self._device)
            if isinstance(model, FeatureHead):
                return StatelessHeadProbe(model, meter, features[0], self._ids[0], self._grid)
        metered = Metered(model, meter, role="draft")
        return DraftProbe(
            metered, self._workspace.state(model, 0, 0), self._ids, features, self._grid
        )

    def _time_session(self, decoding: SessionDecoding) -> HostSample:
        prompt = self._prompts[self._seed % len(self._prompts)]
        request = Request("probe", 1, prompt, StopRule(frozenset(), NEW_TOKENS))
        session = Session(self._workspace, request, Sampling())
        steps = list(decoding(session))
        meter, text = session.harness.meter, session.harness.text
        meter.resolve()
        since = text.first_ns - meter.clock.zero_ns  # masks may go through the target before it
        forwards = [f for f in meter.forwards if f.role != "prefill" and f.t0_ns >= since]
        busy = sum(f.t1_ns - f.t0_ns for f in forwards)
        drafts = sum(f.role != "verify" for f in forwards)
        drafted = [step.draft for step in steps if step.draft]
        host = max(0, text.last_ns - text.first_ns - busy)
        return HostSample(
            trees=any(draft.nodes > draft.levels for draft in drafted),
            drafts=drafts / len(steps),
            nodes=sum(draft.nodes for draft in drafted) / len(steps),
            ns=host / len(steps),
        )

    def _time_batch(self, decoding: BatchDecoding, n: int) -> BatchSample:
        """Decode n sequences together; keep their forwards' times."""
        stop = StopRule(frozenset(), NEW_TOKENS)
        # Of unlike lengths, as those of users are: attention takes equally long ones at once.
        turned = self._prompts[self._seed % len(self._prompts) :] + self._prompts
        texts = [turned[at % len(self._prompts)] for at in range(n)]
        requests = [Request(f"probe {at}", 1, text, stop) for at, text in enumerate(texts)]
        batch = Batch(self._workspace, requests, Sampling(), size=n)
        steps = list(decoding(batch))
        batch.meter.resolve()
        generated = [session.harness.text for session in batch.sessions]
        first, last = (
            max(text.first_ns for text in generated),
            max(text.last_ns for text in generated),
        )
        zero = batch.meter.clock.zero_ns
        context = sum(map(len, texts)) / n + NEW_TOKENS / 2
        forwards = [
            SharedForward(f.model, len(f.rows or (0,)), f.n_tokens, f.t1_ns - f.t0_ns, context)
            for f in batch.meter.forwards
            if f.role != "prefill" and f.t0_ns >= first - zero
        ]
        self.samples.shared += forwards
        rounds = sum(f.model == "target" for f in forwards)
        host = max(0, last - first - sum(f.ns for f in forwards))
        return BatchSample(
            drafts=sum(f.sequences for f in forwards if f.model != "target") / rounds,
            nodes=sum(step.draft.nodes for step in steps if step.draft) / rounds,
            ns=host / rounds,
        )


def _select_probes(
    drafters: Sequence[DraftProbe | StatelessHeadProbe], place: int, places: int
) -> Sequence[DraftProbe | StatelessHeadProbe]:
    """Whose turn it is at a place: one after another, several at once where places are fewer."""
    return drafters[place::places] or drafters[place % len(drafters) :][:1] if drafters else ()


def _binary_tree(nodes: int) -> tuple[int, ...]:
    """The parents of a tree in which every node, the root too, has two children."""
    return tuple(ROOT if node < 2 else node // 2 - 1 for node in range(nodes))

"""Rounds of the cost probe. One round times every kind of forward once, in random order.

A round visits every context length. At each length, it measures target forwards of every size. The
order is random, so that a slow change of the machine's speed affects all measurements equally.

Each target forward is measured as in a decoding step. First, a draft model or head runs several
forwards. These forwards remove the target's weights from the CPU caches. The first of them
processes 1 to 3 pending tokens. Then the target runs a forward over a chain or a tree of draft
tokens. Some chains are timed again directly after another target forward, while the weights are
still in the caches.

Models, states and clocks are those of a normal run. Prefills are timed when a context is filled.
Host work is timed while methods decode real prompts. Optionally, whole steps are timed for several
batch sizes and draft lengths.
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

PROMPT_LENGTH, NEW_TOKENS = 64, 24
"""Length of the random prompt, and number of new tokens of the decodings that time host work."""


SessionDecoding = Callable[[Session], Iterable[Step]]
"""Function that decodes a session, like a method's `generate`."""

BatchDecoding = Callable[[Batch], Iterable[Step]]
"""Function that decodes a batch, like a method's `generate_batch`."""


@dataclass(frozen=True)
class ProbeGrid:
    """Sizes of the forwards that a probe measures.

    Attributes:
        contexts: Context lengths.
        chains: Numbers of new tokens in a target forward over a chain.
        trees: Numbers of tokens in a target forward over a tree, including the root.
        lone: Numbers of new tokens in a target forward that directly follows another target
            forward.
        catch_up: Numbers of pending tokens in the draft model's first forward of a step.
        levels: Numbers of tokens in a draft forward over one level of a tree.
        draft_forwards: Number of draft forwards before each target forward.
        batches: Batch sizes for which host times are measured.
        steps: Numbers of sequences for which whole steps are timed.
        lengths: Draft lengths for which whole steps are timed.
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
        """Number of tokens by which a context grows in a round.

        Each measured chain adds one token, as if verification rejected all draft tokens.
        """
        return len(self.chains)

    @property
    def spare(self) -> int:
        """Number of positions that a round needs beyond the context length."""
        drafted = max(self.catch_up) + (self.draft_forwards - 1) * max(self.levels, default=1)
        return self.stride + max(*self.chains, *self.trees, drafted)


class HostSample(NamedTuple):
    """Mean host time per step of one decoding.

    trees: True if the drafts are trees.
    drafts: Draft forwards per step.
    nodes: Drafted tokens per step.
    ns: Host time per step, in ns.
    """

    trees: bool
    drafts: float
    nodes: float
    ns: float


class SharedForward(NamedTuple):
    """Time of a forward over several sequences.

    n_tokens: Number of new tokens, summed over all sequences.
    context: Mean context length of the sequences.
    """

    model: str
    sequences: int
    n_tokens: int
    ns: int
    context: float


class BatchSample(NamedTuple):
    """Mean host time per step of one batch.

    drafts: Draft forwards per step. A forward over n sequences counts n times.
    nodes: Drafted tokens per step, summed over all sequences.
    ns: Host time per step, in ns.
    """

    drafts: float
    nodes: float
    ns: float


class ForwardPoint(NamedTuple):
    """Kind of a forward: the model, the context length and the size. A prefill has context 0.

    n_tokens: Number of new tokens.
    tree: True if the new tokens are a draft tree.
    lone: True if the forward directly follows another forward of the same model.
    """

    model: str
    context: int
    n_tokens: int
    tree: bool
    lone: bool = False


@dataclass
class ProbeSamples:
    """Measured times in ns of one or several rounds of a probe.

    forwards: Times of forwards, by kind of forward.
    hosts: Host times of decodings, by name of the decoding.
    shared: Times of forwards over several sequences.
    batches: Host times of batches, by name of the decoding and batch size.
    steps: Times of whole steps.
    """

    forwards: dict[ForwardPoint, list[int]] = field(default_factory=lambda: defaultdict(list))
    hosts: dict[str, list[HostSample]] = field(default_factory=lambda: defaultdict(list))
    shared: list[SharedForward] = field(default_factory=list)
    batches: dict[tuple[str, int], list[BatchSample]] = field(
        default_factory=lambda: defaultdict(list)
    )
    steps: list[StepSample] = field(default_factory=list)

    def add(self, other: ProbeSamples) -> None:
        """Add the times of another round."""
        for key, times in other.forwards.items():
            self.forwards[key] += times
        for name, sessions in other.hosts.items():
            self.hosts[name] += sessions
        self.shared += other.shared
        for at, found in other.batches.items():
            self.batches[at] += found
        self.steps += other.steps


class DraftProbe:
    """Runner of the forwards that a draft model or head runs in a decoding step.

    Args:
        model: The draft model or head. It times its own forwards.
        state: State of the model.
        ids: [1, n] token ids that the model reads.
        features: [1, n, width] hidden states that a head also reads. None for a draft model.
        grid: Sizes of the forwards.
    """

    def __init__(
        self, model: Metered, state: State, ids: Tensor, features: Tensor | None, grid: ProbeGrid
    ) -> None:
        self._model, self._state, self._ids, self._features = model, state, ids, features
        self._grid = grid
        head = model.decoder
        self._tokens_per_forward = head.block_size if isinstance(head, Head) else 1
        self._parallel = isinstance(head, Head) and head.parallel

    def prefill(self, context: int) -> None:
        """Prefill the draft model with a prompt of `context` tokens."""
        self._model.forward(self._text(context), self._state, logits_at=None, role="prefill")

    def chain(self, length: int, rng: random.Random) -> None:
        """Run the forwards that draft a chain after `length` tokens."""
        out = self._begin(length, rng)
        for _ in range(0 if self._parallel else self._grid.draft_forwards - 1):
            token = cast(Tensor, out.logits)[:, -1].argmax(-1)[None]
            tokens = token.repeat(1, self._tokens_per_forward)
            out = self._model.forward(self._after(out, tokens), self._state)

    def tree(self, length: int, rng: random.Random) -> None:
        """Run the forwards that draft a tree after `length` tokens, one forward per level.

        All levels of the tree have the same number of tokens.
        """
        out = self._begin(length, rng)
        if self._parallel:
            return
        width = rng.choice(self._grid.levels) * self._tokens_per_forward
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
        pending = rng.choice(self._grid.catch_up)
        self._state.rollback(0, length + 1 - pending)
        if not self._parallel:
            return self._model.forward(self._text(pending), self._state)
        assert self._features is not None
        # A head that drafts all tokens in one forward reads a mask token at each position without
        # hidden states.
        ids = self._ids[:, : pending + self._grid.draft_forwards]
        x = Features(ids, self._features[:, :pending])
        return self._model.forward(x, self._state, logits_at="all")

    def _text(self, n: int) -> Input:
        ids = self._ids[:, :n]
        return Tokens(ids) if self._features is None else Features(ids, self._features[:, :n])

    def _after(self, out: ModelOutput, ids: Tensor) -> Input:
        """Return drafted tokens, with shape [1, n], as input of the next forward.

        For a head, the input also contains the head's last hidden state.
        """
        if self._features is None:
            return Tokens(ids)
        return Features(ids, out.hidden[:, -1:].repeat(1, ids.shape[1], 1))


class StatelessHeadProbe:
    """Runner of the forwards of a head without a state, such as Medusa heads.

    The times of these forwards do not depend on the context. They are still stored for each context
    and as a prefill. So the costs have the same form as the costs of other models.

    Args:
        head: The head.
        meter: Meter that times the head's forwards.
        features: [n, width] hidden states that the head reads.
        ids: [n] token ids, which some heads read too.
        grid: Sizes of the forwards.
    """

    def __init__(
        self, head: FeatureHead, meter: Meter, features: Tensor, ids: Tensor, grid: ProbeGrid
    ) -> None:
        self._head, self._features, self._grid = MeteredHead(head, meter), features, grid
        self._ids = ids
        self._first = MeteredHead(head, meter, role="prefill")

    def prefill(self, context: int) -> None:
        """Run a forward over one token. Its time is stored as the time of a prefill."""
        self._call(self._first, 1)

    def chain(self, length: int, rng: random.Random) -> None:
        """Run a forward over one token, as this head does in every decoding step."""
        self._call(self._head, 1)

    def tree(self, length: int, rng: random.Random) -> None:
        """Run a forward over one token, and a forward over several tokens."""
        self.chain(length, rng)
        self._call(self._head, rng.choice(self._grid.levels))

    def _call(self, head: MeteredHead, n: int) -> None:
        """Run a forward of a head over n tokens.

        A sequential head runs once for each draft position.
        """
        rows = self._features[:n]
        if not isinstance(head.head, SequentialHead):
            head(rows)
            return
        for level in range(head.head.sizes["levels"]):
            rows = head(rows, self._ids[:n], level).rows


class ProbeRound:
    """One round of a probe, which measures every forward and every decoding once.

    Args:
        workspace: Decoders, heads and states.
        grid: Sizes of the forwards and batches.
        session_decodings: Functions that decode a prompt to measure host times, by name.
        ids: [1, n] token ids that the forwards read.
        prompts: Token ids of the prompts to decode. A round uses one of them, or several for a
            batch.
        seed: Random seed for the order of measurements, and for the choice of the prompt.
        batch_decodings: Functions that decode a batch of prompts, by name.
        sampling: Sampling settings for the timing of whole steps.

    Attributes:
        samples: Times of the last call of `measure`.
        other_cpu: CPU share of other processes in this round.
        noisy: True if `other_cpu` was too high.
    """

    def __init__(
        self,
        workspace: Workspace,
        grid: ProbeGrid,
        session_decodings: Mapping[str, SessionDecoding],
        ids: Tensor,
        prompts: Sequence[Sequence[int]],
        seed: int,
        batch_decodings: Mapping[str, BatchDecoding] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._sampling = sampling or Sampling()
        self._workspace = workspace
        self._target = workspace.decoders["target"]
        self._device = self._target.device
        self._models = {**workspace.decoders, **workspace.heads}
        self._grid = grid
        self._session_decodings, self._batch_decodings = session_decodings, batch_decodings or {}
        self._ids = ids.to(self._device)
        self._prompt = tuple(ids[0, :PROMPT_LENGTH].tolist())
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._seed = seed
        self.samples = ProbeSamples()
        self.other_cpu: float | None = None
        self.noisy = False

    def measure(self) -> None:
        """Measure all forwards and decodings once.

        A second call replaces the times of the first.
        """
        rng = random.Random(self._seed)
        contexts, names = self._grid.contexts, list(self._session_decodings)
        self.samples = ProbeSamples()
        gc.collect()
        gc.disable()
        try:
            for context in rng.sample(contexts, len(contexts)):
                self._time_forwards(context, rng)
            for name in rng.sample(names, len(names)):
                self.samples.hosts[name].append(self._time_session(self._session_decodings[name]))
            batches = [(name, n) for name in self._batch_decodings for n in self._grid.batches]
            for name, n in rng.sample(batches, len(batches)):
                self.samples.batches[name, n].append(
                    self._time_batch(self._batch_decodings[name], n)
                )
            for n in rng.sample(self._grid.steps, len(self._grid.steps)):
                self.samples.steps += time_steps(
                    self._workspace, n, self._grid.lengths, self._prompt, self._sampling, rng
                )
        finally:
            gc.enable()

    def finish(self, other_cpu: float | None, noisy: bool) -> None:
        """Accept the times of the last call of `measure`, and store how noisy the machine was."""
        self.other_cpu, self.noisy = other_cpu, noisy

    def _time_forwards(self, context: int, rng: random.Random) -> None:
        """Time all forwards with a context of about `context` tokens."""
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
        trees = set()  # indices of forwards over trees in `meter.forwards`
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
            width = len(model.captured_layers) * self._target.hidden_size
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
        since = text.first_ns - meter.clock.zero_ns  # ignore drafting before the first token
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
        """Decode a batch of n sequences.

        Store the times of its forwards, and return its host time.
        """
        stop = StopRule(frozenset(), NEW_TOKENS)
        # Use prompts of different lengths, as in real batches. With equal lengths, attention could
        # process all sequences together, which is faster.
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
    """Return the drafters that run before a target forward.

    The drafters alternate, so that each of them runs at least once per context.

    Args:
        drafters: All drafters of the probe.
        place: Index of the target forward among the forwards at this context.
        places: Number of target forwards at this context.
    """
    return drafters[place::places] or drafters[place % len(drafters) :][:1] if drafters else ()


def _binary_tree(nodes: int) -> tuple[int, ...]:
    """Return the index of each node's parent in a binary tree. Nodes are in level order."""
    return tuple(ROOT if node < 2 else node // 2 - 1 for node in range(nodes))

"""Tests of the cost probe on simulated decoders with known times."""

from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch

from methods.eqspec import EqSpec, EqSpecParams
from methods.sps import Sps, SpsParams
from methods.vanilla import Vanilla
from specbench_cli.engine import sequence as text
from specbench_cli.engine.loop import draft_and_verify
from specbench_cli.engine.models import meter
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.head import NORMED, FeatureHead, Head
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Features, ModelOutput
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.measure import probe_rounds as module
from specbench_cli.measure.costs import HostPoint
from specbench_cli.measure.probe import (
    FULL_GRID,
    Probe,
    PromptChain,
    _scale_host_cost,
    _trimmed_mean,
)
from specbench_cli.measure.probe_rounds import NEW_TOKENS, PROMPT_LENGTH
from specbench_cli.measure.quiet import MeasurementWindows

STEP, DRAFT, NODE = 30_000, 2_000, 700
"""Host time in ns of a step, of a draft forward, and of a drafted token."""
EXTRA_SEQUENCE = 40_000
"""Time in ns that each further sequence adds to a batched forward."""
COLD = 60_000
"""Time in ns to read weights that are not in the CPU caches."""
TREE = 5_000
"""Time in ns that an attention mask adds to a forward."""


class Rows:
    """A KV cache that stores only its length."""

    nbytes = 0
    by_row = True

    def __init__(self):
        self.clear()

    def clear(self):
        self.written = self.kept = 0

    def length(self, seq=0, layer=0):
        return self.written

    def position(self, seq=0):
        return self.written

    def commit(self, seq, path):
        self.kept += len(path)
        self.written = self.kept

    def rollback(self, seq, n, layers=None):
        self.written = min(self.written, n)
        self.kept = min(self.kept, n)


class TimedDecoder(Decoder):
    """A decoder that takes `cost(n, context)` ns of simulated time and always emits token 1."""

    vocab_size, n_layers, hidden_size, max_positions, weight_bytes = 7, 2, 1, 4096, 0
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, name, clock, cost):
        self.name, self._clock, self._cost = name, clock, cost
        self.log = []

    def new_state(self, capacity, n_seqs=1):
        return Rows()

    def forward(self, x, state, *, logits_at="last", **rest):
        n, context = x.ids.shape[1], state.length()
        self._clock.now += self._cost(n, context) + TREE * ("mask" in rest)
        self.log.append((n, context))
        state.written += n
        rows = {"last": 1, "all": n}.get(logits_at)
        logits = None
        if rows:
            logits = torch.zeros(1, rows, self.vocab_size)
            logits[..., 1] = 1.0
        return ModelOutput(logits, torch.zeros(1, n, 1))


class TimedBatchDecoder(TimedDecoder):
    """A decoder in which each further sequence of a forward adds `EXTRA_SEQUENCE` ns."""

    def forward_batch(self, parts, *, captured_layers=()):
        start = self._clock.now
        outs = super().forward_batch(parts)
        rows = sum(part.x.ids.shape[1] for part in parts)
        context = PROMPT_LENGTH + NEW_TOKENS // 2
        self._clock.now = start + self._cost(rows, context) + EXTRA_SEQUENCE * (len(parts) - 1)
        return outs


class TimedHead(TimedDecoder, Head):
    """A simulated head that checks the shape of its input features."""

    captured_layers = (0, NORMED)

    def forward(self, x, state, **rest):
        assert isinstance(x, Features)
        assert x.rows.shape[:2] == x.ids.shape
        own = state.length() > 0 and x.rows.shape[-1] == self.hidden_size
        assert own or x.rows.shape[-1] == len(self.captured_layers) * 1
        return super().forward(x, state, **rest)


class TimedRows(FeatureHead):
    """A simulated head without a KV cache that takes `more` ns for each row."""

    kind, captured_layers = "rows", (0, NORMED)

    def __init__(self, target, clock, more):
        super().__init__(target)
        self.clock, self.more = clock, more

    def forward(self, rows):
        assert rows.shape[1] == self.width
        self.clock.now += 50_000 + self.more * len(rows)
        return torch.zeros(2, len(rows), self.vocab_size)


class FakeMeter:
    """A simulated noise meter with one window per round and these other CPU shares."""

    def __init__(self, shares):
        self._shares = chain(shares, repeat(0.0))

    def open(self):
        """Do nothing."""

    def is_full(self):
        return True

    def close(self):
        return next(self._shares)


@pytest.fixture
def clock(monkeypatch):
    """A simulated clock. Only forwards and host work (`STEP`, `DRAFT`, `NODE`) advance it."""
    now = SimpleNamespace(now=0)
    monkeypatch.setattr(
        module.gc, "collect", lambda: 0
    )  # garbage collection is slow once torch is imported
    for module_with_clock in (meter, text):
        monkeypatch.setattr(
            module_with_clock, "time", SimpleNamespace(perf_counter_ns=lambda: now.now)
        )

    def add_host_time(name, host_ns):
        own = getattr(Session, name)

        def method(self, *args):
            now.now += host_ns(*args)
            return own(self, *args)

        monkeypatch.setattr(Session, name, method)

    add_host_time("commit", lambda outcome: STEP)
    add_host_time("pick", lambda out, ahead: DRAFT)
    add_host_time("score", lambda draft: NODE * draft.nodes)
    return now


@pytest.fixture
def measure(clock):
    """Return a function that probes a target and draft models.

    A target forward takes 1 ms and 50 us per token, a draft forward a tenth of that.
    """

    def run(
        *shares,
        allow_noise=False,
        context_ns=0,
        drafts=("draft",),
        heads=(),
        stateless=(),
        more=(),
        kind=TimedDecoder,
        **options,
    ):
        def cost(base):
            return lambda n, context: base + base // 20 * n + context_ns * context

        decoders = {"target": kind("target", clock, cost(1_000_000))}
        decoders |= {name: kind(name, clock, cost(100_000)) for name in drafts}
        workspace = Workspace(decoders, 0)
        for name in heads:
            workspace._artifacts[name] = TimedHead(name, clock, cost(200_000))
            decoders[name] = workspace._artifacts[name]
        for ns in stateless:
            workspace._artifacts["rows"] = TimedRows(decoders["target"], clock, ns)
        drafting = {f"sps of {n}": Sps(SpsParams(length=n)).generate for n in (2, 6)}
        rounds = options.pop("rounds", 3)
        probe = Probe(
            workspace,
            MeasurementWindows(FakeMeter(shares), allow_noise=allow_noise),
            (drafting if "draft" in drafts else {}) | dict(more),
            **{"positions": 4096, **options},
        )
        for _ in range(rounds):
            probe.measure_round()
        return probe.result(), decoders

    return run


def test_every_point_of_the_grid_has_its_simulated_time(measure):
    found, _ = measure()
    target = {(p.n_tokens, p.context): p for p in found.curves["target"].forwards}
    assert target.keys() == {
        (n, context) for n in FULL_GRID.chains for context in FULL_GRID.contexts
    }
    assert all(p.ns == 1_000_000 + 50_000 * n for (n, _), p in target.items())
    assert {(p.spread, p.samples) for p in target.values()} == {(0.0, 3)}
    draft = {(p.n_tokens, p.context): p.ns for p in found.curves["draft"].forwards}
    assert draft.keys() == {
        (n, c) for n in (1, 2, 3, *FULL_GRID.levels) for c in FULL_GRID.contexts
    }
    for (n, _), ns in draft.items():
        assert ns == 100_000 + 5_000 * n + TREE * (n in FULL_GRID.levels)


def test_a_time_is_the_mean_without_outliers():
    """The quartiles are 10.5 and 13.5, so values above 22.5 are outliers, but 15 is not."""
    assert _trimmed_mean([10, 500, 11, 12, 10, 15, 11]) == (11.5, pytest.approx(3 / 11))


def test_trees_have_separate_points(measure):
    target = measure()[0].curves["target"]
    assert {(p.n_tokens, p.context) for p in target.trees} == {
        (n, context) for n in FULL_GRID.trees for context in FULL_GRID.contexts
    }
    assert all(p.ns == 1_000_000 + 50_000 * p.n_tokens + TREE for p in target.trees)
    assert target.ns(16, 64, tree=True) - target.ns(16, 64) == TREE
    assert target.ns(1, 64, tree=True) == target.ns(1, 64)


def test_prefills_are_timed_at_every_context(measure):
    found, _ = measure()
    for role, base in (("target", 1_000_000), ("draft", 100_000)):
        times = {p.n_tokens: p.ns for p in found.curves[role].prefills}
        assert times == {n: base + base // 20 * n for n in FULL_GRID.contexts}


def test_host_time_is_split_by_step_draft_forward_and_drafted_token(measure):
    host = measure()[0].host
    assert host.step == pytest.approx(STEP)
    assert host.draft == pytest.approx(DRAFT)
    assert host.node == pytest.approx(NODE)
    assert {point.name: point.drafts for point in host.points}["plain steps"] == 0


def test_forwards_are_measured_at_lengths_near_their_context(measure):
    """Each visit keeps a row, so that forwards are measured at several lengths near a context."""
    found, decoders = measure(context_ns=1_000, rounds=5)
    contexts = {context for n, context in decoders["target"].log if n == FULL_GRID.chains[-2]}
    radius = FULL_GRID.stride // 2
    assert contexts <= {c + d for c in FULL_GRID.contexts for d in range(-radius, radius + 1)}
    assert len(contexts) > len(FULL_GRID.contexts)
    for point in found.curves["target"].forwards:
        expected = 1_000_000 + 50_000 * point.n_tokens + 1_000 * point.context
        assert point.ns == pytest.approx(expected, abs=1_000 * radius)


def test_target_is_timed_after_draft_forwards(measure):
    _, decoders = measure(rounds=1)
    visits = len(FULL_GRID.chains) * len(FULL_GRID.contexts) * 2  # the first round warms up
    assert len(decoders["draft"].log) >= visits * FULL_GRID.draft_forwards


def test_order_of_points_differs_by_round_and_depends_on_the_seed(measure):
    def orders(seed):
        _, decoders = measure(seed=seed, rounds=2)
        return [n for n, _ in decoders["target"].log]

    first = orders(0)
    half = len(first) // 3
    assert first == orders(0)
    assert first != orders(1)
    assert first[:half] != first[half : 2 * half]


def test_further_sequences_of_a_batch_have_their_added_cost(measure):
    batch_methods = {
        f"eqspec of {n}": EqSpec(EqSpecParams(length=n)).generate_batch for n in (1, 4)
    }
    found, _ = measure(
        kind=TimedBatchDecoder,
        batches=(1, 2, 4),
        batch_decodings=batch_methods | {"vanilla": Vanilla().generate_batch},
    )
    assert found.batch.most == 4
    # The draft's points above 3 rows are tree levels, which take `TREE` more.
    expected = {"target": EXTRA_SEQUENCE, "draft": EXTRA_SEQUENCE}
    assert found.batch.beside == pytest.approx(expected, rel=0.05)
    assert found.batch.sequence == pytest.approx(STEP, rel=0.02)
    assert found.batch.draft == pytest.approx(DRAFT, rel=0.02)
    assert found.batch.step == pytest.approx(0, abs=STEP / 50)
    assert [at.sequences for at in found.batch.points] == [1, 2, 4] * 3


def test_batches_are_not_probed_by_default(measure):
    assert measure(rounds=1)[0].batch is None


def test_target_alone_and_several_draft_models_are_probed(measure):
    alone, _ = measure(drafts=())
    assert list(alone.curves) == ["target"]
    assert (alone.host.draft, alone.host.node) == (0.0, pytest.approx(NODE))
    several, _ = measure(drafts=("draft", "other"), rounds=4)
    assert list(several.curves) == ["target", "draft", "other"]
    assert {p.n_tokens for p in several.curves["other"].forwards} == {1, 2, 3, *FULL_GRID.levels}


def test_heads_of_the_workspace_are_probed(measure):
    found, _ = measure(heads=("eagle3",), rounds=4)
    head = found.curves["eagle3"]
    assert {p.n_tokens: p.ns for p in head.prefills} == {
        n: 200_000 + 10_000 * n for n in FULL_GRID.contexts
    }
    assert all(
        p.ns == 200_000 + 10_000 * p.n_tokens + TREE * (p.n_tokens in FULL_GRID.levels)
        for p in head.forwards
    )


def test_heads_without_a_state_are_probed_by_rows(measure):
    rows = measure(stateless=(1_000,), rounds=4)[0].curves["rows"]
    assert [(p.n_tokens, p.ns) for p in rows.prefills] == [(1, 51_000)]
    times = {(p.n_tokens, p.context): p.ns for p in rows.forwards}
    assert times.keys() == {(n, c) for n in (1, *FULL_GRID.levels) for c in FULL_GRID.contexts}
    assert all(ns == 50_000 + 1_000 * n for (n, _), ns in times.items())


class Star:
    """A drafter that proposes `nodes` children of the root at no cost."""

    def __init__(self, nodes):
        self._nodes = nodes

    def start(self, session):
        session.reserve(self._nodes)
        self._model = session.draft()
        self._state = session.new_state(self._model)
        self._read(session)

    def propose(self, session, limit):
        if limit < 1:
            return session.chain(())
        self._read(session)
        return Draft(torch.arange(self._nodes), (ROOT,) * self._nodes)

    def _read(self, session):
        unseen = session.pending_tokens(self._state.length())
        self._model.forward(unseen, self._state)
        self._state.commit(0, range(unseen.ids.shape[1]))

    def observe(self, session, outcome):
        """Do nothing."""


def test_trees_have_a_separate_host_cost(measure):
    more = {f"sps-tree of {n}": partial(draft_and_verify, Star(n)) for n in (2, 6)}
    found, _ = measure(more=more)
    assert list(found.hosts) == ["draft"]
    assert {point.name for point in found.hosts["draft"].points} == more.keys()
    assert found.host.node == pytest.approx(NODE)
    assert found.hosts["draft"].node > 0


def test_host_work_of_a_method_is_only_in_its_own_cost(measure, clock):
    class Busy(PromptChain):
        def observe(self, session, outcome):
            clock.now += 5 * STEP

    plain, _ = measure()
    found, _ = measure(more={"busy": partial(draft_and_verify, Busy(4))})
    assert found.host == plain.host and list(found.hosts) == ["busy"]
    assert found.hosts["busy"].step == pytest.approx(6 * STEP, rel=0.05)
    assert found.hosts["busy"].node == plain.host.node


def test_host_cost_is_scaled_down_for_a_faster_method(measure):
    more = {f"sps-tree of {n}": partial(draft_and_verify, Star(n)) for n in (2, 6)}
    lines = [_scale_host_cost(measure(more=more)[0].hosts["draft"], [point]) for point in (
        HostPoint(name="few", drafts=0.0, nodes=50.0, ns=NODE, spread=0.0, samples=1),
    )]  # fmt: skip
    (line,) = lines
    assert line.step == 0 and line.draft * 0 + line.node * 50 == pytest.approx(NODE)


def test_forwards_right_after_another_have_separate_points(measure):
    class Warm(TimedDecoder):
        """A decoder that is slower after another model has evicted its weights."""

        last = ""

        def forward(self, x, state, **kwargs):
            before, Warm.last = Warm.last, self.name
            if before != self.name == "target":
                self._clock.now += COLD
            return super().forward(x, state, **kwargs)

    target = measure(kind=Warm)[0].curves["target"]
    assert {(p.n_tokens, p.context) for p in target.lone} == {
        (n, context) for n in FULL_GRID.lone for context in FULL_GRID.contexts
    }
    assert target.ns(4, 64) - target.ns(4, 64, lone=True) == pytest.approx(COLD)
    assert measure()[0].curves["target"].ns(4, 64, lone=True) == 1_200_000


def test_sessions_decode_the_prompts_of_a_run(measure):
    prompts = [[1] * 7, [1] * 11]
    _, decoders = measure(prompts=prompts, rounds=2)
    assert {n for n, context in decoders["draft"].log if not context} >= {7, 11}


class Ahead(Star):
    """A drafter that also drafts before the first token is committed."""

    def start(self, session):
        super().start(session)
        self._model.forward(session.pending_tokens(0), self._state)
        self._state.rollback(0, 0)
        self._read(session)


def test_drafting_before_the_first_token_does_not_change_host_costs(measure):
    plain_hosts, early_hosts = (
        measure(more={f"sps-tree of {n}": partial(draft_and_verify, kind(n)) for n in (2, 6)})[0]
        for kind in (Star, Ahead)
    )
    assert early_hosts.hosts == plain_hosts.hosts


def test_contexts_are_limited_by_the_positions_of_the_models(measure):
    found, decoders = measure(positions=256)
    assert [context for context, _ in found.curves["target"].by_context] == [16, 64]
    assert max(n + context for n, context in decoders["target"].log) <= 256
    with pytest.raises(UsageError, match="models with 64 positions cannot be probed") as caught:
        measure(positions=64)
    assert caught.value.hint


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_real_decoders_of_either_kind_are_probed(tiny_checkpoint, family):
    """The states of fused and hosted decoders support the operations of a probe."""
    folder = tiny_checkpoint(family)
    decoders = {role: load_decoder(folder, name=role) for role in ("target", "draft")}
    probe = Probe(
        Workspace(decoders, 0),
        MeasurementWindows(FakeMeter(()), allow_noise=True),
        {"sps of 2": Sps(SpsParams(length=2)).generate},
        positions=256,
        grid=replace(FULL_GRID, chains=(1, 6), trees=(4,), levels=(2,)),
    )
    probe.measure_round()
    found = probe.result()
    assert {len(found.curves[role].by_context) for role in decoders} == {2}
    assert found.host.step > 0


def test_round_that_was_noisy_is_measured_again(measure):
    found, _ = measure(0.3, 0.3, 0.01)
    assert (found.quietness.void, found.quietness.rounds) == (0, 3)
    assert found.quietness.other_cpu == pytest.approx(0.01)


def test_round_that_stays_noisy_is_left_out_and_counted(measure):
    found, _ = measure(0.3, 0.3, 0.3)
    assert (found.quietness.void, found.quietness.noisy) == (1, False)
    assert {p.samples for p in found.curves["target"].forwards} == {2}
    assert measure(*[0.3] * 9)[0] is None


def test_allowed_noise_is_kept_and_labelled(measure):
    found, _ = measure(0.3, allow_noise=True)
    assert found.quietness.model_dump() == {
        "rounds": 3,
        "void": 0,
        "other_cpu": 0.3,
        "noisy": True,
    }

"""Faults of the next author, planted in real passes of a run: which net catches each, and by what.

`python -m pytest tests/measure/test_planted.py -s` prints what caught each.
"""

from __future__ import annotations

import gc
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

from methods.sps import Sps
from methods.vanilla import Vanilla
from specbench_cli import registry
from specbench_cli.comparison.side_sources import load_side
from specbench_cli.config import run as config
from specbench_cli.config.run import RunConfig
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Outcome
from specbench_cli.engine.verify import ranking
from specbench_cli.engine.verify import sampling as distribution
from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.judge import verdict
from specbench_cli.judge.broken import compute_likelihood_deviation, find_broken_methods
from specbench_cli.judge.oracle import Oracle
from specbench_cli.judge.tolerance import measure_tolerance
from specbench_cli.measure import repeat, stored_outputs, warm_up
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.manifest import build_manifest
from specbench_cli.measure.result import exit_code
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan, make_plan
from specbench_cli.store.run_dir import RunDir
from tests.audit.faults.clock import ForgetsFromTheSixth
from tests.audit.faults.distributions import ColderThanReported, DrawsFromTen
from tests.audit.faults.methods import ReportsOnlyAccepted, VerifiesOnlyMatchingTokens
from tests.views import Silent

pytestmark = pytest.mark.usefixtures("small_pair")

SETTINGS = {"threads": 1, "allow_noise": True, "max_new_tokens": 16, "isolation": "none"}
COUPLED = {"temperature": 1.5, "top_p": 0.8, "verify": "coupled", "dtype": "bfloat16"}
WARM = {"temperature": 2.0, "verify": "rejection", "max_new_tokens": 48}


class Found:
    """What a run came to."""

    def __init__(self, path):
        self.path, run = path, RunDir.open(path)
        self.manifest, self.records = run.manifest, list(run.records())
        self.whys = find_broken_methods(self.records, run.manifest, lambda *_: None)
        self.errors = {r.label: r.error for r in self.records if r.error is not None}
        self.bad = exit_code(self.records, run.manifest) == ExitCode.BAD_ANSWER

    def of(self, label):
        return [record for record in self.records if record.label == label]

    def gap(self, label):
        """The largest gap of a row's mismatches."""
        wrong = [r.verdict for r in self.of(label) if r.verdict and r.verdict.kind == "mismatch"]
        return max(each.gap for each in wrong)

    def told(self, fault, by):
        sys.stdout.write(f"\n| {fault} | {by}\n")
        return by


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Makes a run of vanilla and one other method with something wrong; each pair is loaded once
    for each dtype."""
    benches = {}
    # Measured in full it takes seconds a run.
    tolerance = cache(lambda module: measure_tolerance(module, [range(5, 69)]))
    with ExitStack() as stack:
        stack.enter_context(patch.object(warm_up, "WARM_UP_ROUNDS", 0))
        stack.enter_context(
            patch.object(verdict, "measure_tolerance", lambda module, _: tolerance(module))
        )

        def loaded(**more) -> tuple[Plan, Bench]:
            rows = [{"name": "vanilla"}, {"name": "sps"}]
            plan = make_plan(RunConfig.model_validate({"methods": rows, **SETTINGS, **more}))
            key = plan.target.path, plan.config.dtype
            if key not in benches:
                benches[key] = stack.enter_context(closing(Bench(plan)))
            return plan, benches[key]

        def made(method=None, planted=None, limit=2, **more) -> Found:
            plan, bench = loaded(limit=limit, **more)
            if method is not None:
                plan = replace(
                    plan,
                    method_runs=(
                        plan.method_runs[0],
                        MethodRun.from_method("faulty", "faulty", method, {}),
                    ),
                )
            run_dir = RunDir.create(
                tmp_path_factory.mktemp("made") / "run", build_manifest(plan, {})
            )
            with planted or nullcontext():
                made_by = repeat.Repeat(
                    plan, bench, run_dir, stored_outputs.StoredOutputs(), Silent()
                )
                made_by.run(1)
                run_dir.update(near_ties=made_by.find_near_ties(), tolerance=made_by.judge.facts())
            run_dir.close("finished")
            return Found(run_dir.path)

        made.loaded = loaded
        gc.freeze()
        yield made
        gc.unfreeze()


def looped(step: Callable) -> type[Sps]:
    """A method whose loop decides each step by `step(self, session, draft)`, which yields."""

    class Looped(Sps):
        name = "faulty"

        @torch.inference_mode()
        def generate(self, session):
            self.start(session)
            session.prefill()
            while session.finish is None:
                yield from step(self, session, self.propose(session, session.max_draft_length()))

    return Looped


def honest(self, session, draft):
    committed = session.commit(session.verify(draft, session.score(draft)))
    self.observe(session, committed)
    yield session.step(draft, committed)


def test_an_honest_run_has_nothing_wrong(run):
    for more in ({}, COUPLED, WARM):
        found = run(looped(honest)(), **more)
        assert (found.whys, found.errors, found.bad) == ({}, {}, False)


# ---- every lossless guarantee is judged ---------------------------------------------------------


def unseen(self, session, draft):
    """Commits the draft as it is."""
    rows, ids = session.score(draft), draft.tokens.tolist()
    last = int(rows[-1].argmax())
    words = ("accepted",) * len(ids) + ("bonus" if ids else "plain",)
    committed = session.commit(Outcome(tuple(range(len(ids))), (*ids, last), words, len(ids)))
    self.observe(session, committed)
    yield session.step(draft, committed)


def test_exact_law_in_greedy_decoding_is_judged_by_tokens(run):
    method = looped(unseen)
    method.guarantee = lambda self, sampling: "exact_law"
    found = run(method())
    assert found.bad
    assert found.told("exact_law in greedy, committed unseen", found.whys["faulty"])
    assert found.told("", f"gap {found.gap('faulty'):.2f}") and found.gap("faulty") > 0.5


def test_a_guarantee_that_changes_its_mind_is_asked_once(run):
    method = looped(unseen)
    said = iter(["exact_tokens"] * 4)
    method.guarantee = lambda self, sampling: next(said, "quality_only")
    assert "faulty" in run(method()).whys


def test_a_guarantee_that_nobody_knows_is_refused(run):
    method = looped(honest)
    method.guarantee = lambda self, sampling: "exact"
    with pytest.raises(UsageError, match="'exact', which is none of exact_tokens"):
        run(method())


# ---- vanilla is judged --------------------------------------------------------------------------


def runner_up(rows):
    """The argmax, or the next where it is within 0.5."""
    best, at = rows.topk(2)
    return torch.where(best[:, 0] - best[:, 1] < 0.5, at[:, 1], at[:, 0])


def test_an_argmax_that_takes_the_runner_up_is_vanillas_fault_too(run):
    found = run(planted=patch.object(ranking, "argmax", runner_up), limit=6)
    assert {r.verdict.kind for r in found.of("sps")} == {"identical"}
    assert found.bad
    assert 1e-3 < found.gap("vanilla") < 0.5
    found.told("argmax takes the runner-up within 0.5", f"vanilla: {found.gap('vanilla'):.3f}")


def test_a_peer_is_not_tied_with_a_vanilla_that_is_wrong(run):
    """The honest one is no near-tie of a wrong token."""

    class Right(Vanilla):
        name = "faulty"

        def generate(self, session):
            with patch.object(ranking, "argmax", lambda rows: rows.argmax(-1)):
                yield from super().generate(session)

    found = run(Right(), patch.object(ranking, "argmax", runner_up), limit=6)
    kinds = {r.verdict.kind for r in found.of("faulty")}
    assert "mismatch" in kinds
    assert "near-tie" not in kinds


def test_another_model_than_the_checkpoints_is_vanillas_fault(run):
    right = FusedDecoder._logits

    def biased(self, h, *rest):
        logits = right(self, h, *rest)
        logits[..., 300:600] += 8.0
        return logits

    found = run(planted=patch.object(FusedDecoder, "_logits", biased), limit=6)
    assert {r.verdict.kind for r in found.of("sps")} == {"identical"}
    assert found.bad
    found.told("a bias on some logits of the engine's", f"vanilla: gap {found.gap('vanilla'):.2f}")


def test_a_stop_rule_that_goes_on_behind_eos_is_vanillas_fault(run):
    right = StopRule.truncate

    def late(self, output, new):
        """An EOS ends the text only once a token follows it."""
        kept, finish = right(replace(self, eos=frozenset()), output, new)
        for at, token in enumerate([*output, *new][:-1]):
            if token in self.eos and at + 2 > len(output):
                return at + 2 - len(output), "eos"
        return kept, finish

    found = run(planted=patch.object(StopRule, "truncate", late), limit=6, max_new_tokens=48)
    assert found.bad
    assert found.told("a token behind EOS", found.whys["vanilla"])


# ---- near-ties that decide ----------------------------------------------------------------------


def uncut(right):
    return lambda logits, sampling: right(logits, replace(sampling, top_p=1.0))


def test_a_top_p_that_is_forgotten_in_half_precision_is_found(run):
    forgotten = patch.object(distribution, "warp_logits", uncut(distribution.warp_logits))
    found = run(planted=forgotten, limit=6, **COUPLED)
    assert found.bad
    allowed = found.manifest["tolerance"]["value"] / 1.5
    assert found.gap("vanilla") > allowed
    found.told(
        "top-p forgotten by the engine in bf16", f"{found.gap('vanilla'):.2f} > {allowed:.2f}"
    )


def test_a_method_that_forgets_top_p_in_half_precision_is_found(run):
    class Forgets(Sps):
        name = "faulty"

        def start(self, session):
            super().start(session)
            session._chooser.sampling = replace(session.sampling, top_p=1.0)

    found = run(Forgets(), limit=6, **COUPLED)
    assert list(found.whys) == ["faulty"]
    allowed = found.manifest["tolerance"]["value"] / 1.5
    found.told("top-p forgotten by a method in bf16", f"{found.gap('faulty'):.2f} > {allowed:.2f}")


# ---- evidence of sampling -----------------------------------------------------------------------


def deviations(found):
    return {label: compute_likelihood_deviation(found.of(label)) for label in ("vanilla", "faulty")}


@pytest.mark.parametrize("method", [DrawsFromTen, ColderThanReported])
def test_a_draft_drawn_from_another_distribution_is_found_by_likelihood(run, method):
    found = run(method(), limit=8, **WARM)
    at = deviations(found)
    found.told(method.__doc__, f"{at['faulty'][0]:+.1f} deviations, p {at['faulty'][1]:.1g}")
    assert list(found.whys) == ["faulty"]
    assert "standard deviations" in found.whys["faulty"]


def test_a_token_beyond_the_cut_under_rejection_is_a_mismatch(run):
    class Forgets(Sps):
        name = "faulty"

        def start(self, session):
            super().start(session)
            session._chooser.sampling = replace(session.sampling, top_k=0)

    found = run(Forgets(), limit=6, temperature=2.0, top_k=5, verify="rejection")
    assert list(found.whys) == ["faulty"]
    assert found.told("top-k forgotten under rejection", found.whys["faulty"])


# ---- records that cannot contradict themselves --------------------------------------------------


def relabelled(self, session, draft):
    """Tells recovered tokens as accepted; the text knows better."""
    for step in honest(self, session, draft):
        words = tuple("accepted" if w == "recovered" else w for w in step.outcome.origin)
        yield replace(step, outcome=replace(step.outcome, origin=words))


def relabelled_everywhere(self, session, draft):
    """The same, told to the text too."""
    outcome = session.verify(draft, session.score(draft))
    words = tuple("accepted" if w == "recovered" else w for w in outcome.origin)
    committed = session.commit(replace(outcome, origin=words))
    self.observe(session, committed)
    yield session.step(draft, committed)


def relabelled_with_a_path(self, session, draft):
    """The same, with a node for it."""
    outcome = session.verify(draft, session.score(draft))
    words = tuple("accepted" if w == "recovered" else w for w in outcome.origin)
    committed = session.commit(replace(outcome, origin=words))
    self.observe(session, committed)
    path = tuple(range(words.count("accepted")))
    yield session.step(draft, replace(committed, path=path[: committed.origin.count("accepted")]))


def in_twos(self, session, draft):
    """Two steps told as one."""
    (first,) = honest(self, session, draft)
    if session.finish is not None:
        yield first
        return
    (second,) = honest(self, session, self.propose(session, session.max_draft_length()))
    a, b = first.outcome, second.outcome
    draft = session.chain([*first.draft.tokens.tolist(), *second.draft.tokens.tolist()])
    path = (*a.path, *(first.draft.nodes + node for node in b.path))
    both = Outcome(path, a.committed + b.committed, a.origin + b.origin, a.tested + b.tested)
    yield replace(second, draft=draft, outcome=both)


def without_entries(self, session, draft):
    """Deletes its verifications from the trace."""
    yield from honest(self, session, draft)
    del session.harness.meter.forwards[-1]


def untold(self, session, draft):
    """Tells no step at all."""
    list(honest(self, session, draft))
    return iter(())


def beside_commit(self, session, draft):
    """Moves the text on by itself."""
    yield from honest(self, session, draft)
    if session.finish is None:
        session.tokens().append(session.tokens()[-1])


def more_nodes(self, session, draft):
    """Tells of nodes that nobody scored."""
    for step in honest(self, session, draft):
        tail = [0] * 40
        yield replace(step, draft=session.chain([*step.draft.tokens.tolist(), *tail]))


def decided_twice(self, session, draft):
    """Verifies its draft, and once more what stands of it."""
    rows = session.score(draft)
    stood = len(session.verify(draft, rows).path)
    short = session.chain(draft.tokens[:stood])
    committed = session.commit(session.verify(short, rows[: stood + 1]))
    self.observe(session, committed)
    yield session.step(short, committed)


def tells_no_draft(self, session, draft):
    """Says of no step what it drafted; counts as if nothing had been."""
    for step in honest(self, session, draft):
        words = tuple("plain" for _ in step.outcome.origin)
        yield replace(step, draft=None, outcome=Outcome((), step.outcome.committed, words, 0))


LIES = [
    ReportsOnlyAccepted, VerifiesOnlyMatchingTokens, decided_twice, tells_no_draft,
    relabelled, relabelled_everywhere, relabelled_with_a_path, in_twos, without_entries, untold,
    beside_commit, more_nodes,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_method_that_tells_what_was_not_fails(run, lie):
    method = lie if isinstance(lie, type) else looped(lie)
    found = run(method())
    assert found.bad
    assert list(found.errors) == ["faulty"]
    found.told((lie.__doc__ or "").strip(), found.errors["faulty"])


@pytest.fixture(scope="module")
def unplanted(run):
    """The folder of a run with nothing wrong."""
    return run().path


@pytest.mark.parametrize(
    ("column", "to"), [("accepted", 3), ("committed", 9), ("levels", 0), ("nodes", 99)]
)
def test_records_that_were_changed_on_disk_are_refused_by_every_reader(
    unplanted, tmp_path, column, to
):
    path = shutil.copytree(unplanted, tmp_path / "run")
    file = path / "records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    line = next(each for each in lines if each["label"] == "sps")
    line["steps"][column][0] = to
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(UsageError, match=r"line \d+ is not a valid record: "):
        load_side(str(path))


# ---- state between prompts ----------------------------------------------------------------------


class Remembers(Sps):
    """Drafts what it came to when it last had the prompt."""

    name = "faulty"
    known: dict = {}  # noqa: RUF012

    def propose(self, session, limit):
        before = self.known.get(session.requests[0].prompt_id)
        if before is None:
            return super().propose(session, limit)
        return session.chain(before[len(session.output()) :][: min(5, limit)])

    def observe(self, session, outcome):
        super().observe(session, outcome)
        if session.finish is not None:
            self.known[session.requests[0].prompt_id] = list(session.output())


class OfNoSeed(Sps):
    """Its draft's length is chance, and nobody's seed."""

    name = "faulty"
    chance = random.Random(0)  # of its own: one prompt may come to the same again by luck

    def propose(self, session, limit):
        return super().propose(session, min(limit, self.chance.randint(1, 4)))


@pytest.mark.parametrize("method", [ForgetsFromTheSixth, Remembers, OfNoSeed])
def test_state_that_outlives_a_prompt_is_found_at_the_end_of_the_pass(run, method):
    found = run(method(), limit=7, max_new_tokens=12)
    assert found.bad
    assert {r.verdict.kind for r in found.of("faulty")} == {"identical"}
    assert list(found.whys) == ["faulty"]
    assert found.told(method.__doc__, found.whys["faulty"])


# ---- numbers that are none ----------------------------------------------------------------------


WILD = {"limit": 1, "max_new_tokens": 4}
NUMBERS = [("float32", torch.nan), ("bfloat16", torch.inf), ("float16", torch.nan)]


def wild(run, model, number, **more):
    """A run whose target's or draft's last norm holds one number alone."""
    _, bench = run.loaded(**more)
    weights = bench.workspace.decoders[model].weights
    norm = torch.full_like(weights.final_norm, number)
    return run(planted=patch.object(weights, "final_norm", norm), **more)


@pytest.mark.parametrize(("dtype", "number"), NUMBERS)
def test_a_target_that_says_no_number_fails_its_cells_with_their_step(run, dtype, number):
    for rule in ({}, WARM) if dtype == "float32" else ({},):
        found = wild(run, "target", number, **{**rule, **WILD, "dtype": dtype})
        assert found.bad
        assert found.errors.keys() == {"vanilla", "sps"}
        assert all("step 0: the target's logits are not finite" in e for e in found.errors.values())
    found.told(f"{number} in the final norm", found.errors["sps"])


@pytest.mark.parametrize(("dtype", "number"), NUMBERS)
def test_a_draft_that_says_no_number_fails_its_cells_alone_with_their_step(run, dtype, number):
    said = r"step 1(: the logits of draft are|, draft.q: .* is) not finite"
    coupled = {**WARM, "verify": "coupled"}
    for rule in ({}, coupled, WARM) if dtype == "float32" else ({},):
        found = wild(run, "draft", number, **{**rule, **WILD, "dtype": dtype})
        assert found.bad
        assert found.errors.keys() == {"sps"}
        assert re.search(said, found.errors["sps"])
    found.told(f"{number} in the draft's final norm", found.errors["sps"])


@pytest.mark.usefixtures("shipped_pair")
@pytest.mark.parametrize("head", ["eagle3", "hydra", "layerskip"])
def test_a_head_or_layers_that_say_no_number_fail_their_cells(run, head):
    """In greedy decoding, where a draft of no numbers would change no token."""
    right = Meter.record_logits

    def record_logits(self, name, place, logits):
        logits.view(-1)[7] = torch.nan
        right(self, name, place, logits)

    found = run(
        registry.build(head, {}), patch.object(Meter, "record_logits", record_logits), **WILD
    )
    assert found.errors.keys() == {"faulty"}
    assert re.search(r"step [01]: the logits of \S+ are not finite", found.errors["faulty"])


OURS = sorted(name for name, entry in registry.built_in_methods().items() if not entry.peer)


@pytest.mark.full
@pytest.mark.usefixtures("shipped_pair")
@pytest.mark.parametrize("name", OURS)
def test_no_method_decodes_with_logits_that_are_not_finite(run, name):
    right, drafted = Meter.record_logits, []

    def record_logits(self, model, place, logits):
        drafted.append(model)
        logits.fill_(torch.nan)
        right(self, model, place, logits)

    own = {"target": "embedded-space"} if name == "space" else {}
    found = run(
        registry.build(name, {}), patch.object(Meter, "record_logits", record_logits), **WILD, **own
    )
    assert bool(found.errors) == found.bad == bool(drafted)
    assert drafted or "draft" not in registry.load(name).needs


def test_one_row_of_a_verification_without_numbers_fails_its_cell(run):
    class Once(Sps):
        name = "faulty"

    right = Session.score

    def score(self, draft):
        rows = right(self, draft)
        if len(self.output()) > 4 and draft.q is None and draft.nodes > 1:
            rows = rows.clone()
            rows[1, 7] = torch.nan
        return rows

    found = run(Once(), patch.object(Session, "score", score))
    assert list(found.errors) == ["faulty"]
    assert found.told("NaN in a row of a verification", found.errors["faulty"])


def test_a_verdict_is_not_made_of_no_numbers(run):
    right = Oracle.logits

    def logits(self, *given):
        rows = right(self, *given).clone()
        rows[-1, 7] = torch.nan
        return rows

    found = run(planted=patch.object(Oracle, "logits", logits))
    assert found.bad
    assert "vanilla" in found.errors
    assert found.told("NaN in a row of the verdict", found.errors["vanilla"])


def test_a_temperature_that_leaves_no_numbers_is_refused_and_would_fail(run):
    with pytest.raises(ValueError, match=r"must be 0, which is greedy, or at least 0.001"):
        run(temperature=1e-40, verify="coupled")
    for rule in ("coupled", "rejection"):
        with patch.object(config, "MIN_TEMPERATURE", 0.0):
            found = run(temperature=1e-40, verify=rule)
        assert found.errors.keys() == {"vanilla", "sps"}
        found.told(f"temperature 1e-40, {rule}", found.errors["sps"])

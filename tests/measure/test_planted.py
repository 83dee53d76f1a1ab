"""Tests that faults planted in a method or in the engine are detected during a run.

`python -m pytest tests/measure/test_planted.py -s` prints how each was detected.
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


class RunFindings:
    """The records of a run and the reasons why its methods are broken."""

    def __init__(self, path):
        self.path, run = path, RunDir.open(path)
        self.manifest, self.records = run.manifest, list(run.records())
        self.reasons = find_broken_methods(self.records, run.manifest, lambda *_: None)
        self.errors = {r.label: r.error for r in self.records if r.error is not None}
        self.bad = exit_code(self.records, run.manifest) == ExitCode.BAD_ANSWER

    def of(self, label):
        return [record for record in self.records if record.label == label]

    def gap(self, label):
        """Return the largest gap among the mismatches of a method."""
        wrong = [r.verdict for r in self.of(label) if r.verdict and r.verdict.kind == "mismatch"]
        return max(each.gap for each in wrong)

    def print_finding(self, fault, by):
        sys.stdout.write(f"\n| {fault} | {by}\n")
        return by


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs vanilla and another method with a planted fault.

    The models are loaded once per pair and dtype.
    """
    benches = {}
    # Measuring the tolerance on all prompts takes seconds per run.
    tolerance = cache(lambda module: measure_tolerance(module, [range(5, 69)]))
    with ExitStack() as stack:
        stack.enter_context(patch.object(warm_up, "WARM_UP_ROUNDS", 0))
        stack.enter_context(
            patch.object(verdict, "measure_tolerance", lambda module, _: tolerance(module))
        )

        def load(**more) -> tuple[Plan, Bench]:
            rows = [{"name": "vanilla"}, {"name": "sps"}]
            plan = make_plan(RunConfig.model_validate({"methods": rows, **SETTINGS, **more}))
            key = plan.target.path, plan.config.dtype
            if key not in benches:
                benches[key] = stack.enter_context(closing(Bench(plan)))
            return plan, benches[key]

        def run_method(method=None, planted=None, limit=2, **more) -> RunFindings:
            plan, bench = load(limit=limit, **more)
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
                run_repeat = repeat.Repeat(
                    plan, bench, run_dir, stored_outputs.StoredOutputs(), Silent()
                )
                run_repeat.run(1)
                run_dir.update(
                    near_ties=run_repeat.find_near_ties(), tolerance=run_repeat.judge.facts()
                )
            run_dir.close("finished")
            return RunFindings(run_dir.path)

        run_method.loaded = load
        gc.freeze()
        yield run_method
        gc.unfreeze()


def make_method(step: Callable) -> type[Sps]:
    """Return a method whose generator runs `step(self, session, draft)` for each step."""

    class Looped(Sps):
        name = "faulty"

        @torch.inference_mode()
        def generate(self, session):
            self.start(session)
            session.prefill()
            while session.finish is None:
                yield from step(self, session, self.propose(session, session.max_draft_length()))

    return Looped


def correct_step(self, session, draft):
    committed = session.commit(session.verify(draft, session.score(draft)))
    self.observe(session, committed)
    yield session.step(draft, committed)


def test_a_correct_run_has_no_findings(run):
    for more in ({}, COUPLED, WARM):
        found = run(make_method(correct_step)(), **more)
        assert (found.reasons, found.errors, found.bad) == ({}, {}, False)


# ---- lossless guarantees ---------------------------------------------------------


def commit_unverified(self, session, draft):
    """Commit the draft without verifying it."""
    rows, ids = session.score(draft), draft.tokens.tolist()
    last = int(rows[-1].argmax())
    words = ("accepted",) * len(ids) + ("bonus" if ids else "plain",)
    committed = session.commit(Outcome(tuple(range(len(ids))), (*ids, last), words, len(ids)))
    self.observe(session, committed)
    yield session.step(draft, committed)


def test_exact_law_in_greedy_decoding_is_checked_by_tokens(run):
    method = make_method(commit_unverified)
    method.guarantee = lambda self, sampling: "exact_law"
    found = run(method())
    assert found.bad
    assert found.print_finding("exact_law in greedy, committed unseen", found.reasons["faulty"])
    assert found.print_finding("", f"gap {found.gap('faulty'):.2f}") and found.gap("faulty") > 0.5


def test_a_guarantee_is_read_once(run):
    method = make_method(commit_unverified)
    guarantees = iter(["exact_tokens"] * 4)
    method.guarantee = lambda self, sampling: next(guarantees, "quality_only")
    assert "faulty" in run(method()).reasons


def test_an_unknown_guarantee_is_rejected(run):
    method = make_method(correct_step)
    method.guarantee = lambda self, sampling: "exact"
    with pytest.raises(UsageError, match="'exact', which is not one of exact_tokens"):
        run(method())


# ---- vanilla --------------------------------------------------------------------------


def take_second_best(rows):
    """Return the argmax, or the second best token if its logit is at most 0.5 lower."""
    best, at = rows.topk(2)
    return torch.where(best[:, 0] - best[:, 1] < 0.5, at[:, 1], at[:, 0])


def test_an_argmax_that_takes_the_second_best_token_breaks_vanilla(run):
    found = run(planted=patch.object(ranking, "argmax", take_second_best), limit=6)
    assert {r.verdict.kind for r in found.of("sps")} == {"identical"}
    assert found.bad
    assert 1e-3 < found.gap("vanilla") < 0.5
    found.print_finding(
        "argmax takes the runner-up within 0.5", f"vanilla: {found.gap('vanilla'):.3f}"
    )


def test_a_correct_output_is_no_near_tie_of_a_wrong_vanilla(run):
    """The correct token is not accepted as a near-tie of vanilla's wrong token."""

    class Right(Vanilla):
        name = "faulty"

        def generate(self, session):
            with patch.object(ranking, "argmax", lambda rows: rows.argmax(-1)):
                yield from super().generate(session)

    found = run(Right(), patch.object(ranking, "argmax", take_second_best), limit=6)
    kinds = {r.verdict.kind for r in found.of("faulty")}
    assert "mismatch" in kinds
    assert "near-tie" not in kinds


def test_logits_that_differ_from_the_checkpoint_break_vanilla(run):
    original = FusedDecoder._logits

    def biased(self, h, *rest):
        logits = original(self, h, *rest)
        logits[..., 300:600] += 8.0
        return logits

    found = run(planted=patch.object(FusedDecoder, "_logits", biased), limit=6)
    assert {r.verdict.kind for r in found.of("sps")} == {"identical"}
    assert found.bad
    found.print_finding(
        "a bias on some logits of the engine's", f"vanilla: gap {found.gap('vanilla'):.2f}"
    )


def test_a_stop_rule_that_continues_after_eos_breaks_vanilla(run):
    original = StopRule.truncate

    def late(self, output, new):
        """Stop one token after an EOS instead of at the EOS."""
        kept, finish = original(replace(self, eos=frozenset()), output, new)
        for at, token in enumerate([*output, *new][:-1]):
            if token in self.eos and at + 2 > len(output):
                return at + 2 - len(output), "eos"
        return kept, finish

    found = run(planted=patch.object(StopRule, "truncate", late), limit=6, max_new_tokens=48)
    assert found.bad
    assert found.print_finding("a token behind EOS", found.reasons["vanilla"])


# ---- near-ties ----------------------------------------------------------------------


def without_top_p(original):
    return lambda logits, sampling: original(logits, replace(sampling, top_p=1.0))


def test_a_missing_top_p_in_half_precision_is_detected(run):
    forgotten = patch.object(distribution, "warp_logits", without_top_p(distribution.warp_logits))
    found = run(planted=forgotten, limit=6, **COUPLED)
    assert found.bad
    allowed = found.manifest["tolerance"]["value"] / 1.5
    assert found.gap("vanilla") > allowed
    found.print_finding(
        "top-p forgotten by the engine in bf16", f"{found.gap('vanilla'):.2f} > {allowed:.2f}"
    )


def test_a_method_without_top_p_in_half_precision_is_detected(run):
    class Forgets(Sps):
        name = "faulty"

        def start(self, session):
            super().start(session)
            session._chooser.sampling = replace(session.sampling, top_p=1.0)

    found = run(Forgets(), limit=6, **COUPLED)
    assert list(found.reasons) == ["faulty"]
    allowed = found.manifest["tolerance"]["value"] / 1.5
    found.print_finding(
        "top-p forgotten by a method in bf16", f"{found.gap('faulty'):.2f} > {allowed:.2f}"
    )


# ---- likelihood of sampled outputs ------------------------------------------------


def deviations(found):
    return {label: compute_likelihood_deviation(found.of(label)) for label in ("vanilla", "faulty")}


@pytest.mark.parametrize("method", [DrawsFromTen, ColderThanReported])
def test_a_draft_sampled_from_another_distribution_is_detected_by_likelihood(run, method):
    found = run(method(), limit=8, **WARM)
    at = deviations(found)
    found.print_finding(
        method.__doc__, f"{at['faulty'][0]:+.1f} deviations, p {at['faulty'][1]:.1g}"
    )
    assert list(found.reasons) == ["faulty"]
    assert "standard deviations" in found.reasons["faulty"]


def test_a_token_outside_top_k_under_rejection_is_a_mismatch(run):
    class Forgets(Sps):
        name = "faulty"

        def start(self, session):
            super().start(session)
            session._chooser.sampling = replace(session.sampling, top_k=0)

    found = run(Forgets(), limit=6, temperature=2.0, top_k=5, verify="rejection")
    assert list(found.reasons) == ["faulty"]
    assert found.print_finding("top-k forgotten under rejection", found.reasons["faulty"])


# ---- records that contradict themselves --------------------------------------------------


def relabelled(self, session, draft):
    """Report recovered tokens as accepted. The committed tokens have the right origin."""
    for step in correct_step(self, session, draft):
        words = tuple("accepted" if w == "recovered" else w for w in step.outcome.origin)
        yield replace(step, outcome=replace(step.outcome, origin=words))


def relabelled_everywhere(self, session, draft):
    """Report recovered tokens as accepted, also in the committed tokens."""
    outcome = session.verify(draft, session.score(draft))
    words = tuple("accepted" if w == "recovered" else w for w in outcome.origin)
    committed = session.commit(replace(outcome, origin=words))
    self.observe(session, committed)
    yield session.step(draft, committed)


def relabelled_with_a_path(self, session, draft):
    """Report recovered tokens as accepted, with a draft node for each."""
    outcome = session.verify(draft, session.score(draft))
    words = tuple("accepted" if w == "recovered" else w for w in outcome.origin)
    committed = session.commit(replace(outcome, origin=words))
    self.observe(session, committed)
    path = tuple(range(words.count("accepted")))
    yield session.step(draft, replace(committed, path=path[: committed.origin.count("accepted")]))


def in_twos(self, session, draft):
    """Report two steps as one."""
    (first,) = correct_step(self, session, draft)
    if session.finish is not None:
        yield first
        return
    (second,) = correct_step(self, session, self.propose(session, session.max_draft_length()))
    a, b = first.outcome, second.outcome
    draft = session.chain([*first.draft.tokens.tolist(), *second.draft.tokens.tolist()])
    path = (*a.path, *(first.draft.nodes + node for node in b.path))
    both = Outcome(path, a.committed + b.committed, a.origin + b.origin, a.tested + b.tested)
    yield replace(second, draft=draft, outcome=both)


def without_entries(self, session, draft):
    """Delete the verification from the trace."""
    yield from correct_step(self, session, draft)
    del session.harness.meter.forwards[-1]


def untold(self, session, draft):
    """Report no step."""
    list(correct_step(self, session, draft))
    return iter(())


def beside_commit(self, session, draft):
    """Append a token without committing it."""
    yield from correct_step(self, session, draft)
    if session.finish is None:
        session.tokens().append(session.tokens()[-1])


def more_nodes(self, session, draft):
    """Report draft nodes that were not scored."""
    for step in correct_step(self, session, draft):
        tail = [0] * 40
        yield replace(step, draft=session.chain([*step.draft.tokens.tolist(), *tail]))


def decided_twice(self, session, draft):
    """Verify the draft, and then its accepted tokens once more."""
    rows = session.score(draft)
    n_accepted = len(session.verify(draft, rows).path)
    short = session.chain(draft.tokens[:n_accepted])
    committed = session.commit(session.verify(short, rows[: n_accepted + 1]))
    self.observe(session, committed)
    yield session.step(short, committed)


def tells_no_draft(self, session, draft):
    """Report every step as if nothing had been drafted."""
    for step in correct_step(self, session, draft):
        words = tuple("plain" for _ in step.outcome.origin)
        yield replace(step, draft=None, outcome=Outcome((), step.outcome.committed, words, 0))


LIES = [
    ReportsOnlyAccepted, VerifiesOnlyMatchingTokens, decided_twice, tells_no_draft,
    relabelled, relabelled_everywhere, relabelled_with_a_path, in_twos, without_entries, untold,
    beside_commit, more_nodes,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_method_that_reports_false_steps_fails(run, lie):
    method = lie if isinstance(lie, type) else make_method(lie)
    found = run(method())
    assert found.bad
    assert list(found.errors) == ["faulty"]
    found.print_finding((lie.__doc__ or "").strip(), found.errors["faulty"])


@pytest.fixture(scope="module")
def unplanted(run):
    """The folder of a run without a fault."""
    return run().path


@pytest.mark.parametrize(
    ("column", "to"), [("accepted", 3), ("committed", 9), ("levels", 0), ("nodes", 99)]
)
def test_inconsistent_records_on_disk_are_rejected(unplanted, tmp_path, column, to):
    path = shutil.copytree(unplanted, tmp_path / "run")
    file = path / "records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    line = next(each for each in lines if each["label"] == "sps")
    line["steps"][column][0] = to
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(UsageError, match=r"line \d+ is not a valid record: "):
        load_side(str(path))


# ---- state kept between prompts ------------------------------------------------


class Remembers(Sps):
    """A method that drafts its earlier output if it has seen the prompt before."""

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
    """A method with a random draft length that does not depend on the seed."""

    name = "faulty"
    chance = random.Random(0)  # by chance, a prompt may get the same lengths again

    def propose(self, session, limit):
        return super().propose(session, min(limit, self.chance.randint(1, 4)))


@pytest.mark.parametrize("method", [ForgetsFromTheSixth, Remembers, OfNoSeed])
def test_state_kept_between_prompts_is_detected_at_the_end_of_the_pass(run, method):
    found = run(method(), limit=7, max_new_tokens=12)
    assert found.bad
    assert {r.verdict.kind for r in found.of("faulty")} == {"identical"}
    assert list(found.reasons) == ["faulty"]
    assert found.print_finding(method.__doc__, found.reasons["faulty"])


# ---- NaN and infinite logits ------------------------------------------------


WILD = {"limit": 1, "max_new_tokens": 4}
NUMBERS = [("float32", torch.nan), ("bfloat16", torch.inf), ("float16", torch.nan)]


def run_with_number(run, model, number, **more):
    """Return a run in which all weights of the final norm of `model` are `number`."""
    _, bench = run.loaded(**more)
    weights = bench.workspace.decoders[model].weights
    norm = torch.full_like(weights.final_norm, number)
    return run(planted=patch.object(weights, "final_norm", norm), **more)


@pytest.mark.parametrize(("dtype", "number"), NUMBERS)
def test_non_finite_target_logits_fail_the_outputs_with_their_step(run, dtype, number):
    for rule in ({}, WARM) if dtype == "float32" else ({},):
        found = run_with_number(run, "target", number, **{**rule, **WILD, "dtype": dtype})
        assert found.bad
        assert found.errors.keys() == {"vanilla", "sps"}
        assert all("step 0: the target's logits are not finite" in e for e in found.errors.values())
    found.print_finding(f"{number} in the final norm", found.errors["sps"])


@pytest.mark.parametrize(("dtype", "number"), NUMBERS)
def test_non_finite_draft_logits_fail_only_outputs_of_that_method(run, dtype, number):
    guarantees = r"step 1(: the logits of draft are|, draft.q: .* is) not finite"
    coupled = {**WARM, "verify": "coupled"}
    for rule in ({}, coupled, WARM) if dtype == "float32" else ({},):
        found = run_with_number(run, "draft", number, **{**rule, **WILD, "dtype": dtype})
        assert found.bad
        assert found.errors.keys() == {"sps"}
        assert re.search(guarantees, found.errors["sps"])
    found.print_finding(f"{number} in the draft's final norm", found.errors["sps"])


@pytest.mark.usefixtures("shipped_pair")
@pytest.mark.parametrize("head", ["eagle3", "hydra", "layerskip"])
def test_non_finite_logits_of_a_head_or_layers_fail_the_outputs(run, head):
    """Greedy decoding, in which NaN logits of a draft model would change no token."""
    original = Meter.record_logits

    def record_logits(self, name, place, logits):
        logits.view(-1)[7] = torch.nan
        original(self, name, place, logits)

    found = run(
        registry.build(head, {}), patch.object(Meter, "record_logits", record_logits), **WILD
    )
    assert found.errors.keys() == {"faulty"}
    assert re.search(r"step [01]: the logits of \S+ are not finite", found.errors["faulty"])


OURS = sorted(name for name, entry in registry.built_in_methods().items() if not entry.peer)


@pytest.mark.full
@pytest.mark.usefixtures("shipped_pair")
@pytest.mark.parametrize("name", OURS)
def test_no_method_decodes_with_non_finite_logits(run, name):
    original, recorded = Meter.record_logits, []

    def record_logits(self, model, place, logits):
        recorded.append(model)
        logits.fill_(torch.nan)
        original(self, model, place, logits)

    own = {"target": "embedded-space"} if name == "space" else {}
    found = run(
        registry.build(name, {}), patch.object(Meter, "record_logits", record_logits), **WILD, **own
    )
    assert bool(found.errors) == found.bad == bool(recorded)
    assert recorded or "draft" not in registry.load(name).needs


def test_one_non_finite_row_of_a_verification_fails_the_output(run):
    class Once(Sps):
        name = "faulty"

    original = Session.score

    def score(self, draft):
        rows = original(self, draft)
        if len(self.output()) > 4 and draft.q is None and draft.nodes > 1:
            rows = rows.clone()
            rows[1, 7] = torch.nan
        return rows

    found = run(Once(), patch.object(Session, "score", score))
    assert list(found.errors) == ["faulty"]
    assert found.print_finding("NaN in a row of a verification", found.errors["faulty"])


def test_non_finite_logits_in_the_verdict_fail_the_output(run):
    original = Oracle.logits

    def logits(self, *args):
        rows = original(self, *args).clone()
        rows[-1, 7] = torch.nan
        return rows

    found = run(planted=patch.object(Oracle, "logits", logits))
    assert found.bad
    assert "vanilla" in found.errors
    assert found.print_finding("NaN in a row of the verdict", found.errors["vanilla"])


def test_a_temperature_that_overflows_is_rejected_and_would_fail(run):
    with pytest.raises(ValueError, match=r"must be 0 \(greedy\) or at least 0.001"):
        run(temperature=1e-40, verify="coupled")
    for rule in ("coupled", "rejection"):
        with patch.object(config, "MIN_TEMPERATURE", 0.0):
            found = run(temperature=1e-40, verify=rule)
        assert found.errors.keys() == {"vanilla", "sps"}
        found.print_finding(f"temperature 1e-40, {rule}", found.errors["sps"])

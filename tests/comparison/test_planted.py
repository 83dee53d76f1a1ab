"""Tests that `compare` detects faults planted in the engine, in a method and in its times."""

from contextlib import closing, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest

import methods.sps_tree
from methods.sps import Sps
from specbench_cli.comparison.compare import compare
from specbench_cli.comparison.outcome import FAIL_ON
from specbench_cli.comparison.side_sources import load_side
from specbench_cli.config.run import RunConfig
from specbench_cli.engine.drafting.template import tree_of_choices, tree_of_widths
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify import chain as verify
from specbench_cli.judge import verdict
from specbench_cli.judge.tolerance import Tolerance
from specbench_cli.measure import repeat, stored_outputs, warm_up
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.manifest import build_manifest
from specbench_cli.plan.plan import make_plan
from specbench_cli.store.run_dir import RunDir
from tests.audit.faults.engine import accept_more_likely
from tests.views import Silent

pytestmark = pytest.mark.usefixtures("small_pair")

ROWS = ("vanilla", "sps", "sps-tree")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs with a planted fault and returns the run folder.

    The models are loaded once.
    """
    tree = {"name": "sps-tree", "params": {"depth": 4}}
    rows = [{"name": "vanilla"}, {"name": "sps"}, tree]
    settings = {"limit": 3, "max_new_tokens": 16, "threads": 1, "allow_noise": True}
    rejection = {"temperature": 1.5, "verify": "rejection"}

    def plan(**more):
        return make_plan(RunConfig.model_validate({"methods": rows, **settings, **more}))

    plans = {"greedy": plan(), "rejection": plan(**rejection)}
    with closing(Bench(plans["greedy"])) as bench, patch.object(warm_up, "WARM_UP_ROUNDS", 0):

        def run_with_fault(planted=None, rule="greedy"):
            folder = tmp_path_factory.mktemp("made") / "run"
            run_dir = RunDir.create(folder, build_manifest(plans[rule], {}))
            run_dir.update(models=bench.model_entries(), heads=bench.head_entries())
            with planted or nullcontext():
                repeat.Repeat(
                    plans[rule], bench, run_dir, stored_outputs.StoredOutputs(), Silent()
                ).run(1)
            run_dir.close("finished", noisy=True)
            return folder

        yield run_with_fault


@pytest.fixture(scope="module")
def base(run):
    """A run without a fault."""
    return run()


@pytest.fixture
def copy_as_quiet(tmp_path):
    """Return a function that copies a run, edits its records and labels it quiet."""

    def copy_run(folder, name, change=lambda record: record):
        run = RunDir.open(folder)
        copy = RunDir.create(tmp_path / name, {**run.manifest, "noisy": False})
        copy.append_prompts(list(run.prompts()))
        copy.append([change(record) for record in run.records()])
        return copy.path

    return copy_run


def compare_rows(base, new):
    found = compare(load_side(str(base)), load_side(str(new)), tolerance=0.05, fail_on=FAIL_ON)
    return {row.key.label: row for row in found.rows}


def outcomes(base, new):
    return {label: row.outcome for label, row in compare_rows(base, new).items()}


def messages(base, new, label):
    return " ".join(found.message for found in compare_rows(base, new)[label].findings)


def only_row(label, outcome):
    """Return the outcomes in which only the row `label` is not "same"."""
    return dict.fromkeys(ROWS, "same") | {label: outcome}


def test_equal_runs_are_the_same_by_exact_ids_and_counters(run, base):
    rows = compare_rows(base, run())
    assert {label: row.outcome for label, row in rows.items()} == dict.fromkeys(ROWS, "same")
    assert {row.rule for row in rows.values()} == {"exact"}


def test_verification_that_stops_one_token_early_lowers_mat(run, base):
    original = verify.match
    early = patch.object(verify, "match", lambda *arguments: max(0, original(*arguments) - 1))
    new = run(early)
    assert outcomes(base, new) == only_row("sps", "mat")
    base_outputs = load_side(str(base)).outputs
    assert all(
        output.ids == base_outputs[key].ids for key, output in load_side(str(new)).outputs.items()
    )
    assert "accepted levels" in messages(base, new, "sps")


def test_a_tree_with_one_node_less_is_reported_by_its_node_count(run, base):
    smaller = patch.object(
        methods.sps_tree,
        "tree_of_widths",
        lambda widths: tree_of_choices(tree_of_widths(widths).nodes[:-1]),
    )
    new = run(smaller)
    assert outcomes(base, new) == only_row("sps-tree", "mat")
    assert "nodes" in messages(base, new, "sps-tree")


def test_a_wrong_draft_state_lowers_mat(run, base):
    original = Sps.start

    def stale(self, session):
        """Start with the pending tokens in reverse order."""
        flipped = Tokens(session.pending_tokens(0).ids.flip(1))
        with patch.object(session, "pending_tokens", lambda _: flipped):
            original(self, session)

    new = run(patch.object(Sps, "start", stale))
    assert outcomes(base, new) == only_row("sps", "mat")
    assert "MAT" in messages(base, new, "sps")


def test_verification_that_accepts_a_wrong_token_is_broken(run, base):
    original = verify.match
    lax = patch.object(
        verify, "match", lambda draft, *more: min(len(draft), original(draft, *more) + 1)
    )
    # A fixed tolerance, because measuring it takes seconds.
    known = Tolerance(value=1e-4, largest=5e-5, ceiling=1e-3, positions=512)
    with patch.object(verdict, "measure_tolerance", lambda *_: known):
        new = run(lax)
    assert outcomes(base, new) == only_row("sps", "broken")
    assert "mismatch" in messages(base, new, "sps")


def test_a_changed_distribution_without_a_verdict_is_a_changed_output(run):
    base = run(rule="rejection")
    assert outcomes(base, run(rule="rejection")) == dict.fromkeys(ROWS, "same")
    new = run(patch.object(verify, "rejection", accept_more_likely), rule="rejection")
    assert outcomes(base, new) == only_row("sps", "changed-output")


def slow_down_drafts(by):
    """Return an edit of records that makes every draft forward of sps `by` times as long.

    Everything after a forward is shifted.
    """

    def change(record):
        trace, shift, t0, t1 = record.forwards, 0, [], []
        if record.label != "sps":
            return record
        for kind, begin, end in zip(trace.kind, trace.t0_ns, trace.t1_ns, strict=True):
            t0.append(begin + shift)
            if trace.kinds[kind].role == "draft":
                shift += round((by - 1) * (end - begin))
            t1.append(end + shift)
        ns = record.ns
        longer = {name: getattr(ns, name) + shift for name in ("total", "decode", "draft")}
        trace = replace(trace, t0_ns=t0, t1_ns=t1)
        return replace(record, forwards=trace, ns=replace(ns, **longer))

    return change


def test_an_8_percent_slower_draft_is_found_by_its_forward_time(base, copy_as_quiet):
    old = copy_as_quiet(base, "base")
    assert outcomes(old, copy_as_quiet(base, "same")) == dict.fromkeys(ROWS, "same")
    new = copy_as_quiet(base, "slower", slow_down_drafts(1.08))
    assert outcomes(old, new) == only_row("sps", "slower")
    assert "draft forward" in messages(old, new, "sps")
    assert outcomes(old, copy_as_quiet(base, "a bit slower", slow_down_drafts(1.03))) == only_row(
        "sps", "same"
    )

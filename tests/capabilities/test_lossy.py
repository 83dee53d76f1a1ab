"""Accept rules that are not exact: a plug-in method with its own rule, from the run to the
report."""

import re
from pathlib import Path

import pytest

from specbench_cli.audit.runner import audit
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.measure import run as execute
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary import metrics, text
from tests.views import Silent

pytestmark = pytest.mark.usefixtures("small_pair")

PLUGIN = str(Path(__file__).parent / "plugins" / "lossy.py")


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    """Function that runs methods and vanilla on a small pair."""

    def run(*rows, **config):
        checked = RunConfig.model_validate(
            {"methods": [{"name": "vanilla"}, *rows], "plugins": [PLUGIN], "limit": 6,
             "max_new_tokens": 40, "isolation": "none", "allow_noise": True, "threads": 1, **config}
        )  # fmt: skip
        view, folder = Silent(), tmp_path_factory.mktemp("runs") / "run"
        plan, run_dir = execute.start_run(checked, {}, folder, view)
        return RunDir.open(execute.measure_run(plan, run_dir, view).run_dir)

    return run


def sum_counters(run, label):
    own = [record for record in run.records() if record.label == label]
    assert own and all(record.error is None for record in own)
    return own, {
        name: sum(sum(getattr(record.steps, name)) for record in own)
        for name in ("levels", "tested", "accepted", "relaxed", "committed")
    }


@pytest.fixture(scope="module")
def measured(decode):
    """Records of the lossy method, and of the control at the rate that the report recommends."""
    alone = decode({"name": "lossy"})
    (hint,) = [line for line in text.controls(read_report_data(alone).summary) if "lossy" in line]
    rate = float(re.search(r"RandomAccept\(([\d.]+)\)", hint)[1])
    control = {"name": "lossy", "label": "control", "params": {"control": rate}}
    return alone, rate, decode({"name": "lossy"}, control)


def test_relaxed_tokens_are_counted_separately(measured):
    alone, rate, _ = measured
    records, counts = sum_counters(alone, "lossy")
    assert counts["relaxed"] > 10
    assert rate == pytest.approx(
        counts["relaxed"] / (counts["tested"] - counts["accepted"]), rel=1e-2
    )
    for record in records:
        assert record.guarantee == "quality_only" and record.verdict.kind == "unchecked"
        assert record.origin.count("relaxed") == sum(record.steps.relaxed)
        assert record.origin.count("accepted") == sum(record.steps.accepted)
    vanilla = [record for record in alone.records() if record.label == "vanilla"]
    assert all(record.steps.relaxed is None for record in vanilla)
    assert [a.output_ids for a in records] != [b.output_ids for b in vanilla]


def test_metrics_separate_accepted_from_relaxed_tokens(measured):
    _, counts = sum_counters(measured[0], "lossy")
    (row,) = read_report_data(measured[0]).summary.lossy
    assert row.relaxed == pytest.approx(counts["relaxed"] / counts["committed"])
    assert row.acceptance_rate == pytest.approx(counts["accepted"] / counts["levels"])
    assert row.alpha == pytest.approx(counts["accepted"] / counts["tested"])
    steps = sum(len(record.steps.levels) for record in sum_counters(measured[0], "lossy")[0])
    assert row.mat == pytest.approx(counts["committed"] / steps)
    assert sum(row.acceptance_by_position) < len(row.acceptance_by_position)


def test_the_control_accepts_as_many_tokens_at_random(measured):
    _, rate, both = measured
    _, own = sum_counters(both, "lossy")
    _, control = sum_counters(both, "control")
    judged = control["tested"] - control["accepted"]
    spread = (rate * (1 - rate) / judged) ** 0.5
    assert abs(control["relaxed"] / judged - rate) < 4 * spread
    assert own["relaxed"] > 10
    summary = read_report_data(both).summary
    rows = {row.label: row for row in summary.lossy}
    assert rows["control"].control and not rows["lossy"].control
    assert metrics.verdicts(rows["control"]).startswith("control, ")
    assert rows["control"].accept_rule == f"random(rate={rate:g})"
    near = abs(rows["control"].rule_rate - rows["lossy"].rule_rate) <= 0.05
    assert (text.controls(summary) == []) == near


def test_the_same_seed_relaxes_the_same_tokens(decode, measured):
    _, rate, both = measured
    again = decode({"name": "lossy", "label": "control", "params": {"control": rate}})
    ids = [[r.output_ids for r in sum_counters(run, "control")[0]] for run in (both, again)]
    assert ids[0] == ids[1]


def test_batched_sequences_relax_the_same_tokens(decode, measured):
    together = decode({"name": "lossy"}, batch=3)
    outputs = [
        {record.prompt_id: record.output_ids for record in sum_counters(run, "lossy")[0]}
        for run in (measured[0], together)
    ]
    assert outputs[0] == outputs[1]


def test_with_the_rule_off_it_is_lossless(decode):
    run = decode({"name": "lossy", "params": {"control": 0.0}}, limit=3)
    own = [record for record in run.records() if record.label == "lossy"]
    assert {record.verdict.kind for record in own} <= {"identical", "near-tie"}
    assert {record.guarantee for record in own} == {"exact_tokens"}
    assert all(record.steps.relaxed is None for record in own)
    assert run.manifest["rows"][1]["accept"] is None


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_sampled_outputs_are_relaxed_too(decode, verify):
    run = decode({"name": "lossy"}, limit=2, temperature=0.8, verify=verify)
    assert sum_counters(run, "lossy")[1]["relaxed"] > 0


@pytest.mark.parametrize(
    ("verify", "heat", "why"),
    [("block", 0.8, "verifies whole blocks"), ("replay", 0.0, "emits vanilla's tokens")],
)
def test_an_accept_rule_without_effect_is_refused(decode, verify, heat, why):
    with pytest.raises(UsageError, match=f"lossy has an accept rule.*--verify {verify} {why}"):
        decode({"name": "lossy"}, verify=verify, temperature=heat)


def test_it_is_audited_for_its_guarantee():
    found = audit("lossy", [PLUGIN])
    assert found.verdict == "NO CLAIM" and found.passed
    checks = {finding.check: finding for finding in found.findings}
    assert {"states", "counters"} <= checks.keys() and checks["counters"].figure["steps"] > 100

"""Tests of the control methods that a run adds for each lossy method."""

import json

import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.measure import run as execute
from specbench_cli.plan.controls import add_controls
from specbench_cli.report.report_data import read_report_data
from specbench_cli.report.terminal.table import run_text
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary import metrics, text
from tests.views import Silent

pytestmark = pytest.mark.usefixtures("small_pair")
OWN = ["vanilla", "typical", "draft-alone", "sps", "random for typical"]


def config_of(*rows, **settings):
    return RunConfig.model_validate(
        {"methods": [{"name": "vanilla"}, *rows], "limit": 4, "max_new_tokens": 16,
         "allow_noise": True, "threads": 1, **settings}
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of a lossy method and its controls."""
    folder, view = tmp_path_factory.mktemp("runs") / "run", Silent()
    row = {"name": "typical", "params": {"epsilon": 0.001, "delta": 1.0}}
    plan, run_dir = execute.start_run(config_of(row), {}, folder, view)
    return RunDir.open(execute.measure_run(plan, run_dir, view).run_dir)


def labels(config):
    return [row.label for row in add_controls(config).methods]


def test_a_lossy_method_adds_its_controls():
    assert labels(config_of("typical")) == OWN
    ruled = {"name": "sps", "label": "lax", "params": {"accept": "threshold", "epsilon": 0.1}}
    assert labels(config_of(ruled)) == ["vanilla", "lax", "draft-alone", "sps exact",
                                        "random for lax"]  # fmt: skip
    (exact, random) = add_controls(config_of(ruled)).methods[-2:]
    assert exact.params == {} and random.params == {"accept": "random", "like": "lax"}


def test_each_setting_has_its_own_random_control_and_shares_the_others():
    rows = [{"name": "lenient", "label": f"at {f}", "params": {"factor": f, "length": 3}}
            for f in (0.2, 0.5, 1.0)]  # fmt: skip
    found = add_controls(config_of(*rows, "typical")).methods
    assert [row.label for row in found[5:]] == [
        "draft-alone", "sps", "random for at 0.2", "random for at 0.5", "sps (control)",
        "random for typical",
    ]  # fmt: skip
    assert [row.params.get("length") for row in found[6:9]] == [3, 3, 3]


@pytest.mark.parametrize(
    ("rows", "settings", "added"),
    [
        (["sps", "pld"], {}, []),
        (["typical"], {"controls": "none"}, []),
        (["typical", "draft-alone", "sps"], {}, ["random for typical"]),
        (["typical", "random-accept"], {}, ["draft-alone", "sps"]),
        ([{"name": "typical", "params": {"epsilon": 1.0, "delta": 1e9}}], {}, []),
        (["typical"], {"tune": 2}, []),
    ],
    ids=["lossless", "none asked", "there already", "a rate of the user's", "off", "tuned"],
)
def test_no_control_is_added_unless_it_is_missing(rows, settings, added):
    config = config_of(*rows, **settings)
    assert labels(config) == [row.label for row in config.methods] + added


def test_the_random_control_has_the_measured_rate(finished):
    assert list(dict.fromkeys(record.label for record in finished.records())) and not [
        record.error for record in finished.records() if record.error
    ]
    rows = {row.label: row for row in read_report_data(finished).summary.rows}
    assert sorted(rows) == sorted(OWN)
    rate = finished.manifest["rates"]["typical"]
    first = [r.steps for r in finished.records() if r.label == "typical" and r.turn == 1]
    rejected = sum(sum(steps.tested) - sum(steps.accepted) for steps in first)
    assert rate == pytest.approx(sum(sum(steps.relaxed) for steps in first) / rejected, abs=1e-4)
    assert 0 < rate < 1 and rows["random for typical"].params["rate"] == rate
    assert rows["random for typical"].accept_rule == f"random(rate={rate:g})"
    assert {label for label, row in rows.items() if row.control} == {
        "draft-alone", "random for typical",
    }  # fmt: skip


STEPS = {
    "specreason": {"threshold": 6.0, "cap": 8},
    "atts": {"alpha": 0.5, "cap": 8, "known": 4},
    "speculative-thinking": {"reflect": ["e"], "cap": 8, "probe": 4},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_method_adds_itself_with_random_acceptance(name):
    found = add_controls(config_of(name)).methods
    assert [row.label for row in found] == [
        "vanilla", name, "draft-alone", "sps", f"random for {name}",
    ]  # fmt: skip
    assert (found[-1].name, found[-1].params) == (name, {"like": name})
    changed = {"name": name, "label": "mine", "params": {"cap": 8}}
    assert add_controls(config_of(changed)).methods[-1].params == {"cap": 8, "like": "mine"}
    coin = {"name": name, "label": "coin", "params": {"rate": 0.3}}
    assert labels(config_of(name, coin)) == ["vanilla", name, "coin", "draft-alone", "sps"]


@pytest.fixture(scope="module")
def run_of_steps(tmp_path_factory):
    """A finished run of methods that accept whole reasoning steps, with their controls."""
    folder, view = tmp_path_factory.mktemp("runs") / "run", Silent()
    rows = [{"name": name, "params": params} for name, params in STEPS.items()]
    plan, run_dir = execute.start_run(config_of(*rows, tasks=["chains"]), {}, folder, view)
    return RunDir.open(execute.measure_run(plan, run_dir, view).run_dir)


@pytest.mark.parametrize("name", ["specreason", "atts"])
def test_the_rate_of_the_random_control_is_the_share_of_accepted_steps(run_of_steps, name):
    rows = {row.label: row for row in read_report_data(run_of_steps).summary.rows}
    counts = [record.extra for record in run_of_steps.records() if record.label == name]
    judged, accepted = (sum(each[counter] for each in counts) for counter in ("spans", "stood"))
    rate = run_of_steps.manifest["rates"][name]
    assert rows[name].rule_rate == accepted / judged
    assert 0 < rate < 1
    # The rate was measured in a run of its own, and ATTS learns from prompt to prompt.
    assert rate == pytest.approx(accepted / judged, abs=0.5 if name == "atts" else 1e-4)
    control = rows[f"random for {name}"]
    assert control.control and control.params["rate"] == rate
    assert control.accept_rule == f"random(rate={rate:g})"
    assert rows[name].over_random is not None


def test_lossy_methods_have_token_accounting_in_every_report(run_of_steps, tmp_path):
    from specbench_cli.report.content import write_markdown
    from specbench_cli.report.html.page import write_html
    from specbench_cli.report.outputs import write

    reading = read_report_data(run_of_steps)
    rows = {row.label: row for row in reading.summary.rows}
    for name in STEPS:
        own, records = rows[name], [r for r in run_of_steps.records() if r.label == name]
        written = own.draft_kept + own.target_kept + (own.method_kept or 0)
        assert written == sum(record.n_tokens for record in records)
        assert own.scored == sum(record.extra["scored"] for record in records) > 0
        for counter in ("draft_discarded", "target_discarded"):
            assert getattr(own, counter) == sum(r.extra.get(counter, 0) for r in records)
    assert rows["sps"].draft_kept is rows["draft-alone"].draft_kept is None
    write_markdown(reading, tmp_path, [])
    page = (tmp_path / "report.md").read_text()
    assert "Token accounting of lossy methods" in page and "| draft discarded |" in page
    write_html(reading, tmp_path, figures=[])
    assert "draft discarded" in (tmp_path / "report.html").read_text()
    write(reading, tmp_path, ["json"])
    (row_dict,) = (
        row
        for row in json.loads((tmp_path / "summary.json").read_text())["rows"]
        if (row["family"], row["label"]) == ("all", "specreason")
    )
    assert row_dict["draft_kept"] == rows["specreason"].draft_kept


def test_reports_do_not_mix_a_control_with_its_method(run_of_steps):
    from specbench_cli.report import claims
    from specbench_cli.report.html.methods import make_cards

    reading = read_report_data(run_of_steps)
    claimed = claims.compare_claims(reading.summary, reading.facts)
    assert claimed and not any(line.row.control for line in claimed)
    (card,) = (each for each in make_cards(reading.summary) if each.name == "specreason")
    values = {param.name: param.values for param in card.params}
    assert values["cap"] == (("", "8"),) and values["delimiter"] == (("", "\\n"),)
    assert dict(values["like"])["random for specreason"] == "specreason"


def test_token_accounting_of_a_token_rule_comes_from_its_steps(finished):
    rows = {row.label: row for row in read_report_data(finished).summary.rows}
    own, records = rows["typical"], [r for r in finished.records() if r.label == "typical"]
    assert own.draft_kept + own.target_kept == sum(record.n_tokens for record in records)
    assert own.draft_kept + own.draft_discarded == sum(sum(r.steps.nodes) for r in records)
    assert own.scored is None and rows["sps"].draft_kept is None


def test_draft_alone_has_no_target_forwards(finished):
    own = [record for record in finished.records() if record.label == "draft-alone"]
    for record in own:
        assert record.target_forwards == 0 == record.target_equivalents
        assert record.draft_forwards == record.n_tokens
        assert record.guarantee == "quality_only" and record.verdict.kind == "unchecked"
    rows = {row.label: row for row in read_report_data(finished).summary.rows}
    assert rows["draft-alone"].per_forward is None and rows["draft-alone"].share_target == 0
    assert rows["vanilla"].per_forward == 1


def test_lossy_methods_have_their_own_table_with_accuracy_loss(finished):
    summary = read_report_data(finished).summary
    assert {row.label for row in summary.lossless} == {"vanilla", "sps"}
    for row in summary.lossy:
        assert row.score_difference_low is not None and row.n_scored == 4
        assert metrics.accuracy_note(row).endswith("points, n 4")
    values = run_text(summary, read_report_data(finished).facts)
    head, lossy = values.split(text.LOSSY)
    assert "typical" not in head and "sps" not in lossy.partition("group:")[0]
    assert "less vanilla's" in lossy and "tok/fwd" in lossy
    assert not text.controls(summary)


@pytest.mark.parametrize(
    ("like", "settings", "why"),
    [
        ("nobody", {}, "no method with this label has an accept rule"),
        ("sps", {}, "no method with this label has an accept rule"),
        ("typical", {"executor": "ray"}, "does not measure the rate before the run"),
    ],
)
def test_a_rate_that_cannot_be_measured_is_rejected(like, settings, why, tmp_path):
    control = {"name": "random-accept", "params": {"like": like}}
    with pytest.raises(
        UsageError, match=f"random-accept cannot copy the acceptance rate of.*{why}"
    ):
        execute.start_run(
            config_of("sps", "typical", control, **settings), {}, tmp_path / "r", Silent()
        )

"""The controls of lossy rows: brought by the run, at the rate that was measured, or left out."""

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


def config_of(*rows, **given):
    return RunConfig.model_validate(
        {"methods": [{"name": "vanilla"}, *rows], "limit": 4, "max_new_tokens": 16,
         "allow_noise": True, "threads": 1, **given}
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a lossy row with what it brings."""
    folder, view = tmp_path_factory.mktemp("runs") / "run", Silent()
    row = {"name": "typical", "params": {"epsilon": 0.001, "delta": 1.0}}
    plan, run_dir = execute.start_run(config_of(row), {}, folder, view)
    return RunDir.open(execute.measure_run(plan, run_dir, view).run_dir)


def labels(config):
    return [row.label for row in add_controls(config).methods]


def test_a_lossy_row_brings_its_controls():
    assert labels(config_of("typical")) == OWN
    ruled = {"name": "sps", "label": "lax", "params": {"accept": "threshold", "epsilon": 0.1}}
    assert labels(config_of(ruled)) == ["vanilla", "lax", "draft-alone", "sps exact",
                                        "random for lax"]  # fmt: skip
    (exact, random) = add_controls(config_of(ruled)).methods[-2:]
    assert exact.params == {} and random.params == {"accept": "random", "like": "lax"}


def test_each_setting_has_its_own_random_row_and_all_share_the_others():
    rows = [{"name": "lenient", "label": f"at {f}", "params": {"factor": f, "length": 3}}
            for f in (0.2, 0.5, 1.0)]  # fmt: skip
    found = add_controls(config_of(*rows, "typical")).methods
    assert [row.label for row in found[5:]] == [
        "draft-alone", "sps", "random for at 0.2", "random for at 0.5", "sps (control)",
        "random for typical",
    ]  # fmt: skip
    assert [row.params.get("length") for row in found[6:9]] == [3, 3, 3]


@pytest.mark.parametrize(
    ("rows", "given", "brought"),
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
def test_nothing_is_brought_that_is_not_lacking(rows, given, brought):
    config = config_of(*rows, **given)
    assert labels(config) == [row.label for row in config.methods] + brought


def test_the_random_row_has_the_rate_that_was_measured(finished):
    assert list(dict.fromkeys(record.label for record in finished.records())) and not [
        record.error for record in finished.records() if record.error
    ]
    rows = {row.label: row for row in read_report_data(finished).summary.rows}
    assert sorted(rows) == sorted(OWN)
    rate = finished.manifest["rates"]["typical"]
    first = [r.steps for r in finished.records() if r.label == "typical" and r.turn == 1]
    asked = sum(sum(steps.tested) - sum(steps.accepted) for steps in first)
    assert rate == pytest.approx(sum(sum(steps.relaxed) for steps in first) / asked, abs=1e-4)
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
def test_a_rule_over_steps_brings_itself_with_a_coin(name):
    found = add_controls(config_of(name)).methods
    assert [row.label for row in found] == [
        "vanilla", name, "draft-alone", "sps", f"random for {name}",
    ]  # fmt: skip
    assert (found[-1].name, found[-1].params) == (name, {"like": name})
    set_ = {"name": name, "label": "mine", "params": {"cap": 8}}
    assert add_controls(config_of(set_)).methods[-1].params == {"cap": 8, "like": "mine"}
    own = {"name": name, "label": "coin", "params": {"rate": 0.3}}
    assert labels(config_of(name, own)) == ["vanilla", name, "coin", "draft-alone", "sps"]


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """A run of rules over steps with what they bring."""
    folder, view = tmp_path_factory.mktemp("runs") / "run", Silent()
    rows = [{"name": name, "params": params} for name, params in STEPS.items()]
    plan, run_dir = execute.start_run(config_of(*rows, tasks=["chains"]), {}, folder, view)
    return RunDir.open(execute.measure_run(plan, run_dir, view).run_dir)


@pytest.mark.parametrize("name", ["specreason", "atts"])
def test_the_coins_rate_is_the_share_of_steps_that_stood(stepped, name):
    rows = {row.label: row for row in read_report_data(stepped).summary.rows}
    counts = [record.extra for record in stepped.records() if record.label == name]
    judged, stood = (sum(each[what] for each in counts) for what in ("spans", "stood"))
    rate = stepped.manifest["rates"][name]
    assert rows[name].rule_rate == stood / judged
    assert 0 < rate < 1
    # ATTS learns which chunks are strange from prompt to prompt; the others judge as they did.
    assert rate == pytest.approx(stood / judged, abs=0.5 if name == "atts" else 1e-4)
    control = rows[f"random for {name}"]
    assert control.control and control.params["rate"] == rate
    assert control.accept_rule == f"random(rate={rate:g})"
    assert rows[name].over_random is not None


def test_lossy_rows_have_a_ledger_in_every_report(stepped, tmp_path):
    from specbench_cli.report.content import write_markdown
    from specbench_cli.report.html.page import write_html
    from specbench_cli.report.outputs import write

    reading = read_report_data(stepped)
    rows = {row.label: row for row in reading.summary.rows}
    for name in STEPS:
        own, records = rows[name], [r for r in stepped.records() if r.label == name]
        written = own.draft_kept + own.target_kept + (own.method_kept or 0)
        assert written == sum(record.n_tokens for record in records)
        assert own.scored == sum(record.extra["scored"] for record in records) > 0
        for what in ("draft_discarded", "target_discarded"):
            assert getattr(own, what) == sum(r.extra.get(what, 0) for r in records)
    assert rows["sps"].draft_kept is rows["draft-alone"].draft_kept is None
    write_markdown(reading, tmp_path, [])
    page = (tmp_path / "report.md").read_text()
    assert "Token accounting of lossy methods" in page and "| draft discarded |" in page
    write_html(reading, tmp_path, figures=[])
    assert "draft discarded" in (tmp_path / "report.html").read_text()
    write(reading, tmp_path, ["json"])
    (told,) = (
        row
        for row in json.loads((tmp_path / "summary.json").read_text())["rows"]
        if (row["family"], row["label"]) == ("all", "specreason")
    )
    assert told["draft_kept"] == rows["specreason"].draft_kept


def test_no_report_takes_a_control_for_its_method(stepped):
    from specbench_cli.report import claims
    from specbench_cli.report.html.methods import make_cards

    reading = read_report_data(stepped)
    claimed = claims.compare_claims(reading.summary, reading.facts)
    assert claimed and not any(line.row.control for line in claimed)
    (card,) = (each for each in make_cards(reading.summary) if each.name == "specreason")
    shown = {param.name: param.values for param in card.params}
    assert shown["cap"] == (("", "8"),) and shown["delimiter"] == (("", "\\n"),)
    assert dict(shown["like"])["random for specreason"] == "specreason"


def test_a_rule_over_tokens_has_a_ledger_by_its_steps(finished):
    rows = {row.label: row for row in read_report_data(finished).summary.rows}
    own, records = rows["typical"], [r for r in finished.records() if r.label == "typical"]
    assert own.draft_kept + own.target_kept == sum(record.n_tokens for record in records)
    assert own.draft_kept + own.draft_discarded == sum(sum(r.steps.nodes) for r in records)
    assert own.scored is None and rows["sps"].draft_kept is None


def test_the_draft_alone_is_recorded_without_the_target(finished):
    own = [record for record in finished.records() if record.label == "draft-alone"]
    for record in own:
        assert record.target_forwards == 0 == record.target_equivalents
        assert record.draft_forwards == record.n_tokens
        assert record.guarantee == "quality_only" and record.verdict.kind == "unchecked"
    rows = {row.label: row for row in read_report_data(finished).summary.rows}
    assert rows["draft-alone"].per_forward is None and rows["draft-alone"].share_target == 0
    assert rows["vanilla"].per_forward == 1


def test_lossy_rows_have_a_table_of_their_own_with_what_they_cost(finished):
    summary = read_report_data(finished).summary
    assert {row.label for row in summary.lossless} == {"vanilla", "sps"}
    for row in summary.lossy:
        assert row.score_difference_low is not None and row.n_scored == 4
        assert metrics.accuracy_note(row).endswith("points, n 4")
    shown = run_text(summary, read_report_data(finished).facts)
    head, lossy = shown.split(text.LOSSY)
    assert "typical" not in head and "sps" not in lossy.partition("group:")[0]
    assert "less vanilla's" in lossy and "tok/fwd" in lossy
    assert not text.controls(summary)


@pytest.mark.parametrize(
    ("like", "given", "why"),
    [
        ("nobody", {}, "no method with this label has an accept rule"),
        ("sps", {}, "no method with this label has an accept rule"),
        ("typical", {"executor": "ray"}, "does not measure the rate before the run"),
    ],
)
def test_a_rate_that_cannot_be_measured_is_refused(like, given, why, tmp_path):
    control = {"name": "random-accept", "params": {"like": like}}
    with pytest.raises(
        UsageError, match=f"random-accept cannot copy the acceptance rate of.*{why}"
    ):
        execute.start_run(
            config_of("sps", "typical", control, **given), {}, tmp_path / "r", Silent()
        )

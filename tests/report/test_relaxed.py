"""Tests of relaxed tokens in reports: their counts, their accept rule and their random control."""

from dataclasses import replace

import pytest

from specbench_cli.report.content import report
from specbench_cli.report.document import make_grid
from specbench_cli.report.export import row_dicts
from specbench_cli.report.markdown import render
from specbench_cli.report.paper.methods_text import sentences
from specbench_cli.report.report_data import Incidents
from specbench_cli.report.terminal.side_by_side import RELAXED, page
from specbench_cli.report.terminal.table import WIDTH, run_text
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import Params, Steps
from specbench_cli.summary import metrics, text
from specbench_cli.summary.comparison import compare_outputs
from specbench_cli.summary.metrics import SPEED
from specbench_cli.summary.summary import summarise

RULES = {"lax": "typical(epsilon=0.09, delta=0.3)", "coin": "random(rate=0.5)"}


@pytest.fixture
def make_summary(synthetic, manifest):
    """Return a function that returns a summary of vanilla, sps and lossy sps, and its inputs."""
    lossy = {
        label: synthetic.Fake(label, "sps", 5, 0.6, 1.2, 0.1, guarantee="quality_only",
                              verdict="unchecked", relaxed=rate)
        for label, rate in (("lax", 0.5), ("coin", 0.5), ("rare", 0.05))
    }  # fmt: skip

    def make(*labels, rules=RULES):
        fakes = [synthetic.vanilla, synthetic.sps, *(lossy[label] for label in labels)]
        records = [
            replace(r, params=Params({}, {"length": 5, "accept": rules[r.label].split("(")[0]}))
            if r.label in rules
            else r
            for r in synthetic.records(fakes, prompts=24)
        ]
        rows = [{"label": fake.label, "accept": rules.get(fake.label)} for fake in fakes]
        own = manifest | {"rows": rows}
        return summarise(records, own, resamples=50), own, records

    return make


def row_of(summary, label):
    return next(row for row in summary.rows if row.label == label)


def test_figures_are_sums_of_the_counters(make_summary):
    summary, _, records = make_summary("lax")
    own = [r.steps for r in records if r.label == "lax"]
    names = ("levels", "nodes", "tested", "accepted", "relaxed", "committed")
    total = {name: sum(sum(getattr(steps, name)) for steps in own) for name in names}
    row = row_of(summary, "lax")
    assert row.relaxed == total["relaxed"] / total["committed"]
    assert row.rule_rate == total["relaxed"] / (total["tested"] - total["accepted"])
    assert row.acceptance_rate == total["accepted"] / total["levels"]
    tokens = sum(r.n_tokens for r in records if r.label == "lax")
    assert row.discard_rate == (total["nodes"] - total["accepted"] - total["relaxed"]) / tokens
    assert row.accept_rule == RULES["lax"] and not row.control
    assert row_of(summary, "sps").relaxed is row_of(summary, "sps").rule_rate is None
    assert {d["relaxed"] for d in row_dicts(summary) if d["label"] == "vanilla"} == {None}


def test_acceptance_by_position_is_computed_from_the_origins(make_summary):
    summary, _, records = make_summary("lax")
    drafted, accepted = [0] * 5, [0] * 5
    for record in (r for r in records if r.label == "lax"):
        at = 1
        for levels, committed in zip(record.steps.levels, record.steps.committed, strict=True):
            for level in range(levels):
                drafted[level] += 1
                accepted[level] += level < committed and record.origin[at + level] == "accepted"
            at += committed
    expected = [a / b for a, b in zip(accepted, drafted, strict=True)]
    assert list(row_of(summary, "lax").acceptance_by_position) == expected
    assert record.steps.relaxed and record.origin is not None


@pytest.mark.parametrize(("labels", "lacking"), [(("lax",), True), (("lax", "coin"), False),
                                                 (("lax", "rare"), True)])  # fmt: skip
def test_a_lossy_method_without_a_control_gets_a_hint_how_to_add_it(make_summary, labels, lacking):
    rules = RULES | {"rare": "random(rate=0.05)"}
    summary, *_ = make_summary(*labels, rules=rules)
    rate = row_of(summary, "lax").rule_rate
    line = (
        f"no control accepts as many as lax, {rate:.3g} of the rejected levels: add --sweep"
        f" sps.accept=typical,random --set sps.rate={rate:.3g}"
    )
    assert text.controls(summary) == [line] * lacking
    own = rules | {"lax": "mine(most=3)"}
    records = make_summary(*labels, rules=own)[0]
    assert len(text.controls(records)) == lacking


def test_the_hint_for_a_custom_accept_rule_describes_its_control(make_summary):
    summary, *_ = make_summary("lax")
    lossy = tuple(replace(row, params={"length": 5}) for row in summary.lossy)
    (line,) = text.controls(replace(summary, lossy=lossy))
    assert "a variant of sps with the accept rule RandomAccept(0." in line


def test_a_column_is_present_if_a_row_has_its_figure(make_summary, synthetic, manifest):
    from specbench_cli.summary.facts import Facts

    summary, own, _ = make_summary("lax", "coin")
    lines = run_text(summary, Facts.from_manifest(own)).splitlines()
    heads = [line for line in lines if "speedup" in line][:2]
    assert ["less vanilla's" in head for head in heads] == [False, True]
    assert ["accept" in head for head in heads] == [True, False]
    coin = next(line for line in lines if line.startswith(" coin "))
    row = row_of(summary, "coin")
    assert f"{metrics.accuracy_loss(row)} {row.n_scored} " in coin
    assert max(map(len, lines[:8])) <= WIDTH
    markdown = render(report(summary, own, Incidents(), []))
    heads = [line for line in markdown.splitlines() if line.startswith("| method | group")]
    assert ["relaxed" in head for head in heads[:2]] == [False, True]
    assert ["less vanilla's" in head for head in heads[:2]] == [False, True]
    plain = summarise(synthetic.records(prompts=6), manifest, resamples=20)
    assert "relaxed" not in run_text(plain, Facts.from_manifest(manifest))
    assert "relaxed" not in make_grid(SPEED, plain.rows).headings


def test_the_methods_text_names_rule_and_guarantee(make_summary):
    summary, own, _ = make_summary("lax", "coin")
    methods_text = " ".join(sentences(summary, own))
    assert "guarantee: quality only, accept rule: typical(epsilon=0.09, delta=0.3)" in methods_text
    assert (
        "of the tokens relaxed" in methods_text
        and "random accept rule is the control" in methods_text
    )
    assert "accept rule" not in " ".join(sentences(*make_summary()[:2]))


def test_side_by_side_marks_relaxed_tokens(tmp_path, synthetic, manifest):
    lossy = synthetic.Fake("lax", "sps", 3, 0.5, guarantee="quality_only", relaxed=0.5)
    records = synthetic.records([synthetic.vanilla, lossy], prompts=1, tokens=6)
    for record in records:
        if record.label == "lax":
            record.origin = ["prefill", "accepted", "relaxed", "accepted", "bonus", "plain"]
            record.steps = Steps([4, 0], [4, 0], [4, 0], [2, 0], [4, 1], [1, 0])
    run = RunDir.create(tmp_path / "run", manifest)
    run.append(records)
    first = records[0]
    prompt_facts = "mini/0", first.cluster, "mini", first.family, first.category
    run.append_prompts([Prompt(*prompt_facts, 1, "?", [1])])
    (found,) = compare_outputs(run, "mini/0", ["lax"], None)
    assert [lane.relaxed for lane in found.lanes] == [(1,), ()]
    lines = page(found).splitlines()
    assert RELAXED in lines
    assert any("=~=x+" in line for line in lines)
    (vanilla,) = compare_outputs(run, "mini/0", ["vanilla"], None)
    assert RELAXED not in page(vanilla)

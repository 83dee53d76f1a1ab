"""Tests of a comparison as Markdown, JUnit XML, JSON, TSV and terminal text."""

import dataclasses
import json
import re
from html import unescape
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from specbench_cli.comparison.compared_output import RowKey
from specbench_cli.comparison.outcome import Comparison, ComparisonFinding, RowOutcome, TimeChange
from specbench_cli.comparison.pages import columns, junit, markdown, text, words
from specbench_cli.comparison.pages.as_dict import as_dict


def row(label, outcome="same", message="", locations=(), *, task="mini", rule="exact", **more):
    found = (
        (ComparisonFinding(outcome=outcome, message=message, locations=locations),)
        if outcome != "same"
        else ()
    )
    return RowOutcome(
        key=RowKey(task, label),
        outcome=outcome,
        rule=rule,
        rule_reason=more.pop("rule_reason", "same machine, torch and threads"),
        pairs=more.pop("pairs", 48),
        findings=found,
        **more,
    )


SLOWER = TimeChange(
    figure="decode", ratio=1.081, low=1.05, high=1.112, significant=True, detects=1.03
)
PLACES = tuple(f"mini/qa-{i:03} turn 1" for i in range(5))


@pytest.fixture
def failing():
    return Comparison(
        base="main-2cores",
        new="results/runs/20261121T220216Z-mini-9ad04d07",
        rows=(
            row("vanilla", mat=(1.0, 1.0)),
            row("pld", mat=(1.29, 1.29)),
            row("sps", "mat", "MAT 4.38 -> 4.31; nodes 1,204 -> 1,127", PLACES, mat=(4.38, 4.31)),
            row("pearl", "broken", "1 mismatch that the base had not", PLACES[:1]),
            row("staged", "slower", "decoding takes 8.1% longer", changes=(SLOWER,)),
            row("eagle2", "faster", "decoding takes 9% less", task="gsm8k"),
            row(
                "ssd", "new", "not in the base", rule="nothing", rule_reason="only in new", pairs=0
            ),
            row("sampled", rule="nothing", rule_reason="rejection on another machine", pairs=0),
        ),
        not_compared=("task code: only the base has it",),
        timing="applied: same machine, 3 processes against 3",
    )


@pytest.fixture
def passing(failing):
    return dataclasses.replace(failing, rows=failing.rows[:2], not_compared=())


HOSTILE = "a|b`c`\\|<img src=x onerror=alert(1)>*_[x](y)_*\n# @octocat #12 $x$ &amp; ~~z~~"


def rendered(comparison):
    return (
        MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown.render(comparison))
    )


def test_headline_has_the_verdict_and_then_the_worst_reason(failing, passing):
    assert words.headline(failing) == (
        "fail: 3 of 8 rows: mini pearl: 1 mismatch that the base had not;"
        " mini sps: MAT 4.38 -> 4.31; nodes 1,204 -> 1,127; 1 more"
    )
    assert words.headline(passing) == "pass: 2 rows: 2 same"


def test_markdown_shows_changed_rows_and_folds_the_unchanged_ones(failing):
    page = markdown.render(failing)
    changed_rows, _, unchanged_rows = page.partition("<summary>2 rows the same</summary>")
    for label in ("sps", "pearl", "staged", "eagle2", "ssd"):
        assert f"mini {label}" in changed_rows or f"gsm8k {label}" in changed_rows
    assert "mini vanilla" not in changed_rows
    assert "mini vanilla" in unchanged_rows
    assert "mini sampled: rejection on another machine" in changed_rows
    assert "task code: only the base has it" in changed_rows
    assert "mini/qa-002 turn 1 and 2 more" in changed_rows
    assert "+8.1% [+5.0%, +11.2%]" in changed_rows
    assert "specbench compare --save NAME RUN" in changed_rows


def test_markdown_of_a_passed_comparison_suggests_no_command(passing):
    page = markdown.render(passing)
    assert page.startswith("### specbench compare: pass\n")
    assert "--save" not in page
    assert "Not compared" not in page


def test_markdown_escapes_hostile_text(failing):
    bad = row(HOSTILE, "mat", HOSTILE, (HOSTILE,), rule_reason=HOSTILE)
    page = rendered(
        dataclasses.replace(failing, base=HOSTILE, rows=(bad,), not_compared=(HOSTILE,))
    )
    assert page.count("<td") == 5, (
        "five columns, one row, no table cell is split by the | in the text"
    )
    assert "<img" not in page
    assert "<a " not in page
    assert "<em>" not in page
    bare = re.sub(r"<code>.*?</code>", "", page)
    assert "octocat" not in bare, "GitHub mentions nobody in code"
    assert "#12" not in bare
    assert " ".join(HOSTILE.split()) in unescape(re.sub(r"</?[a-z][^>]*>", "", page))


def test_a_row_and_its_reason_define_no_link_together(failing):
    row_without_outputs = row("y]", task="[x", rule="nothing", rule_reason="z", pairs=0)
    changed_rows = row("sps", "mat", "[x y] changed")
    assert "<a " not in rendered(
        dataclasses.replace(failing, rows=(row_without_outputs, changed_rows))
    )


def test_save_is_not_suggested_for_broken_outputs(failing, capsys):
    broken = dataclasses.replace(failing, rows=(failing.rows[3],))
    text.print_comparison(broken)
    assert broken.failed_rows
    assert "--save" not in markdown.render(broken) + "".join(capsys.readouterr())


def test_known_commits_are_shown(failing, capsys):
    facts = {"base": {"commit": "0123abcd"}, "new": {}}
    with_facts = dataclasses.replace(failing, facts=facts)
    assert "base `main-2cores` (commit 0123abcd)." in markdown.render(with_facts)
    text.print_comparison(with_facts)
    assert "base main-2cores (commit 0123abcd), new\n" in capsys.readouterr().out


def test_junit_counts_match_its_test_cases(failing):
    root = ElementTree.fromstring(junit.render(failing))
    assert root.tag == "testsuites"
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {"gsm8k", "mini", "not compared"}
    for element in (root, *suites.values()):
        assert int(element.get("tests")) == len(list(element.iter("testcase")))
        assert int(element.get("failures")) == len(list(element.iter("failure")))
        assert int(element.get("skipped")) == len(list(element.iter("skipped")))
        assert element.get("errors") == "0"
        assert float(element.get("time")) >= 0
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("9", "3", "3")
    assert all(float(case.get("time")) >= 0 for case in root.iter("testcase"))


def test_junit_fails_only_for_outcomes_in_fail_on(failing):
    lenient = dataclasses.replace(failing, fail_on=("broken",))
    cases = {
        c.get("name"): c for c in ElementTree.fromstring(junit.render(lenient)).iter("testcase")
    }
    assert [name for name, case in cases.items() if case.find("failure") is not None] == ["pearl"]
    failure = cases["pearl"].find("failure")
    assert failure.get("type") == "broken"
    assert "mini/qa-000 turn 1" in failure.text
    assert cases["sampled"].find("skipped").get("message") == "rejection on another machine"
    assert "decode +8.1% [+5.0%, +11.2%]" in cases["staged"].find("system-out").text


def test_junit_escapes_characters_that_xml_forbids(failing):
    bad = row("x\x00\x1b[31m\ud800\uffff<&\"'", "mat", "a\x07]]>")
    document = junit.render(dataclasses.replace(failing, rows=(bad,)))
    root = ElementTree.fromstring(document.encode())
    case = next(root.iter("testcase"))
    assert case.get("name") == "x\\x00\\x1b[31m\\ud800\\uffff<&\"'"
    assert case.find("failure").get("message") == "a\\x07]]>"


def test_json_has_every_row_and_every_location(failing):
    document = json.loads(json.dumps(as_dict(failing), allow_nan=False))
    assert (document["schema"], document["kind"], document["passed"]) == (1, "comparison", False)
    by_label = {found["label"]: found for found in document["rows"]}
    assert by_label["sps"]["findings"][0]["where"] == list(PLACES)
    assert by_label["sps"]["mat"] == {"base": 4.38, "new": 4.31}
    assert by_label["staged"]["times"][0]["ratio"] == 1.081
    assert by_label["sampled"]["outcome"] == "not compared"
    assert [found["label"] for found in document["rows"] if found["fails"]] == [
        "sps",
        "pearl",
        "staged",
    ]
    assert sum(document["counts"].values()) == len(failing.rows)


def test_a_row_is_the_same_in_every_rendering(failing):
    sps = next(each for each in failing.rows if each.key.label == "sps")
    flat, nested = columns.flat_row(sps, failing), columns.document_row(sps, failing)
    assert (flat["outcome"], flat["fails"], flat["method"]) == ("mat", "yes", "sps")
    assert (nested["outcome"], nested["fails"], nested["label"]) == ("mat", True, "sps")
    assert [flat["mat_base"], flat["mat_new"]] == [*nested["mat"].values()] == [4.38, 4.31]
    assert flat["where"] == nested["findings"][0]["where"] == list(PLACES)
    headings = {each.heading for each in (*columns.CHANGED, *columns.UNCHANGED)}
    page = markdown.render(failing)
    assert all(f"| {heading} |" in page for heading in headings)
    assert "**mat** | mini sps |" in page
    assert "same | mini pld" not in page


def test_tsv_has_one_line_per_row_and_messages_on_stderr(failing, capsys):
    text.print_comparison(failing, "tsv")
    out, err = capsys.readouterr()
    heading, *lines = [line.split("\t") for line in out.splitlines()]
    assert len(lines) == len(failing.rows)
    assert all(len(line) == len(heading) for line in lines)
    assert dict(zip(heading, lines[0], strict=True))["outcome"] == "broken"
    assert "fail: 3 of 8 rows" in err
    assert "not compared: task code: only the base has it" in err


def test_output_to_a_file_has_the_table_of_a_100_column_terminal(failing, capsys, monkeypatch):
    long = row("a-rather-long-label-of-a-sweep-7", "mat", "MAT 4.38 -> 4.31; " * 9, PLACES)
    more = dataclasses.replace(failing, rows=(*failing.rows, long))
    text.print_comparison(more)
    log = capsys.readouterr()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    text.print_comparison(more)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert (log.out.splitlines(), log.err) == (lines, "")
    assert any(line.split()[:4] == ["!", "broken", "mini", "pearl"] for line in lines)
    assert "mini pearl: broken: 1 mismatch that the base had not: mini/qa-000 turn 1" in lines


def test_rows_with_the_same_finding_share_one_line(failing, capsys):
    fresh = [row(label, "new", "not in BASE", rule="nothing") for label in ("medusa", "hydra")]
    text.print_comparison(dataclasses.replace(failing, rows=(*failing.rows, *fresh)))
    assert "mini medusa, hydra: new: not in BASE" in capsys.readouterr().out.splitlines()

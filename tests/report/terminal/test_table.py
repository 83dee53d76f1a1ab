"""Tests of the table that `specbench report` prints, and of its TSV and JSON formats."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from specbench_cli import output
from specbench_cli.report import tables
from specbench_cli.report.content import report
from specbench_cli.report.document import make_grid
from specbench_cli.report.html.page import list_warnings
from specbench_cli.report.markdown import render
from specbench_cli.report.paper.latex import write_latex
from specbench_cli.report.report_data import Incidents, ReportData
from specbench_cli.report.tables import overall_tables
from specbench_cli.report.terminal.grid import BAR_MARKS, bar_widths
from specbench_cli.report.terminal.table import all_notes, print_runs, run_text, short_notes
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Params, Verdict
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.columns import select_informative
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import COST, same_group
from specbench_cli.summary.summary import summarise


@pytest.fixture
def make_reading(synthetic, manifest, tmp_path):
    def make(records=None, **changes):
        whole = manifest | changes
        summary = summarise(records or synthetic.records(), whole, resamples=499)
        run = RunDir(tmp_path / "20261121T102403Z-mini-00000000", whole)
        return ReportData(run, Facts.from_manifest(whole), summary, Incidents())

    return make


def _text(reading: ReportData) -> str:
    return run_text(reading.summary, reading.facts)


def test_default_run_is_printed_as_a_table(make_reading):
    lines = _text(make_reading()).splitlines()
    assert lines[0] == "specbench 0.1.0  target embedded-7m  draft embedded-1m"
    assert lines[1] == "mini 48 prompts  greedy fp32  2 threads  seed 0"
    assert lines[2].split() == (
        ["method", "speedup", "95%", "CI", "group", "MAT", "accepted", "tok/s", "time", "output"]
    )
    vanilla = next(line for line in lines if " vanilla " in line)
    assert vanilla.split() == (
        ["vanilla", "1.00x", "-", "C", "1.00", "-", "287", "##########.", "reference"]
    )
    assert lines[-1] == " proof: 0 of 48 prompts differ from vanilla (95% bound: 6.1%)"
    assert "noise floor A/A not measured;  vanilla / hf:vanilla 1.4" in lines[-2]


def test_table_fits_100_columns_with_long_labels_and_mixed_verdicts(make_reading, synthetic):
    fakes = [
        synthetic.vanilla,
        synthetic.sps,
        synthetic.Fake("hf:prompt-lookup", length=10, alpha=0.3, cost=1.7, peer=True),
        synthetic.Fake("my.own.long-method-name/length=12", length=12, alpha=0.7),
    ]
    records = synthetic.records(fakes)
    near_tie = next(r for r in records if r.label.startswith("my.own"))
    records[records.index(near_tie)] = replace(near_tie, verdict=Verdict("near-tie", 1, 1e-6, 5))
    lines = _text(make_reading(records)).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(" my." in line and line.endswith("47 identical, 1 near-tie") for line in lines)


def test_eight_methods_take_100_columns_and_13_lines_at_most(make_reading, synthetic):
    ours = [synthetic.Fake(f"method-{n}", length=5, alpha=0.5 + 0.05 * n) for n in range(5)]
    lossy = synthetic.Fake("lossy", length=5, alpha=0.9, guarantee="quality_only")
    fakes = [synthetic.vanilla, *ours, synthetic.hf_vanilla, lossy]
    reading = make_reading(synthetic.records(fakes))
    header = reading.facts.header(reading.summary.prompts, 100)
    notes = all_notes(reading.summary, reading.facts)
    lines = _text(reading).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) - len(header) - len(notes) <= 13  # lossy methods have their own heading


def test_shortened_labels_of_a_sweep_stay_different(make_reading, synthetic, manifest):
    labels = [f"sps length={value}" for value in (1, 4, 10, "heuristic", "oracle")]
    fakes = [synthetic.vanilla, *(synthetic.Fake(label, "sps", length=4) for label in labels)]
    bounds = {"upper_bounds": ["sps length=oracle"]}
    printed = _text(make_reading(synthetic.records(fakes), **bounds)).splitlines()
    assert max(map(len, printed)) <= 100
    rows = [line for line in printed if " sps" in line and line.endswith("identical")]
    assert len(rows) == len(labels)
    assert len({line.partition("x ")[0].split()[-2] for line in rows}) == len(labels)


def test_a_short_header_is_one_line(make_reading):
    reading = make_reading(models={"target": {"label": "embedded-1m"}, "draft": None})
    first = _text(reading).splitlines()[0]
    assert first.startswith("specbench 0.1.0  target embedded-1m  mini 48 prompts  greedy fp32")


def test_sampling_rule_temperature_and_device_are_in_the_header(make_reading, manifest):
    config = manifest["config"]["effective"] | {
        "verify": "coupled",
        "temperature": 0.8,
        "dtype": "bfloat16",
        "device": "cuda",
    }
    assert "coupled T=0.8 bf16  cuda  2 threads" in _text(
        make_reading(config={"effective": config})
    )


def test_broken_method_is_marked_and_has_no_speedup(make_reading, synthetic):
    bad = synthetic.Fake("bad", length=5, alpha=0.9, verdict="mismatch")
    lines = _text(make_reading(synthetic.records([synthetic.vanilla, bad]))).splitlines()
    row = next(line for line in lines if line.strip().startswith("bad"))
    assert "BROKEN" in row
    assert row.endswith("48 mismatch")
    assert " proof: bad 48 of 48 prompts differ from vanilla (95% bound: 100%)" in lines


def test_lossy_methods_are_below_their_own_heading(make_reading, synthetic):
    lossy = synthetic.Fake("relaxed", length=5, alpha=0.95, guarantee="quality_only")
    lines = _text(make_reading(synthetic.records([synthetic.vanilla, lossy]))).splitlines()
    border = next(i for i, line in enumerate(lines) if line.startswith("lossy"))
    assert " vanilla " in lines[border - 1]
    assert "less vanilla's" in lines[border + 1] and " relaxed " in lines[border + 2]


def test_warnings_explain_untrusted_figures(make_reading, synthetic):
    records = [
        replace(r, void=r.label == "sps")
        for r in synthetic.records([synthetic.vanilla, synthetic.sps], prompts=3)
    ]
    task = {"name": "spec_bench", "version": 1, "embedded": "plumbing"}
    reading = make_reading(records, noisy=True, tasks=[task], status="interrupted")
    lines = all_notes(reading.summary, reading.facts)
    assert any(line.startswith("interrupted:") for line in lines)
    assert any(line.startswith("noisy:") for line in lines)
    assert any(
        line.startswith("embedded: plumbing: the model was not trained on spec_bench")
        for line in lines
    )
    assert "sps: no speedup: sps lost 3 of 3 outputs (3 noisy)" in lines
    short = short_notes(reading.summary, reading.facts, "last")
    assert set(text.warnings(reading.summary, reading.facts)) < set(short)
    assert short[-1].endswith("specbench report last --explain")


def test_a_running_or_killed_run_has_a_warning(make_reading, synthetic):
    records = synthetic.records([synthetic.vanilla, synthetic.sps], prompts=3)
    for status, words in (("running", True), ("finished", False)):
        reading = make_reading(records, status=status)
        lines = all_notes(reading.summary, reading.facts)
        assert (
            any(line.startswith("running, or killed: some outputs are missing") for line in lines)
            is words
        )


def test_a_run_without_times_has_no_ranking_and_one_reason(make_reading, synthetic):
    peer = replace(synthetic.vanilla, label="hf:vanilla", peer=True)
    made = synthetic.records([synthetic.vanilla, synthetic.sps, peer], prompts=3)
    reading = make_reading([replace(record, void=True) for record in made])
    lines = all_notes(reading.summary, reading.facts)
    assert "all methods: no speedup: vanilla lost 3 of 3 outputs (3 noisy)" in lines
    assert sum("no speedup" in line for line in lines) == 1
    assert not any(line.startswith("group:") for line in lines)
    assert any("vanilla / hf:vanilla not known" in line for line in lines)


def test_embedded_warning_is_left_out_for_other_models(make_reading):
    tasks = [{"name": "spec_bench", "embedded": "plumbing"}]
    reading = make_reading(tasks=tasks, models={"target": {"label": "llama-7b"}})
    assert not any("plumbing" in line for line in all_notes(reading.summary, reading.facts))


def test_missing_interval_has_a_reason(make_reading, synthetic):
    reading = make_reading(synthetic.records([synthetic.vanilla, synthetic.sps], prompts=1))
    lines = all_notes(reading.summary, reading.facts)
    assert "sps: no interval: one question alone has no spread" in lines


@pytest.mark.parametrize(
    ("shares", "bar"),
    [
        ((1.0, 0.0, 0.0), "###########"),
        ((0.65, 0.3, 0.05), "#######+++."),
        ((1 / 3, 1 / 3, 1 / 3), "####++++..."),
        ((0.0, 0.0, 1.0), "..........."),
    ],
)
def test_bar_has_eleven_marks_by_largest_remainder(shares, bar):
    marks = bar_widths(shares)
    assert "".join(BAR_MARKS[name] * n for name, n in marks.items()) == bar


def test_work_column_is_present_if_parts_of_the_target_ran(make_reading, synthetic, tmp_path):
    records = synthetic.records()
    for record in records:
        if not record.peer:
            record.target_equivalents = float(record.target_forwards)
    lines = _text(make_reading(records)).splitlines()
    assert " work " not in lines[2] and not any(" work: " in line for line in lines)
    assert "work" not in make_grid(COST, make_reading(records).summary.rows).headings
    for record in records:
        if record.label == "staged":
            record.target_equivalents += 0.25 * record.draft_forwards
    reading = make_reading(records)
    lines = _text(reading).splitlines()
    assert max(map(len, lines)) <= 100
    assert " accepted work tok/s " in lines[2]
    rows = {row.label: row for row in reading.summary.rows}
    own = [record for record in records if record.label == "staged"]
    work = sum(r.target_equivalents for r in own) / sum(r.n_tokens for r in own)
    assert rows["staged"].work == pytest.approx(work)
    assert rows["sps"].work == pytest.approx(rows["sps"].verification_rate)
    assert (rows["vanilla"].work, rows["hf:vanilla"].work) == (1, None)
    (note,) = [line for line in lines if line.startswith(" work: target forwards per token")]
    grid = make_grid(COST, reading.summary.rows)
    at = grid.headings.index("work")
    assert {line[0].text: line[at].text for line in grid.rows}["staged"] == f"{work:.2f}"
    (table,) = overall_tables(reading.summary)
    (column,) = [column for column in table.columns if column.heading == "work"]
    assert f" work: {column.meaning}" == note


def test_output_to_a_pipe_equals_that_to_a_terminal(make_reading, capsys, monkeypatch):
    print_runs([make_reading()], families=True)
    piped, err = capsys.readouterr()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    print_runs([make_reading()], families=True)
    printed = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert piped == printed
    assert "speedup by family" in piped and err == ""


def test_json_has_one_object_per_method_and_messages_on_stderr(make_reading, capsys):
    print_runs([make_reading()], form="json")
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[-1]["method"] == "hf:vanilla" and isinstance(rows[0]["speedup"], float)
    assert "specbench 0.1.0" in err


def test_tsv_rounds_to_significant_digits(make_reading, capsys):
    print_runs([make_reading()], families=True, form="tsv")
    figures = re.findall(r"\d*\.\d+", capsys.readouterr().out)
    assert figures and max(map(len, figures)) <= len("0.0123456")


def test_tsv_is_on_stdout_and_messages_on_stderr(make_reading, capsys):
    print_runs([make_reading()], form="tsv")
    out, err = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out), delimiter="\t"))
    assert [row["method"] for row in rows][-1] == "hf:vanilla"
    assert float(rows[0]["ci_low"]) < float(rows[0]["speedup"]) < float(rows[0]["ci_high"])
    assert {row["family"] for row in rows} == {"all"}
    assert "specbench 0.1.0" in err
    assert "\x1b" not in out + err


def test_tsv_of_several_runs_and_families_is_one_table(make_reading, capsys):
    print_runs([make_reading(), make_reading()], families=True, form="tsv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out), delimiter="\t"))
    assert len(rows) == 2 * 6 * (1 + 6)
    assert rows[0]["run"] == "20261121T102403Z-mini-00000000"


def test_terminal_output_has_colours_and_families(make_reading, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    print_runs([make_reading()], families=True)
    out, err = capsys.readouterr()
    assert "\x1b[34m###" in out
    assert "speedup by family" in out
    assert "math_reasoning" in out
    assert err == ""


def test_no_color_removes_colours(make_reading, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    print_runs([make_reading()])
    assert "\x1b[34m" not in capsys.readouterr().out


def test_run_without_records_prints_its_heading(make_reading, manifest, tmp_path):
    summary = summarise([], manifest)
    assert "speedup" in run_text(summary, Facts.from_manifest(manifest))


def test_table_has_the_source_of_parameters_if_some_are_not_the_default(
    synthetic, manifest, capsys
):
    records = synthetic.records([synthetic.vanilla, synthetic.sps], prompts=12)
    for record in records:
        record.params.source = "default"
    assert "params" not in run_text(
        summarise(records, manifest, resamples=99), Facts.from_manifest(manifest)
    )
    for record in records:
        record.params.source = "tuned(8)" if record.label == "sps" else "default"
    text = run_text(summarise(records, manifest, resamples=99), Facts.from_manifest(manifest))
    (heading,) = (line for line in text.splitlines() if "params" in line)
    (row,) = (line for line in text.splitlines() if "tuned(8)" in line)
    assert row.split()[0] == "sps"
    assert row.index("tuned(8)") == heading.index("params")
    assert max(map(len, text.splitlines())) <= 100


def test_notes_explain_the_confidence_interval(make_reading):
    lines = all_notes(make_reading().summary, make_reading().facts)
    assert any(line.startswith("the 95% CI compares one method with vanilla") for line in lines)


def test_every_format_explains_the_intervals_and_warns_of_few_questions(
    make_reading, tmp_path, monkeypatch
):
    monkeypatch.setattr(text, "MIN_QUESTIONS", 49)
    reading = make_reading()
    which_interval = text.two_intervals(reading.summary)[0][1:]
    few = text.few_questions(reading.summary)[0][1:]
    write_latex(reading, tmp_path)
    tex = (tmp_path / "latex" / "overall.tex").read_text().replace(r"\%", "%")
    by_family = (tmp_path / "latex" / "families.tex").read_text()
    assert which_interval in tex and few in tex and "--limit" not in tex
    assert (
        "qa (8) &" in by_family
        and "with fewer than 49, a result is no reliable estimate" in by_family
    )
    page = render(report(reading.summary, reading.run.manifest, Incidents(), []))
    assert which_interval in page and few in page and "### qa (8)" in page
    assert (
        "With fewer than" not in page
        and "with fewer than 49, a result is no reliable estimate" in page
    )
    (table, *_), (families, *_) = (
        overall_tables(reading.summary),
        tables.family_tables(reading.summary),
    )
    assert which_interval in table.note and any(few in line for line in list_warnings(reading))
    assert families.columns[1] is metrics.QUESTIONS
    assert {row[1].text for row in families.rows} == {"8"}
    assert "with fewer than 49, a result is no reliable estimate" in families.note


def test_every_format_warns_if_rare_questions_decide_a_speedup(make_reading, synthetic, tmp_path):
    def slower(record):
        if (record.label, record.prompt_id) != ("sps", "mini/7"):
            return record
        return replace(record, ns=replace(record.ns, total=20 * record.ns.total))

    assert text.rare_questions(make_reading().summary) == []
    reading = make_reading([slower(record) for record in synthetic.records()])
    (row,) = (row for row in reading.summary.rows if row.label == "sps")
    assert row.rare_questions == 1 and row.speedup_without_rare > 1.2 * row.speedup
    (note,) = text.rare_questions(reading.summary)
    assert note.startswith(
        f"rare questions decide speedups: sps 1 of 48, {row.speedup_without_rare:.2f}x without"
    )
    notes = all_notes(reading.summary, reading.facts)
    assert note in " ".join(line.strip() for line in notes)
    page = render(report(reading.summary, reading.run.manifest, Incidents(), []))
    assert "rare questions decide speedups: sps 1 of 48" in page
    assert note in list_warnings(reading)
    write_latex(reading, tmp_path)
    assert (
        "are questions decide speedups: sps 1 of 48"
        in (tmp_path / "latex" / "overall.tex").read_text()
    )


def test_more_than_three_consecutive_group_letters_are_shortened_to_a_range(make_reading):
    row = make_reading().summary.rows[0]
    for group_letters, expected in (
        ("", ""),
        ("ABC", "ABC"),
        ("ABCD", "A-D"),
        ("ACDEFXYZabcd", "AC-FXYZa-d"),
        ("yzA'B'C'D'F'", "yzA'-D'F'"),
    ):
        own = replace(row, letters=group_letters)
        assert metrics.group(own) == metrics.GROUP.format(own) == expected
        assert metrics.GROUP.data["group"](own) == group_letters


def test_group_letters_with_a_prime_are_different_groups(make_reading):
    row = make_reading().summary.rows[0]
    rows = [replace(row, letters=group_letters) for group_letters in ("A", "A'", "B'A")]
    assert [len(same_group(own, rows)) for own in rows] == [1, 0, 1]


def test_too_few_questions_have_a_warning(make_reading, monkeypatch):
    reading = make_reading()
    assert text.few_questions(reading.summary) == []
    monkeypatch.setattr(text, "MIN_QUESTIONS", 49)
    (line,) = text.few_questions(reading.summary)
    assert line.startswith("48 questions are too few to rank methods")


@pytest.mark.parametrize(
    ("limited", "ending"), [(True, " on): --limit 48"), (False, "this run's tasks have no more")]
)
def test_warning_of_few_questions_suggests_limit_only_if_the_tasks_have_more(
    make_reading, monkeypatch, limited, ending
):
    monkeypatch.setattr(text, "MIN_QUESTIONS", 49)
    reading = make_reading()
    facts = replace(reading.facts, limited=limited)
    assert any(line.endswith(ending) for line in all_notes(reading.summary, facts))


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_every_column_without_broken_lines(
    make_reading, capsys, monkeypatch, width
):
    print_runs([make_reading()], families=True)
    wide = capsys.readouterr().out
    monkeypatch.setattr(output, "columns", lambda: width)
    print_runs([make_reading()], families=True)
    narrow = capsys.readouterr().out
    broken = [line for line in narrow.splitlines() if len(line) > width]
    assert [line for line in broken if len(line.split()) > 1] == [], "a path is one word"
    words = set(wide.split())
    assert words <= set(narrow.split())
    if width == 80:
        whole = [line for line in narrow.splitlines() if line.startswith(" sps ") and "[" in line]
        assert len(whole) == 1, "there is room for the whole of the first table"


@pytest.fixture
def lossy(synthetic):
    """Return a function that makes scored records of a lossy method and of its random control."""

    def make(rate=0.3):
        data_names = [
            "speculative-thinking reflect=together",
            "random for speculative-thinking reflect",
        ]
        fakes = [
            synthetic.Fake(
                name, "loose", 5, 0.6, guarantee="quality_only", verdict="unchecked", relaxed=0.2
            )
            for name in data_names
        ]
        records = synthetic.records([synthetic.vanilla, *fakes])
        for record in records:
            at = int(record.prompt_id.partition("/")[2])
            record.score = float(record.label != data_names[1] or at % 3 > 0)
            if record.label == data_names[1]:
                record.params = Params({}, {"like": data_names[0], "rate": rate})
        return records

    return make


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lossy_methods_show_quality_and_n_with_the_speedup_at_every_width(
    make_reading, lossy, capsys, monkeypatch, width
):
    monkeypatch.setattr(output, "columns", lambda: width)
    print_runs([make_reading(lossy())], families=True)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines if "speculative" in line)
    _, *lossy_lines = lines[next(at for at, line in enumerate(lines) if line.startswith("lossy")) :]
    heading, *_ = (line for line in lossy_lines if "speedup" in line)
    assert "less vanilla's" in heading and heading.split().count("n") == 1
    rows = [
        line for line in lossy_lines if re.search(r"\d\.\d\dx", line) and "vanilla " not in line
    ]
    assert len(rows) == 2 and all(re.search(r"[+-]\d+\.\d \[.*\] 48\b", row) for row in rows)


def test_a_control_with_another_acceptance_rate_is_not_compared(make_reading, lossy):
    rate = next(
        row.rule_rate
        for row in make_reading(lossy()).summary.lossy
        if row.label.startswith("specul")
    )
    rows = [{"label": row.label, "accept": "loose(0.3)"} for row in lossy()]
    for control_rate, known in ((rate, True), (rate + 0.04, True), (rate + 0.06, False)):
        reading = make_reading(lossy(control_rate), rows=rows)
        row = next(row for row in reading.summary.lossy if row.label.startswith("specul"))
        assert (row.over_random is not None) == known
        assert any("is no control of" in line for line in text.controls(reading.summary)) != known


def test_family_tables_have_the_number_of_questions(make_reading, capsys):
    print_runs([make_reading()], families=True)
    out = capsys.readouterr().out
    assert "math_reasoning(8)" in out
    assert (
        "(n): number of questions of the task family; with fewer than 20, a result is no reliable"
        in out
    )


def test_a_figure_has_the_same_heading_and_text_in_every_format(
    make_reading,
):
    reading = make_reading()
    row = reading.summary.rows[0]
    (page, *_) = overall_tables(reading.summary)
    html_texts = {
        head.heading: cell.text for head, cell in zip(page.columns, page.rows[0], strict=True)
    }
    printed = _text(reading).splitlines()
    heading = next(line for line in printed if "speedup" in line)
    row_line = next(line for line in printed if f" {row.label} " in line)
    for columns in (metrics.SPEED, metrics.COST):
        found = make_grid(columns, reading.summary.rows)
        for head, words in zip(found.headings, found.rows[0], strict=True):
            assert words.text == html_texts.get(head, words.text)
        assert len(set(found.headings)) == len(found.headings)
    for column in select_informative(metrics.TERMINAL, reading.summary.rows)[2:]:
        assert column.heading in heading and column.heading in html_texts
        assert column is metrics.TIME or column.format(row) in row_line


def test_columns_have_unique_data_names_and_no_value_only_if_empty(make_reading):
    rows = make_reading().summary.rows
    for columns in (metrics.TERMINAL, metrics.PAGE, metrics.DETAIL, metrics.EQUIVALENCE):
        data_names = [name for column in columns for name in column.data]
        assert len(data_names) == len(set(data_names))
        for row in rows:
            for column in filter(lambda column: column.when([row]), columns):
                nothing = column.format(row) in ("", formats.NONE)
                assert (column.cell(row).value is None) is nothing

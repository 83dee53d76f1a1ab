"""Tests of reports over several runs: compatible runs are combined, other runs are rejected."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import numpy as np
import pytest

from specbench_cli.errors import UsageError
from specbench_cli.report.content import write_markdown
from specbench_cli.report.figures import targets
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.report.outputs import write
from specbench_cli.report.report_data import read_report_data, read_runs
from specbench_cli.report.terminal.table import all_notes, print_runs
from specbench_cli.summary.compatibility import find_incompatibilities, short_names
from specbench_cli.summary.unranked import group_by_target


def change_settings(**values):
    """Return a function that changes settings in a manifest."""
    return lambda manifest: manifest["config"]["effective"].update(values)


def by_label(reading):
    return {row.label: row for row in reading.summary.rows}


def test_runs_with_different_methods_share_one_table_and_vanilla(make_run, synthetic):
    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.pld])
    reading = read_runs([a, b])
    rows = by_label(reading)
    assert set(rows) == {"vanilla", "sps", "pld"}
    notes = all_notes(reading.summary, reading.facts)
    assert any("over vanilla of its own run" in line for line in notes)
    assert rows["sps"].letters != ""


def test_speedup_is_over_vanilla_of_the_same_run(make_run, synthetic):
    def slower(record):
        ns = record.ns
        return replace(
            record,
            ns=replace(ns, **{k: 2 * (getattr(ns, k) or 0) for k in ns.__slots__}),
        )

    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.pld], edit=slower)
    combined = by_label(read_runs([a, b]))
    assert combined["sps"].speedup == by_label(read_report_data(a))["sps"].speedup
    assert combined["pld"].speedup == by_label(read_report_data(b))["pld"].speedup
    assert combined["pld"].speedup_low == pytest.approx(
        by_label(read_report_data(b))["pld"].speedup_low, 0.05
    )


def test_a_repeated_run_counts_as_another_process(make_run, synthetic):
    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.sps])
    reading = read_runs([a, b])
    assert [row.label for row in reading.summary.rows] == ["sps", "vanilla"]
    assert by_label(reading)["sps"].n_cells == 24
    assert reading.summary.passes == 2
    assert len({record.key for record in reading.records}) == 48


def test_methods_with_different_numbers_of_processes_keep_their_intervals(make_run, synthetic):
    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.sps, synthetic.pld], passes=2)
    reading = read_runs([a, b])
    assert reading.summary.passes == 1
    assert all(row.speedup_low for row in reading.summary.rows if row.label != "vanilla")
    assert len({row.letters for row in reading.summary.rows}) > 1


def test_methods_with_equal_labels_but_other_parameters_get_the_run_name(make_run, synthetic):
    longer = synthetic.Fake("sps", length=8, alpha=0.7, cost=1.3, draft_cost=0.12)
    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, longer])
    reading = read_runs([a, b])
    assert set(by_label(reading)) == {"vanilla", "sps @a", "sps @b"}
    assert by_label(reading)["sps @b"].params == {"length": 8}


def test_methods_with_a_changed_file_get_the_run_name(make_run, synthetic):
    files = [lambda m, sha=sha: m.update(method_files={"sps": sha}) for sha in ("1" * 64, "2" * 64)]
    fakes = [synthetic.vanilla, synthetic.sps]
    runs = [make_run(name, fakes, change=change) for name, change in zip("ab", files, strict=True)]
    reading = read_runs(runs)
    assert set(by_label(reading)) == {"vanilla", "sps @a", "sps @b"}
    assert reading.run.manifest["row_files"]["sps @b"] == "2" * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_settings(seed=7), "seed: 0 (a) against 7 (b)"),
        (
            change_settings(temperature=0.8, verify="coupled"),
            "verify: greedy (a) against coupled (b)",
        ),
        (change_settings(dtype="float16"), "dtype: float32 (a) against float16 (b)"),
        (
            lambda m: m["models"].update(target={"label": "other", "hash": "ff"}),
            "target: embedded-7m aa (a) against other ff (b)",
        ),
        (
            lambda m: m["models"].update(draft={"label": "embedded-1m", "hash": "cc"}),
            "draft: embedded-1m bb (a) against embedded-1m cc (b)",
        ),
        (
            lambda m: m.update(machine={"id": "0f", "hardware": {"cpu": "B", "cores": 4}}),
            "machine: some CPU, 2 cores (a) against B, 4 cores, 0f (b)",
        ),
        (lambda m: m.update(version="9.9"), "specbench: 0.1.0 (a) against 9.9 (b)"),
        (lambda m: m["git"].update(commit="def"), "commit: abc (a) against def (b)"),
    ],
)
def test_incompatible_runs_are_rejected_with_both_values(make_run, change, message):
    a, b = make_run("a"), make_run("b", change=change)
    with pytest.raises(UsageError, match="cannot share one table") as refused:
        read_runs([a, b])
    assert message in refused.value.message
    assert "--force" in refused.value.hint


def test_runs_with_different_prompts_are_rejected(make_run):
    with pytest.raises(UsageError, match=r"prompts: 12 questions .* against 6 questions"):
        read_runs([make_run("a"), make_run("b", prompts=6)])


def test_runs_with_and_without_a_draft_model_are_compatible(make_run):
    a, b = make_run("a"), make_run("b", change=lambda m: m["models"].pop("draft"))
    assert find_incompatibilities([a, b], "ab") == []
    assert read_runs([b, a]).facts.draft == "embedded-1m"


def test_runs_with_different_vanilla_outputs_are_rejected(make_run, synthetic):
    def reverse_ids(record):
        return replace(record, output_ids=record.output_ids[::-1])

    a, b = make_run("a"), make_run("b", edit=reverse_ids)
    with pytest.raises(UsageError, match=r"vanilla's outputs: .* 12 of 12 differ"):
        read_runs([a, b])


def test_force_adds_the_run_to_every_label_and_ranks_no_method(make_run, tmp_path):
    a, b = (
        make_run("a"),
        make_run("b", change=change_settings(seed=7), edit=lambda r: replace(r, seed=7)),
    )
    reading = read_runs([a, b], force=True)
    assert all(row.label.endswith((" @a", " @b")) for row in reading.summary.rows)
    assert len(reading.summary.rows) == 12
    assert not any(row.letters or row.decode_letters for row in reading.summary.rows)
    assert by_label(reading)["sps @a"].speedup == by_label(read_report_data(a))["sps"].speedup
    header = reading.facts.header(reading.summary.prompts, 100)
    assert header[-1] == "forced: differs in seed: 0 (a) against 7 (b)"
    assert "different runs are not ranked" in all_notes(reading.summary, reading.facts)[0]
    assert reading.report_arguments.endswith("--force")
    write(reading, tmp_path, ("csv", "json"))
    write_markdown(reading, tmp_path, ())
    assert "| sps `@b` |" in (tmp_path / "report.md").read_text()


def test_force_changes_nothing_for_compatible_runs(make_run, synthetic):
    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.pld])
    assert read_runs([a, b], force=True).summary == read_runs([a, b]).summary


def test_an_incident_has_the_name_of_its_run(make_run, synthetic):
    def make_void(record):
        return replace(record, void=record.label == "sps" and record.prompt_id == "mini/1")

    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.sps], edit=make_void)
    noisy_outputs = read_runs([a, b]).incidents.noisy
    assert [output[3] for output in noisy_outputs] == ["0 @b"]


def test_one_interrupted_or_noisy_run_marks_the_whole_report(make_run, synthetic):
    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.pld], change=lambda m: m.update(noisy=True))
    b.manifest["status"] = "interrupted"
    facts = read_runs([a, b]).facts
    assert (facts.status, facts.noisy, facts.runs) == ("interrupted", True, 2)


def test_records_and_prompts_are_read_with_their_new_labels(make_run, synthetic):
    a = make_run("a", [synthetic.vanilla, synthetic.sps])
    b = make_run("b", [synthetic.vanilla, synthetic.pld])
    reading = read_runs([a, b])
    records = list(reading.run.records())
    assert [r.key for r in records] == [r.key for r in reading.records]
    assert all(r.output_ids for r in records)
    assert len(list(reading.run.prompts())) == 12


def test_short_names_are_hashes_if_they_are_unique(tmp_path):
    folder_names = ["20261121T102403Z-mini-1f2e3d4c", "20261121T102404Z-mini-aabbccdd-2"]
    assert short_names([tmp_path / name for name in folder_names]) == ["1f2e3d4c", "aabbccdd"]
    assert short_names([tmp_path / folder_names[0], tmp_path / "mine"]) == [folder_names[0], "mine"]
    assert short_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["run#1", "run#2"]


def test_more_processes_do_not_narrow_an_interval_by_double_counting(make_run, synthetic):
    fakes = [synthetic.vanilla, synthetic.sps]
    one = by_label(read_report_data(make_run("a", fakes)))["sps"]
    two = by_label(read_runs([make_run("b", fakes), make_run("c", fakes)]))["sps"]
    assert two.speedup == pytest.approx(one.speedup)
    assert np.log(two.speedup_high / two.speedup_low) > 0.5 * np.log(
        one.speedup_high / one.speedup_low
    )


# ---- several targets -----------------------------------------------------------------------------


def change_models(target, draft="embedded-1m"):
    """Return a function that changes the models in a manifest."""

    def change(manifest):
        manifest["models"]["target"] = {"label": target, "hash": target}
        manifest["models"]["draft"] = {"label": draft, "hash": draft}
        for row in manifest.get("rows", ()):
            row["uses"] = ["draft"] if row["label"] == "sps" else []

    return change


@pytest.fixture
def matrix(make_run, synthetic, manifest):
    """Runs on two targets: the first with two draft models, the second with doubled times."""

    def slower(record):
        ns = record.ns
        return replace(
            record, ns=replace(ns, **{k: 2 * (getattr(ns, k) or 0) for k in ns.__slots__})
        )

    fakes = [synthetic.vanilla, synthetic.sps, synthetic.pld]
    manifest["rows"] = [{"label": fake.label, "method": fake.label} for fake in fakes]
    return [
        make_run("a+x", fakes, change=change_models("a", "x")),
        make_run("a+y", fakes[:2], change=change_models("a", "y")),
        make_run("b+x", fakes, change=change_models("b", "x"), edit=slower),
    ]


def test_runs_of_several_targets_share_a_table_without_ranking(matrix):
    with pytest.raises(UsageError, match="cannot share one table"):
        read_runs(matrix)
    reading = read_runs(matrix, targets=True)
    labels = [row.label for row in reading.summary.rows]
    assert labels[:3] == ["sps @a+x", "sps @a+y", "sps @b+x"]
    assert not any(row.letters for row in reading.summary.rows)
    notes = all_notes(reading.summary, reading.facts)
    assert notes[0].startswith("several targets: a speedup is over vanilla on the same")
    rows = by_label(reading)
    models = {label: (row.target_model, row.draft_model) for label, row in rows.items()}
    assert [models[label] for label in labels[:3]] == [("a", "x"), ("a", "y"), ("b", "x")]
    assert rows["pld @a+x"].draft_model is None


def test_speedup_with_several_targets_equals_that_of_the_single_run(matrix):
    combined = by_label(read_runs(matrix, targets=True))
    for run in matrix:
        for row in read_report_data(run).summary.rows:
            assert combined[f"{row.label} @{run.path.name}"].speedup == row.speedup


def test_runs_of_several_targets_with_other_differences_are_rejected(make_run):
    runs = [make_run("a", change=change_models("a")), make_run("b", change=change_settings(seed=7))]
    with pytest.raises(UsageError, match=r"seed: 0 \(a\) against 7 \(b\)") as refused:
        read_runs(runs, targets=True)
    assert "target" not in refused.value.message.partition("seed")[0]


def test_a_method_left_out_for_one_target_is_listed_with_that_target(matrix):
    matrix[2].manifest["left_out"] = {"eagle": "no head"}
    reading = read_runs(matrix, targets=True)
    assert reading.run.manifest["left_out"] == {"eagle @b+x": "no head"}


def test_a_matrix_has_one_row_per_method_and_draft_and_one_column_per_target(matrix, tmp_path):
    reading = read_runs(matrix, targets=True)
    found = group_by_target(reading.summary, reading.facts.targets)
    assert [row.label for row in found.rows] == ["sps @x", "sps @y", "pld"]
    assert {target: sorted(own) for target, own in found.targets.items()} == {
        "a": ["pld", "sps @x", "sps @y"],
        "b": ["pld", "sps @x"],
    }
    write_markdown(reading, tmp_path, ())
    page = (tmp_path / "report.md").read_text()
    assert "| speedup | a | b |" in page
    assert re.search(r"\| sps `@y` \| \d\.\d\dx \| - \|", page)
    assert "Targets were a | b, the draft x | y" in page


def test_every_format_of_a_matrix_has_the_target(matrix, tmp_path, capsys):
    reading = read_runs(matrix, targets=True)
    write(reading, tmp_path, ("csv", "json", "html", "latex"))
    table = csv.DictReader((tmp_path / "summary.csv").read_text().splitlines())
    assert {row["target_model"] for row in table} == {"a", "b"}
    assert "sps @b+x" in (tmp_path / "report.html").read_text()
    print_runs([reading], families=False)
    out = capsys.readouterr().out
    assert "speedup by target" in out and "MAT by target" in out
    print_runs([reading], families=False, form="tsv")
    assert capsys.readouterr().out.splitlines()[0].endswith("target_model\tdraft_model")


def test_the_heat_map_has_one_field_per_pair_and_is_left_out_for_one_target(matrix):
    def draw_heat_map(runs):
        reading = read_runs(runs, targets=len(runs) > 1)
        with style.figure_style():
            return targets.draw(FigureData.from_report(reading))

    figure = draw_heat_map(matrix)
    speedup, mat = ([each.get_text() for each in axes.texts] for axes in figure.axes)
    assert len(speedup) == len(mat) == 6 and speedup.count("-") == 1
    assert [axes.get_title() for axes in figure.axes] == ["speedup", "MAT"]
    assert draw_heat_map(matrix[:1]) is None

"""Tests of Spec-Bench's formulas and answer files, and of reports that use them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from specbench_cli import app
from specbench_cli.commands.report import report
from specbench_cli.config.commands import ReportOptions
from specbench_cli.errors import UsageError
from specbench_cli.report.report_data import read_report_data, read_runs
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.report.spec_bench.files import ImportedAnswers, read_answers, write_answers
from specbench_cli.report.spec_bench.formulas import Answer, collect_answers, compute_results


def answer(question_id, tokens, seconds, text="", family="qa", lengths=()):
    return Answer(question_id, family, family, (text,), (1,), (tokens,), (seconds,), tuple(lengths))


def line(question_id, texts, tokens, seconds, category="qa", **more):
    choice = {"index": 0, "turns": texts, "new_tokens": tokens, "wall_time": seconds, **more}
    return json.dumps(
        {
            "question_id": question_id,
            "category": category,
            "answer_id": "x",
            "model_id": "vicuna-7b",
            "choices": [choice],
            "tstamp": 1.5,
        }
    )


@pytest.fixture
def files(tmp_path):
    """Answer files of vanilla and of a method, in the format of Spec-Bench."""
    base = [
        line(81, ["one", "two"], [10, 20], [1.0, 2.0], "writing", accept_lengths=[1] * 30),
        line(321, ["three"], [40], [2.0], accept_lengths=[1] * 40),
    ]
    own = [
        line(81, ["one", "two"], [12, 20], [0.5, 1.0], "writing", accept_lengths=[4] * 8),
        line(321, ["three"], [40], [1.6], accept_lengths=[2] * 20),
    ]
    paths = tmp_path / "vanilla.jsonl", tmp_path / "eagle.jsonl"
    for path, lines in zip(paths, (base, own), strict=True):
        path.write_text("\n".join(lines) + "\n")
    return paths


def test_speedup_is_the_ratio_of_mean_tokens_per_second():
    base = [answer(1, 10, 1.0), answer(2, 30, 1.0)]
    own = [answer(1, 10, 0.5, lengths=[2, 3]), answer(2, 30, 2.0, lengths=[1])]
    found = {
        t.label: t
        for t in compute_results([{"vanilla": base, "m": own}], None)
        if t.family == "all"
    }
    assert found["m"].tokens_per_s == (20 + 15) / 2
    assert found["m"].baseline_tokens_per_s == 20
    assert found["m"].speedup == 17.5 / 20
    assert found["m"].mean_accepted == (2 + 3 + 1) / 3
    assert found["vanilla"].speedup == 1


def test_baseline_tokens_are_counted_by_tokenising_its_text_again():
    base = [Answer(1, "qa", "qa", ("a b c d", "e f g"), None, (9, 9), (1.0, 1.0), None)]
    (found, _) = compute_results([{"vanilla": base}], lambda text: len(text.split()))
    assert found.baseline_tokens_per_s == (3 + 2) / 2
    assert found.tokens_per_s == 18 / 2
    assert found.speedup == 9 / 2.5
    assert found.mean_accepted is None


def test_several_runs_are_averaged():
    runs = [
        {"vanilla": [answer(1, 10, 1.0)], "m": [answer(1, 10, 1 / speed)]} for speed in (2.0, 4.0)
    ]
    found = next(t for t in compute_results(runs, None) if t.label == "m" and t.family == "all")
    assert found.speedup == pytest.approx(3.0)


def test_accept_lengths_are_the_committed_tokens_of_each_step(synthetic):
    records = synthetic.records([synthetic.vanilla, synthetic.sps], prompts=1, tokens=20)
    own = collect_answers(records, lambda ids: f" {len(ids)} ids ")[0]["sps"][0]
    assert own.question_id == 0
    assert own.turns == ("20 ids",)
    assert own.new_tokens == (20,)
    assert sum(own.accept_lengths) == 19
    assert own.decoding_steps == (len(own.accept_lengths),)


def test_a_question_with_a_noisy_turn_has_no_answer(synthetic):
    records = synthetic.records([synthetic.vanilla], prompts=2)
    records[0] = replace(records[0], void=True)
    assert len(collect_answers(records, None)[0]["vanilla"]) == 1


def test_mean_accepted_tokens_equals_mat_if_steps_are_counted_equally(make_run):
    reading = read_report_data(make_run())
    found = spec_bench_table.compute_spec_bench(reading.run, reading.sources, reading.summary)
    spec_bench_results = {t.label: t for t in found.results if t.family == "all"}
    for label in ("sps", "pld", "vanilla"):
        assert spec_bench_results[label].mean_accepted == pytest.approx(
            found.rows[label, "all"].mat
        )


def test_a_written_answer_file_is_read_back_unchanged(tmp_path):
    answers = [
        Answer(7, "qa", "qa", ('a "b"\n',), (3,), (5,), (0.25,), (2, 3)),
        Answer(81, "writing", "multi_turn", ("ä", "b"), (1, 1), (2, 2), (0.1, 0.2), (1, 1)),
    ]
    path = write_answers(answers, "sps", tmp_path / "deep" / "sps.jsonl")
    imported = read_answers(path)
    assert (list(imported.answers), imported.model_id) == (answers, "sps")
    assert path.read_bytes() == write_answers(answers, "sps", tmp_path / "b.jsonl").read_bytes()


def test_the_last_answer_to_a_question_is_used(tmp_path):
    path = tmp_path / "eagle.jsonl"
    path.write_text(line(1, ["a"], [1], [1.0], idxs=[0]) + "\n" + line(1, ["b"], [2], [1.0]) + "\n")
    (only,) = read_answers(path).answers
    assert only.turns == ("b",)
    assert only.accept_lengths is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no answers"),
        ("{}", "line 1 is not a Spec-Bench answer: it has no 'choices'"),
        ("nonsense", "line 1 is not a Spec-Bench answer"),
        (line(1, ["a", "b"], [1], [1.0]), "do not have the same length"),
        (line(1, ["a"], [1], [0.0]), "a wall_time is not positive"),
        (line(1, ["a"], [1], [1e308]), "a wall_time is not positive, not finite, or above 292"),
        (line(1, ["a"], [1], [math.inf]), "a wall_time is not positive, not finite"),
        (line(1, ["a"], [1], [10**400]), "line 1 is not a Spec-Bench answer: int too large"),
        (line(1, ["a"], [math.inf], [1.0]), "is not a Spec-Bench answer: cannot convert"),
        (line(1, ["a"], [10**30], [1.0]), "a number of new_tokens is negative, or above"),
        (line(1, ["a"], [1], [1.0], decoding_steps=[math.inf]), "is not a Spec-Bench answer"),
    ],
)
def test_an_invalid_answer_file_is_rejected_with_its_line(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_answers(path)


def test_imported_methods_are_unchecked_and_have_no_mat(files):
    reading = read_runs([ImportedAnswers(files)])
    own, vanilla = reading.summary.rows
    assert (own.label, vanilla.label) == ("imported:eagle", "vanilla")
    assert (own.unchecked, own.identical, own.mat) == (3, 0, None)
    assert own.speedup == pytest.approx((1.0 * 1.2 + 2.0 + 2.0) / (0.5 + 1.0 + 1.6))
    assert reading.summary.proof() is None
    assert set(reading.summary.families) == {"multi_turn", "qa"}
    assert reading.facts.header({}, 99)[0].endswith(
        "target imported (vicuna-7b)  imported, unchecked"
    )


def test_a_failed_answer_counts_as_failed(files):
    text = files[1].read_text().replace("three", "ERROR")
    files[1].write_text(text)
    rows = {row.label: row for row in read_report_data(ImportedAnswers(files)).summary.rows}
    assert rows["imported:eagle"].failed == 1


def test_report_of_answer_files_uses_spec_benchs_formulas(files, capsys):
    assert report(ReportOptions(runs=[str(file) for file in files], form="tsv")) == 0
    out, err = capsys.readouterr()
    spec_bench_results = next(
        row.split("\t") for row in out.splitlines() if row.startswith("imported:eagle\tall")
    )
    assert float(spec_bench_results[4]) == pytest.approx(
        ((32 / 1.5) + 25) / 2 / ((10 + 20) / 2), rel=1e-5
    )
    assert "Spec-Bench's formulas" in err


def test_answer_files_and_runs_are_combined_only_with_force(files, make_run, capsys):
    run = make_run()
    options = [str(run.path), *map(str, files)]
    with pytest.raises(UsageError, match=r"target: embedded-7m .* against imported"):
        report(ReportOptions(runs=options))
    assert report(ReportOptions(runs=options, force=True)) == 0
    assert "imported:eagle @" in capsys.readouterr().out


def test_also_spec_bench_writes_tables_and_answer_files(make_run, tmp_path):
    run = make_run(edit=_other_category)
    assert (
        report(
            ReportOptions(
                runs=[str(run.path)], to="md,csv,latex", also="spec-bench", out=tmp_path / "out"
            )
        )
        == 0
    )
    out = tmp_path / "out"
    assert (out / "spec_bench.csv").read_text().startswith("label,family,tokens_per_s")
    page = (out / "report.md").read_text()
    assert "## By Spec-Bench's formulas, and ours" in page
    assert r"\label{tab:spec-bench}" in (out / "latex" / "spec-bench.tex").read_text()
    answers = read_answers(out / "spec-bench" / "sps.jsonl").answers
    assert len(answers) == 12
    assert {a.category for a in answers} >= {"multi_turn", "qa"}
    imported = read_report_data(
        ImportedAnswers([out / "spec-bench" / "vanilla.jsonl", out / "spec-bench" / "sps.jsonl"])
    )
    assert imported.summary.rows[0].speedup == pytest.approx(
        next(r for r in read_report_data(run).summary.rows if r.label == "sps").speedup, rel=1e-6
    )


def test_each_label_has_its_own_answer_file(make_run, synthetic, tmp_path):
    labels = ["a b", "a-b", "..", "/", "x" * 120, "x" * 121]
    fakes = [synthetic.Fake(label, method="sps", length=5, alpha=0.7) for label in labels]
    run = make_run("run", (synthetic.vanilla, *fakes))
    options = ReportOptions(runs=[str(run.path)], to="csv", also="spec-bench", out=tmp_path / "out")
    assert report(options) == 0
    found = sorted((tmp_path / "out/spec-bench").iterdir())
    assert len(found) == len(labels) + 1
    assert len({read_answers(path).model_id for path in found}) == len(found)


def _other_category(record):
    """Return the record, for family qa with a category that Spec-Bench does not have."""
    return replace(record, category="sharing" if record.family == "qa" else record.category)


def test_hostile_text_of_an_answer_file_is_escaped(tmp_path, capsys):
    hidden = "\x1b[2J\u202e\n```\r=1+1"
    for name in ("vanilla", "=x"):
        lines = [
            {
                "question_id": f"{hidden}{number}",
                "category": hidden,
                "model_id": hidden + "M" * 1_000_000,
                "choices": [{"turns": [hidden], "new_tokens": [10], "wall_time": [0.1 + number]}],
            }
            for number in range(3)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("vanilla", "=x")]
    out = tmp_path / "out"
    for more in ((), ("--to", "md,csv,json,html", "--out", str(out))):
        assert app._run(["report", *files, "--also", "spec-bench", *more]) == 0
    printed = capsys.readouterr()
    texts = [printed.out, printed.err, *(file.read_text() for file in out.glob("*.*"))]
    assert {file.suffix for file in out.glob("*.*")} == {".csv", ".html", ".json", ".md"}
    for text in texts:
        assert not set("\x1b\u202e\r") & set(text)
        assert len(text) < 1_000_000

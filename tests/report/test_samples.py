"""Tests of exporting outputs for Inspect AI and lm-evaluation-harness."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.report import samples
from specbench_cli.report.samples import FORMATS, export
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

RUN = Path(__file__).parents[2] / "results/reference/default-2cores"


def join_ids(ids):
    """Return a text for the ids, without a tokenizer."""
    return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The exported files of a run, by format."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "load_text_decoder", lambda target: join_ids)
        exported = export(RunDir.open(RUN), folder, list(FORMATS))
    assert all(file.is_relative_to(folder) for file in exported)
    return {
        name: [file for file in exported if file.is_relative_to(folder / name)] for name in FORMATS
    }


@pytest.fixture(scope="module")
def records():
    found = {}
    for record in RunDir.open(RUN).records():
        found.setdefault(record.label, []).append(record)
    return found


def test_inspect_has_one_log_per_task_and_method(files, records):
    logs = [json.loads(file.read_text()) for file in files["inspect"]]
    assert {log["eval"]["solver"] for log in logs} == records.keys()
    for file, log in zip(files["inspect"], logs, strict=True):
        assert list(log) == "version status eval plan results stats samples".split()
        assert (log["version"], log["status"]) == (2, "success")
        time, task, id_ = file.stem.split("_")
        assert time == log["eval"]["created"].replace(":", "-")
        assert task.startswith("mini-")
        assert id_ == log["eval"]["task_id"]
        needed = {"created", "task", "dataset", "model", "config"}
        assert needed <= log["eval"].keys()


def test_an_inspect_sample_has_the_values_of_its_record(files, records):
    logs = [json.loads(file.read_text()) for file in files["inspect"]]
    vanilla = {(r.prompt_id, r.turn): join_ids(r.output_ids) for r in records["vanilla"]}
    for log in logs:
        method_records = records[log["eval"]["solver"]]
        assert len(log["samples"]) == len(method_records) == log["results"]["total_samples"]
        for sample, record in zip(log["samples"], method_records, strict=True):
            text = join_ids(record.output_ids)
            assert sample["id"] == f"{record.prompt_id} turn {record.turn}"
            assert sample["epoch"] == record.pass_
            assert sample["target"] == vanilla[record.prompt_id, record.turn]
            assert [each["role"] for each in sample["messages"]] == ["user", "assistant"]
            (choice,) = sample["output"]["choices"]
            assert choice["message"]["content"] == text
            assert choice["stop_reason"] in ("stop", "max_tokens")
            assert sample["output"]["usage"]["output_tokens"] == record.n_tokens
            assert sample["total_time"] == record.ns.total / 1e9
            assert sample["scores"]["same_output"] == {"value": 1.0, "answer": text}
        (same, score) = log["results"]["scores"]
        assert same["metrics"]["mean"] == {"name": "mean", "value": 1.0}
        assert score["metrics"]["mean"]["value"] == pytest.approx(
            sum(r.score for r in method_records if r.score is not None)
            / sum(r.score is not None for r in method_records)
        )


def test_lm_eval_samples_have_the_fields_of_the_harness(files, records):
    logged = (
        "doc_id doc target arguments resps filtered_resps filter metrics doc_hash prompt_hash"
        " target_hash same_output score"
    ).split()
    by_row = {file.parent.name: file for file in files["lm-eval"] if file.suffix == ".jsonl"}
    assert len(by_row) == len(records)
    lines = [json.loads(line) for line in by_row["sps"].read_text().splitlines()]
    assert [line["doc_id"] for line in lines] == [*range(len(records["sps"]))]
    for line, record in zip(lines, records["sps"], strict=True):
        assert list(line) == (logged if record.score is not None else logged[:-1])
        assert line["resps"] == [[join_ids(record.output_ids)]]
        assert line["filtered_resps"] == [join_ids(record.output_ids)]
        assert line["metrics"] == logged[11:][: len(line["metrics"])]
        assert line["arguments"]["gen_args_0"].keys() == {"arg_0", "arg_1"}


def test_lm_eval_results_and_samples_have_the_same_time_stamp(files):
    for file in files["lm-eval"]:
        if file.name.startswith("results_"):
            whole = json.loads(file.read_text())
            stamp = file.stem.removeprefix("results_")
            assert (file.parent / f"samples_mini_{stamp}.jsonl").is_file()
            assert whole["results"]["mini"]["same_output,none"] == 1.0
            assert whole["n-samples"]["mini"] == {"original": 14, "effective": 14}
            assert {"configs", "versions", "n-shot", "config", "date"} <= whole.keys()


def test_a_failed_output_has_its_error_and_no_score(records):
    record = replace(
        records["sps"][0], error="it broke", verdict=None, score=None, finish="error", n_tokens=None
    )
    prompt = next(iter(RunDir.open(RUN).prompts()))
    found = samples._inspect_sample(samples.Sample(record, prompt, "asked", "", ""), "m")
    assert found["scores"] == {}
    assert found["error"]["message"] == "it broke"
    assert found["output"]["choices"][0]["stop_reason"] == "unknown"


@pytest.mark.parametrize("label", ["../../gone", "a/b", "hf:x", "sps length=5", "\u202e"])
def test_each_label_has_a_unique_safe_file_name(label):
    slug = samples._slug(label)
    assert Path(slug).name == slug
    assert slug not in ("", ".", "..")
    assert slug != samples._slug(f"{label}!")


def test_export_without_a_format_or_a_tokenizer_is_an_error(capsys, monkeypatch, tmp_path):
    assert app._run(["export", str(RUN)]) == 2
    assert "needs a format: --inspect, --lm-eval, --wandb or --mlflow" in capsys.readouterr().err
    monkeypatch.setattr(samples, "load_text_decoder", lambda target: None)
    assert app._run(["export", str(RUN), "--inspect", "--out", str(tmp_path)]) == 3
    assert "the tokenizer of embedded-7m is not on this machine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

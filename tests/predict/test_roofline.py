"""`specbench predict RUN --hardware`: a recorded run modelled on other accelerators."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.measure.costs import Costs
from specbench_cli.predict.accelerators import Roofline
from specbench_cli.predict.prediction import predict, predict_output
from specbench_cli.predict.roofline import replay_roofline
from specbench_cli.store.run_dir import RunDir

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "default-2cores"
OPTIONS = ("--hardware", "h100x2", "--shape", "llama-2-70b+7b")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Return the folder of a finished run with two prompts and without figures."""
    folder = tmp_path_factory.mktemp("runs") / "made"
    shutil.copytree(REFERENCE, folder)
    lines = (folder / "records.jsonl").read_text().splitlines()
    prompt_ids = sorted({json.loads(line)["prompt_id"] for line in lines})[:2]
    some = [line for line in lines if json.loads(line)["prompt_id"] in prompt_ids]
    (folder / "records.jsonl").write_text("\n".join(some) + "\n")
    return folder


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "SPECBENCH_DEBUG"):
        monkeypatch.setenv(name, "")

    def call(*args):
        return (app._run(list(args)), *capsys.readouterr())

    return call


def test_every_method_is_modelled_with_its_sensitivities(run, run_folder):
    code, out, err = run("predict", str(run_folder), *OPTIONS)
    rows = {row["label"]: row for row in csv.DictReader(io.StringIO(out), delimiter="\t")}
    assert code == 0, err
    assert list(rows) == ["vanilla", "sps", "pld"]
    assert "modelled: 2 x NVIDIA H100 SXM 80 GB, llama-2-70b + llama-2-7b, bfloat16, batch 1" in err
    assert "acceptance and lengths: as recorded with embedded-7m + embedded-1m" in err
    assert "modelled, not measured" in err
    assert "hf:vanilla: not modelled: its forwards are not metered" in err
    assert {row["modelled"] for row in rows.values()} == {"True"}
    assert float(rows["vanilla"]["modelled_speedup"]) == pytest.approx(1)
    sps = {name: float(value) for name, value in rows["sps"].items() if name != "label"
           and value not in ("", "True")}  # fmt: skip
    assert (
        sps["modelled_speedup"] > sps["measured_speedup_here"]
    )  # a draft costs more on this machine
    assert sps["modelled_speedup_per_device"] == pytest.approx(
        sps["modelled_speedup"] / 2, rel=1e-4
    )
    # A slower draft model slows only the methods that use it.
    assert sps["draft_weights_+10%"] < 0 < sps["draft_weights_-10%"]
    assert float(rows["pld"]["draft_weights_+10%"]) == 0


def test_modelled_times_equal_a_replay_with_the_roofline_table(run_folder):
    source = RunDir.open(run_folder)
    roofline = Roofline.from_options("h100x2", "llama-2-70b+7b")
    found = replay_roofline(source.records(), source.manifest, roofline)
    table = roofline.make_cost_table(source.manifest["models"])
    once = {}
    for record in source.records():
        if record.label == "sps":
            once.setdefault(
                (record.prompt_id, record.turn),
                predict_output(record.forwards, record.steps, table).decode,
            )
    row = next(row for row in found.rows if row.label == "sps")
    assert row.ns == pytest.approx(sum(once.values()))
    assert row.outputs == len(once)


def test_a_saved_cost_table_gives_the_same_prediction(run_folder, tmp_path):
    source = RunDir.open(run_folder)
    table = Roofline.from_options("h100x2", "llama-2-70b+7b").make_cost_table(
        source.manifest["models"]
    )
    table.save(tmp_path / "table.json")
    again = Costs.load(tmp_path / "table.json")
    found = predict(source.records(), source.manifest, table, again)
    for row in found.rows:
        assert row.elsewhere == row.predicted + (row.predicted_void or 0)


def test_large_batches_reduce_the_speedup(run, run_folder):
    def speedup(*more):
        out = run("predict", str(run_folder), *OPTIONS, *more, "--json")[1]
        rows = {row["label"]: row for row in json.loads(out)["rows"]}
        return rows["sps"]["modelled_speedup"], rows["vanilla"]["modelled_tokens_per_s"]

    batch_1, batch_128 = speedup(), speedup("--batch", "128")
    assert batch_128[0] < batch_1[0]  # compute instead of bandwidth limits a verification
    assert batch_128[1] > 20 * batch_1[1]
    with_overhead = speedup("--overhead", "1000")
    assert (
        with_overhead[0] < batch_1[0]
    )  # 1 ms per forward makes the small draft as slow as the target


def test_json_contains_every_input_of_the_model(run, run_folder):
    event = json.loads(run("predict", str(run_folder), *OPTIONS, "--json")[1])
    modelled = event["modelled"]
    assert (modelled["devices"], modelled["device"]["bandwidth"]) == (2, 3.35e12)
    assert modelled["shapes"]["target"]["source"].startswith("https://huggingface.co/meta-llama")
    assert modelled["bytes_held_by_weights"] == 2 * (68_976_648_192 + 6_738_415_616)
    assert event["recorded_with"] == {"target": "embedded-7m", "draft": "embedded-1m"}


def test_a_terminal_shows_both_tables(run, run_folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = run("predict", str(run_folder), *OPTIONS)
    assert code == 0
    assert "modelled speedup" in out and "measured here" in out
    assert "draft weights" in out and "bandwidth" in out and "experts" not in out


def test_load_is_simulated_with_roofline_costs(run, run_folder):
    options = ("--load", "poisson:20", "--batch", "2", "--json")
    event = json.loads(run("predict", str(run_folder), *OPTIONS, *options)[1])
    assert event["roofline"]["hardware"] == "h100x2"
    assert {row["method"] for row in event["modelled"]} == {"vanilla", "sps", "pld"}
    slow = json.loads(run("predict", str(run_folder), "--hardware", "h100x2", "--shape",
                          "llama-2-13b+7b", *options)[1])  # fmt: skip
    times = [
        {row["method"]: row["ms_per_token_p50"] for row in each["modelled"]}
        for each in (event, slow)
    ]
    assert times[0]["vanilla"] > times[1]["vanilla"]  # 70 instead of 13 billion weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hardware", "h100"), "--hardware: also give --hardware and --shape"),
        (("--context", "64"), "--context: also give --hardware and --shape"),
        (("--hardware", "b9", "--shape", "llama-2-7b"), "unknown hardware 'b9'"),
        (("--hardware", "h100", "--shape", "llama-2-70b+7b"), "they need 151,4"),
        ((*OPTIONS, "--costs", "x.json"), "--costs cannot be combined with --hardware"),
        ((*OPTIONS, "--dtype", "int8"), "--dtype int8: the peak FLOPS of h100"),
        ((*OPTIONS, "--threads", "2"), "--threads cannot be combined with RUN"),
    ],
)
def test_unmodelled_options_are_an_error(run, run_folder, options, message):
    code, out, err = run("predict", str(run_folder), *options)
    assert (code, out) == (2, "")
    assert message in err
    assert "hint: " in err


def test_hardware_without_a_draft_skips_methods_with_a_draft_model(run, run_folder):
    code, _, err = run("predict", str(run_folder), "--hardware", "h100", "--shape", "llama-2-7b")
    assert code == 0
    assert "sps: not modelled: its draft model has no shape: --shape llama-2-7b+DRAFT" in err

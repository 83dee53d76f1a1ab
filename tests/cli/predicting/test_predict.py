"""`specbench predict`: a probe, a prediction from it, and every error of its options."""

import csv
import io
import json
import re
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import save_file

from methods.eagle.head import EagleHead
from specbench_cli import app, registry
from specbench_cli.commands.predict import EXAMPLES
from specbench_cli.engine.drafting.load_aware import expected_tokens
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.measure import method_costs as probing
from specbench_cli.measure import probe
from specbench_cli.measure.costs import Costs, cache_path
from specbench_cli.measure.probe_rounds import ProbeGrid
from specbench_cli.models.resolve import resolve

pytestmark = pytest.mark.usefixtures("small_pair")

REFERENCE = Path(__file__).parents[3] / "results" / "reference" / "default-2cores"
METHODS = ["vanilla", "sps", "pld", "all"]


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder with an empty cache.

    The function returns exit code, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "SPECBENCH_DEBUG"):
        monkeypatch.setenv(name, "")

    def call(*args):
        code = app._run(list(args))
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def run_folder(tmp_path):
    """Return the folder of a finished run with vanilla, sps, pld and methods of transformers."""
    folder = tmp_path / "made"
    shutil.copytree(REFERENCE, folder)
    return folder


@pytest.fixture
def costs(run_folder):
    """Return costs for the run's machine, models and setup: 1 ms per forward, 0.1 ms per token."""
    manifest = json.loads((run_folder / "manifest.json").read_text())
    config = manifest["config"]["effective"]
    points = [
        {"n_tokens": n, "context": c, "ns": 1e6 + 1e5 * n, "spread": 0.0, "samples": 9}
        for n in (1, 64)
        for c in (0, 16, 1024)
    ]
    curve = {
        "forwards": [point for point in points if point["context"]],
        "prefills": [point for point in points if not point["context"]],
    }
    return Costs.model_validate(
        {
            "schema": 1,
            "version": "0.1.0",
            "created_utc": "2026-11-21T12:00:00+00:00",
            "machine": manifest["machine"],
            "models": manifest["models"],
            "setup": {name: config[name] for name in ("device", "dtype", "threads")},
            "seed": 0,
            "quietness": {"rounds": 9, "void": 0, "other_cpu": 0.01, "noisy": False},
            "curves": {"target": curve, "draft": curve},
            "host": {"step": 1e5, "draft": 0.0, "node": 0.0},
        }
    )


@pytest.fixture
def saved_costs(run, costs):
    """Save the costs where a probe saves them, and return the file."""
    path = cache_path(costs.machine["id"], costs.models, costs.setup)
    costs.save(path)
    return path


def save_changed(costs, path, **changes):
    """Save the costs with some changed fields, and return the file's path."""
    costs.model_copy(update=changes).save(path)
    return str(path)


def read_table(out):
    return list(csv.DictReader(io.StringIO(out), delimiter="\t"))


def test_a_run_is_predicted_from_the_saved_costs_of_its_machine(run, run_folder, saved_costs):
    code, out, err = run("predict", str(run_folder))
    rows = read_table(out)
    assert code == 0
    assert [row["label"] for row in rows] == METHODS
    assert "hf:vanilla: no prediction: its forwards are not metered" in err
    vanilla = rows[0]
    records = map(json.loads, (run_folder / "records.jsonl").read_text().splitlines())
    steps = sum(len(r["steps"]["levels"]) for r in records if r["label"] == "vanilla")
    assert float(vanilla["predicted"]) == pytest.approx(steps * 1.2e6)
    ratio = float(vanilla["predicted"]) / float(vanilla["measured"])
    assert float(vanilla["efficiency"]) == pytest.approx(
        ratio, abs=1e-6
    )  # the table has six digits
    assert float(vanilla["error"]) == pytest.approx(ratio - 1, abs=1e-6)


def test_the_table_on_a_terminal_fits_100_columns(run, run_folder, saved_costs, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = run("predict", str(run_folder))
    assert code == 0
    machine = json.loads((run_folder / "manifest.json").read_text())["machine"]
    assert f"costs: {machine['hardware']['cpu']}" in out
    assert "efficiency" in out
    assert [word for word in out.split() if word in METHODS[:3]] == METHODS[:3]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.splitlines()]
    assert max(map(len, lines)) <= 100


def test_json_contains_every_method(run, run_folder, saved_costs):
    code, out, _ = run("predict", str(run_folder), "--json")
    event = json.loads(out)
    assert code == 0
    assert event["costs"]["modelled_for"] is None
    assert [row["label"] for row in event["rows"]] == METHODS
    assert event["rows"][0]["outputs"] == 14


def test_pinned_costs_of_another_machine_are_labelled(run, run_folder, costs, tmp_path):
    file = save_changed(costs, tmp_path / "b.json", machine={"id": "other"})
    code, _, err = run("predict", str(run_folder), "--costs", file)
    assert code == 0
    assert "the costs are for another machine than the run was made on" in err
    setup = costs.setup.model_copy(update={"threads": 1})
    file = save_changed(costs, tmp_path / "c.json", setup=setup)
    event = json.loads(run("predict", str(run_folder), "--costs", file, "--json")[1])
    assert event["costs"]["modelled_for"] == "another set-up than the run's (cpu float32 2 threads)"


def test_noisy_costs_and_a_sampled_run_are_labelled(run, run_folder, costs, tmp_path):
    noisy = costs.quietness.model_copy(update={"noisy": True})
    manifest = json.loads((run_folder / "manifest.json").read_text())
    manifest["config"]["effective"] |= {"verify": "rejection", "temperature": 0.8}
    (run_folder / "manifest.json").write_text(json.dumps(manifest))
    file = save_changed(costs, tmp_path / "b.json", quietness=noisy)
    _, _, err = run("predict", str(run_folder), "--costs", file)
    assert "noisy costs" in err
    assert (
        "host: probed with greedy decoding, so extra host time of sampling is not predicted" in err
    )


def test_against_adds_a_column_with_the_prediction_for_another_machine(
    run, run_folder, saved_costs, costs, tmp_path
):
    host = costs.host.model_copy(update={"step": 2e5})
    file = save_changed(costs, tmp_path / "b.json", machine={"id": "other"}, host=host)
    code, out, err = run("predict", str(run_folder), "--against", file)
    rows = read_table(out)
    assert code == 0
    assert "predicted for another machine: ?, cpu float32 2 threads" in err
    assert float(rows[0]["elsewhere"]) == pytest.approx(float(rows[0]["predicted"]) * 1.3 / 1.2)


def test_missing_costs_name_the_command_that_measures_them(run, run_folder, monkeypatch):
    own = json.loads((run_folder / "manifest.json").read_text())["machine"]
    other_machine = {**own, "id": "another"}
    monkeypatch.setattr("specbench_cli.measure.machine.fingerprint", lambda: other_machine)
    code, out, err = run("predict", str(run_folder))
    assert (code, out) == (3, "")
    assert (
        "the forward costs of embedded-7m and embedded-1m (cpu float32 2 threads) were not" in err
    )
    command = "specbench predict --probe --target embedded-7m --draft embedded-1m --device cpu"
    assert command in err
    assert "--costs FILE" in err
    monkeypatch.setattr("specbench_cli.measure.machine.fingerprint", lambda: own)
    code, _, err = run("predict", str(run_folder))
    assert code == 3
    assert "on this machine yet" in err
    assert command in err


def test_costs_of_other_models_are_refused(run, run_folder, costs, tmp_path):
    models = {"target": {"label": "llama-7b", "sha256": "ff"}}
    code, _, err = run(
        "predict", str(run_folder), "--costs", save_changed(costs, tmp_path / "b", models=models)
    )
    assert code == 2
    assert "measured for other models: target llama-7b" in err
    assert "hint: specbench predict --probe --target embedded-7m --draft embedded-1m" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give exactly one of RUN, --probe and --compare"),
        (["last", "--probe"], "give exactly one of RUN, --probe and --compare"),
        (["last"], "there is no run in"),
        (["nowhere"], "nowhere contains no run"),
        (
            ["last", "--target", "embedded", "--threads", "1"],
            "--target, --threads cannot be combined with",
        ),
        (["--probe", "--costs", "a.json"], "--costs cannot be combined with --probe"),
        (["--probe", "--rounds", "0"], "invalid value for '--rounds'"),
        (["--probe", "--batch", "1"], "--probe always measures batch size 1"),
        (["--probe", "--target", "embeded"], "did you mean 'embedded'"),
        (["--probe", "--threads", "none"], "--threads"),
        (["--probe", "--dtype", "int8"], "--dtype"),
        (["--compare", "a.json"], "--compare"),
        (["--compare", "a.json", "b.json"], "cannot read costs from a.json"),
    ],
)
def test_wrong_options_fail_with_a_hint(run, args, message):
    code, out, err = run("predict", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert "hint: " in err


def test_two_probes_are_compared_point_by_point(run, costs, tmp_path):
    host = costs.host.model_copy(update={"points": ()})
    curves = json.loads(json.dumps(costs.model_dump(mode="json")["curves"]))
    curves["draft"]["forwards"][0]["ns"] *= 1.25
    first = save_changed(costs, tmp_path / "a.json", host=host)
    slower = Costs.model_validate(
        {**costs.model_dump(mode="json", by_alias=True), "curves": curves}
    )
    slower.save(tmp_path / "b.json")
    code, out, err = run("predict", "--compare", first, str(tmp_path / "b.json"))
    assert code == 0
    assert float(read_table(out)[0]["relative"]) == pytest.approx(0.25)
    assert "12 points: median difference 0.0%, worst 25.0% (draft, 1 tokens after 16)" in err
    _, out, _ = run("predict", "--compare", first, str(tmp_path / "b.json"), "--json")
    assert json.loads(out)["points"][0]["relative"] == pytest.approx(0.25)


def test_the_help_has_every_example(run):
    code, out, _ = run("predict", "--help")
    text = " ".join(out.split())
    assert code == 0
    assert all(example in text for example in EXAMPLES)


@pytest.fixture
def small_probe(monkeypatch):
    """Let a probe measure only a few points."""
    grid = ProbeGrid(contexts=(16, 64), chains=(1, 6), trees=(4,), levels=(2,))
    monkeypatch.setitem(probe.Probe.__init__.__kwdefaults__, "grid", grid)
    monkeypatch.setitem(probing.PROBED_PARAMS, "sps-tree", ({"widths": (2, 1)},))


@pytest.mark.smoke
def test_probe_then_run_then_prediction(run, small_probe):
    noisy = ["--threads", "1", "--allow-noise"]
    code, out, err = run("predict", "--probe", "--rounds", "1", *noisy, "--json")
    assert code == 0, err
    *rounds, done = map(json.loads, out.splitlines())
    assert rounds == [{"event": "round", "done": 1, "rounds": 1}]
    file = Path(done["file"])
    assert file.parent.name == "costs"
    assert Costs.load(file).setup.threads == 1
    assert "/" not in json.dumps(done["costs"]["models"])
    small = ["-m", "sps,pld", "--limit", "2", "--max-new-tokens", "8"]
    assert run("run", *small, *noisy)[0] == 0
    code, out, err = run("predict", "last")
    assert code == 0, err
    assert [row["label"] for row in read_table(out)] == METHODS
    assert all(float(row["predicted"]) > 0 for row in read_table(out))


def test_a_probe_without_a_draft_model_prints_the_target_s_points(
    run, small_probe, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = ["--target", "embedded-1m", "--rounds", "1", "--threads", "1", "--allow-noise"]
    code, out, err = run("predict", "--probe", *options, "--batch", "3", "--out", "costs.json")
    assert code == 0, err
    assert "in costs.json" in err
    assert "batches up to 3: each further sequence of a forward" in err
    points = Costs.load(
        Path("costs.json")
    ).batch.points  # eqspec is missing: it needs a draft model
    assert [(at.name, at.sequences) for at in points] == list(
        product(("pld", "vanilla"), (1, 2, 3))
    )
    assert {row["model"] for row in read_table(out)} == {"target"}
    assert len(read_table(out)) == (2 + 1) * 2 + 2
    assert sum(row["tree"] == "True" for row in read_table(out)) == 2


@pytest.fixture
def make_head(tmp_path):
    """Return a function that writes a random EAGLE head for embedded-1m in the authors' layout."""
    target = load_decoder(resolve("embedded-1m").path, name="target")

    def make(seed):
        files = EagleHead.module.random(target, seed).as_loaded()
        folder = tmp_path / f"head-{seed}"
        folder.mkdir()
        tensors = {
            re.sub("^layer", "layers.0", name): tensor.contiguous()
            for name, tensor in files.tensors.items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(asdict(files.shape)))
        return f"eagle2.head={folder}"

    return make


def test_a_head_given_with_set_is_probed_and_its_method_predicted(
    run, small_probe, make_head, monkeypatch
):
    monkeypatch.setitem(probing.PROBED_PARAMS, "eagle2", ({"depth": 2, "nodes": 4},))
    head, other = make_head(1), make_head(2)
    options = ["--target", "embedded-1m", "--threads", "1", "--allow-noise", "-m", "eagle2"]
    code, out, err = run("predict", "--probe", "--rounds", "1", *options, "--set", head)
    assert code == 0, err
    assert {row["model"] for row in read_table(out)} == {"target", "eagle"}
    assert "host, eagle2: " in err
    small = ["--limit", "1", "--max-new-tokens", "8"]
    assert run("run", *options, *small, "--set", head)[0] == 0
    code, out, err = run("predict", "last")
    assert [row["label"] for row in read_table(out)] == ["vanilla", "eagle2", "all"]
    assert float(read_table(out)[1]["predicted"]) > 0
    assert run("run", *options, *small, "--set", other)[0] == 0
    code, out, err = run("predict", "last")
    assert (code, [row["label"] for row in read_table(out)]) == (0, ["vanilla"])
    assert (
        "eagle2: no prediction: the probe measured another eagle; specbench predict --probe" in err
    )
    assert "--method eagle2 --set eagle2.head=head-2" in err


def test_a_noisy_probe_saves_no_costs(run, small_probe, monkeypatch, tmp_path):
    from specbench_cli.measure.quiet import NoiseMeter

    monkeypatch.setattr(NoiseMeter, "is_full", lambda self: True)
    monkeypatch.setattr(NoiseMeter, "close", lambda self: 0.5)
    options = ["--target", "embedded-1m", "--rounds", "1", "--threads", "1", "--out", "costs.json"]
    code, out, err = run("predict", "--probe", *options)
    assert (code, out) == (3, "")
    assert "other programs used too much CPU in 1 of 1 rounds" in err
    assert "--allow-noise" in err
    assert not (tmp_path / "costs.json").exists()


def test_an_unwritable_costs_file_is_refused_before_the_probe(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(probe, "Probe", None)
    code, _, err = run("predict", "--probe", "--target", "embedded-1m", "--out", "file/costs.json")
    assert code == 2
    assert "cannot write the costs to file/costs.json" in err


def test_a_plug_in_s_stateless_head_is_probed_and_predicted(run, small_probe, tmp_path):
    file = Path(__file__).parents[2] / "capabilities" / "plugins" / "stateless_head.py"
    registry.load_plugin(str(file))
    (artifact,) = registry.build("linear", {}).artifacts()
    target = load_decoder(resolve("embedded-1m").path, name="target")
    artifact.kind.random({"target": target}).save(tmp_path / "head")
    options = ["--target", "embedded-1m", "--threads", "1", "--allow-noise"]
    options += ["--plugin", str(file), "-m", "linear", "--set", f"linear.head={tmp_path / 'head'}"]
    small = ["--limit", "1", "--max-new-tokens", "8"]
    assert run("run", *options, *small, "--isolation", "none")[0] == 0
    assert run("predict", "--probe", *options[:5], "--rounds", "1")[0] == 0  # without the head
    code, out, err = run("predict", "last")
    assert (code, [row["label"] for row in read_table(out)]) == (0, ["vanilla"])
    assert "the probe has no costs of its linear" in err
    assert "--plugin stateless_head.py" in err
    code, out, err = run("predict", "--probe", *options, "--rounds", "1")
    assert code == 0, err
    assert {row["model"] for row in read_table(out)} == {"target", "linear"}
    code, out, err = run("predict", "last")
    assert [row["label"] for row in read_table(out)] == ["vanilla", "linear", "all"]
    assert float(read_table(out)[1]["predicted"]) > 0


# ---- under load, simulated -----------------------------------------------------------------------


def test_load_simulates_the_run_and_marks_the_result_as_modelled(run, run_folder, saved_costs):
    options = ("predict", str(run_folder), "--load", "poisson:2,200", "--batch", "2")
    code, out, _ = run(*options, "--json")
    assert code == 0
    (found,) = map(json.loads, out.splitlines())
    assert {row["method"] for row in found["modelled"]} == {"vanilla", "sps", "pld"}
    assert found["missing"].keys() == {"hf:vanilla", "hf:assisted"}
    slow, fast = (
        {row["method"]: row for row in found["modelled"] if row["load"] == load}
        for load in ("poisson:2", "poisson:200")
    )
    for row in slow.values():
        assert not row["saturated"] and row["requests"] == 12
        assert row["latency_s_p50"] < fast[row["method"]]["latency_s_p50"]
    # A target forward takes 1.1 ms and the host 0.1 ms. sps is slow: its draft costs as much.
    assert slow["vanilla"]["ms_per_token_p50"] == pytest.approx(1.2, rel=0.1)
    assert fast["vanilla"]["saturated"] and (found["measured"], found["errors"]) == ([], [])
    assert run(*options, "--json")[1] == out  # the simulation is reproducible
    code, out, _ = run(*options)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("modelled: batch 2")
    assert lines[1].startswith("batches were not probed") and lines[1].endswith("--batch 2)")
    assert lines[2].startswith("modelled under load")
    assert "not modelled: hf:vanilla: it is a method of another program" in lines
    assert any(line.startswith("vanilla: saturated from") for line in lines)


def test_two_probes_give_two_load_simulations_but_one_mean_per_swept_value(
    run, run_folder, saved_costs, costs, tmp_path
):
    curve = costs.curves["target"]
    points = tuple(each.model_copy(update={"ns": 2 * each.ns}) for each in curve.forwards)
    slow = {**costs.curves, "target": curve.model_copy(update={"forwards": points})}
    before = ("--costs", save_changed(costs, tmp_path / "b"))
    after = ("--costs", save_changed(costs, tmp_path / "c", curves=slow))
    options = ("predict", str(run_folder), "--load", "poisson:2", "--json")
    one_probe, two_probes = (
        json.loads(run(*options, *files)[1]) for files in (before, before + after)
    )
    assert (len(one_probe["also"]), len(two_probes["also"])) == (0, 1)
    one, two = one_probe["modelled"][0], two_probes["modelled"][0]
    assert two["requests"] == 2 * one["requests"]
    assert two["ms_per_token_p99"] > 1.2 * one["ms_per_token_p99"]
    assert two_probes["forwards"] == 2 * one_probe["forwards"]
    sweep_args = ("predict", str(run_folder), "--sweep", "sps.length=1:2:1", "--json")
    found = [json.loads(run(*sweep_args, *files)[1]) for files in (before, after, before + after)]
    rows = zip(*(each["modelled"] for each in found), strict=True)
    assert [len(each["also"]) for each in found] == [0, 0, 1]
    for before_row, after_row, mean_row in rows:
        assert mean_row["decode"] == pytest.approx((before_row["decode"] + after_row["decode"]) / 2)
        assert mean_row["speedup"] == pytest.approx(mean_row["vanilla"] / mean_row["decode"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--load", "poisson:0"), "RATE must be a number above 0"),
        (("--load", "uniform:3"), "must be poisson:RATE"),
        (("--load", "trace:none.txt"), "trace none.txt cannot be read"),
        (
            ("--load", "poisson:1", "--against", "x.json"),
            "--against cannot be combined with --load",
        ),
        (("--batch", "4"), "--batch cannot be combined with RUN without --load"),
        (("--load", "poisson:1", "--batch", "0"), "greater than or equal to 1"),
    ],
)
def test_a_load_that_cannot_be_simulated_is_an_error(
    run, run_folder, saved_costs, options, message
):
    code, out, err = run("predict", str(run_folder), *options)
    assert code == 2 and not out
    assert message in " ".join(err.replace("│", " ").split())


def test_a_trace_with_too_few_arrivals_is_an_error(run, run_folder, saved_costs, tmp_path):
    (tmp_path / "few.txt").write_text("0\n1\n")
    code, _, err = run("predict", str(run_folder), "--load", f"trace:{tmp_path}/few.txt")
    assert code == 2 and "2 arrival times for 12 prompts" in err


# ---- at other settings, simulated ----------------------------------------------------------------


def test_a_sweep_replays_the_run_s_own_value_and_models_other_values_from_its_acceptance(
    run, run_folder, saved_costs
):
    own = registry.build("sps", {}).params.length
    code, out, _ = run("predict", str(run_folder), "--sweep", f"sps.length=1,{own},9", "--json")
    assert code == 0
    (found,) = map(json.loads, out.splitlines())
    short, same, long = found["modelled"]
    assert {row["of"] for row in found["modelled"]} == {"sps"} and same["outputs"] == 14
    replayed = json.loads(run("predict", str(run_folder), "--json")[1])["rows"]
    (sps,) = (row for row in replayed if row["label"] == "sps")
    total = (sps["predicted"] or 0) + (sps["predicted_void"] or 0)
    assert same["decode"] == pytest.approx(total, rel=0.02)
    records = [json.loads(line) for line in (run_folder / "records.jsonl").read_text().splitlines()]
    sps_records = [r for r in records if r["label"] == "sps" and r["pass"] == 1]
    assert sps_records
    steps = sum(r["origin"].count("recovered") + r["origin"].count("bonus") for r in sps_records)
    tokens = sum(r["n_tokens"] - 1 for r in sps_records)
    assert same["mat"] == pytest.approx(tokens / steps, rel=0.02)
    assert short["mat"] < same["mat"] < long["mat"] and short["mat"] <= 2
    assert same["speedup"] == same["vanilla"] / same["decode"]
    n_accepted, n_recovered = (
        sum(r["origin"].count(origin) for r in sps_records) for origin in ("accepted", "recovered")
    )
    for row, length in ((short, 1), (same, own), (long, 9)):
        assert row["acceptance"] == n_accepted / (n_accepted + n_recovered)
        needed = row["mat"] / row["speedup"]
        if needed <= length + 1:
            assert expected_tokens(row["break_even"], length) == pytest.approx(needed, rel=1e-4)
        else:
            assert row["break_even"] is None
    code, out, err = run("predict", str(run_folder), "--sweep", "sps.length=1,9")
    assert code == 0 and "sps length=9" in out and "acceptance of sps:" in err
    best = min((short, long), key=lambda row: row["decode"])["label"]
    assert f"best of sps: modelled {best}\n" in err


def test_a_sweep_compares_a_modelled_value_with_its_measurement(run, run_folder, saved_costs):
    records = [json.loads(line) for line in (run_folder / "records.jsonl").read_text().splitlines()]
    for record in records:
        if record["label"] == "sps":
            record["label"], record["void"] = "sps length=5", False
    (run_folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    manifest = (run_folder / "manifest.json").read_text()
    manifest = manifest.replace('"label": "sps"', '"label": "sps length=5"')
    (run_folder / "manifest.json").write_text(manifest)
    options = ("--sweep", "sps.length=5:6:1", "--row", "sps length=5", "--json")
    code, out, err = run("predict", str(run_folder), *options)
    assert code == 0, err
    (found,) = map(json.loads, out.splitlines())
    same, other = found["modelled"]
    assert same["error"] == same["decode"] / same["measured"] - 1
    assert (other["measured"], other["error"]) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sweep", "sps.length=1:5:1", "--row", "pld"), "no method 'pld' of sps; it has"),
        (("--sweep", "eagle2.depth=1,2"), "no method 'eagle2' of eagle2"),
        (("--sweep", "sps.length=0,1"), "sps.length must be at least 1, got 0"),
        (("--sweep", "hf:assisted.length=1,2"), "it is a method of another program"),
        (
            ("--sweep", "sps.length=1", "--load", "poisson:1"),
            "--sweep cannot be combined with --load",
        ),
        (("--sweep", "sps.length=1", "--batch", "4"), "--batch cannot be combined with --sweep"),
        (("--row", "sps"), "--row selects the method whose acceptance --sweep uses"),
    ],
)
def test_a_sweep_that_cannot_be_simulated_is_an_error(
    run, run_folder, saved_costs, options, message
):
    code, out, err = run("predict", str(run_folder), *options)
    assert code == 2 and not out
    assert message in " ".join(err.replace("│", " ").split())

"""Recommendations for other batch sizes, machines and engines."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench_cli.config.run import MethodChoice, RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import Costs
from specbench_cli.predict.recommend import advice, speedup_model
from specbench_cli.predict.recommend.halving import Trial
from specbench_cli.store.run_dir import RunDir

REFERENCE = Path(__file__).parents[3] / "results" / "reference" / "default-2cores"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    monkeypatch.setattr(speedup_model, "SIMULATED", 3)
    shutil.copytree(REFERENCE, tmp_path / "made")
    return RunDir.open(tmp_path / "made")


def costs(run, path, token_ns, **changes):
    """Save costs of the run's models and return the file.

    A target forward takes 1 ms, a draft forward a tenth of that. Each token adds `token_ns`.
    """
    config = run.manifest["config"]["effective"]

    def curve(forward):
        points = [
            {"n_tokens": n, "context": c, "ns": forward + token_ns * n, "spread": 0.0, "samples": 9}
            for n in (1, 64)
            for c in (0, 16, 1024)
        ]
        return {
            "forwards": [point for point in points if point["context"]],
            "prefills": [point for point in points if not point["context"]],
        }

    values = {
        "schema": 1,
        "version": "0.1.0",
        "created_utc": "2026-11-21T12:00:00+00:00",
        "machine": run.manifest["machine"],
        "models": run.manifest["models"],
        "setup": {name: config[name] for name in ("device", "dtype", "threads")},
        "seed": 0,
        "quietness": {"rounds": 9, "void": 0, "other_cpu": 0.01, "noisy": False},
        "curves": {"target": curve(1e6), "draft": curve(1e5)},
        "host": {"step": 0.0, "draft": 0.0, "node": 0.0},
    }
    Costs.model_validate(values | changes).save(path)
    return path


def test_higher_costs_per_token_reduce_the_predicted_speedup(run, tmp_path):
    light = costs(run, tmp_path / "light.json", 1e3)
    heavy = costs(run, tmp_path / "heavy.json", 1e6)
    found = speedup_model.model_speedups(run, ["sps"], [], None, [light, heavy])
    here, there = (each["speedup"] for each in found.elsewhere)
    assert here > 1.5 > there
    assert not found.batches and not found.missing


def test_each_batch_size_is_simulated_and_unprobed_ones_are_named(run, tmp_path):
    file = costs(run, tmp_path / "here.json", 2e5)
    found = speedup_model.model_speedups(run, ["sps", "pld"], [2, 4], file, [])
    assert {(each["batch"], each["label"]) for each in found.batches} == {
        (2, "sps"), (2, "pld"), (4, "sps"), (4, "pld")
    }  # fmt: skip
    worth = {each["batch"]: each["speedup"] for each in found.batches if each["label"] == "sps"}
    assert worth[2] > worth[4]
    assert "specbench predict --probe --batch 4" in found.missing["what sequences add"]


def test_missing_costs_name_the_probe_command(run):
    found = speedup_model.model_speedups(run, ["sps"], [2], None, [])
    assert not found.batches
    assert "specbench predict --probe" in found.missing["other batch sizes"]


def test_costs_of_other_models_are_refused(run, tmp_path):
    models = {role: {**facts, "sha256": "0" * 64} for role, facts in run.manifest["models"].items()}
    file = costs(run, tmp_path / "other.json", 1e3, models=models)
    with pytest.raises(UsageError, match="measured for other models"):
        speedup_model.model_speedups(run, ["sps"], [], None, [file])


def select_best(*rows, **more):
    config = RunConfig.model_validate({"methods": ["vanilla", *rows], **more})
    return SimpleNamespace(
        config=config, choice=lambda label: next(r for r in config.methods if r.label == label)
    )


def outcome(**ratios):
    trials = {name: Trial(name, 3, ratio) for name, ratio in ratios.items()}
    return SimpleNamespace(best=SimpleNamespace(trials=trials))


def built(label):
    return {"label": label, "method": label, "set": {}, "lossless": True}


def test_an_engine_without_the_method_gets_its_best_supported_candidate():
    lines = advice._lines(
        select_best("staged", "sps", "pld"), built("staged"), outcome(staged=2.0, sps=1.5, pld=1.4)
    )
    assert {line["engine"]: (line["of"], line["confirmed"]) for line in lines} == dict.fromkeys(
        (line["engine"] for line in lines), ("sps", False)
    )
    assert len(lines) == 6


def test_slow_or_broken_candidates_do_not_replace_an_unsupported_method():
    trials = outcome(staged=2.0, sps=0.9, pld=1.4)
    trials.best.trials["pld"].out = "its output is not vanilla's"
    lines = advice._lines(select_best("staged", "sps", "pld"), built("staged"), trials)
    assert all(line["text"] == "" and line["lacks"] == "does not support staged" for line in lines)


def test_launch_commands_name_the_models_as_the_engine_expects():
    lines = advice._lines(select_best("sps"), built("sps"), outcome(sps=1.5))
    vllm = next(line for line in lines if line["engine"] == "vLLM")
    assert vllm["confirmed"] and "embedded-1m" in vllm["text"]
    assert json.loads(vllm["text"].partition("'")[2].rstrip("'"))["num_speculative_tokens"] == 5


def test_the_command_contains_the_selected_settings_and_models():
    row = MethodChoice(name="sps", label="sps length=3", params={"length": 3})
    config = select_best(row.model_dump(), target="embedded-7m", draft="embedded-1m")
    found = {"method": "sps", "set": {"length": 3}}
    assert advice._command(config, found) == (
        "specbench run -m sps --set sps.length=3 --target embedded-7m --draft embedded-1m"
    )

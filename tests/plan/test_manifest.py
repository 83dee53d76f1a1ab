"""Tests of the entries of methods in a manifest, which are written before measuring."""

import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.measure.manifest import method_entries
from specbench_cli.measure.run import resume_run
from specbench_cli.plan.plan import make_plan
from specbench_cli.store.run_dir import RunDir


@pytest.mark.parametrize(
    ("method", "params", "timing_free", "uses"),
    [
        ("vanilla", {}, True, []),
        ("pld", {}, True, []),
        ("sps", {}, True, ["draft"]),
        ("hf:assisted", {}, True, ["draft"]),
        ("eagle3", {}, True, ["eagle3"]),
        ("rest", {}, True, ["datastore"]),
        ("specdec++", {}, True, ["draft", "acceptance"]),
    ],
)
def test_method_entry_has_models_and_timing_dependence(method, params, timing_free, uses):
    config = RunConfig.model_validate({"methods": [{"name": method, "params": params}]})
    (row,) = (row for row in method_entries(make_plan(config)) if row["label"] == method)
    assert (row["timing_free"], row["uses"]) == (timing_free, uses)


@pytest.mark.parametrize(
    ("method", "params", "scope"),
    [
        ("pld", {}, "prompt"),
        ("rest", {}, "prompt"),
        ("suffix", {}, "run"),
        ("suffix", {"scope": "prompt"}, "prompt"),
        ("token-recycling", {}, "run"),
    ],
)
def test_method_entry_has_its_state_scope(method, params, scope):
    config = RunConfig.model_validate({"methods": [{"name": method, "params": params}]})
    (row,) = (row for row in method_entries(make_plan(config)) if row["label"].startswith(method))
    assert row["state_scope"] == scope


def test_run_spoiled_by_a_plugin_is_not_resumed(tmp_path):
    RunDir.create(tmp_path / "run", {"spoiled": "bad"}).close("interrupted")
    with pytest.raises(UsageError, match="bad changed its files"):
        resume_run(tmp_path / "run", view=None, force=True)

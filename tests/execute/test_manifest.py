"""What a manifest says of rows before anything is measured."""

import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.execute.manifest import rows
from specbench_cli.execute.plan import make_plan


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
def test_row_says_what_it_drafts_with_and_whether_timing_has_a_part(
    method, params, timing_free, uses
):
    config = RunConfig.model_validate({"methods": [{"name": method, "params": params}]})
    (row,) = (row for row in rows(make_plan(config)) if row["label"] == method)
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
def test_row_says_how_long_it_remembers(method, params, scope):
    config = RunConfig.model_validate({"methods": [{"name": method, "params": params}]})
    (row,) = (row for row in rows(make_plan(config)) if row["label"].startswith(method))
    assert row["state_scope"] == scope

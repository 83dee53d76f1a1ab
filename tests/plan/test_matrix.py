"""Tests of expanding several targets and draft models into single runs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.plan.matrix import expand_matrix, is_matrix


def config(**more):
    rows = [{"name": name, "label": name} for name in ("vanilla", "sps", "pld")]
    return RunConfig(**{"methods": rows, **more})


def rows(run):
    return [row.label for row in run.methods]


def test_each_target_has_its_own_run_with_all_methods():
    matrix = config(targets=["embedded-7m", "org/name"], draft="embedded-1m")
    found = expand_matrix(matrix)
    assert is_matrix(matrix) and not is_matrix(found["name"])
    assert [(name, run.target, run.draft) for name, run in found.items()] == [
        ("embedded-7m", "embedded-7m", "embedded-1m"),
        ("name", "org/name", "embedded-1m"),
    ]
    assert all(rows(run) == ["vanilla", "sps", "pld"] for run in found.values())


def test_a_second_draft_has_a_run_of_only_vanilla_and_methods_with_a_draft():
    found = expand_matrix(config(target="a", drafts=["x", "y"]))
    assert {name: rows(run) for name, run in found.items()} == {
        "a+x": ["vanilla", "sps", "pld"],
        "a+y": ["vanilla", "sps"],
    }
    assert [run.draft for run in found.values()] == ["x", "y"]


def test_models_with_equal_names_have_different_folders():
    assert list(expand_matrix(config(targets=["one/m", "two/m"]))) == ["m", "m-2"]


def test_an_expanded_config_survives_json():
    (run,) = expand_matrix(config(targets=["a"])).values()
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


def test_drafts_without_a_method_that_uses_them_are_rejected():
    with pytest.raises(UsageError, match="--drafts x needs a method with a draft model"):
        expand_matrix(config(methods=[{"name": "pld", "label": "pld"}], drafts=["x"]))


def test_too_many_pairs_are_rejected():
    names = [str(n) for n in range(6)]
    with pytest.raises(UsageError, match="6 targets and 6 drafts are 36 runs"):
        expand_matrix(config(targets=names, drafts=names))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "a", "targets": ["b"]}, "target and targets cannot be combined"),
        ({"draft": "a", "drafts": ["b"]}, "draft and drafts cannot be combined"),
        ({"targets": ["b", "b"]}, "has b twice"),
    ],
)
def test_contradictory_models_are_rejected(given, message):
    with pytest.raises(ValidationError, match=message):
        config(**given)

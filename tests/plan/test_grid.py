"""Tests of the parameter candidates that tuning tries."""

from typing import Literal

import pytest

from specbench_cli import registry
from specbench_cli.api import ArtifactSpec, Field, Method, MethodParams
from specbench_cli.errors import UsageError
from specbench_cli.plan import grid
from specbench_cli.plan.method_run import MethodRun


def method_run(name, **passed):
    return MethodRun(name, name, passed)


def values_of(found, name):
    return [getattr(each.method.params, name) for each in found]


def test_candidates_are_the_default_and_then_single_changes_by_distance():
    found = grid.list_candidates(method_run("pld"), 8, "greedy")
    assert [each.label for each in found[:4]] == [
        "pld", "pld ngram=2", "pld length=7", "pld rule=transformers"
    ]  # fmt: skip
    assert len(found) == len({each.label for each in found}) == 8
    for each in found[1:]:
        defaults = found[0].method.params.model_dump()
        assert sum(each.method.params.model_dump()[k] != v for k, v in defaults.items()) == 1


def test_numbers_are_varied_in_both_directions_within_their_bounds():
    lengths = values_of(grid.list_candidates(method_run("hf:assisted"), 8, "greedy"), "length")
    assert lengths == [5, 4, 7, 2, 10, 14, 1, 20]


def test_number_of_candidates_is_at_most_the_budget():
    assert len(grid.list_candidates(method_run("sps"), 3, "greedy")) == 3
    assert len(grid.list_candidates(method_run("vanilla"), 8, "greedy")) == 1


def test_parameters_set_by_the_user_are_not_varied():
    found = grid.list_candidates(method_run("pld", ngram=5), 8, "greedy")
    assert set(values_of(found, "ngram")) == {5}
    assert len(found) == 8


def test_candidates_need_no_vanilla_output_and_no_other_head():
    lengths = values_of(grid.list_candidates(method_run("sps"), 64, "greedy"), "length")
    assert {"heuristic", "confidence", "entropy"} <= set(lengths)
    assert not {"oracle", "acceptance-head"} & set(lengths)


def test_swept_values_are_the_candidates():
    found = grid.list_candidates(method_run("sps"), 4, "greedy", {"length": [1, 2, "heuristic"]})
    assert [each.label for each in found] == [
        "sps length=1",
        "sps length=2",
        "sps length=heuristic",
    ]
    assert found[0].user_params == {"length": 1}


def test_more_swept_values_than_the_budget_are_rejected():
    with pytest.raises(UsageError, match="the sweep of sps has 6 combinations, but --tune 4 tries"):
        grid.list_candidates(method_run("sps"), 4, "greedy", {"length": [1, 2, 3, 4, 5, 6]})


def test_swept_value_out_of_bounds_is_rejected():
    with pytest.raises(UsageError, match="must be at least 1"):
        grid.list_candidates(method_run("pld"), 4, "greedy", {"length": [0]})


class Params(MethodParams):
    """Parameters with one field of each type."""

    chance: float = Field(0.3, gt=0, le=1, description="")
    often: bool = Field(False, description="")
    start: int = Field(0, ge=0, le=2, description="")
    mode: Literal["exact", "loose"] = Field("exact", description="")
    path: str = Field("auto", description="")


class Several(Method):
    """A method that is lossy in one mode and needs an artifact with another parameter."""

    name = "several"
    Params = Params

    def guarantee(self, sampling):
        return "bounded" if self.params.mode == "loose" else "exact_tokens"

    def artifacts(self):
        return (ArtifactSpec(object),) if self.params.often else ()


@pytest.fixture
def many_params(monkeypatch):
    monkeypatch.setattr(registry, "load", lambda name: Several)
    return MethodRun.from_method("several", "several", Several(), {})


def test_tuning_keeps_the_guarantee_and_the_artifacts(many_params):
    params = [each.method.params for each in grid.list_candidates(many_params, 6, "greedy")]
    assert {p.mode for p in params} == {"exact"}
    assert {p.often for p in params} == {False}
    assert {p.path for p in params} == {"auto"}
    assert [p.chance for p in params] == [0.3, 0.21, 0.3, 0.42, 0.3, 0.15]
    assert [p.start for p in params] == [0, 0, 1, 0, 2, 0]


def test_method_can_restrict_the_tunable_parameters(many_params, monkeypatch):
    monkeypatch.setattr(Several, "tunable", frozenset({"start"}))
    assert values_of(grid.list_candidates(many_params, 6, "greedy"), "start") == [0, 1, 2]


@pytest.mark.parametrize(
    ("passed", "tuned", "source"),
    [
        ({}, None, "default"),
        ({"length": 10}, None, "default"),
        ({"length": 5}, None, "set"),
        ({"length": 7}, None, "paper"),
        ({"length": 7}, 8, "tuned(8)"),
    ],
)
def test_method_run_has_the_source_of_its_parameters(monkeypatch, passed, tuned, source):
    monkeypatch.setattr(type(registry.declare("pld", {})), "paper_params", {"length": 7})
    found = MethodRun("pld", "pld", passed, tuned)
    assert found.source == source


def test_paper_params_of_built_in_methods_are_valid():
    for name in registry.built_in_methods():
        method = registry.load(name)
        if method.paper_params:
            method.Params.model_validate(method.paper_params)

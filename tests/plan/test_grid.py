"""Which parameters a row is tried with."""

from typing import Literal

import pytest

from specbench_cli import registry
from specbench_cli.api import ArtifactSpec, Field, Method, MethodParams
from specbench_cli.errors import UsageError
from specbench_cli.plan import grid
from specbench_cli.plan.method_run import MethodRun


def method_run(name, **passed):
    return MethodRun(name, name, passed)


def tried(found, name):
    return [getattr(each.method.params, name) for each in found]


def test_row_as_it_is_comes_first_then_one_parameter_changes_nearest_first():
    found = grid.list_candidates(method_run("pld"), 8, "greedy")
    assert [each.label for each in found[:4]] == [
        "pld", "pld ngram=2", "pld length=7", "pld rule=transformers"
    ]  # fmt: skip
    assert len(found) == len({each.label for each in found}) == 8
    for each in found[1:]:
        defaults = found[0].method.params.model_dump()
        assert sum(each.method.params.model_dump()[k] != v for k, v in defaults.items()) == 1


def test_numbers_lie_within_their_bounds_on_both_sides():
    lengths = tried(grid.list_candidates(method_run("hf:assisted"), 8, "greedy"), "length")
    assert lengths == [5, 4, 7, 2, 10, 14, 1, 20]


def test_every_row_has_the_budget_or_all_that_there_is():
    assert len(grid.list_candidates(method_run("sps"), 3, "greedy")) == 3
    assert len(grid.list_candidates(method_run("vanilla"), 8, "greedy")) == 1


def test_what_the_user_set_stays():
    found = grid.list_candidates(method_run("pld", ngram=5), 8, "greedy")
    assert set(tried(found, "ngram")) == {5}
    assert len(found) == 8


def test_row_is_tried_with_nothing_that_reads_vanillas_output_or_needs_another_head():
    lengths = tried(grid.list_candidates(method_run("sps"), 64, "greedy"), "length")
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


def test_more_swept_values_than_the_budget_are_refused():
    with pytest.raises(UsageError, match="the sweep of sps has 6 combinations, but --tune 4 tries"):
        grid.list_candidates(method_run("sps"), 4, "greedy", {"length": [1, 2, 3, 4, 5, 6]})


def test_swept_value_out_of_bounds_is_refused():
    with pytest.raises(UsageError, match="must be at least 1"):
        grid.list_candidates(method_run("pld"), 4, "greedy", {"length": [0]})


class Params(MethodParams):
    """A parameter of each kind."""

    chance: float = Field(0.3, gt=0, le=1, description="")
    often: bool = Field(False, description="")
    start: int = Field(0, ge=0, le=2, description="")
    mode: Literal["exact", "loose"] = Field("exact", description="")
    path: str = Field("auto", description="")


class Several(Method):
    """Loses exactness in one mode, and needs something in another."""

    name = "several"
    Params = Params

    def guarantee(self, sampling):
        return "bounded" if self.params.mode == "loose" else "exact_tokens"

    def artifacts(self):
        return (ArtifactSpec(object),) if self.params.often else ()


@pytest.fixture
def several(monkeypatch):
    monkeypatch.setattr(registry, "load", lambda name: Several)
    return MethodRun.from_method("several", "several", Several(), {})


def test_tuning_never_gives_up_what_the_row_promises(several):
    params = [each.method.params for each in grid.list_candidates(several, 6, "greedy")]
    assert {p.mode for p in params} == {"exact"}
    assert {p.often for p in params} == {False}
    assert {p.path for p in params} == {"auto"}
    assert [p.chance for p in params] == [0.3, 0.21, 0.3, 0.42, 0.3, 0.15]
    assert [p.start for p in params] == [0, 0, 1, 0, 2, 0]


def test_method_may_say_what_tuning_varies(several, monkeypatch):
    monkeypatch.setattr(Several, "tunable", frozenset({"start"}))
    assert tried(grid.list_candidates(several, 6, "greedy"), "start") == [0, 1, 2]


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
def test_row_says_where_its_parameters_come_from(monkeypatch, passed, tuned, source):
    monkeypatch.setattr(type(registry.declare("pld", {})), "paper_params", {"length": 7})
    found = MethodRun("pld", "pld", passed, tuned)
    assert found.source == source


def test_papers_parameters_are_parameters():
    for name in registry.built_in_methods():
        method = registry.load(name)
        if method.paper_params:
            method.Params.model_validate(method.paper_params)

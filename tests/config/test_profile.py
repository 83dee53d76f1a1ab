"""The shipped profiles, compared with the registry and the shipped models."""

import pytest
import yaml

from specbench_cli import registry
from specbench_cli.config.load import load
from specbench_cli.config.profile import FOLDER, PROFILES
from specbench_cli.config.sources import from_command_line
from specbench_cli.models import resolve
from specbench_cli.models.aliases import HERE, aliases
from specbench_cli.plan.plan import make_plan


def load_profile(name, tmp_path, **flags):
    flags = {"profile": name, **flags}
    return load(from_command_line(flags), None, methods=registry, env={}, folder=tmp_path)[0]


def test_profiles_and_their_files_match():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(PROFILES)


def test_a_profile_excludes_only_lossless_methods():
    for name in PROFILES:
        settings = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        assert set(settings.get("without", [])) <= set(registry.lossless_methods())


NEEDS_ANOTHER_TARGET = {"space"}
"""Methods whose target is a fine-tuned one."""


def test_ci_measures_every_lossless_method_on_a_prompt_of_every_family(tmp_path):
    """A new method without a shipped head belongs in `without` of the profiles."""
    plan = make_plan(load_profile("ci", tmp_path))
    labels = [method_run.label for method_run in plan.method_runs]
    assert set(labels) == {*registry.lossless_methods(), "hf:vanilla"} - NEEDS_ANOTHER_TARGET
    assert {"vanilla", "sps", "eagle3", "pearl"} <= set(labels)
    assert len({question.family for question in plan.questions}) == len(plan.questions) == 6
    for method_run in plan.method_runs:
        assert {
            each.kind.kind for each in method_run.method.artifacts()
        } <= plan.target.shipped_heads
        assert method_run.method.timing_free, (
            f"{method_run.label}'s counters would depend on the machine"
        )
    assert all(model.embedded for model in plan.checkpoints.values())


def test_smoke_is_part_of_ci(tmp_path):
    smoke, ci = (make_plan(load_profile(name, tmp_path)) for name in ("smoke", "ci"))
    assert [method_run.label for method_run in smoke.method_runs] == [
        "vanilla",
        "sps",
        "pld",
        "hf:vanilla",
    ]
    assert smoke.max_tokens < ci.max_tokens / 4


def test_paper_runs_methods_with_the_parameters_of_their_papers(tmp_path):
    """Use shipped questions, since those of Spec-Bench are not shipped."""
    config = load_profile("paper", tmp_path)
    assert (config.tasks, config.limit, config.repeats) == (["spec_bench"], None, 3)
    plan = make_plan(load_profile("paper", tmp_path, tasks=["mini"]))
    sources = {
        method_run.label: method_run.source
        for method_run in plan.method_runs
        if type(method_run.method).paper_params
    }
    assert sources
    assert {label for label, source in sources.items() if source != "paper"} == set()
    expected = {"vanilla again", "hf:vanilla", "hf:assisted", *registry.lossless_methods()}
    assert expected - NEEDS_ANOTHER_TARGET <= {method_run.label for method_run in plan.method_runs}
    budget = sum(1024 * len(question.turns) for question in plan.questions)
    assert plan.max_tokens == budget * len(plan.method_runs) * 3


def test_laptop_needs_no_draft_and_only_shipped_heads(tmp_path):
    config = load_profile("laptop", tmp_path)
    assert (config.tasks, config.limit, config.max_new_tokens) == (["spec_bench"], 48, 64)
    assert config.target == "smollm2-135m"
    built = [registry.build(row.name, row.params) for row in config.methods]
    assert not any("draft" in method.requirements for method in built)
    heads = aliases()["smollm2-135m"].heads
    required = {wanted.kind.kind for method in built for wanted in method.artifacts()}
    assert required == {"eagle3"}
    assert all((HERE / heads[kind] / "model.safetensors").is_file() for kind in required)


def test_the_help_names_the_head_that_laptop_runs(tmp_path):
    named = {row.name for row in load_profile("laptop", tmp_path).methods}
    heads = {name for name in named if registry.build(name, {}).artifacts()}
    assert heads == {"eagle3"}
    assert all(head in PROFILES["laptop"] for head in heads)
    assert "no head" not in PROFILES["laptop"]


@pytest.mark.parametrize("name", sorted({*PROFILES} - {"laptop"}))
def test_other_profiles_use_the_shipped_models(name, tmp_path):
    assert resolve(load_profile(name, tmp_path).target).embedded

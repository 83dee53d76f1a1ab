"""A run whose methods choose by what forwards cost: once measured, the same until it is done."""

import pytest

from specbench_cli.execute import step_costs as module
from specbench_cli.measure.step_costs import StepCosts

pytestmark = pytest.mark.usefixtures("small_pair")

AUTO = {
    "name": "sps-tree",
    "params": {"shape": "dynamic", "nodes": "auto", "width": 3, "depth": 3},
}


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """Quick probes that find forwards to cost what the test says, and are counted."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    made, asked = [], []

    def quick(workspace, windows, positions, *, most, sampling):
        made.append(sorted(workspace.decoders))
        asked.append((most, sampling.rule))
        line = {1: 1.0, 64: 1.0 + quick.rows}
        return StepCosts(
            source="test",
            context=256,
            target_ns=1e6,
            noisy=False,
            relative={"target": line, "draft": {1: 0.1}},
        )

    quick.rows, quick.made, quick.asked = 1.0, made, asked
    monkeypatch.setattr(module, "quick", quick)
    return quick


def nodes(outcome):
    return {r.key: r.steps.nodes for r in outcome.by_label("sps-tree")}


def test_costs_are_measured_once_and_kept_in_the_manifest(specbench, probes):
    flat = specbench(AUTO, limit=1)
    assert probes.made == [["draft", "target"]]
    assert flat.manifest["step_costs"]["relative"]["target"] == {"1": 1.0, "64": 2.0}
    assert flat.by_label("sps-tree")[0].params.effective["nodes"] == "auto"
    assert {r.verdict.kind for r in flat.by_label("sps-tree")} == {"identical"}
    probes.rows = 6300.0
    steep = specbench(AUTO, limit=1)
    assert sum(map(sum, nodes(steep).values())) < sum(map(sum, nodes(flat).values()))


def test_resumed_run_goes_by_the_costs_that_it_began_with(specbench, probes):
    whole = specbench(AUTO, limit=2)
    with pytest.raises(KeyboardInterrupt):
        specbench(AUTO, limit=2, log=specbench.log(interrupt_after=2))
    probes.rows = 6300.0
    assert nodes(specbench(resume=specbench.path(2))) == nodes(whole)
    assert len(probes.made) == 2


def test_run_that_chooses_nothing_by_costs_measures_none(specbench, probes):
    assert specbench("sps", limit=1).manifest.get("step_costs") is None
    assert probes.made == []


def test_steps_of_the_runs_batch_are_timed_where_a_method_goes_by_load(specbench, probes):
    by_load = {"name": "eqspec", "params": {"length": "synergy", "max": 3}}
    specbench(by_load, limit=2, batch=2)
    specbench(AUTO, limit=1)
    assert probes.asked == [(2, "greedy"), (0, "greedy")]

"""Tests of runs that measure step costs, and of cost probes between the prompts of a run."""

import json

import pytest
from pydantic import ValidationError

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.measure import method_costs as module
from specbench_cli.measure import probe
from specbench_cli.measure.probe_rounds import ProbeGrid
from specbench_cli.measure.quiet import NoiseMeter
from specbench_cli.measure.step_costs import StepCosts
from specbench_cli.predict.prediction import predict
from specbench_cli.predict.run_costs import load_costs
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

AUTO = {
    "name": "sps-tree",
    "params": {"shape": "dynamic", "nodes": "auto", "width": 3, "depth": 3},
}


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """A stub of `measure_step_costs` with costs that the test sets. It stores its calls."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    measured_models, batch_settings = [], []

    def measure_step_costs(workspace, windows, positions, *, most, sampling):
        measured_models.append(sorted(workspace.decoders))
        batch_settings.append((most, sampling.rule))
        line = {1: 1.0, 64: 1.0 + measure_step_costs.rows}
        return StepCosts(
            source="test",
            context=256,
            target_ns=1e6,
            noisy=False,
            relative={"target": line, "draft": {1: 0.1}},
        )

    (
        measure_step_costs.rows,
        measure_step_costs.measured_models,
        measure_step_costs.batch_settings,
    ) = 1.0, measured_models, batch_settings
    monkeypatch.setattr(module, "measure_step_costs", measure_step_costs)
    return measure_step_costs


def nodes(outcome):
    return {r.key: r.steps.nodes for r in outcome.by_label("sps-tree")}


def test_costs_are_measured_once_and_stored_in_the_manifest(specbench, probes):
    flat = specbench(AUTO, limit=1)
    assert probes.measured_models == [["draft", "target"]]
    assert flat.manifest["step_costs"]["relative"]["target"] == {"1": 1.0, "64": 2.0}
    assert flat.by_label("sps-tree")[0].params.effective["nodes"] == "auto"
    assert {r.verdict.kind for r in flat.by_label("sps-tree")} == {"identical"}
    probes.rows = 6300.0
    steep = specbench(AUTO, limit=1)
    assert sum(map(sum, nodes(steep).values())) < sum(map(sum, nodes(flat).values()))


def test_resumed_run_uses_the_stored_costs(specbench, probes):
    whole = specbench(AUTO, limit=2)
    with pytest.raises(KeyboardInterrupt):
        specbench(AUTO, limit=2, log=specbench.log(interrupt_after=2))
    probes.rows = 6300.0
    assert nodes(specbench(resume=specbench.path(2))) == nodes(whole)
    assert len(probes.measured_models) == 2


def test_run_without_cost_dependent_methods_measures_no_costs(specbench, probes):
    assert specbench("sps", limit=1).manifest.get("step_costs") is None
    assert probes.measured_models == []


def test_batched_steps_are_measured_if_a_method_depends_on_load(specbench, probes):
    by_load = {"name": "eqspec", "params": {"length": "synergy", "max": 3}}
    specbench(by_load, limit=2, batch=2)
    specbench(AUTO, limit=1)
    assert probes.batch_settings == [(2, "greedy"), (0, "greedy")]


@pytest.fixture
def rounds(monkeypatch, tmp_path):
    """Probe rounds of a few points. The value is the list of rounds and prompts, in order."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    grid = ProbeGrid(contexts=(16, 64), chains=(1, 4), trees=(4,), levels=(2,))
    monkeypatch.setitem(probe.Probe.__init__.__kwdefaults__, "grid", grid)
    monkeypatch.setattr(module, "MAX_PROMPTS", 1)
    events, measure_round = [], module.InterleavedProbe.measure_round
    monkeypatch.setattr(
        module.InterleavedProbe,
        "measure_round",
        lambda between: (events.append("round"), measure_round(between)),
    )
    return events


def test_probe_rounds_are_between_the_prompts_and_predict_the_run(specbench, rounds):
    log = specbench.log()
    log.prompt = lambda progress: rounds.append(progress.prompt)
    outcome = specbench("sps", limit=3, probe=2, threads=1, log=log)
    assert [each for each in rounds if each != 0] == [1, "round", 2, "round", 3]
    run = RunDir.open(outcome.path)
    (costs,) = load_costs(run)
    assert (costs.quietness.rounds, costs.setup.threads) == (2, 1)
    assert {"target", "draft"} == costs.curves.keys()
    assert {"plain steps", "sps length=2", "sps length=6"} <= {
        point.name for point in costs.host.points
    }
    rows = {row.label: row for row in predict(run.records(), run.manifest, costs, None).rows}
    assert rows["sps"].predicted > 0
    assert {r.verdict.kind for r in outcome.by_label("sps")} == {"identical"}


def test_each_pass_has_its_own_probe(specbench, rounds, monkeypatch):
    from specbench_cli.measure import run as execute

    def run_here(run_dir, number, what, flags, *, resumable):
        plan, again = execute.resume_run(run_dir.path, specbench.log(), part=True)
        execute.measure_run(plan, again, specbench.log(), only_pass=number)

    monkeypatch.setattr(execute, "run_repeat", run_here)
    outcome = specbench("pld", limit=1, probe=1, repeats=2, threads=1)
    assert len(load_costs(RunDir.open(outcome.path))) == 2


def test_batches_are_probed_if_the_run_has_batches(specbench, rounds):
    outcome = specbench("pld", limit=2, probe=1, batch=2, threads=1)
    assert load_costs(RunDir.open(outcome.path))[0].batch.most == 2


def test_noisy_probe_rounds_store_no_costs_and_leave_a_note(specbench, rounds, monkeypatch):
    monkeypatch.setattr(NoiseMeter, "is_full", lambda self: True)
    monkeypatch.setattr(NoiseMeter, "close", lambda self: 0.5)
    outcome = specbench("pld", limit=1, probe=1, allow_noise=False)
    assert "probe: other programs used too much CPU" in outcome.log.notes[-1]
    assert not list(outcome.path.glob("costs-*.json"))


def test_damaged_costs_of_a_run_are_an_error(specbench, rounds):
    outcome = specbench("pld", limit=1, probe=1, threads=1)
    file = outcome.path / "costs-1.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"curves": 1}))
    with pytest.raises(UsageError, match=r"costs-1\.json is damaged"):
        load_costs(RunDir.open(outcome.path))
    file.write_text("")
    with pytest.raises(UsageError, match="is not a cost file"):
        load_costs(RunDir.open(outcome.path))


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"executor": "ray"}, "omit probe, which measures one machine"),
        ({"memory_budget": "2GB"}, "does not include the KV states of a probe"),
        ({"probe": 0}, "greater than or equal to 1"),
    ],
)
def test_probe_is_rejected_with_incompatible_options(beside, message):
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"methods": [{"name": "pld"}], "probe": 2, **beside})

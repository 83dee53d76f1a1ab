"""Tests of scheduling prompts on cluster workers. The workers are simulated."""

from __future__ import annotations

import socket
import sys
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import EnvironmentFault, UsageError, WorkerLost
from specbench_cli.measure import run as execute
from specbench_cli.measure.cluster import scheduling
from specbench_cli.measure.cluster.ray_workers import (
    _FilteredStdout,
    _missing_module,
    connect,
    list_devices,
)
from specbench_cli.measure.cluster.scheduling import Scheduler
from specbench_cli.measure.cluster.worker import (
    AssignmentResult,
    LoadedModels,
    WorkerInfo,
    WorkerResult,
)
from specbench_cli.measure.manifest import build_manifest, machine_facts
from specbench_cli.measure.run_checks import check_weights
from specbench_cli.plan.plan import make_plan
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import Ns, Params, Record

pytestmark = pytest.mark.usefixtures("small_pair")

WORDS = {"torch": "2.6.0", "the weights of embedded-7m": "ab"}
MODEL = {"label": "embedded-7m", "sha256": "ab", "vocab_size": 4096, "eos": [0]}


def failed(**facts):
    """Return the record of a failed output."""
    missing = dict.fromkeys(
        "output_ids origin n_tokens steps target_forwards draft_forwards forwards peak_bytes"
        " other_cpu verdict score".split()
    )
    method_facts = {
        "peer": False,
        "params": Params(),
        "sampling": "greedy",
        "guarantee": "exact_tokens",
    }
    outcome = {"seed": 0, "finish": "error", "error": "none", "ns": Ns(), "void": False}
    return Record(**missing, **method_facts, **outcome, **facts)


class FakeWorkers:
    """Simulated workers that answer at once.

    `fate(name, prompt_ids)` returns the answer to an assignment, or None to measure it. `infos`
    has the information that a worker sends when it starts, by name.
    """

    def __init__(self, plan, workers=2, fate=None, infos=None):
        self.plan = plan
        self.size = workers
        self.fate = fate or (lambda name, names: None)
        self.infos = infos or {}
        self.requests = deque()
        self.assigned, self.dismissed, self.costs = [], [], []

    def start(self, names, plan, folder):
        return {name: f"node {name}" for name in islice(names, self.size)}

    def send(self, name, what, *args):
        assert name not in [each for each, *_ in self.requests], (
            "a worker gets one request at a time"
        )
        self.requests.append((name, what, args))

    def receive(self):
        name, what, args = self.requests.popleft()
        return name, getattr(self, what)(name, *args)

    def end(self, name):
        self.dismissed.append(name)

    def plan_run(self, name):
        info = WorkerInfo(WORDS, {"machine": "m1"}, {"id": "m1", "hardware": {"cpu": "X"}})
        return self.infos.get(name, info)

    def load(self, name, costs):
        self.costs.append(costs)
        resources = {"target_ns": 1.0, "relative": {}, "context": 8, "noisy": False}
        return LoadedModels(
            {"target": MODEL}, {}, {"threads": 1, "device": "cpu"}, costs or resources
        )

    def measure(self, name, number, names, known):
        self.assigned.append((name, *names))
        if (fate := self.fate(name, names)) is not None:
            return fate
        questions = [each for each in self.plan.questions if each.prompt_id in names]
        facts = {
            question.prompt_id: {
                key: getattr(question, key)
                for key in ("prompt_id", "cluster", "task", "family", "category")
            }
            for question in questions
        }
        records = [
            failed(label=method_run.label, method=method_run.name, turn=turn, pass_=number, **own)
            for own, question in zip(facts.values(), questions, strict=True)
            for turn in range(1, len(question.turns) + 1)
            for method_run in self.plan.method_runs
        ]
        prompts = [
            Prompt(**facts[q.prompt_id], turn=turn, text="?", ids=[1])
            for q in questions
            for turn in range(1, len(q.turns) + 1)
            if (q.prompt_id, turn) not in known.prompts
        ]
        return AssignmentResult(records, prompts, [], {}, None, judged=False)

    def check_leaks(self, name):
        return WorkerResult({}, None, {"weight_bytes": 1, "state_bytes": 2, "again": {}})

    def find_near_ties(self, name, known):
        assert len({key[:2] for key in known.done}) == self.plan.n_prompts
        return {"outputs": 1, "positions": 1, "ties": 0, "expected": 0, "chances": []}

    def close(self, name):
        return None


@pytest.fixture
def plan():
    rows = [{"name": "vanilla"}, {"name": "pld"}]
    return make_plan(RunConfig(methods=rows, executor="ray", limit=6, category=["qa"]))


@pytest.fixture
def schedule(plan, tmp_path, monkeypatch, log):
    """Return a function that schedules the plan on simulated workers."""
    monkeypatch.setattr(scheduling, "shared_facts", lambda plan: WORDS)
    path = tmp_path / "run"
    view = log()

    def run(*, resume=False, force=False, **worker_options):
        run_dir = RunDir.open(path) if resume else RunDir.create(path, build_manifest(plan, {}))
        workers = FakeWorkers(plan, **worker_options)
        found = SimpleNamespace(workers=workers, run_dir=run_dir, view=view, fault=None)
        try:
            check = partial(check_weights, run_dir, force=force)
            Scheduler(plan, run_dir, view, workers, 1, check=check, force=force).run()
        except Exception as fault:
            found.fault = fault
        return found

    return run


def workers_of(run_dir):
    found = {}
    for record in run_dir.records():
        found.setdefault(record.prompt_id, set()).add(record.worker)
    return found


def test_every_question_is_measured_by_one_worker_for_all_methods(plan, schedule):
    done = schedule()
    assert done.fault is None
    assert len(list(done.run_dir.records())) == plan.n_outputs
    found = workers_of(done.run_dir)
    assert len(found) == 6 and all(len(workers) == 1 for workers in found.values())
    assert {name for name, *_ in done.workers.assigned} == {"1", "2"}
    assert done.run_dir.manifest["workers"] == {"1": {"device": "cpu"}, "2": {"device": "cpu"}}
    assert done.run_dir.manifest["machine"]["id"] == "m1"


def test_all_workers_use_the_step_costs_of_the_first_worker(schedule):
    first, second = schedule().workers.costs
    assert first is None and second["target_ns"] == 1.0


def test_prompts_of_a_lost_worker_are_measured_once_by_another(plan, schedule):
    losses = iter([WorkerLost("node down")])
    done = schedule(fate=lambda name, names: next(losses, None) if name == "2" else None)
    assert done.fault is None
    assert len({record.key for record in done.run_dir.records()}) == plan.n_outputs
    (reassigned,) = {
        prompt_id
        for worker, *prompt_ids in map(tuple, done.workers.assigned)
        if worker == "2"
        for prompt_id in prompt_ids
    }
    assert [name for name, *names in done.workers.assigned if reassigned in names] == ["2", "1"]
    assert done.workers.dismissed == ["2"]
    assert done.run_dir.manifest["workers"]["2"] == {"device": "cpu", "lost": "node down"}
    assert any("worker 2 (node 2) was lost: node down" in note for note in done.view.notes)


def test_an_assignment_that_lost_a_draft_process_is_repeated(schedule):
    lost_result = AssignmentResult([], [], [], {}, "pearl's drafter died", judged=False)
    losses = iter([lost_result])
    done = schedule(fate=lambda name, names: next(losses, None))
    assert done.fault is None and done.workers.dismissed == ["1"]
    assert all(workers == {"2"} for workers in workers_of(done.run_dir).values())


def test_a_run_without_workers_can_be_resumed(plan, schedule):
    assigned = []

    def lose_after_three(name, names):
        assigned.append(names)
        return WorkerLost("gone") if len(assigned) > 3 else None

    first_run = schedule(fate=lose_after_three)
    assert (
        isinstance(first_run.fault, WorkerLost) and "no worker is left" in first_run.fault.message
    )
    assert "--resume" in first_run.fault.hint
    kept = [record.key for record in first_run.run_dir.records()]
    assert len(kept) == 3 * 2
    second = schedule(resume=True)
    assert second.fault is None and len(second.workers.assigned) == 3
    keys = [record.key for record in second.run_dir.records()]
    assert keys[: len(kept)] == kept and len(set(keys)) == len(keys) == plan.n_outputs
    assert list(second.run_dir.manifest["workers"]) == ["1", "2", "3", "4"]


def test_an_assignment_that_loses_three_workers_ends_the_run(schedule):
    assigned = []

    def lose_on_first(name, names):
        assigned.append(names)
        return WorkerLost("killed") if names == assigned[0] else None

    done = schedule(workers=5, fate=lose_on_first)
    assert isinstance(done.fault, WorkerLost)
    assert "3 workers were lost while they measured it, the last: killed" in done.fault.message


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (WORDS | {"torch": "2.5.1"}, r"torch \(2\.6\.0, there 2\.5\.1\)"),
        (WORDS | {"specbench": "0.0.9"}, r"specbench \(none, there 0\.0\.9\)"),
        (WORDS | {"the weights of embedded-7m": "cd"}, r"the weights of embedded-7m \(ab, there"),
    ],
)
def test_a_worker_that_differs_from_the_driver_is_rejected(schedule, own, message):
    other = WorkerInfo(own, {"machine": "m1"}, {})
    done = schedule(infos={"2": other})
    assert isinstance(done.fault, EnvironmentFault)
    assert done.fault.message.startswith("worker 2 (node 2) differs from the driver: ")
    assert "pip install specbench-cli==" in done.fault.hint
    assert not list(done.run_dir.records())
    with pytest.raises(EnvironmentFault, match=message):
        raise done.fault


def test_workers_on_different_machines_are_rejected_but_may_see_different_gpus(schedule):
    gpus = {str(n): {"machine": "m1", "variable CUDA_VISIBLE_DEVICES": str(n)} for n in (1, 2)}
    same = {name: WorkerInfo(WORDS, info, {"id": "m1"}) for name, info in gpus.items()}
    assert schedule(infos=same).fault is None
    other = {"4": WorkerInfo(WORDS, {"machine": "m2"}, {"id": "m2"})}
    fault = schedule(resume=True, infos=other).fault
    assert "differs from worker 3 (node 3): machine (m1, there m2)" in fault.message


def test_a_run_is_resumed_on_other_machines_only_with_force(schedule):
    schedule(workers=1)
    other_machine = {
        name: WorkerInfo(WORDS, {"machine": "m2"}, {"id": "m2"}) for name in ("2", "3", "4")
    }
    refused = schedule(resume=True, workers=1, infos=other_machine).fault
    assert isinstance(refused, UsageError) and "machine (m1, there m2)" in refused.message
    forced = schedule(resume=True, force=True, workers=1, infos=other_machine)
    assert forced.fault is None
    assert forced.run_dir.manifest["mixed"] == ["machine (m1, there m2)"]


def test_a_resumed_run_with_changed_weights_is_rejected(schedule, monkeypatch):
    schedule(workers=1)
    monkeypatch.setitem(MODEL, "sha256", "cd")
    fault = schedule(resume=True, workers=1).fault
    assert isinstance(fault, UsageError) and "the weights of target (ab then, cd" in fault.message


def test_a_worker_that_does_not_start_is_an_error_with_a_hint(schedule):
    loss = WorkerLost("ModuleNotFoundError: No module named 'specbench_cli'")
    fault = schedule(infos={"2": loss}).fault
    assert isinstance(fault, EnvironmentFault)
    assert "worker 2 (node 2) did not start: ModuleNotFoundError" in fault.message
    assert "pip install specbench-cli==" in fault.hint


def test_scheduling_ends_if_every_worker_has_only_vanilla_left(plan, schedule, monkeypatch):
    monkeypatch.setattr(FakeWorkers, "find_near_ties", lambda *_: None)

    def drop_pld(name, names):
        return AssignmentResult([], [], [], {"pld": "ValueError: no"}, None, judged=False)

    done = schedule(fate=drop_pld)
    assert done.fault is None
    assert len(done.workers.assigned) == 2 < len(plan.questions)  # one assignment for each worker
    assert "only vanilla is left: the run ends" in "".join(done.view.notes)
    assert done.run_dir.manifest["dropped"] == {"pld": "ValueError: no"}


def test_a_worker_that_dropped_all_methods_gets_no_more_prompts(plan, schedule):
    def drop_pld(name, names):
        if name == "1":
            return AssignmentResult([], [], [], {"pld": "ValueError: no"}, None, judged=False)
        return None

    done = schedule(fate=drop_pld)
    assert [name for name, *_ in done.workers.assigned].count("1") == 1
    assert len(done.workers.assigned) == len(plan.questions)


def test_an_error_of_a_worker_has_its_name(schedule):
    fault = schedule(infos={"1": UsageError("no such task file: own.jsonl", "ls")}).fault
    assert isinstance(fault, UsageError)
    assert (fault.message, fault.hint) == (
        "worker 1 (node 1): no such task file: own.jsonl",
        "ls",
    )


def node(address, cpus=0, gpus=0, *, alive=True):
    resources = {"CPU": float(cpus), "GPU": float(gpus)}
    return {
        "Alive": alive,
        "NodeID": f"id of {address}",
        "NodeManagerAddress": address,
        "Resources": {name: n for name, n in resources.items() if n},
    }


CLUSTER = [node("b", 8, 2), node("a", 4), node("c", 9, alive=False)]


@pytest.mark.parametrize(
    ("nodes", "device", "expected"),
    [
        (CLUSTER, "auto", [("b", 4, 1), ("b", 4, 1)]),
        (CLUSTER, "cuda", [("b", 4, 1), ("b", 4, 1)]),
        (CLUSTER, "cpu", [("a", 4, 0), ("b", 8, 0)]),
        ([node("a", 4), node("head")], "auto", [("a", 4, 0)]),
    ],
)
def test_a_worker_gets_a_gpu_or_all_of_a_nodes_cpus(nodes, device, expected):
    found = [(place.address, place.cpus, place.gpus) for place in list_devices(nodes, device)]
    assert found == expected


def test_a_cluster_without_the_device_is_an_error_with_its_devices():
    with pytest.raises(EnvironmentFault, match=r"--device cuda: .* \(a: 4 CPUs, 0 GPUs\)") as fault:
        list_devices([node("a", 4)], "cuda")
    assert "--num-gpus=1" in fault.value.hint


def test_a_missing_ray_package_is_an_error_with_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match="'ray' is not installed") as fault, connect():
        pass
    assert fault.value.hint == "pip install 'specbench-cli[ray]'"


@pytest.fixture
def unreachable(monkeypatch):
    """A Ray module that finds no cluster."""

    def init(**_):
        raise ConnectionError("Could not find any running Ray instance. Please start one.")

    ray = SimpleNamespace(init=init, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_cluster_that_cannot_be_found_is_an_error_with_a_hint(unreachable):
    with pytest.raises(EnvironmentFault) as fault, connect():
        pass
    assert fault.value.message == (
        "no Ray cluster can be reached at this machine: Could not find any running Ray instance"
    )
    assert fault.value.hint.startswith("ray start --head")


def test_an_unreachable_cluster_address_is_an_error(unreachable, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = "127.0.0.1:{1}".format(*closed.getsockname())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EnvironmentFault, match=f"at {address}: .*refused"), connect():
        pass


def test_output_of_ray_threads_is_kept_from_stdout(capsys):
    ours = _FilteredStdout(sys.stdout)
    print("a result", file=ours)
    noise = threading.Thread(target=lambda: print("raylet", file=ours), name="ray_listen")
    noise.start()
    noise.join()
    assert capsys.readouterr().out == "a result\n"


def test_missing_module_is_extracted_from_a_long_ray_message():
    text = "The actor died.\n  trace\nModuleNotFoundError: No module named 'x'\n"
    assert _missing_module(text) == "ModuleNotFoundError: No module named 'x'"
    assert _missing_module("The node died.\n more") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load": "poisson:2"}, "omit load poisson:2"),
        ({"tune": 4}, "omit tune: tune with --executor local"),
        ({"devices": {"target": "cpu:0", "draft": "cpu:1"}}, "omit devices"),
        ({"device": "cuda:1"}, "omit device cuda:1"),
    ],
)
def test_options_for_one_machine_are_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(methods=["vanilla"], executor="ray", **given)


def test_methods_that_learn_from_prompt_to_prompt_are_rejected():
    config = RunConfig(methods=["vanilla", "suffix"], executor="ray", limit=1)
    with pytest.raises(UsageError, match="suffix learns from earlier prompts"):
        make_plan(config)


def test_in_turn_is_rejected_with_cluster_workers(plan, tmp_path, log):
    run_dir = RunDir.create(tmp_path / "run", build_manifest(plan, {}))
    with pytest.raises(UsageError, match="--in-turn"):
        execute.measure_run(plan, run_dir, log(), in_turn=tmp_path / "turns")


def test_machine_facts_come_from_the_workers(plan):
    assert not machine_facts().keys() & build_manifest(plan, {})["program"].keys()
    local = replace(plan, config=plan.config.model_copy(update={"executor": "local"}))
    assert machine_facts().keys() <= build_manifest(local, {})["program"].keys()

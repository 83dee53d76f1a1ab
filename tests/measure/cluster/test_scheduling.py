"""Prompts dealt to workers: what is dealt again, what is refused; no cluster is needed."""

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
    """A record that says least: of a cell that failed."""
    nothing = dict.fromkeys(
        "output_ids origin n_tokens steps target_forwards draft_forwards forwards peak_bytes"
        " other_cpu verdict score".split()
    )
    of_row = {"peer": False, "params": Params(), "sampling": "greedy", "guarantee": "exact_tokens"}
    end = {"seed": 0, "finish": "error", "error": "none", "ns": Ns(), "void": False}
    return Record(**nothing, **of_row, **end, **facts)


class FakeWorkers:
    """Workers that answer at once, and are lost when `fate` says so.

    fate: of a worker and a deal, in the order of both, what becomes of it; else it is made.
    """

    def __init__(self, plan, workers=2, fate=None, introduced=None):
        self.plan = plan
        self.size = workers
        self.fate = fate or (lambda name, names: None)
        self.introduced = introduced or {}
        self.asked = deque()
        self.dealt, self.dismissed, self.costs = [], [], []

    def start(self, names, plan, folder):
        return {name: f"node {name}" for name in islice(names, self.size)}

    def send(self, name, what, *args):
        assert name not in [each for each, *_ in self.asked], "one thing at a time"
        self.asked.append((name, what, args))

    def receive(self):
        name, what, args = self.asked.popleft()
        return name, getattr(self, what)(name, *args)

    def end(self, name):
        self.dismissed.append(name)

    def plan_run(self, name):
        own = WorkerInfo(WORDS, {"machine": "m1"}, {"id": "m1", "hardware": {"cpu": "X"}})
        return self.introduced.get(name, own)

    def load(self, name, costs):
        self.costs.append(costs)
        held = {"target_ns": 1.0, "relative": {}, "context": 8, "noisy": False}
        return LoadedModels({"target": MODEL}, {}, {"threads": 1, "device": "cpu"}, costs or held)

    def measure(self, name, number, names, known):
        self.dealt.append((name, *names))
        if (fate := self.fate(name, names)) is not None:
            return fate
        asked = [each for each in self.plan.questions if each.prompt_id in names]
        facts = {
            question.prompt_id: {
                key: getattr(question, key)
                for key in ("prompt_id", "cluster", "task", "family", "category")
            }
            for question in asked
        }
        records = [
            failed(label=method_run.label, method=method_run.name, turn=turn, pass_=number, **own)
            for own, question in zip(facts.values(), asked, strict=True)
            for turn in range(1, len(question.turns) + 1)
            for method_run in self.plan.method_runs
        ]
        prompts = [
            Prompt(**facts[q.prompt_id], turn=turn, text="?", ids=[1])
            for q in asked
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
def deal(plan, tmp_path, monkeypatch, log):
    """Deal the plan to workers; returns workers, run and view."""
    monkeypatch.setattr(scheduling, "shared_facts", lambda plan: WORDS)
    path = tmp_path / "run"
    view = log()

    def run(*, resume=False, force=False, **of_crew):
        run_dir = RunDir.open(path) if resume else RunDir.create(path, build_manifest(plan, {}))
        workers = FakeWorkers(plan, **of_crew)
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


def test_every_question_is_measured_by_one_worker_with_all_its_rows(plan, deal):
    done = deal()
    assert done.fault is None
    assert len(list(done.run_dir.records())) == plan.n_outputs
    found = workers_of(done.run_dir)
    assert len(found) == 6 and all(len(own) == 1 for own in found.values())
    assert {name for name, *_ in done.workers.dealt} == {"1", "2"}
    assert done.run_dir.manifest["workers"] == {"1": {"device": "cpu"}, "2": {"device": "cpu"}}
    assert done.run_dir.manifest["machine"]["id"] == "m1"


def test_costs_of_forwards_are_the_first_workers_for_all(deal):
    first, second = deal().workers.costs
    assert first is None and second["target_ns"] == 1.0


def test_what_a_lost_worker_was_dealt_goes_to_another_and_nothing_is_twice(plan, deal):
    lost = iter([WorkerLost("node down")])
    done = deal(fate=lambda name, names: next(lost, None) if name == "2" else None)
    assert done.fault is None
    assert len({record.key for record in done.run_dir.records()}) == plan.n_outputs
    (again,) = {
        names for own, *names in map(tuple, done.workers.dealt) if own == "2" for names in names
    }
    assert [name for name, *names in done.workers.dealt if again in names] == ["2", "1"]
    assert done.workers.dismissed == ["2"]
    assert done.run_dir.manifest["workers"]["2"] == {"device": "cpu", "lost": "node down"}
    assert any("worker 2 (node 2) was lost: node down" in note for note in done.view.notes)


def test_a_deal_whose_own_worker_process_was_lost_is_not_kept(deal):
    made = AssignmentResult([], [], [], {}, "pearl's drafter died", judged=False)
    lost = iter([made])
    done = deal(fate=lambda name, names: next(lost, None))
    assert done.fault is None and done.workers.dismissed == ["1"]
    assert all(own == {"2"} for own in workers_of(done.run_dir).values())


def test_without_workers_the_run_says_how_to_go_on_and_a_resumption_makes_what_is_missing(
    plan, deal
):
    dealt = []

    def last_two_die(name, names):
        dealt.append(names)
        return WorkerLost("gone") if len(dealt) > 3 else None

    first = deal(fate=last_two_die)
    assert isinstance(first.fault, WorkerLost) and "no worker is left" in first.fault.message
    assert "--resume" in first.fault.hint
    kept = [record.key for record in first.run_dir.records()]
    assert len(kept) == 3 * 2
    second = deal(resume=True)
    assert second.fault is None and len(second.workers.dealt) == 3
    keys = [record.key for record in second.run_dir.records()]
    assert keys[: len(kept)] == kept and len(set(keys)) == len(keys) == plan.n_outputs
    assert list(second.run_dir.manifest["workers"]) == ["1", "2", "3", "4"]


def test_a_deal_that_ends_three_workers_ends_the_run(deal):
    first = []

    def poison(name, names):
        first.append(names)
        return WorkerLost("killed") if names == first[0] else None

    done = deal(workers=5, fate=poison)
    assert isinstance(done.fault, WorkerLost)
    assert "3 workers were lost while they measured it, the last: killed" in done.fault.message


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (WORDS | {"torch": "2.5.1"}, r"torch \(2\.6\.0, there 2\.5\.1\)"),
        (WORDS | {"specbench": "0.0.9"}, r"specbench \(none, there 0\.0\.9\)"),
        (WORDS | {"the weights of embedded-7m": "cd"}, r"the weights of embedded-7m \(ab, there"),
    ],
)
def test_a_worker_that_has_something_else_than_the_driver_is_refused(deal, own, says):
    other = WorkerInfo(own, {"machine": "m1"}, {})
    done = deal(introduced={"2": other})
    assert isinstance(done.fault, EnvironmentFault)
    assert done.fault.message.startswith("worker 2 (node 2) differs from the driver: ")
    assert "pip install specbench-cli==" in done.fault.hint
    assert not list(done.run_dir.records())
    with pytest.raises(EnvironmentFault, match=says):
        raise done.fault


def test_workers_of_two_kinds_of_machine_are_refused_but_for_the_gpu_that_each_sees(deal):
    gpus = {str(n): {"machine": "m1", "variable CUDA_VISIBLE_DEVICES": str(n)} for n in (1, 2)}
    same = {name: WorkerInfo(WORDS, own, {"id": "m1"}) for name, own in gpus.items()}
    assert deal(introduced=same).fault is None
    other = {"4": WorkerInfo(WORDS, {"machine": "m2"}, {"id": "m2"})}
    fault = deal(resume=True, introduced=other).fault
    assert "differs from worker 3 (node 3): machine (m1, there m2)" in fault.message


def test_a_run_goes_on_on_other_machines_only_where_that_is_forced(deal):
    deal(workers=1)
    elsewhere = {
        name: WorkerInfo(WORDS, {"machine": "m2"}, {"id": "m2"}) for name in ("2", "3", "4")
    }
    refused = deal(resume=True, workers=1, introduced=elsewhere).fault
    assert isinstance(refused, UsageError) and "machine (m1, there m2)" in refused.message
    forced = deal(resume=True, force=True, workers=1, introduced=elsewhere)
    assert forced.fault is None
    assert forced.run_dir.manifest["mixed"] == ["machine (m1, there m2)"]


def test_weights_that_changed_since_a_run_was_begun_are_refused(deal, monkeypatch):
    deal(workers=1)
    monkeypatch.setitem(MODEL, "sha256", "cd")
    fault = deal(resume=True, workers=1).fault
    assert isinstance(fault, UsageError) and "the weights of target (ab then, cd" in fault.message


def test_a_worker_that_does_not_start_is_named_with_what_to_do(deal):
    said = WorkerLost("ModuleNotFoundError: No module named 'specbench_cli'")
    fault = deal(introduced={"2": said}).fault
    assert isinstance(fault, EnvironmentFault)
    assert "worker 2 (node 2) did not start: ModuleNotFoundError" in fault.message
    assert "pip install specbench-cli==" in fault.hint


def test_scheduling_ends_once_no_worker_has_a_method_beside_vanilla(plan, deal, monkeypatch):
    monkeypatch.setattr(FakeWorkers, "find_near_ties", lambda *_: None)

    def drops(name, names):
        return AssignmentResult([], [], [], {"pld": "ValueError: no"}, None, judged=False)

    done = deal(fate=drops)
    assert done.fault is None
    assert len(done.workers.dealt) == 2 < len(plan.questions)  # one deal for each worker
    assert "only vanilla is left: the run ends" in "".join(done.view.notes)
    assert done.run_dir.manifest["dropped"] == {"pld": "ValueError: no"}


def test_a_worker_that_dropped_all_methods_leaves_the_rest_to_the_others(plan, deal):
    def drops(name, names):
        if name == "1":
            return AssignmentResult([], [], [], {"pld": "ValueError: no"}, None, judged=False)
        return None

    done = deal(fate=drops)
    assert [name for name, *_ in done.workers.dealt].count("1") == 1
    assert len(done.workers.dealt) == len(plan.questions)


def test_what_a_worker_refuses_is_told_as_its_own(deal):
    fault = deal(introduced={"1": UsageError("no such task file: own.jsonl", "ls")}).fault
    assert isinstance(fault, UsageError)
    assert (fault.message, fault.hint) == (
        "worker 1 (node 1): no such task file: own.jsonl",
        "ls",
    )


def node(address, cpus=0, gpus=0, *, alive=True):
    held = {"CPU": float(cpus), "GPU": float(gpus)}
    return {
        "Alive": alive,
        "NodeID": f"id of {address}",
        "NodeManagerAddress": address,
        "Resources": {name: n for name, n in held.items() if n},
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


def test_a_cluster_without_such_a_device_is_told_with_what_it_has():
    with pytest.raises(EnvironmentFault, match=r"--device cuda: .* \(a: 4 CPUs, 0 GPUs\)") as fault:
        list_devices([node("a", 4)], "cuda")
    assert "--num-gpus=1" in fault.value.hint


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match="'ray' is not installed") as fault, connect():
        pass
    assert fault.value.hint == "pip install 'specbench-cli[ray]'"


@pytest.fixture
def unreachable(monkeypatch):
    """A Ray that finds no cluster."""

    def init(**_):
        raise ConnectionError("Could not find any running Ray instance. Please start one.")

    ray = SimpleNamespace(init=init, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_cluster_that_cannot_be_found_is_one_error_with_what_to_type(unreachable):
    with pytest.raises(EnvironmentFault) as fault, connect():
        pass
    assert fault.value.message == (
        "no Ray cluster can be reached at this machine: Could not find any running Ray instance"
    )
    assert fault.value.hint.startswith("ray start --head")


def test_an_address_where_nobody_listens_is_told_at_once(unreachable, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = "127.0.0.1:{1}".format(*closed.getsockname())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EnvironmentFault, match=f"at {address}: .*refused"), connect():
        pass


def test_what_rays_threads_print_is_kept_from_stdout(capsys):
    ours = _FilteredStdout(sys.stdout)
    print("a result", file=ours)
    noise = threading.Thread(target=lambda: print("raylet", file=ours), name="ray_listen")
    noise.start()
    noise.join()
    assert capsys.readouterr().out == "a result\n"


def test_of_rays_long_messages_the_missing_module_is_told():
    text = "The actor died.\n  trace\nModuleNotFoundError: No module named 'x'\n"
    assert _missing_module(text) == "ModuleNotFoundError: No module named 'x'"
    assert _missing_module("The node died.\n more") is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"load": "poisson:2"}, "omit load poisson:2"),
        ({"tune": 4}, "omit tune: tune with --executor local"),
        ({"devices": {"target": "cpu:0", "draft": "cpu:1"}}, "omit devices"),
        ({"device": "cuda:1"}, "omit device cuda:1"),
    ],
)
def test_what_is_one_machines_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        RunConfig(methods=["vanilla"], executor="ray", **given)


def test_rows_that_learn_from_prompt_to_prompt_are_refused():
    config = RunConfig(methods=["vanilla", "suffix"], executor="ray", limit=1)
    with pytest.raises(UsageError, match="suffix learns from earlier prompts"):
        make_plan(config)


def test_runs_that_take_turns_are_of_one_machine(plan, tmp_path, log):
    run_dir = RunDir.create(tmp_path / "run", build_manifest(plan, {}))
    with pytest.raises(UsageError, match="--in-turn"):
        execute.measure_run(plan, run_dir, log(), in_turn=tmp_path / "turns")


def test_what_is_said_of_the_machine_is_the_workers(plan):
    assert not machine_facts().keys() & build_manifest(plan, {})["program"].keys()
    local = replace(plan, config=plan.config.model_copy(update={"executor": "local"}))
    assert machine_facts().keys() <= build_manifest(local, {})["program"].keys()

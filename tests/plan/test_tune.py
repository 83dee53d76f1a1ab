"""Tests of tuning: the split of questions, the choice of parameters, and tuned runs."""

from types import SimpleNamespace

import pytest

from specbench_cli import app
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.measure import repeat_process
from specbench_cli.measure import run as execute
from specbench_cli.plan import tune
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import ForwardKind, Ns, Steps, Trace, Verdict
from specbench_cli.summary.facts import Facts
from specbench_cli.tasks import load_task

pytestmark = pytest.mark.usefixtures("small_pair")

QUESTIONS = load_task("mini").questions


def test_questions_are_split_by_cluster_in_every_family():
    development, held_out = tune.split(QUESTIONS, 0)
    assert sorted(q.prompt_id for q in development + held_out) == sorted(
        q.prompt_id for q in QUESTIONS
    )
    assert not {q.cluster for q in development} & {q.cluster for q in held_out}
    families = {q.family for q in QUESTIONS}
    assert {q.family for q in development} == {q.family for q in held_out} == families
    for family in families:
        development_clusters, held_out_clusters = (
            len({q.cluster for q in part if q.family == family}) for part in (development, held_out)
        )
        assert development_clusters == max(1, round((development_clusters + held_out_clusters) / 3))


def test_split_depends_on_the_seed_alone():
    assert tune.split(QUESTIONS, 0) == tune.split(QUESTIONS, 0)
    assert tune.split(QUESTIONS, 0)[0] == tune.split(QUESTIONS[::-1], 0)[0][::-1]
    assert tune.split(QUESTIONS, 0) != tune.split(QUESTIONS, 1)


def test_single_question_of_a_family_is_held_out_and_too_few_are_rejected():
    family = QUESTIONS[0].family
    some = [q for q in QUESTIONS if q.family == family]
    lone = next(q for q in QUESTIONS if q.family != family)
    assert lone in tune.split([*some, lone], 0)[1]
    with pytest.raises(UsageError, match="1 are too few") as caught:
        tune.split([lone], 0)
    assert caught.value.hint == "--limit 24"


# Choosing


def make_record(label, prompt, ms=10.0, tokens=11, *, void=False, error=None, verdict="identical"):
    """Return the fields of a record that `choose` needs."""
    kinds = [
        ForwardKind("target", "verify", 0, 1, (0, 8)),
        ForwardKind("draft", "draft", 0, 1, (0, 2)),
        ForwardKind("target", "draft", 0, 1, (0, 4)),
    ]
    return SimpleNamespace(
        label=label,
        prompt_id=prompt,
        turn=1,
        peer=False,
        n_tokens=tokens,
        void=void,
        error=error,
        verdict=Verdict(verdict),
        ns=Ns() if void else Ns(total=2 * int(ms * 1e6), decode=int(ms * 1e6)),
        steps=Steps([2, 2], [2, 2], [2, 2], [2, 2], [5, 5]),
        forwards=Trace(kinds, [0, 0, 1, 1, 2], [1] * 5, [0] * 5, [1] * 5, []),
    )


def choose(*records, by="time"):
    labels = list(dict.fromkeys(c.label for c in records))
    tuning = tune.Tuning({"sps": tuple(SimpleNamespace(label=each) for each in labels)}, ())
    return tune.choose(tuning, records, by, {"target": 800, "draft": 100})["sps"]


def test_lowest_decode_time_per_token_is_chosen():
    found = choose(
        make_record("a", "1", 10),
        make_record("b", "1", 8),
        make_record("a", "2", 10),
        make_record("b", "2", 9),
    )
    assert found.costs == {"a": pytest.approx(1.0), "b": pytest.approx(0.85)}
    assert (found.best, found.n) == ("b", 2)


def test_learning_time_is_part_of_the_cost():
    learning, slow = make_record("a", "1", 8), make_record("b", "1", 10)
    learning.ns.learn = 5_000_000
    assert choose(learning, slow).costs == {
        "a": pytest.approx(1.3),
        "b": pytest.approx(1.0),
    }


def test_candidates_are_compared_on_prompts_that_all_have_times_for():
    found = choose(
        make_record("a", "1", 10),
        make_record("b", "1", 11),
        make_record("a", "2", 90),
        make_record("b", "2", void=True),
    )
    assert (found.best, found.n) == ("a", 1)
    assert found.costs["a"] == pytest.approx(1.0)


def test_wrong_and_failed_candidates_are_not_chosen():
    found = choose(
        make_record("a", "1", 10),
        make_record("b", "1", 1, verdict="mismatch"),
        make_record("c", "1", 1, error="no"),
    )
    assert found.best == "a"
    assert found.costs == {"a": pytest.approx(1.0), "b": None, "c": None}


def test_first_of_equal_candidates_is_chosen():
    assert choose(make_record("a", "1"), make_record("b", "1")).best == "a"


def test_tuning_without_a_comparable_time_is_an_error():
    with pytest.raises(EnvironmentFault, match="sps cannot be tuned") as caught:
        choose(make_record("a", "1", void=True), make_record("b", "1"))
    assert "--tune-by forwards" in caught.value.hint


def test_forwards_are_weighted_by_the_bytes_of_their_weights():
    cost, tokens = tune.forwards_cost(make_record("a", "1"), {"target": 800, "draft": 100})
    assert tokens == 11
    assert cost == pytest.approx(2 + 2 / 8 + 1 / 2)


def test_partial_forwards_are_weighted_by_their_share():
    record = make_record("a", "1")
    record.forwards.kinds[2] = ForwardKind("target", "draft", 0, 1, (0, 4), 0.6)
    cost, _ = tune.forwards_cost(record, {"target": 800, "draft": 100})
    assert cost == pytest.approx(2 + 2 / 8 + 0.6)


def test_forwards_without_a_trace_come_from_the_steps():
    engine_record = make_record("a", "1")
    engine_record.forwards = None
    assert tune.forwards_cost(engine_record, {"target": 800, "draft": 100})[0] == pytest.approx(
        3 + 4 / 8
    )


# Whole runs


SETTINGS = {
    "methods": ["vanilla", "sps", "pld"],
    "category": ["qa", "rag"],
    "limit": 6,
    "max_new_tokens": 8,
    "allow_noise": True,
    "tune": 2,
    "tune_by": "forwards",
}


def run_tuned(folder, view, **settings):
    """Run SETTINGS in a new folder, or resume the run in an existing one, and open it."""
    if folder.exists():
        plan, run_dir = execute.resume_run(folder, view)
    else:
        config = RunConfig.model_validate({**SETTINGS, **settings})
        plan, run_dir = execute.start_run(config, {}, folder, view)
    assert execute.measure_run(plan, run_dir, view).exit_code == ExitCode.OK
    return RunDir.open(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, log):
    """A tuned run and its view."""
    view = log()
    return run_tuned(tmp_path_factory.mktemp("tuned") / "whole", view), view


def ids(run_dir):
    return {r.key: (r.output_ids, r.steps, r.params) for r in run_dir.records()}


@pytest.mark.smoke
def test_result_uses_only_held_out_questions(whole):
    run_dir, view = whole
    tuning = run_dir.manifest["tuning"]
    trial = RunDir.open(run_dir.path / "tuning")
    measured, tried = ({r.cluster for r in each.records()} for each in (run_dir, trial))
    assert measured
    assert tried
    assert not measured & tried
    assert tuning["development"].keys() == tuning["held_out"].keys() == {"qa", "rag"}
    assert sum(tuning["held_out"].values()) == len({r.prompt_id for r in run_dir.records()})
    assert view.facts["tuning"]["candidates"] == {"vanilla": 1, "sps": 2, "pld": 2}
    assert trial.manifest["status"] == run_dir.manifest["status"] == "finished"


def test_every_method_has_the_source_of_its_parameters(whole):
    run_dir, _ = whole
    sources = {row["label"]: row["source"] for row in run_dir.manifest["rows"]}
    assert sources == {"vanilla": "default", "sps": "tuned(2)", "pld": "tuned(2)"}
    for row, found in run_dir.manifest["tuning"]["rows"].items():
        (chosen,) = (c["params"] for c in found["candidates"] if c["chosen"])
        for record in (r for r in run_dir.records() if r.label == row):
            assert (record.params.effective, record.params.source) == (chosen, sources[row])
    tuned_methods = (
        Facts.from_manifest(run_dir.manifest).tuned.partition("; chosen: ")[2].split("; ")
    )
    assert [line.split()[0] for line in tuned_methods] == ["sps", "pld"]
    assert all(line.endswith(" of 2") for line in tuned_methods)


@pytest.mark.parametrize("after", [3, 13])
def test_interrupted_tuning_is_resumed(whole, log, tmp_path, after):
    run_dir, view = whole
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run_tuned(folder, log(interrupt_after=after))
    assert RunDir.open(folder).manifest["status"] == "interrupted"
    view_of_resumed = log()
    found = run_tuned(folder, view_of_resumed)
    assert 0 < len(view_of_resumed.record_keys) <= len(view.record_keys) - after
    assert ids(found) == ids(run_dir)
    assert found.manifest["tuning"] == run_dir.manifest["tuning"]
    assert ids(RunDir.open(folder / "tuning")) == ids(RunDir.open(run_dir.path / "tuning"))


@pytest.fixture
def passes_in_process(monkeypatch):
    """Run the passes in this process, which saves the start of new processes."""

    def run_in_process(command, descriptors):
        arguments = [*command[command.index("run") :]]
        at = arguments.index("--parent")
        return app._run([*arguments[:at], *arguments[at + 2 :]])

    monkeypatch.setattr(repeat_process, "run_command", run_in_process)


def test_passes_of_a_tuned_run_use_the_chosen_parameters(tmp_path, log, passes_in_process):
    few = {"methods": ["vanilla", "pld"], "category": ["qa"], "limit": 2, "max_new_tokens": 2}
    sweep = {"pld": {"length": [1, 2]}}
    run_dir = run_tuned(tmp_path / "here", log(), **few, sweep=sweep, repeats=2)
    found = run_dir.manifest["tuning"]["rows"]["pld"]
    assert [each["params"]["length"] for each in found["candidates"]] == [1, 2]
    records = [r for r in run_dir.records() if r.label == "pld"]
    assert {r.pass_ for r in records} == {1, 2}
    for record in records:
        assert record.params.passed == found["passed"]
        assert record.params.source == "tuned(2)"

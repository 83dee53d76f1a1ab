"""Tuned runs: which questions parameters are chosen on, how, and that nothing measured is lost."""

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
        own, other = (
            len({q.cluster for q in part if q.family == family}) for part in (development, held_out)
        )
        assert own == max(1, round((own + other) / 3))


def test_split_depends_on_the_seed_alone():
    assert tune.split(QUESTIONS, 0) == tune.split(QUESTIONS, 0)
    assert tune.split(QUESTIONS, 0)[0] == tune.split(QUESTIONS[::-1], 0)[0][::-1]
    assert tune.split(QUESTIONS, 0) != tune.split(QUESTIONS, 1)


def test_lone_question_of_a_family_is_held_out_and_too_few_are_refused():
    family = QUESTIONS[0].family
    some = [q for q in QUESTIONS if q.family == family]
    lone = next(q for q in QUESTIONS if q.family != family)
    assert lone in tune.split([*some, lone], 0)[1]
    with pytest.raises(UsageError, match="1 are too few") as caught:
        tune.split([lone], 0)
    assert caught.value.hint == "--limit 24"


# Choosing


def cell(label, prompt, ms=10.0, tokens=11, *, void=False, error=None, verdict="identical"):
    """What choosing reads of a record: `tokens` tokens, drafted in steps of two."""
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


def choose(*cells, by="time"):
    labels = list(dict.fromkeys(c.label for c in cells))
    tuning = tune.Tuning({"sps": tuple(SimpleNamespace(label=each) for each in labels)}, ())
    return tune.choose(tuning, cells, by, {"target": 800, "draft": 100})["sps"]


def test_least_decode_time_a_token_is_chosen():
    found = choose(cell("a", "1", 10), cell("b", "1", 8), cell("a", "2", 10), cell("b", "2", 9))
    assert found.costs == {"a": pytest.approx(1.0), "b": pytest.approx(0.85)}
    assert (found.best, found.n) == ("b", 2)


def test_what_learning_delays_a_candidate_by_counts_against_it():
    measure_step_costs, slow = cell("a", "1", 8), cell("b", "1", 10)
    measure_step_costs.ns.learn = 5_000_000
    assert choose(measure_step_costs, slow).costs == {
        "a": pytest.approx(1.3),
        "b": pytest.approx(1.0),
    }


def test_candidates_are_compared_on_the_prompts_that_all_were_timed_on():
    found = choose(
        cell("a", "1", 10), cell("b", "1", 11), cell("a", "2", 90), cell("b", "2", void=True)
    )
    assert (found.best, found.n) == ("a", 1)
    assert found.costs["a"] == pytest.approx(1.0)


def test_wrong_and_failed_candidates_are_out():
    found = choose(
        cell("a", "1", 10), cell("b", "1", 1, verdict="mismatch"), cell("c", "1", 1, error="no")
    )
    assert found.best == "a"
    assert found.costs == {"a": pytest.approx(1.0), "b": None, "c": None}


def test_first_of_equals_is_chosen():
    assert choose(cell("a", "1"), cell("b", "1")).best == "a"


def test_noise_that_leaves_nothing_to_compare_is_told():
    with pytest.raises(EnvironmentFault, match="sps cannot be tuned") as caught:
        choose(cell("a", "1", void=True), cell("b", "1"))
    assert "--tune-by forwards" in caught.value.hint


def test_forwards_count_by_the_weights_that_they_read():
    cost, tokens = tune.forwards_cost(cell("a", "1"), {"target": 800, "draft": 100})
    assert tokens == 11
    assert cost == pytest.approx(2 + 2 / 8 + 1 / 2)


def test_parts_count_by_their_share_where_the_record_says_it():
    own = cell("a", "1")
    own.forwards.kinds[2] = ForwardKind("target", "draft", 0, 1, (0, 4), 0.6)
    cost, _ = tune.forwards_cost(own, {"target": 800, "draft": 100})
    assert cost == pytest.approx(2 + 2 / 8 + 0.6)


def test_peers_forwards_are_those_of_their_steps():
    peer = cell("a", "1")
    peer.forwards = None
    assert tune.forwards_cost(peer, {"target": 800, "draft": 100})[0] == pytest.approx(3 + 4 / 8)


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


def tuned(folder, view, **settings):
    """Run SETTINGS in a new folder, or go on in one that there is; returns what is in it."""
    if folder.exists():
        plan, run_dir = execute.resume_run(folder, view)
    else:
        config = RunConfig.model_validate({**SETTINGS, **settings})
        plan, run_dir = execute.start_run(config, {}, folder, view)
    assert execute.measure_run(plan, run_dir, view).exit_code == ExitCode.OK
    return RunDir.open(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, log):
    """A tuned run, and what its view saw."""
    view = log()
    return tuned(tmp_path_factory.mktemp("tuned") / "whole", view), view


def ids(run_dir):
    return {r.key: (r.output_ids, r.steps, r.params) for r in run_dir.records()}


@pytest.mark.smoke
def test_result_is_of_the_questions_that_parameters_were_not_chosen_on(whole):
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


def test_every_row_says_where_its_parameters_come_from(whole):
    run_dir, _ = whole
    sources = {row["label"]: row["source"] for row in run_dir.manifest["rows"]}
    assert sources == {"vanilla": "default", "sps": "tuned(2)", "pld": "tuned(2)"}
    for row, found in run_dir.manifest["tuning"]["rows"].items():
        (chosen,) = (c["params"] for c in found["candidates"] if c["chosen"])
        for record in (r for r in run_dir.records() if r.label == row):
            assert (record.params.effective, record.params.source) == (chosen, sources[row])
    said = Facts.from_manifest(run_dir.manifest).tuned.partition("; chosen: ")[2].split("; ")
    assert [line.split()[0] for line in said] == ["sps", "pld"]
    assert all(line.endswith(" of 2") for line in said)


@pytest.mark.parametrize("after", [3, 13])
def test_interrupted_tuning_goes_on_where_it_was(whole, log, tmp_path, after):
    run_dir, view = whole
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        tuned(folder, log(interrupt_after=after))
    assert RunDir.open(folder).manifest["status"] == "interrupted"
    rest = log()
    found = tuned(folder, rest)
    assert 0 < len(rest.record_keys) <= len(view.record_keys) - after
    assert ids(found) == ids(run_dir)
    assert found.manifest["tuning"] == run_dir.manifest["tuning"]
    assert ids(RunDir.open(folder / "tuning")) == ids(RunDir.open(run_dir.path / "tuning"))


@pytest.fixture
def passes_here(monkeypatch):
    """Passes are run by this process, which has all modules: processes are test_apart's."""

    def finished(command, descriptors):
        words = [*command[command.index("run") :]]
        at = words.index("--parent")
        return app._run([*words[:at], *words[at + 2 :]])

    monkeypatch.setattr(repeat_process, "run_command", finished)


def test_passes_of_a_tuned_run_are_run_with_what_was_chosen(tmp_path, log, passes_here):
    few = {"methods": ["vanilla", "pld"], "category": ["qa"], "limit": 2, "max_new_tokens": 2}
    sweep = {"pld": {"length": [1, 2]}}
    run_dir = tuned(tmp_path / "here", log(), **few, sweep=sweep, repeats=2)
    found = run_dir.manifest["tuning"]["rows"]["pld"]
    assert [each["params"]["length"] for each in found["candidates"]] == [1, 2]
    records = [r for r in run_dir.records() if r.label == "pld"]
    assert {r.pass_ for r in records} == {1, 2}
    for record in records:
        assert record.params.passed == found["passed"]
        assert record.params.source == "tuned(2)"

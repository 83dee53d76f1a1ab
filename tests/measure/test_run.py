"""Tests of whole runs over a small pair of models: records, resuming, and failures."""

import gc
import shutil
import textwrap
from pathlib import Path

import pytest

from specbench_cli.config import permission
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.measure import environment, quiet
from specbench_cli.measure import run as execute
from specbench_cli.measure.measurement import Measurement
from specbench_cli.measure.record_builder import RecordBuilder
from specbench_cli.measure.result import exit_code
from specbench_cli.models import resolve
from specbench_cli.models.aliases import HERE
from specbench_cli.report.report_data import read_report_data
from specbench_cli.report.terminal import table
from specbench_cli.store.invariants import validate
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")


@pytest.fixture
def plugin(tmp_path):
    """Return a function that writes a plug-in file and returns its path."""

    def write(source):
        path = tmp_path / f"plugin{abs(hash(source))}.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


def ids_and_counters(outcome):
    return {
        r.key: (r.output_ids, r.steps, r.target_forwards, r.draft_forwards) for r in outcome.records
    }


@pytest.mark.smoke
def test_every_method_answers_every_prompt_like_vanilla(specbench):
    outcome = specbench("sps", "pld", limit=6)
    assert len(outcome.records) == outcome.log.total == len(outcome.prompts) * 3
    for record in outcome.records:
        validate(record)
        kind = "reference" if record.label == "vanilla" else "identical"
        assert record.verdict.kind == kind
    assert outcome.exit_code == ExitCode.OK
    assert outcome.manifest["status"] == "finished"
    assert outcome.manifest["memory"]["weight_bytes"] > 0


@pytest.mark.parametrize(
    "rule", [{}, {"temperature": 0.8}, {"temperature": 0.8, "verify": "coupled"}]
)
def test_the_same_command_twice_gives_the_same_ids_and_counters(specbench, rule):
    first, second = (specbench("sps", "pld", limit=3, **rule) for _ in range(2))
    assert ids_and_counters(first) == ids_and_counters(second)


def test_a_resumed_run_equals_an_uninterrupted_one(specbench):
    whole = specbench("sps", limit=4)
    with pytest.raises(KeyboardInterrupt):
        specbench("sps", limit=4, log=specbench.log(interrupt_after=3))
    path = specbench.path(2)
    assert RunDir.open(path).manifest["status"] == "interrupted"
    kept = [record.key for record in RunDir.open(path).records()]
    assert 3 <= len(kept) < len(whole.records)
    resumed = specbench(resume=path)
    assert set(resumed.log.record_keys) == {record.key for record in whole.records} - set(kept)
    assert ids_and_counters(resumed) == ids_and_counters(whole)
    assert resumed.manifest["status"] == "finished"


def test_a_resumed_method_restores_what_it_has_learned(specbench):
    staged = {"name": "staged", "label": "staged", "params": {"depth": 3, "threshold": 0}}
    whole = specbench(staged, limit=3, max_new_tokens=24)
    with pytest.raises(KeyboardInterrupt):
        specbench(staged, limit=3, max_new_tokens=24, log=specbench.log(interrupt_after=3))
    resumed = specbench(resume=specbench.path(2))
    assert ids_and_counters(resumed) == ids_and_counters(whole)


def test_a_method_may_draft_with_a_third_model(specbench, tmp_path):
    # a copy of the draft model with another name
    folder = tmp_path / "third"
    shutil.copytree(resolve("embedded-1m").path, folder)
    stages = f"ngram,{folder},draft"
    row = {"name": "staged", "label": "three", "params": {"stages": stages, "depth": 3}}
    outcome = specbench(row, limit=2)
    assert {record.verdict.kind for record in outcome.by_label("three")} == {"identical"}
    assert outcome.manifest["models"]["third"]["label"] == "third"
    trace = outcome.by_label("three")[0].forwards
    assert {kind.model for kind in trace.kinds} == {"target", "draft", "third"}
    assert not any(str(tmp_path) in file.read_text() for file in files_of(outcome))


def files_of(outcome):
    return [file for file in outcome.path.rglob("*") if file.is_file()]


def test_resuming_a_finished_run_does_nothing(specbench):
    whole = specbench("sps")
    resumed = specbench(resume=whole.path)
    assert resumed.log.record_keys == []
    assert ids_and_counters(resumed) == ids_and_counters(whole)


def test_a_second_turn_continues_vanillas_answer_for_all_methods(specbench):
    outcome = specbench("sps", limit=1, category=["multi_turn"])
    first, second = sorted(outcome.prompts, key=lambda prompt: prompt.turn)
    assert (first.turn, second.turn) == (1, 2)
    answer = next(r.output_ids for r in outcome.by_label("vanilla") if r.turn == 1)
    context = " ".join(map(str, second.ids))
    # The tokens at the edges may merge with those of the chat template.
    assert " ".join(map(str, answer[1:-2])) in context
    assert {r.verdict.kind for r in outcome.by_label("sps")} == {"identical"}


def test_a_method_that_raises_on_one_prompt_fails_only_there(specbench, plugin):
    path = plugin(
        """
        from specbench_cli.api import Method

        class Fragile(Method):
            '''Raises on one question.'''
            name = "fragile"

            def propose(self, session, limit):
                if session.requests[0].prompt_id.startswith("mini/qa"):
                    raise RuntimeError("cannot [bold]answer[/bold] this")
                return session.chain([session.tokens()[-1]] * min(2, limit))
        """
    )
    outcome = specbench("fragile", "sps", limit=6, plugins=[path])
    failed = [record for record in outcome.by_label("fragile") if record.error]
    assert 0 < len(failed) < len(outcome.by_label("fragile"))
    assert all("RuntimeError: cannot" in record.error for record in failed)
    assert all("/" not in record.error.split("(")[-1] for record in failed)  # the error has no path
    assert all(record.verdict.kind == "identical" for record in outcome.by_label("sps"))
    assert outcome.exit_code == ExitCode.BAD_ANSWER


def test_a_method_that_commits_a_wrong_token_is_a_mismatch_and_exit_1(specbench, plugin):
    path = plugin(
        """
        from specbench_cli.api import Method, Step, Outcome

        class Liar(Method):
            '''Replaces the sixth token of vanilla's answer.'''
            name = "liar"

            def generate(self, session):
                session.prefill()
                while session.finish is None:
                    draft = session.chain(())
                    outcome = session.verify(draft, session.score(draft))
                    if len(session.output()) == 5:
                        wrong = (outcome.committed[0] + 1) % 4000 + 50
                        outcome = Outcome((), (wrong,), ("plain",), 0)
                    yield Step(0, draft, session.commit(outcome))
        """
    )
    outcome = specbench("liar", limit=2, plugins=[path], category=["qa"])
    verdicts = [record.verdict for record in outcome.by_label("liar")]
    assert {verdict.kind for verdict in verdicts} == {"mismatch"}
    assert {verdict.position for verdict in verdicts} == {5}
    assert outcome.exit_code == ExitCode.BAD_ANSWER


def test_a_method_that_stops_early_has_a_failed_output(specbench, plugin):
    path = plugin(
        """
        from specbench_cli.api import Method

        class Short(Method):
            '''Commits one token and returns.'''
            name = "short"

            def generate(self, session):
                session.prefill()
                return iter(())
        """
    )
    outcome = specbench("short", limit=1, plugins=[path])
    (record,) = {r.error for r in outcome.by_label("short")}
    assert record.startswith("stopped after 1 tokens")


def test_a_draft_that_is_not_needed_is_not_loaded(specbench):
    outcome = specbench("pld", limit=1)
    assert set(outcome.manifest["models"]) == {"target"}


def test_a_changed_run_is_resumed_only_with_force_and_labelled_mixed(
    specbench, tmp_path, plugin, monkeypatch, capsys
):
    task = tmp_path / "own.jsonl"
    task.write_text('{"prompt": "How much is 2 + 2?"}\n')
    path = plugin(
        """
        from specbench_cli.api import Method

        class Edited(Method):
            name = "edited"

            def propose(self, session, limit):
                return session.chain(())
        """
    )
    settings = {"tasks": [str(task)], "plugins": [path], "max_new_tokens": 2}
    with pytest.raises(KeyboardInterrupt):
        specbench("edited", log=specbench.log(interrupt_after=1), **settings)
    whole = execute.resume_run(specbench.path(1), specbench.log())[1]
    whole.release()  # nothing has changed, so resuming works
    task.write_text('{"prompt": "How much is 2 + 3?"}\n')
    versions = environment.versions()
    monkeypatch.setattr(environment, "versions", lambda: {**versions, "torch": "9.9"})
    weights = whole.manifest["models"]["target"]
    whole.update(models={"target": {**weights, "sha256": "ab"}})
    with pytest.raises(UsageError, match="cannot be resumed, because this has changed") as caught:
        execute.resume_run(specbench.path(1), specbench.log())
    names = ("the data of task own (", f"torch ({versions['torch']} then")
    assert all(name in caught.value.message for name in names)
    assert caught.value.hint.endswith(f"specbench run --resume {specbench.path(1)} --force")

    # The plug-in is compared first, before any of its code runs.
    Path(path).write_text(Path(path).read_text() + "# edited")
    with pytest.raises(
        UsageError, match=r"changed since it was started: the file of edited \("
    ) as caught:
        execute.resume_run(specbench.path(1), specbench.log())
    assert caught.value.hint.endswith(f"specbench run --resume {specbench.path(1)} --force")

    permission.permit(execute.permissions_to_resume(specbench.path(1), True))
    plan, run_dir = execute.resume_run(specbench.path(1), specbench.log(), force=True)
    execute.measure_run(plan, run_dir, specbench.log(), force=True)
    names = (*names, "the file of edited (")
    mixed = RunDir.open(specbench.path(1)).manifest["mixed"]
    assert any(what.startswith("the weights of target (ab") for what in mixed)
    assert all(any(what.startswith(name) for what in mixed) for name in names)
    table.print_runs([read_report_data(RunDir.open(specbench.path(1)))], families=False)
    assert "mixed: torch (" in capsys.readouterr().out


def test_files_of_a_finished_run_contain_no_local_path(specbench, tmp_path, plugin):
    task = tmp_path / "own.jsonl"
    task.write_text('{"prompt": "How much is 2 + 2?"}\n')
    path = plugin(
        """
        from specbench_cli.api import Method

        class Plain(Method):
            '''Proposes nothing.'''
            name = "plain"

            def propose(self, session, limit):
                return session.chain(())
        """
    )
    outcome = specbench("plain", tasks=[str(task)], plugins=[path], max_new_tokens=2)
    files = files_of(outcome)
    assert {file.name for file in files} >= {"manifest.json", "prompts.jsonl", "records.jsonl"}
    assert not any(str(tmp_path) in file.read_text() for file in files)


def test_a_prompt_longer_than_the_context_is_rejected(specbench, tmp_path):
    task = tmp_path / "long.jsonl"
    task.write_text('{"prompt": "short"}\n{"prompt": "' + "word " * 5000 + '"}\n')
    with pytest.raises(UsageError, match="4096 positions"):
        specbench("pld", tasks=[str(task)], max_new_tokens=4)


def test_exit_code_depends_on_mismatches_and_noise(specbench):
    records = specbench("sps", limit=6).records
    ours = next(r for r in records if r.label == "sps")
    ours.verdict.kind = "mismatch"
    assert exit_code(records, {}) == ExitCode.BAD_ANSWER
    ours.peer = True
    assert exit_code(records, {}) == ExitCode.OK
    ours.void = True
    assert exit_code(records, {}) == ExitCode.ENVIRONMENT


def make_damaged_heads(folder):
    """Return damaged head files, each with a label and a part of the error message."""
    good = HERE / "embedded" / "embedded-eagle"
    for name in ("cut", "no-json", "no-tensors"):
        shutil.copytree(good, folder / name)
    with (folder / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    (folder / "no-json" / "config.json").write_text("{")
    (folder / "no-tensors" / "model.safetensors").unlink()
    found = {"cut": "is damaged", "no-json": "damaged or truncated", "no-tensors": "lacks model"}
    rows = {str(folder / name): (name, word) for name, word in found.items()}
    return {
        **rows,
        str(folder / "gone"): ("gone", "no such eagle head"),
        "embedded-medusa": ("other", "unknown layout of a draft head"),
    }


@pytest.mark.usefixtures("shipped_pair")  # their heads fit only these models
def test_methods_with_damaged_heads_are_left_out_and_the_others_run(specbench, log, tmp_path):
    heads = make_damaged_heads(tmp_path)
    rows = [
        {"name": "eagle2", "label": label, "params": {"head": source}}
        for source, (label, _) in heads.items()
    ]
    view = log()
    done = specbench(*rows, "eagle2", limit=1, max_new_tokens=4, log=view)
    assert done.exit_code == ExitCode.ENVIRONMENT
    assert {record.label for record in done.records} == {"vanilla", "eagle2"}
    assert [row["label"] for row in done.manifest["rows"]] == ["vanilla", "eagle2"]
    for label, word in heads.values():
        (note,) = (note for note in view.notes if note.startswith(f"{label} is left out"))
        assert word in note
        assert word in done.manifest["left_out"][label]
        assert str(tmp_path) not in done.manifest["left_out"][label]
    names = [each for each in view.events if isinstance(each, str)]
    assert names.index("warming up 2 methods") == 1, (
        "damaged heads are reported before any method runs"
    )


def test_a_run_with_only_a_damaged_head_is_rejected(specbench, tmp_path):
    damaged_head = next(iter(make_damaged_heads(tmp_path)))
    with pytest.raises(EnvironmentFault, match="is damaged"):
        specbench({"name": "eagle2", "params": {"head": damaged_head}}, limit=1)


@pytest.mark.usefixtures("shipped_pair")
def test_a_repaired_head_runs_if_the_run_is_resumed_with_force(specbench, log, tmp_path):
    damaged_head = Path(next(iter(make_damaged_heads(tmp_path))))
    view = log(interrupt_after=1)
    row = {"name": "eagle2", "label": "mended", "params": {"head": str(damaged_head)}}
    with pytest.raises(KeyboardInterrupt):
        specbench(row, "pld", limit=2, max_new_tokens=4, log=view)
    shutil.copy(HERE / "embedded" / "embedded-eagle" / "model.safetensors", damaged_head)
    with pytest.raises(UsageError, match="changed since it was started: the weights of eagle cut"):
        specbench(resume=specbench.path(1))
    plan, run_dir = execute.resume_run(specbench.path(1), view, force=True)
    view.interrupt_after = None
    assert execute.measure_run(plan, run_dir, view, force=True).exit_code == ExitCode.OK
    assert run_dir.manifest["left_out"] == {}
    labels = [record.label for record in run_dir.records()]
    assert labels.count("mended") == labels.count("pld") == 2


@pytest.mark.usefixtures("shipped_pair")
@pytest.mark.parametrize("force", [False, True])
def test_records_of_a_head_that_no_longer_loads_are_kept(specbench, log, tmp_path, capsys, force):
    shutil.copytree(HERE / "embedded" / "embedded-eagle", tmp_path / "head")
    weights = tmp_path / "head" / "model.safetensors"
    whole = weights.read_bytes()
    row = {"name": "eagle2", "params": {"head": str(tmp_path / "head")}}
    view = log(interrupt_after=3)
    with pytest.raises(KeyboardInterrupt):
        specbench(row, "pld", limit=2, max_new_tokens=4, log=view)
    path = specbench.path(1)
    weights.write_bytes(whole[:2000])
    view.interrupt_after = None
    if force:
        plan, run_dir = execute.resume_run(path, view, force=True)
        done = execute.measure_run(plan, run_dir, view, force=True)
        assert done.exit_code == ExitCode.ENVIRONMENT
        manifest = RunDir.open(path).manifest
        assert "is damaged" in manifest["left_out"]["eagle2"]
        assert [row["label"] for row in manifest["rows"]] == ["vanilla", "pld", "eagle2"]
        table.print_runs([read_report_data(RunDir.open(path))], families=False)
        assert "left out, could not run here: eagle2" in capsys.readouterr().out
    else:
        with pytest.raises(UsageError, match="changed since it was started: the weights of"):
            specbench(resume=path)
        labels = [record.label for record in RunDir.open(path).records()]
        assert len(labels) == 3
        assert "eagle2" in labels
        weights.write_bytes(whole)
        resumed = specbench(resume=path)
        assert resumed.exit_code == ExitCode.OK
        assert resumed.manifest["left_out"] == {}
        assert len(resumed.records) == 6


def test_only_named_prompts_are_measured(specbench):
    named = ["mini/qa-003", "mini/rag-001"]
    outcome = specbench("pld", limit=None, prompts=named)
    assert {record.prompt_id for record in outcome.records} == set(named)
    with pytest.raises(UsageError, match=r"unknown question 'mini/qa-3'; did you mean 'mini/qa-"):
        specbench("pld", limit=None, prompts=["mini/qa-3"])


def test_a_pass_stopped_by_stop_after_finishes_its_prompt(specbench):
    outcome = specbench("pld", limit=6, stop_after=1e-6)
    assert len({record.prompt_id for record in outcome.records}) == 1
    assert outcome.manifest["status"] == "finished"
    assert "--stop-after 1e-06: 1 of 6 prompts" in outcome.log.notes


def test_garbage_collection_before_an_output_ignores_objects_of_the_judge(specbench, monkeypatch):
    """The judge loads transformers, with which a garbage collection takes 80 ms instead of 2 ms."""
    monkeypatch.setattr(quiet, "WINDOW_S", 0.0)  # each output is judged before the next prompt
    judge_objects, object_counts = [], []
    record, measure = RecordBuilder.build, Measurement.measure

    def build_and_allocate(judging, measurement, group):
        if not judge_objects:
            judge_objects.extend([] for _ in range(50_000))
        return record(judging, measurement, group)

    def count_objects_and_measure(measurement):
        if judge_objects:
            object_counts.append(len(gc.get_objects()))
        measure(measurement)

    monkeypatch.setattr(RecordBuilder, "build", build_and_allocate)
    monkeypatch.setattr(Measurement, "measure", count_objects_and_measure)
    specbench("pld", limit=2, max_new_tokens=4)
    assert object_counts
    assert max(object_counts) < 50_000


def test_stop_after_is_rejected_with_load():
    with pytest.raises(ValueError, match="stop_after cannot be combined with load"):
        RunConfig.model_validate({"methods": ["pld"], "load": "poisson:2", "stop_after": 3})

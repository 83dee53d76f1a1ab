"""Changes of a run's files by other programs are noticed, and no such record is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest

from specbench_cli.errors import ConcurrentWriteError, UsageError
from specbench_cli.store import pieces
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import to_json

ORDER = '{"methods":[{"name":"sps"}],"tasks":["mini"],"target":"embedded"}'
PLAN = {
    "rows": [{"label": "sps", "method": "sps"}],
    "tasks": [{"name": "mini", "n_questions": 1}],
    "config": {"effective": {"repeats": 1, "seed": 0}},
}


@pytest.fixture
def prompt(make_record):
    record = make_record()
    said = {name: getattr(record, name) for name in ("prompt_id", "cluster", "task", "family")}
    return lambda **changes: Prompt(
        **{**said, "category": "lexicon", "turn": 1, "text": "Why?", "ids": [1], **changes}
    )


@pytest.fixture
def run(tmp_path, make_record, prompt):
    """An unfinished run of one prompt with three turns, each with a record."""
    run = RunDir.create(tmp_path / "run", dict(PLAN), resume_config=ORDER)
    for turn in (1, 2, 3):
        run.append_prompts([prompt(turn=turn)])
        run.append([make_record(turn=turn)])
    yield run
    run.release()


def finished(run):
    run.close("finished")
    run.release()
    return RunDir.open(run.path)


def stopped(run):
    run.close("interrupted")
    run.release()
    return RunDir.open(run.path)


def killed(run):
    """Return the run as a process leaves it that is killed: with a manifest of an earlier time."""
    run.update()
    run.lock.release()
    return RunDir.open(run.path)


def lines(run, name="records.jsonl"):
    return (run.path / name).read_text().splitlines(keepends=True)


def put(run, changed, name="records.jsonl"):
    (run.path / name).write_text("".join(changed))


def edited(line):
    """Return a record of the same size with other times."""
    assert '"total":100' in line
    return (
        line.replace('"total":100', '"total":101')
        .replace('"host":5', '"host":6')
        .replace('"decode":80', '"decode":81')
    )


def readers(run):
    return [
        lambda: list(run.records()),
        lambda: list(run.records({"mini/3"})),
        lambda: list(run.map_records(to_json)),
    ]


# Records outside the plan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pass_": 2}, "pass: 2, but the run has 1 repeats"),
        ({"pass_": 0}, "pass: 0, but the run has 1 repeats"),
        ({"pass_": 1001}, "pass: 1001, but the run has 1 loads"),
        ({"seed": 7}, "seed: 7, but the run has seed 0"),
    ],
)
def test_record_with_a_pass_or_seed_that_the_run_does_not_have_is_refused(
    run, make_record, change, says
):
    with (run.path / "records.jsonl").open("a") as file:
        file.write(to_json(make_record(turn=3, **change)) + "\n")
    run = killed(run)
    for read in (*readers(run), run.read_output_ids):
        with pytest.raises(UsageError, match=rf"line 4 is not a valid record: {says}"):
            read()


def test_each_load_and_repeat_of_a_run_is_read(tmp_path, make_record):
    effective = {"repeats": 2, "load": "poisson:1,2"}
    run = RunDir.create(tmp_path / "run", {"config": {"effective": effective}})
    run.append(make_record(pass_=pass_) for pass_ in (1, 2, 1001, 1002))
    assert len(list(run.records())) == len(run.read_output_ids()) == 4
    run.append([make_record(pass_=2001)])
    with pytest.raises(UsageError, match="pass: 2001, but the run has 2 loads"):
        list(run.records())


def test_prompt_beyond_the_questions_of_a_task_is_refused(run, prompt):
    with (run.path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(asdict(prompt(prompt_id="mini/4"))) + "\n")
    with pytest.raises(UsageError, match="task 'mini' has 1 questions in the run"):
        list(killed(run).records())


# A finished run


@pytest.mark.parametrize("at", [0, 1, 2])
def test_edit_of_the_same_size_after_the_end_is_noticed(run, at):
    run, held = finished(run), lines(run)
    changed = [edited(line) if place == at else line for place, line in enumerate(held)]
    put(run, changed)
    assert len("".join(changed)) == len("".join(held))
    for read in readers(run):
        with pytest.raises(UsageError, match=r"records\.jsonl was changed after the run") as caught:
            read()
    assert "--force" in caught.value.hint
    put(run, held)
    for read in readers(run):
        assert len(read()) == 3


@pytest.mark.parametrize(
    "harm",
    [
        lambda held: held[:-1],
        lambda held: held[1:],
        lambda held: held[::-1],
        lambda held: [*held[:-1], held[-1][:-5]],
        lambda held: [*held, held[0][:40]],
    ],
    ids=["last", "first", "order", "cut", "half line more"],
)
def test_lines_that_are_lost_or_moved_after_the_end_are_noticed(run, harm):
    run = finished(run)
    put(run, harm(lines(run)))
    with pytest.raises(UsageError, match="was changed after the run was finished"):
        list(run.records())


def test_damaged_line_of_a_finished_run_is_still_named(run):
    run = finished(run)
    put(run, [lines(run)[0], "{oops\n"])
    with pytest.raises(UsageError, match="line 2 is not a valid record") as caught:
        list(run.records())
    assert "restore records.jsonl from a copy; " in caught.value.hint
    assert "delete that line: sed -i 2d" in caught.value.hint
    assert f"specbench run --resume {run.path} --force" in caught.value.hint


def test_changed_prompt_of_a_finished_run_is_noticed(run):
    run = finished(run)
    put(
        run, [each.replace("Why?", "Who?") for each in lines(run, "prompts.jsonl")], "prompts.jsonl"
    )
    for read in (*readers(run), lambda: list(run.prompts())):
        with pytest.raises(UsageError, match=r"prompts\.jsonl was changed after the run"):
            read()


def test_manifest_of_another_run_does_not_fit(run, tmp_path, make_record, prompt):
    other = RunDir.create(tmp_path / "other", dict(PLAN), resume_config=ORDER)
    other.append_prompts([prompt()])
    other.append([make_record(n_tokens=5, other_cpu=0.5)])
    run, other = finished(run), finished(other)
    shutil.copy(other.path / "manifest.json", run.path)
    with pytest.raises(UsageError, match="was changed after the run was finished"):
        list(RunDir.open(run.path).records())


def test_change_that_is_accepted_labels_the_run(run):
    run = finished(run)
    put(run, lines(run)[:2])
    run.acquire_lock()
    run.accept_changes()
    run.release()
    again = RunDir.open(run.path)
    assert len(list(again.records())) == 2
    assert again.manifest["mixed"] == ["records.jsonl (changed after the run was finished)"]
    again.accept_changes()
    assert len(again.manifest["mixed"]) == 1


def test_digests_of_lines_are_only_in_the_manifest_of_an_unfinished_run(run):
    assert len(stopped(run).manifest["line_digests"]["records.jsonl"]) == 3
    run = RunDir.open(run.path)
    run.acquire_lock()
    run.read_output_ids()
    manifest = finished(run).manifest
    assert "line_digests" not in manifest
    assert set(manifest["files"]) == {"records.jsonl", "prompts.jsonl"}


@pytest.mark.parametrize("leave", [stopped, finished])
def test_run_of_an_older_version_has_no_digests_and_is_read(run, leave):
    run = leave(run)
    manifest = {k: v for k, v in run.manifest.items() if k not in ("line_digests", "files")}
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    put(run, map(edited, lines(run)))
    run = RunDir.open(run.path)
    assert len(list(run.records())) == len(run.read_output_ids()) == 3


# An unfinished run


@pytest.mark.parametrize("leave", [stopped, killed])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_edit_of_the_same_size_in_an_unfinished_run_names_the_record(run, leave, at):
    run = leave(run)
    held = lines(run)
    put(run, [edited(line) if place == at else line for place, line in enumerate(held)])
    says = rf"line {at + 1} is not a valid record: another program changed it: \('mini/3', {at + 1}"
    for read in (*readers(run), run.read_output_ids):
        with pytest.raises(UsageError, match=says) as caught:
            read()
    assert f"sed -i {at + 1}d" in caught.value.hint


@pytest.mark.parametrize("leave", [stopped, killed])
def test_deleted_record_is_only_missing(run, leave):
    run = leave(run)
    put(run, lines(run)[1:])
    assert [key[1] for key in run.read_output_ids()] == [2, 3]
    assert len(list(run.records())) == 2
    run.acquire_lock()
    run.mark_running()
    assert not run.has_written(("mini/3", 1, "sps", 1))
    assert run.has_written(("mini/3", 2, "sps", 1))


def test_record_that_is_added_to_an_interrupted_run_is_named(run, make_record, prompt):
    run.append_prompts([prompt(turn=4)])
    run = stopped(run)
    put(run, [*lines(run), to_json(make_record(turn=4)) + "\n"])
    for read in (*readers(run), run.read_output_ids):
        with pytest.raises(
            UsageError, match="line 4 is not a valid record: another program added it"
        ):
            read()


def test_records_that_a_killed_process_wrote_last_are_kept(run, make_record, prompt):
    run.update()
    run.append_prompts([prompt(turn=4)])
    run.append([make_record(turn=4)])
    run.lock.release()
    run = RunDir.open(run.path)
    assert len(run.manifest["line_digests"]["records.jsonl"]) == 3
    assert len(run.read_output_ids()) == len(list(run.records())) == 4
    run.acquire_lock()
    run.mark_running()
    put(run, [*lines(run)[:3], edited(lines(run)[3])])
    with pytest.raises(
        UsageError, match="line 4 is not a valid record: another program changed it"
    ):
        list(stopped(run).records())


def test_lines_of_a_killed_repeat_get_digests(run, make_record, prompt):
    parent = RunDir.open(run.path)
    run.append_prompts([prompt(turn=4)])
    run.append([make_record(turn=4)])
    parent.store_line_digests()
    assert parent.has_written(("mini/3", 4, "sps", 1))
    parent.manifest["status"] = "interrupted"
    assert len(list(parent.records())) == 4


def test_changed_prompt_of_an_unfinished_run_is_named(run):
    run = stopped(run)
    held = lines(run, "prompts.jsonl")
    put(run, [held[0], held[1].replace("Why?", "Who?"), held[2]], "prompts.jsonl")
    with pytest.raises(
        UsageError, match="line 2 is not a valid prompt: another program changed it"
    ):
        list(run.prompts())


# While the run goes on


@pytest.mark.parametrize("at", [0, 1, 2])
def test_edit_of_the_same_size_during_the_run_is_noticed_at_its_end(run, at):
    held = lines(run)
    put(run, [edited(line) if place == at else line for place, line in enumerate(held)])
    with pytest.raises(ConcurrentWriteError, match=rf"first one in line {at + 1}: .* changed it"):
        run.reread_output_ids()
    with pytest.raises(UsageError, match=rf"line {at + 1} is not a valid record"):
        stopped(run).read_output_ids()


def test_record_that_is_added_during_the_run_is_noticed_and_refused_later(run, make_record):
    put(run, [*lines(run), to_json(make_record(turn=4)) + "\n"])
    with pytest.raises(ConcurrentWriteError, match="first one in line 4: another program added it"):
        run.reread_output_ids()
    run = stopped(run)
    with pytest.raises(
        UsageError, match="line 4 is not a valid record: another program changed it"
    ):
        run.read_output_ids()
    put(run, lines(run)[:3])
    assert len(run.read_output_ids()) == 3


def test_edit_between_the_last_check_and_the_end_is_noticed_by_readers(run):
    run.reread_output_ids()
    put(run, [edited(line) for line in lines(run)])
    with pytest.raises(UsageError, match="was changed after the run was finished"):
        list(finished(run).records())


def test_records_read_by_several_processes_are_checked_too(run, monkeypatch):
    monkeypatch.setattr(pieces, "MIN_PARALLEL_BYTES", 1)
    monkeypatch.setattr(pieces, "usable_cpus", lambda: 2)
    run = stopped(run)
    assert len(list(run.map_records(to_json))) == 3
    put(run, [*lines(run)[:2], edited(lines(run)[2])])
    with pytest.raises(
        UsageError, match="line 3 is not a valid record: another program changed it"
    ):
        list(run.map_records(to_json))

"""Tests that changes of a run's files by other programs are detected."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest

from specbench_cli.errors import ConcurrentWriteError, UsageError
from specbench_cli.store import pieces
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import to_json

RESUME_CONFIG = '{"methods":[{"name":"sps"}],"tasks":["mini"],"target":"embedded"}'
PLAN = {
    "rows": [{"label": "sps", "method": "sps"}],
    "tasks": [{"name": "mini", "n_questions": 1}],
    "config": {"effective": {"repeats": 1, "seed": 0}},
}


@pytest.fixture
def prompt(make_record):
    record = make_record()
    record_fields = {
        name: getattr(record, name) for name in ("prompt_id", "cluster", "task", "family")
    }
    return lambda **changes: Prompt(
        **{**record_fields, "category": "lexicon", "turn": 1, "text": "Why?", "ids": [1], **changes}
    )


@pytest.fixture
def run(tmp_path, make_record, prompt):
    """An unfinished run of one prompt with three turns, each with a record."""
    run = RunDir.create(tmp_path / "run", dict(PLAN), resume_config=RESUME_CONFIG)
    for turn in (1, 2, 3):
        run.append_prompts([prompt(turn=turn)])
        run.append([make_record(turn=turn)])
    yield run
    run.release()


def finish(run):
    run.close("finished")
    run.release()
    return RunDir.open(run.path)


def interrupt(run):
    run.close("interrupted")
    run.release()
    return RunDir.open(run.path)


def kill(run):
    """Return the run as a killed process leaves it, with an older manifest."""
    run.update()
    run.lock.release()
    return RunDir.open(run.path)


def lines(run, name="records.jsonl"):
    return (run.path / name).read_text().splitlines(keepends=True)


def write_lines(run, changed, name="records.jsonl"):
    (run.path / name).write_text("".join(changed))


def edit_times(line):
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
    ("change", "message"),
    [
        ({"pass_": 2}, "pass: 2, but the run has 1 repeats"),
        ({"pass_": 0}, "pass: 0, but the run has 1 repeats"),
        ({"pass_": 1001}, "pass: 1001, but the run has 1 loads"),
        ({"seed": 7}, "seed: 7, but the run has seed 0"),
    ],
)
def test_record_with_an_unknown_pass_or_seed_is_an_error(run, make_record, change, message):
    with (run.path / "records.jsonl").open("a") as file:
        file.write(to_json(make_record(turn=3, **change)) + "\n")
    run = kill(run)
    for read in (*readers(run), run.read_output_ids):
        with pytest.raises(UsageError, match=rf"line 4 is not a valid record: {message}"):
            read()


def test_each_load_and_repeat_of_a_run_is_read(tmp_path, make_record):
    effective = {"repeats": 2, "load": "poisson:1,2"}
    run = RunDir.create(tmp_path / "run", {"config": {"effective": effective}})
    run.append(make_record(pass_=pass_) for pass_ in (1, 2, 1001, 1002))
    assert len(list(run.records())) == len(run.read_output_ids()) == 4
    run.append([make_record(pass_=2001)])
    with pytest.raises(UsageError, match="pass: 2001, but the run has 2 loads"):
        list(run.records())


def test_more_prompts_than_questions_of_a_task_are_an_error(run, prompt):
    with (run.path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(asdict(prompt(prompt_id="mini/4"))) + "\n")
    with pytest.raises(UsageError, match="task 'mini' has 1 questions in the run"):
        list(kill(run).records())


# A finished run


@pytest.mark.parametrize("at", [0, 1, 2])
def test_edit_of_the_same_size_after_the_end_is_detected(run, at):
    run, original = finish(run), lines(run)
    changed = [edit_times(line) if index == at else line for index, line in enumerate(original)]
    write_lines(run, changed)
    assert len("".join(changed)) == len("".join(original))
    for read in readers(run):
        with pytest.raises(UsageError, match=r"records\.jsonl was changed after the run") as caught:
            read()
    assert "--force" in caught.value.hint
    write_lines(run, original)
    for read in readers(run):
        assert len(read()) == 3


@pytest.mark.parametrize(
    "harm",
    [
        lambda original: original[:-1],
        lambda original: original[1:],
        lambda original: original[::-1],
        lambda original: [*original[:-1], original[-1][:-5]],
        lambda original: [*original, original[0][:40]],
    ],
    ids=["last", "first", "order", "cut", "half line more"],
)
def test_lines_removed_or_moved_after_the_end_are_detected(run, harm):
    run = finish(run)
    write_lines(run, harm(lines(run)))
    with pytest.raises(UsageError, match="was changed after the run was finished"):
        list(run.records())


def test_damaged_line_of_a_finished_run_is_an_error_with_its_number(run):
    run = finish(run)
    write_lines(run, [lines(run)[0], "{oops\n"])
    with pytest.raises(UsageError, match="line 2 is not a valid record") as caught:
        list(run.records())
    assert "restore records.jsonl from a copy; " in caught.value.hint
    assert "delete that line: sed -i 2d" in caught.value.hint
    assert f"specbench run --resume {run.path} --force" in caught.value.hint


def test_changed_prompt_of_a_finished_run_is_detected(run):
    run = finish(run)
    write_lines(
        run, [each.replace("Why?", "Who?") for each in lines(run, "prompts.jsonl")], "prompts.jsonl"
    )
    for read in (*readers(run), lambda: list(run.prompts())):
        with pytest.raises(UsageError, match=r"prompts\.jsonl was changed after the run"):
            read()


def test_manifest_of_another_run_is_detected(run, tmp_path, make_record, prompt):
    other = RunDir.create(tmp_path / "other", dict(PLAN), resume_config=RESUME_CONFIG)
    other.append_prompts([prompt()])
    other.append([make_record(n_tokens=5, other_cpu=0.5)])
    run, other = finish(run), finish(other)
    shutil.copy(other.path / "manifest.json", run.path)
    with pytest.raises(UsageError, match="was changed after the run was finished"):
        list(RunDir.open(run.path).records())


def test_an_accepted_change_labels_the_run_as_mixed(run):
    run = finish(run)
    write_lines(run, lines(run)[:2])
    run.acquire_lock()
    run.accept_changes()
    run.release()
    reopened = RunDir.open(run.path)
    assert len(list(reopened.records())) == 2
    assert reopened.manifest["mixed"] == ["records.jsonl (changed after the run was finished)"]
    reopened.accept_changes()
    assert len(reopened.manifest["mixed"]) == 1


def test_digests_of_lines_are_only_in_the_manifest_of_an_unfinished_run(run):
    assert len(interrupt(run).manifest["line_digests"]["records.jsonl"]) == 3
    run = RunDir.open(run.path)
    run.acquire_lock()
    run.read_output_ids()
    manifest = finish(run).manifest
    assert "line_digests" not in manifest
    assert set(manifest["files"]) == {"records.jsonl", "prompts.jsonl"}


@pytest.mark.parametrize("leave", [interrupt, finish])
def test_run_of_an_older_version_has_no_digests_and_is_read(run, leave):
    run = leave(run)
    manifest = {k: v for k, v in run.manifest.items() if k not in ("line_digests", "files")}
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    write_lines(run, map(edit_times, lines(run)))
    run = RunDir.open(run.path)
    assert len(list(run.records())) == len(run.read_output_ids()) == 3


# An unfinished run


@pytest.mark.parametrize("leave", [interrupt, kill])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_edit_of_the_same_size_in_an_unfinished_run_is_detected(run, leave, at):
    run = leave(run)
    original = lines(run)
    write_lines(
        run, [edit_times(line) if index == at else line for index, line in enumerate(original)]
    )
    message = (
        rf"line {at + 1} is not a valid record: another program changed it: \('mini/3', {at + 1}"
    )
    for read in (*readers(run), run.read_output_ids):
        with pytest.raises(UsageError, match=message) as caught:
            read()
    assert f"sed -i {at + 1}d" in caught.value.hint


@pytest.mark.parametrize("leave", [interrupt, kill])
def test_deleted_record_is_only_missing(run, leave):
    run = leave(run)
    write_lines(run, lines(run)[1:])
    assert [key[1] for key in run.read_output_ids()] == [2, 3]
    assert len(list(run.records())) == 2
    run.acquire_lock()
    run.mark_running()
    assert not run.has_written(("mini/3", 1, "sps", 1))
    assert run.has_written(("mini/3", 2, "sps", 1))


def test_record_added_to_an_interrupted_run_is_detected(run, make_record, prompt):
    run.append_prompts([prompt(turn=4)])
    run = interrupt(run)
    write_lines(run, [*lines(run), to_json(make_record(turn=4)) + "\n"])
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
    write_lines(run, [*lines(run)[:3], edit_times(lines(run)[3])])
    with pytest.raises(
        UsageError, match="line 4 is not a valid record: another program changed it"
    ):
        list(interrupt(run).records())


def test_lines_of_a_killed_repeat_get_digests(run, make_record, prompt):
    parent = RunDir.open(run.path)
    run.append_prompts([prompt(turn=4)])
    run.append([make_record(turn=4)])
    parent.store_line_digests()
    assert parent.has_written(("mini/3", 4, "sps", 1))
    parent.manifest["status"] = "interrupted"
    assert len(list(parent.records())) == 4


def test_changed_prompt_of_an_unfinished_run_is_detected(run):
    run = interrupt(run)
    original = lines(run, "prompts.jsonl")
    write_lines(
        run, [original[0], original[1].replace("Why?", "Who?"), original[2]], "prompts.jsonl"
    )
    with pytest.raises(
        UsageError, match="line 2 is not a valid prompt: another program changed it"
    ):
        list(run.prompts())


# While the run goes on


@pytest.mark.parametrize("at", [0, 1, 2])
def test_edit_of_the_same_size_during_the_run_is_detected_at_its_end(run, at):
    original = lines(run)
    write_lines(
        run, [edit_times(line) if index == at else line for index, line in enumerate(original)]
    )
    with pytest.raises(ConcurrentWriteError, match=rf"first one in line {at + 1}: .* changed it"):
        run.reread_output_ids()
    with pytest.raises(UsageError, match=rf"line {at + 1} is not a valid record"):
        interrupt(run).read_output_ids()


def test_record_added_during_the_run_is_detected(run, make_record):
    write_lines(run, [*lines(run), to_json(make_record(turn=4)) + "\n"])
    with pytest.raises(ConcurrentWriteError, match="first one in line 4: another program added it"):
        run.reread_output_ids()
    run = interrupt(run)
    with pytest.raises(
        UsageError, match="line 4 is not a valid record: another program changed it"
    ):
        run.read_output_ids()
    write_lines(run, lines(run)[:3])
    assert len(run.read_output_ids()) == 3


def test_edit_after_the_last_check_of_a_run_is_detected_by_readers(run):
    run.reread_output_ids()
    write_lines(run, [edit_times(line) for line in lines(run)])
    with pytest.raises(UsageError, match="was changed after the run was finished"):
        list(finish(run).records())


def test_records_read_by_several_processes_are_checked_too(run, monkeypatch):
    monkeypatch.setattr(pieces, "MIN_PARALLEL_BYTES", 1)
    monkeypatch.setattr(pieces, "usable_cpus", lambda: 2)
    run = interrupt(run)
    assert len(list(run.map_records(to_json))) == 3
    write_lines(run, [*lines(run)[:2], edit_times(lines(run)[2])])
    with pytest.raises(
        UsageError, match="line 3 is not a valid record: another program changed it"
    ):
        list(run.map_records(to_json))

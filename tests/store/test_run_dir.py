"""Tests of the folder of a run: its manifest, its records, crashes, and its lock."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench_cli.errors import FULL, ExitCode, UsageError
from specbench_cli.store.run_dir import (
    Prompt,
    RunDir,
    find_latest,
    list_runs,
    new_path,
    register_run,
)
from specbench_cli.store.schema import to_json


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "run", {"version": "0.1"})


def test_manifest_has_status_running_and_then_finished(run):
    on_disk = run.path / "manifest.json"
    assert json.loads(on_disk.read_text()) == {"version": "0.1", "status": "running"}
    run.close("finished", noisy=False)
    assert json.loads(on_disk.read_text())["status"] == "finished"
    assert RunDir.open(run.path).manifest == {
        "version": "0.1",
        "status": "finished",
        "noisy": False,
    }


def test_resumed_run_has_status_running_and_keeps_its_facts(run):
    run.close("interrupted", noisy=True)
    reopened = RunDir.open(run.path)
    reopened.mark_running()
    assert RunDir.open(run.path).manifest["status"] == "running"
    assert RunDir.open(run.path).manifest["noisy"] is True


def test_failed_write_leaves_the_old_manifest(run, monkeypatch):
    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run.close("finished")
    assert RunDir.open(run.path).manifest["status"] == "running"


def test_records_are_read_in_order_and_synced_on_every_append(run, make_record, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    run.append([make_record(turn=1), make_record(turn=2)])
    run.append([make_record(turn=3)])
    assert len(synced) == 2
    assert [record.turn for record in RunDir.open(run.path).records()] == [1, 2, 3]


def test_invalid_record_is_not_written(run, make_record):
    with pytest.raises(ValueError, match=r"^n_tokens"):
        run.append([make_record(), make_record(turn=2, n_tokens=None)])
    assert list(run.records()) == []


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 2000), data=st.data())
def test_run_cut_at_any_byte_keeps_its_complete_records(tmp_path_factory, make_record, cut, data):
    run = RunDir.create(tmp_path_factory.mktemp("runs") / "run", {})
    run.append([make_record(turn=turn) for turn in (1, 2)])
    file = run.path / "records.jsonl"
    whole = file.read_bytes()
    cut = min(cut, len(whole))
    file.write_bytes(whole[:cut])
    kept = [record.turn for record in run.records()]
    assert kept == [1, 2][: whole[:cut].count(b"\n")]
    run.append([make_record(turn=9)])
    assert [record.turn for record in run.records()] == [*kept, 9]


def test_long_incomplete_line_is_removed(run, make_record):
    run.append([make_record()])
    with (run.path / "records.jsonl").open("ab") as file:
        file.write(b"x" * 200_000)
    run.append([make_record(turn=2)])
    assert [record.turn for record in run.records()] == [1, 2]


def test_damaged_line_in_the_middle_is_an_error_with_its_number(run, make_record):
    run.append([make_record()])
    with (run.path / "records.jsonl").open("a") as file:
        file.write("{oops\n")
    run.append([make_record(turn=2)])
    with pytest.raises(UsageError, match=r"records\.jsonl, line 2 is not a valid record"):
        list(run.records())


def test_second_record_of_an_output_is_an_error(run, make_record):
    run.append([make_record(), make_record()])
    with pytest.raises(UsageError, match="line 2: a second record"):
        list(run.records())


def test_run_without_records_is_empty(run):
    assert list(run.records()) == []
    assert list(run.prompts()) == []


def test_prompts_are_read_back_unchanged(run):
    prompt = Prompt("mini/1", "mini/1", "mini", "qa", "lexicon", 1, "Où?\u2028", [1, 2])
    run.append_prompts([prompt])
    assert list(run.prompts()) == [prompt]


def test_damaged_prompt_is_an_error_with_its_number(run):
    (run.path / "prompts.jsonl").write_text('{"prompt_id": 1}\n')
    with pytest.raises(UsageError, match="line 1 is not a valid prompt"):
        list(run.prompts())


def test_existing_run_is_not_overwritten(run):
    with pytest.raises(UsageError, match="already contains a run") as caught:
        RunDir.create(run.path, {})
    assert f"--resume {run.path}" in str(caught.value.hint)
    assert caught.value.exit_code == ExitCode.USAGE


def test_folder_with_other_files_is_rejected(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="not empty, but contains no run"):
        RunDir.create(tmp_path, {})
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_folder_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        RunDir.create(tmp_path / "file" / "run", {})


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_folder_without_a_valid_manifest_is_no_run(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=r"contains no run|is damaged"):
        RunDir.open(tmp_path)


def test_default_folder_has_time_name_and_hash_and_is_new(tmp_path):
    now = datetime(2026, 11, 21, 10, 24, 3, tzinfo=UTC)
    path = new_path("my task/1", {"seed": 0}, tmp_path, now)
    assert path.parent == tmp_path
    stamp, name, digest = path.name.split("-", 1)[0], path.name[17:-9], path.name[-8:]
    assert (stamp, name) == ("20261121T102403Z", "my-task-1")
    assert int(digest, 16) >= 0
    assert new_path("my task/1", {"seed": 1}, tmp_path, now) != path
    path.mkdir()
    assert new_path("my task/1", {"seed": 0}, tmp_path, now).name == f"{path.name}-2"


@pytest.fixture
def runs(tmp_path):
    """Return a function that creates runs with these states, oldest first."""

    def create(**states):
        for index, (name, state) in enumerate(states.items()):
            run = RunDir.create(tmp_path / name, {})
            if state != "running":
                run.close(state)
            os.utime(run.path / "manifest.json", ns=(index, index))
        return tmp_path

    return create


def test_last_is_the_newest_finished_run(runs):
    root = runs(a="finished", c="finished", b="interrupted", d="running")
    (root / "notes").mkdir()
    assert find_latest(root) == root / "c"


def test_last_to_resume_is_the_newest_unfinished_run_or_else_the_newest(runs):
    root = runs(a="interrupted", b="finished")
    assert find_latest(root, to_resume=True) == root / "a"
    (root / "a/manifest.json").unlink()
    assert find_latest(root, to_resume=True) == root / "b"


def test_last_without_a_finished_run_is_an_error_with_a_hint(runs):
    root = runs(a="interrupted", b="running")
    with pytest.raises(UsageError, match=r"no run in .* has finished; the newest is b") as caught:
        find_latest(root)
    assert "specbench run --resume last" in caught.value.hint


def test_last_without_any_run_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(UsageError, match="there is no run") as caught:
        find_latest(tmp_path)
    assert caught.value.hint == "specbench run"


def test_lines_are_json_lines(run, make_record):
    run.append([make_record()])
    assert (run.path / "records.jsonl").read_text() == to_json(make_record()) + "\n"


def test_output_ids_are_read_once_and_updated_by_new_records(run, make_record, monkeypatch):
    run.append([make_record(), make_record(turn=2, label="vanilla")])
    reopened = RunDir.open(run.path)
    assert reopened.read_output_ids() == {
        record.key: record.output_ids for record in reopened.records()
    }
    monkeypatch.setattr("specbench_cli.store.jsonl.read", None)  # the file is read only once
    reopened.append([make_record(turn=3)])
    assert [key[1] for key in reopened.read_output_ids()] == [1, 2, 3]


@pytest.mark.parametrize(("line", "message"), [("{}", "prompt_id is missing"), ("{", "not JSON")])
def test_output_ids_of_a_damaged_line_are_an_error(run, make_record, line, message):
    run.append([make_record()])
    with (run.path / "records.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UsageError, match=f"line 2 is not a valid record: {message}"):
        run.read_output_ids()


def test_an_invalid_value_is_an_error_with_line_and_hint(run, make_record):
    run.append([make_record(), make_record(turn=2)])
    file = run.path / "records.jsonl"
    first, second = file.read_text().splitlines()
    second = second.replace('"total":100', '"total":-100')
    file.write_text(f"{first}\n{second}\n")
    with pytest.raises(
        UsageError, match=r"line 2 is not a valid record: ns.total must be at least 0, got -100"
    ) as caught:
        list(run.records())
    assert "sed -i 2d" in str(caught.value.hint)


def test_a_token_outside_the_vocabulary_is_an_error(tmp_path, make_record):
    models = {"target": {"label": "tiny", "vocab_size": 8}}
    run = RunDir.create(tmp_path / "tiny", {"models": models})
    run.append([make_record()])
    with pytest.raises(UsageError, match="output_ids: 8, but the target has 8 tokens"):
        list(RunDir.open(run.path).records())


def test_a_record_of_an_unknown_worker_is_an_error(run, make_record):
    run.update(workers={"w1": {"device": "cpu"}})
    run.append([make_record(worker="w1"), make_record(pass_=2, worker="w2")])
    with pytest.raises(
        UsageError, match="line 2 is not a valid record: worker: 'w2' is not a worker of the"
    ):
        list(run.records())


def test_records_with_contradictory_prompts_are_an_error(run, make_record):
    run.append([make_record(), make_record(turn=2, family="code")])
    with pytest.raises(UsageError, match="line 2 is not a valid record: prompt mini/3: "):
        list(run.records())


@pytest.mark.parametrize(
    ("manifest", "prompt", "message"),
    [
        ({"rows": [{"label": "pld"}]}, {}, "label: 'sps' is not a method of the run"),
        (
            {"rows": [{"label": "sps", "method": "pld"}]},
            {},
            "method: 'sps', but 'pld' in the manifest",
        ),
        ({"tasks": [{"name": "gsm8k"}]}, None, "task: 'mini' is not a task of the run"),
        ({}, {"prompt_id": "mini/4"}, "prompt_id: 'mini/3', turn 1 is not in prompts.jsonl"),
        ({}, {"category": "other"}, "prompt_id: 'mini/3', turn 1 is .* in prompts.jsonl"),
        (
            {"tasks": [{"name": "mini"}]},
            {"task": "x"},
            "not a valid prompt: task 'x' is not a task of the run",
        ),
        ({"models": {"target": {"vocab_size": 9}}}, {"ids": [9]}, "ids: 9, but the target has 9"),
        ({}, {"turn": 2}, "turn 2 of mini/3 without turn 1"),
    ],
)
def test_a_record_that_does_not_belong_to_the_run_is_an_error(
    tmp_path, make_record, manifest, prompt, message
):
    run, record = RunDir.create(tmp_path / "run", manifest), make_record()
    if prompt is not None:
        prompt_fields = {
            name: getattr(record, name) for name in ("prompt_id", "cluster", "task", "family")
        }
        prompt_fields |= {"category": record.category, "turn": 1, "text": "Why?", "ids": [1]}
        run.append_prompts([Prompt(**(prompt_fields | prompt))])
    run.append([record])
    with pytest.raises(UsageError, match=message):
        list(run.records())


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"rows": [{"label": "a\x1b[2J"}]}, "rows\\[0\\].label must be text without control"),
        ({"rows": [{"label": "a"}, {"label": "a"}]}, "rows has 'a' twice"),
        ({"rows": [{"label": "a", "baseline": []}]}, "rows\\[0\\].baseline must be"),
        ({"rows": [{"label": "a", "control": "no"}]}, "rows\\[0\\].control must be"),
        ({"rows": [{"label": "a", "workers": 0}]}, "rows\\[0\\].workers must be"),
        ({"models": {"target": None}}, "models.target must be a mapping"),
        ({"config": {"effective": {"temperature": -1}}}, "temperature must be at least 0"),
        ({"schema": 99}, "this run has schema 99"),
        ({"status": "lost"}, "status must be one of"),
        ({"dropped": "sps"}, "dropped must be a mapping"),
        ({"rows": [{"label": "a"}], "dropped": {"b": "failed"}}, "dropped names 'b', but rows has"),
        ({"created_utc": "yesterday"}, "created_utc must be a time"),
        ({"models": {"draft": {"sha256": "x"}}}, "models.draft.sha256 must be"),
        ({"models": {"draft": {"eos": [7], "vocab_size": 7}}}, "models.draft.eos has 7, but there"),
    ],
)
def test_an_invalid_manifest_is_an_error(tmp_path, manifest, message):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=message):
        RunDir.open(tmp_path)


def test_a_manifest_keeps_its_order_and_integers(tmp_path):
    text = '{"status":"finished","machine":{"hardware":{"memory_gib":24}},"schema":6}'
    (tmp_path / "manifest.json").write_text(text)
    assert json.dumps(RunDir.open(tmp_path).manifest, separators=(",", ":")) == text


# One writer


def test_second_writer_is_rejected_until_the_first_releases_the_lock(run):
    run.acquire_lock()
    other = RunDir.open(run.path)
    with pytest.raises(UsageError, match=f"written to by process {os.getpid()} on ") as caught:
        other.acquire_lock()
    assert f"specbench run --resume {run.path}" in caught.value.hint
    run.release()
    other.acquire_lock()
    other.release()
    assert [file.name for file in run.path.iterdir()] == ["manifest.json"]


def test_lock_of_a_dead_process_is_ignored(run):
    (child := os.fork()) or (run.acquire_lock(), os._exit(0))
    os.waitpid(child, 0)
    assert (run.path / ".lock").exists()
    run.acquire_lock()
    run.release()


RESUME_CONFIG = '{"methods":[{"name":"sps"}],"tasks":["mini"],"target":"embedded"}'
"""A possible content of `.resume.json`."""


def test_folder_left_by_a_killed_start_can_be_reused(tmp_path):
    (child := os.fork()) or create_and_die(tmp_path)
    os.waitpid(child, 0)
    (tmp_path / ".manifest.json.0123abcd.new").write_text(
        '{"cut'
    )  # a killed process leaves a half-written file
    (tmp_path / ".resume.json.0123abcd.new").write_text("")
    assert {".lock", ".resume.json"} < {file.name for file in tmp_path.iterdir()}
    run = RunDir.create(tmp_path, {}, resume_config=RESUME_CONFIG)
    assert run.manifest["status"] == "running"
    with pytest.raises(UsageError, match="written to by process"):
        RunDir.create(tmp_path, {}, resume_config=RESUME_CONFIG)
    run.discard()
    assert not tmp_path.exists()


def create_and_die(path):
    RunDir._write_manifest = lambda self: os._exit(9)
    RunDir.create(path, {}, resume_config=RESUME_CONFIG)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("records.jsonl", lambda run, record: run.append([record])),
        ("manifest.json", lambda run, record: run.update(much="x" * 9000)),
    ],
)
def test_full_disk_is_an_error_and_keeps_complete_lines(run, make_record, name, write):
    run.append([make_record()])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write(run, make_record(turn=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(run.path / name)
    assert caught.value.errno in FULL
    run.append([make_record(turn=3)])
    assert [record.turn for record in RunDir.open(run.path).records()] == [1, 3]


def harm(file, how):
    if how == "append":
        with file.open("a") as opened:
            opened.write("{}\n")
    elif how == "same size":
        before = file.stat()
        time.sleep(0.01)  # the clock of the file system may have this resolution
        file.write_bytes(b" " * before.st_size)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif how == "replace":
        (file.parent / "other").write_bytes(file.read_bytes())
        (file.parent / "other").replace(file)
    else:
        file.unlink()


@pytest.mark.parametrize("name", ["records.jsonl", "manifest.json", "prompts.jsonl"])
@pytest.mark.parametrize("how", ["append", "same size", "replace", "remove"])
def test_file_changed_by_a_plugin_spoils_the_run(run, name, how):
    if name != "manifest.json":
        (run.path / name).write_text("{}\n")
    with (
        pytest.raises(UsageError, match=rf"bad changed {name}, which only the run"),
        run.forbid_changes("bad"),
    ):
        harm(run.path / name, how)
    assert RunDir.open(run.path).manifest["spoiled"] == "bad"


def test_other_files_and_errors_do_not_spoil_the_run(run):
    with run.forbid_changes("good"):
        (run.path / "report.md").write_text("of the user's")
    with pytest.raises(KeyError), run.forbid_changes("good"):
        raise KeyError
    assert "spoiled" not in run.manifest


def test_registered_run_is_listed_until_its_folder_is_deleted(tmp_path):
    root, chosen = tmp_path / "results/runs", tmp_path / "mine"
    RunDir.create(root / "usual", {}).close("finished")
    RunDir.create(chosen, {}).close("finished")
    for path in (chosen, chosen, root / "usual"):
        register_run(path, root)
    assert list_runs(root) == [root / "usual", chosen]
    assert find_latest(root) == chosen
    shutil.rmtree(chosen)
    assert list_runs(root) == [root / "usual"]


def test_registering_a_run_in_an_unusable_folder_is_ignored(tmp_path):
    (tmp_path / "results").write_text("a file")
    register_run(tmp_path / "mine", tmp_path / "results/runs")
    assert list_runs(tmp_path / "results/runs") == []

"""Tests that a run keeps foreign files, follows no links, and has only one writer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from specbench_cli import files
from specbench_cli.errors import ConcurrentWriteError, ExitCode, UsageError
from specbench_cli.store import jsonl, matrix
from specbench_cli.store.lock import LOCK, LOCK_WAIT_S, Lock
from specbench_cli.store.run_dir import Prompt, RunDir, register_run

ORDER = '{"methods":[{"name":"sps"}],"tasks":["mini"],"target":"embedded"}'
OURS = (".lock", ".resume.json", ".manifest.json.new", ".manifest.json.0123abcd.new")
MINE = "a user's own words\n"
PROMPT = Prompt("mini/1", "mini/1", "mini", "qa", "lexicon", 1, "Why?", [1])


@pytest.fixture
def run(tmp_path):
    run = RunDir.create(tmp_path / "run", {}, resume_config=ORDER)
    yield run
    run.release()


@pytest.fixture
def victim(tmp_path):
    """A file outside the run, without a final line break."""
    file = tmp_path / "victim.txt"
    file.write_text("precious")
    return file


def snapshot(folder):
    return {
        file.name: file.readlink() if file.is_symlink() else file.read_bytes()
        for file in folder.iterdir()
        if file.is_symlink() or file.is_file()
    }


# A new run


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    "content",
    [MINE, "", "{}", '{"pid": 1}', '{"cut', "[]", "\x00\xff", '{"pid": 1, "host": "a", "b": 1}'],
)
def test_folder_with_a_users_file_of_a_reserved_name_is_rejected_and_kept(tmp_path, name, content):
    if (name == OURS[-1] and content in ("", '{"cut')) or (name == ".lock" and not content):
        return  # a killed process may leave such a file, so it is replaced
    (tmp_path / name).write_text(content)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="not empty, but contains no run"):
        RunDir.create(tmp_path, {}, resume_config=ORDER)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("link", ["symbolic", "dangling", "hard"])
def test_folder_with_a_link_of_a_reserved_name_is_rejected_and_its_target_kept(
    tmp_path, victim, name, link
):
    folder = tmp_path / "run"
    folder.mkdir()
    content = json.dumps({"pid": 1, "host": "a"}) if name == ".lock" else ORDER
    victim.write_text(content)
    if link == "hard":
        os.link(victim, folder / name)
    else:
        target = victim if link == "symbolic" else tmp_path / "not there"
        (folder / name).symlink_to(target)
    if name == OURS[-1] and link == "hard":
        return  # removing one of two hard links loses nothing
    with pytest.raises(UsageError, match="not empty, but contains no run"):
        RunDir.create(folder, {}, resume_config=ORDER)
    assert victim.read_text() == content
    assert not (tmp_path / "not there").exists()
    assert (folder / name).is_symlink() or link == "hard"


@pytest.mark.parametrize("name", OURS)
def test_folder_with_another_kind_of_file_of_a_reserved_name_is_rejected(tmp_path, name):
    for place, make in enumerate((os.mkdir, os.mkfifo, _socket)):
        folder = tmp_path / str(place)
        folder.mkdir()
        make(folder / name)
        with pytest.raises(UsageError, match="not empty, but contains no run"):
            RunDir.create(folder, {}, resume_config=ORDER)
        assert [file.name for file in folder.iterdir()] == [name]


def _socket(path):
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 108 bytes at most
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


# A run that is resumed


@pytest.mark.parametrize("name", ["records.jsonl", "prompts.jsonl"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_file_outside_is_not_appended_to_through_a_link(run, victim, make_record, name, link):
    link(victim, run.path / name)
    with pytest.raises(UsageError, match=f"{name} is a link"):
        run.append([make_record()]) if name[0] == "r" else run.append_prompts([PROMPT])
    assert victim.read_text() == "precious"


def test_no_file_is_created_through_a_dangling_link(run, tmp_path, make_record):
    (run.path / "records.jsonl").symlink_to(tmp_path / "made")
    with pytest.raises(UsageError, match="is a link"):
        run.append([make_record()])
    assert not (tmp_path / "made").exists()


def test_pipe_in_place_of_the_records_does_not_block(run, make_record):
    os.mkfifo(run.path / "records.jsonl")
    with pytest.raises(UsageError, match="is not a file"):
        run.append([make_record()])


def test_manifest_that_is_a_link_is_replaced_and_its_target_kept(run, victim):
    shutil.copy(run.path / "manifest.json", victim)
    before = victim.read_text()
    (run.path / "manifest.json").unlink()
    (run.path / "manifest.json").symlink_to(victim)
    run.close("finished")
    assert victim.read_text() == before
    assert not (run.path / "manifest.json").is_symlink()


@pytest.mark.parametrize("content", [MINE, "{}", '{"mine": 1}', "[]"])
def test_users_file_with_the_name_of_a_temporary_file_is_kept(run, content):
    files = [run.path / name for name in (OURS[-1], ".resume.json.0123abcd.new")]
    for file in files:
        file.write_text(content)
    run.release()
    run.acquire_lock()
    assert [file.read_text() for file in files] == [content, content]


def test_records_that_another_program_keeps_locked_stop_the_run_with_a_hint(
    run, make_record, monkeypatch
):
    monkeypatch.setattr(jsonl, "LOCK_WAIT_S", 0.1)
    run.append([make_record()])
    before = (run.path / "records.jsonl").read_bytes()
    with (run.path / "records.jsonl").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(ConcurrentWriteError, match="locked by another program") as caught:
            run.append([make_record(prompt_id="mini/2")])
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert f"specbench run --resume {run.path}" in caught.value.hint
    assert (run.path / "records.jsonl").read_bytes() == before


def test_users_file_with_an_old_temporary_name_is_kept(run):
    (run.path / ".manifest.json.new").write_text(MINE)
    run.close("finished")
    assert (run.path / ".manifest.json.new").read_text() == MINE


@pytest.mark.parametrize("content", [MINE, "", "{}"])
def test_users_file_with_the_name_of_the_resume_file_is_kept(run, content):
    (run.path / ".resume.json").write_text(content)
    run.remove_resume_config()
    assert (run.path / ".resume.json").read_text() == content


def test_resume_file_of_a_finished_run_is_removed(run):
    run.remove_resume_config()
    assert not (run.path / ".resume.json").exists()


@pytest.mark.parametrize("content", [MINE, " ", '{"pid": 1}'])
def test_users_file_with_the_name_of_the_lock_is_kept(run, content):
    run.release()
    (run.path / ".lock").write_text(content)
    with pytest.raises(UsageError, match=r"\.lock was not written by|written to by process unkn"):
        run.acquire_lock()
    assert (run.path / ".lock").read_text() == content


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_lock_that_is_a_link_is_rejected_and_its_target_kept(run, victim, link):
    run.release()
    link(victim, run.path / ".lock")
    with pytest.raises(UsageError, match="is a link"):
        run.acquire_lock()
    assert victim.read_text() == "precious"
    assert (run.path / ".lock").exists()


def test_run_that_fails_at_once_removes_only_its_own_files(run, victim):
    (run.path / ".resume.json").unlink()
    os.link(victim, run.path / ".resume.json")
    (run.path / "notes.md").write_text(MINE)
    run.discard()
    assert {file.name for file in run.path.iterdir()} == {".resume.json", "notes.md"}
    assert victim.read_text() == "precious"


def test_list_of_runs_elsewhere_is_not_written_through_a_link(tmp_path, victim):
    root = tmp_path / "results/runs"
    root.mkdir(parents=True)
    (root / ".elsewhere").symlink_to(victim)
    register_run(tmp_path / "mine", root)
    assert victim.read_text() == "precious"


# A matrix


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/tmp", ""])
def test_run_of_a_matrix_is_a_folder_inside(tmp_path, name):
    (tmp_path / "matrix.json").write_text(json.dumps({"runs": [name]}))
    with pytest.raises(UsageError, match="is damaged"):
        matrix.run_folders(tmp_path)


def test_run_of_a_matrix_is_no_link_to_another_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix/a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "matrix/matrix.json").write_text('{"runs": ["a"]}')
    with pytest.raises(UsageError, match="is a link"):
        matrix.run_folders(tmp_path / "matrix")


@pytest.mark.parametrize("end", [matrix.finish, matrix.discard])
def test_users_file_with_the_name_of_a_matrix_file_is_kept(tmp_path, end):
    matrix.create(tmp_path / "m", matrix.MatrixConfig({"a": ORDER}, {}))
    (tmp_path / "m/.matrix.resume.json").write_text(MINE)
    end(tmp_path / "m")
    assert (tmp_path / "m/.matrix.resume.json").read_text() == MINE


# There is one writer even if the lock is removed


def open_second_writer(run):
    """Return the run as another process opens it after the lock was removed."""
    (run.path / ".lock").unlink()
    other = RunDir.open(run.path)
    other.acquire_lock()
    return other


def test_writer_without_its_lock_stops_writing(run, make_record):
    run.append([make_record()])
    (run.path / ".lock").unlink()
    with pytest.raises(ConcurrentWriteError, match=r"\.lock was removed or replaced") as caught:
        run.append([make_record(turn=2)])
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert f"--resume {run.path}" in caught.value.hint
    assert [record.turn for record in run.records()] == [1]


@pytest.mark.parametrize(
    "write",
    [
        lambda run, record: run.append([record]),
        lambda run, record: run.update(noisy=True),
        lambda run, record: run.close("interrupted"),
        lambda run, record: run.discard(),
        lambda run, record: run.check_lock(),
    ],
)
def test_first_writer_without_its_lock_changes_no_file(run, make_record, write):
    other = open_second_writer(run)
    other.append([make_record()])
    before = snapshot(run.path)
    with pytest.raises(ConcurrentWriteError):
        write(run, make_record(turn=2))
    run.release()
    assert snapshot(run.path) == before
    other.release()


def test_replaced_lock_is_detected(run, make_record, tmp_path):
    content = (run.path / ".lock").read_bytes()
    (tmp_path / "copy").write_bytes(content)
    (tmp_path / "copy").replace(run.path / ".lock")
    with pytest.raises(ConcurrentWriteError):
        run.append([make_record()])


def test_lock_replaced_by_a_link_is_detected(run, make_record, tmp_path):
    (run.path / ".lock").rename(tmp_path / "kept")
    (run.path / ".lock").symlink_to(tmp_path / "kept")
    with pytest.raises(ConcurrentWriteError):
        run.append([make_record()])


def test_records_of_a_finished_second_writer_are_detected(run, make_record):
    run.append([make_record()])
    lock = (run.path / ".lock").rename(run.path.parent / "kept")
    other = RunDir.open(run.path)
    other.acquire_lock()
    other.append([make_record(turn=2)])
    other.release()
    lock.rename(run.path / ".lock")  # the first lock is back in its place
    with pytest.raises(ConcurrentWriteError, match="another program changed it"):
        run.append([make_record(turn=2)])
    assert [record.turn for record in RunDir.open(run.path).records()] == [1, 2]


def test_second_writer_detects_later_records_of_the_first(run, make_record):
    other = RunDir.open(run.path)
    other._watched = run.lock  # between the check and the write of the first writer
    other.read_output_ids()
    run.append([make_record()])
    with pytest.raises(ConcurrentWriteError, match="another program changed it"):
        other.append([make_record()])
    assert len(list(run.records())) == 1


@pytest.mark.parametrize("keep", [0, 1])
def test_records_removed_during_a_run_are_detected_at_the_next_append(run, make_record, keep):
    run.append([make_record(turn=1), make_record(turn=2)])
    file = run.path / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True)[:keep]
    file.write_text("".join(lines)) if keep else file.unlink()
    with pytest.raises(ConcurrentWriteError, match="another program changed it"):
        run.append([make_record(turn=3)])


def test_repeat_process_writes_only_while_its_parent_has_the_lock(run, make_record):
    own = RunDir.open(run.path)
    own.share_parent_lock()
    own.append([make_record()])
    (run.path / ".lock").unlink()
    with pytest.raises(ConcurrentWriteError):
        own.append([make_record(turn=2)])
    with pytest.raises(ConcurrentWriteError):
        RunDir.open(run.path).share_parent_lock()


def test_repeat_process_does_not_write_without_its_parent(run):
    (run.path / ".lock").write_text('{"pid": 1, "host": "elsewhere"}')
    with pytest.raises(ConcurrentWriteError):
        RunDir.open(run.path).share_parent_lock()


def test_nested_run_writes_only_while_the_outer_lock_is_held(run, make_record):
    trial = RunDir.create(run.path / "tuning", {})
    trial.share_lock_of(run)
    trial.append([make_record()])
    (run.path / ".lock").unlink()
    with pytest.raises(ConcurrentWriteError):
        trial.append([make_record(turn=2)])


@pytest.mark.parametrize("content", [b"", b'{"pid": 12', b'{"pid": 12, "host": "a'])
def test_half_written_lock_of_a_killed_process_is_taken_over(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    lock = Lock(tmp_path)
    lock.check()
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_empty_lock_that_a_killed_process_left_is_taken_over(run, tmp_path):
    run.release()
    (run.path / LOCK).touch()
    again = RunDir.open(run.path)
    again.acquire_lock()
    assert json.loads((run.path / LOCK).read_text())["pid"] == os.getpid()
    with pytest.raises(UsageError, match=f"written to by process {os.getpid()} on "):
        RunDir.open(run.path).acquire_lock()
    again.release()
    assert not (run.path / LOCK).exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / LOCK).touch()
    RunDir.create(tmp_path / "new", {}, resume_config=ORDER).release()


def test_empty_lock_of_a_live_process_is_not_taken_over(run):
    run.release()
    with (run.path / LOCK).open("w") as file:  # as on a full disk
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="written to by process unknown"):
            RunDir.open(run.path).acquire_lock()
        assert not (run.path / LOCK).read_text()


def test_lock_has_the_name_of_its_holder(tmp_path, monkeypatch):
    """Another process may open the file before its creator locks it."""
    opened = files.open_own

    def open_after_another(path, flags):
        fd = opened(path, flags)
        monkeypatch.setattr(files, "open_own", opened)
        others.append(Lock(tmp_path))
        (tmp_path / "name").write_bytes((tmp_path / LOCK).read_bytes())
        return fd

    others = []
    monkeypatch.setattr(files, "open_own", open_after_another)
    with pytest.raises(UsageError, match="is being written to by process"):
        Lock(tmp_path)
    assert (tmp_path / LOCK).read_bytes() == (tmp_path / "name").read_bytes() != b""
    others[0].check()
    others[0].release()


def test_only_one_of_many_processes_takes_over_an_empty_lock(tmp_path):
    for _ in range(10):
        (tmp_path / LOCK).touch()
        start, ready = os.pipe()
        children = [os.fork() or _contend(tmp_path, start, ready) for _ in range(6)]
        os.close(start)
        os.close(ready)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sorted(codes) == [0, 2, 2, 2, 2, 2]
        assert (tmp_path / LOCK).exists()  # the holder was killed


def _contend(folder, start, ready):
    os.close(ready)
    os.read(start, 1)  # all processes start at the same time
    try:
        Lock(folder)
    except UsageError:
        os._exit(2)
    time.sleep(2 * LOCK_WAIT_S)
    os._exit(0)

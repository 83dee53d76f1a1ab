"""Reads of files that the user names are limited; files of the user are not replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from specbench_cli import files
from specbench_cli.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "out"
    made.mkdir()
    return made


@pytest.fixture
def victim(tmp_path):
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


def deliver(folder, content="new", name="report.md", **more):
    with files.staging_folder(folder, **more) as staging:
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text(content)


def deliver_several(folder, fault=None):
    with files.staging_folder(folder) as staging:
        for name in "abc":
            (staging / name).write_text("new")
        if fault is not None:
            raise fault


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_files_are_delivered_listed_and_replaced_by_later_ones(folder):
    deliver(folder, "first", "figures/a.svg")
    deliver(folder, "second", "figures/a.svg")
    assert (folder / "figures/a.svg").read_text() == "second"
    assert names(folder) == [files.FILE_LIST, "figures"]


def test_folder_is_made(tmp_path):
    deliver(tmp_path / "a/b")
    assert (tmp_path / "a/b/report.md").read_text() == "new"


def test_mode_of_a_file_is_the_usual_one(folder):
    deliver(folder)
    before = os.umask(0)
    os.umask(before)
    for name in ("report.md", files.FILE_LIST):
        assert (folder / name).stat().st_mode & 0o777 == 0o666 & ~before


def test_user_s_file_is_refused_and_nothing_is_written(folder):
    (folder / "report.md").write_text("mine")
    with pytest.raises(UsageError, match=r"report\.md: specbench did not write this") as caught:
        deliver(folder)
    assert "--overwrite" in caught.value.hint
    assert (folder / "report.md").read_text() == "mine"
    assert names(folder) == ["report.md"]


def test_one_user_s_file_among_several_keeps_all_back(folder):
    (folder / "b").write_text("mine")
    with pytest.raises(UsageError):
        deliver_several(folder)
    assert names(folder) == ["b"]


def test_file_that_was_changed_since_is_the_user_s(folder):
    deliver(folder)
    (folder / "report.md").write_text("new, and my notes")
    with pytest.raises(UsageError, match="changed since"):
        deliver(folder, "newer")
    assert (folder / "report.md").read_text() == "new, and my notes"


def test_file_with_the_same_content_is_no_loss(folder):
    (folder / "report.md").write_text("new")
    deliver(folder)
    deliver(folder, "newer")
    assert (folder / "report.md").read_text() == "newer"


def test_user_s_file_is_replaced_if_that_is_permitted(folder):
    (folder / "report.md").write_text("mine")
    deliver(folder, overwrite=True)
    assert (folder / "report.md").read_text() == "new"


def test_user_s_file_is_kept_and_named_where_the_others_matter_more(folder):
    (folder / "a").write_text("mine")
    kept = []
    with files.staging_folder(folder, not_replaced=kept) as staging:
        (staging / "a").write_text("new")
        (staging / "b").write_text("new")
    assert kept == [folder / "a"]
    assert [(folder / name).read_text() for name in "ab"] == ["mine", "new"]
    with pytest.raises(UsageError):
        deliver(folder, "newer", "a")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_target_of_a_link_is_never_written(folder, victim, link, overwrite):
    link(victim, folder / "report.md")
    try:
        deliver(folder, overwrite=overwrite)
    except UsageError:
        assert not overwrite
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_that_is_a_link_is_not_written_into(folder, tmp_path, overwrite):
    (tmp_path / "elsewhere").mkdir()
    (folder / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        deliver(folder, name="figures/deep/a.svg", overwrite=overwrite)
    assert not names(tmp_path / "elsewhere")


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_in_place_of_a_file_and_file_in_place_of_a_folder_stay(folder, overwrite):
    (folder / "report.md").mkdir()
    (folder / "report.md/notes").write_text("mine")
    (folder / "figures").write_text("mine")
    for name in ("report.md", "figures/a.svg"):
        with pytest.raises(UsageError):
            deliver(folder, name=name, overwrite=overwrite)
    assert (folder / "report.md/notes").read_text() == (folder / "figures").read_text() == "mine"


@pytest.mark.parametrize("content", ["mine", "{}", '{"files": {}}', '{"about": 1, "files": []}'])
def test_user_s_file_of_the_list_s_name_is_kept(folder, content):
    (folder / files.FILE_LIST).write_text(content)
    with pytest.raises(UsageError, match=r"\.specbench\.json: specbench did not write"):
        deliver(folder)
    assert (folder / files.FILE_LIST).read_text() == content


def test_list_that_is_a_link_is_refused(folder, victim):
    (folder / files.FILE_LIST).symlink_to(victim)
    with pytest.raises(UsageError, match="is a link"):
        deliver(folder)
    assert victim.read_text() == "precious"


def test_list_of_a_foreign_folder_cannot_name_files_outside(folder, victim):
    deliver(folder)
    text = (folder / files.FILE_LIST).read_text().replace("report.md", "../victim")
    (folder / files.FILE_LIST).write_text(text)
    deliver(folder, "new", "other")
    assert victim.read_text() == "precious"


def test_failure_leaves_nothing_behind(folder):
    with pytest.raises(KeyError):
        deliver_several(folder, fault=KeyError())
    assert not names(folder)


def test_files_of_a_killed_process_are_removed_by_the_next_one(folder):
    (child := os.fork()) or killed_while_it_delivers(folder)
    os.waitpid(child, 0)
    (left,) = folder.iterdir()
    other = folder / left.name.replace(str(child), str(os.getpid()))
    shutil.copytree(left, other)  # of a process that is still at it
    deliver(folder)
    assert names(folder) == sorted([other.name, files.FILE_LIST, "report.md"])


def test_user_s_folder_with_the_name_of_a_temporary_one_is_kept(folder):
    (child := os.fork()) or os._exit(0)
    os.waitpid(child, 0)
    mine = folder / f"{files._staging_prefix()}{child}-mine"
    mine.mkdir()
    (mine / "notes").write_text("precious")
    deliver(folder)
    assert (mine / "notes").read_text() == "precious"


def test_folder_with_an_empty_mark_and_files_is_a_user_s(folder):
    (child := os.fork()) or os._exit(0)
    os.waitpid(child, 0)
    mine = folder / f"{files._staging_prefix()}{child}-mine"
    (mine / "files").mkdir(parents=True)
    (mine / "about").touch()
    (mine / "files" / "notes").write_text("precious")
    deliver(folder)
    assert (mine / "files" / "notes").read_text() == "precious"


def test_list_of_files_is_no_name_for_a_result(folder):
    with pytest.raises(UsageError, match="is the list of the files"):
        files.write_listed(folder / files.FILE_LIST, "{}")
    assert not (folder / files.FILE_LIST).exists()


def killed_while_it_delivers(folder):
    with files.staging_folder(folder) as staging:
        (staging / "a").write_text("new")
        os._exit(9)


def test_file_is_replaced_atomically(folder, monkeypatch):
    files.replace(folder / "a", "first")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        files.replace(folder / "a", "second")
    assert caught.value.filename == str(folder / "a")
    assert (folder / "a").read_text() == "first"
    assert names(folder) == ["a"]


def test_link_is_replaced_and_its_target_kept(folder, victim):
    (folder / "a").symlink_to(victim)
    files.replace(folder / "a", "new")
    assert (victim.read_text(), (folder / "a").read_text()) == ("precious", "new")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_opened(folder, make):
    make(folder / "a")
    with pytest.raises(UsageError):
        files.open_own(folder / "a", os.O_RDWR)
    with pytest.raises(UsageError):
        files.check_own(folder / "a", lambda _: True)


def test_file_is_written_in_place_of_one_s_own_alone(folder):
    def own(content):
        return content.startswith(b"specbench")

    files.write_own(folder / "x/a", "specbench 1", own)
    files.write_own(folder / "x/a", "specbench 2", own)
    (folder / "x/a").write_text("mine")
    with pytest.raises(UsageError, match="did not write this"):
        files.write_own(folder / "x/a", "specbench 3", own)
    assert (folder / "x/a").read_text() == "mine"
    files.write_own(folder / "x/a", "specbench 3", own, overwrite=True)
    assert (folder / "x/a").read_text() == "specbench 3"


def test_own_file_alone_is_removed(folder, victim):
    for name, content in (("a", "ours"), ("b", "mine")):
        (folder / name).write_text(content)
    (folder / "c").symlink_to(victim)
    for name in "abcd":
        files.remove_own(folder / name, lambda content: content == b"ours")
    assert names(folder) == ["b", "c"]


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("ü\r\nb\rc\n".encode())
    assert files.read_text(tmp_path / "a.txt", 100) == "ü\nb\nc\n"
    assert files.read_bytes(tmp_path / "a.txt", 9) == "ü\r\nb\rc\n".encode()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom"])
def test_a_device_without_an_end_is_refused_once_it_is_too_large(tmp_path, path):
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="it has more than 1 MB"):
        files.read_bytes(tmp_path / "link", files.MB)


def test_a_large_file_is_refused(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10 * files.MB)
    with pytest.raises(OSError, match="it has more than 1 MB"):
        files.read_bytes(tmp_path / "large", files.MB)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path, files.MB)


def test_a_pipe_is_read_to_its_end():
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as file:
        file.write(b"x" * 50_000)  # less than a pipe holds
    assert files.read_bytes(Path(f"/dev/fd/{read_end}"), files.MB) == b"x" * 50_000
    os.close(read_end)


def test_a_pipe_that_stays_silent_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(OSError, match=r"nothing was written to it for 0\.05 s"):
        files.read_bytes(tmp_path / "pipe", files.MB)
    os.close(writer)


def test_a_pipe_without_a_writer_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert files.read_bytes(tmp_path / "pipe", files.MB) == b""


def dead_staging(folder):
    """Return a temporary folder of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    left = folder / f"{files._staging_prefix()}{process.pid}-x"
    left.mkdir()
    return left


@pytest.mark.parametrize("names", [[], ["about"], ["about", "files"], ["about", "list"]])
def test_a_killed_process_leaves_nothing_for_longer_than_the_next_command(folder, names):
    left = dead_staging(folder)
    for name in names:
        (left / name).mkdir() if name == "files" else (left / name).touch()
    deliver(folder)
    assert sorted(each.name for each in folder.glob(".*")) == [files.FILE_LIST]


def test_a_list_of_files_is_never_half_written_beside_them(folder, monkeypatch):
    seen = []

    def watched(path, content, write=files.replace):
        write(path, content)
        seen.append(path.parent)

    monkeypatch.setattr(files, "replace", watched)
    deliver(folder)
    assert folder not in seen

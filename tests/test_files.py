"""Tests of bounded reads of the user's files, and of writes that never replace them."""

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
    out_folder = tmp_path / "out"
    out_folder.mkdir()
    return out_folder


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


def write_report(folder, content="new", name="report.md", **more):
    with files.staging_folder(folder, **more) as staging:
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text(content)


def write_several(folder, fault=None):
    with files.staging_folder(folder) as staging:
        for name in "abc":
            (staging / name).write_text("new")
        if fault is not None:
            raise fault


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_files_are_written_listed_and_replaced_by_later_ones(folder):
    write_report(folder, "first", "figures/a.svg")
    write_report(folder, "second", "figures/a.svg")
    assert (folder / "figures/a.svg").read_text() == "second"
    assert names(folder) == [files.FILE_LIST, "figures"]


def test_a_missing_folder_is_created(tmp_path):
    write_report(tmp_path / "a/b")
    assert (tmp_path / "a/b/report.md").read_text() == "new"


def test_files_have_the_mode_of_the_umask(folder):
    write_report(folder)
    umask = os.umask(0)
    os.umask(umask)
    for name in ("report.md", files.FILE_LIST):
        assert (folder / name).stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_of_the_user_stops_the_write(folder):
    (folder / "report.md").write_text("mine")
    with pytest.raises(UsageError, match=r"report\.md: specbench did not write this") as caught:
        write_report(folder)
    assert "--overwrite" in caught.value.hint
    assert (folder / "report.md").read_text() == "mine"
    assert names(folder) == ["report.md"]


def test_one_file_of_the_user_stops_the_write_of_all_files(folder):
    (folder / "b").write_text("mine")
    with pytest.raises(UsageError):
        write_several(folder)
    assert names(folder) == ["b"]


def test_a_changed_file_counts_as_the_users(folder):
    write_report(folder)
    (folder / "report.md").write_text("new, and my notes")
    with pytest.raises(UsageError, match="changed since"):
        write_report(folder, "newer")
    assert (folder / "report.md").read_text() == "new, and my notes"


def test_a_user_file_of_the_same_content_may_be_replaced(folder):
    (folder / "report.md").write_text("new")
    write_report(folder)
    write_report(folder, "newer")
    assert (folder / "report.md").read_text() == "newer"


def test_overwrite_replaces_a_file_of_the_user(folder):
    (folder / "report.md").write_text("mine")
    write_report(folder, overwrite=True)
    assert (folder / "report.md").read_text() == "new"


def test_with_not_replaced_a_user_file_is_kept_and_named(folder):
    (folder / "a").write_text("mine")
    not_replaced_files = []
    with files.staging_folder(folder, not_replaced=not_replaced_files) as staging:
        (staging / "a").write_text("new")
        (staging / "b").write_text("new")
    assert not_replaced_files == [folder / "a"]
    assert [(folder / name).read_text() for name in "ab"] == ["mine", "new"]
    with pytest.raises(UsageError):
        write_report(folder, "newer", "a")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_target_of_a_link_is_never_written(folder, user_file, link, overwrite):
    link(user_file, folder / "report.md")
    try:
        write_report(folder, overwrite=overwrite)
    except UsageError:
        assert not overwrite
    assert user_file.read_text() == "precious"


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_that_is_a_link_is_not_written_into(folder, tmp_path, overwrite):
    (tmp_path / "elsewhere").mkdir()
    (folder / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        write_report(folder, name="figures/deep/a.svg", overwrite=overwrite)
    assert not names(tmp_path / "elsewhere")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_never_replaces_a_file_nor_a_file_a_folder(folder, overwrite):
    (folder / "report.md").mkdir()
    (folder / "report.md/notes").write_text("mine")
    (folder / "figures").write_text("mine")
    for name in ("report.md", "figures/a.svg"):
        with pytest.raises(UsageError):
            write_report(folder, name=name, overwrite=overwrite)
    assert (folder / "report.md/notes").read_text() == (folder / "figures").read_text() == "mine"


@pytest.mark.parametrize("content", ["mine", "{}", '{"files": {}}', '{"about": 1, "files": []}'])
def test_a_user_file_with_the_name_of_the_file_list_is_kept(folder, content):
    (folder / files.FILE_LIST).write_text(content)
    with pytest.raises(UsageError, match=r"\.specbench\.json: specbench did not write"):
        write_report(folder)
    assert (folder / files.FILE_LIST).read_text() == content


def test_a_file_list_that_is_a_link_is_refused(folder, user_file):
    (folder / files.FILE_LIST).symlink_to(user_file)
    with pytest.raises(UsageError, match="is a link"):
        write_report(folder)
    assert user_file.read_text() == "precious"


def test_a_file_list_cannot_name_files_outside_its_folder(folder, user_file):
    write_report(folder)
    text = (folder / files.FILE_LIST).read_text().replace("report.md", "../victim")
    (folder / files.FILE_LIST).write_text(text)
    write_report(folder, "new", "other")
    assert user_file.read_text() == "precious"


def test_a_failed_write_leaves_no_files(folder):
    with pytest.raises(KeyError):
        write_several(folder, fault=KeyError())
    assert not names(folder)


def test_files_of_a_killed_process_are_removed_by_the_next_one(folder):
    (child := os.fork()) or die_while_writing(folder)
    os.waitpid(child, 0)
    (left_folder,) = folder.iterdir()
    other = folder / left_folder.name.replace(str(child), str(os.getpid()))
    shutil.copytree(left_folder, other)  # the folder of a process that is still running
    write_report(folder)
    assert names(folder) == sorted([other.name, files.FILE_LIST, "report.md"])


def test_a_user_folder_named_like_a_temporary_one_is_kept(folder):
    (child := os.fork()) or os._exit(0)
    os.waitpid(child, 0)
    user_folder = folder / f"{files._staging_prefix()}{child}-mine"
    user_folder.mkdir()
    (user_folder / "notes").write_text("precious")
    write_report(folder)
    assert (user_folder / "notes").read_text() == "precious"


def test_a_folder_with_an_empty_marker_and_files_is_the_users(folder):
    (child := os.fork()) or os._exit(0)
    os.waitpid(child, 0)
    user_folder = folder / f"{files._staging_prefix()}{child}-mine"
    (user_folder / "files").mkdir(parents=True)
    (user_folder / "about").touch()
    (user_folder / "files" / "notes").write_text("precious")
    write_report(folder)
    assert (user_folder / "files" / "notes").read_text() == "precious"


def test_a_result_cannot_have_the_name_of_the_file_list(folder):
    with pytest.raises(UsageError, match="is the list of the files"):
        files.write_listed(folder / files.FILE_LIST, "{}")
    assert not (folder / files.FILE_LIST).exists()


def die_while_writing(folder):
    with files.staging_folder(folder) as staging:
        (staging / "a").write_text("new")
        os._exit(9)


def test_a_file_is_replaced_atomically(folder, monkeypatch):
    files.replace(folder / "a", "first")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        files.replace(folder / "a", "second")
    assert caught.value.filename == str(folder / "a")
    assert (folder / "a").read_text() == "first"
    assert names(folder) == ["a"]


def test_a_link_is_replaced_and_its_target_kept(folder, user_file):
    (folder / "a").symlink_to(user_file)
    files.replace(folder / "a", "new")
    assert (user_file.read_text(), (folder / "a").read_text()) == ("precious", "new")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_opened(folder, make):
    make(folder / "a")
    with pytest.raises(UsageError):
        files.open_own(folder / "a", os.O_RDWR)
    with pytest.raises(UsageError):
        files.check_own(folder / "a", lambda _: True)


def test_write_own_replaces_only_files_of_specbench(folder):
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


def test_remove_own_removes_only_files_of_specbench(folder, user_file):
    for name, content in (("a", "ours"), ("b", "mine")):
        (folder / name).write_text(content)
    (folder / "c").symlink_to(user_file)
    for name in "abcd":
        files.remove_own(folder / name, lambda content: content == b"ours")
    assert names(folder) == ["b", "c"]


def test_text_has_normalized_line_breaks_and_bytes_are_unchanged(tmp_path):
    (tmp_path / "a.txt").write_bytes("ü\r\nb\rc\n".encode())
    assert files.read_text(tmp_path / "a.txt", 100) == "ü\nb\nc\n"
    assert files.read_bytes(tmp_path / "a.txt", 9) == "ü\r\nb\rc\n".encode()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom"])
def test_an_endless_device_is_refused(tmp_path, path):
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


def test_the_wait_for_a_silent_pipe_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(OSError, match=r"nothing was written to it for 0\.05 s"):
        files.read_bytes(tmp_path / "pipe", files.MB)
    os.close(writer)


def test_a_pipe_without_a_writer_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert files.read_bytes(tmp_path / "pipe", files.MB) == b""


def make_dead_staging(folder):
    """Return a temporary folder of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    left_folder = folder / f"{files._staging_prefix()}{process.pid}-x"
    left_folder.mkdir()
    return left_folder


@pytest.mark.parametrize("names", [[], ["about"], ["about", "files"], ["about", "list"]])
def test_the_next_command_removes_the_folder_of_a_killed_process(folder, names):
    left_folder = make_dead_staging(folder)
    for name in names:
        (left_folder / name).mkdir() if name == "files" else (left_folder / name).touch()
    write_report(folder)
    assert sorted(each.name for each in folder.glob(".*")) == [files.FILE_LIST]


def test_the_file_list_is_written_in_the_staging_folder(folder, monkeypatch):
    parents = []

    def record_replace(path, content, write=files.replace):
        write(path, content)
        parents.append(path.parent)

    monkeypatch.setattr(files, "replace", record_replace)
    write_report(folder)
    assert folder not in parents

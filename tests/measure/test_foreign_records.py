"""A run keeps only the records that its plan contains and that it wrote itself."""

from __future__ import annotations

import json
import resource
import shutil

import pytest

from specbench_cli.errors import ConcurrentWriteError, ExitCode, UsageError
from specbench_cli.measure import run as execute
from specbench_cli.plan.tune import FOLDER
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")


def append_copy(line, **change):
    """Return a file's lines with a copy of one, in which some keys have other values."""
    return lambda original: [*original, json.dumps({**json.loads(original[line]), **change}) + "\n"]


def change_times(line):
    """Return a file's lines with the same number of bytes, and other times in one of them."""

    def change(original):
        record = json.loads(original[line])
        names = ("total", "decode", "host")  # the same change, so that they still add up
        delta = -1 if any(str(record["ns"][name]).endswith("9") for name in names) else 1
        for name in names:
            record["ns"][name] += delta
        text = json.dumps(record, separators=(",", ":")) + "\n"
        assert len(text) == len(original[line])
        assert text != original[line]
        return [*original[:line], text, *original[line + 1 :]]

    return change


def edit(file, change):
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


OUTSIDE = [
    ({"pass": 2}, "has no prompt|has 1 repeats"),
    ({"pass": 1001}, "has 1 loads"),
    ({"seed": 3, "label": "vanilla", "turn": 9}, "has seed 0"),
    ({"label": "other"}, "method other"),
    ({"prompt_id": "mini/other", "cluster": "mini/other"}, "prompt mini/other"),
    ({"turn": 2}, "turn 2"),
]


@pytest.mark.parametrize(("change", "message"), OUTSIDE)
def test_record_outside_the_plan_prevents_resuming(specbench, change, message):
    path = interrupt_run(specbench)
    edit(path / "records.jsonl", append_copy(0, **change))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["status"] = "running"  # as a killed process leaves it
    (path / "manifest.json").write_text(json.dumps(manifest))
    before = (path / "records.jsonl").read_bytes()
    with pytest.raises(UsageError, match=rf"line 3 is not a valid record: .*({message})") as caught:
        specbench(resume=path)
    assert "sed -i 3d" in caught.value.hint
    assert (path / "records.jsonl").read_bytes() == before
    edit(path / "records.jsonl", lambda original: original[:-1])
    resumed = specbench(resume=path)
    assert resumed.exit_code == ExitCode.OK
    assert len(resumed.records) == 4


def interrupt_run(specbench, **config):
    with pytest.raises(KeyboardInterrupt):
        specbench("pld", log=specbench.log(interrupt_after=2), **config)
    return specbench.path(1)


def test_prompt_outside_the_plan_prevents_resuming(specbench):
    path = interrupt_run(specbench)
    edit(path / "prompts.jsonl", append_copy(0, turn=2))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["status"] = "running"
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UsageError, match=r"is not a valid prompt: the run has no prompt .* with turn 2"
    ):
        specbench(resume=path)


@pytest.mark.parametrize("change", [change for change, _ in OUTSIDE])
def test_record_outside_the_plan_is_rejected_in_a_finished_run(specbench, change):
    path = specbench("pld").path
    edit(path / "records.jsonl", append_copy(0, **change))
    for read in (RunDir.open(path).records, lambda: RunDir.open(path).map_records(str)):
        with pytest.raises(UsageError, match=r"records\.jsonl"):
            list(read())
    with pytest.raises(UsageError, match=r"records\.jsonl"):
        specbench(resume=path)


@pytest.fixture
def run_with_edit(specbench, monkeypatch):
    """Return a function that edits a file at the end of a run, and returns the run's error."""

    def run(change, *methods, folder="", log=None, **config):
        def edit_and_check(plan, run_dir, resumed=None):
            if run_dir.path == specbench.path(1) / folder:
                edit(run_dir.path / "records.jsonl", change)
            count(plan, run_dir, resumed)

        count = execute.check_complete
        with monkeypatch.context() as patch:
            patch.setattr(execute, "check_complete", edit_and_check)
            with pytest.raises((ConcurrentWriteError, UsageError)) as caught:
                specbench(*methods, log=log, **config)
        assert RunDir.open(specbench.path(1)).manifest["status"] != "finished"
        return caught.value

    return run


@pytest.mark.parametrize("change", [change for change, _ in OUTSIDE])
def test_record_outside_the_plan_is_an_error_at_the_end_of_a_run(run_with_edit, specbench, change):
    assert "records.jsonl" in run_with_edit(append_copy(0, **change), "pld").message
    edit(specbench.path(1) / "records.jsonl", lambda original: original[:-1])
    assert specbench(resume=specbench.path(1)).exit_code == ExitCode.OK


@pytest.mark.parametrize("line", [0, 1, 3])
def test_record_edited_during_a_run_is_detected_and_can_be_measured_again(
    run_with_edit, specbench, line
):
    error = run_with_edit(change_times(line), "pld")
    assert f"in line {line + 1}: another program changed it" in error.message
    with pytest.raises(UsageError, match=f"line {line + 1} is not a valid record: another program"):
        specbench(resume=specbench.path(1))
    edit(
        specbench.path(1) / "records.jsonl", lambda original: original[:line] + original[line + 1 :]
    )
    resumed = specbench(resume=specbench.path(1))
    assert resumed.exit_code == ExitCode.OK
    assert len(resumed.records) == 4


def test_edited_record_of_a_tuning_is_detected(run_with_edit):
    settings = {"limit": 4, "category": ["qa"], "tune": 2, "tune_by": "forwards"}
    error = run_with_edit(change_times(0), "pld", folder=FOLDER, **settings)
    assert f"{FOLDER}/records.jsonl has 1 records that this run did not write" in error.message


def test_removed_records_of_a_prompt_are_detected_with_stop_after(run_with_edit, specbench):
    def vanish(original):
        gone = json.loads(original[0])["prompt_id"]
        return [line for line in original if json.loads(line)["prompt_id"] != gone]

    error = run_with_edit(vanish, "pld", stop_after=1000)
    assert "records.jsonl lacks 2 records" in error.message
    resumed = specbench(resume=specbench.path(1))
    assert resumed.exit_code == ExitCode.OK
    assert len(resumed.records) == 4


def test_removed_record_of_a_dropped_method_is_detected(run_with_edit, monkeypatch):
    def vanish(original):
        return [line for line in original if json.loads(line)["label"] != "pld"]

    def find_dropped(plan, answered, manifest, wrote):
        return missing(plan, answered, {**manifest, "dropped": {"pld": "failed"}}, wrote)

    missing = execute.Plan.find_missing
    monkeypatch.setattr(execute.Plan, "find_missing", find_dropped)
    assert "lacks 2 records" in run_with_edit(vanish, "pld").message


def test_prompts_that_stop_after_left_out_are_not_missing(specbench):
    run = specbench("pld", stop_after=1e-9)
    assert run.exit_code == ExitCode.OK
    assert len(run.records) == 2


@pytest.mark.parametrize("line", [0, -1])
def test_edit_between_two_processes_of_a_run_is_detected(specbench, line):
    path = interrupt_run(specbench)
    original = (path / "records.jsonl").read_text().splitlines(keepends=True)
    edit(path / "records.jsonl", change_times(line % len(original)))
    with pytest.raises(UsageError, match="another program changed it"):
        specbench(resume=path)


def test_edit_of_a_finished_run_is_accepted_with_force_and_labelled(specbench):
    path = specbench("pld").path
    edit(path / "records.jsonl", change_times(3))
    with pytest.raises(UsageError, match="was changed after the run was finished") as caught:
        specbench(resume=path)
    assert "--force" in caught.value.hint
    execute.resume_run(path, specbench.log(), force=True)
    resumed = specbench(resume=path)
    assert resumed.manifest["mixed"] == ["records.jsonl (changed after the run was finished)"]
    assert not (path / ".lock").exists()


def test_copy_of_a_run_is_read_like_the_run(specbench, tmp_path):
    path = shutil.copytree(specbench("pld").path, tmp_path / "copy")
    assert len(list(RunDir.open(path).records())) == 4


def test_manifest_of_another_run_is_detected_and_replaced(specbench, monkeypatch):
    other = specbench("pld").path / "manifest.json"
    original = {**json.loads(other.read_text()), "created_utc": "2020-01-01T00:00:00+00:00"}
    started = execute.measure_repeat

    def measure_and_replace(plan, run_dir, *args, **kwargs):
        started(plan, run_dir, *args, **kwargs)
        (run_dir.path / "manifest.json").write_text(json.dumps(original))

    with monkeypatch.context() as patch:
        patch.setattr(execute, "measure_repeat", measure_and_replace)
        with pytest.raises(
            ConcurrentWriteError, match=r"manifest\.json is the manifest of another"
        ):
            specbench("pld")
    path = specbench.path(2)
    manifest = RunDir.open(path).manifest
    assert manifest["status"] == "interrupted"
    assert manifest["created_utc"] != original["created_utc"]
    resumed = specbench(resume=path)
    assert resumed.exit_code == ExitCode.OK
    assert len(resumed.records) == 4


@pytest.mark.parametrize("times", [1, 2])
def test_resume_file_removed_during_a_run_is_written_again(specbench, times):
    class Remove(specbench.log):
        def show_record(self, record):
            super().show_record(record)
            (specbench.path(1) / ".resume.json").unlink()
            raise KeyboardInterrupt

    for number in range(times):
        with pytest.raises(KeyboardInterrupt):
            specbench("pld", log=Remove(), resume=specbench.path(1) if number else None)
    resumed = specbench(resume=specbench.path(1))
    assert resumed.exit_code == ExitCode.OK
    assert len(resumed.records) == 4
    assert not (specbench.path(1) / ".resume.json").exists()


@pytest.mark.parametrize("name", ["copy", "moved"])
def test_folder_moved_during_a_run_can_be_resumed(specbench, tmp_path, name):
    class Move(specbench.log):
        def show_record(self, record):
            super().show_record(record)
            if len(self.record_keys) == 2:
                specbench.path(1).rename(tmp_path / "moved")
                if name == "copy":
                    shutil.copytree(tmp_path / "moved", specbench.path(1))

    with pytest.raises(ConcurrentWriteError, match=r"\.lock was removed or replaced"):
        specbench("pld", log=Move())
    path = specbench.path(1) if name == "copy" else tmp_path / "moved"
    assert len(list(RunDir.open(path).records())) == 2
    resumed = specbench(resume=path)
    assert resumed.exit_code == ExitCode.OK
    assert len(resumed.records) == 4


def test_records_of_another_run_of_the_same_plan_are_detected(specbench):
    path = interrupt_run(specbench)
    with pytest.raises(KeyboardInterrupt):
        specbench("pld", log=specbench.log(interrupt_after=2))
    shutil.copy(specbench.path(2) / "records.jsonl", path / "records.jsonl")
    with pytest.raises(
        UsageError, match="line 1 is not a valid record: another program changed it"
    ):
        specbench(resume=path)


def test_prompt_changed_during_a_run_is_detected_and_can_be_restored(specbench):
    original = []

    def swap(lines):
        original[:] = lines
        prompt = json.loads(lines[0])
        prompt["ids"][-2:] = prompt["ids"][:-3:-1]
        return [json.dumps(prompt, separators=(",", ":")) + "\n", *lines[1:]]

    class Change(specbench.log):
        def show_record(self, record):
            super().show_record(record)
            if len(self.record_keys) == 4:
                edit(specbench.path(1) / "prompts.jsonl", swap)

    with pytest.raises(
        UsageError, match="line 1 is not a valid prompt: another program changed it"
    ) as caught:
        specbench("pld", log=Change(), limit=1, category=["multi_turn"])
    assert "restore it from a copy" in caught.value.hint
    edit(specbench.path(1) / "prompts.jsonl", lambda _: original)
    assert specbench(resume=specbench.path(1)).exit_code == ExitCode.OK


def test_full_disk_keeps_complete_lines_for_resuming(specbench):
    path = interrupt_run(specbench)
    size = (path / "records.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(specbench.log):
        def stage(self, text):
            if text.startswith("warming"):  # room for one of two records
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3000, before[1]))

    try:
        with pytest.raises(OSError, match="File too large"):
            specbench(resume=path, log=Full())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (path / "records.jsonl").stat().st_size == size + 3000
    assert len(list(RunDir.open(path).records())) == 3
    assert len(specbench(resume=path).records) == 4

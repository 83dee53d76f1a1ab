"""Commands leave files that specbench did not write as they are, unless --overwrite is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.commands._progress import ProgressDisplay
from specbench_cli.commands.training._shared import MODEL_FILES, check_model, delete_work
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.files import FILE_LIST, staging_folder, write_listed
from specbench_cli.measure import run as execute
from specbench_cli.measure.costs import check_writable
from specbench_cli.report.outputs import write_outputs
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")
MINE = "mine: half a year's work\n"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    config = RunConfig(
        methods=["vanilla", "pld"], limit=1, max_new_tokens=8, allow_noise=True, judge="sample"
    )
    plan, run_dir = execute.start_run(config, {}, folder, ProgressDisplay())
    execute.measure_run(plan, run_dir, ProgressDisplay(), fresh=True)
    return folder


@pytest.fixture
def run(finished_run, tmp_path, monkeypatch):
    """Return a finished run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "run")
    return Path("run")


@pytest.fixture
def cli(capsys):
    def call(*args):
        code = app._run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return call


def get_prompt(run):
    return next(RunDir.open(run).prompts()).prompt_id


WRITES = {
    "report.md": ["report", "run", "--to", "md", "--out", "out"],
    "report.html": ["report", "run", "--to", "html", "--out", "out"],
    "latex/report.tex": ["report", "run", "--to", "latex", "--out", "out"],
    "latex/references.bib": ["report", "run", "--to", "latex", "--out", "out"],
    "summary.csv": ["report", "run", "--to", "csv", "--out", "out"],
    "summary.json": ["report", "run", "--to", "json", "--out", "out"],
    "trace.json": ["report", "run", "--prompt", "ID", "--method", "pld", "--out", "out"],
    "lanes.svg": ["report", "run", "--prompt", "ID", "--method", "pld", "--out", "out"],
    "compare.md": ["compare", "run", "run", "--to", "markdown,json", "--out", "out"],
    "compare.json": ["compare", "run", "run", "--to", "markdown,json", "--out", "out"],
}


@pytest.mark.parametrize("name", WRITES)
def test_user_s_file_is_replaced_only_with_overwrite(run, cli, name):
    words = [get_prompt(run) if word == "ID" else word for word in WRITES[name]]
    file = Path("out") / name
    file.parent.mkdir(parents=True)
    file.write_text(MINE)
    code, _, err = cli(*words)
    assert code == 2
    assert f"{file}" in err
    assert "--overwrite" in err
    assert file.read_text() == MINE
    assert [each for each in Path("out").rglob("*") if each.is_file()] == [file]
    assert cli(*words, "--overwrite")[0] == 0
    assert file.read_bytes() != MINE.encode()
    assert cli(*words)[0] == 0  # specbench replaces its own file


@pytest.mark.parametrize("form", ["markdown", "junit", "json"])
def test_file_of_a_comparison_is_replaced_by_a_later_one_and_a_user_s_is_not(run, cli, form):
    words = ["compare", "run", "run", "--to", form, "--out", "file"]
    for _ in range(2):
        assert cli(*words)[0] == 0
    Path("file").write_text(MINE)
    assert cli(*words)[0] == 2
    assert Path("file").read_text() == MINE
    assert cli(*words, "--overwrite")[0] == 0


@pytest.mark.parametrize("form", ["markdown", "junit", "json"])
def test_comparison_that_the_user_edited_stays(run, cli, form):
    words = ["compare", "run", "run", "--to", form, "--out", "file"]
    assert cli(*words)[0] == 0
    edited = Path("file").read_text() + " "
    Path("file").write_text(edited)
    code, _, err = cli(*words)
    assert (code, "--overwrite" in err) == (2, True)
    assert Path("file").read_text() == edited
    assert cli(*words, "--overwrite")[0] == 0
    assert cli(*words)[0] == 0


@pytest.mark.parametrize("form", ["--inspect", "--lm-eval"])
def test_user_s_file_in_place_of_an_export_stays(run, cli, form):
    assert cli("export", run, form, "--out", "out")[0] == 0
    file = next(each for each in Path("out").rglob("*.json*") if each.name[0] != ".")
    file.write_text(MINE)
    assert cli("export", run, form, "--out", "out")[0] == 2
    assert file.read_text() == MINE
    assert cli("export", run, form, "--out", "out", "--overwrite")[0] == 0


def test_link_in_the_folder_of_a_report_is_not_followed(run, cli):
    Path("victim").write_text(MINE)
    Path("out").mkdir()
    Path("out/report.md").symlink_to(Path("victim").resolve())
    for flags in ([], ["--overwrite"]):
        cli("report", run, "--to", "md", "--out", "out", *flags)
        assert Path("victim").read_text() == MINE


def test_end_of_a_run_keeps_a_user_s_file_and_says_so(run, capsys):
    write_outputs(RunDir.open(run))
    (run / "report.md").write_text(MINE)
    (run / "summary.csv").unlink()
    write_outputs(RunDir.open(run))
    assert (run / "report.md").read_text() == MINE
    assert (run / "summary.csv").exists()
    assert "not replaced, since specbench" in " ".join(capsys.readouterr().err.split())


def test_end_of_a_run_follows_no_link(run):
    Path("victim").write_text(MINE)
    (run / "records.parquet").symlink_to(Path("victim").resolve())
    (run / "figures").symlink_to(Path("elsewhere").resolve())
    Path("elsewhere").mkdir()
    write_outputs(RunDir.open(run))
    assert Path("victim").read_text() == MINE
    assert not list(Path("elsewhere").iterdir())


def test_certificate_is_not_written_over_another_file(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    Path("certificates").mkdir()
    Path("certificates/sps.json").write_text(MINE)
    code, _, err = cli("audit", "sps", "--out", "certificates")
    assert (code, "certificates/sps.json" in err) == (2, True)
    assert Path("certificates/sps.json").read_text() == MINE


def test_certificate_that_the_user_edited_stays(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    words = ["audit", "hf:vanilla", "--out", "certificates"]
    file = Path("certificates/hf-vanilla.json")
    for _ in range(2):
        assert cli(*words)[0] == 0
    edited = json.dumps(json.loads(file.read_text()) | {"note": MINE})
    file.write_text(edited)
    code, _, err = cli(*words)
    assert (code, "--overwrite" in err) == (2, True)
    assert file.read_text() == edited
    assert cli(*words, "--overwrite")[0] == 0
    assert json.loads(file.read_text()).keys() < json.loads(edited).keys()


@pytest.mark.parametrize("content", [MINE, "{}", '{"schema": 9, "machine": {}}', ""])
def test_costs_are_not_written_over_another_file(tmp_path, content):
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="specbench did not write this"):
        check_writable(file)
    assert file.read_text() == content
    check_writable(file, overwrite=True)


def test_costs_that_the_user_edited_stay(tmp_path):
    file = tmp_path / "costs.json"
    costs_text = json.dumps({"schema": 1, "machine": {}, "curves": {}})
    write_listed(file, costs_text)
    check_writable(file)
    file.write_text(costs_text + " ")
    with pytest.raises(UsageError, match="changed since") as caught:
        check_writable(file)
    assert "--overwrite" in caught.value.hint


def test_baseline_is_not_written_over_another_file(run, cli):
    machine = RunDir.open(run).manifest["machine"]["id"]
    file = Path("results/baselines/main") / f"{machine}.json"
    file.parent.mkdir(parents=True)
    file.write_text(MINE)
    code, _, err = cli("compare", "--save", "main", run)
    assert (code, str(file) in err) == (2, True)
    assert file.read_text() == MINE
    file.unlink()
    for _ in range(2):
        assert cli("compare", "--save", "main", run)[0] == 0


# Training


def test_model_that_specbench_did_not_train_is_not_trained_over(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    model = Path("heads/embedded-medusa")
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "model.safetensors").write_text(MINE)
    code, _, err = cli("train", "medusa", "--smoke", "--out", "heads")
    assert (code, "heads/embedded-medusa exists already" in err) == (2, True)
    assert (model / "model.safetensors").read_text() == MINE


def test_weights_are_not_trained_through_a_link(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    Path("victim").write_text(MINE)
    model = Path("heads/judge")
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"specbench": {}}))
    (model / "model.safetensors").symlink_to(Path("victim").resolve())
    code, _, err = cli("train", "judge", "--smoke", "--out", "heads")
    assert (code, "is a link" in err) == (2, True)
    assert Path("victim").read_text() == MINE


def test_fresh_training_removes_a_training_alone(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    notes = Path("heads/training/embedded-medusa/notes.md")
    notes.parent.mkdir(parents=True)
    notes.write_text(MINE)
    code, _, err = cli("train", "medusa", "--smoke", "--fresh", "--out", "heads")
    assert (code, "--fresh would remove them" in err) == (2, True)
    assert notes.read_text() == MINE


@pytest.mark.parametrize("name", ["loss.jsonl", "step-0000001/mine", "step-0000001.part/mine"])
@pytest.mark.parametrize("fresh", ["--fresh", "--resume"])
def test_a_file_that_no_training_wrote_stays_whatever_its_name(
    tmp_path, monkeypatch, cli, name, fresh
):
    monkeypatch.chdir(tmp_path)
    user_file = Path("heads/training/embedded-medusa") / name
    user_file.parent.mkdir(parents=True)
    user_file.write_text(MINE)
    code, _, err = cli("train", "medusa", "--smoke", fresh, "--out", "heads")
    assert (code, "not written by a training" in err) == (2, True)
    assert user_file.read_text() == MINE


def test_fresh_training_leaves_other_files_beside_its_own(tmp_path):
    work = tmp_path / "training/head"
    for name, content in {
        "made_for.json": '{"loss": "ce"}',
        "loss.jsonl": '{"step": 1, "steps": 2, "loss": 0.5, "lr": 0.1, "tokens": 8}\n{"st',
        "step-0000001/state.json": '{"step": 1, "tokens": 8, "seconds": 1, "plan": {},'
        ' "sources": []}',
        "step-0000001/model.safetensors": "",
        "step-0000002.part/model.safetensors": "",
        "notes.md": MINE,
    }.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(content)
    delete_work(tmp_path, "head")
    assert [(each.name, each.read_text()) for each in work.iterdir()] == [("notes.md", MINE)]


@pytest.mark.parametrize("name", ["", "loss.jsonl"])
def test_an_empty_training_makes_no_model_specbench_s(tmp_path, name):
    work, model = tmp_path / "training/head", tmp_path / "head/model.safetensors"
    for folder in (work, model.parent):
        folder.mkdir(parents=True)
    if name:
        (work / name).touch()
    model.write_text(MINE)
    with pytest.raises(UsageError, match="specbench did not train it"):
        check_model(tmp_path, "head")


def train_draft(cli, *words):
    """Train one small draft and fail unless that succeeds."""
    code, _, err = cli("train", "draft", "--smoke", "--out", "out", *words)
    assert code == 0, err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("draft",), "seed-0"),
        (("draft",), "seed-0/kl"),
        (("draft",), "seed-0/training"),
        (("draft",), "seed-0/training/kl"),
        (("medusa",), "training/embedded-medusa"),
        (("medusa",), "training"),
        (("replies",), "training"),
        (("rest",), "training"),
        (("rest",), "datastore"),
        (("judge",), "judge"),
        (("specee",), "exits"),
    ],
    ids=str,
)
def test_training_writes_into_no_folder_that_is_a_link(tmp_path, monkeypatch, cli, words, name):
    monkeypatch.chdir(tmp_path)
    target_path, user_file = Path("out", name), Path("mine")
    target_path.parent.mkdir(parents=True)
    user_file.mkdir()
    target_path.symlink_to(user_file.resolve())
    code, _, err = cli("train", *words, "--smoke", "--out", "out")
    assert (code, "is a link" in err) == (2, True), err
    assert not list(user_file.iterdir())


@pytest.mark.parametrize("name", ["seed-0/kl/alignment.json", "seed-0/kl/config.json"])
def test_training_follows_no_link_in_a_model_folder(tmp_path, monkeypatch, cli, name):
    monkeypatch.chdir(tmp_path)
    train_draft(cli)
    user_file = Path("mine.txt")
    user_file.write_text(MINE)
    Path("out", name).unlink()
    Path("out", name).symlink_to(user_file.resolve())
    code, _, err = cli("train", "draft", "--smoke", "--fresh", "--out", "out")
    assert (code, "is a link" in err) == (2, True)
    assert user_file.read_text() == MINE


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("draft",), "alignment.json"),
        (("draft",), "alignment.svg"),
        (("draft",), "seed-0/training_curve.json"),
        (("draft",), "seed-0/training_curve.png"),
        (("medusa",), "training_curve.png"),
        (("specdec++",), "acceptance_calibration.json"),
        (("specdec++",), "acceptance_calibration.png"),
    ],
    ids=str,
)
@pytest.mark.parametrize("link", [False, True], ids=["file", "link"])
def test_training_refuses_to_replace_a_user_s_file_before_it_begins(
    tmp_path, monkeypatch, cli, words, name, link
):
    monkeypatch.chdir(tmp_path)
    user_file, target_path = Path("mine.txt"), Path("out", name)
    user_file.write_text(MINE)
    target_path.parent.mkdir(parents=True)
    target_path.symlink_to(user_file.resolve()) if link else target_path.write_text(MINE)
    code, _, err = cli("train", *words, "--smoke", "--out", "out")
    assert (code, "specbench did not write this" in err) == (2, True), err
    assert (user_file.read_text(), target_path.read_text()) == (MINE, MINE)
    assert not list(Path("out").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (("draft",), "seed-0/kl"),
        (("medusa",), "embedded-medusa"),
        (("space",), "embedded-space"),
        (("specdec++",), "embedded-acceptance"),
        (("rest",), "datastore"),
    ],
    ids=str,
)
def test_training_replaces_its_own_model_and_no_model_that_the_user_changed(
    tmp_path, monkeypatch, cli, words, model
):
    monkeypatch.chdir(tmp_path)
    command = ("train", *words, "--smoke", "--out", "out")
    for _ in range(2):
        code, _, err = cli(*command, "--fresh")
        assert code == 0, err
    folder = Path("out", model)
    assert not {each.name for each in folder.iterdir()} - {*MODEL_FILES, FILE_LIST}
    config = folder / "config.json"
    config.write_text(MINE)
    code, _, err = cli(*command, "--fresh")
    assert (code, "specbench did not write this" in err) == (2, True), err
    assert config.read_text() == MINE


def test_a_killed_replacement_leaves_no_new_config_beside_old_weights(tmp_path, monkeypatch):
    names = ("a.json", "config.json", "model.safetensors")

    def write(content):
        with staging_folder(tmp_path, overwrite=None) as staging:
            for name in names:
                (staging / name).write_text(content)

    write("old")
    move = Path.replace

    def killed(self, target):
        if Path(target).name == "model.safetensors":
            raise KeyboardInterrupt
        return move(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write("new")
    assert not (tmp_path / "config.json").exists()
    monkeypatch.setattr(Path, "replace", move)
    write("newer")
    assert [(tmp_path / name).read_text() for name in names] == ["newer"] * 3


def test_conversion_does_not_write_over_weights(tmp_path, monkeypatch, cli):
    import torch

    monkeypatch.chdir(tmp_path)
    Path("head").mkdir()
    torch.save({"w": torch.ones(2)}, "head/pytorch_model.bin")
    Path("head/config.json").write_text("{}")
    Path("out").mkdir()
    Path("out/model.safetensors").write_text(MINE)
    words = ["train", "convert", "head", "--out", "out", "--unpickle"]
    assert cli(*words)[0] == 2
    assert Path("out/model.safetensors").read_text() == MINE
    Path("out/model.safetensors").unlink()
    for _ in range(2):
        assert cli(*words)[0] == 0

"""Tests of `specbench publish`: which runs are accepted, and the pages of the gallery."""

import json
import os
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.commands.publish import EXAMPLES
from specbench_cli.errors import BadAnswer, EnvironmentFault, UsageError
from specbench_cli.report import figures
from specbench_cli.report.gallery import gallery
from specbench_cli.report.gallery.entry import load
from specbench_cli.report.gallery.pages import make_leaderboards
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Verdict
from specbench_cli.summary import summary

pytestmark = pytest.mark.usefixtures("small_pair")

MACHINES = {
    "here": {"id": "aaaabbbbcccc", "hardware": {"cpu": "some CPU", "cores": 2, "memory_gib": 24}},
    "there": {"id": "ddddeeeeffff", "hardware": {"cpu": "other CPU", "accelerators": [
        {"name": "some GPU"}]}},
}  # fmt: skip
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><path d="M0 0"/></svg>'
EVIL = '<script>alert("1")</script>'


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Use a stub figure and a short bootstrap, to save time."""

    def write_stub_figure(reading, folder, **_):
        (folder / "speedup.svg").write_text(SVG)
        return [folder / "speedup.svg"]

    monkeypatch.setattr(figures, "write_figures", write_stub_figure)
    monkeypatch.setattr(summary, "RESAMPLES", 49)


@pytest.fixture
def make(make_run, synthetic):
    """Return a function that makes a run of vanilla and sps on a machine.

    `facts` changes the manifest and `edit` the records.
    """

    def run(name="run", machine="here", created="2026-11-21T10:24:03Z", **more):
        facts, edit = more.pop("facts", {}), more.pop("edit", lambda record: record)
        fakes = more.pop("fakes", (synthetic.vanilla, synthetic.sps))
        run = make_run(
            name,
            fakes,
            change=lambda own: own.update(machine=MACHINES.get(machine, {}), created_utc=created),
            edit=edit,
            prompts=6,
        )
        run.update(**facts)
        return run

    return run


def publish_run(run, folder):
    """Publish the run to a gallery and return its entry."""
    return gallery.publish(read_report_data(run), folder).entry


class Page(HTMLParser):
    """The tags, links and text of a page."""

    def __init__(self, file):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data):
        self.text += data


def test_a_run_has_a_page_with_figure_table_sentences_and_its_report(make, tmp_path):
    found = gallery.publish(read_report_data(make()), tmp_path / "g")
    page = Page(found.page)
    assert {"svg", "table"} <= set(page.tags)
    assert all(sentence in page.text for sentence in found.entry.sentences)
    assert "report.html" in page.links
    assert "viewer-data" in (found.page.parent / "report.html").read_text()
    assert (found.page.parent / "speedup.svg").read_text() == SVG


def test_only_methods_that_use_the_draft_model_have_one(make, tmp_path):
    entry = publish_run(make(), tmp_path / "g")
    reading = read_report_data(make("other"))
    drafts = {row.label: row.draft_model for row in reading.summary.rows}
    assert {line.label: line.draft for line in entry.lines} == drafts
    assert drafts["vanilla"] is None


def test_sentences_have_the_figures_of_the_run(make, tmp_path):
    reading = read_report_data(make())
    (best,) = [row for row in reading.summary.rows if row.label == "sps"]
    fastest, proof, time = gallery.publish(reading, tmp_path / "g").entry.sentences
    assert fastest == (
        f"Of the lossless methods sps is the fastest on 6 questions of mini in 1 process:"
        f" {best.speedup:.2f}x vanilla's speed (95% interval {best.speedup_low:.2f} to"
        f" {best.speedup_high:.2f}), a significant difference from all others."
    )
    assert "that of sps: 0 of 6 questions have" in proof
    assert "at most 39%, at 95% confidence" in proof
    assert f"sps commits {best.mat:.2f} tokens per step" in time
    assert f"{best.share_target:.0%} of its decode time on the target" in time


def test_a_method_that_is_slower_is_not_called_fastest(make, synthetic, tmp_path):
    slow = synthetic.Fake("slow", length=2, alpha=0.1, cost=3.0)
    entry = publish_run(make(fakes=(synthetic.vanilla, slow)), tmp_path / "g")
    assert "slow comes first, but is slower than vanilla" in entry.sentences[0]


def test_a_method_without_a_significant_lead_is_not_called_fastest(make, synthetic, tmp_path):
    equal_methods = (synthetic.sps, replace(synthetic.sps, label="twin", method="sps"))
    entry = publish_run(make(fakes=(synthetic.vanilla, *equal_methods)), tmp_path / "g")
    assert re.search(
        r"(sps|twin) has the highest speedup .* no significant difference from (sps|twin)\.$",
        entry.sentences[0],
    )


def test_sampled_outputs_are_described_as_not_compared(make, tmp_path):
    facts = {"verdict": Verdict("unchecked"), "sampling": "rejection", "guarantee": "exact_law"}
    entry = publish_run(make(edit=change_records_of("sps", **facts)), tmp_path / "g")
    assert entry.sentences[1].startswith("No output was compared token by token")
    assert [line.guarantee for line in entry.lines] == ["exact_law", "exact_tokens"]


def test_links_of_the_index_lead_to_the_pages_and_back(make, tmp_path):
    found = gallery.publish(read_report_data(make("a run")), tmp_path / "g")
    links = [link for link in Page(found.index).links if link.startswith("runs/")]
    assert set(links) == {"runs/a%20run/index.html"}
    assert (found.page.parent / "../../index.html").resolve() == found.index.resolve()


def test_each_machine_has_its_own_leaderboard(make, tmp_path):
    for name, machine in (("a", "here"), ("b", "there")):
        publish_run(make(name, machine), tmp_path / "g")
    found = make_leaderboards(index_rows(tmp_path / "g"))
    assert [board.parts[0].text.split(";")[0] for board in found] == [
        "some CPU, 2 cores, 24 GiB (machine aaaabbbbcccc)",
        "other CPU, some GPU (machine ddddeeeeffff)",
    ]
    runs = [{row[-1].text for each in board.parts[1:] for row in each.rows} for board in found]
    assert runs == [{"a"}, {"b"}]


def index_rows(folder):
    """Return the rows of the index of a gallery."""
    files = sorted(folder.glob("runs/*/entry.json"))
    return [gallery.IndexRow(load(file), gallery.link(file.parent.name)) for file in files]


def test_runs_of_one_machine_and_setting_are_ranked_together_best_first(make, synthetic, tmp_path):
    publish_run(make("a"), tmp_path / "g")
    fast = synthetic.Fake("fast", length=5, alpha=0.95, cost=1.0)
    later = "2026-11-22T10:24:03Z"
    publish_run(make("b", created=later, fakes=(synthetic.vanilla, fast)), tmp_path / "g")
    (board,) = make_leaderboards(index_rows(tmp_path / "g"))
    _, table = board.parts
    assert [row[0].text for row in table.rows] == ["fast", "sps", "vanilla", "vanilla"]


@pytest.mark.parametrize(
    "facts",
    [
        {"config": {"effective": {"verify": "coupled", "temperature": 0.8, "dtype": "float32"}}},
        {"models": {"target": {"label": "other"}}},
        {"tasks": []},
    ],
    ids=["setting", "target", "same"],
)
def test_each_setting_and_target_has_its_own_leaderboard(make, tmp_path, facts):
    publish_run(make("a"), tmp_path / "g")
    later = "2026-11-22T10:24:03Z"
    publish_run(make("b", created=later, facts=facts), tmp_path / "g")
    assert len(make_leaderboards(index_rows(tmp_path / "g"))) == (1 if "tasks" in facts else 2)


def test_lossy_and_learning_methods_have_their_own_tables(make, synthetic, tmp_path):
    loose = synthetic.Fake("loose", length=5, alpha=0.9, guarantee="quality_only",
                           verdict="unchecked", relaxed=0.5)  # fmt: skip
    rows = [{"label": label, "state_scope": scope} for label, scope in (
        ("vanilla", "prompt"), ("sps", "run"), ("loose", "prompt"))]  # fmt: skip
    run = make(fakes=(synthetic.vanilla, synthetic.sps, loose), facts={"rows": rows})
    publish_run(run, tmp_path / "g")
    (board,) = make_leaderboards(index_rows(tmp_path / "g"))
    assert [[row[0].text for row in table.rows] for table in board.parts[1:]] == [
        ["vanilla"], ["sps"], ["loose"],
    ]  # fmt: skip


def test_a_renamed_run_replaces_itself(make, tmp_path):
    run, folder = make("a"), tmp_path / "g"
    assert not gallery.publish(read_report_data(run), folder).replaced
    renamed_run = RunDir.open(run.path.rename(tmp_path / "b"))
    assert gallery.publish(read_report_data(renamed_run), folder).replaced
    assert [path.name for path in (folder / "runs").iterdir()] == ["a"]
    assert "1 run, added by" in (folder / "index.html").read_text()


def test_files_of_the_user_are_kept(make, tmp_path):
    run, folder = make("a"), tmp_path / "g"
    publish_run(run, folder)
    (folder / "runs/a/notes.txt").write_text("mine")
    assert gallery.publish(read_report_data(run), folder).replaced
    assert (folder / "runs/a/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["index.html", "runs/a/index.html", "runs/a/report.html"])
def test_an_edited_page_is_replaced_only_with_overwrite(make, tmp_path, name):
    run, folder = make("a"), tmp_path / "g"
    publish_run(run, folder)
    page = folder / name
    edited = page.read_text() + "<!-- mine -->"
    page.write_text(edited)
    with pytest.raises(UsageError, match=re.escape(str(page))) as caught:
        publish_run(run, folder)
    assert "--overwrite" in caught.value.hint
    assert page.read_text() == edited
    gallery.publish(read_report_data(run), folder, overwrite=True)
    assert "mine -->" not in page.read_text()


@pytest.mark.parametrize("name", ["index.html", "runs/a/entry.json"])
def test_a_pipe_in_a_gallery_is_rejected(make, tmp_path, name):
    pipe = tmp_path / "g" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=re.escape(str(pipe))):
        publish_run(make("a"), tmp_path / "g")


def test_another_run_with_the_same_name_has_its_own_page(make, tmp_path):
    publish_run(make("x"), tmp_path / "g")
    (tmp_path / "x").rename(tmp_path / "first")
    publish_run(make("x", "there"), tmp_path / "g")
    assert sorted(path.name for path in (tmp_path / "g/runs").iterdir()) == ["x", "x-2"]


def test_a_run_with_untrained_models_and_few_questions_has_warnings(make, tmp_path):
    tasks = [{"name": "mini", "embedded": "plumbing"}]
    publish_run(make(facts={"tasks": tasks}), tmp_path / "g")
    (board,) = make_leaderboards(index_rows(tmp_path / "g"))
    assert (
        "the model was not trained on mini, so these speedups mean nothing" in board.parts[0].text
    )
    assert "fewer than 20 questions, too few to rank by: run" in board.parts[0].text


def test_pages_have_the_usual_file_permissions(make, tmp_path):
    page = gallery.publish(read_report_data(make()), tmp_path / "g").page
    assert page.parent.stat().st_mode == page.parents[1].stat().st_mode
    assert not list((tmp_path / "g").glob(".specbench-*"))


def test_a_folder_that_is_no_gallery_entry_is_kept(make, tmp_path):
    (tmp_path / "g/runs/run").mkdir(parents=True)
    (tmp_path / "g/runs/run/mine.txt").touch()
    page = gallery.publish(read_report_data(make()), tmp_path / "g").page
    assert page.parent.name == "run-2"
    assert (tmp_path / "g/runs/run/mine.txt").exists()


def change_records_of(label, **changes):
    """Return an edit that changes the records of one method."""
    return lambda record: replace(record, **changes) if record.label == label else record


@pytest.mark.parametrize(
    ("facts", "kind", "message"),
    [
        ({"status": "interrupted"}, UsageError, "it is interrupted, not finished"),
        ({"status": "running"}, UsageError, "it is running, not finished"),
        ({"mixed": ["torch 2.6 -> 2.7"]}, UsageError, "it is mixed: torch 2.6 -> 2.7"),
        ({"forced": ["seed 0 and 1"]}, UsageError, "it is forced: runs that differ in seed"),
        ({"targets": ["a", "b"]}, UsageError, "it is of several targets: publish its runs"),
        ({"spoiled": "plugin.py"}, UsageError, "plugin.py wrote to its files"),
        ({"noisy": True}, EnvironmentFault, "other programs were running"),
        ({"leaks": {"sps": "mini/1"}}, BadAnswer, "sps is BROKEN: it keeps state"),
        ({"machine": {}}, UsageError, "its machine is not recorded"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_with_an_unsuitable_manifest_is_rejected(make, tmp_path, facts, kind, message):
    run = make(facts=facts)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        gallery.publish(read_report_data(run), tmp_path / "g")
    assert caught.value.hint
    assert not (tmp_path / "g").exists()


def test_a_run_with_a_broken_method_is_rejected(make, synthetic, tmp_path):
    bad = synthetic.Fake("bad", length=2, alpha=0.5, verdict="mismatch")
    with pytest.raises(BadAnswer, match="bad is BROKEN: 6 outputs are neither"):
        publish_run(make(fakes=(synthetic.vanilla, bad)), tmp_path / "g")


def test_a_broken_method_of_another_engine_does_not_reject_the_run(make, synthetic, tmp_path):
    peer = replace(synthetic.hf_assisted, verdict="mismatch")
    entry = publish_run(make(fakes=(synthetic.vanilla, synthetic.sps, peer)), tmp_path / "g")
    assert [line.label for line in entry.lines] == ["sps", "vanilla"]


def test_a_run_with_noisy_times_is_rejected(make, tmp_path):
    with pytest.raises(EnvironmentFault, match="6 of 6 times of sps are noisy"):
        publish_run(make(edit=change_records_of("sps", void=True)), tmp_path / "g")


def test_a_run_without_records_is_rejected(make, tmp_path):
    run = make()
    (run.path / "records.jsonl").unlink()
    with pytest.raises(UsageError, match=r"it has no records\.jsonl"):
        publish_run(run, tmp_path / "g")


def test_a_replayed_run_is_rejected(make, tmp_path):
    edited = change_records_of("sps", sampling="replay")
    with pytest.raises(UsageError, match="all methods got vanilla's tokens"):
        publish_run(make(edit=edited), tmp_path / "g")


def test_a_run_with_only_vanilla_is_rejected(make, synthetic, tmp_path):
    with pytest.raises(UsageError, match="no method has a speedup"):
        publish_run(make(fakes=(synthetic.vanilla,)), tmp_path / "g")


def test_markup_is_escaped_and_paths_are_cut(make, tmp_path):
    models = {
        "target": {"label": f"/home/someone/secret/{EVIL}model"},
        "draft": {"label": "/home/someone/secret/draft"},
    }
    run = make(facts={"models": models, "dropped": {EVIL: "/home/someone/secret/file failed"}})
    found = gallery.publish(read_report_data(run), tmp_path / "g")
    for file in (found.index, found.page):
        assert "script" not in Page(file).tags
        assert "someone" not in file.read_text()
    assert "someone" not in (found.page.parent / "entry.json").read_text()


def test_pages_load_nothing_and_run_nothing(make, tmp_path):
    found = gallery.publish(read_report_data(make()), tmp_path / "g")
    for file in (found.index, found.page):
        assert "default-src 'none'; style-src" in unescape(file.read_text())
        assert not [link for link in Page(file).links if "://" in link]


def test_an_unknown_index_page_is_not_overwritten(make, tmp_path):
    (tmp_path / "g").mkdir()
    (tmp_path / "g/index.html").write_text("<h1>mine</h1>")
    with pytest.raises(UsageError, match="not the index of a gallery"):
        publish_run(make(), tmp_path / "g")
    assert (tmp_path / "g/index.html").read_text() == "<h1>mine</h1>"


def test_a_folder_that_cannot_be_written_is_an_error(make, tmp_path):
    (tmp_path / "g").write_text("a file")
    with pytest.raises(UsageError, match="cannot write to"):
        publish_run(make(), tmp_path / "g")


def test_a_damaged_entry_is_an_error_with_its_file(make, tmp_path):
    publish_run(make(), tmp_path / "g")
    file = tmp_path / "g/runs/run/entry.json"
    file.write_text(file.read_text().replace("exact_tokens", "surely"))
    later = make("later", created="2026-11-22T10:24:03Z")
    with pytest.raises(UsageError, match=r"entry\.json is not a valid gallery entry"):
        publish_run(later, tmp_path / "g")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that calls `specbench publish` in a temporary folder.

    It returns the exit code, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)

    def call(*args):
        code = app._run(["publish", *args])
        return (code, *capsys.readouterr())

    return call


def test_the_command_accepts_a_folder_a_name_and_last(make, command, tmp_path):
    run = make()
    for source in ("run", "20261121-mini", "last"):
        code, out, _ = command(source, "--to", "g")
        assert code == 0
        assert out.splitlines() == ["g/runs/run/index.html", "g/index.html"]
        if source == "run":
            (tmp_path / "results/runs").mkdir(parents=True)
            run.path.rename(tmp_path / "results/runs/20261121-mini")


def test_several_runs_are_added_by_one_command(make, command):
    make("a")
    make("b", created="2026-11-22T10:24:03Z")
    code, out, _ = command("a", "b", "--to", "g")
    assert (code, out.splitlines()) == (
        0,
        ["g/runs/a/index.html", "g/runs/b/index.html", "g/index.html"],
    )


def test_one_rejected_run_prevents_publishing_the_others(make, command):
    make("a")
    make("b", facts={"mixed": ["x"]})
    code, out, err = command("a", "b", "--to", "g")
    assert (code, out) == (2, "")
    assert err.startswith("error: b is not published: ")
    assert not Path("g").exists()


def test_json_is_one_object(make, command):
    make()
    code, out, _ = command("run", "--to", "g", "--json")
    result = json.loads(out)
    assert (code, result["page"], result["replaced"]) == (0, "g/runs/run/index.html", False)
    assert result["tasks"] == {"mini": 6}


@pytest.mark.parametrize(
    ("facts", "code"), [({"mixed": ["x"]}, 2), ({"noisy": True}, 3), ({"leaks": {"sps": "a"}}, 1)]
)
def test_a_refusal_is_one_error_with_its_exit_code(make, command, facts, code):
    make(facts=facts)
    found, out, err = command("run", "--to", "g")
    assert (found, out) == (code, "")
    assert err.startswith("error: run is not published: ")
    assert "hint: " in err
    assert not Path("g").exists()


def test_no_run_and_no_folder_are_errors(command):
    assert command("nowhere", "--to", "g")[0] == 2
    assert command("last", "--to", "g")[0] == 2
    assert command("last")[0] == 2


def test_help_has_the_examples(command):
    code, out, _ = command("--help")
    assert code == 0
    assert all(" ".join(example.split()) in " ".join(out.split()) for example in EXAMPLES)

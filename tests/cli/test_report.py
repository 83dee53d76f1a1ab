"""`specbench report RUN --prompt`: find where the output of a faulty method differs."""

import json
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.commands.report import EXAMPLES, TYPESET
from specbench_cli.store.run_dir import RunDir
from specbench_cli.tasks import load_task

pytestmark = pytest.mark.usefixtures("small_pair")

FAULTY = '''
from specbench_cli.api import Method, Tokens


class StaleRow(Method):
    """Stale row: the target's last row is that of the rejected token, not of the one committed."""

    name = "stale-row"

    def propose(self, session, limit):
        return session.chain([5][:limit])

    def observe(self, session, outcome):
        if session.finish is None:
            state = session.state
            state.rollback(0, state.length() - 1)
            session.target.forward(Tokens(session.chain([5]).tokens[None]), state)
            state.commit(0, range(1))
'''


@pytest.fixture
def report(call_here, faulty_run, capsys):
    """Return a function that runs `specbench report here` with more arguments."""
    return lambda *args: call_here(capsys, "report", "here", *args)


@pytest.fixture(scope="module")
def faulty_run(call_here, figures):
    """Run a correct method, and one whose target keeps the KV row of a rejected token."""
    Path("faulty.py").write_text(textwrap.dedent(FAULTY))
    args = ["run", "--plugin", "faulty.py", "--isolation", "none", "-m", "stale-row,pld"]
    args += [
        "--limit",
        "3",
        "--seed",
        "1",
        "--max-new-tokens",
        "24",
        "--category",
        "translation",
        "--allow-noise",
    ]
    args += ["--threads", "1", "--out", "here"]
    return app._run(args)


@pytest.fixture
def broken_prompt(faulty_run):
    """Return a prompt for which the output of the faulty method is wrong."""
    records = RunDir.open(Path("here")).records()
    return next(r.prompt_id for r in records if r.verdict and r.verdict.kind == "mismatch")


@pytest.mark.smoke
def test_a_faulty_method_is_exit_1(faulty_run):
    assert faulty_run == 1


@pytest.mark.smoke
def test_every_output_of_the_faulty_method_is_broken(report):
    code, out, _ = report()
    assert code == 0
    row = next(line for line in out.splitlines() if "stale-row" in line)
    assert "BROKEN" in row
    assert "BROKEN: " in out
    assert "| stale-row | BROKEN |" in Path("here/report.md").read_text()
    assert "BROKEN" in Path("here/figures/speedup.svg").read_text()
    assert "neither vanilla's nor tied" in Path("here/summary.csv").read_text()
    assert report("--to", "json")[0] == 0
    rows = json.loads(Path("here/report/summary.json").read_text())["rows"]
    assert all(
        row["broken"] and row["speedup"] is None
        for row in rows
        if row["label"] != "pld" and row["label"] != "vanilla"
    )
    assert not any(row["broken"] for row in rows if row["label"] == "pld")


@pytest.mark.smoke
def test_the_report_shows_where_the_fault_is(report, broken_prompt):
    code, out, _ = report("--prompt", broken_prompt, "--method", "stale-row")
    assert code == 0
    assert "BROKEN: stale-row" in out
    assert "verdict: mismatch" in out
    assert "first difference at token" in out
    assert out.count(">>") == 2
    assert "<- first difference" in out


@pytest.mark.smoke
def test_all_methods_are_compared_unless_one_is_named(report, broken_prompt):
    _, out, _ = report("--prompt", broken_prompt, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert {comparison["label"] for comparison in found} == {"stale-row", "pld"}
    by_label = {comparison["label"]: comparison for comparison in found}
    assert by_label["pld"]["verdict"]["kind"] in ("identical", "near-tie")
    wrong = by_label["stale-row"]
    position = wrong["position"]
    assert wrong["own"]["ids"][:position] == wrong["vanilla"]["ids"][:position]
    assert wrong["own"]["token"] != wrong["vanilla"]["token"]
    assert sum(lane["committed"] for lane in wrong["lanes"]) == wrong["own"]["n_tokens"] - 1
    assert wrong["pass"] == 1


@pytest.mark.smoke
def test_with_out_a_timeline_is_drawn_and_a_trace_written(report, broken_prompt, tmp_path):
    code, out, _ = report("--prompt", broken_prompt, "-m", "stale-row", "--out", str(tmp_path))
    files = [Path(line) for line in out.splitlines()]
    assert code == 0
    assert [file.name for file in files] == ["lanes.svg", "lanes.png", "trace.json"]
    events = json.loads(files[2].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}, "vanilla's and the method's"


@pytest.mark.smoke
def test_latex_files_come_with_the_command_that_typesets_them(report):
    code, out, err = report("--to", "latex", "--out", "a paper")
    assert code == 0
    assert "a paper/latex/report.tex" in out.splitlines()
    assert err == f"to typeset: cd 'a paper/latex' && {TYPESET}\n"


def test_unknown_names_are_exit_2_with_the_known_ones(report, broken_prompt):
    code, _, err = report("--prompt", "mini/translation-999")
    assert code == 2
    assert "no prompt 'mini/translation-999'" in err
    assert broken_prompt in err
    code, _, err = report("--prompt", broken_prompt, "-m", "pdl")
    assert code == 2
    assert "did you mean 'pld'" in err


@pytest.mark.smoke
def test_incompatible_runs_are_exit_2_unless_forced(report, tmp_path):
    other = shutil.copytree("here", tmp_path / "there")
    assert report(str(other), "--to", "json", "--out", str(tmp_path / "both"))[0] == 0
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert (summary["runs"], summary["passes"]) == (["here", "there"], 2)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["config"]["effective"]["seed"] = 2
    manifest.pop("files")  # these are the digests of the records with seed 1
    (other / "manifest.json").write_text(json.dumps(manifest))
    records = [json.loads(line) for line in (other / "records.jsonl").read_text().splitlines()]
    lines = [json.dumps({**record, "seed": 2}) for record in records]
    (other / "records.jsonl").write_text("\n".join(lines) + "\n")
    code, _, err = report(str(other))
    assert code == 2
    assert "seed: 1 (here) against 2 (there)" in err
    assert f"specbench report last {other} --force" in err
    code, out, err = report(str(other), "--force", "--format", "tsv")
    assert code == 0
    assert {"pld @here", "pld @there"} <= {row.split("\t")[3] for row in out.splitlines()}
    assert "forced: differs in seed: 1 (here) against 2 (there)" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["last", "--method", "sps"], "--method needs --prompt"),
        (["last", "--to", "md", "--format", "tsv"], "--to writes files and --format prints tables"),
        (["last", "--to", "md", "--json"], "--to writes files and --format prints tables"),
        (["last", "--prompt", "mini/1", "--to", "md"], "cannot be combined with --to or --also"),
        (["a", "b", "--prompt", "mini/1"], "shows one run"),
    ],
)
def test_incompatible_options_are_refused(call_here, capsys, args, message):
    code, _, err = call_here(capsys, "report", *args)
    assert code == 2
    assert message in err


def test_the_examples_prompt_exists():
    example = next(words for words in map(shlex.split, EXAMPLES) if "--prompt" in words)
    ids = {question.prompt_id for question in load_task("mini").questions}
    assert example[example.index("--prompt") + 1] in ids

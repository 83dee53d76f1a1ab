"""`specbench compare` from the command line, with synthetic runs of a few outputs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specbench_cli import app
from specbench_cli.comparison.outcome import FAIL_ON, OUTCOMES
from specbench_cli.config.commands import CompareOptions
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import ForwardKind, Ns, Params, Steps, Trace, Verdict
from tests.records import record_of

PROMPTS = 6
LABELS = ("vanilla", "sps")
TARGET, DRAFT = (
    ForwardKind(model, role, 0, 1, (0, 2))
    for model, role in (("target", "verify"), ("draft", "draft"))
)
CONFIG = {
    "verify": "greedy",
    "temperature": 0.0,
    "dtype": "float32",
    "device": "cpu",
    "threads": 2,
    "seed": 0,
}
MANIFEST = {
    "schema": 4,
    "version": "0.1.0",
    "created_utc": "2026-11-21T10:24:03Z",
    "config": {"effective": CONFIG},
    "machine": {"id": "m1", "cpu": "some CPU", "cores": 2, "versions": {"torch": "2.13.0"}},
    "models": {
        "target": {"label": "embedded-7m", "hash": "aa"},
        "draft": {"label": "embedded-1m", "hash": "bb"},
    },
    "tasks": [{"name": "mini", "version": 1, "sha256": "cc", "n_questions": PROMPTS}],
    "noisy": False,
}

PREFILL = 1000


def record(number, label, by=1.0):
    """Return the record of a 9-token output: 8 steps, or 4 with a draft of 2.

    `by` multiplies its times.
    """
    drafts = label != "vanilla"
    ms = 1_000_000 * (1 + number / 10) * by
    n = 4 if drafts else 8
    per_step = ([TARGET, 1.0], [DRAFT, 0.2], [DRAFT, 0.2]) if drafts else ([TARGET, 1.0],)
    kinds, kind, t0, t1, now = [TARGET, DRAFT][: 1 + drafts], [0], [0], [PREFILL], PREFILL
    for step in range(n):
        for which, share in per_step:
            wobble = 1 + 0.01 * ((step + number) % 3 - 1)
            kind.append(kinds.index(which))
            t0.append(now)
            now += round(share * ms * wobble)
            t1.append(now)
    steps = list(zip(t0, t1, kind, strict=True))[1:]
    busy = [sum(b - a for a, b, k in steps if k == of) for of in (0, 1)]
    decode = now - PREFILL
    host = decode // 20
    counters = {"levels": [2], "nodes": [3], "tested": [2], "accepted": [1], "committed": [2]}
    plain = {**{key: [0] for key in counters}, "committed": [1]}
    return record_of(
        label,
        f"mini/{number}",
        9,
        params=Params({}, {"length": 2} if drafts else {}),
        origin=["prefill", *(["accepted", "recovered"] * n if drafts else ["plain"] * n)],
        steps=Steps(**{name: own * n for name, own in (counters if drafts else plain).items()}),
        target_forwards=n + 1,
        draft_forwards=2 * n * drafts,
        forwards=Trace(kinds, kind, [1 if k else 4 for k in kind], t0, t1),
        ns=Ns(now + host, PREFILL, decode + host, busy[1], busy[0], host),
        other_cpu=0.01,
        verdict=Verdict("identical" if drafts else "reference"),
    )


def make_run(
    name, change=lambda record: record, *, labels=LABELS, by=None, status="finished", **facts
):
    """Write a run into the working folder."""
    run = RunDir.create(Path(name), {**MANIFEST, "rows": method_entries(labels), **facts})
    run.append_prompts(
        [
            Prompt(
                prompt_id=f"mini/{number}",
                cluster=f"mini/{number}",
                task="mini",
                family="qa",
                category="qa",
                turn=1,
                text=f"question {number}",
                ids=[number],
            )
            for number in range(PROMPTS)
        ]
    )
    new_record = (
        record(n, label, (by or {}).get(label, 1.0)) for n in range(PROMPTS) for label in labels
    )
    run.append(
        [changed_record for each in new_record if (changed_record := change(each)) is not None]
    )
    run.close(status, noisy=facts.get("noisy", False))
    return name


def method_entries(labels):
    return [
        {"label": label, "method": label, "params": {}, "timing_free": True, "uses": []}
        for label in labels
    ]


def change_sps(at=range(PROMPTS), **changes):
    """Return a function that changes the records of sps at some prompts."""

    def change(found):
        number = int(found.prompt_id.rpartition("/")[2])
        return replace(found, **changes) if found.label == "sps" and number in at else found

    return change


def drop_draft_token(found):
    """Remove one draft token from the first step of a record of sps, and return the record."""
    if found.label == "sps":
        nodes = [found.steps.nodes[0] - 1, *found.steps.nodes[1:]]
        found.steps = replace(found.steps, nodes=nodes)
    return found


MISMATCH = Verdict("mismatch", position=3, gap=1.0, expected=7)


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Return a function that runs `specbench compare` in a folder with a run `base`.

    The function returns exit code, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "SPECBENCH_DEBUG"):
        monkeypatch.setenv(name, "")
    make_run("base")

    def run(*args):
        capsys.readouterr()
        code = app._run(["compare", *args])
        return (code, *capsys.readouterr())

    return run


def outcome(out, label="sps"):
    lines = [line.split("\t") for line in out.splitlines()]
    return next(dict(zip(lines[0], line, strict=True)) for line in lines if label in line)


CHANGES = {
    "same": {},
    "broken": {"change": change_sps([1], verdict=MISMATCH, output_ids=[*range(8), 9])},
    "changed-output": {"change": change_sps([1], output_ids=[*range(8), 9])},
    "mat": {"change": drop_draft_token},
    "slower": {"by": {"sps": 1.2}},
    "faster": {"by": {"sps": 0.8}},
    "missing": {"labels": ("vanilla",)},
    "new": {"labels": (*LABELS, "staged")},
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_outcome_has_its_message_and_exit_code(call, name):
    make_run("new", **CHANGES[name])
    row = "staged" if name == "new" else "sps"
    code, out, err = call("base", "new", "--format", "tsv")
    assert outcome(out, row)["outcome"] == name
    assert code == (1 if name in ("broken", "changed-output", "mat", "slower") else 0)
    assert ("fail: 1 of" in err) == (code == 1)
    assert outcome(out, "vanilla")["outcome"] == "same"
    assert call("base", "new", "--fail-on", "none")[0] == 0
    if name != "same":
        assert call("base", "new", "--fail-on", name)[0] == 1


def test_a_run_compared_with_itself_is_the_same_under_each_of_its_names(call):
    make_run("results/runs/20261121T102403Z-mini-1f2e3d4c")
    for new in ("results/runs/20261121T102403Z-mini-1f2e3d4c", "last"):
        code, out, _ = call("base", new, "--format", "tsv")
        assert (code, outcome(out)["outcome"]) == (0, "same")


def test_a_larger_tolerance_accepts_the_same_slowdown(call):
    make_run("new", by={"sps": 1.2})
    assert call("base", "new", "--tolerance", "30%")[0] == 0
    assert call("base", "new", "--tolerance", "0.3")[0] == 0
    assert call("base", "new", "--tolerance", "0.1")[0] == 1


def test_noisy_runs_are_compared_except_for_their_times(call):
    make_run("slow", by={"sps": 2.0}, noisy=True)
    code, _, err = call("base", "slow", "--format", "tsv")
    assert code == 0
    assert "noisy" in err
    make_run("spoilt", drop_draft_token, noisy=True)
    assert call("base", "spoilt")[0] == 1


def test_an_unfinished_run_is_compared_with_a_warning(call):
    def cut(found):
        return found if found.prompt_id in ("mini/0", "mini/1", "mini/2", "mini/3") else None

    make_run("new", cut, status="interrupted")
    code, out, err = call("base", "new", "--format", "tsv")
    assert (code, outcome(out)["pairs"]) == (0, "4")
    assert "interrupted" in err
    assert "2 prompts only BASE has" in err


def test_json_is_one_document_on_stdout(call):
    make_run("new", drop_draft_token)
    code, out, err = call("base", "new", "--json")
    document = json.loads(out)
    assert (code, document["passed"]) == (1, False)
    assert {row["label"]: row["outcome"] for row in document["rows"]} == {
        "vanilla": "same",
        "sps": "mat",
    }
    assert document["facts"]["base"]["created_utc"] == MANIFEST["created_utc"]
    assert "fail: 1 of 2 rows" in err


def test_several_formats_go_into_a_folder(call):
    make_run("new", drop_draft_token)
    code, out, err = call("base", "new", "--to", "markdown,junit,json", "-o", "deep/compared")
    files = [Path("deep/compared") / name for name in ("compare.md", "compare.xml", "compare.json")]
    assert (code, [Path(line) for line in out.splitlines()]) == (1, files)
    assert "sps" in files[0].read_text()
    suite = ElementTree.fromstring(files[1].read_text())
    assert len(list(suite.iter("failure"))) == 1
    assert json.loads(files[2].read_text())["passed"] is False
    assert "fail: 1 of 2 rows" in err


def test_one_format_goes_into_a_file_or_to_stdout(call):
    make_run("new")
    code, out, _ = call("base", "new", "--to", "json", "--out", "found.json")
    assert (code, out) == (0, "found.json\n")
    code, out, err = call("base", "new", "--to", "json")
    assert out == Path("found.json").read_text()
    assert "pass: 2 rows" in err
    Path("there").mkdir()
    assert call("base", "new", "--to", "markdown", "-o", "there")[1] == "there/compare.md\n"


def test_a_saved_baseline_replaces_its_run_by_name_and_by_file(call):
    code, out, err = call("--save", "main", "base")
    assert (code, out) == (0, "results/baselines/main/m1.json\n")
    assert "specbench compare main" in err
    make_run("new", drop_draft_token)
    for baseline in ("main", out.strip()):
        assert call(baseline, "base")[0] == 0
        assert call(baseline, "new")[0] == 1
    assert call("--save", "main", "new")[0] == 0
    assert call("main", "new")[0] == 0, "a wanted change is accepted by saving it"


def test_the_last_run_can_be_saved_as_a_baseline(call):
    make_run("results/runs/20261121T102403Z-mini-1f2e3d4c")
    assert call("--save", "main", "last")[0] == 0


def test_trends_over_runs_are_printed_and_drawn(call):
    names = [make_run(f"run{n}", created_utc=f"2026-11-2{n}T10:24:03Z") for n in range(3)]
    names.append(
        make_run("run3", drop_draft_token, created_utc="2026-11-24T10:24:03Z", by={"sps": 1.5})
    )
    code, out, _ = call("--over-time", *names)
    assert code == 0
    assert "run0" in out
    assert "run3" in out
    code, _, err = call("--over-time", *names, "-o", "drawn")
    assert code == 0
    figures = list(Path("drawn").glob("*.svg"))
    assert figures
    assert all(str(file) in err for file in figures)


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        ([], "give two runs, BASE and NEW; got 0", "specbench compare BASE NEW"),
        (["base"], "got 1: base", "specbench compare BASE NEW"),
        (["a", "b", "c"], "got 3: a b c", "specbench compare --over-time a b c"),
        (
            ["base", "nothing"],
            "nothing is not a run, a folder of runs, or a baseline",
            "--save NAME RUN",
        ),
        (["base", "base", "--tolerance", "5"], "--tolerance '5' must be a share", "--tolerance 5%"),
        (["base", "base", "--tolerance", "-1%"], "--tolerance '-1%'", "--tolerance 5%"),
        (["base", "base", "--tolerance", "nan"], "--tolerance 'nan'", "--tolerance 5%"),
        (["base", "base", "--tolerance", "a few"], "5% or 0.05", "--tolerance 5%"),
        (["base", "base", "--fail-on", "slow"], "did you mean 'slower'?", "--fail-on"),
        (["base", "base", "--fail-on", ""], "--fail-on is empty", "--fail-on"),
        (["base", "base", "--to", "markdwn"], "did you mean 'markdown'?", "--to markdown"),
        (["base", "base", "--to", ","], "--to names no format", "--to markdown"),
        (["base", "base", "--to", "junit,json"], "needs an output folder, --out", "-o DIR"),
        (["base", "base", "-o", "here"], "--out needs --to", "--to markdown --out here"),
        (["base", "base", "--json", "--to", "junit"], "give only one of them", "--to junit"),
        (["base", "base", "--to", "json", "-o", "base/manifest.json/z"], "cannot write to", "-o"),
        (["--save", "main"], "--save needs a run", "specbench compare --save main last"),
        (["--save", "../up", "base"], "'../up' is not a valid name", "--save"),
        (["--save", "main", "nothing"], "nothing contains no run", "specbench list runs"),
        (["--save", "main", "last"], "there is no run", "specbench run"),
        (["--save", "main", "base", "--json"], "--format cannot be combined with", "BASE NEW"),
        (
            ["--save", "main", "base", "--fail-on", "mat"],
            "--fail-on cannot be combined with",
            "BASE NEW",
        ),
        (["--save", "main", "base", "--over-time"], "cannot be combined", "--save main RUN"),
        (
            ["--over-time", "base"],
            "a trend needs two compatible runs",
            "specbench compare --over-time",
        ),
        (["--over-time", "base", "--to", "json"], "--to cannot be combined with", "BASE NEW"),
        (["--over-time", "base", "nothing"], "nothing is not a run", "--save NAME RUN"),
    ],
)
def test_invalid_options_are_exit_2_with_a_hint(call, args, message, hint):
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert hint in err.partition("hint: ")[2]
    assert "Traceback" not in err


def test_runs_without_common_outputs_are_exit_2(call):
    make_run(
        "seeded",
        lambda found: replace(found, seed=1),
        config={"effective": {**CONFIG, "seed": 1}},
    )
    code, out, err = call("base", "seeded", "--format", "tsv")
    assert (code, out) == (2, "")
    assert "nothing of base and seeded can be compared" in err
    assert "seed 0 -> 1" in err


def test_help_names_every_outcome_and_the_gate_s_default(call):
    words = set(re.findall(r"[\w-]+", call("--help")[1]))
    assert words >= {*OUTCOMES[:-1], "none"}
    assert ",".join(FAIL_ON) == CompareOptions().fail_on


def test_help_shows_examples(call):
    code, out, _ = call("--help")
    assert code == 0
    assert "specbench compare main last --to markdown,junit,json -o compared" in out

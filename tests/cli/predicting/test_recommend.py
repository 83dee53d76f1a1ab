"""`specbench recommend` from the command line."""

import json

import pytest

from specbench_cli import app
from specbench_cli.measure import warm_up
from specbench_cli.predict.recommend import search
from specbench_cli.predict.recommend.halving import TimeEstimates
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

SMALL = "--allow-noise --max-new-tokens 6 --isolation none --minutes 3".split()


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder with an empty cache.

    The function returns exit code, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*args):
        code = app._run(["recommend", *args])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def short_rounds(monkeypatch):
    """Limit each round to three prompts, however fast the machine is."""
    fits = TimeEstimates.max_prompts
    monkeypatch.setattr(
        TimeEstimates, "max_prompts", lambda pace, rows, s: min(3, fits(pace, rows, s))
    )
    monkeypatch.setattr(TimeEstimates, "plan_confirmation", lambda *_: (3, 60.0))
    monkeypatch.setattr(search, "MAX_SETTINGS", 2)
    monkeypatch.setattr(search, "MIN_HELD_OUT", 3)
    monkeypatch.setattr(warm_up, "WARM_UP_ROUNDS", 1)


def traffic(path, *texts):
    lines = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_recommend_on_own_prompts_returns_a_method_with_commands_or_none(
    run, short_rounds, tmp_path
):
    file = traffic(tmp_path / "traffic.jsonl", *(f"Say {n} and {n}." for n in range(12)))
    code, out, _ = run("-m", "pld", "-t", file, *SMALL, "--json", "--out", "here")
    assert code == 0
    events = [json.loads(line) for line in out.splitlines()]
    done = events[-1]
    assert done["event"] == "done"
    result = json.loads((tmp_path / "here" / "recommendation.json").read_text())
    assert result == {key: done[key] for key in result}
    assert [each["label"] for each in done["confirmed"]] == [
        max(done["search"], key=lambda each: (each["rounds"], each["ratio"]))["label"]
    ]
    (confirmed,) = done["confirmed"]
    assert (done["recommended"] is not None) == ((confirmed["speedup_low"] or 0) > 1)
    assert bool(done["lines"]) is (done["recommended"] is not None)
    confirmation_ids = {
        r.prompt_id for r in RunDir.open(tmp_path / "here" / "confirmation").records()
    }
    searched = {
        r.prompt_id
        for path in (tmp_path / "here").glob("round-*")
        for r in RunDir.open(path).records()
    }
    assert searched and confirmation_ids and not searched & confirmation_ids
    assert str(tmp_path) not in (tmp_path / "here" / "recommendation.json").read_text()

    code, out, _ = run(
        "--resume", "here"
    )  # A finished recommendation is printed again without a measurement.
    assert code == 0
    assert "recommended:" in out and "search: " in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("    ")) <= 100


def test_an_interrupted_recommendation_prints_its_resume_command(
    run, short_rounds, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        search.RoundRunner, "_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    code, _, err = run("-m", "pld", *SMALL, "--out", "here")
    assert code == 130
    assert "to resume: specbench recommend --resume here" in err


REFUSED = [
    (["--minutes", "0"], "--minutes must be a number of minutes up to", "recommend --help"),
    (["--minutes", "0.001"], "--minutes 0.001 is too short", "--minutes 10"),
    (
        ["--minutes", "soon"],
        "--minutes must be a number of minutes up to 100,000, got 'soon'",
        "recommend --help",
    ),
    (["--batches", "2,x"], "--batches must be whole numbers", "recommend --help"),
    (["-t", "empty.jsonl"], "empty.jsonl holds no question", "messages"),
    (["-t", "wrong.jsonl"], "wrong.jsonl:2: 'messages' must be a list", "messages"),
    (["-t", "broken.jsonl"], "broken.jsonl:1: not JSON", "messages"),
    (["-t", "one.jsonl"], "recommend needs development and held-out questions", "--limit"),
    (["-m", "hf:assisted"], "hf:assisted is a method of another program", "specbench run"),
    (["-m", "psl"], "no method 'psl'; did you mean", "specbench list methods"),
    (["-m", "vanilla"], "there is nothing to choose from", "-m sps,pld"),
    (
        ["--costs", "gone.json"],
        "the file of costs gone.json does not exist",
        "specbench predict --probe",
    ),
    (["--force"], "--force needs --resume", "--resume DIR --force"),
    (["--resume", "gone"], "gone contains no recommendation", "specbench recommend"),
    (["--resume", "gone", "--seed", "1"], "omit --seed", "--resume DIR"),
]


@pytest.mark.parametrize(("args", "message", "hint"), REFUSED)
def test_a_wrong_option_is_named_with_its_value_and_a_hint(run, tmp_path, args, message, hint):
    (tmp_path / "empty.jsonl").write_text("\n")
    traffic(tmp_path / "one.jsonl", "alone")
    traffic(tmp_path / "wrong.jsonl", "right")
    with (tmp_path / "wrong.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"messages": []}\n')
    (tmp_path / "broken.jsonl").write_text("{no\n")
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    first, *rest = [line for line in err.splitlines() if line.startswith(("error", "hint"))]
    assert message in first
    assert any(hint in line for line in rest)
    assert not list(tmp_path.glob("results/runs/*"))

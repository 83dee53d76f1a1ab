"""One bad question does not end a run: only the turn with the prompt error fails."""

import json
import shutil
from dataclasses import replace

import pytest

from specbench_cli.errors import ExitCode, PromptError
from specbench_cli.measure import bench
from specbench_cli.models.resolve import resolve
from specbench_cli.plan import tune
from specbench_cli.predict.recommend import halving
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.pairing import total_time
from specbench_cli.summary.speedups import compute_speedups

LONG = "The boats lay by the pier, and the harbour was quiet in the early morning. " * 6
REFUSING = (
    "{% for m in messages %}{% if 'pineapple' in m['content'] %}"
    "{{ raise_exception('no pineapples') }}{% endif %}{{ m['content'] }} {% endfor %}"
)
SILENT = (
    "{% if 'pineapple' not in messages[-1]['content'] %}{{ messages[-1]['content'] }}{% endif %}"
)

BAD = {
    "too long": (LONG, None, "mine/1, turn 2, has "),
    "template": ("A pineapple?", REFUSING, "the chat template of short rejects the conversation"),
    "no token": ("A pineapple?", SILENT, "mine/1, turn 2 has no tokens: the tokenizer of short"),
    "no embedding": ("Call <|tool|>.", None, "mine/1, turn 2 has the token 4096, and short has"),
}
"""For each kind of error: the second turn, the chat template, and the error in the record."""


@pytest.fixture
def target(tmp_path):
    """Return a function that writes a target with 160 positions and a given chat template.

    Its tokenizer has a token without an embedding.
    """

    def make(chat_template):
        folder = shutil.copytree(resolve("embedded-1m").path, tmp_path / "short")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 160}))
        tokens = json.loads((folder / "tokenizer.json").read_text())
        extra = {**tokens["added_tokens"][0], "id": 4096, "content": "<|tool|>"}
        tokens["added_tokens"].append(extra)
        (folder / "tokenizer.json").write_text(json.dumps(tokens))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        if chat_template is not None:
            settings["chat_template"] = chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return str(folder)

    return make


@pytest.fixture
def task(tmp_path):
    """Return a function that writes three conversations, given the second turn of the second."""

    def write(bad):
        rows = [["Name a fruit.", "Another?"], ["Name a fruit.", bad, "And then?"], ["A colour?"]]
        file = tmp_path / "mine.jsonl"
        file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in rows))
        return str(file)

    return write


KEYS = {
    (f"mine/{question}", turn, label)
    for question, turns in ((0, (1, 2)), (1, (1, 2)), (2, (1,)))
    for turn in turns
    for label in ("vanilla", "pld", "suffix")
}


def _check(outcome, message):
    assert {(r.prompt_id, r.turn, r.label) for r in outcome.records} == KEYS
    assert len(outcome.records) == len(KEYS)
    failed = [r for r in outcome.records if r.error is not None]
    assert {(r.prompt_id, r.turn) for r in failed} == {("mine/1", 2)}
    assert all(
        r.has_prompt_error and r.error.startswith("PromptError: prompt mine/1") for r in failed
    )
    assert all(message in r.error for r in failed)
    assert all(r.verdict.kind != "mismatch" for r in outcome.records if r.error is None)
    assert outcome.manifest["status"] == "finished"
    assert not outcome.manifest["dropped"]
    assert outcome.exit_code == ExitCode.BAD_ANSWER


@pytest.mark.parametrize(("turn", "template", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("more", [{}, {"batch": 2}], ids=["alone", "batch"])
def test_only_the_turn_with_a_prompt_error_fails(
    specbench, target, task, turn, template, message, more
):
    rows = ["pld"] if more else ["pld", "suffix"]
    config = {"target": target(template), "tasks": [task(turn)], "limit": None, **more}
    outcome = specbench(*rows, **config)
    if more:
        failed = [(r.prompt_id, r.turn, r.label) for r in outcome.records if r.error]
        assert sorted(failed) == [("mine/1", 2, "pld"), ("mine/1", 2, "vanilla")]
        return
    _check(outcome, message)
    assert sum("the run continues without this turn" in note for note in outcome.log.notes) == 1
    records_by_label = {label: outcome.by_label(label) for label in ("vanilla", "pld")}
    # A fifth of the turns failed, but these do not count as failures of the method.
    assert compute_speedups(records_by_label, total_time, 100).by_label["pld"].ratio


@pytest.mark.parametrize("after", [1, 5, 9, 11])
def test_run_with_a_prompt_error_is_resumed(specbench, target, task, after):
    turn, template, message = BAD["template"]
    config = {"target": target(template), "tasks": [task(turn)], "limit": None}
    with pytest.raises(KeyboardInterrupt):
        specbench("pld", "suffix", log=specbench.log(interrupt_after=after), **config)
    path = specbench.path(1)
    assert RunDir.open(path).manifest["status"] == "interrupted"
    _check(specbench(resume=path), message)


def test_question_with_a_bad_first_turn_is_rejected_with_all_similar_ones(
    specbench, target, tmp_path
):
    rows = [2 * LONG, "Name a fruit.", "A pineapple?", "Call <|tool|>.", 2 * LONG]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    with pytest.raises(PromptError) as fault:
        specbench("pld", target=target(REFUSING), tasks=[str(file)], limit=None)
    assert fault.value.message.startswith("prompt mine/0 has ")
    assert fault.value.message.endswith("(and 3 more failed: mine/2, mine/3, mine/4)")
    assert fault.value.exit_code == ExitCode.USAGE
    assert not (specbench.path(1) / "records.jsonl").exists()


def test_questions_outside_the_run_may_be_invalid(specbench, target, tmp_path):
    """The near-tie tolerance is measured on the other questions of a task too."""
    rows = [{"id": "good", "prompt": "Name a fruit."}] + [
        {"id": f"bad{n}", "prompt": "A pineapple?"} for n in range(3)
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"target": target(REFUSING), "tasks": [str(file)], "prompts": ["mine/good"]}
    outcome = specbench("pld", limit=None, judge="all", **config)
    assert outcome.exit_code == ExitCode.OK


def test_candidates_are_not_dropped_for_a_prompt_error(specbench, target, task):
    turn, template, _ = BAD["template"]
    config = {"target": target(template), "tasks": [task(turn)], "limit": None}
    outcome = specbench("pld", **config)
    records = {label: outcome.by_label(label) for label in ("vanilla", "pld")}
    trials = {"pld": halving.Trial("pld")}
    halving._judge(["pld"], trials, records, 1)
    assert trials["pld"].out is None
    twins = [replace(record, label="twin") for record in records["pld"]]
    method_runs = tuple(tune.MethodRun("pld", label, {}) for label in ("pld", "twin"))
    tuning = tune.Tuning({"pld": method_runs}, ())
    found = tune.choose(tuning, [*outcome.records, *twins], "time", {"target": 1})["pld"]
    assert found.n == 4
    assert found.costs["pld"] == found.costs["twin"] is not None


def test_answer_that_cannot_be_decoded_has_no_score(specbench, target, tmp_path, monkeypatch):
    def tokenizer_of(checkpoint, load=bench.load_tokenizer):
        def decode(ids, **_):
            raise IndexError("piece id is out of range")

        tokenizer = load(checkpoint)
        tokenizer.decode = decode
        return tokenizer

    monkeypatch.setattr(bench, "load_tokenizer", tokenizer_of)
    (tmp_path / "rows.jsonl").write_text('{"turns": ["A fruit?", "More?"], "reference": "a"}\n')
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nversion: '1'\nsource: {file: rows.jsonl}\nscorer: exact_match\n")
    outcome = specbench("pld", target=target(None), tasks=[str(file)], limit=None)
    assert [(r.turn, r.score, r.has_prompt_error) for r in outcome.by_label("pld")] == [
        (1, None, False),
        (2, None, True),
    ]
    assert "cannot decode an answer: piece id is out of range" in outcome.records[-1].error

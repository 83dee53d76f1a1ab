"""Tests of the scores in the records of a run."""

import json

import pytest
import yaml

from specbench_cli.errors import UsageError
from specbench_cli.scoring import score
from specbench_cli.tasks import decode_text, load_task

pytestmark = pytest.mark.usefixtures("small_pair")

CODE = {
    "name": "code",
    "version": "1",
    "source": {"file": "code.jsonl"},
    "program": "{answer}\n{test}\n",
    "scorer": "unit_tests",
    "template": "{prompt}",
    "family": "code",
}


@pytest.fixture
def code_task(tmp_path):
    """A coding task whose test passes for every answer that compiles."""
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "x = ?", "test": "pass"}) + "\n")
    (tmp_path / "code.yaml").write_text(yaml.safe_dump(CODE))
    return str(tmp_path / "code.yaml")


def test_every_turn_is_scored_from_the_answer_as_written(specbench):
    outcome = specbench("pld", limit=6, max_new_tokens=48)
    questions = {q.prompt_id: q for q in load_task("mini").questions}
    assert all(0 <= r.score <= 1 for r in outcome.records)
    from transformers import AutoTokenizer

    from specbench_cli.models import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded").path)
    for record in outcome.records:
        text = decode_text(tokenizer, record.output_ids)
        assert record.score == score(questions[record.prompt_id], record.turn, text)


def test_equal_answers_have_equal_scores(specbench):
    outcome = specbench("pld", limit=6, max_new_tokens=48)
    vanilla, pld = (outcome.by_label(label) for label in ("vanilla", "pld"))
    assert sorted((r.prompt_id, r.turn, r.score) for r in vanilla) == sorted(
        (r.prompt_id, r.turn, r.score) for r in pld
    )


@pytest.mark.parametrize(("run_code", "scored"), [(False, False), (True, True)])
def test_code_is_scored_only_if_it_may_be_run(specbench, code_task, run_code, scored):
    outcome = specbench(
        "pld", tasks=[code_task], max_new_tokens=4, run_code=run_code, uncontained=run_code
    )
    assert all((r.score is not None) == scored for r in outcome.records)
    assert outcome.manifest["containment"] == ("limits" if run_code else None)


def test_tests_that_do_not_compile_without_the_answer_are_rejected(specbench, tmp_path):
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "x = ?", "test": "pass"}) + "\n")
    program = "if True:\n    {answer}\n    {test}"
    (tmp_path / "code.yaml").write_text(yaml.safe_dump({**CODE, "program": program}))
    with pytest.raises(UsageError, match=r"code/0: the code after \{answer\} .* '\\n    pass'"):
        specbench("pld", tasks=[str(tmp_path / "code.yaml")], run_code=True, uncontained=True)

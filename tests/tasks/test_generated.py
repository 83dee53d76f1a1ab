"""The generated tasks: reproducible, verifiable, and `mini` held out by combination."""

import contextlib
import io
import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

import datasets_cfg
from recipes.tasks import agentic, repair
from recipes.tasks import rows as tasks
from specbench_cli.errors import UsageError
from specbench_cli.models import resolve
from specbench_cli.tasks import describe, load_task
from specbench_cli.training import generated
from specbench_cli.training.generated import lexicon
from specbench_cli.training.generated.german import clause
from specbench_cli.training.generated.world import WORLD

FOLDER = Path(datasets_cfg.__path__[0])
SHIPPED = {name: FOLDER / name / f"{name}.jsonl" for name in tasks.TASKS}
TRAINED_POSITIONS = 1024
"""Maximum position in the training of the embedded family; see its model card."""
WORD = re.compile(r"[^\W\d]+")


@pytest.fixture(scope="module")
def training() -> list[generated.GeneratedConversation]:
    return list(islice(generated.generate_rows(0, "train"), 30_000))


@pytest.fixture(scope="module")
def mini() -> list[generated.GeneratedConversation]:
    return tasks.mini_rows()


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[generated.GeneratedConversation]]:
    """Return the rows of every shipped file, by task."""
    return {
        name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for name, path in SHIPPED.items()
    }


def rows_of(
    shipped: dict[str, list[generated.GeneratedConversation]], task: str, category: str
) -> list[generated.GeneratedConversation]:
    return [row for row in shipped[task] if row["category"] == category]


def words(rows: list[generated.GeneratedConversation]) -> set[str]:
    texts = (text for row in rows for text in row["turns"] + row["reference"])
    return {word for text in texts for word in WORD.findall(text)}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_shipped_file_equals_the_generator_s_output(task: str) -> None:
    lines = "".join(f"{line}\n" for line in tasks.lines(task))
    assert lines == SHIPPED[task].read_text(encoding="utf-8")


def test_mini_has_80_different_rows_per_family(
    mini: list[generated.GeneratedConversation],
) -> None:
    assert Counter(row["family"] for row in mini) == dict.fromkeys(generated.FAMILIES, 80)
    assert len({row["turns"][0] for row in mini}) == len({row["id"] for row in mini}) == 480


def test_no_prompt_of_mini_occurs_in_training(
    mini: list[generated.GeneratedConversation], training: list[generated.GeneratedConversation]
) -> None:
    seen = {row["turns"][0] for row in training}
    assert not [row["id"] for row in mini if row["turns"][0] in seen]


def test_every_word_and_template_of_mini_occurs_in_training(
    mini: list[generated.GeneratedConversation], training: list[generated.GeneratedConversation]
) -> None:
    assert words(mini) <= words(training)
    assert {row["template"] for row in mini} < {row["template"] for row in training}


def test_held_out_templates_never_use_half_b_in_training(
    training: list[generated.GeneratedConversation],
) -> None:
    held_out = {template.name for template in generated.TEMPLATES if template.held_out}
    half_b = {*lexicon.NAMES[1::2], *lexicon.TOWNS[1::2], *lexicon.ITEMS[1::2]}
    half_b |= {country.name for country in WORLD[1::2]}
    assert not half_b & words([row for row in training if row["template"] in held_out])


def test_the_open_split_contains_no_held_out_wording() -> None:
    held_out = {template.name for template in generated.TEMPLATES if template.held_out}
    seen = {row["template"] for row in islice(generated.generate_rows(0, "open"), 600)}
    assert seen == {template.name for template in generated.TEMPLATES} - held_out


def test_each_family_has_held_out_and_open_templates_with_unique_names() -> None:
    kinds = {(t.family, t.held_out) for t in generated.TEMPLATES}
    assert kinds == {
        (family, matching) for family in generated.FAMILIES for matching in (True, False)
    }
    assert len({t.name for t in generated.TEMPLATES}) == len(generated.TEMPLATES)


def test_a_row_depends_only_on_seed_split_and_index() -> None:
    rows = list(islice(generated.generate_rows(7, "train"), 60))
    assert rows[41] == generated.generate_row(7, "train", 41)
    assert rows != list(islice(generated.generate_rows(8, "train"), 60))


def test_each_question_has_its_answer(training: list[generated.GeneratedConversation]) -> None:
    for row in training[:3_000]:
        assert len(row["turns"]) == len(row["reference"]) == 1 + (row["family"] == "multi_turn")
        assert all(text == text.strip() and text for text in row["turns"] + row["reference"])


def test_every_line_of_arithmetic_is_right_and_the_last_result_is_the_answer(
    training: list[generated.GeneratedConversation],
) -> None:
    rows = [row for row in training if row["family"] == "math_reasoning"]
    for row in rows:
        work, answer = row["reference"][0].split("\n#### ")
        steps = re.findall(r"(\d+)([-+*/])(\d+) = \$?(\d+)", work)
        for left, sign, right, result in steps:
            a, b = int(left), int(right)
            expected = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]
            assert int(result) == expected >= 0, row
        assert steps[-1][3] == answer, row


def test_every_step_of_a_chain_starts_from_the_previous_result(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    rows = rows_of(shipped, "chains", "sums")
    assert len(rows) == 180
    for row in rows:
        (answer,) = row["reference"]
        numbers = re.findall(r"(\d+)([-+*/])(\d+) = (\d+)", answer)
        (_, _, _, first), (left, _, right, second) = numbers
        assert first in (left, right) and answer.endswith(f"\n#### {second}")
        assert len(answer.splitlines()) == 3


def test_chains_use_trained_wordings_and_do_not_repeat(
    shipped: dict[str, list[generated.GeneratedConversation]],
    training: list[generated.GeneratedConversation],
) -> None:
    rows = shipped["chains"]
    assert len({row["turns"][0] for row in rows}) == len({row["id"] for row in rows}) == 240
    assert words(rows) <= words(training)
    held_out = {template.name for template in generated.TEMPLATES if template.held_out}
    half_b = {*lexicon.NAMES[1::2], *lexicon.ITEMS[1::2]}
    assert not half_b & words([row for row in rows if row["template"] in held_out])
    assert not {row["turns"][0] for row in tasks.chain_rows(1)} >= {row["turns"][0] for row in rows}


def test_rag_answers_occur_in_the_passage_they_cite(
    training: list[generated.GeneratedConversation],
) -> None:
    rows = [row for row in training[:3_000] if row["family"] == "rag"]
    for row in rows:
        named = re.search(r"See passage (\d+)\.", row["reference"][0])
        assert named
        (passage,) = re.findall(rf"Passage {named[1]}: (.*)", row["turns"][0])
        numbers = re.findall(r"\d+", row["reference"][0].removesuffix(named[0]))
        assert all(number in passage for number in numbers), row


def test_german_sentences_agree_in_gender_and_invert_after_a_fronted_time() -> None:
    always_last = random.Random()
    always_last.choice = lambda words: words[-1]  # type: ignore[method-assign, assignment]
    draw = generated.Draw(always_last)
    assert clause(draw, "past", True) == (
        "On Friday the strong student repaired a gray ship at the harbor.",
        "Am Freitag reparierte die starke Studentin am Hafen ein graues Schiff.",
    )
    assert clause(draw, "negated", False) == (
        "The strong student does not repair a gray ship at the harbor.",
        "Die starke Studentin repariert am Hafen kein graues Schiff.",
    )


def test_every_word_occurs_in_the_other_wordings_of_a_skill() -> None:
    skills = {template.fill for template in generated.TEMPLATES}
    for fill in skills:
        held_out = [t.held_out for t in generated.TEMPLATES if t.fill is fill]
        assert held_out == [False, True, False], fill


def test_each_country_has_a_capital_of_its_own() -> None:
    assert len({country.name for country in WORLD}) == len(WORLD) == 48
    assert len({country.capital for country in WORLD}) == 48


def test_more_rows_than_the_lexicons_allow_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="too many"):
        tasks.mini_rows(per_family=1000)


def test_an_unknown_split_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="test"):
        generated.generate_rows(0, "test")  # type: ignore[arg-type]


def test_rows_are_json_with_the_fields_of_a_task(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    fields = {"id", "family", "category", "template", "turns", "reference"}
    assert all(set(row) == fields for rows in shipped.values() for row in rows)


def test_best_of_n_shares_no_question_with_mini_or_training(
    shipped: dict[str, list[generated.GeneratedConversation]],
    training: list[generated.GeneratedConversation],
) -> None:
    rows = shipped["best-of-n"]
    assert Counter(row["family"] for row in rows) == dict.fromkeys(generated.FAMILIES, 8)
    other_prompts = {row["turns"][0] for row in [*training, *shipped["mini"]]}
    assert not [row["id"] for row in rows if row["turns"][0] in other_prompts]
    held_out = {template.name for template in generated.TEMPLATES if template.held_out}
    assert {row["template"] for row in rows} <= held_out


@pytest.mark.parametrize("task", ["agentic", "repair"])
def test_workflows_differ_and_answer_every_turn(
    task: str, shipped: dict[str, list[generated.GeneratedConversation]]
) -> None:
    rows = shipped[task]
    assert len({row["turns"][0] for row in rows}) == len({row["id"] for row in rows}) == len(rows)
    assert all(len(row["turns"]) == len(row["reference"]) >= 3 for row in rows)
    module = {"agentic": agentic, "repair": repair}[task]
    workflows = {f"{flow.category}_{flow.name}" for flow in module.WORKFLOWS}
    assert {row["template"] for row in rows} == workflows


@pytest.mark.parametrize("task", ["agentic", "repair", "best-of-n"])
def test_conversations_fit_the_positions_that_the_embedded_family_was_trained_on(
    task: str, shipped: dict[str, list[generated.GeneratedConversation]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded").path)
    budget = describe(task).get("max_new_tokens", 128)
    for row in shipped[task]:
        prompts, answers = (
            [len(ids) for ids in tokenizer(texts).input_ids]
            for texts in (row["turns"], row["reference"])
        )
        assert sum(prompts) + len(prompts) * (budget + 2) + 1 <= TRAINED_POSITIONS, row["id"]
        assert max(answers) < budget, row["id"]


def test_every_snippet_raises_the_quoted_error_and_its_last_correction_runs(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    def outcome(program: str) -> str:
        stdout = io.StringIO()
        try:
            with contextlib.redirect_stdout(stdout):
                exec(program, {"__name__": "snippet"})  # noqa: S102
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return stdout.getvalue()

    for row in rows_of(shipped, "repair", "snippet"):
        for turn, (prompt, answer) in enumerate(
            zip(row["turns"], row["reference"], strict=True), 1
        ):
            found = re.search(r"```python\n(.*)\n```\n(.*)\n", prompt, re.DOTALL)
            assert found
            assert outcome(found[1]) == found[2], row["id"]
            if turn < len(row["turns"]):
                assert f"```python\n{answer}\n```" in row["turns"][turn]
            else:
                assert "Error" not in outcome(answer), row["id"]


def test_manuals_contain_the_requested_lists(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    for row in rows_of(shipped, "repair", "manual"):
        entries = re.findall(r"  (--(\w+)( \w+)?): (.*)", row["turns"][0])
        values = {name: takes.replace(" N", " 3").replace(" FILE", " a.txt")
                  for _, name, takes, _ in entries}  # fmt: skip
        options = [usage for usage, *_ in entries]
        pairs = [f"--{name} --{other}" for _, name, _, does in entries
                 for other in re.findall(r"Cannot be used with --(\w+)\.", does)]  # fmt: skip
        command = row["template"].removeprefix("manual_")
        commands = [f"{command} --{name}{values[name]} --{other}{values[other]}"
                    for _, name, _, does in entries
                    for other in re.findall(r"Needs --(\w+)\.", does)]  # fmt: skip
        assert len(pairs) == len(commands) == 2
        assert [text.splitlines() for text in row["reference"]] == [options, pairs, commands]


def test_orders_are_those_of_the_tool_and_their_total_is_correct(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    for row in rows_of(shipped, "agentic", "orders"):
        criterion = row["template"].rpartition("_")[2]
        place = ["buyer", "town", "item"].index(criterion) + 1
        value = next(w for w in WORD.findall(row["turns"][0].rpartition("?")[0].rpartition(".")[2])
                     if w in {*lexicon.NAMES, *lexicon.TOWNS, *lexicon.ITEMS})  # fmt: skip
        table: list[list[str]] = []
        for turn, answer in list(zip(row["turns"], row["reference"], strict=True))[1:]:
            table += [line.split(" | ") for line in turn.splitlines() if " | " in line]
            cancelled = re.search(r"order (\d+) was cancelled", turn)
            table = [
                row_cells for row_cells in table if not cancelled or row_cells[0] != cancelled[1]
            ]
            matching = [row_cells for row_cells in table if row_cells[place] == value]
            total = f"total: {sum(int(row_cells[4]) for row_cells in matching)}"
            assert answer.splitlines() == [
                *(" | ".join(row_cells) for row_cells in matching),
                total,
            ]


def test_agent_facts_occur_in_the_cited_passage(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    for row in rows_of(shipped, "agentic", "documents"):
        passages: dict[str, str] = {}
        for turn, answer in list(zip(row["turns"], row["reference"], strict=True))[1:]:
            passages |= dict(re.findall(r"Passage (\d): (.*)", turn))
            for line in answer.splitlines():
                *facts, number = (part.partition(": ")[2] for part in line.split("; "))
                assert all(fact in passages[number] for fact in facts), row["id"]


def test_a_plan_follows_the_tool_results(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    for row in rows_of(shipped, "agentic", "plan"):
        steps = [line.partition("] ")[2] for line in row["reference"][0].splitlines()]
        done: set[str] = set()
        for turn, answer in list(zip(row["turns"], row["reference"], strict=True))[1:]:
            done |= set(re.findall(r"([^:,\n]+): done", turn.replace(", ", ",")))
            if failed := re.search(r", ([^:]+): not possible.* place: (.*)\.", turn):
                steps[steps.index(failed[1])] = failed[2]
            expected = [f"[{'done' if step in done else 'open'}] {step}" for step in steps]
            assert answer.splitlines() == expected, row["id"]
        assert done == set(steps)


def test_numbers_of_a_summary_occur_in_the_current_article(
    shipped: dict[str, list[generated.GeneratedConversation]],
) -> None:
    for row in rows_of(shipped, "agentic", "revision"):
        assert len(set(row["turns"])) == len(set(row["reference"])) == 3
        for turn, answer in zip(row["turns"], row["reference"], strict=True):
            assert set(re.findall(r"\d+", answer)) <= set(re.findall(r"\d+", turn)), row["id"]


def test_only_samples_repeat_a_prompt() -> None:
    questions = load_task("best-of-n").questions
    assert len(questions) == 48 * 8
    assert len({question.turns[0] for question in questions}) == 48

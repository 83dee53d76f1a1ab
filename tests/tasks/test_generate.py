"""The generated tasks: seeded, checkable, and `mini` held out by combination."""

import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

import datasets_cfg
from specbench_cli.errors import UsageError
from specbench_cli.tasks import generate
from specbench_cli.tasks.generate import lexicon
from specbench_cli.tasks.generate.german import clause
from specbench_cli.tasks.generate.world import WORLD

SHIPPED = Path(datasets_cfg.__path__[0]) / "mini" / "mini.jsonl"
WORD = re.compile(r"[^\W\d]+")


@pytest.fixture(scope="module")
def training() -> list[generate.Row]:
    return list(islice(generate.stream(0, "train"), 30_000))


@pytest.fixture(scope="module")
def mini() -> list[generate.Row]:
    return generate.mini_rows()


def words(rows: list[generate.Row]) -> set[str]:
    texts = (text for row in rows for text in row["turns"] + row["reference"])
    return {word for text in texts for word in WORD.findall(text)}


def test_the_shipped_file_is_what_the_generator_writes() -> None:
    lines = "".join(f"{line}\n" for line in generate.mini_lines())
    assert lines == SHIPPED.read_text(encoding="utf-8")


def test_mini_has_80_rows_a_family_and_none_twice(mini: list[generate.Row]) -> None:
    assert Counter(row["family"] for row in mini) == dict.fromkeys(generate.FAMILIES, 80)
    assert len({row["turns"][0] for row in mini}) == len({row["id"] for row in mini}) == 480


def test_no_prompt_of_mini_occurs_in_training(
    mini: list[generate.Row], training: list[generate.Row]
) -> None:
    seen = {row["turns"][0] for row in training}
    assert not [row["id"] for row in mini if row["turns"][0] in seen]


def test_every_word_and_template_of_mini_occurs_in_training(
    mini: list[generate.Row], training: list[generate.Row]
) -> None:
    assert words(mini) <= words(training)
    assert {row["template"] for row in mini} < {row["template"] for row in training}


def test_held_out_templates_never_meet_half_b_in_training(training: list[generate.Row]) -> None:
    held_out = {template.name for template in generate.TEMPLATES if template.held_out}
    half_b = {*lexicon.NAMES[1::2], *lexicon.TOWNS[1::2], *lexicon.ITEMS[1::2]}
    half_b |= {country.name for country in WORLD[1::2]}
    assert not half_b & words([row for row in training if row["template"] in held_out])


def test_the_open_split_shows_no_held_out_wording() -> None:
    held_out = {template.name for template in generate.TEMPLATES if template.held_out}
    seen = {row["template"] for row in islice(generate.stream(0, "open"), 600)}
    assert seen == {template.name for template in generate.TEMPLATES} - held_out


def test_each_family_has_held_out_and_open_templates_with_names_of_their_own() -> None:
    kinds = {(t.family, t.held_out) for t in generate.TEMPLATES}
    assert kinds == {(family, held) for family in generate.FAMILIES for held in (True, False)}
    assert len({t.name for t in generate.TEMPLATES}) == len(generate.TEMPLATES)


def test_a_row_depends_on_seed_split_and_index_alone() -> None:
    rows = list(islice(generate.stream(7, "train"), 60))
    assert rows[41] == generate.row(7, "train", 41)
    assert rows != list(islice(generate.stream(8, "train"), 60))


def test_each_question_has_its_answer(training: list[generate.Row]) -> None:
    for row in training[:3_000]:
        assert len(row["turns"]) == len(row["reference"]) == 1 + (row["family"] == "multi_turn")
        assert all(text == text.strip() and text for text in row["turns"] + row["reference"])


def test_every_line_of_arithmetic_is_right_and_the_last_result_is_the_answer(
    training: list[generate.Row],
) -> None:
    rows = [row for row in training if row["family"] == "math_reasoning"]
    for row in rows:
        work, answer = row["reference"][0].split("\n#### ")
        steps = re.findall(r"(\d+)([-+*/])(\d+) = \$?(\d+)", work)
        for left, sign, right, result in steps:
            a, b = int(left), int(right)
            wanted = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]
            assert int(result) == wanted >= 0, row
        assert steps[-1][3] == answer, row


def test_rag_answers_stand_in_the_passage_they_name(training: list[generate.Row]) -> None:
    rows = [row for row in training[:3_000] if row["family"] == "rag"]
    for row in rows:
        named = re.search(r"See passage (\d+)\.", row["reference"][0])
        assert named
        (passage,) = re.findall(rf"Passage {named[1]}: (.*)", row["turns"][0])
        numbers = re.findall(r"\d+", row["reference"][0].removesuffix(named[0]))
        assert all(number in passage for number in numbers), row


def test_german_agrees_in_gender_and_turns_round_after_a_fronted_time() -> None:
    always_last = random.Random()
    always_last.choice = lambda words: words[-1]  # type: ignore[method-assign, assignment]
    draw = generate.Draw(always_last)
    assert clause(draw, "past", True) == (
        "On Friday the strong student repaired a gray ship at the harbor.",
        "Am Freitag reparierte die starke Studentin am Hafen ein graues Schiff.",
    )
    assert clause(draw, "negated", False) == (
        "The strong student does not repair a gray ship at the harbor.",
        "Die starke Studentin repariert am Hafen kein graues Schiff.",
    )


def test_a_skill_meets_every_word_in_its_other_wordings() -> None:
    skills = {template.fill for template in generate.TEMPLATES}
    for fill in skills:
        held_out = [t.held_out for t in generate.TEMPLATES if t.fill is fill]
        assert held_out == [False, True, False], fill


def test_each_country_has_a_capital_of_its_own() -> None:
    assert len({country.name for country in WORLD}) == len(WORLD) == 48
    assert len({country.capital for country in WORLD}) == 48


def test_more_rows_than_the_lexicons_give_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="too many"):
        generate.mini_rows(per_family=1000)


def test_an_unknown_split_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="test"):
        generate.stream(0, "test")  # type: ignore[arg-type]


def test_rows_are_json_with_the_fields_of_a_task() -> None:
    fields = {"id", "family", "category", "template", "turns", "reference"}
    for line in SHIPPED.read_text(encoding="utf-8").splitlines():
        assert set(json.loads(line)) == fields

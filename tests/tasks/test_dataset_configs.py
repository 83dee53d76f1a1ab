"""Shipped tasks, read from small files in the format of the originals.

`fixtures/` contains invented rows with the columns of the originals. Binary files are packed from
them here.
"""

import gzip
import io
import json
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from recipes.tasks.rows import TASKS
from specbench_cli.errors import EnvironmentFault, ExitCode
from specbench_cli.scoring import score
from specbench_cli.tasks import describe, json_schema, load, load_task, task_names

FIXTURES = Path(__file__).parent / "fixtures"
CARDS = sorted(load.SHIPPED.glob("*.yaml"))
DOWNLOADED = [name for name in task_names() if name not in (*TASKS, "json")]


def rows(fixture):
    lines = (FIXTURES / fixture).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def pack_parquet(fixture):
    packed = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(fixture)), packed)
    return packed.getvalue()


def pack_archive(*fixtures):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for fixture in fixtures:
            file.writestr(f"data/{fixture}", (FIXTURES / fixture).read_bytes())
    return packed.getvalue()


def make_original(file):
    """Return the bytes of a file in the format of the original."""
    match file:
        case "longbench.zip":
            return pack_archive("gov_report.jsonl", "qmsum.jsonl")
        case "speed/qualitative/test.parquet":
            return pack_parquet("speed_bench.jsonl")
        case "cnn_dailymail_test.parquet" | "aime_2024.parquet":
            return pack_parquet(Path(file).with_suffix(".jsonl"))
        case _ if file.startswith("mgsm/"):
            return (FIXTURES / "mgsm.tsv").read_bytes()
    return (FIXTURES / file).read_bytes()


def copy_config(name, folder, count, **files):
    """Write a shipped task's YAML next to its fixture files.

    The copy has no checksums, and its row count is that of the fixtures.
    """
    facts = describe(name) | {"rows": count}
    for source in facts["source"] if isinstance(facts["source"], list) else [facts["source"]]:
        for download in ("sha256", "url", "hub"):
            source.pop(download, None)
        path = folder / source["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files.get(source["file"]) or make_original(source["file"]))
    card = folder / f"{name}.yaml"
    card.write_text(yaml.safe_dump(facts, sort_keys=False), encoding="utf-8")
    return str(card)


@pytest.mark.parametrize(
    ("name", "count", "first_id", "family", "first_turn", "reference"),
    [
        ("aime", 4, "2024-60", "math_reasoning", "Find the number of positive div", "060"),
        ("alpaca", 2, "0", "other", "Name three fruits that grow on", "Apples, pears and plums."),
        ("cnn_dm", 2, "0" * 39 + "1", "summarization", "Summarize: (CNN)A bridge", "Bridge in H"),
        ("gsm8k", 2, "0", "math_reasoning", "Ida has 3 boxes", "There are 3*4"),
        (
            "humaneval",
            3,
            "HumanEval/0",
            "code",
            "Complete the code I provided.\n\nfrom",
            "    resu",
        ),
        ("longbench", 2, "gov_report-aaaa", "summarization", "You are given a report", "3 million"),
        ("math500", 2, "test/prealgebra/1.json", "math_reasoning", "Simplify", "\\frac{3}{4}"),
        ("mbpp", 2, "11", "code", "You are an expert Python programmer", "def larger(a, b)"),
        ("mgsm", 22, "bn-0", "math_reasoning", "Ida hat 3 Schachteln mit je 4 Stiften", "12"),
        ("mt_bench", 2, "81", "multi_turn", "Write a letter", None),
        ("spec_bench", 4, "81", "multi_turn", "Write a letter", None),
        ("speed_bench", 3, "0123456789abcdef", "code", "Write a loop over", None),
    ],
)
def test_every_task_loads_from_its_original_format(
    tmp_path, name, count, first_id, family, first_turn, reference
):
    task = load_task(copy_config(name, tmp_path, count))
    first = task.questions[0]
    assert len(task.questions) == count
    assert first.prompt_id.startswith(f"{name}/{first_id}")
    assert first.family == family
    assert first.turns[0].startswith(first_turn)
    assert first.reference is None or first.reference[0].startswith(reference)
    assert (first.reference is None) == (reference is None)


def test_every_shipped_task_has_a_case():
    (mark,) = test_every_task_loads_from_its_original_format.pytestmark
    assert [case[0] for case in mark.args[1]] == DOWNLOADED


@pytest.mark.parametrize("name", ["aime", "gsm8k", "humaneval", "math500", "mbpp", "mgsm"])
def test_scorers_accept_the_reference_and_reject_another_question_s(tmp_path, name):
    counts = {"aime": 4, "humaneval": 3, "mgsm": 22}
    questions = load_task(copy_config(name, tmp_path, counts.get(name, 2))).questions[:3]
    others = questions[1:] + questions[:1]
    for question, other in zip(questions, others, strict=True):
        assert score(question, 1, question.reference[0], run_code=True, uncontained=True) == 1
        if question.reference != other.reference:
            assert score(question, 1, other.reference[0], run_code=True, uncontained=True) == 0


def test_parts_of_a_task_have_their_categories_and_prompts(tmp_path):
    report, meeting = load_task(copy_config("longbench", tmp_path, 2)).questions
    assert [report.category, meeting.category] == ["gov_report", "qmsum"]
    assert "The department spent" in report.turns[0]
    assert meeting.turns[0].endswith("Query: What did Ida think of the remote control?\nAnswer:")


def test_lists_in_a_prompt_become_lines_and_tests_surround_the_answer(tmp_path):
    larger, vowels = load_task(copy_config("mbpp", tmp_path, 2)).questions
    assert "assert larger(1, 2) == 2\nassert larger(5, 2) == 5\n" in larger.turns[0]
    assert vowels.program == ("", "\nVOWELS = 'aeiou'\nassert vowels('banana') == 3\n")


def test_a_gzipped_original_is_read_under_its_plain_name(tmp_path):
    card = copy_config("humaneval", tmp_path, 3)
    (tmp_path / "humaneval.jsonl.gz").write_bytes(
        gzip.compress((tmp_path / "humaneval.jsonl").read_bytes())
    )
    (tmp_path / "humaneval.jsonl").unlink()
    assert len(load_task(card).questions) == 3


def test_placeholder_rows_are_refused_with_a_hint(tmp_path):
    raw = pack_parquet("speed_bench_unprepared.jsonl")
    card = copy_config("speed_bench", tmp_path, 3, **{"speed/qualitative/test.parquet": raw})
    with pytest.raises(EnvironmentFault) as caught:
        load_task(card)
    assert "2 of 3 questions are placeholders" in caught.value.message
    assert "speed_bench/1123456789abcdef" in caught.value.message
    assert "prepare_data.py --dataset speed --config qualitative" in caught.value.hint
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("name", "count", "file", "damage", "message"),
    [
        ("cnn_dm", 2, "cnn_dailymail_test.parquet", lambda d: d[:-9], "not a whole parquet file"),
        (
            "cnn_dm",
            2,
            "cnn_dailymail_test.parquet",
            lambda d: b"<html>",
            "not a whole parquet file",
        ),
        ("longbench", 2, "longbench.zip", lambda d: d[: len(d) // 2], "not a whole zip archive"),
        (
            "longbench",
            2,
            "longbench.zip",
            lambda d: pack_archive("qmsum.jsonl"),
            "holds no data/gov_r",
        ),
        ("humaneval", 3, "humaneval.jsonl", lambda d: gzip.compress(d)[:-9], "cannot be read"),
        ("mbpp", 2, "mbpp.jsonl", lambda d: d[:-9], "mbpp.jsonl:4 cannot be read: not JSON"),
        ("mgsm", 22, "mgsm/mgsm_de.tsv", lambda d: d[:30], ":1 cannot be read: 1 columns instead"),
        ("mgsm", 22, "mgsm/mgsm_de.tsv", lambda d: b"\xff\tx", "not UTF-8"),
        ("gsm8k", 2, "gsm8k_test.jsonl", lambda d: d.splitlines()[0], "contains 1 questions, but"),
    ],
)
def test_a_damaged_file_is_one_error(tmp_path, name, count, file, damage, message):
    card = copy_config(name, tmp_path, count, **{file: damage(make_original(file))})
    with pytest.raises(EnvironmentFault) as caught:
        load_task(card)
    assert message in caught.value.message
    assert file in caught.value.message
    assert "original" in caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_the_editor_schema_matches_the_dataset_config():
    committed = (load.SHIPPED / "schema.json").read_text(encoding="utf-8")
    assert committed == json_schema()


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
def test_every_dataset_config_has_name_schema_licence_and_paper(card):
    first, *_ = card.read_text(encoding="utf-8").splitlines()
    facts = describe(card.stem)
    assert first == "# yaml-language-server: $schema=schema.json"
    assert facts["name"] == card.stem
    assert facts["licence"] and facts["citation"] and facts["title"] and facts["rows"] > 0


@pytest.mark.parametrize("name", DOWNLOADED)
def test_every_download_is_pinned_and_other_sources_say_how_to_get_them(name):
    card = load.read_dataset_config(load.SHIPPED / f"{name}.yaml")
    for source in card.sources:
        assert source.sha256 or card.obtain
        assert source.url or source.hub or card.obtain
        assert source.hub is None or len(source.hub.revision) == 40


def test_tasks_of_the_embedded_pair_are_those_it_was_trained_on():
    trained = {name for name in task_names() if describe(name).get("embedded") == "trained"}
    assert trained == {"best-of-n", "chains", "gsm8k", "mini"}

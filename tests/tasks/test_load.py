"""Tasks by name, from YAML and from JSON lines."""

import gzip
import json
import os
import textwrap
import zipfile
from pathlib import Path

import pytest

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.tasks import describe, formats, load, load_task, select_questions, task_names


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


CONFIG = "name: own\nversion: '1'\nsource: {file: rows.jsonl}\n"


def write_config(path: Path, body: str) -> Path:
    path.write_text(textwrap.dedent(body), encoding="utf-8")
    return path


def test_shipped_tasks_are_listed_and_described_without_their_data(monkeypatch):
    monkeypatch.delenv("SPECBENCH_DATA", raising=False)
    assert {"gsm8k", "mini", "mt_bench", "spec_bench"} <= set(task_names())
    assert [describe(name)["name"] for name in task_names()] == task_names()


def test_chat_categories_of_spec_bench_form_one_family_and_others_keep_their_name():
    spec_bench = load.read_dataset_config(load.SHIPPED / "spec_bench.yaml")
    mt_bench = load.read_dataset_config(load.SHIPPED / "mt_bench.yaml")
    chat = "writing roleplay reasoning math coding extraction stem humanities".split()
    assert {spec_bench.get_family(category) for category in chat} == {"multi_turn"}
    assert {mt_bench.get_family(category) for category in chat} == {"multi_turn"}
    for category in ("translation", "summarization", "qa", "math_reasoning", "rag"):
        assert spec_bench.get_family(category) == category


def test_unknown_task_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'spec_bench'") as caught:
        load_task("Spec-Bench")
    assert "gsm8k" in caught.value.hint


def test_own_jsonl_takes_turns_prompt_or_question(tmp_path):
    path = jsonl(
        tmp_path / "mine.jsonl",
        {"turns": ["a", "b"], "question_id": 7, "category": "writing"},
        {"prompt": "c", "id": "x", "family": "code", "reference": "d"},
        {"question": "e", "id": 0, "category": "qa", "reference": ["f", ["g", "h"]]},
    )
    task = load_task(str(path))
    first, second, third = task.questions
    assert (task.name, task.embedded, len(task.sha256)) == ("mine", "plumbing", 64)
    assert (first.prompt_id, first.turns, first.family, first.category) == (
        "mine/7",
        ("a", "b"),
        "other",
        "writing",
    )
    assert first.reference is None
    assert first.cluster == first.prompt_id
    assert (second.family, second.category, second.reference) == ("code", "code", ("d",))
    assert (third.family, third.reference) == ("qa", ("f", "g\nh"))


def test_ids_default_to_the_row_index_and_blank_lines_do_not_count(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b\xe2\x80\xa8c"}')
    questions = load_task(str(path)).questions
    assert [q.prompt_id for q in questions] == ["mine/0", "mine/1"]
    assert questions[1].turns == ("b\u2028c",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nope", "not JSON"),
        (r'{"prompt": "\uD800"}', "not JSON: 'utf-8' codec"),
        ('{"prompt": ' + "9" * 5000 + "}", "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"text": "a"}', "no 'turns' or 'prompt' or 'question', only text"),
        ('{"turns": []}', "'turns' must be"),
        ('{"turns": ["a", " "]}', "'turns' must be"),
        ('{"turns": ["a", 3]}', "'turns' must be"),
        ('{"prompt": 3}', "'prompt' must be"),
        ('{"prompt": "a", "id": true}', "'id' must be"),
        ('{"prompt": "a", "id": "x\\ny"}', "'id' must be"),
        ('{"prompt": "a", "category": 3}', "'category' must be"),
        ('{"prompt": "a", "family": "chat"}', "family 'chat' is not one of multi_turn"),
        ('{"prompt": "a", "reference": true}', "'reference' must be"),
        ('{"prompt": "a", "reference": [3]}', "'reference' must hold"),
    ],
)
def test_malformed_row_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine", "id": "first"}\n\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        load_task(str(path))
    assert caught.value.message.startswith(f"{path}:3: ")
    assert message in caught.value.message
    assert "turns" in caught.value.hint


def test_an_id_given_twice_is_named_by_both_lines(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"})
    with pytest.raises(UsageError, match=r"jsonl:2: id 'mine/1' was given in line 1 already"):
        load_task(str(path))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="holds no question"):
        load_task(str(path))


def test_missing_task_file_is_refused():
    with pytest.raises(UsageError, match="no such task file"):
        load_task("nowhere/mine.jsonl")


def test_file_name_that_cannot_be_a_task_name_is_refused(tmp_path):
    path = jsonl(tmp_path / "my questions.jsonl", {"prompt": "a"})
    with pytest.raises(UsageError, match="file's name becomes the task's name"):
        load_task(str(path))


def test_a_yaml_file_adds_a_task(tmp_path):
    jsonl(
        tmp_path / "rows.jsonl",
        {"key": "k1", "ask": "a", "kind": "sums", "tpl": "t", "answer": "1"},
        {"key": "k2", "ask": ["b", "c"], "kind": "chat", "tpl": "t"},
    )
    path = write_config(
        tmp_path / "own.yaml",
        """
        name: own
        version: "2"
        source: {file: rows.jsonl}
        rows: 2
        fields: {id: key, turns: ask, category: kind, cluster: tpl, reference: answer}
        families: {sums: math_reasoning}
        family: multi_turn
        scorer: {math_reasoning: final_number, default: exact_match}
        max_new_tokens: 32
        embedded: trained
        """,
    )
    task = load_task(str(path))
    first, second = task.questions
    assert (task.name, task.version, task.max_new_tokens, task.embedded) == (
        "own",
        "2",
        32,
        "trained",
    )
    assert (first.prompt_id, first.cluster, first.family) == ("own/k1", "own/t", "math_reasoning")
    assert (second.turns, second.cluster, second.family) == (("b", "c"), "own/t", "multi_turn")
    assert str(tmp_path) not in json.dumps(task.sources)
    assert (first.scorer, second.scorer) == ("final_number", "exact_match")


def test_samples_are_separate_questions_in_one_cluster(tmp_path):
    jsonl(tmp_path / "rows.jsonl", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"})
    body = """
        name: own
        version: "1"
        source: {file: rows.jsonl}
        rows: 2
        samples: 3
        """
    task = load_task(str(write_config(tmp_path / "own.yaml", body)))
    found = [(q.prompt_id, q.cluster, q.base_id, q.sample) for q in task.questions]
    assert found == [
        (f"own/{id_}/{n}", f"own/{id_}", f"own/{id_}", n) for id_ in "ab" for n in (1, 2, 3)
    ]
    assert task.samples == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("name: [", "not valid YAML"),
        (CONFIG + "samples: 0", "own.yaml:4: samples must be at least 1, got 0"),
        (CONFIG + "samples: 1001", "own.yaml:4: samples must be at most 1000, got 1001"),
        ("[1]", "must consist of `key: value` lines, got list"),
        (CONFIG + "row: 3", "row is not known; did you mean 'rows'?"),
        (CONFIG + "rows: 0", "own.yaml:4: rows must be at least 1, got 0"),
        (CONFIG + "name: twice", "own.yaml:4: 'name' is already on line 1"),
        (CONFIG + "fields:\n  id: key\n  turns: [a]", "own.yaml:6: fields.turns must be text"),
        ("name: own\nsource: {file: a}", "version is missing"),
        (
            "name: own\nversion: '1'\nsource: {file: a.jsonl}\ncolour: red",
            "colour is not known; did you mean",
        ),
        (
            "name: own\nversion: '1'\nsource: {file: a.jsonl, sha256: zz}",
            "source.sha256 must be valid",
        ),
        (
            "name: own\nversion: '1'\nsource: {file: ../a.jsonl}",
            "source.file must be a relative path",
        ),
        (
            "name: own\nversion: '1'\nsource: {file: /a.jsonl}",
            "source.file must be a relative path",
        ),
        (
            "name: own\nversion: '1'\nsource: {file: a.jsonl, url: https://b}",
            "a url needs a sha256",
        ),
        (
            "name: own\nversion: '1'\nsource: {file: a.jsonl}\nfamily: chat",
            "family must be one of 'multi_turn'",
        ),
        (
            "name: own\nversion: '1'\nsource: {file: a.jsonl}\nfields: {colour: red}",
            "fields.colour must be one of 'id'",
        ),
        ("name: own\nversion: '1'\nsource: {file: a.doc}", "a.doc must end in one of .jsonl"),
        (
            f"name: own\nversion: '1'\nsource: {{file: {'é' * 200}.jsonl}}",
            "source.file must have at most 240 bytes, got 406",
        ),
        ("name: own\nversion: '1'\nsource: {file: a.zip}", "a .zip needs a member"),
        (
            "name: own\nversion: '1'\nsource: {file: a.jsonl, hub: {id: a/b, revision: c}}",
            "source.hub needs either a path or a split",
        ),
        ("name: own\nversion: '1'\nsource: []", "source must be given, not empty"),
        (
            "name: own\nversion: '1'\nsource: [{file: a.jsonl}, {file: b.jsonl}]",
            "source must be several with a category of its own each",
        ),
        (CONFIG + "scorer: best", "scorer must be one of 'exact_match'"),
        (CONFIG + "scorer: {chat: math}", "scorer.chat must be one of 'multi_turn'"),
        (CONFIG + "scorer: unit_tests", "scorer unit_tests and a program need each other"),
        (CONFIG + "program: '{answer}'", "scorer unit_tests and a program need each other"),
        (
            CONFIG + "scorer: unit_tests\nprogram: 'x'",
            "program must contain {answer}, the placeholder of the answer",
        ),
        (CONFIG + "template: '{a.b}'", "template must have only column names in braces, not {a.b}"),
        (CONFIG + "template: 'a } b'", "template must have braces in pairs"),
    ],
)
def test_wrong_yaml_is_named_by_file_and_field(tmp_path, body, message):
    path = write_config(tmp_path / "own.yaml", body)
    with pytest.raises(UsageError) as caught:
        load_task(str(path))
    assert caught.value.message.startswith(str(path))
    assert message in caught.value.message


def test_a_wrong_row_count_is_refused(tmp_path):
    jsonl(tmp_path / "rows.jsonl", {"prompt": "a"})
    path = write_config(tmp_path / "own.yaml", CONFIG + "rows: 2\n")
    with pytest.raises(EnvironmentFault, match=r"rows\.jsonl contains 1 questions, but own\.yaml"):
        load_task(str(path))


def test_the_first_line_of_a_csv_file_names_its_columns(tmp_path):
    (tmp_path / "rows.csv").write_bytes(
        b'\xef\xbb\xbfid,prompt\r\n7,"a ""b"", c\r\nd"\r\n\r\n8,e\r\n'
    )
    path = write_config(tmp_path / "own.yaml", CONFIG.replace("rows.jsonl", "rows.csv"))
    first, second = load_task(str(path)).questions
    assert (first.prompt_id, first.turns) == ("own/7", ('a "b", c\r\nd',))
    assert (second.prompt_id, second.turns) == ("own/8", ("e",))


def test_only_a_json_list_is_a_task(tmp_path):
    path = write_config(tmp_path / "own.yaml", CONFIG.replace("rows.jsonl", "rows.json"))
    (tmp_path / "rows.json").write_text('[{"prompt": "a"},\n {"prompt": "b"}]')
    assert [q.turns for q in load_task(str(path)).questions] == [("a",), ("b",)]
    (tmp_path / "rows.json").write_text('{"data": []}')
    with pytest.raises(EnvironmentFault, match="not a JSON list of rows but a dict"):
        load_task(str(path))


def test_a_prompt_template_fills_columns_and_keeps_doubled_braces(tmp_path):
    jsonl(tmp_path / "rows.jsonl", {"a": "x {y}", "n": 3, "parts": ["p", "q"], "none": None})
    template = "template: '{a} {n} {parts}{none} \\boxed{{}}'\n"
    path = write_config(tmp_path / "own.yaml", CONFIG + template)
    assert load_task(str(path)).questions[0].turns == ("x {y} 3 p\nq \\boxed{}",)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("template: '\n\n'", "leaves no text"),
        ("template: '{b}'", "no 'b', which template needs, only a"),
        ("template: '{a}'\nscorer: unit_tests\nprogram: '{answer}{b}'", "which program needs"),
        ("template: '{a}'\nonly: {a: [1, 2]}", "'a' must be a number"),
        ("template: '{a}'\nonly: {b: [1, 2]}", "'b' must be a number, got null"),
        ("template: '{a}'\nonly: {far: [1, 2]}", "'far' must be a number, got Infinity"),
    ],
)
def test_a_row_without_a_configured_column_is_named(tmp_path, more, message):
    jsonl(tmp_path / "rows.jsonl", {"a": "x", "far": float("inf")})
    path = write_config(tmp_path / "own.yaml", CONFIG + more)
    with pytest.raises(UsageError) as caught:
        load_task(str(path))
    assert caught.value.message.startswith("own: rows.jsonl:1: ")
    assert message in caught.value.message


def test_selection_is_by_category_or_family(tmp_path):
    path = jsonl(
        tmp_path / "mine.jsonl",
        {"prompt": "a", "category": "writing", "family": "multi_turn"},
        {"prompt": "b", "category": "qa"},
        {"prompt": "c", "category": "math", "family": "multi_turn"},
    )
    questions = load_task(str(path)).questions
    assert select_questions(questions, []) == questions
    assert [q.category for q in select_questions(questions, ["math"])] == ["math"]
    assert [q.category for q in select_questions(questions, ["multi_turn"])] == ["writing", "math"]
    with pytest.raises(UsageError, match="math, multi_turn, qa, writing"):
        select_questions(questions, ["poetry"])


def test_mini_is_shipped_completely_and_clusters_by_template():
    task = load_task("mini")
    families = {question.family for question in task.questions}
    assert families == {
        "multi_turn",
        "translation",
        "summarization",
        "qa",
        "math_reasoning",
        "rag",
    }
    assert task.embedded == "trained"
    assert len({q.cluster for q in task.questions}) < len(task.questions)
    assert all(q.reference for q in task.questions)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "rows", "families"),
    [("gsm8k", 1319, 1), ("humaneval", 164, 1), ("mt_bench", 80, 1), ("spec_bench", 480, 6)],
)
def test_real_data_matches_its_card(name, rows, families):
    task = load_task(name)
    assert len(task.questions) == rows
    assert len({question.family for question in task.questions}) == families
    assert task.sha256 == describe(name)["source"]["sha256"]
    assert len({question.prompt_id for question in task.questions}) == rows
    assert all(question.prompt_id.startswith(f"{name}/") for question in task.questions)


@pytest.mark.data
def test_gsm8k_keeps_whole_answers_and_numbers_its_rows():
    first = load_task("gsm8k").questions[0]
    assert first.prompt_id == "gsm8k/0"
    assert first.turns[0].startswith("Janet")
    assert first.reference is not None
    assert first.reference[0].endswith("#### 18")


def test_utf_16_lines_with_a_lone_surrogate_are_refused(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_bytes('{"prompt": "\ud800"}'.encode("utf-16-be", "surrogatepass"))
    with pytest.raises(UsageError, match="not JSON"):
        load_task(str(file))


@pytest.mark.parametrize("column", ["question_id", "category"])
def test_a_too_long_id_or_category_is_refused_with_its_length(tmp_path, column):
    path = jsonl(tmp_path / "mine.jsonl", {"turns": ["a"], column: "x" * 5000})
    with pytest.raises(UsageError, match=f"{column}' must have at most 2000 characters, got 5000"):
        load_task(str(path))


@pytest.mark.parametrize("mark", ["\x1b[2J", "a\nb", "\x85x", "a\u2028b"])
def test_category_with_a_control_character_is_refused(tmp_path, mark):
    own = jsonl(tmp_path / "own.jsonl", {"turns": ["a"], "category": f"q{mark}x"})
    rows = jsonl(tmp_path / "rows.jsonl", {"turns": ["a"]})
    write_config = tmp_path / "own.yaml"
    sources = [{"file": rows.name, "category": f"q{mark}x"}, {"file": rows.name, "category": "b"}]
    write_config.write_text(json.dumps({"name": "own", "version": "1", "source": sources}))
    for path in (own, write_config):
        with pytest.raises(UsageError, match="'category' must be one line without control"):
            load_task(str(path))


ROW = '{"id": "x", "prompt": "a, b", "category": "qa"}'
TABLE = 'id,prompt,category,reference\r\nx,"a, b",qa,\r\n'
SAME = {
    "mine.JSONL": ROW,
    "mine.ndjson": ROW + "\n",
    "mine.json": f"[{ROW}]",
    "mine.Json": ROW,
    "mine.v2.json": f'{{"version": 1, "data": [{ROW}]}}',
    "lines.json": f"{ROW}\n{ROW.replace('x', 'y')}\n",
    "mine.csv": TABLE,
    "mine.CSV": "\ufeff" + TABLE,
    "semicolon.csv": "id;prompt;category\nx;a, b;qa\n",
    "mine.tsv": "id\tprompt\tcategory\nx\ta, b\tqa\n",
}
"""Files that hold the same first question."""


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(("name", "text"), SAME.items(), ids=SAME)
def test_the_suffix_of_a_file_selects_its_format(tmp_path, name, text, zipped):
    path = tmp_path / (f"{name}.GZ" if zipped else name)
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    task = load_task(str(path))
    first = task.questions[0]
    assert task.name == name.rpartition(".")[0]
    assert first.prompt_id == f"{task.name}/x"
    assert (first.turns, first.category, first.reference) == (("a, b",), "qa", None)


def test_lines_of_a_text_file_are_prompts_except_blank_ones(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbfName a prime.\r\n\r\n  And { another } one?  \n")
    questions = load_task(str(path)).questions
    assert [(q.prompt_id, q.turns) for q in questions] == [
        ("mine/0", ("Name a prime.",)),
        ("mine/1", ("And { another } one?",)),
    ]


def test_strings_of_a_json_list_are_prompts(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('["a", {"turns": ["b", "c"]}]')
    assert [q.turns for q in load_task(str(path)).questions] == [("a",), ("b", "c")]


def test_a_single_request_is_a_question(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}')
    (question,) = load_task(str(path)).questions
    assert (question.turns, question.max_new_tokens) == (("a",), 5)


def test_turns_in_a_table_are_a_json_list_or_one_string(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text('turns\n"[""a"", ""b""]"\n[not a list\n')
    assert [q.turns for q in load_task(str(path)).questions] == [("a", "b"), ("[not a list",)]


def test_long_cell_of_a_table_is_read(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("prompt\n" + "word " * 60_000 + "\n")
    assert len(load_task(str(path)).questions[0].turns[0]) == 300_000


def test_parquet_file_is_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "mine.PARQUET"
    rows = [{"turns": ["a", "b"], "id": 7}, {"turns": ["c"], "id": 8}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    questions = load_task(str(path)).questions
    assert [(q.prompt_id, q.turns) for q in questions] == [
        ("mine/7", ("a", "b")),
        ("mine/8", ("c",)),
    ]


WRONG = {
    "a.xlsx": (b"PK", "a.xlsx is a file that ends in .xlsx, and questions cannot be read"),
    "a.md": (b"# a", "a.md is a file that ends in .md"),
    "a.zip": (b"PK", "a.zip is a file that ends in .zip"),
    "a": (b"x", "a is a file without an ending"),
    "b.csv": (
        b"text,label\nx,y\n",
        "b.csv:2: no 'turns' or 'prompt' or 'question', only text, label",
    ),
    "c.csv": (b"prompt,id\nx\n", "c.csv:2: 1 columns instead of 2 (prompt, id)"),
    "d.csv": (b"prompt\n\xff\n", "d.csv: not UTF-8"),
    "e.csv": (b"prompt,id\n,7\n", "e.csv:2: no 'turns' or 'prompt' or 'question'"),
    "f.csv": (b'prompt\n"x\n', "f.csv:2: not CSV: unexpected end of data"),
    "g.txt": (b"\xff\xfe", "g.txt: not UTF-8"),
    "h.txt": (b" \n", "h.txt holds no question"),
    "i.json": (b'{"prompt": ["a", "b"]}', "an object of columns, such as prompt"),
    "j.json": (b'{"prompt": {"0": "a"}}', "an object of columns, such as prompt"),
    "k.json": (b'{"a": ["x"], "b": ["y"]}', "k.json: not a JSON list of rows but a dict"),
    "l.json": (b"3", "l.json: not a JSON list of rows but a int"),
    "m.json": (b"[[1]]", "m.json:1: expected a JSON object, got [1]"),
    "n.json": (b"", "n.json: not JSON"),
    "o.parquet": (b"PAR1", "o.parquet: not a whole parquet file"),
    "p.jsonl.gz": (b"\x1f\x8b\x08", "p.jsonl.gz: it cannot be read: "),
    "q.json": (b'{"prompt": "a"}\n{"prompt": ', "q.json:2: not JSON"),
}


@pytest.mark.parametrize(
    ("name", "data", "message"), [(n, *w) for n, w in WRONG.items()], ids=WRONG
)
def test_a_file_without_questions_is_refused_by_kind(tmp_path, monkeypatch, name, data, message):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(UsageError) as fault:
        load_task(name)
    assert message in fault.value.message
    assert fault.value.hint


def test_folders_and_pipes_are_refused_by_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("questions").mkdir()
    os.mkfifo("pipe")
    os.mkfifo("pipe.jsonl")
    for name, message in {
        "questions": "questions is a folder",
        "pipe": "pipe is not a regular file",
        "pipe.jsonl": "no such task file: pipe.jsonl",
    }.items():
        with pytest.raises(UsageError, match=message):
            load_task(name)


def test_a_shipped_task_precedes_a_file_or_folder_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mini").mkdir()
    assert len(load_task("mini").questions) == 480


def test_a_file_too_large_when_uncompressed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_BYTES", 1 << 20)
    bomb = gzip.compress(b" " * (2 << 20))
    (tmp_path / "mine.jsonl.gz").write_bytes(bomb)
    with pytest.raises(UsageError, match="it has more than 1 MiB"):
        load_task(str(tmp_path / "mine.jsonl.gz"))
    with zipfile.ZipFile(tmp_path / "rows.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", b" " * (2 << 20))
    body = CONFIG.replace("{file: rows.jsonl}", "{file: rows.zip, member: rows.jsonl}")
    with pytest.raises(EnvironmentFault, match="it has more than 1 MiB"):
        load_task(str(write_config(tmp_path / "own.yaml", body)))


def test_suffixes_in_capital_letters_are_accepted(tmp_path):
    (tmp_path / "rows.CSV").write_text("prompt\na\n")
    path = write_config(tmp_path / "own.YAML", CONFIG.replace("rows.jsonl", "rows.CSV"))
    assert load_task(str(path)).questions[0].turns == ("a",)

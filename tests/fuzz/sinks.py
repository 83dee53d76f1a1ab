"""Untrusted text in terminals, logs, pages and spreadsheets."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import unicodedata
from random import Random
from xml.etree import ElementTree

from mutate import HOSTILE
from subjects import Subject

from specbench_cli import output
from specbench_cli.comparison.pages import junit, markdown
from specbench_cli.errors import MAX_TEXT_LENGTH, to_one_line, truncate
from specbench_cli.report.html.writer import embed_json
from specbench_cli.report.markdown_table import fenced, inline, table
from specbench_cli.report.paper.tex import escape

PIECES = (
    *(each for each in HOSTILE if isinstance(each, str)),
    *(
        "\x1b[2J",
        "\x1b]0;",
        "\x1b]8;;x\x1b\\",
        "\x1bP",
        "\x9b2J",
        "\x9d",
        "\x07",
        "\b",
        "\r",
        "\x85",
    ),
    *("::error::", "::", "##[", "[bold]", "[/]", "[link=x]", "```", "`", "|", "](", "![", "*", "_"),
    *(
        "<!--",
        "</script>",
        "&lt;",
        "]]>",
        "\\",
        "$",
        "%",
        "{",
        "\\input{x}",
        "=",
        "+",
        "@",
        ";",
        "\t",
    ),
    *(
        chr(0x301) * 40,
        "\U0001f469\u200d\U0001f52c",
        "日本語",
        "\u0646\u200c",
        "\U000e0041",
        "\ufeff",
    ),
)
KINDS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of control characters and invisible characters."""


class Sinks(Subject):
    """Fuzz target that prints and writes a text in every supported way."""

    name = "sinks"

    def tried(self, rng: Random) -> str | None:
        text = "".join(_piece(rng) for _ in range(rng.randint(1, 12)))
        printed, json_line = _printed(text)
        rendered = {
            "a terminal": printed,
            "a Markdown cell": table([text], [[text]]),
            "a line of Markdown": inline(text),
            "a code block": fenced(text),
            "a comparison": markdown.code(text),
            "LaTeX": str(escape(text)),
            "a page's data": str(embed_json({text: text})),
            "JUnit": junit._escape_illegal(text),
            "a CSV cell": str(output.escape_formula(text)),
        }
        for where, rendering in rendered.items():
            if found := _hidden(rendering):
                return f"{where} holds {sorted(map(ascii, found))} of {_brief(text)}"
        return _wrong(text, json_line) or _too_long(rng, text)


def _piece(rng: Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(PIECES)
    return chr(rng.choice([rng.randrange(0x100), rng.randrange(0x3000), rng.randrange(0x110000)]))


def _printed(text: str) -> tuple[str, str]:
    """Return all printed output for a text, and its JSON line separately."""
    out, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
        output.data(text)
        output.data(output.make_text(text, "bold"))
        output.console(stderr=False).print(text)
        output.table([{text: text}])
        output.tsv([{text: text}])
        output.facts({text: text})
        output.note(text)
        output.error(text, text)
        printed = out.getvalue() + talk.getvalue()
        output.json_line({"text": text})
    line = out.getvalue().splitlines()[-1]
    return printed + line, line


def _brief(text: str) -> str:
    return ascii(text)[:200]


def _hidden(text: str) -> set[str]:
    return {
        each
        for each in set(text) - set("\n\t\u200c\u200d")
        if (unicodedata.category(each) in KINDS and not _visible_format(each)) or _blank(each)
    }


def _blank(each: str) -> bool:
    """Return True for a variation selector or a Braille pattern without dots; emoji need U+FE0F."""
    name = unicodedata.name(each, "")
    return each != "\ufe0f" and ("VARIATION SELECTOR" in name or name == "BRAILLE PATTERN BLANK")


def _visible_format(each: str) -> bool:
    """Return True for the few format characters that are drawn: Arabic, Syriac and Kaithi signs."""
    first, *_ = unicodedata.name(each, "?").split()
    return first in ("ARABIC", "SYRIAC", "KAITHI") and each != "\u061c"


def _wrong(text: str, json_line: str) -> str | None:
    """Return the first error in the machine-readable forms, or None."""
    if json.loads(json_line) != {"text": text}:
        return f"JSON reads {_brief(json_line)} for {_brief(text)}"
    if output.escape_hidden(output.escape_hidden(text)) != output.escape_hidden(text):
        return f"cleaning twice is not cleaning once: {_brief(text)}"
    escaped = str(output.escape_formula(text))
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n").writerow([escaped, "b"])
    if next(csv.reader(io.StringIO(written.getvalue(), newline=""))) != [escaped, "b"]:
        return f"a CSV cell is torn: {_brief(text)}"
    inner = re.search(
        r"[;\t\n]\s*[=+\-@\uff1d\uff0b\uff0d\uff20]", escaped.removeprefix("'").lstrip()
    )
    if inner or escaped.lstrip()[:1] in tuple("=+-@\uff1d\uff0b\uff0d\uff20"):
        return f"a CSV cell is a formula: {_brief(text)}"
    if len(table(["a", "b"], [[text, text]]).splitlines()) != 3:
        return f"a Markdown table is torn: {_brief(text)}"
    ElementTree.fromstring("<a/>").set("b", junit._escape_illegal(text))
    made = ElementTree.Element("a", b=junit._escape_illegal(text))
    ElementTree.fromstring(ElementTree.tostring(made, encoding="unicode"))
    return None if str(escape(text)).isascii() else f"LaTeX of {_brief(text)} is not ASCII"


def _too_long(rng: Random, text: str) -> str | None:
    """Return the first error in the truncation of a very long text, or None."""
    endless = text * rng.choice([1, 100, 2000])
    for cut in (truncate(endless), to_one_line(endless)):
        cut.encode()
        if len(cut) > 10 * MAX_TEXT_LENGTH:
            return f"{len(cut)} characters are kept of {len(endless)}"
    return None

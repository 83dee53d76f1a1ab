"""Markdown tables whose entries are escaped, so that any text is shown unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from specbench_cli import output
from specbench_cli.summary import formats

_MARKUP = re.compile(
    r"<(?=[A-Za-z/!?])|&(?=#?\w+;)|\*|~(?=~)|(?<![^\W_])_|_(?![^\W_])|[`$]"
    r"|\\(?=[!-/:-@\[-`{-~]|$)"
)
"""Characters that Markdown would read as a tag, entity, emphasis, code or formula."""
_ENTITIES = {"<": "&lt;", "&": "&amp;"}
_LINKED = re.compile(
    r"""
    @(?=\S) | (?<=\S)@ | \#(?=\w) | // | (?i:www\.)  # mentions, e-mail addresses, issues and URLs
    | (?:\A|[\w$+<=>^`~]|[^\x00-\x7f])\.   # host names, which some renderers link
        (?:(?i:[a-z]{2}|com|org|net|edu|gov|biz|info|pro|web|xxx|aero|asia|coop|museum|name|shop)
            (?![^\W_])
        | (?i:xn--\w)                           # .xn--p1ai
        | (?:[A-Za-z][A-Za-z0-9-]{0,62})?(?:[^\W\d_\x00-\x7f]|[\u0300-\u036f]))
    | (?<![^\W_])\d{1,3}(?:\.\d{1,3}){3}(?![^\W_])  # IPv4 addresses
    | \b(?:(?i:(?:GH|GL|CVE)-\d|GHSA-\w)|[A-Z][A-Z0-9_]+-\d)  # GH-1, CVE-2024-1, JIRA-1
    | (?<!\d\.)\b[0-9A-Fa-f]{7,64}\b           # commits
    | [!&$](?=\d) | [~%](?=[\w"]) | \*iteration:  # GitLab: merge requests, epics, labels
    | \[(?:\[|\w+:)                            # GitLab: [[page]], [vulnerability:1]
    | :(?!\d\d?:)[\w+-]+:                      # emoji, but no time of day
    """,
    re.VERBOSE,
)
"""Text that GitHub, GitLab or a Markdown renderer turns into a link, a mention or an emoji.

An escape does not prevent this: GitHub looks for mentions after it has removed escapes. Only a code
span does.
"""
_BLOCK_START = re.compile(
    r"^(?P<number>\d{1,9}(?=[.)]\s))?"
    r"(?P<mark>(?(number)[.)]|"
    r"(?:#+(?=\s|$)|>|[-+](?=\s)|-(?=[\s-]*-$)|\[(?=.*\]:|[ xX]\](?:\s|$)|\^))))"
)
"""Characters at the beginning of a line that start a heading, quote, list, rule or footnote."""
_WORDS = re.compile(r"\]\(|(?:(?!\]\()[^\s|])+")
"""A word, or the characters `](` in the middle of a link.

A word ends before `](` and before a bar, because neither can be escaped in a code span.
"""


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, escaped: bool = False
) -> str:
    """Return a Markdown table of headings and rows. A missing value is `-`.

    Args:
        escaped: True if the entries are Markdown already. Reports never pass this.
    """
    head, *body = ([_field(each, escaped) for each in row] for row in (headings, *rows))
    lines = (head, ["---"] * len(head), *body)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _field(value: object, escaped: bool) -> str:
    if value is None:
        return formats.NONE
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    text = output.escape_hidden(" ".join(str(value).split())) if escaped else inline(value)
    return text.replace("|", "\\|")


def inline(value: object) -> str:
    """Escape a text as one line of Markdown, so that it is shown unchanged.

    Words that a renderer would turn into a link or a mention become code spans.
    """
    text = _WORDS.sub(_escape_word, output.escape_hidden(" ".join(str(value).split())))
    return _BLOCK_START.sub(r"\g<number>\\\g<mark>", text)


def _escape_word(match: re.Match[str]) -> str:
    word = match[0]
    if word == "](":
        return "]\\("
    if _LINKED.search(word):
        return _code(word)
    return _MARKUP.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), word)


def _code(word: str) -> str:
    """Return a word as a code span.

    The span is delimited by more backticks than any run of backticks in the word.
    """
    fence = "`" * (_longest_run(word) + 1)
    pad = " " * (word.startswith("`") or word.endswith("`"))
    return f"{fence}{pad}{word}{pad}{fence}"


def _longest_run(text: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)


def fenced(text: str) -> str:
    """Return a Markdown code block whose fence is longer than any backtick run in the text."""
    text = output.escape_hidden(text)
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}\n{text}\n{fence}"

"""Conversion of documents to HTML pages.

Pages load nothing. Style, script, pictures and data are inline, and a content security policy
permits only these styles and scripts, by their hashes. All text is escaped when it is inserted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specbench_cli import output
from specbench_cli.report.document import Part, Section

_TEMPLATES = Path(__file__).with_name("templates")
_UNSAFE = "<>&\u2028\u2029"
_ESCAPED = {ord(char): f"\\u{ord(char):04x}" for char in _UNSAFE}


def render_parts(parts: Iterable[Part]) -> Markup:
    """Return parts of a document as HTML.

    The macro for a part in `parts.html.j2` has the name of its class in lower case.
    """
    macros = template_environment().get_template("parts.html.j2").module
    found = []
    for part in parts:
        macro = getattr(macros, type(part).__name__.lower())
        found.append(
            macro(part, render_parts(part.parts)) if isinstance(part, Section) else macro(part)
        )
    return Markup("").join(found)


def render_page(template: str, style: str = "", script: str = "", **facts: object) -> str:
    """Return a whole page.

    Args:
        style: CSS rules of this page, in addition to those of every page.
        script: Script of the page. Empty if it has none.
        facts: Further variables of the template.
    """
    style = read_asset("report.css") + style
    rendered = (
        template_environment()
        .get_template(template)
        .render(
            policy=_security_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            **facts,
        )
    )
    return output.escape_hidden(rendered)


def embed_json(data: Any) -> Markup:
    """Return data as JSON for a script element. Characters that could end it are escaped."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(output.escape_hidden(text.translate(_ESCAPED), lead="\\\\"))


@cache
def template_environment() -> Environment:
    """Return the Jinja environment of all pages. It escapes all values."""
    return Environment(
        loader=FileSystemLoader([_TEMPLATES, _TEMPLATES.parents[1] / "gallery" / "templates"]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def read_asset(name: str) -> str:
    """Read a style sheet or a script from the folder of templates."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _security_policy(style: str, script: str) -> str:
    """Return the content security policy: only the page's own script, style and images."""

    def digest(source: str) -> str:
        return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()

    runs = f" script-src 'sha256-{digest(script)}';" if script else ""
    return (
        f"default-src 'none';{runs} style-src 'sha256-{digest(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )

"""Figures as part of a page: SVG files inlined so that the page's own rules hold for them.

A strict content security policy allows no `style` attributes, so what they say is moved to the
presentation attributes of the same names; ids are made unique to the page; colours stay as they
are, which lets the style sheet replace ink and paper in the dark.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from markupsafe import Markup

from specbench_cli.report.figures import CAPTIONS

_SVG, _XLINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_DRAWN = frozenset(
    "defs g path use clipPath rect line polyline polygon circle ellipse text tspan image pattern"
    " linearGradient stop marker".split()
)
"""Elements that are kept."""
HEAVIEST = 250_000
"""Bytes of an SVG; a heavier one (thousands of points) is shown as its PNG."""
_ACROSS = re.compile(r'viewBox="0 0 ([\d.]+) ')
_COLUMN = 300
"""Points that a figure of a column's width is narrower than."""
_FONT = re.compile(r"(?:(italic|oblique)\s+)?(?:(bold|\d{3})\s+)?([\d.]+)px\s+(.+)")


@dataclass(frozen=True, slots=True)
class Inlined:
    """A figure of the page. wide: drawn for a page's width, not a column's. svg: its markup, or
    empty where `png` holds a data URL instead."""

    name: str
    caption: str
    wide: bool
    svg: Markup
    png: str


def inlined(files: Sequence[Path]) -> Iterator[Inlined]:
    """The figures of some files, those with an SVG; a PNG is looked for beside it."""
    for file in files:
        if file.suffix != ".svg":
            continue
        name, caption = file.stem, CAPTIONS.get(file.stem, file.stem)
        source = file.read_text(encoding="utf-8")
        wide = (across := _ACROSS.search(source)) is not None and float(across[1]) > _COLUMN
        picture = file.with_suffix(".png")
        if file.stat().st_size > HEAVIEST and picture.exists():
            data = base64.b64encode(picture.read_bytes()).decode()
            yield Inlined(name, caption, wide, Markup(), f"data:image/png;base64,{data}")
        else:
            yield Inlined(name, caption, wide, svg(source, name), "")


def svg(source: str, name: str) -> Markup:
    """An SVG document as an element of a page.

    Args:
        source: what one of our own figures was written as.
        name: put before all ids.
    """
    root = ElementTree.fromstring(source)
    _clean(root, f"{name}-")
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    # What matplotlib says of all elements in a style sheet.
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt", "aria-hidden": "true"}
    ElementTree.register_namespace("", _SVG)
    text = ElementTree.tostring(root, encoding="unicode")
    return Markup(re.sub(r"\s*\n\s*", "\n", text))


def _clean(element: ElementTree.Element, prefix: str) -> None:
    for child in list(element):
        if child.tag.removeprefix(f"{{{_SVG}}}") in _DRAWN:
            _clean(child, prefix)
        else:
            element.remove(child)
    for key, value in list(element.attrib.items()):
        if key == "id":
            element.attrib[key] = prefix + value
        elif key == _XLINK:
            del element.attrib[key]
            element.attrib["href"] = f"#{prefix}{value[1:]}" if value.startswith("#") else value
        elif key == "style":
            del element.attrib[key]
            element.attrib |= dict(_properties(value))
    for key, value in element.attrib.items():
        element.attrib[key] = value.replace("url(#", f"url(#{prefix}")


def _properties(style: str) -> Iterator[tuple[str, str]]:
    """The declarations of a `style` attribute; `font` in its parts, as it is no attribute."""
    for declaration in style.split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font" and (font := _FONT.fullmatch(value)):
            parts = ("font-style", "font-weight", "font-size", "font-family")
            yield from (
                (part, said) for part, said in zip(parts, font.groups(), strict=True) if said
            )
        elif name:
            yield name, value

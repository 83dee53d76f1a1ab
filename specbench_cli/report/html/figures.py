"""Figures of the HTML page, as SVG elements inside the page.

The content security policy of the page forbids `style` attributes. They are converted to
presentation attributes, such as `fill="#222222"`. Ids get the figure's name as a prefix, so that
they are unique in the page.
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
_SVG_ELEMENTS = frozenset(
    "defs g path use clipPath rect line polyline polygon circle ellipse text tspan image pattern"
    " linearGradient stop marker".split()
)
"""SVG elements that are kept. All others are dropped."""
MAX_SVG_BYTES = 250_000
"""Maximum size of an SVG in the page, in bytes. The PNG replaces a larger one."""
_VIEW_BOX_WIDTH = re.compile(r'viewBox="0 0 ([\d.]+) ')
_COLUMN_PT = 300
"""Maximum width of a figure for one column, in points."""
_FONT = re.compile(r"(?:(italic|oblique)\s+)?(?:(bold|\d{3})\s+)?([\d.]+)px\s+(.+)")


@dataclass(frozen=True, slots=True)
class InlineFigure:
    """A figure of the page.

    Attributes:
        wide: True if the figure is drawn for the full page width, not for one column.
        svg: SVG markup. Empty if the PNG is shown.
        png: Data URL of the PNG. Empty if the SVG is shown.
    """

    name: str
    caption: str
    wide: bool
    svg: Markup
    png: str


def inline_figures(files: Sequence[Path]) -> Iterator[InlineFigure]:
    """Yield one figure per SVG file. If the SVG is too large, its PNG is used."""
    for file in files:
        if file.suffix != ".svg":
            continue
        name, caption = file.stem, CAPTIONS.get(file.stem, file.stem)
        source = file.read_text(encoding="utf-8")
        wide = (view_box := _VIEW_BOX_WIDTH.search(source)) is not None and float(
            view_box[1]
        ) > _COLUMN_PT
        picture = file.with_suffix(".png")
        if file.stat().st_size > MAX_SVG_BYTES and picture.exists():
            data = base64.b64encode(picture.read_bytes()).decode()
            yield InlineFigure(name, caption, wide, Markup(), f"data:image/png;base64,{data}")
        else:
            yield InlineFigure(name, caption, wide, inline_svg(source, name), "")


def inline_svg(source: str, name: str) -> Markup:
    """Convert an SVG document to an element of an HTML page.

    Args:
        source: An SVG document that specbench drew with matplotlib.
        name: Prefix of all ids.
    """
    root = ElementTree.fromstring(source)
    _clean(root, f"{name}-")
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    # matplotlib sets these attributes in a style sheet, which is dropped. So set them on the root
    # element.
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt", "aria-hidden": "true"}
    ElementTree.register_namespace("", _SVG)
    text = ElementTree.tostring(root, encoding="unicode")
    return Markup(re.sub(r"\s*\n\s*", "\n", text))


def _clean(element: ElementTree.Element, prefix: str) -> None:
    for child in list(element):
        if child.tag.removeprefix(f"{{{_SVG}}}") in _SVG_ELEMENTS:
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
    """Yield the declarations of a `style` attribute as SVG attributes.

    `font` is not an SVG attribute, so it is split into style, weight, size and family.
    """
    for declaration in style.split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font" and (font := _FONT.fullmatch(value)):
            parts = ("font-style", "font-weight", "font-size", "font-family")
            yield from (
                (part, part_value)
                for part, part_value in zip(parts, font.groups(), strict=True)
                if part_value
            )
        elif name:
            yield name, value

"""Steps of `mkdocs build` for pages outside docs/: README, results/ and the gallery.

Links between files of the repository become links between pages of the site. If the linked file has
no page, the text stays without a link.
"""

from __future__ import annotations

import os
import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from specbench_cli.errors import SpecbenchError
from specbench_cli.report.gallery.gallery import PICTURE, publish
from specbench_cli.report.report_data import read_report_data
from specbench_cli.report.terminal.table import run_text
from specbench_cli.store.run_dir import RunDir

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results/reference"
GALLERY = "gallery"
"""The folder of the static gallery on the site, as `specbench publish` makes it."""
MARK = "<!-- gallery -->"
"""Place in docs/gallery.md where the reference runs are inserted."""
_BESIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "results/README.md",
    "results/experiments/**/*.md",
    "results/experiments/**/*.png",
    "results/reference/*/report.md",
    "results/reference/*/figures/*.svg",
    "results/reference/*/figures/*.png",
)
"""Files of the repository that are on the site though they are not in docs/."""
_WIDTH = '{ width="640" }'
_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)

_made = tempfile.TemporaryDirectory(prefix="specbench-gallery-")
_shown: list[str] = []
"""The gallery's parts on its page, a reference run each."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures outside docs/, and the gallery's files."""
    for pattern in _BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            where = site_path(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, where, abs_src_path=str(path)))
    folder = Path(_made.name)
    _shown[:] = gallery(folder)
    for path in sorted(folder.rglob("*.*")):
        where = f"{GALLERY}/{path.relative_to(folder).as_posix()}"
        files.append(File.generated(config, where, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with the links of the site and its generated parts."""
    there = {file.src_uri for file in files}
    parts = _FENCE.split(markdown)
    parts[::2] = [linked(part, page.file.src_uri, there) for part in parts[::2]]
    return "".join(parts).replace(MARK, "\n\n".join(_shown))


def on_post_build(config: MkDocsConfig) -> None:
    """Remove the gallery's temporary folder, which was copied to the site."""
    _made.cleanup()


def site_path(path: str) -> str:
    """Return the place of a repository file on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def repository_path(where: str) -> str:
    """Return the repository file of a page of the site."""
    if where == "index.md":
        return "README.md"
    beside = any(Path(where).match(pattern) for pattern in _BESIDE)
    return where if beside else f"docs/{where}"


def linked(text: str, where: str, there: set[str]) -> str:
    """Return a text whose links lead to pages of the site.

    Args:
        where: the page of the text.
        there: all files of the site.
    """
    folder = posixpath.dirname(repository_path(where))

    def lead(found: re.Match[str]) -> str:
        image, words, link = found.groups()
        file, _, anchor = link.partition("#")
        if "://" in link or not file:
            return found[0]
        target = site_path(posixpath.normpath(posixpath.join(folder, file)))
        if target not in there:
            return words
        way = os.path.relpath(target, posixpath.dirname(where) or ".").replace(os.sep, "/")
        return f"{image}[{words}]({way}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(lead, text)


def gallery(folder: Path) -> list[str]:
    """Publish every reference run into a folder, and return the Markdown of their page."""
    runs = sorted(path.parent for path in REFERENCE.glob("*/manifest.json"))
    shown, kept = [], []
    for path in runs:
        try:
            shown.append("\n\n".join(_published(path, folder)))
        except SpecbenchError as error:
            kept.append("\n\n".join(_unpublished(path, error)))
    lead = f"The reference runs of this project, on [one leaderboard]({GALLERY}/index.html):"
    parts = ["## Reference runs", lead, *shown] if shown else []
    if kept:
        parts += ["## Reference runs that are not published", *kept]
    return parts


def _published(path: Path, folder: Path) -> Iterator[str]:
    reading = read_report_data(RunDir.open(path))
    entry = publish(reading, folder).entry
    where = f"{GALLERY}/runs/{path.name}"
    yield f"### {path.name}"
    yield f"![Speedup over vanilla, one bar per method]({where}/{PICTURE}){_WIDTH}"
    yield _table(run_text(reading.summary, reading.facts))
    yield "\n".join(f"- {sentence}" for sentence in entry.sentences)
    yield f"[Its page]({where}/index.html), and [the whole report]({where}/report.html)."


def _unpublished(path: Path, error: SpecbenchError) -> Iterator[str]:
    report = (path / "report.md").read_text(encoding="utf-8")
    where = f"results/reference/{path.name}"
    yield f"### {path.name}"
    why = error.message.replace(f"{ROOT}/", "")
    yield (f"The run {why}. What it said when it ended: [its report]({where}/report.md).")
    yield f"![Speedup over vanilla, one bar per method]({where}/figures/speedup.svg){_WIDTH}"
    (table,) = re.findall(r"\A# .*?\n```\n(.*?)\n```$", report, re.DOTALL | re.MULTILINE)
    yield _table(table)


def _table(text: str) -> str:
    return f"```text\n{text}\n```"

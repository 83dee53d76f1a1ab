"""Tests of writing a document as Markdown and a grid in every format."""

from specbench_cli.report.document import (
    Bullets,
    Paragraph,
    Picture,
    Preformatted,
    ReportDocument,
    Section,
    make_value_grid,
)
from specbench_cli.report.html.writer import render_parts
from specbench_cli.report.markdown import render
from specbench_cli.report.terminal.grid import draw
from specbench_cli.summary.columns import Heading


def make_grid():
    headings = ("method", Heading("MAT", "accepted tokens"))
    lines = [("sps", "2.10"), ("typical", None)]
    return make_value_grid(headings, lines, sections=((1, "lossy"),), id="it", caption="Rows")


def test_every_kind_of_part_is_written():
    grid = make_grid()
    document = ReportDocument(
        "a run",
        [
            Preformatted("as  it is"),
            Picture("figures/a.svg", "a figure"),
            Section("Results", [Paragraph("In short."), grid]),
            Section("Part", [Bullets(["one", "two"], title="Both:")], level=3),
        ],
    )
    assert render(document) == (
        "# a run\n\n```\nas  it is\n```\n\n![a figure](figures/a.svg)\n\n"
        "## Results\n\nIn short.\n\n"
        "| method | MAT |\n| --- | --- |\n| sps | 2.10 |\n\nLossy.\n\n"
        "| method | MAT |\n| --- | --- |\n| typical | - |\n\n### Part\n\nBoth:\n\n- one\n- two\n"
    )


def test_text_is_escaped_in_markdown():
    hostile_text = "<b>*x* @user"
    page = render(
        ReportDocument(
            hostile_text,
            [Section(hostile_text, [Paragraph(hostile_text), Bullets([hostile_text])])],
        )
    )
    assert page.count("&lt;b>\\*x\\* `@user`") == 4


def test_terminal_grid_is_aligned_and_split_if_too_wide():
    assert [line.plain for line in draw(make_grid())] == [
        "method    MAT",
        "sps      2.10",
        "lossy",
        "typical     -",
    ]
    wide = make_value_grid(("method", "first", "second"), [("sps", "1" * 9, "2" * 9)])
    split = [line.plain.split() for line in draw(wide, 16)]
    assert split == [["method", "first"], ["sps", "1" * 9], ["method", "second"], ["sps", "2" * 9]]


def test_html_grid_has_sortable_values():
    page = render_parts([Section("Results", [make_grid(), Paragraph("<b>")], id="results")])
    assert '<h2 id="results-heading">Results</h2>' in page and "&lt;b&gt;" in page
    assert 'title="accepted tokens">MAT</th>' in page
    assert 'data-value="2.1">2.10</td>' in page and '<td class="number">-</td>' in page

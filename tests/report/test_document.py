"""A document is written as Markdown, and a grid in every format, with its text as it is."""

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


def made():
    headings = ("method", Heading("MAT", "accepted tokens"))
    lines = [("sps", "2.10"), ("typical", None)]
    return make_value_grid(headings, lines, sections=((1, "lossy"),), id="it", caption="Rows")


def test_every_kind_of_part_is_written():
    grid = made()
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


def test_text_is_never_markup():
    said = "<b>*x* @user"
    page = render(ReportDocument(said, [Section(said, [Paragraph(said), Bullets([said])])]))
    assert page.count("&lt;b>\\*x\\* `@user`") == 4


def test_a_terminal_aligns_the_same_grid_and_splits_it_where_it_is_too_wide():
    assert [line.plain for line in draw(made())] == [
        "method    MAT",
        "sps      2.10",
        "lossy",
        "typical     -",
    ]
    wide = make_value_grid(("method", "first", "second"), [("sps", "1" * 9, "2" * 9)])
    split = [line.plain.split() for line in draw(wide, 16)]
    assert split == [["method", "first"], ["sps", "1" * 9], ["method", "second"], ["sps", "2" * 9]]


def test_a_page_sorts_the_same_grid_by_its_values():
    page = render_parts([Section("Results", [made(), Paragraph("<b>")], id="results")])
    assert '<h2 id="results-heading">Results</h2>' in page and "&lt;b&gt;" in page
    assert 'title="accepted tokens">MAT</th>' in page
    assert 'data-value="2.1">2.10</td>' in page and '<td class="number">-</td>' in page

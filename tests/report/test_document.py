"""A document is written as Markdown: each kind of part, with its text as it is."""

from specbench_cli.report.document import (
    Bullets,
    Document,
    Grid,
    Paragraph,
    Picture,
    Preformatted,
    Section,
)
from specbench_cli.report.markdown import render


def test_every_kind_of_part_is_written():
    grid = Grid(("method", "MAT"), (), [("sps", "2.10"), ("typical", None)], ((1, "lossy"),))
    document = Document(
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
    page = render(Document(said, [Section(said, [Paragraph(said), Bullets([said])])]))
    assert page.count("&lt;b>\\*x\\* `@user`") == 4

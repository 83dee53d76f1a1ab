"""Tests of the HTML report: its contents, and the escaping of hostile text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from specbench_cli.report.figures import write_figures
from specbench_cli.report.html.facts import hide_paths
from specbench_cli.report.html.figures import inline_svg
from specbench_cli.report.html.methods import make_cards, split_doc
from specbench_cli.report.html.page import write_html
from specbench_cli.report.html.tokens import make_viewer_data
from specbench_cli.report.html.writer import embed_json
from specbench_cli.report.report_data import read_report_data
from specbench_cli.report.tables import family_tables, incident_tables, overall_tables
from specbench_cli.report.tokens import load_text_decoder


class Elements(HTMLParser):
    """All elements of a page, and the data of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


@pytest.fixture
def page(make_run, tmp_path):
    run = make_run()
    (file,) = write_html(read_report_data(run), tmp_path, figures=[])
    return file.read_text(encoding="utf-8")


def test_page_has_no_script_but_its_own_and_loads_nothing(page):
    elements = Elements(page)
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert not [tag for tag, _ in elements.found if tag in ("iframe", "object", "base", "form")]
    for _, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href", "action", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert "url(" not in page.replace("url(#", "")
    assert "@import" not in page


def test_content_security_policy_has_the_hashes_of_script_and_style(page):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    for tag, inside in (("script", Elements(page).scripts[1]), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy
    assert "default-src &#39;none&#39;" in policy and "unsafe" not in policy


def test_texts_of_models_and_prompts_are_embedded_unchanged_as_data(page):
    assert "<script>alert" not in page and "<img src=x" not in page and "\u2028" not in page
    data = json.loads(Elements(page).scripts[0])
    text = "".join(data["turns"][0]["texts"][0]["pieces"])
    assert any("<script>alert(1)</script>" in "".join(t["pieces"]) for turn in data["turns"]
               for t in turn["texts"]), text  # fmt: skip
    assert "<img src=x onerror=alert(2)>" in data["turns"][0]["text"]


def test_hostile_labels_and_errors_are_escaped(make_run, tmp_path):
    run = make_run(labels=("vanilla", "<b>bold</b>"), prompts=3)
    run.manifest["git"] = {"commit": "<script>alert(3)</script>"}
    (file,) = write_html(read_report_data(run), tmp_path, figures=[])
    page = file.read_text(encoding="utf-8")
    assert "<b>bold" not in page and "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<script>alert(3)" not in page


@pytest.mark.parametrize("text", ["</script>", "<!--", "a & b", "\u2028\u2029", '"\\'])
def test_embedded_json_cannot_close_its_element_and_is_read_back(text):
    embedded = embed_json({"text": text})
    assert not set("<>&\u2028\u2029") & set(embedded)
    assert json.loads(embedded) == {"text": text}


def test_same_records_make_the_same_bytes(make_run, tmp_path):
    reading = read_report_data(make_run(prompts=3))
    figures = write_figures(reading, tmp_path / "figures")
    first = write_html(reading, tmp_path, figures=figures)[0].read_bytes()
    assert first.count(b"<figure") == len(figures) / 2 > 3
    assert (
        write_html(read_report_data(reading.run), tmp_path, figures=figures)[0].read_bytes()
        == first
    )


def test_no_private_path_is_shown(make_run, tmp_path):
    run = make_run(
        prompts=3, environment={"cache": "/home/somebody/.cache/hf", "x": "see https://a.b/c/d"}
    )
    run.manifest["config"]["effective"]["plugins"] = ["/home/somebody/work/mine.py"]
    page = write_html(read_report_data(run), tmp_path, figures=[])[0].read_text(encoding="utf-8")
    assert "/home/" not in page and str(tmp_path) not in page
    assert "mine.py" in page and "https://a.b/c/d" in page


@pytest.mark.parametrize(
    ("text_with_path", "expected"),
    [
        ("no file /home/a b/c", "no file a b/c"),
        ("~/x/y.json, /tmp/z", "y.json, z"),
        (r"C:\Users\me\run", "run"),
        ("1/2 and hf:a/b, https://h/p/q", "1/2 and hf:a/b, https://h/p/q"),
    ],
)
def test_absolute_paths_are_cut_to_their_names(text_with_path, expected):
    assert hide_paths(text_with_path) == expected


def test_lossless_lossy_and_families_have_separate_tables(make_run):
    summary = read_report_data(make_run()).summary
    lossless, lossy = overall_tables(summary)
    methods = [row[1].text for row in lossless.rows]
    assert "loose" not in methods and [row[0].text for row in lossy.rows] == ["loose"]
    assert [head.heading for head in lossy.columns][:2] == ["method", "speedup"], "no group column"
    assert (lossless.label_columns, lossy.label_columns) == (2, 1)
    assert set(methods) == {"vanilla", "sps", "tree", "pld", "hf:vanilla", "bad"}
    families = family_tables(summary)[0]
    assert len(families.rows) == 6 * 6
    assert all(len(row) == len(families.columns) for row in families.rows)


def test_sweep_has_a_table_with_its_parameter(make_run, tmp_path):
    run = make_run(labels=("vanilla", "sps", "pld"), prompts=6)
    run.manifest["config"]["effective"] |= {
        "sweep": {"sps": {"length": [5, 7]}},
        "methods": [{"name": name, "label": name, "params": {}} for name in ("vanilla", "sps")],
    }
    (file,) = write_html(read_report_data(run), tmp_path, figures=[])
    (table,) = re.findall('<table[^>]*id="table-sweep".*?</table>', file.read_text(), re.DOTALL)
    assert re.findall('scope="row"[^>]*>([^<]+)<', table) == ["vanilla", "sps"]
    assert ">length</th>" in table


def test_every_mismatch_is_listed_with_position_and_gap(make_run):
    (differing,) = incident_tables(read_report_data(make_run()).incidents, 500)
    assert len(differing.rows) == 6
    assert [output.text for output in differing.rows[0]][4:7] == ["mismatch", "9", "1.250000"]


def test_viewer_has_differing_prompts_first_then_one_per_family(make_run):
    reading = read_report_data(make_run(prompts=24))
    all_outputs, reading.incidents.differing = reading.incidents.differing, []
    reading.incidents.differing += [output for output in all_outputs if output[1] == "mini/20"]
    turns = make_viewer_data(reading, None).content["turns"]
    assert turns[0]["id"] == "mini/20"
    assert len({turn["family"] for turn in turns[1:7]}) == 6
    assert sorted(turn["id"] for turn in turns) == sorted({output[1] for output in all_outputs})


def test_viewer_stays_within_its_budget_and_counts_its_prompts(make_run):
    reading = read_report_data(make_run(prompts=12))
    found = make_viewer_data(reading, None, budget=30_000)
    assert 1 <= found.prompts < found.total_prompts == 12
    assert len(embed_json(found.content)) < 60_000
    assert len({turn["family"] for turn in found.content["turns"]}) == found.prompts


def test_tokens_steps_times_and_drafts_of_an_output_correspond(make_run):
    reading = read_report_data(make_run(prompts=3))
    (turn, *_) = make_viewer_data(reading, load_text_decoder("embedded-7m")).content["turns"]
    for row in turn["rows"]:
        n = len(turn["texts"][row["text"]]["ids"])
        if row["label"] == "hf:vanilla":
            assert row["steps"] is None and row["ends"] is None
            continue
        assert sum(count for _, count in row["origin"]) == len(row["logp"]) == n
        assert 1 + sum(step[4] for step in row["steps"]) == n
        assert len(row["ends"]) == 1 + len(row["steps"]) and row["ends"][-1] == row["total"]
        assert row["ends"] == sorted(row["ends"])
        assert [len(draft[0]) for draft in row["drafts"]] == [step[1] for step in row["steps"]]


def test_run_without_prompts_has_no_viewer(make_run, tmp_path):
    run = make_run(prompts=3)
    (run.path / "prompts.jsonl").unlink()
    (file,) = write_html(read_report_data(run), tmp_path, figures=[])
    page = file.read_text(encoding="utf-8")
    assert "The texts of these prompts were not kept." in page
    assert json.loads(Elements(page).scripts[0])["turns"] == []


def test_noisy_outputs_have_no_times(make_run, monkeypatch):
    from specbench_cli.store.run_dir import RunDir

    run = make_run(prompts=3)
    records = [replace(record, void=True) for record in run.records()]
    monkeypatch.setattr(RunDir, "records", lambda self, prompt_ids=None: iter(records))
    (turn, *_) = make_viewer_data(read_report_data(run), None).content["turns"]
    assert {(row["ends"], row["total"]) for row in turn["rows"]} == {(None, None)}


def test_methods_are_described_by_class_or_by_records_if_the_class_is_missing(make_run):
    found = {card.name: card for card in make_cards(read_report_data(make_run()).summary)}
    sps = found["sps"]
    assert sps.summary.startswith("Speculative sampling:")
    assert "2211.17192" in sps.citation
    (length,) = [param for param in sps.params if param.name == "length"]
    assert length.values == (("sps", "5"),) and length.description
    assert found["gone"].missing and [p.name for p in found["gone"].params] == ["length"]


def test_docstrings_become_paragraphs_and_lists():
    doc = (
        "Name: idea.\n\nLossless because\n`this` holds.\n\nOne step:\n1. Draft\n   so.\n2. Verify."
    )
    assert [(block.kind, block.lines) for block in split_doc(doc)] == [
        ("paragraph", ("Name: idea.",)),
        ("paragraph", ("Lossless because this holds.",)),
        ("paragraph", ("One step:",)),
        ("list", ("Draft so.", "Verify.")),
    ]


def test_figures_are_inlined_without_styles_and_with_unique_ids():
    source = """<svg xmlns="http://www.w3.org/2000/svg" width="9pt"
      xmlns:xlink="http://www.w3.org/1999/xlink"><metadata>x</metadata><defs>
      <style>*{}</style><path id="m1" style="stroke: #222; fill: none"/></defs>
      <script>alert(1)</script><g style="clip-path: url(#p1)"><use xlink:href="#m1"/>
      <text style="font: bold 7px 'Sans', serif">a &lt; b</text></g></svg>"""
    figure_svg = inline_svg(source, "bar")
    for removed in ("style", "script", "metadata", "xlink", "width", "ns0"):
        assert removed not in figure_svg
    assert (
        'id="bar-m1"' in figure_svg
        and 'href="#bar-m1"' in figure_svg
        and "url(#bar-p1)" in figure_svg
    )
    assert (
        'fill="none"' in figure_svg
        and 'font-weight="bold"' in figure_svg
        and "a &lt; b" in figure_svg
    )


class Copies:
    """A run with `n` copies of each prompt of another run."""

    def __init__(self, run, n):
        self.run, self.n, self.path, self.manifest = run, n, run.path, run.manifest

    def _copied(self, found):
        return (replace(each, prompt_id=f"{each.prompt_id}-{copy}")
                for copy in range(self.n) for each in found)  # fmt: skip

    def records(self, prompt_ids=None):
        found = self._copied(list(self.run.records()))
        return (each for each in found if prompt_ids is None or each.prompt_id in prompt_ids)

    def prompts(self):
        return self._copied(list(self.run.prompts()))


def test_report_of_480_prompts_and_10_methods_is_under_5_mb(make_run, tmp_path):
    labels = ("vanilla", "sps", "tree", "pld", "loose", "hf:vanilla", "a", "b", "c", "d")
    run = make_run(prompts=12, labels=labels, tokens=128)
    reading = replace(read_report_data(run), run=Copies(run, 40))
    (file,) = write_html(reading, tmp_path)
    assert 1_000_000 < file.stat().st_size < 4_000_000
    page = file.read_text(encoding="utf-8")
    assert re.search(r"This file has \d+ of 480 questions", page)

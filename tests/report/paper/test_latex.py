"""Tests of the LaTeX report: escaping, its files, the bibliography, and compiling it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.api import Claim
from specbench_cli.commands.report import TYPESET
from specbench_cli.registry import Papers
from specbench_cli.report import claims
from specbench_cli.report.outputs import write
from specbench_cli.report.paper import bibliography as references
from specbench_cli.report.paper.bibliography import bibliography, entries
from specbench_cli.report.paper.latex import write_latex
from specbench_cli.report.paper.tex import Tex, escape
from specbench_cli.report.report_data import read_report_data
from specbench_cli.report.spec_bench import table as spec_bench_table

NASTY = r"a_b&c%d$e#f{g}h^i~j\k[l]<m>n|o\"p--q`r é…"
"""A label with the special characters of LaTeX that figures can draw."""


@pytest.fixture
def reading(make_run, synthetic):
    lossy = synthetic.Fake("lossy", length=5, alpha=0.9, guarantee="quality_only")
    nasty = synthetic.Fake(NASTY, method="sps", length=5, alpha=0.7)
    fakes = [synthetic.vanilla, synthetic.sps, nasty, synthetic.hf_vanilla, lossy]
    chinese = {"label": "中_中", "hash": "aa"}
    run = make_run(
        fakes=fakes, prompts=24, tokens=24, change=lambda m: m["models"].update(target=chinese)
    )
    return read_report_data(run)


@given(st.text())
def test_escaped_text_contains_no_command(text):
    tex = escape(text)
    assert tex.isascii()
    left = re.sub(r"\\(?:[a-zA-Z]+(?=[{}])|[\\{}$&#%_'`^~\"])|\$\\times\$", "", tex)
    assert not set(left) & set("$&#%_\\^~")
    assert left.count("{") == left.count("}")


def test_text_is_escaped_by_equivalent_commands():
    assert escape("50% of a_b") == r"50\% of a\_b"
    assert escape("1.16x") == r"1.16$\times$"
    assert escape("--force ---") == "-{}-force -{}-{}-"
    assert escape("up to 4.43x of 8x7B") == r"up to 4.43$\times$ of 8x7B"
    assert escape("Müller, Kočiský") == r"M\"{u}ller, Ko\v{c}isk\'{y}"
    assert escape("中") == r"\texttt{U+4E2D}"
    assert escape(Tex(r"\cite{a}")) == r"\cite{a}"


def test_every_part_is_a_file_that_a_paper_can_input(reading, tmp_path):
    files = {file.name: file for file in write_latex(reading, tmp_path)}
    assert {"report.tex", "overall.tex", "cost.tex", "families.tex", "measured.tex"} <= set(files)
    page = files["report.tex"].read_text()
    for name in files.keys() - {"report.tex", "references.bib"}:
        assert rf"\input{{{name.removesuffix('.tex')}}}" in page
    overall = files["overall.tex"].read_text()
    for rule in ("toprule", "midrule", "bottomrule"):
        assert overall.count(f"\\{rule}") == 1
    row = next(line for line in overall.splitlines() if line.startswith("sps "))
    assert row.count("&") == 7
    assert r"$\times$" in row


def test_lossy_methods_are_below_their_own_heading(reading, tmp_path):
    write_latex(reading, tmp_path)
    overall, lossy = (
        (tmp_path / "latex" / f"{name}.tex").read_text() for name in ("overall", "lossy")
    )
    assert "lossy" not in overall and "less vanilla's" in lossy
    for name in ("cost", "families"):
        lines = (tmp_path / "latex" / f"{name}.tex").read_text().splitlines()
        split = next(n for n, line in enumerate(lines) if r"\emph{lossy" in line)
        assert lines[split + 1].startswith("lossy ")


def test_family_table_has_group_letters_and_intervals(make_run, tmp_path):
    write_latex(read_report_data(make_run(prompts=48)), tmp_path)
    lines = (tmp_path / "latex" / "families.tex").read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("sps "))
    assert lines[place].count(r"\textsuperscript{") == 7
    assert lines[place + 1].count(r"\scriptsize {[}") == 7


def test_bibtex_entries_are_parsed():
    text = (
        "words\n@misc{a,\n title = {A {B} C},\n eprint = {2401.00001},\n}\nmore\n@book{b, x = {y}}"
    )
    first, second = entries(text)
    assert (first.key, first.arxiv) == ("a", "2401.00001")
    assert first.source.endswith("}\n}") or first.source.endswith(",\n}")
    assert (second.source, second.arxiv) == ("@book{b, x = {y}}", None)


def test_a_paper_cited_twice_has_one_entry(reading, monkeypatch):
    cited = Papers("@misc{own-key,\n  title = {Spec-Bench},\n  eprint = {2401.07851},\n}")
    monkeypatch.setattr(references, "find_papers", lambda name: [cited] if name == "sps" else [])
    manifest = {
        "models": {"target": {"label": "llama-7b"}, "draft": {"label": "llama-68m"}},
        "tasks": [{"name": "spec_bench"}, {"name": "mini"}, {"name": "not here"}],
    }
    found = bibliography(reading.summary, manifest)
    assert found.keys("method", "sps") == ("own-key",)
    assert found.keys("task", "spec_bench") == ("own-key",)
    assert found.keys("model", "llama-7b") == ("llama",)
    assert found.keys("model", "llama-68m") == ("specinfer",)
    assert found.keys("task", "mini") == ()
    assert [entry.key for entry in found.entries] == ["own-key", "llama", "specinfer"]
    assert found.text().count("@") == 3


def test_settings_from_a_paper_are_cited_if_the_run_uses_them(reading):
    config = {"batch": 8, "prefill_chunk": 256, "memory_budget": "2GB"}
    rows = [{"label": rule, "params": {"length": rule}} for rule in ("synergy", "smartspec")]
    found = bibliography(reading.summary, {"config": {"effective": config}, "rows": rows})
    numbers = {entry.arxiv for entry in found.entries}
    assert numbers >= {"2310.18813", "2406.14066", "2506.01986", "2403.02310"}
    assert found.keys("setting", "length=synergy") == ("synergy",)
    alone = {"config": {"effective": {**config, "batch": 1, "memory_budget": None}}, "rows": []}
    assert not any(kind == "setting" for kind, _ in bibliography(reading.summary, alone).cited)


def test_a_task_without_a_bibtex_entry_is_cited_by_its_description(reading):
    found = bibliography(reading.summary, {"tasks": [{"name": "aime"}]})
    (key,) = found.keys("task", "aime")
    assert "American Invitational Mathematics Examination" in found.text()
    assert f"@misc{{{key}," in found.text()


def test_every_model_and_task_that_has_a_paper_has_an_entry():
    from specbench_cli.models.aliases import aliases
    from specbench_cli.tasks import describe, task_names

    shipped = {entry.key: entry for entry in entries(references.SHIPPED.read_text())}
    missing = {a.cite for a in aliases().values() if a.cite} - shipped.keys()
    assert not missing
    assert all(alias.cite for alias in aliases().values() if alias.hub)
    numbers = {entry.arxiv for entry in shipped.values()}
    cited = " ".join(str(describe(name).get("citation", "")) for name in task_names())
    assert set(re.findall(r"arXiv:(\d{4}\.\d{5})", cited)) <= numbers


PUBLISHED = Papers(
    """@inproceedings{liu2025pearl,
  title = {{PEARL}: Parallel Speculative Decoding},
  author = {Liu, Tianyu and others},
  booktitle = {ICLR},
  year = {2025},
  eprint = {2408.11850},
}""",
    (
        Claim(
            speedup="up to 4.43x",
            models="Llama 2 70B & Llama 2 7B, CodeLlama 34B & 7B",
            task="HumanEval",
            hardware="four A100 (80 GB)",
            source="abstract of arXiv:2408.11850",
        ),
    ),
)


@pytest.fixture
def everything(reading, monkeypatch):
    """Report data with a sweep, claims and Spec-Bench's formulas, so that no part is empty."""
    published = {"sps": [PUBLISHED]}
    for module in (claims, references):
        monkeypatch.setattr(module, "find_papers", lambda name: published.get(name, []))
    sweep = {
        "sweep": {"sps": {"length": [5]}},
        "methods": [{"label": label, "name": label, "params": {}} for label in ("vanilla", "sps")],
    }
    reading.run.manifest["config"]["effective"].update(sweep)
    reading.run.manifest["tasks"].append({"name": "spec_bench"})
    reading.run.manifest["models"]["draft"]["label"] = "llama-68m"
    found = spec_bench_table.compute_spec_bench(reading.run, reading.sources, reading.summary)
    return replace(reading, spec_bench=found)


@pytest.mark.latex
@pytest.mark.usefixtures("figures")
def test_the_document_compiles_without_overfull_boxes(everything, tmp_path):
    files = write(everything, tmp_path, ("latex",))
    parts = {file.stem for file in files}
    assert {"sweep", "claims", "spec-bench", "references"} <= parts
    assert any(file.name == "speedup.pdf" for file in files)
    place = tmp_path / "latex"
    for step in TYPESET.split("; "):
        command, name = step.split()
        program = shutil.which(command)
        assert program is not None
        command_line = [program, name]
        if command == "pdflatex":
            command_line[1:1] = ["-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape"]
        done = subprocess.run(command_line, cwd=place, capture_output=True, check=False)
        if command == "pdflatex":
            assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    log = (place / "report.log").read_text(errors="replace")
    assert "Overfull" not in log
    assert "undefined" not in log
    assert (place / "report.bbl").read_text().count(r"\bibitem") == 3
    assert "Missing character" not in log
    assert (place / "report.pdf").stat().st_size > 10_000


def test_bibtex_keys_and_texts_are_sanitised():
    found = entries("@misc{a}\\input{x},\n title={x}}\n@misc{fine:2024,\n title={\x1b}}")
    assert [entry.key for entry in found] == ["fine:2024"]
    assert "\x1b" not in references.Bibliography(tuple(found), {}).text()

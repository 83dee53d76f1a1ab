"""`methods/papers.yaml`: usable BibTeX, sourced claims, and one entry per paper."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
import yaml

from specbench_cli import registry
from specbench_cli.api import Claim
from specbench_cli.registry import Papers, built_in_methods

TEXT = files("methods").joinpath("papers.yaml").read_text(encoding="utf-8")
FILE = yaml.safe_load(TEXT)
PAPERS = FILE["papers"]
CLAIMED = [(key, claim) for key, paper in PAPERS.items() for claim in paper.get("claims", ())]


def test_a_method_names_papers_of_the_bibliography_and_every_paper_is_named():
    named = {
        key
        for entry in built_in_methods().values()
        for key in (*entry.proposed_in, *entry.builds_on)
    }
    assert named == PAPERS.keys()


def test_a_method_has_a_paper_or_a_project_or_is_a_baseline_or_a_control():
    without = {name for name, entry in built_in_methods().items() if not entry.source}
    assert without == {"vanilla", "random-accept", "draft-alone"}


def test_no_key_comes_twice():
    assert len(re.findall(r"^  [\w-]+:$", TEXT, re.M)) == len(PAPERS)


@pytest.mark.parametrize("key", PAPERS)
def test_an_entry_is_complete_and_has_its_key(key):
    paper = PAPERS[key]
    assert {"source", "citation"} <= paper.keys() <= {"source", "claims", "citation"}
    entry = paper["citation"]
    assert re.match(r"@\w+\{([\w-]+),", entry)[1] == key
    assert entry.count("@") == 1 and entry.count("{") == entry.count("}")
    assert {"title", "author", "year"} <= set(re.findall(r"^  (\w+) = ", entry, re.M))
    place = paper["source"].removeprefix("arXiv:")
    assert f"eprint = {{{place}}}" in entry or f"url = {{https://{place}}}" in entry


@pytest.mark.parametrize(("key", "claim"), CLAIMED)
def test_a_claim_is_a_speedup_with_its_source(key, claim):
    """Only numbers read in the source itself are claims, not recalled or second-hand ones."""
    claim = Claim(**claim)
    assert re.fullmatch(r"(up to )?\d+(\.\d+)?x( to \d+(\.\d+)?x)?", claim.speedup)
    assert re.fullmatch(
        r"(abstract of|figure in|README of|figure in the repository of)"
        r" (arXiv:\d{4}\.\d{5}(v\d)?|github\.com/[\w./-]+)",
        claim.source,
    )


def test_a_method_lists_its_own_papers_and_claims_first():
    found = registry.papers("sps-tree")
    keys = re.findall(r"^@\w+\{([\w-]+),", found.citation, re.M)
    assert keys == ["miao2024specinfer", "jeon2024rsd", "li2024eagle2"]
    assert found.claims == ()
    assert [claim.speedup for claim in registry.papers("eagle2").claims][:2] == ["3.62x", "4.26x"]
    assert registry.papers("sd") == registry.papers("sps")
    assert registry.papers("vanilla") == Papers()


@pytest.mark.parametrize("name", built_in_methods())
def test_no_method_file_repeats_the_papers_file(name):
    kind = registry.load(name)
    assert (kind.citation, kind.claims) == ("", ())


def test_a_plugin_declares_its_papers_or_builds_on_a_method(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})
    file = tmp_path / "mine.py"
    file.write_text('''
from methods.sps import Sps
from specbench_cli.api import Claim

class Mine(Sps):
    """Another."""
    name = "mine"
    citation = """
        @misc{me,
          title = {Mine},
        }
    """
    claims = (Claim(speedup="9x", source="abstract"),)

class Theirs(Sps):
    """A third."""
    name = "theirs"
''')
    registry.load_plugin(str(file))
    assert registry.papers("mine").citation == "@misc{me,\n  title = {Mine},\n}"
    assert [claim.speedup for claim in registry.papers("mine").claims] == ["9x"]
    assert registry.papers("theirs") == registry.papers("sps")

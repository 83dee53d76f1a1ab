"""What method files say of their sources: BibTeX that can be used, and claims that can be found."""

from __future__ import annotations

import inspect
import re

import pytest

from specbench_cli import registry

CLASSES = {name: registry.load(name) for name in registry.METHODS}
CLAIMED = [(name, claim) for name, method in CLASSES.items() for claim in method.claims]


def entries(name: str) -> dict[str, str]:
    """The BibTeX entries of a method by key."""
    text = inspect.cleandoc(CLASSES[name].citation)
    found = re.split(r"\n\n(?=@)", text) if text else []
    return {re.match(r"@\w+\{([\w-]+),", entry)[1]: entry for entry in found}


@pytest.mark.parametrize("name", CLASSES)
def test_every_paper_of_the_registry_is_cited(name):
    cited = "".join(entries(name).values())
    for arxiv_id in re.findall(r"arXiv:([\d.]+)", registry.METHODS[name].source):
        assert f"eprint = {{{arxiv_id}}}" in cited


def test_entries_are_whole_and_a_key_means_one_paper():
    seen: dict[str, str] = {}
    for name in CLASSES:
        for key, entry in entries(name).items():
            assert entry.count("{") == entry.count("}")
            assert {"title", "author", "year"} <= set(re.findall(r"^  (\w+) = ", entry, re.M))
            assert seen.setdefault(key, entry) == entry


@pytest.mark.parametrize(("name", "claim"), CLAIMED)
def test_claim_is_a_speedup_with_its_source(name, claim):
    assert re.fullmatch(r"(up to )?\d+(\.\d+)?x( to \d+(\.\d+)?x)?", claim.speedup)
    assert re.search(r"arXiv:\d{4}\.\d{5}|github\.com/\w+", claim.source)

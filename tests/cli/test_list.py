"""`specbench list`: tables of what is available, and one entry in full."""

import csv
import hashlib
import inspect
import json
from pathlib import Path

import pytest

from specbench_cli import app, registry
from specbench_cli.commands._card import catalogue_row, describe_entry
from specbench_cli.store.run_dir import RunDir

ROOT = Path(__file__).parents[2]
SUMMARY_COLUMNS = (
    "family", "label", "lossless", "peer", "broken", "upper_bound", "control", "speedup",
    "speedup_low", "speedup_high",
)  # fmt: skip


@pytest.fixture
def list_items(capsys, tmp_path, monkeypatch):
    """Return a function that runs `specbench list` in an empty folder and returns stdout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "")
    monkeypatch.setattr(registry, "_plugin_methods", {})  # forget the plug-ins of other tests

    def call(*args):
        assert app._run(["list", *args]) == 0
        return capsys.readouterr().out

    return call


def test_methods_are_listed_in_registry_order(list_items):
    heading, *rows = (line.split("\t") for line in list_items("methods").splitlines())
    assert heading == ["name", "aliases", "needs", "guarantee", "summary"]
    assert [row[0] for row in rows] == list(registry.built_in_methods())


def test_json_has_every_fact_of_a_method(list_items):
    by_name = {m["name"]: m for m in map(json.loads, list_items("methods", "--json").splitlines())}
    assert by_name["sps"]["aliases"] == ["sd", "speculative"]
    assert by_name["sps"]["needs"] == ["draft"]
    assert "arXiv:2211.17192" in by_name["sps"]["source"]
    assert by_name["hf:vanilla"]["peer"] is True


def test_a_method_is_found_by_alias_with_its_parameters_and_idea(list_items):
    out = list_items("methods", "sd")
    assert "name\tsps" in out
    assert (
        "guarantee\tgreedy exact_tokens, rejection exact_law, block exact_law, coupled exact_tokens"
        in out
    )
    assert "sps.length\t5\tint | heuristic | confidence | " in out
    assert "Lossless because" in out


def test_one_method_as_json_is_one_object(list_items):
    facts = json.loads(list_items("methods", "pld", "--json"))
    assert {row["parameter"] for row in facts["parameters"]} >= {"pld.ngram", "pld.length"}
    assert facts["state_scope"] == "prompt"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tasks", {"mini", "gsm8k", "spec_bench", "mt_bench"}),
        ("models", {"embedded", "embedded-7m", "embedded-1m", "llama-7b"}),
    ],
)
def test_shipped_names_are_listed_and_each_is_described(list_items, kind, names):
    found = {
        facts["name"]: facts for facts in map(json.loads, list_items(kind, "--json").splitlines())
    }
    assert found.keys() >= names
    for name in names:
        assert json.loads(list_items(kind, name, "--json"))["name"] == name


def test_no_runs_are_an_empty_table(list_items):
    assert list_items("runs", "--json") == ""
    assert list_items("runs").split() == [
        "name", "created_utc", "status", "best", "target", "tasks", "methods"
    ]  # fmt: skip


@pytest.fixture
def store_run(tmp_path):
    """Return a function that stores a run with its summary, without records."""

    def store(name, created, *rows):
        run = RunDir.create(tmp_path / "results/runs" / name, {"created_utc": created})
        run.close("finished")
        with (run.path / "summary.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, SUMMARY_COLUMNS, restval="False")
            writer.writeheader()
            writer.writerows({"family": "all", "lossless": "True", **row} for row in rows)

    return store


def speed(label, speedup, low, high, **facts):
    return {"label": label, "speedup": speedup, "speedup_low": low, "speedup_high": high, **facts}


def test_runs_are_listed_newest_first_with_the_fastest_lossless_method(list_items, store_run):
    fast, lossy = speed("sps", 1.5, 1.2, 1.8), speed("judge", 3, 2, 4, lossless="False")
    bound = speed("oracle", 2, 1.9, 2.1, upper_bound="True")
    store_run("a", "2026-01-01T00:00:00+00:00", fast, speed("pld", 1.1, 1.05, 1.2), lossy, bound)
    store_run("b", "2026-01-02T00:00:00+00:00", speed("sps", 1.3, 0.96, 1.6))
    found = [json.loads(line) for line in list_items("runs", "--json").splitlines()]
    assert [(run["name"], run["best"]) for run in found] == [
        ("b", "none is faster"),
        ("a", "sps 1.50x [1.20, 1.80]"),
    ]


def test_markdown_is_the_table_of_the_catalogue(list_items):
    table = list_items("methods", "--markdown")
    page = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
    (after,) = page.split("<!-- methods -->\n")[1:]
    assert after.startswith(table)


@pytest.mark.parametrize("args", ["tasks --markdown", "methods sps --markdown"])
def test_markdown_is_available_only_for_all_methods(args, capsys):
    assert app._run(["list", *args.split()]) == 2
    assert "specbench list methods --markdown" in capsys.readouterr().err


def test_a_method_card_has_the_paper_s_claims_and_citation(list_items):
    out = list_items("methods", "eagle3")
    assert "5.6x\tVicuna 13B\tMT-bench\t0" in out
    assert "\n@inproceedings{li2025eagle3,\n  title = " in out


def test_a_method_card_says_if_this_file_was_audited(list_items, tmp_path):
    def audit_says() -> str:
        (line,) = (x for x in list_items("methods", "pld").splitlines() if x.startswith("audit\t"))
        return line.removeprefix("audit\t")

    folder = tmp_path / "results" / "certificates"
    folder.mkdir(parents=True)
    assert audit_says() == "not audited here: specbench audit pld"
    facts = {"method": "pld", "sha256": "0" * 64, "verdict": "PASSED", "checks": [{}, {}]}
    (folder / "pld.json").write_text(json.dumps(facts))
    assert audit_says().startswith("stale: PASSED, but its file has changed since")
    file = inspect.getfile(registry.load("pld"))
    facts["sha256"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    (folder / "pld.json").write_text(json.dumps(facts))
    assert audit_says() == "PASSED: 2 checks of the current file"


def test_shapes_and_hardware_are_listed_with_their_sources(list_items):
    by_name = {
        each["name"]: each for each in map(json.loads, list_items("shapes", "--json").splitlines())
    }
    assert by_name["llama-2-7b"]["parameters"] == 6_738_415_616
    assert by_name["mixtral-8x7b"]["experts"] == 8
    assert all(each["source"].startswith(("https://", "made")) for each in by_name.values())
    heading, *rows = (line.split("\t") for line in list_items("hardware").splitlines())
    assert heading[:4] == ["name", "device", "memory", "bandwidth"]
    assert all(row[-1].startswith("https://") for row in rows)
    assert "read" in json.loads(list_items("hardware", "h100", "--json"))


def test_markdown_of_a_plug_in_contains_no_live_link_or_mention():
    facts = describe_entry("sps") | {
        "name": "theirs",
        "summary": "[x](y) @torvalds",
        "source": "www.e.com",
    }
    row = catalogue_row(facts)
    assert (row["idea"], row["source"]) == ("[x]\\(y) `@torvalds`", "`www.e.com`")

"""Tests of runs on targets that are not dense decoders, e.g. mixtures of experts or Mamba."""

import itertools
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specbench_cli.errors import UsageError
from specbench_cli.report.report_data import read_report_data
from specbench_cli.report.terminal.table import run_text
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.facts import Facts

FAMILIES = ("mixtral", "mamba2", "t5", "llava")
WORDS = "the a an of is in to and what who how many if each was were has have did by for on with"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """Return a function that makes the folder of a tiny checkpoint with a tokenizer."""

    def make(family, name, **options):
        place = shutil.copytree(tiny_checkpoint(family, **options), tmp_path / name)
        special = ["<unk>", "<end>"]
        words = [*special, *WORDS.split(), *map(str, range(60)), *"abcdefghijklmnopqrstuvwxyz?.,"]
        tokenizer = Tokenizer(
            models.WordLevel({word: at for at, word in enumerate(dict.fromkeys(words))}, "<unk>")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
        fast.save_pretrained(place)
        return str(place)

    return make


@pytest.fixture
def pair(folder):
    """Return a function that makes a target and a draft model, which is the target with noise."""

    def make(family):
        # transformers' generate needs encoders and decoders of the same depth.
        options = {"num_layers": 3} if family == "t5" else {}
        target = folder(family, "target", **options)
        return {
            "target": target,
            "draft": folder(family, "draft", noise=0.1, **options),
            "raw": True,
        }

    return make


@pytest.mark.parametrize(
    ("family", "rule"), list(zip(FAMILIES, itertools.cycle(("greedy", "coupled")), strict=False))
)
def test_a_run_is_lossless_and_names_the_decoder(specbench, pair, family, rule):
    options = {} if rule == "greedy" else {"temperature": 0.8, "verify": "coupled"}
    outcome = specbench("sps", "pld", "hf:vanilla", **pair(family), **options)
    assert outcome.exit_code == 0, outcome.log.notes
    assert [record.error for record in outcome.records] == [None] * 8
    kinds = {record.verdict.kind for record in outcome.records}
    assert kinds <= {"reference", "identical", "near-tie"}
    engines = {role: model["engine"] for role, model in outcome.manifest["models"].items()}
    assert set(engines) == {"target", "draft"}
    assert "FusedDecoder" not in engines.values()
    reading = read_report_data(RunDir.open(outcome.path))
    head = run_text(reading.summary, reading.facts)
    assert "target target (transformers' module)  draft draft (transformers' module)" in head


def test_forwards_of_a_recurrent_target_are_all_counted(specbench, pair):
    outcome = specbench("sps", **pair("mamba2"))
    plain, drafted = outcome.by_label("vanilla")[0], outcome.by_label("sps")[0]
    assert plain.target_forwards == plain.n_tokens
    steps = drafted.steps
    assert drafted.target_forwards == 1 + sum(1 + (nodes > 0) for nodes in steps.nodes)


def test_a_batch_on_a_recurrent_target_gives_the_same_ids(specbench, pair):
    options = pair("mamba2")
    alone, batched = (specbench("sps", **options, batch=n, limit=4) for n in (1, 4))
    ids = [{r.prompt_id: r.output_ids for r in each.by_label("sps")} for each in (alone, batched)]
    assert ids[0] == ids[1]


def test_only_trees_fail_on_a_recurrent_target(specbench, pair):
    outcome = specbench("sps-tree", **pair("mamba2"))
    errors = {record.error for record in outcome.by_label("sps-tree")}
    assert all("supports only chains, not trees" in error for error in errors)
    assert {record.error for record in outcome.by_label("vanilla")} == {None}


def test_a_draft_model_with_an_encoder_is_rejected_for_a_decoder_only_target(specbench, folder):
    options = {"target": folder("mixtral", "target"), "draft": folder("t5", "draft"), "raw": True}
    with pytest.raises(UsageError, match="draft cannot draft for target: it reads its prompt"):
        specbench("sps", **options)


def test_step_costs_are_not_measured_for_recurrent_models(specbench, folder):
    options = {
        "target": folder("mamba2", "target"),
        "draft": folder("mamba2", "draft"),
        "raw": True,
    }
    with pytest.raises(UsageError, match="forwards of target and draft cannot be measured"):
        specbench({"name": "sps-tree", "params": {"shape": "dynamic", "nodes": "auto"}}, **options)


def test_the_fused_decoder_is_not_named_in_the_header():
    manifest = {"models": {"target": {"label": "t", "engine": "FusedDecoder"}, "draft": None}}
    assert Facts.from_manifest(manifest).header({}, 100)[0].startswith("specbench ?  target t")
    assert "module" not in "".join(Facts.from_manifest(manifest).header({}, 100))

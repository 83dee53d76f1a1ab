"""Training of the acceptance head (SpecDec++): loss, labels, mixed text, output files."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from methods.specdecpp.training import (
    AcceptanceModule,
    LabelledReply,
    collect_rows,
    label,
    mix,
    weighted_bce,
)
from specbench_cli import registry
from specbench_cli.app import with_all_options
from specbench_cli.commands.training.app import app as train
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import UsageError
from specbench_cli.models import resolve
from specbench_cli.training.acceptance import (
    RowSampler,
    compute_calibration,
    compute_divergence,
    export,
)

app = with_all_options(train)


CPU = torch.device("cpu")


# ---- loss ---------------------------------------------------------------------------------------


def test_with_a_weight_of_one_the_loss_is_plain_bce():
    logits, chances = torch.randn(4, 9, 2), torch.rand(4, 9)
    plain = F.binary_cross_entropy(logits.softmax(-1)[..., 1], chances)
    torch.testing.assert_close(weighted_bce(logits, chances, torch.ones(4, 9), 1.0), plain)


def test_the_rejection_weight_multiplies_the_loss_of_rejections():
    logits = torch.randn(2, 2)
    chances = torch.tensor([1.0, 0.0])
    accepted, rejected = -logits[0].log_softmax(-1)[1], -logits[1].log_softmax(-1)[0]
    loss = weighted_bce(logits, chances, torch.ones(2), 6.0)
    torch.testing.assert_close(loss, (accepted + 6 * rejected) / 7)


def test_uncounted_labels_do_not_change_the_loss():
    logits, chances = torch.randn(3, 8, 2), torch.rand(3, 8)
    counts = (torch.rand(3, 8) < 0.5).float()
    other = torch.where(counts > 0, chances, torch.rand(3, 8))
    whatever = torch.where(counts[..., None] > 0, logits, torch.randn(3, 8, 2))
    first = weighted_bce(logits, chances, counts, 6.0)
    assert torch.equal(first, weighted_bce(whatever, other, counts, 6.0))


def test_the_loss_is_least_where_odds_are_divided_by_the_weight():
    s, w = 0.8, 6.0
    at = s / (s + w * (1 - s))
    losses = [
        weighted_bce(torch.tensor([[1 - p, p]]).log(), torch.tensor([s]), torch.ones(1), w)
        for p in (at - 0.02, at, at + 0.02)
    ]
    assert losses[1] < min(losses[0], losses[2])


# ---- labels and mixing --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    names = ("embedded-7m", "embedded-1m")
    return [
        LlamaForCausalLM.from_pretrained(resolve(name).path, dtype=torch.float32).eval()
        for name in names
    ]


REPLIES = [([3, 1, 40, 50, 60, 2], [70, 80, 90, 0]), ([3, 1, 44, 2], [300, 266, 493, 292, 0])]


def test_a_label_is_the_probability_that_the_draft_token_is_accepted(models):
    for labelled, (prompt, answer) in zip(
        label(*models, REPLIES, "sampled", 5), REPLIES, strict=True
    ):
        assert labelled.ids.tolist() == [*prompt, *answer]
        assert labelled.start == len(prompt)
        for position in range(labelled.start, len(labelled.ids)):
            prefix = labelled.ids[None, :position]
            p, q = (model(prefix).logits[0, -1].softmax(-1) for model in models)
            token = labelled.drafted[position]
            expected = (p[token] / q[token]).clamp(max=1.0)
            torch.testing.assert_close(labelled.chances[position], expected, atol=1e-4, rtol=1e-3)


def test_a_greedy_label_is_1_if_target_and_draft_agree(models):
    for labelled in label(*models, REPLIES, "greedy", 5):
        for position in range(labelled.start, len(labelled.ids)):
            p, q = (model(labelled.ids[None, :position]).logits[0, -1].argmax() for model in models)
            assert labelled.drafted[position] == q
            assert labelled.chances[position] == float(p == q)


def reply(n=400, start=100):
    return LabelledReply(torch.full((n,), 7), torch.full((n,), 8), torch.rand(n), start)


def test_mix_takes_a_share_of_target_tokens_and_counts_the_draft_tokens():
    ids, chances, counts = mix(source := reply(), 0.15, torch.Generator().manual_seed(0))
    assert torch.equal(counts > 0, ids == 8)
    assert not counts[:100].any()
    assert counts[100:].mean() == pytest.approx(0.85, abs=0.05)
    assert torch.equal(chances, source.chances)


def test_hidden_rows_are_those_of_the_draft_on_the_mixed_text(models):
    draft = models[1]
    replies = list(label(*models, REPLIES, "sampled", 5))
    rows, chances = collect_rows(draft, replies, 0.0, 3)
    ids = torch.cat((replies[0].ids[:6], replies[0].drafted[6:]))
    truth = draft.model(ids[None]).last_hidden_state[0, 6:]
    torch.testing.assert_close(rows[:4], truth, atol=1e-4, rtol=1e-4)
    assert torch.equal(chances[:4], replies[0].chances[6:])
    assert len(rows) == len(chances) == sum(len(answer) for _, answer in REPLIES)


def test_every_round_has_another_order_and_a_restored_source_continues_exactly():
    rows, chances = torch.randn(50, 4), torch.rand(50)
    source = RowSampler(rows, chances, 0)
    first, second = source.batch(5, 10), source.batch(5, 10)
    for batch in (first, second):
        assert torch.equal(batch.targets.sort().values, chances.sort().values)
        assert batch.inputs.shape == (50, 4)
    assert not torch.equal(first.targets, second.targets)
    other = RowSampler(rows, chances, 0)
    other.restore(json.loads(json.dumps({"drawn": 50})))
    assert all(map(torch.equal, second[:3], other.batch(5, 10)[:3]))


# ---- metrics and files --------------------------------------------------------------------------


def test_the_divergence_is_zero_from_itself_and_finite_at_the_ends():
    chances = torch.tensor([0.0, 0.3, 1.0])
    assert compute_divergence(chances, chances) == pytest.approx(0.0)
    assert compute_divergence(torch.tensor([0.5]), torch.tensor([1.0])) == pytest.approx(
        0.6931, abs=1e-3
    )


def test_bins_have_equal_token_counts_in_order_of_prediction():
    predicted = torch.rand(1000)
    bins = compute_calibration(predicted, (torch.rand(1000) < predicted).float())
    assert [part.tokens for part in bins] == [100] * 10
    assert all(abs(part.predicted - part.labelled) < 0.15 for part in bins)
    assert [part.predicted for part in bins] == sorted(part.predicted for part in bins)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stored_head_is_loaded_unchanged(tmp_path, tied):
    names = {"target": "embedded-7m", "draft": "embedded-1m"}
    decoders = {role: load_decoder(resolve(name).path, name=role) for role, name in names.items()}
    head = AcceptanceModule(128, 3, tied=tied)
    export(head, tmp_path, {})
    assert len(load_file(tmp_path / "model.safetensors")) == (4 if tied else 8)
    rows = torch.randn(5, 128)
    expected = head(decoders["draft"].norm(rows.clone())).softmax(-1)[:, 1]
    (trained,) = registry.load("specdec++")().artifacts()
    output = trained.kind.load(tmp_path, decoders)(rows.clone())
    torch.testing.assert_close(output, expected, atol=5e-3, rtol=0)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("acceptance")
    options = ["specdec++", "--out", str(out), "--smoke", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)
        done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    for stage in ("replies", "labels"):  # both have a progress bar
        assert re.search(rf"^{stage} .*\b(\d+)/\1\b", done.output, re.MULTILINE), done.output
    return out


def test_smoke_writes_a_head_and_its_curves_for_the_shipped_pair(smoke: Path) -> None:
    config = json.loads((smoke / "embedded-acceptance" / "config.json").read_text())
    assert (config["hidden_size"], config["num_layers"]) == (128, 3)
    facts = config["specbench"]
    for role, name in (("target", "embedded-7m"), ("draft", "embedded-1m")):
        assert facts[f"{role}_sha256"] == Weights(resolve(name).path).sha256()
    assert (facts["labels"], facts["mixing"], facts["rejection_weight"]) == ("sampled", 0.15, 6.0)
    found = json.loads((smoke / "acceptance_calibration.json").read_text())
    assert found["kl"]["2"] > 0
    assert found["kl_of_the_mean"] > 0
    assert len(found["bins"]) == 10
    assert (smoke / "acceptance_calibration.png").stat().st_size > 1_000
    assert "embedded-acceptance" in json.loads((smoke / "training_curve.json").read_text())


def test_another_recipe_in_the_same_folder_is_refused(smoke: Path) -> None:
    options = ["specdec++", "--out", str(smoke), "--smoke", "--mixing", "0.5"]
    refused = CliRunner().invoke(app, options)
    assert isinstance(refused.exception, UsageError)


def test_the_same_command_on_a_finished_folder_trains_nothing(smoke: Path) -> None:
    before = {p: p.read_bytes() for p in smoke.rglob("*") if p.suffix in (".safetensors", ".jsonl")}
    again = CliRunner().invoke(app, ["specdec++", "--out", str(smoke), "--smoke"])
    assert again.exit_code == 0, again.output
    assert {p: p.read_bytes() for p in before} == before

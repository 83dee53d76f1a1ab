"""`specbench train draft`: distances between distributions, and drafts trained with them."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from methods.sps import Sps, SpsParams
from specbench_cli.app import with_all_options
from specbench_cli.commands.training.app import app as train
from specbench_cli.config.train import DraftLoss
from specbench_cli.engine.models.load import load_decoder, restrict_output
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.models import resolve
from specbench_cli.training import align
from specbench_cli.training.align import Aligner, AlignEstimate, make_alignment, make_loss_row
from specbench_cli.training.heads.mat import find_answer_start
from specbench_cli.training.loop import WORK
from specbench_cli.training.losses import (
    DISTANCES,
    average_losses,
    kl,
    lk,
    load_model,
    reverse_kl,
    take_first_layers,
    target_loss,
    text_loss,
    tvd,
)
from specbench_cli.training.packing import TrainingBatch
from specbench_cli.training.replies import Replies, TrainingReply
from tests.tiny_family import export_models

app = with_all_options(train)


ONE = torch.ones(1)


def distributions(seed: int, rows: int = 1, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of a draft (with gradients) and of a target, `[rows, 7]`."""
    torch.manual_seed(seed)
    q, p = (torch.log_softmax(sharp * torch.randn(rows, 7).double(), -1) for _ in range(2))
    return q.requires_grad_(), p


SEEDS = st.integers(0, 10_000)


@given(SEEDS)
def test_a_distance_is_zero_only_between_equal_distributions(seed: int) -> None:
    q, p = distributions(seed)
    for name, distance in DISTANCES.items():
        if name != "tvd++":
            assert distance(p, p, ONE).item() == pytest.approx(0, abs=1e-12)
            assert distance(q, p, ONE) > 0
    assert reverse_kl(q, p, ONE).item() == pytest.approx(kl(p, q, ONE).item())
    jsd = DISTANCES["jsd"]
    assert jsd(q, p, ONE).item() == pytest.approx(jsd(p, q, ONE).item())
    assert jsd(q, p, ONE) <= math.log(2)


@given(SEEDS)
def test_total_variation_is_what_speculative_sampling_rejects(seed: int) -> None:
    q, p = distributions(seed)
    accepted = torch.minimum(q.exp(), p.exp()).sum()
    assert tvd(q, p, ONE).item() == pytest.approx(1 - accepted.item())
    assert tvd(q, p, ONE) <= (kl(q, p, ONE) / 2).sqrt() + 1e-12  # Pinsker's inequality


@given(SEEDS)
def test_tvd_plus_over_the_whole_vocabulary_is_the_normalised_gradient_of_tvd(seed: int) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)).double()
    p = torch.log_softmax(torch.randn(5, 7).double(), -1)
    weights = torch.tensor([1.0, 1.0, 0.1, 0.0, 1.0]).double()
    tvd_plus_grad, tvd_grad = (
        torch.autograd.grad(DISTANCES[name](torch.log_softmax(x, -1), p, weights), x)[0]
        for name, x in ((name, logits.clone().requires_grad_()) for name in ("tvd++", "tvd"))
    )
    q = logits.log_softmax(-1)
    mean = ((q.exp() * (p > q)).sum(-1) * weights).sum() / weights.sum()
    deviation = (mean * (1 - mean)).sqrt()
    assert torch.allclose(tvd_plus_grad * deviation, tvd_grad, atol=1e-12)
    assert tvd_plus_grad[3].abs().sum() == 0  # a row of weight 0 has no gradient


def test_every_distance_is_an_option_besides_cross_entropy() -> None:
    assert {each.value for each in DraftLoss} == {"ce", *DISTANCES}


def test_lk_is_kl_at_low_acceptance_and_total_variation_at_high_acceptance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, p = distributions(3)
    monkeypatch.setattr("specbench_cli.training.losses.LK_RATE", 0.0)
    assert lk(q, p, ONE).item() == pytest.approx(kl(q, p, ONE).item())
    monkeypatch.setattr("specbench_cli.training.losses.LK_RATE", 1e9)
    assert lk(q, p, ONE).item() == pytest.approx(tvd(q, p, ONE).item())


def test_far_from_the_target_total_variation_has_almost_no_gradient_but_kl_has() -> None:
    logits = torch.tensor([[30.0, 0, 0, 0]]).double()
    p = torch.log_softmax(torch.tensor([[0, 30.0, 0, 0]]).double(), -1)
    gradients = {}
    for name in ("kl", "tvd"):
        x = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(DISTANCES[name](torch.log_softmax(x, -1), p, ONE), x)
        gradients[name] = gradient.norm()
    assert gradients["tvd"] < 1e-3 * gradients["kl"]


@given(SEEDS)
def test_target_tokens_outside_a_cut_vocabulary_count_as_draft_probability_zero(
    seed: int,
) -> None:
    _, p = distributions(seed)
    q = torch.log_softmax(torch.randn(1, 4).double(), -1)
    padded = torch.cat([q, torch.full((1, 3), -1e4).double()], -1)
    for name in ("jsd", "tvd", "reverse-kl"):
        distance = DISTANCES[name]
        assert distance(q, p[:, :4], ONE).item() == pytest.approx(distance(padded, p, ONE).item())
    inside = p[:, :4].exp().sum()
    within = kl(q, p[:, :4].log_softmax(-1), ONE)
    assert kl(q, p[:, :4], ONE).item() == pytest.approx((inside * within).item())
    accepted = torch.minimum(q.exp(), p[:, :4].exp()).sum()
    assert tvd(q, p[:, :4], ONE).item() == pytest.approx(1 - accepted.item())


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """Limit the length of answers, since untrained models never end one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)
        patch.setattr(align, "ROUND_STEPS", 2)
        patch.setattr(align, "ROUND_QUESTIONS", 4)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a target with two layers and a draft with one."""
    return export_models(tmp_path_factory, 2, 1)


class Killed(Exception):
    """Exception in place of a signal during a run."""


def aligner(out: Path, pair: tuple[Path, Path], kill_after: int | None = None) -> Aligner:
    def report(_name: str, point: Any) -> None:
        if point.step == kill_after:
            raise Killed

    target, draft = pair
    return Aligner(
        *(out, target, [], 0, torch.device("cpu"), 8),
        n_held_out=4,
        fast=False,
        report=report,
        draft=lambda: draft,
    )


def short_plan(loss: str, samples: Any, steps: int = 5) -> align.Alignment:
    plan = make_alignment(f"{loss}-{samples}", loss, samples, 1.0, steps)
    return replace(plan, stages=(replace(plan.stages[0], sequences=1, length=128),))


@pytest.mark.parametrize("samples", ["target", "mixed"])
def test_a_resumed_alignment_equals_an_uninterrupted_one(
    samples: str, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    plan = short_plan("tvd++", samples)
    straight = aligner(tmp_path / "whole", pair).align(plan)
    with pytest.raises(Killed):
        aligner(tmp_path / "parts", pair, kill_after=3).align(plan)
    resumed = aligner(tmp_path / "parts", pair).align(plan)
    assert resumed.curve == straight.curve
    assert resumed.mat == straight.mat
    assert [each.step for each in resumed.mat] == [0, 5]
    straight_weights, resumed_weights = (
        load_file(tmp_path / out / plan.name / "model.safetensors") for out in ("whole", "parts")
    )
    assert all(
        torch.equal(straight_weights[name], resumed_weights[name]) for name in straight_weights
    )
    load_decoder(tmp_path / "whole" / plan.name, name="draft")  # a run loads it this way


def test_own_replies_are_sampled_from_the_current_draft(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    plan = short_plan("kl", "own")
    with pytest.raises(Killed):
        aligner(tmp_path, pair, kill_after=3).align(plan)
    folder = tmp_path / WORK / plan.name
    by_then = aligner(tmp_path, pair)._make_initial_model()
    by_then.load_state_dict(load_file(folder / "step-0000002" / "model.safetensors"), strict=False)
    again = aligner(tmp_path, pair)._sample_own_replies(by_then, tmp_path, 1, "own")
    (tmp_path / "own-001.jsonl").rename(tmp_path / "again.jsonl")
    replies = [(file).read_text() for file in (folder / "own-001.jsonl", tmp_path / "again.jsonl")]
    assert replies[0] == replies[1] and len(again) == 4
    aligner(tmp_path, pair)._sample_own_replies(
        aligner(tmp_path, pair)._make_initial_model(), tmp_path, 1, "own"
    )
    assert (tmp_path / "own-001.jsonl").read_text() != replies[
        0
    ]  # the initial draft generates other replies


def test_estimated_mat_equals_mat_of_decoding(tmp_path: Path) -> None:
    """Test with the shipped pair, whose draft is often right on the target's greedy outputs."""
    paths = [resolve(name).path for name in ("embedded", "embedded-1m")]
    target, draft = (load_decoder(path, name=path.name) for path in paths)
    trained = replace(aligner(tmp_path, (paths[0], paths[1])), n_held_out=3)
    replies, committed, steps = [], 0, 0
    for reply in trained.held_out:
        prompt = reply.ids[: find_answer_start(reply)]
        session = Session(
            Workspace({"target": target, "draft": draft}, 512),
            Request("held out", 0, tuple(prompt), StopRule(frozenset(), 24)),
            Sampling(),
        )
        made = list(Sps(SpsParams(length=5)).generate(session))
        replies.append(TrainingReply(prompt, list(session.output())).encode())
        committed += len(session.output()) - 1
        steps += len(made)
    object.__setattr__(trained, "held_out", replies)
    found = trained._estimate(trained._make_initial_model(), 0)
    assert found.mat == pytest.approx(committed / steps, abs=1e-3)
    assert found.accepted[0] > 0.5 and 0.5 < found.alpha < 1
    assert found.mbsu < found.mat


def test_runs_count_correct_drafts_after_each_known_token() -> None:
    right = torch.tensor([[1, 1, 0, 1, 1, 1]]).bool()
    assert align._count_runs(right).tolist() == [[1, 0, 3, 2, 1, 0]]


def test_cross_entropy_of_its_own_replies_is_refused(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    with pytest.raises(UsageError, match="would learn its own replies"):
        aligner(tmp_path, pair).align(short_plan("ce", "own"))


def test_a_draft_with_another_vocabulary_is_refused_and_names_methods_that_accept_it(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    foreign = replace(aligner(tmp_path, pair), draft=lambda: resolve("embedded-xv").path)
    with pytest.raises(UsageError, match="no draft model with the vocabulary") as caught:
        foreign.align(short_plan("kl", "target"))
    assert "tli, uag and omnidraft" in (caught.value.hint or "")


def test_a_draft_with_a_cut_vocabulary_is_not_cut_again(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    plan = replace(short_plan("ce", "target"), name="cut")
    first = replace(aligner(tmp_path, pair), vocabulary=50)
    made = first.align(plan)
    again = replace(first, draft=lambda: tmp_path / "cut")
    with pytest.raises(UsageError, match="is reduced already"):
        again._make_initial_model()
    uncut = replace(again, vocabulary=None)
    assert uncut._estimate(uncut._make_initial_model(), 0).mat == made.mat[-1].mat


def test_cross_entropy_skips_tokens_outside_a_cut_vocabulary(
    pair: tuple[Path, Path],
) -> None:
    model, ids = load_model(pair[1], torch.device("cpu")), torch.tensor([[3, 9, 5, 9, 7]])
    restrict_output(model, torch.tensor([9, 5, 3]))
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    loss = text_loss(model)(TrainingBatch(ids[:, :-1], ids[:, 1:], weights))
    rows = model(ids[:, :-1]).logits[0].log_softmax(-1)
    log_probs = [
        rows[at, token] for at, token in enumerate((9, 5, 9))
    ]  # without the last token, 7, which is not in the draft vocabulary
    assert loss.item() == pytest.approx(-torch.stack(log_probs).mean().item(), rel=1e-2)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_an_invalid_draft_record_is_one_error(
    text: str, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "draft")
    (folder / align.RECORD).write_text(text)
    with pytest.raises(UsageError, match="is not a valid record of a draft"):
        aligner(tmp_path, (pair[0], folder))._make_initial_model()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "1", "--draft", "embedded-1m"], "--draft and --layers"),
        (["--layers", "1", "--pretrain", "2"], "--pretrain and --layers"),
        (["--begin", "last"], "--begin needs --layers"),
    ],
)
def test_incompatible_options_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, ["draft", *words, "--out", str(tmp_path)], catch_exceptions=False)


def test_several_losses_make_a_table_from_one_pre_trained_draft(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    target, draft = map(str, pair)
    options = ("--target", target, "--draft", draft, "--smoke", "--pretrain", "2")
    words = ["draft", *options, "--loss", "ce", "--loss", "lk", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    rows = json.loads((tmp_path / "alignment.json").read_text())
    assert [(row["loss"], row["seeds"], row["alpha low"]) for row in rows] == [
        ("ce", 1, None),
        ("lk", 1, None),
    ]
    assert rows[0]["alpha before"] == rows[1]["alpha before"]
    assert 1 <= rows[0]["mat"] <= 6
    assert rows[0]["mat over first"] == 0
    assert (tmp_path / "alignment.svg").stat().st_size > 5_000
    facts = json.loads((tmp_path / "seed-0" / "lk" / "alignment.json").read_text())
    assert facts["start"] == "pre-trained for 2" and facts["loss"] == "lk"


def test_the_table_has_means_over_seeds_with_student_t_intervals() -> None:
    of = {
        loss: [
            (AlignEstimate(0, 1.5, [], 0.4, 1.0), AlignEstimate(9, mat, [], alpha, 1.5))
            for mat, alpha in ends
        ]
        for loss, ends in {"kl": ((2.0, 0.5), (3.0, 0.7)), "tvd": ((2.5, 0.6), (3.6, 0.8))}.items()
    }
    row = make_loss_row("kl", 100, of["kl"], of["kl"])
    assert (row["mat before"], row["mat"], row["alpha"]) == (1.5, 2.5, 0.6)
    half = 12.706 * 0.7071 / math.sqrt(2)  # for two values
    assert row["mat low"] == pytest.approx(2.5 - half, abs=1e-3)
    assert row["mbsu low"] == row["mbsu high"] == 1.5
    other = make_loss_row("tvd", 100, of["tvd"], of["kl"])
    assert other["alpha over first"] == 0.1  # computed per seed, so it is exact
    assert other["alpha over first low"] == other["alpha over first high"] == 0.1
    assert (other["mat over first"], other["mat over first high"]) == (0.55, 1.1853)


# ---- drafts with several exits (sorted) ---------------------------------------------------------


def test_first_layers_share_the_norm_and_output_of_the_whole_model(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    model = aligner(tmp_path, (pair[0], pair[0]))._make_initial_model()
    part, ids = take_first_layers(model, 1), torch.arange(5, 12)[None]
    rows = model(ids, output_hidden_states=True).hidden_states[1]
    assert torch.allclose(part(ids).logits, model.lm_head(model.model.norm(rows)))
    assert len(part.model.layers) == 1 and len(model.model.layers) == 2
    assert {id(each) for each in part.parameters()} < {id(each) for each in model.parameters()}


def test_a_sorted_draft_learns_the_mean_of_the_losses_at_all_its_exits(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    plan = short_plan("kl", "target")
    trained = replace(aligner(tmp_path, (pair[0], pair[0])), exits=(1,))
    result = trained.align(plan)
    batch = Replies(trained._encoder.padding, lambda: trained._training_replies).batch(1, 128)
    first_draft = trained._make_initial_model()
    each = [
        target_loss(part, trained._target_model)
        for part in (take_first_layers(first_draft, 1), first_draft)
    ]
    assert each[1](batch).item() == pytest.approx(
        0, abs=1e-6
    )  # the draft starts as a copy of its target
    mean = sum(loss(batch).item() for loss in each) / 2
    assert average_losses(each)(batch).item() == pytest.approx(mean)
    assert result.curve[0].loss > 0
    facts = json.loads((tmp_path / plan.name / "alignment.json").read_text())
    assert facts["exits"] == "1"


@pytest.mark.parametrize("exits", [(1,), (0,), (3,)])
def test_an_exit_after_the_last_layer_is_refused(
    tmp_path: Path, pair: tuple[Path, Path], exits: tuple[int, ...]
) -> None:
    own = pair if exits == (1,) else (pair[0], pair[0])
    with pytest.raises(UsageError, match=f"cannot exit after layer {exits[0]}"):
        replace(aligner(tmp_path, own), exits=exits).align(short_plan("kl", "target"))

"""Training of a SpecDec++ acceptance head, which predicts whether the target accepts a draft token.

The module makes the labels, trains the head, measures its quality on held-out replies, and writes
its files.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from methods.specdecpp.training import (
    AcceptanceModule,
    LabelledReply,
    Labels,
    collect_rows,
    label,
    weighted_bce,
)
from specbench_cli import files
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.training import loop
from specbench_cli.training.corpus import TemplateEncoder, choose_reply_chats
from specbench_cli.training.heads.build import write_head
from specbench_cli.training.heads.mat import find_answer_start
from specbench_cli.training.heads.trainer import GREEDY_SEED, N_HELD_OUT_PROBLEMS, HeadTrainer
from specbench_cli.training.loop import WORK, Schedule, StagePlan, claim
from specbench_cli.training.losses import load_model
from specbench_cli.training.packing import EncodedChat, TrainingBatch
from specbench_cli.training.replies import make_magpie_prompts, make_prompts

HELD_OUT = 10
"""One reply in `HELD_OUT` is used to measure the head, and not to train it."""
MEASURE_INTERVAL = 200
BINS = 10
"""Number of bins of the calibration."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceRecipe(Schedule):
    """Shape and training schedule of an acceptance head.

    Attributes:
        depth: number of residual blocks.
        tied: whether all blocks share their weights, as in the authors' code.
        mixing: share of positions with the target's token instead of the draft model's token (r in
            the paper).
        rejection_weight: loss weight of a rejection, relative to an acceptance (w_rej).
    """

    depth: int = 3
    tied: bool = False
    mixing: float = 0.15
    rejection_weight: float = 6.0


ACCEPTANCE = AcceptanceRecipe(
    name="embedded-acceptance", stages=(StagePlan(1200, 1, 1024),), peak_lr=2e-3, warmup_steps=36
)


class RowSampler:
    """Endless stream of training examples: hidden states with labels. Each epoch has a new order.

    Args:
        rows: normed hidden states of the draft model, [n, width].
        chances: acceptance probability of the token at each row, [n].
    """

    def __init__(self, rows: Tensor, chances: Tensor, seed: int) -> None:
        self._rows, self._chances, self._seed = rows, chances, seed
        self._drawn = 0
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def batch(self, sequences: int, length: int) -> TrainingBatch:
        """Return the next `sequences` x `length` hidden states.

        The targets are their acceptance probabilities.
        """
        at = [self._next() for _ in range(sequences * length)]
        return TrainingBatch(self._rows[at], self._chances[at], torch.ones(len(at)))

    def state(self) -> dict[str, Any]:
        """Return the position in the stream: the number of hidden states so far."""
        return {"drawn": self._drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a position that an earlier call of `state` returned."""
        self._drawn = state["drawn"]

    def _next(self) -> int:
        epoch, place = divmod(self._drawn, len(self._rows))
        if self._order[0] != epoch:
            rng = torch.Generator().manual_seed((self._seed << 20) + epoch)
            self._order = epoch, torch.randperm(len(self._rows), generator=rng)
        self._drawn += 1
        return int(self._order[1][place])


@dataclass(frozen=True)
class Bin:
    """Bin of a calibration table: tokens with similar predicted acceptance probabilities.

    Attributes:
        tokens: number of tokens in the bin.
        predicted: mean predicted acceptance probability.
        labelled: mean acceptance probability in the labels.
    """

    tokens: int
    predicted: float
    labelled: float


@dataclass(frozen=True)
class AcceptanceResult(loop.TrainingResult):
    """Result of training an acceptance head, with its predictions on held-out replies.

    Attributes:
        divergence: mean of KL(label || prediction), in nats per token. The key is the training
            step.
        divergence_of_mean: the same divergence for a constant prediction: the mean of the labels.
        bins: bins of the calibration table, in ascending order of the prediction.
    """

    divergence: dict[int, float]
    divergence_of_mean: float
    bins: list[Bin]


@dataclass(frozen=True)
class AcceptanceTrainer(HeadTrainer):
    """Trainer of an acceptance head for a target and its draft model.

    Args:
        labels: whether labels are for sampling or for greedy decoding.
        draft_label: name of the draft model in the written files. None means the name of the draft
            model's folder.
    """

    labels: Labels = "sampled"
    draft_label: str | None = None

    def rename_recipe(self, recipe: AcceptanceRecipe) -> AcceptanceRecipe:
        """Return the recipe with a name that begins with the target's name."""
        return replace(recipe, name=f"{self.prefix}-acceptance")

    def fit(self, recipe: AcceptanceRecipe) -> AcceptanceResult:
        """Train one acceptance head, and write its files.

        Raises:
            UsageError: the folder contains training work with another recipe.
        """
        folder, facts = self.out / WORK / recipe.name, self._head_facts(recipe)
        claim(self.out / WORK, {"target_sha256": facts["target_sha256"]})
        claim(folder, facts)
        replies = self._load_labels(folder / "labels.safetensors")
        draft = load_model(self._draft_folder, self.device)
        trained_on = [reply for at, reply in enumerate(replies) if at % HELD_OUT]
        rows, chances = collect_rows(draft, replies[::HELD_OUT], recipe.mixing, self.seed)
        source = RowSampler(
            *collect_rows(draft, trained_on, recipe.mixing, self.seed + 1), self.seed
        )
        torch.manual_seed(self.seed)
        head = AcceptanceModule(draft.config.hidden_size, recipe.depth, tied=recipe.tied).to(
            self.device
        )
        log = folder / "divergence.jsonl"

        def loss(batch: TrainingBatch) -> Tensor:
            logits = head(batch.inputs)
            weights = batch.weights.to(logits.device)
            return weighted_bce(logits, batch.targets, weights, recipe.rejection_weight)

        @torch.no_grad()
        def predict() -> Tensor:
            predicted: Tensor = head(rows).softmax(-1)[:, 1]
            return predicted

        def progress(point: loop.TrainingPoint) -> None:
            if point.step % MEASURE_INTERVAL == 0 or point.step == point.steps:
                row = {"step": point.step, "kl": compute_divergence(predict(), chances)}
                fd = files.open_own(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                with os.fdopen(fd, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            self.report(recipe.name, point)

        result = loop.train(
            head,
            [each.make_stage(loss, source) for each in recipe.stages],
            loop.Optimization(recipe.peak_lr, 0.0, recipe.warmup_steps),
            folder,
            checkpoint_every=MEASURE_INTERVAL,
            progress=progress,
        )
        export(head, self.out / recipe.name, facts)
        lines = log.read_text(encoding="utf-8").splitlines()
        return AcceptanceResult(
            result.curve,
            result.seconds,
            {row["step"]: row["kl"] for row in map(json.loads, lines)},
            compute_divergence(chances.mean().expand_as(chances), chances),
            compute_calibration(predict(), chances),
        )

    @property
    def _draft_folder(self) -> Path:
        assert self.draft is not None
        return self.draft()

    def _head_facts(self, recipe: AcceptanceRecipe) -> dict[str, Any]:
        """Return the entries of config.json that describe how the head was trained."""
        return {
            "kind": "acceptance",
            "target": self.label or self.target.name,
            "target_sha256": self._target_sha256,
            "draft": self.draft_label or self._draft_folder.name,
            "draft_sha256": Weights(self._draft_folder).sha256(),
            "labels": self.labels,
            "mixing": recipe.mixing,
            "rejection_weight": recipe.rejection_weight,
        }

    def _load_labels(self, file: Path) -> list[LabelledReply]:
        """Return the labelled replies.

        The first call computes the labels and stores them in `file`.
        """
        if not file.is_file():
            target, draft = (
                load_model(each, self.device) for each in (self.target, self._draft_folder)
            )
            # Sort replies by length, so that batches need little padding.
            found = sorted(self._load_labelled_replies(), key=lambda reply: len(reply.ids))
            pairs = [
                (each.ids[: find_answer_start(each)], each.ids[find_answer_start(each) :])
                for each in found
            ]
            labelled = []
            for each in label(target, draft, pairs, self.labels, self.seed):
                labelled.append(each)
                self.progress("labels", len(labelled), len(pairs))
            _write(labelled, file)
        return _read(file)

    def _load_labelled_replies(self) -> list[EncodedChat]:
        """Return the replies to label.

        An embedded target is a small model that specbench ships. Its replies are sampled or greedy,
        depending on the labels. Other targets use the training replies of draft heads, which are
        partly sampled and partly greedy.
        """
        encode = self._encoder
        if isinstance(encode, TemplateEncoder):
            asks = make_magpie_prompts(
                encode, self.gsm8k[:-N_HELD_OUT_PROBLEMS], self.seed, self.n_replies
            )
            return self._sample_replies("replies", asks)
        greedy = self.labels == "greedy"
        chats = choose_reply_chats(
            self.gsm8k, self.seed + (GREEDY_SEED if greedy else 1), self.n_replies
        )
        name = "replies-greedy" if greedy else "replies"
        return self._sample_replies(name, make_prompts(encode, chats, greedy))


def compute_divergence(predicted: Tensor, labelled: Tensor) -> float:
    """Return the mean KL(label || prediction) of probabilities [n], in nats, as in the paper."""
    p, q = (torch.stack((1 - part, part), -1).double() for part in (labelled, predicted))
    return float((torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1).mean())


def compute_calibration(predicted: Tensor, labelled: Tensor) -> list[Bin]:
    """Return the calibration table of predictions and labels [n]: `BINS` bins with equally many
    tokens.
    """
    order = predicted.argsort()
    parts = [part for part in order.tensor_split(BINS) if len(part)]
    return [
        Bin(len(part), float(predicted[part].mean()), float(labelled[part].mean()))
        for part in parts
    ]


def export(head: AcceptanceModule, folder: Path, facts: dict[str, Any]) -> None:
    """Write model.safetensors (in fp16) and config.json in the authors' format.

    Args:
        facts: entries that are stored under the key "specbench" of config.json.
    """
    named = {name: p.detach().half().cpu().contiguous() for name, p in head.named_parameters()}
    config = {"hidden_size": head.hidden, "num_layers": head.depth, "specbench": facts}
    write_head(folder, named, config)


def _write(replies: Sequence[LabelledReply], file: Path) -> None:
    lengths = torch.tensor([0, *(len(reply.ids) for reply in replies)])
    content = {
        "ids": torch.cat([reply.ids for reply in replies]),
        "drafted": torch.cat([reply.drafted for reply in replies]),
        "chances": torch.cat([reply.chances for reply in replies]),
        "starts": torch.tensor([reply.start for reply in replies]),
        "ends": lengths.cumsum(0),
    }
    files.replace(file, serialize(content))


def _read(file: Path) -> list[LabelledReply]:
    stored = load_file(file)
    ids, drafted, chances = (stored[name] for name in ("ids", "drafted", "chances"))
    return [
        LabelledReply(ids[first:end], drafted[first:end], chances[first:end], start)
        for (first, end), start in zip(
            pairwise(stored["ends"].tolist()), stored["starts"].tolist(), strict=True
        )
    ]

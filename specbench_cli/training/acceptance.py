"""Training an acceptance head: labels, schedule, what it is worth on held-out replies, export."""

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
"""One reply in so many measures, and is not trained on."""
MEASURE_INTERVAL = 200
BINS = 10


@dataclass(frozen=True, kw_only=True)
class AcceptanceRecipe(Schedule):
    """Shape and schedule of a head.

    depth: residual blocks. tied: whether all are one, as in the authors' code.
    mixing: share of positions that hold the target's token (r).
    rejection_weight: how much a rejection counts in the loss beside an acceptance (w_rej).
    """

    depth: int = 3
    tied: bool = False
    mixing: float = 0.15
    rejection_weight: float = 6.0


ACCEPTANCE = AcceptanceRecipe(
    name="embedded-acceptance", stages=(StagePlan(1200, 1, 1024),), peak_lr=2e-3, warmup_steps=36
)


class RowSampler:
    """Rows over and over, in a new order each time.

    Args:
        rows: [n, hidden], normed rows of the draft.
        chances: [n], the chance of each row's token.
    """

    def __init__(self, rows: Tensor, chances: Tensor, seed: int) -> None:
        self._rows, self._chances, self._seed = rows, chances, seed
        self._drawn = 0
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def batch(self, sequences: int, length: int) -> TrainingBatch:
        """The next sequences x length rows, their chances, and that all count."""
        at = [self._next() for _ in range(sequences * length)]
        return TrainingBatch(self._rows[at], self._chances[at], torch.ones(len(at)))

    def state(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"drawn": self._drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after as many."""
        self._drawn = state["drawn"]

    def _next(self) -> int:
        round_, place = divmod(self._drawn, len(self._rows))
        if self._order[0] != round_:
            random = torch.Generator().manual_seed((self._seed << 20) + round_)
            self._order = round_, torch.randperm(len(self._rows), generator=random)
        self._drawn += 1
        return int(self._order[1][place])


@dataclass(frozen=True)
class Bin:
    """Tokens whose predicted chances lie close together: how many, and both means."""

    tokens: int
    predicted: float
    labelled: float


@dataclass(frozen=True)
class AcceptanceResult(loop.TrainingResult):
    """A run so far, and what the head says of held-out replies.

    divergence: by step, the mean of KL(label || prediction), in nats a token.
    divergence_of_mean: the same of a prediction that is the labels' mean for all tokens.
    bins: tenths of the tokens, by rising prediction.
    """

    divergence: dict[int, float]
    divergence_of_mean: float
    bins: list[Bin]


@dataclass(frozen=True)
class AcceptanceTrainer(HeadTrainer):
    """Trains a head for a target and its draft model, `draft`; else as heads are trained.

    Args:
        labels: for sampling or for greedy decoding.
        drafts: the draft's name in what is written; else its folder's.
    """

    labels: Labels = "sampled"
    draft_label: str | None = None

    def rename_recipe(self, recipe: AcceptanceRecipe) -> AcceptanceRecipe:
        """The same, under this target's name."""
        return replace(recipe, name=f"{self.prefix}-acceptance")

    def fit(self, recipe: AcceptanceRecipe) -> AcceptanceResult:
        """Train and export one head.

        Raises:
            UsageError: the folder holds the work of another recipe.
        """
        folder, facts = self.out / WORK / recipe.name, self._head_facts(recipe)
        claim(self.out / WORK, {"target_sha256": facts["target_sha256"]})
        claim(folder, facts)
        replies = self._load_labels(folder / "labels.safetensors")
        draft = load_model(self._draft_folder, self.device)
        trained_on = [reply for at, reply in enumerate(replies) if at % HELD_OUT]
        rows, told = collect_rows(draft, replies[::HELD_OUT], recipe.mixing, self.seed)
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
            counts = batch.weights.to(logits.device)
            return weighted_bce(logits, batch.targets, counts, recipe.rejection_weight)

        @torch.no_grad()
        def predicted() -> Tensor:
            chances: Tensor = head(rows).softmax(-1)[:, 1]
            return chances

        def progress(point: loop.TrainingPoint) -> None:
            if point.step % MEASURE_INTERVAL == 0 or point.step == point.steps:
                row = {"step": point.step, "kl": compute_divergence(predicted(), told)}
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
            compute_divergence(told.mean().expand_as(told), told),
            compute_calibration(predicted(), told),
        )

    @property
    def _draft_folder(self) -> Path:
        assert self.draft is not None
        return self.draft()

    def _head_facts(self, recipe: AcceptanceRecipe) -> dict[str, Any]:
        """What `config.json` says of where the head comes from."""
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
        """The replies with their labels, made once and kept."""
        if not file.is_file():
            target, draft = (
                load_model(each, self.device) for each in (self.target, self._draft_folder)
            )
            # Neighbours of one length need little padding.
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
        """The replies that are labelled: all drawn or all greedy, as labels are. Of targets of
        other families those that heads are trained on, some of each."""
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
    """Mean KL(label || prediction) of chances [n], in nats: what the authors monitor."""
    p, q = (torch.stack((1 - part, part), -1).double() for part in (labelled, predicted))
    return float((torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1).mean())


def compute_calibration(predicted: Tensor, labelled: Tensor) -> list[Bin]:
    """Predictions against labels, [n] each, in `BINS` bins of equally many tokens."""
    order = predicted.argsort()
    parts = [part for part in order.tensor_split(BINS) if len(part)]
    return [
        Bin(len(part), float(predicted[part].mean()), float(labelled[part].mean()))
        for part in parts
    ]


def export(head: AcceptanceModule, folder: Path, facts: dict[str, Any]) -> None:
    """Write model.safetensors (fp16, a repeated block once) and config.json, as the authors do;
    `facts` go under "specbench"."""
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
    held = load_file(file)
    ids, drafted, chances = (held[name] for name in ("ids", "drafted", "chances"))
    return [
        LabelledReply(ids[first:end], drafted[first:end], chances[first:end], start)
        for (first, end), start in zip(
            pairwise(held["ends"].tolist()), held["starts"].tolist(), strict=True
        )
    ]

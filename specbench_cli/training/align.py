"""Alignment of a draft model with its target by distillation.

The draft model learns the target's distributions on replies to training questions. The target
writes the replies (FastDraft, Zafrir et al., Findings of ACL 2025, arXiv:2411.11055), or the draft
model writes them during training (on-policy distillation as in DistillSpec, Zhou et al., ICLR 2024,
arXiv:2310.08461), or both do. The loss is a distance from `losses.DISTANCES`, or cross-entropy.

For a target without a draft model, a draft model is made from some of the target's layers, with the
target's embeddings and output matrix. The output vocabulary can be reduced to the most frequent
tokens of the target's answers (FR-Spec, Zhao et al., arXiv:2502.14856), because the output matrix
of a large vocabulary costs more than the layers.
"""

import json
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_cli import files
from specbench_cli.config.train import Begin, Samples
from specbench_cli.engine.models.checkpoint import disable_progress_bars, read_tokenizer
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.head import NORMED
from specbench_cli.engine.models.load import load_decoder, restrict_output
from specbench_cli.errors import UsageError
from specbench_cli.training import loop
from specbench_cli.training.corpus import Corpus, Encoder
from specbench_cli.training.heads.build import find_most_frequent, round_to_fp16
from specbench_cli.training.heads.mat import (
    BATCH_SIZE,
    CHAIN_LENGTH,
    EstimateLog,
    MatEstimate,
    compute_mat,
    find_answer_start,
)
from specbench_cli.training.heads.trainer import HeadTrainer
from specbench_cli.training.loop import WORK, Schedule, StagePlan, claim
from specbench_cli.training.losses import (
    DISTANCES,
    average_losses,
    compile_loss,
    get_output_ids,
    load_model,
    predict_acceptance,
    take_first_layers,
    target_loss,
    text_loss,
)
from specbench_cli.training.packing import EncodedChat, TrainingBatch
from specbench_cli.training.replies import MAX_LENGTH, Replies, ReplyPrompt, sample_replies

RECORD = "alignment.json"
"""File in a draft's folder with its training settings and its quality."""
FROZEN = ["embeddings", "output"]
"""Frozen parts of a draft made from its target, as listed in its record.

They stay frozen if the draft is trained further.
"""
ROUND_STEPS = 100
"""Number of updates after which the draft's own replies are sampled again.

Checkpoints have the same interval, so an interrupted round resumes from its first weights.
"""
ROUND_QUESTIONS = 192
"""Number of questions that the draft answers in each round."""
SEQUENCES, LENGTH = 8, 256
"""Number of sequences per update, and their length in tokens."""
OWN_SEED = 6000
"""Offset of the seed for sampling the draft's replies. The number of the round is added to it."""


@dataclass(frozen=True, kw_only=True)
class Alignment(Schedule):
    """Training schedule and loss of an alignment.

    Attributes:
        loss: a name in `losses.DISTANCES`, or "ce" for cross-entropy.
        samples: model that writes the replies: "target", "own" (the draft model) or "mixed" (both).
        temperature: temperature of the distributions of both models in the loss.
    """

    loss: str
    samples: Samples = "target"
    temperature: float = 1.0


def make_alignment(
    name: str, loss: str, samples: Samples, temperature: float, steps: int, length: int = LENGTH
) -> Alignment:
    """Return the training schedule of the draft model `name`, with `steps` updates.

    Args:
        length: length of a sequence in tokens.
    """
    return Alignment(
        name=name,
        stages=(StagePlan(steps, SEQUENCES * LENGTH // length, length, "target", "replies"),),
        peak_lr=1e-3,
        warmup_steps=max(1, steps // 20),
        loss=loss,
        samples=samples,
        temperature=temperature,
    )


@dataclass(frozen=True)
class AlignEstimate(MatEstimate):
    """Quality of a draft model after some updates, on the target's greedy held-out replies.

    Attributes:
        alpha: mean acceptance rate of a draft token at temperature 1, which is 1 - TVD.
        mbsu: memory-bound speedup (Goel et al., arXiv:2403.00858), MAT / (c * chain + 1). c is the
            parameter count of the draft model, divided by the target's. `chain` is the draft
            length.
    """

    alpha: float
    mbsu: float


EstimatePairs = Sequence[tuple[AlignEstimate, AlignEstimate]]
"""Quality before and after training with a loss, for each seed."""
FIGURES = ("alpha", "mat", "mbsu")
"""Fields of `AlignEstimate` in the table of losses."""


@dataclass(frozen=True)
class AlignResult(loop.TrainingResult):
    """Result of an alignment, with the quality of the draft model before and after training."""

    mat: list[AlignEstimate]


@dataclass(frozen=True)
class Aligner(HeadTrainer):
    """Trainer that aligns a draft model with its target.

    Args:
        pretrain: number of updates on the corpus before the alignment, from random weights. 0 means
            that the draft model starts with its current weights.
        exits: numbers of layers after which the draft model also learns to predict, for the method
            `s2d`.
        layers: number of layers of a draft model that is made from the target. Its embeddings and
            output matrix stay frozen. 0 means that the draft model is an existing model.
        begin: layers of the target to copy: the first ones, the last ones, or half of each.
        vocabulary: size of the reduced output vocabulary. None means that the vocabulary is not
            reduced.
    """

    pretrain: int = 0
    exits: tuple[int, ...] = ()
    layers: int = 0
    begin: Begin = "first"
    vocabulary: int | None = None

    @property
    def length(self) -> int:
        """Length of a training sequence in tokens. Almost all replies fit in it."""
        return LENGTH if self.is_embedded else MAX_LENGTH

    def align(self, plan: Alignment) -> AlignResult:
        """Train a draft model, and write its files.

        Raises:
            UsageError: the draft model has another vocabulary, an already reduced vocabulary, or
                too few layers; the loss cannot be used with these replies; or the folder contains
                other training work.
        """
        if plan.loss == "ce" and plan.samples != "target":
            raise UsageError(
                "with cross-entropy a draft would learn its own replies instead of the target's"
                " distributions",
                "--teacher-samples target, or another --loss: " + ", ".join(DISTANCES),
            )
        folder, model = self.out / WORK / plan.name, self._make_initial_model()
        facts = {
            "loss": plan.loss,
            "samples": plan.samples,
            "temperature": str(plan.temperature),
            "replies": str(self.n_replies),
            "start": self._start_name,
            "seed": str(self.seed),
        }
        if self.exits:
            facts["exits"] = ", ".join(map(str, self.exits))
        if self.vocabulary:
            facts["vocabulary"] = str(self.vocabulary)
        claim(self.out / WORK, {"target_sha256": self._target_sha256})
        claim(folder, facts)
        nested = (*(take_first_layers(model, n) for n in self._check_exits(model)), model)
        if plan.loss == "ce":
            loss = average_losses([text_loss(each) for each in nested])
        else:
            kept = self._cache_target((NORMED,)) if plan.samples == "target" else None
            make_loss = partial(
                target_loss,
                target=self._target_model,
                distance=DISTANCES[plan.loss],
                temperature=plan.temperature,
                rows=None if kept is None else lambda batch: kept.get_output(batch).normed,
            )
            loss = average_losses([make_loss(each) for each in nested])
        fast = self.fast and self.is_embedded
        log = EstimateLog(folder, AlignEstimate)
        if loop.latest_checkpoint(folder) is None:
            log.add(self._estimate(model, 0))
        result = loop.train(
            model,
            self._stages(plan, model, compile_loss(loss) if fast else loss, folder),
            plan.optimization,
            folder,
            checkpoint_every=ROUND_STEPS,
            progress=partial(self.report, plan.name),
        )
        tokens = self.pretrain * SEQUENCES * LENGTH + result.curve[-1].tokens
        self._export(model, plan.name, facts, log, result.curve[-1].step, tokens)
        return AlignResult(result.curve, result.seconds, log.read())

    def _export(
        self,
        model: LlamaForCausalLM,
        name: str,
        facts: dict[str, str],
        log: EstimateLog[AlignEstimate],
        step: int,
        tokens: int,
    ) -> None:
        """Round a draft model to fp16, measure its quality, and write it with a record of its
        training.

        Args:
            facts: settings of the training, for the record.
            step: number of updates.
            tokens: number of training tokens.
        """
        round_to_fp16(model)
        quality = self._estimate(model, step)
        log.add(quality)
        size = {"layers": model.config.num_hidden_layers, "parameters": _count_parameters(model)}
        disable_progress_bars()
        figures = {key: getattr(quality, key) for key in FIGURES}
        record = {**self._target_facts, **facts, "steps": step, "tokens": tokens, **size, **figures}
        if not model.model.embed_tokens.weight.requires_grad:
            record["frozen"] = FROZEN
        with files.staging_folder(self.out / name, overwrite=None) as staging:
            nn.Module.half(model).save_pretrained(staging)
            self._tokenizer.save_pretrained(staging, save_jinja_files=False)
            text = json.dumps(record, indent=1) + "\n"
            (staging / RECORD).write_text(text, encoding="utf-8")

    def _check_exits(self, model: LlamaForCausalLM) -> tuple[int, ...]:
        """Return the exit layers in ascending order.

        Raises:
            UsageError: the draft model has too few layers.
        """
        n_layers = model.config.num_hidden_layers
        for n in self.exits:
            if not 1 <= n < n_layers:
                raise UsageError(
                    f"the draft has {n_layers} layers and cannot exit after layer {n}",
                    f"--sorted {n_layers // 2}" if n_layers > 1 else "a deeper --draft",
                )
        return tuple(sorted(set(self.exits)))

    def _make_initial_model(self) -> LlamaForCausalLM:
        """Return the draft model with its initial weights, ready for training."""
        model = self._build_from_target() if self.layers else self._load_draft()
        if self.vocabulary is not None and self.vocabulary < model.config.vocab_size:
            if get_output_ids(model) is not None:
                raise UsageError(
                    f"the output vocabulary of {self._draft_folder} is reduced already",
                    "omit --vocabulary",
                )
            answers = chain.from_iterable(
                chat.ids[find_answer_start(chat) :] for chat in self._training_replies
            )
            restrict_output(
                model, find_most_frequent(answers, self.vocabulary, model.config.vocab_size)
            )
        if self.layers or self._freezes_embeddings:
            model.model.embed_tokens.requires_grad_(False)
            model.lm_head.requires_grad_(False)
        model.train()
        return model

    @property
    def _freezes_embeddings(self) -> bool:
        """True if the draft model was made from the target's layers.

        Then its embeddings stay frozen.
        """
        file = self._draft_folder / RECORD
        if self.pretrain or not file.is_file():
            return False
        try:
            return bool(json.loads(file.read_text(encoding="utf-8")).get("frozen"))
        except (ValueError, AttributeError) as fault:
            raise UsageError(
                f"{file} is not a valid record of a draft's training",
                f"remove it (rm {file}) to train all weights of the draft",
            ) from fault

    def _build_from_target(self) -> LlamaForCausalLM:
        """Return a draft model with copies of the target's layers, embeddings and output matrix."""
        target, layers = self._target_model, self._copied_layers
        config = deepcopy(target.config)
        config.num_hidden_layers = len(layers)
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [kinds[layer] for layer in layers]
        with torch.device("meta"):
            draft = type(target)(config)
        originals = target.state_dict()
        tensors = {
            name: originals[
                re.sub(r"(?<=layers\.)\d+", lambda found: str(layers[int(found[0])]), name)
            ].clone()
            for name in draft.state_dict()
        }
        draft.load_state_dict(tensors, assign=True)
        draft.tie_weights()
        draft.model.rotary_emb = deepcopy(target.model.rotary_emb)
        draft.requires_grad_(True)
        return draft

    @property
    def _copied_layers(self) -> list[int]:
        """Numbers of the target's layers that are copied into the draft model."""
        n, n_target = self.layers, self._target_model.config.num_hidden_layers
        if n > n_target:
            raise UsageError(
                f"a draft with {n} layers cannot be made from {self.label or self.target.name},"
                f" which has {n_target} layers",
                f"--layers 1 to {n_target}",
            )
        n_first = {"first": n, "last": 0, "ends": (n + 1) // 2}[self.begin]
        return [*range(n_first), *range(n_target - n + n_first, n_target)]

    @property
    def _start_name(self) -> str:
        """Description of the draft model's initial weights, for the record of its training."""
        if self.layers:
            return f"layers {', '.join(map(str, self._copied_layers))} of the target"
        return f"pre-trained for {self.pretrain}" if self.pretrain else self._draft_folder.name

    def _load_draft(self) -> LlamaForCausalLM:
        """Return the target's draft model, or a model of the same shape that was trained on the
        corpus.
        """
        if self._draft_folder.joinpath("config.json").is_file():
            tokenizer = read_tokenizer(self._draft_folder)
            if tokenizer.get_vocab() == self._tokenizer.get_vocab():
                model = load_model(self._draft_folder, self.device)
                model.requires_grad_(True)
                return self._pretrain(model) if self.pretrain else model
        raise UsageError(
            f"{self._draft_folder} is no draft model with the vocabulary of"
            f" {self.label or self.target.name}",
            "choose another --draft; the methods tli, uag and omnidraft accept any vocabulary",
        )

    def _pretrain(self, model: LlamaForCausalLM) -> LlamaForCausalLM:
        """Return a model of the same shape, trained only on the corpus.

        Alignments with different losses start from this model, so it is trained only once.
        """
        folder = self.out / WORK / "pretrained"
        claim(folder, {"shape of": self._draft_folder.name, "updates": str(self.pretrain)})
        return self._train_on_corpus(
            model.config, self.pretrain, self.seed, folder, get_output_ids(model)
        )[0]

    def _train_on_corpus(
        self,
        config: LlamaConfig,
        updates: int,
        seed: int,
        folder: Path,
        output_ids: Tensor | None = None,
    ) -> tuple[LlamaForCausalLM, loop.TrainingResult]:
        """Train a model on the corpus, from random weights.

        Args:
            updates: number of updates.
            output_ids: ids of a reduced output vocabulary. None means the whole vocabulary.

        Raises:
            UsageError: the target is not a model that specbench ships, so there is no corpus for
                it.
        """
        if not isinstance(self._encoder, Encoder):
            raise UsageError(
                f"only drafts of embedded targets can be trained from random weights, and"
                f" {self.label or self.target.name} is not an embedded model",
                "use an embedded --target, or `specbench train draft` without --pretrain",
            )
        torch.manual_seed(seed)
        fresh = LlamaForCausalLM(config)
        if output_ids is not None:
            restrict_output(fresh, output_ids.cpu())
        nn.Module.to(fresh, self.device)
        loss, corpus = text_loss(fresh), Corpus(self._encoder, self.gsm8k, seed)
        loss = compile_loss(loss) if self.fast else loss
        result = loop.train(
            fresh,
            [loop.TrainingStage(updates, SEQUENCES, LENGTH, loss, corpus)],
            loop.Optimization(5e-3, end_lr=5e-4, warmup_steps=max(1, updates // 10)),
            folder,
            progress=partial(self.report, folder.name),
        )
        fresh.train()
        return fresh, result

    @cached_property
    def _draft_folder(self) -> Path:
        if self.draft is None:
            raise UsageError(
                f"{self.label or self.target.name} has no default draft model",
                "--draft MODEL, or --layers 2 to make one from the target",
            )
        return self.draft()

    def _stages(
        self,
        plan: Alignment,
        model: LlamaForCausalLM,
        loss: Callable[[TrainingBatch], Tensor],
        folder: Path,
    ) -> list[loop.TrainingStage]:
        """Return the training stages.

        There is one stage. If the draft model writes the replies, there is one stage per round of
        replies.
        """
        padding = self._encoder.padding
        if plan.samples == "target":
            source = Replies(padding, lambda: self._training_replies)
            return [each.make_stage(loss, source) for each in plan.stages]
        rounds = [
            (stage, min(ROUND_STEPS, stage.steps - first))
            for stage in plan.stages
            for first in range(0, stage.steps, ROUND_STEPS)
        ]
        return [
            loop.TrainingStage(
                steps,
                stage.sequences,
                stage.length,
                loss,
                Replies(
                    padding, partial(self._sample_own_replies, model, folder, number, plan.samples)
                ),
            )
            for number, (stage, steps) in enumerate(rounds)
        ]

    def _sample_own_replies(
        self, model: LlamaForCausalLM, folder: Path, number: int, samples: Samples
    ) -> Sequence[EncodedChat]:
        """Return the replies of a round, sampled from the current draft model.

        If `samples` is "mixed", the target's replies to the same questions are added.

        Args:
            number: number of the round, from 0.
        """
        replies = self._training_replies
        first = number * ROUND_QUESTIONS
        theirs = [replies[at % len(replies)] for at in range(first, first + ROUND_QUESTIONS)]
        asks = [ReplyPrompt(chat.ids[: find_answer_start(chat)]) for chat in theirs]

        def decoder() -> Decoder:
            with TemporaryDirectory(dir=folder) as stored:
                disable_progress_bars()
                model.save_pretrained(stored)
                return load_decoder(Path(stored), name="draft", device=self.device)

        file = folder / f"own-{number:03d}.jsonl"
        found = sample_replies(
            decoder, asks, self._encoder.ends, file, self.seed + OWN_SEED + number
        )
        own = {at: reply.encode() for at, reply in found.items()}
        if samples == "own":
            return list(own.values())
        return list(chain.from_iterable((theirs[at], each) for at, each in own.items()))

    def _estimate(self, model: LlamaForCausalLM, step: int) -> AlignEstimate:
        """Return the current quality of the draft model."""
        model.eval()
        accepted = list[Tensor]()
        n_correct = list[tuple[EncodedChat, list[int]]]()
        for first in range(0, len(self.held_out), BATCH_SIZE):
            group = self.held_out[first : first + BATCH_SIZE]
            batch = _pad(group).to_device(self.device)
            chance, best = predict_acceptance(model, self._target_model, batch)
            accepted.append(chance[batch.weights == 1.0])
            right = (best == batch.targets) & (batch.weights > 0)
            n_correct += zip(group, _count_runs(right).tolist(), strict=True)
        model.train()
        mat, rates = compute_mat(n_correct, CHAIN_LENGTH)
        share = _count_parameters(model) / _count_parameters(self._target_model)
        alpha = torch.cat(accepted).mean().item()
        return AlignEstimate(
            step, mat, rates, round(alpha, 4), round(mat / (share * CHAIN_LENGTH + 1), 4)
        )


def _pad(chats: Sequence[EncodedChat]) -> TrainingBatch:
    """Return chats as a batch. Padding tokens have loss weight 0."""
    ids, weights = (
        pad_sequence([torch.tensor(part) for part in parts], batch_first=True)
        for parts in ([chat.ids for chat in chats], [chat.weights for chat in chats])
    )
    return TrainingBatch(ids[:, :-1], ids[:, 1:], weights[:, 1:])


def _count_runs(right: Tensor) -> Tensor:
    """Return for each slot the number of consecutive correct draft tokens after the next slot.

    Args:
        right: whether the draft token at each slot is correct, [chats, slots].
    """
    runs = torch.zeros_like(right, dtype=torch.int64)
    following = torch.zeros_like(runs[:, 0])
    for slot in range(right.shape[1] - 1, 0, -1):
        following = (following + 1) * right[:, slot]
        runs[:, slot - 1] = following
    return runs


def _count_parameters(model: LlamaForCausalLM) -> int:
    """Return the number of parameters that a forward reads.

    An embedding that is not tied to the output matrix does not count, because a forward reads only
    a few of its rows.
    """
    embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
    return sum(
        each.numel() for each in model.parameters() if each is output or each is not embedding
    )


def make_loss_row(
    name: str, tokens: int, estimates: EstimatePairs, first: EstimatePairs
) -> dict[str, object]:
    """Return the table row of a training loss: means over seeds, and differences from the first
    loss.

    Differences are paired by seed. Each mean has a 95% interval.
    """
    row: dict[str, object] = {"loss": name, "tokens": tokens, "seeds": len(estimates)}
    for figure in FIGURES:
        before, after, of_first = (
            [getattr(each, figure) for each in ends]
            for ends in (*zip(*estimates, strict=True), [ends[1] for ends in first])
        )
        row[f"{figure} before"] = round(mean(before), 4)
        over = [ours - theirs for ours, theirs in zip(after, of_first, strict=True)]
        for what, values in ((figure, after), (f"{figure} over first", over)):
            row[what] = round(mean(values), 4)
            half = compute_half_width(values)
            row[f"{what} low"] = None if half is None else round(mean(values) - half, 4)
            row[f"{what} high"] = None if half is None else round(mean(values) + half, 4)
    return row


def compute_half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the confidence interval of a mean (Student's t), or None for one
    value.
    """
    from scipy.stats import t

    from specbench_cli.stats.bootstrap import LEVEL

    n = len(values)
    return float(t.ppf((1 + LEVEL) / 2, n - 1)) * stdev(values) / n**0.5 if n > 1 else None

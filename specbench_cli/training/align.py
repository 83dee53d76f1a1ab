"""Aligning a draft model with its target: by which distance, and on whose text.

It is pre-trained on text first, or begins as it is given. Then it learns the target's distributions
on replies to questions like those of training. Whose replies: the target's (FastDraft, Zafrir et
al., Findings of ACL 2025, arXiv:2411.11055), the draft's own, drawn anew as it learns (on-policy:
DistillSpec, Zhou et al., ICLR 2024, arXiv:2310.08461), or of both. By which distance:
`losses.DISTANCES`, or the text's cross-entropy.

A target that has no draft is given one: some of its own layers between its embeddings and its
output. That may be cut to the tokens that the target answers with most (FR-Spec, Zhao et al.,
arXiv:2502.14856), for the output matrix of a large vocabulary costs more than the layers.
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
"""What a draft's folder says of how it was trained, and of what it is worth."""
FROZEN = ["embeddings", "output"]
"""What a draft that is made of its target keeps of it, trained further too: its record says so."""
ROUND_STEPS = 100
"""Updates between two times that the draft answers anew; checkpoints come as often, so that an
interrupted round begins from the weights that it had."""
ROUND_QUESTIONS = 192
"""Questions that it answers then."""
SEQUENCES, LENGTH = 8, 256
"""Of an update: sequences, and tokens of each."""
OWN_SEED = 6000
"""Added to the seed for the draft's draws, and a round's number."""


@dataclass(frozen=True, kw_only=True)
class Alignment(Schedule):
    """How a draft is aligned.

    loss: a name of `losses.DISTANCES`, or "ce". samples: whose replies it reads. temperature: at
    which both distributions are taken.
    """

    loss: str
    samples: Samples = "target"
    temperature: float = 1.0


def make_alignment(
    name: str, loss: str, samples: Samples, temperature: float, steps: int, length: int = LENGTH
) -> Alignment:
    """The alignment of a draft called so, by as many updates, on sequences of `length` tokens."""
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
    """What a draft is worth after some updates, on the target's greedy replies to held-out
    questions.

    alpha: mean chance that a token drafted there at temperature 1 is accepted, 1 - TVD. mbsu:
    speedup if a model's time went by its parameters alone, MAT / (c * chain + 1), c those of the
    draft over the target's (Goel et al., arXiv:2403.00858).
    """

    alpha: float
    mbsu: float


EstimatePairs = Sequence[tuple[AlignEstimate, AlignEstimate]]
"""What the drafts of a loss are worth before and after, by seed."""
FIGURES = ("alpha", "mat", "mbsu")
"""Figures of `Aligned` in the table of losses."""


@dataclass(frozen=True)
class AlignResult(loop.TrainingResult):
    """A run so far, and what the draft was worth before and after."""

    mat: list[AlignEstimate]


@dataclass(frozen=True)
class Aligner(HeadTrainer):
    """Aligns a target's draft model, `draft`, or one that it makes; else as heads are trained.

    Args:
        pretrain: updates on text before it is aligned, from random weights; 0: it begins as it is.
        exits: numbers of its first layers that learn to draft by themselves too, for `s2d`.
        layers: how many the draft that is made has. It keeps the target's embeddings and rows of
            its output matrix as they are, and learns its layers and the final norm. 0: none is
            made.
        begin: as which of the target's layers those begin: the first ones, the last ones, or half
            of each.
        vocabulary: to how many tokens the output is cut, those that the target's answers to the
            training questions have most; None: it stays as it is.
    """

    pretrain: int = 0
    exits: tuple[int, ...] = ()
    layers: int = 0
    begin: Begin = "first"
    vocabulary: int | None = None

    @property
    def length(self) -> int:
        """Tokens of a sequence in training: nearly all replies fit."""
        return LENGTH if self.is_embedded else MAX_LENGTH

    def align(self, plan: Alignment) -> AlignResult:
        """Train and export a draft.

        Raises:
            UsageError: the draft has another vocabulary, is cut already or cannot be made so, or
                has no layers behind an exit; there is no such loss; or the folder holds other work.
        """
        if plan.loss == "ce" and plan.samples != "target":
            raise UsageError(
                "by cross-entropy a draft would learn its own replies, not what the target says of"
                " them",
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
            away = partial(
                target_loss,
                target=self._target_model,
                distance=DISTANCES[plan.loss],
                temperature=plan.temperature,
                rows=None if kept is None else lambda batch: kept.get_output(batch).normed,
            )
            loss = average_losses([away(each) for each in nested])
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
        """Measure a draft as it is stored, and write it, with what it read and is worth."""
        round_to_fp16(model)
        worth = self._estimate(model, step)
        log.add(worth)
        size = {"layers": model.config.num_hidden_layers, "parameters": _count_parameters(model)}
        disable_progress_bars()
        told = {key: getattr(worth, key) for key in ("alpha", "mat", "mbsu")}
        record = {**self._target_facts, **facts, "steps": step, "tokens": tokens, **size, **told}
        if not model.model.embed_tokens.weight.requires_grad:
            record["frozen"] = FROZEN
        with files.staging_folder(self.out / name, overwrite=None) as staging:
            nn.Module.half(model).save_pretrained(staging)
            self._tokenizer.save_pretrained(staging, save_jinja_files=False)
            text = json.dumps(record, indent=1) + "\n"
            (staging / RECORD).write_text(text, encoding="utf-8")

    def _check_exits(self, model: LlamaForCausalLM) -> tuple[int, ...]:
        """Those of `exits`, in order. Raises UsageError where layers are missing."""
        of = model.config.num_hidden_layers
        for n in self.exits:
            if not 1 <= n < of:
                raise UsageError(
                    f"the draft has {of} layers, and none of its own behind the first {n}",
                    f"--sorted {of // 2}" if of > 1 else "a deeper --draft",
                )
        return tuple(sorted(set(self.exits)))

    def _make_initial_model(self) -> LlamaForCausalLM:
        """The draft as it begins, to be trained."""
        begun = self._build_from_target() if self.layers else self._load_draft()
        if self.vocabulary is not None and self.vocabulary < begun.config.vocab_size:
            if get_output_ids(begun) is not None:
                raise UsageError(
                    f"the output of {self._draft_folder} is cut already", "leave --vocabulary out"
                )
            answers = chain.from_iterable(
                chat.ids[find_answer_start(chat) :] for chat in self._training_replies
            )
            restrict_output(
                begun, find_most_frequent(answers, self.vocabulary, begun.config.vocab_size)
            )
        if self.layers or self._freezes_embeddings:
            begun.model.embed_tokens.requires_grad_(False)
            begun.lm_head.requires_grad_(False)
        begun.train()
        return begun

    @property
    def _freezes_embeddings(self) -> bool:
        """Whether the given draft was made with embeddings and output that are not trained."""
        file = self._draft_folder / RECORD
        if self.pretrain or not file.is_file():
            return False
        try:
            return bool(json.loads(file.read_text(encoding="utf-8")).get("frozen"))
        except (ValueError, AttributeError) as fault:
            raise UsageError(
                f"{file} is no record of a draft's training",
                f"rm {file}, and all of the draft is trained",
            ) from fault

    def _build_from_target(self) -> LlamaForCausalLM:
        """Layers of the target between its embeddings and its output."""
        target, at = self._target_model, self._copied_layers
        config = deepcopy(target.config)
        config.num_hidden_layers = len(at)
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [kinds[layer] for layer in at]
        with torch.device("meta"):
            made = type(target)(config)
        held = target.state_dict()
        tensors = {
            name: held[
                re.sub(r"(?<=layers\.)\d+", lambda found: str(at[int(found[0])]), name)
            ].clone()
            for name in made.state_dict()
        }
        made.load_state_dict(tensors, assign=True)
        made.tie_weights()
        made.model.rotary_emb = deepcopy(target.model.rotary_emb)
        made.requires_grad_(True)
        return made

    @property
    def _copied_layers(self) -> list[int]:
        """The target's layers that those of a made draft begin as."""
        n, of = self.layers, self._target_model.config.num_hidden_layers
        if n > of:
            raise UsageError(
                f"a draft of {n} layers cannot be made of {self.label or self.target.name}, which"
                f" has {of}",
                f"--layers 1 to {of}",
            )
        low = {"first": n, "last": 0, "ends": (n + 1) // 2}[self.begin]
        return [*range(low), *range(of - n + low, of)]

    @property
    def _start_name(self) -> str:
        """What the draft begins as."""
        if self.layers:
            return f"layers {', '.join(map(str, self._copied_layers))} of the target"
        return f"pre-trained for {self.pretrain}" if self.pretrain else self._draft_folder.name

    def _load_draft(self) -> LlamaForCausalLM:
        """The target's draft, or random weights of its shape that were pre-trained."""
        if self._draft_folder.joinpath("config.json").is_file():
            tokenizer = read_tokenizer(self._draft_folder)
            if tokenizer.get_vocab() == self._tokenizer.get_vocab():
                begun = load_model(self._draft_folder, self.device)
                begun.requires_grad_(True)
                return self._pretrain(begun) if self.pretrain else begun
        raise UsageError(
            f"{self._draft_folder} is no draft model with the vocabulary of"
            f" {self.label or self.target.name}",
            "give another --draft; tli, uag and omnidraft take one of any vocabulary as it is",
        )

    def _pretrain(self, model: LlamaForCausalLM) -> LlamaForCausalLM:
        """The same with weights that only the corpus made; once for all losses."""
        folder = self.out / WORK / "pretrained"
        claim(folder, {"shape of": self._draft_folder.name, "updates": str(self.pretrain)})
        return self._train_on_corpus(
            model.config, self.pretrain, self.seed, folder, get_output_ids(model)
        )[0]

    def _train_on_corpus(
        self, config: LlamaConfig, updates: int, seed: int, folder: Path, says: Tensor | None = None
    ) -> tuple[LlamaForCausalLM, loop.TrainingResult]:
        """A model that the corpus alone has made, from random weights; its output is cut to `says`.

        Raises:
            UsageError: the target is of another family, and there is no corpus.
        """
        if not isinstance(self._encoder, Encoder):
            raise UsageError(
                f"the corpus at hand is the embedded models', and {self.label or self.target.name}"
                " is none of them",
                "give an embedded --target, or have `train draft` begin with a draft as it is",
            )
        torch.manual_seed(seed)
        fresh = LlamaForCausalLM(config)
        if says is not None:
            restrict_output(fresh, says.cpu())
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
                f"{self.label or self.target.name} has no draft model of its own",
                "--draft MODEL, or --layers 2: one that is made of the target",
            )
        return self.draft()

    def _stages(
        self,
        plan: Alignment,
        model: LlamaForCausalLM,
        loss: Callable[[TrainingBatch], Tensor],
        folder: Path,
    ) -> list[loop.TrainingStage]:
        """One stage, or one for each time that the draft answers anew."""
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
        """The draft's replies of a round, as it is now, to questions that the target answered;
        with the target's own between them if they are to be `mixed`."""
        given = self._training_replies
        first = number * ROUND_QUESTIONS
        theirs = [given[at % len(given)] for at in range(first, first + ROUND_QUESTIONS)]
        asks = [ReplyPrompt(chat.ids[: find_answer_start(chat)]) for chat in theirs]

        def decoder() -> Decoder:
            with TemporaryDirectory(dir=folder) as held:
                disable_progress_bars()
                model.save_pretrained(held)
                return load_decoder(Path(held), name="draft", device=self.device)

        file = folder / f"own-{number:03d}.jsonl"
        found = sample_replies(
            decoder, asks, self._encoder.ends, file, self.seed + OWN_SEED + number
        )
        own = {at: reply.encode() for at, reply in found.items()}
        if samples == "own":
            return list(own.values())
        return list(chain.from_iterable((theirs[at], each) for at, each in own.items()))

    def _estimate(self, model: LlamaForCausalLM, step: int) -> AlignEstimate:
        """What the draft is worth now."""
        model.eval()
        accepted = list[Tensor]()
        reached = list[tuple[EncodedChat, list[int]]]()
        for first in range(0, len(self.held_out), BATCH_SIZE):
            group = self.held_out[first : first + BATCH_SIZE]
            batch = _pad(group).to_device(self.device)
            chance, best = predict_acceptance(model, self._target_model, batch)
            accepted.append(chance[batch.weights == 1.0])
            right = (best == batch.targets) & (batch.weights > 0)
            reached += zip(group, _count_runs(right).tolist(), strict=True)
        model.train()
        mat, rates = compute_mat(reached, CHAIN_LENGTH)
        share = _count_parameters(model) / _count_parameters(self._target_model)
        alpha = torch.cat(accepted).mean().item()
        return AlignEstimate(
            step, mat, rates, round(alpha, 4), round(mat / (share * CHAIN_LENGTH + 1), 4)
        )


def _pad(chats: Sequence[EncodedChat]) -> TrainingBatch:
    """Chats side by side, filled up with what weighs nothing."""
    ids, weights = (
        pad_sequence([torch.tensor(part) for part in parts], batch_first=True)
        for parts in ([chat.ids for chat in chats], [chat.weights for chat in chats])
    )
    return TrainingBatch(ids[:, :-1], ids[:, 1:], weights[:, 1:])


def _count_runs(right: Tensor) -> Tensor:
    """How many drafts in a row are right after the slot behind each: [chats, slots] of `right`
    ones."""
    run = torch.zeros_like(right, dtype=torch.int64)
    behind = torch.zeros_like(run[:, 0])
    for slot in range(right.shape[1] - 1, 0, -1):
        behind = (behind + 1) * right[:, slot]
        run[:, slot - 1] = behind
    return run


def _count_parameters(model: LlamaForCausalLM) -> int:
    """Numbers that a forward of a model multiplies with: all but an embedding that is not the
    output matrix too, of which it reads some rows."""
    embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
    return sum(
        each.numel() for each in model.parameters() if each is output or each is not embedding
    )


def make_loss_row(
    name: str, tokens: int, said: EstimatePairs, first: EstimatePairs
) -> dict[str, object]:
    """Return the table row of a loss: means over seeds, and differences to the first loss.

    Differences are paired by seed. Each mean has a 95% interval.
    """
    row: dict[str, object] = {"loss": name, "tokens": tokens, "seeds": len(said)}
    for figure in FIGURES:
        before, after, of_first = (
            [getattr(each, figure) for each in ends]
            for ends in (*zip(*said, strict=True), [ends[1] for ends in first])
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
    """Return half the width of the interval of a mean, by Student's t; None for one value."""
    from scipy.stats import t

    from specbench_cli.stats.bootstrap import LEVEL

    n = len(values)
    return float(t.ppf((1 + LEVEL) / 2, n - 1)) * stdev(values) / n**0.5 if n > 1 else None

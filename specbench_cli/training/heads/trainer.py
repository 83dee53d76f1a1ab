"""Training of draft heads for an already trained target.

Heads learn from the target's own answers to training questions. The *embedded family* is the set of
small models that specbench ships. For these models, the questions are synthetic, and each update
computes the target's hidden states. For other targets, questions come from GSM8K and from the
target itself. The target's hidden states are stored with the answers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from methods._heads.module import DraftHead, ParallelHead, get_head_classes
from methods._heads.recipe import Objective
from specbench_cli import files
from specbench_cli.engine.models.checkpoint import (
    CheckpointFacts,
    read_checkpoint_facts,
    read_tokenizer,
)
from specbench_cli.engine.models.head import NORMED, FeatureHead, LookAhead
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import UsageError
from specbench_cli.training import loop
from specbench_cli.training.corpus import (
    SPECIAL_TOKENS,
    Chat,
    Corpus,
    Encoder,
    TemplateEncoder,
    choose_reply_chats,
    generate_chats,
)
from specbench_cli.training.heads import mat as head_mat
from specbench_cli.training.heads.build import (
    SCHEDULES,
    HeadSchedule,
    TorchTarget,
    build_head,
    build_stateless_head,
    export,
    init_from_least_squares,
    make_head_config,
    make_parallel_schedule,
    make_stateless_schedule,
    round_to_fp16,
)
from specbench_cli.training.heads.losses import CachedTargetOutput, Drafter, head_loss, run_target
from specbench_cli.training.heads.tuned import add_low_rank_updates, masked_loss, save_adapter
from specbench_cli.training.loop import WORK, Report, Schedule, claim
from specbench_cli.training.losses import Loss, load_model, supports_bf16
from specbench_cli.training.packing import EncodedChat
from specbench_cli.training.replies import (
    HiddenStateFiles,
    Replies,
    ReplyPrompt,
    load_replies,
    make_magpie_prompts,
    make_prompts,
    sample_replies,
)

ProgressCallback = Callable[[str, int, int], None]
"""Function called with a name ("replies", "labels"), the number done, and the total."""

N_REPLIES, N_HELD_OUT = 3000, 96
N_HELD_OUT_OTHER = 32
"""Number of held-out replies for targets outside the embedded family, whose replies are longer."""

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Model families whose layers run in sequence with one attention mask, as `run_target` does."""

N_HELD_OUT_PROBLEMS = 100
"""Number of GSM8K problems (the last ones) that are used only to measure other targets' heads."""

GREEDY_SEED, HELD_OUT_SEED = 4000, 5000
"""Offsets of the seed for questions that are answered greedily, and for held-out questions."""
MEASURE_INTERVAL, MIN_ESTIMATES = 200, 4
"""Steps between two checkpoints or MAT estimates. A shorter training has `MIN_ESTIMATES`."""


Kind = type[DraftHead] | type[FeatureHead] | type[ParallelHead]
"""Class of a draft head that can be trained."""


@dataclass(frozen=True)
class HeadResult(loop.TrainingResult):
    """Result of training a head: MAT estimates during training, and number of trained
    parameters.
    """

    mat: list[head_mat.MatEstimate]
    parameters: int


@dataclass(frozen=True)
class HeadTrainer:
    """Trainer of the heads of one target.

    Args:
        out: folder for the heads. It may contain earlier work, which is resumed.
        target: folder of the target, a Llama, Mistral, Qwen2 or Qwen3 model.
        gsm8k: GSM8K problems among the questions. If empty, only generated questions are used.
        n_replies: number of questions that the target answers. A target that specbench ships
            answers twice as many questions: half with sampling, half greedily.
        n_held_out: number of held-out questions for estimates of MAT (mean accepted tokens per
            verification).
        fast: whether to use torch.compile if the machine supports it.
        report: function that is called after each update with the name of the head.
        progress: function that is called while replies or labels are made.
        label: name of the target in the written files. None means the name of its folder.
        template: chat template for a tokenizer without one.
        draft: function that returns the folder of the target's draft model. Some heads start from
            that model.
        source: the target as given to `--target`. None means the folder of the target.
        cached_kind: kind of head whose target hidden states are stored while replies are sampled.
            For an unknown kind, only the hidden states after the final norm are stored.
    """

    out: Path
    target: Path
    gsm8k: Sequence[Chat]
    seed: int
    device: torch.device
    n_replies: int = N_REPLIES
    n_held_out: int = N_HELD_OUT
    fast: bool = True
    report: Report = lambda _name, _point: None
    progress: ProgressCallback = lambda _name, _done, _of: None
    label: str | None = None
    template: str | None = None
    draft: Callable[[], Path] | None = None
    source: str | None = None
    cached_kind: str = "eagle"

    def for_smoke_test(self) -> Self:
        """Return a trainer for a smoke test, with little data and without compilation."""
        return replace(self, n_replies=24, n_held_out=8, fast=False)

    def get_schedule(self, kind: Kind, *, prefixed: bool = True) -> Schedule:
        """Return the training schedule of a kind of head for this target.

        Args:
            prefixed: whether the head's name begins with the target's name.
        """
        label = self.prefix
        if issubclass(kind, ParallelHead):
            return make_parallel_schedule(kind, label, is_embedded=self.is_embedded)
        if issubclass(kind, FeatureHead):
            return make_stateless_schedule(
                kind, is_embedded=self.is_embedded, label=label if prefixed else None
            )
        if self.is_embedded:
            return SCHEDULES[kind.kind]
        return HeadSchedule.for_target(kind, label, self._target_model.config.intermediate_size)

    @property
    def prefix(self) -> str:
        """Prefix of the names of this target's heads, derived from the name of the target."""
        label = (self.label or self.target.name).removesuffix(".gguf").lower()
        return "embedded" if self.is_embedded else label

    def train_kind(self, kind: Kind, schedule: Schedule, loss: str) -> HeadResult:
        """Train a head of any kind with its schedule, and write its files."""
        if issubclass(kind, LookAhead) and kind.tuned:
            return self.train_tuned(kind, schedule, loss)
        if issubclass(kind, FeatureHead):
            return self.train_stateless(kind, schedule, loss)
        if issubclass(kind, ParallelHead):
            return self.train_parallel(kind, schedule, loss)
        assert isinstance(schedule, HeadSchedule)
        return self.train(schedule, loss)

    def train(self, recipe: HeadSchedule, loss: str) -> HeadResult:
        """Train one head with a KV cache, such as EAGLE, and write its files.

        Args:
            loss: name of a loss of the head's recipe.

        Raises:
            UsageError: the folder contains work for another target or with another loss.
        """
        folder = self._claim_folder(recipe, loss)
        answers = (token for chat in self._training_replies for token in _answer_tokens(chat))
        head = build_head(
            recipe, self._target_model.config, self.seed, answers, self._measure_row_scale
        ).to(self.device)
        result = self._fit_head(head, recipe, head.recipe.losses[loss], folder)
        config = make_head_config(self._target_model.config, recipe.mlp)
        facts = {"kind": recipe.kind, **self._target_facts, "loss": loss}
        export(head, config, self.out / recipe.name, facts)
        return result

    def train_stateless(
        self, kind: type[FeatureHead], schedule: Schedule, loss: str = "ttt"
    ) -> HeadResult:
        """Train one head without a KV cache, such as Medusa, and write its files.

        Args:
            loss: "ttt" uses the target's distributions as labels. "paper" uses the tokens of the
                text, as in the papers of Medusa and Hydra.

        Raises:
            UsageError: the folder contains work for another target or with another loss, or this
                kind of head cannot be trained.
        """
        folder = self._claim_folder(schedule, "levels" if loss == "ttt" else loss)
        head, levels = build_stateless_head(kind, self._target_model, self.seed)
        objective = Objective(levels, kind.decay, text_labels=loss == "paper")
        result = self._fit_head(head, schedule, objective, folder)
        with files.staging_folder(self.out / schedule.name, overwrite=None) as staging:
            head.half().save(staging, **self._target_facts, loss=loss)
        return result

    def train_tuned(self, kind: type[LookAhead], schedule: Schedule, loss: str) -> HeadResult:
        """Train a look-ahead head together with low-rank updates of its target.

        The files of the head and the updates are written to one folder, which can be passed to
        `--target`. The only loss is "paper".

        Raises:
            UsageError: the folder contains work for another target, or `loss` is not "paper".
        """
        if loss != "paper":
            raise UsageError(
                f"{kind.kind} fine-tunes its target on texts and has no loss {loss!r}",
                "--loss paper",
            )
        folder = self._claim_folder(schedule, loss)
        torch.manual_seed(self.seed)
        head = kind(TorchTarget(self._target_model), **kind.trained).to(self.device)
        parts = add_low_rank_updates(self._target_model, kind.tuned)
        both = nn.ModuleList([head, *parts.values()])
        result = self._train_module(
            head, schedule, masked_loss(head, self._target_model), folder, both
        )
        out = self.out / schedule.name
        with files.staging_folder(out, overwrite=None) as staging:
            head.half().save(staging, target=self._target_facts["target"])
        save_adapter(parts, out, self.source or str(self.target.resolve()))
        return result

    def train_parallel(self, kind: type[ParallelHead], schedule: Schedule, loss: str) -> HeadResult:
        """Train one head that drafts all tokens in one forward, and write its files.

        Raises:
            UsageError: the folder contains work for another target or with another loss, or the
                head starts from a draft model and there is none.
        """
        folder = self._claim_folder(schedule, loss)
        torch.manual_seed(self.seed)
        head = kind.new(self._target_model.config, self.draft).to(self.device)
        result = self._fit_head(head, schedule, kind.recipe.losses[loss], folder)
        with files.staging_folder(self.out / schedule.name, overwrite=None) as staging:
            head.save(staging, {"kind": kind.kind, **self._target_facts, "loss": loss})
        return result

    def _claim_folder(self, schedule: Schedule, loss: str) -> Path:
        """Return the folder for the checkpoints of a head.

        Raises:
            UsageError: the folder contains work for another target or with another loss.
        """
        folder = self.out / WORK / schedule.name
        claim(self.out / WORK, {"target_sha256": self._target_sha256})
        claim(folder, {"loss": loss, "replies": str(self.n_replies)})
        return folder

    def _fit_head(
        self, head: Drafter, schedule: Schedule, objective: Objective, folder: Path
    ) -> HeadResult:
        """Train a head with an objective.

        If the head supports it, its weights start from a least-squares fit.
        """
        cached = self._cache_target(head.captured_layers)
        if (
            cached is not None
            and isinstance(head, DraftHead)
            and loop.latest_checkpoint(folder) is None
        ):
            init_from_least_squares(
                head, self._target_model, map(cached.get_reply, self._training_replies)
            )
        fast = self.fast and self.is_embedded and not isinstance(head, ParallelHead)
        return self._train_module(
            head,
            schedule,
            head_loss(head, self._target_model, objective, fast, cached),
            folder,
            head,
        )

    def _cache_target(self, captured_layers: tuple[int, ...]) -> CachedTargetOutput | None:
        """Return the target's hidden states over the training replies.

        Return None for a target that specbench ships. It is small enough to run in each update.
        """
        if self.is_embedded:
            return None
        last = max(reply.first_row for reply in self._training_replies)
        lines = [
            reply for reply in load_replies(self._reply_file("replies")) if reply.first_row <= last
        ]
        return CachedTargetOutput(
            self._hidden_state_files(captured_layers), self._target_model, captured_layers, lines
        )

    def _train_module(
        self, head: Drafter, schedule: Schedule, step: Loss, folder: Path, learns: nn.Module
    ) -> HeadResult:
        """Train the parameters of `learns` with a loss.

        Estimate the MAT of the head at intervals.
        """
        encode = self._encoder
        # Sample the replies before `loop.train` starts to measure the training time.
        reads = {stage.data for stage in schedule.stages}
        replies = self._training_replies if "replies" in reads else []
        source: dict[str, loop.BatchSource] = {"replies": Replies(encode.padding, lambda: replies)}
        if isinstance(encode, Encoder):
            source["corpus"] = Corpus(encode, self.gsm8k, self.seed)
        stages = [plan.make_stage(step, source[plan.data]) for plan in schedule.stages]
        log = head_mat.EstimateLog(folder, head_mat.MatEstimate)
        every = min(MEASURE_INTERVAL, -(-sum(stage.steps for stage in stages) // MIN_ESTIMATES))

        def measure(after: int) -> None:
            log.add(head_mat.estimate_mat(head, self._target_model, self.held_out, after))

        def progress(point: loop.TrainingPoint) -> None:
            if point.step % every == 0 and point.step < point.steps:
                measure(point.step)
            self.report(schedule.name, point)

        result = loop.train(
            learns,
            stages,
            schedule.optimization,
            folder,
            checkpoint_every=MEASURE_INTERVAL,
            progress=progress,
        )
        round_to_fp16(learns)
        measure(result.curve[-1].step)
        numbers = sum(parameter.numel() for parameter in learns.parameters())
        return HeadResult(result.curve, result.seconds, log.read(), numbers)

    @torch.no_grad()
    def _measure_row_scale(self, captured_layers: tuple[int, ...]) -> Tensor:
        """Return the root mean square of the target's hidden states, rounded to a power of two.

        Each captured layer has one value, repeated over its width: [layers * width].
        """
        ids = torch.tensor([self._training_replies[0].ids], device=self.device)
        rows = run_target(self._target_model, ids, captured_layers).features[0].float()
        parts = rows.view(len(rows), len(captured_layers), -1)
        sizes = parts.square().mean((0, 2)).sqrt().log2().round().exp2()
        return sizes.repeat_interleave(parts.shape[-1]).cpu()

    @property
    def _target_facts(self) -> dict[str, Any]:
        """Name and hash of the target, as entries of the head's config.json."""
        return {"target": self.label or self.target.name, "target_sha256": self._target_sha256}

    @cached_property
    def _target_model(self) -> LlamaForCausalLM:
        family = self._config_facts.family
        if family not in LLAMA_LIKE:
            raise UsageError(
                f"heads can be trained only for models of the families {', '.join(LLAMA_LIKE)};"
                f" this target is a {family} model",
                "choose another --target: specbench list models",
            )
        return load_model(self.target, self.device)

    @cached_property
    def _config_facts(self) -> CheckpointFacts:
        return read_checkpoint_facts(self.target)

    @cached_property
    def _target_sha256(self) -> str:
        return self._config_facts.sha256

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = read_tokenizer(self.target)
        if self.template and not tokenizer.chat_template:
            tokenizer.chat_template = self.template
        found: PreTrainedTokenizerFast = tokenizer
        return found

    @cached_property
    def is_embedded(self) -> bool:
        """True if the target is one of the small models that specbench ships."""
        return set(SPECIAL_TOKENS) <= set(self._tokenizer.get_vocab())

    @cached_property
    def _encoder(self) -> Encoder | TemplateEncoder:
        if self.is_embedded:
            return Encoder(self._tokenizer)
        return TemplateEncoder(self._tokenizer, self._config_facts.eos)

    def make_replies(self) -> list[EncodedChat]:
        """Return the replies to train on. Sample the replies that do not exist yet.

        A target that specbench ships first answers some questions at temperature 1, and then other
        questions greedily. Other targets answer GSM8K problems and questions that they generate
        themselves.
        """
        encode = self._encoder
        if isinstance(encode, TemplateEncoder):
            problems = self.gsm8k[:-N_HELD_OUT_PROBLEMS]
            prompts = make_magpie_prompts(encode, problems, self.seed, self.n_replies)
            kind = get_head_classes().get(self.cached_kind)
            captured_layers = (
                (NORMED,) if kind is None else kind.choose_layers(self._config_facts.n_layers)
            )
            rows = self._hidden_state_files(captured_layers)
            return self._sample_replies("replies", prompts, rows)
        sampled = choose_reply_chats(self.gsm8k, self.seed + 1, self.n_replies)
        greedy = choose_reply_chats(self.gsm8k, self.seed + GREEDY_SEED, self.n_replies)
        return [
            *self._sample_replies("replies", make_prompts(encode, sampled)),
            *self._sample_replies("replies-greedy", make_prompts(encode, greedy, greedy=True)),
        ]

    @cached_property
    def _training_replies(self) -> list[EncodedChat]:
        return self.make_replies()

    @cached_property
    def held_out(self) -> list[EncodedChat]:
        """Greedy replies that are not used in training."""
        encode, seed = self._encoder, self.seed + HELD_OUT_SEED
        if isinstance(encode, TemplateEncoder):
            problems = self.gsm8k[-N_HELD_OUT_PROBLEMS:]
            prompts = make_magpie_prompts(
                encode, problems, seed, min(self.n_held_out, N_HELD_OUT_OTHER)
            )
            prompts = [prompt._replace(greedy=True) for prompt in prompts]
        else:
            chats = list(islice(generate_chats(seed), self.n_held_out))
            prompts = make_prompts(encode, chats, greedy=True)
        return self._sample_replies("replies-held-out", prompts)

    def _sample_replies(
        self, name: str, prompts: Sequence[ReplyPrompt], rows: HiddenStateFiles | None = None
    ) -> list[EncodedChat]:
        claim(self.out / WORK, {"target_sha256": self._target_sha256})
        # For larger targets, heads learn from hidden states in bf16 if the device supports bf16.
        half = not self.is_embedded and supports_bf16(self.device)
        dtype = torch.bfloat16 if half else torch.float32
        found = sample_replies(
            partial(load_decoder, self.target, name="target", device=self.device, dtype=dtype),
            prompts,
            self._encoder.ends,
            self._reply_file(name),
            self.seed,
            lambda done: self.progress(name, done, len(prompts)),
            rows,
        )
        if not found:
            raise UsageError(
                f"the target answered none of {len(prompts)} questions: no generated question ended"
                " within the length limit",
                "use a larger --replies N, or another --target",
            )
        return [reply.encode() for reply in found.values()]

    def _reply_file(self, name: str) -> Path:
        return self.out / WORK / f"{name}.jsonl"

    def _hidden_state_files(self, captured_layers: tuple[int, ...]) -> HiddenStateFiles:
        """Return the files with the target's hidden states over the replies."""
        return HiddenStateFiles(self.out / WORK, captured_layers, self._config_facts.hidden_size)


def _answer_tokens(chat: EncodedChat) -> Iterator[int]:
    """Return the token ids of a chat's answers."""
    return (token for token, weight in zip(chat.ids, chat.weights, strict=True) if weight == 1.0)

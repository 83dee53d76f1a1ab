"""Training draft heads for a finished target.

Questions like those of training are answered by the target itself, sampled and greedy, and its
features are computed on the fly.
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
"""Told what is made (replies, labels), how many are done, and of how many."""

N_REPLIES, N_HELD_OUT = 3000, 96
N_HELD_OUT_OTHER = 32
"""Those of a target of another family, which are long."""

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers run one after another on rows alone, under one mask."""

N_HELD_OUT_PROBLEMS = 100
"""Problems of GSM8K, the last ones, that a target of another family is measured on alone."""

GREEDY_SEED, HELD_OUT_SEED = 4000, 5000
"""Added to the seed for the questions answered greedily, and for those that only measure."""
MEASURE_INTERVAL, MIN_ESTIMATES = 200, 4
"""Steps between two checkpoints, and at most between two estimates of MAT; how many of these a
shorter training has."""


Kind = type[DraftHead] | type[FeatureHead] | type[ParallelHead]
"""What can be trained: a head with a state by its torch module, one without by itself."""


@dataclass(frozen=True)
class HeadResult(loop.TrainingResult):
    """A run so far, what the head was worth meanwhile, and how many numbers were trained."""

    mat: list[head_mat.MatEstimate]
    parameters: int


@dataclass(frozen=True)
class HeadTrainer:
    """What all heads of a target share.

    Args:
        out: folder for the heads; it may hold some of the work already.
        target: folder of a Llama model with the family's chat tokens.
        gsm8k: the problems in the corpus; empty = generated text alone.
        n_replies: questions that the target answers, twice: sampled ones and greedy ones.
        n_held_out: questions that the estimates of MAT are made on.
        fast: use torch.compile where this machine can.
        report: called after every step with the head's name.
        counts: called as what is trained on is made.
        label: the target's name in what is written; else its folder's.
        template: a chat template for a tokenizer that has none.
        draft: gives the folder of the target's draft model, which some heads are adapted from.
        source: the target as `--target` takes it; else its folder.
        keeps: the kind of head whose captured layers are kept while replies are made; of others the
            rows that the output matrix reads.
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
        """The same with little data and nothing compiled."""
        return replace(self, n_replies=24, n_held_out=8, fast=False)

    def get_schedule(self, kind: Kind, *, prefixed: bool = True) -> Schedule:
        """That of a kind of head for this target.

        Args:
            ours: whether its name begins with the target's, as those of the kinds here do.
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
        """What the names of this target's heads begin with."""
        label = (self.label or self.target.name).removesuffix(".gguf").lower()
        return "embedded" if self.is_embedded else label

    def train_kind(self, kind: Kind, schedule: Schedule, loss: str) -> HeadResult:
        """Train and export a head of any kind by its `schedule`; see `train`."""
        if issubclass(kind, LookAhead) and kind.tuned:
            return self.train_tuned(kind, schedule, loss)
        if issubclass(kind, FeatureHead):
            return self.train_stateless(kind, schedule, loss)
        if issubclass(kind, ParallelHead):
            return self.train_parallel(kind, schedule, loss)
        assert isinstance(schedule, HeadSchedule)
        return self.train(schedule, loss)

    def train(self, recipe: HeadSchedule, loss: str) -> HeadResult:
        """Train and export one head towards the loss of that name.

        Raises:
            UsageError: the folder holds work for another target or with another loss.
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
        """Train and export one head without a state, towards the target's distributions, or
        towards its text ("paper", as Medusa and Hydra were published).

        Raises:
            UsageError: as `train`; or what the head says cannot be trained here.
        """
        folder = self._claim_folder(schedule, "levels" if loss == "ttt" else loss)
        head, levels = build_stateless_head(kind, self._target_model, self.seed)
        aim = Objective(levels, kind.decay, text_labels=loss == "paper")
        result = self._fit_head(head, schedule, aim, folder)
        with files.staging_folder(self.out / schedule.name, overwrite=None) as staging:
            head.half().save(staging, **self._target_facts, loss=loss)
        return result

    def train_tuned(self, kind: type[LookAhead], schedule: Schedule, loss: str) -> HeadResult:
        """Fine-tune the target and train the head that looks ahead through it, towards texts
        ("paper"), and export both into one folder, which `--target` takes.

        Raises:
            UsageError: as `train`; or another loss.
        """
        if loss != "paper":
            raise UsageError(
                f"{kind.kind} fine-tunes its target towards texts; there is no loss {loss!r}",
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
        """Train and export one drafter that says all tokens of a draft at once.

        Raises:
            UsageError: as `train`; or there is nothing to adapt.
        """
        folder = self._claim_folder(schedule, loss)
        torch.manual_seed(self.seed)
        head = kind.new(self._target_model.config, self.draft).to(self.device)
        result = self._fit_head(head, schedule, kind.recipe.losses[loss], folder)
        with files.staging_folder(self.out / schedule.name, overwrite=None) as staging:
            head.save(staging, {"kind": kind.kind, **self._target_facts, "loss": loss})
        return result

    def _claim_folder(self, schedule: Schedule, loss: str) -> Path:
        """The folder of the work."""
        folder = self.out / WORK / schedule.name
        claim(self.out / WORK, {"target_sha256": self._target_sha256})
        claim(folder, {"loss": loss, "replies": str(self.n_replies)})
        return folder

    def _fit_head(
        self, head: Drafter, schedule: Schedule, aim: Objective, folder: Path
    ) -> HeadResult:
        """Train a head, and round it to what its file will hold."""
        kept = self._cache_target(head.captured_layers)
        if (
            kept is not None
            and isinstance(head, DraftHead)
            and loop.latest_checkpoint(folder) is None
        ):
            init_from_least_squares(
                head, self._target_model, map(kept.get_reply, self._training_replies)
            )
        fast = self.fast and self.is_embedded and not isinstance(head, ParallelHead)
        return self._train_module(
            head, schedule, head_loss(head, self._target_model, aim, fast, kept), folder, head
        )

    def _cache_target(self, captured_layers: tuple[int, ...]) -> CachedTargetOutput | None:
        """The target's rows over the replies to train on; those of a target of the embedded family
        are computed anew each time."""
        if self.is_embedded:
            return None
        last = max(reply.first_row for reply in self._training_replies)
        lines = [
            each for each in load_replies(self._reply_file("replies")) if each.first_row <= last
        ]
        return CachedTargetOutput(
            self._hidden_state_files(captured_layers), self._target_model, captured_layers, lines
        )

    def _train_module(
        self, head: Drafter, schedule: Schedule, step: Loss, folder: Path, learns: nn.Module
    ) -> HeadResult:
        """Train what learns by a loss, and measure the head meanwhile."""
        encode = self._encoder
        # Made before the clock of `loop.train` starts: no head's seconds hold it.
        reads = {stage.data for stage in schedule.stages}
        replies = self._training_replies if "replies" in reads else []
        source: dict[str, loop.BatchSource] = {"replies": Replies(encode.padding, lambda: replies)}
        if isinstance(encode, Encoder):
            source["corpus"] = Corpus(encode, self.gsm8k, self.seed)
        stages = [each.make_stage(step, source[each.data]) for each in schedule.stages]
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
        numbers = sum(each.numel() for each in learns.parameters())
        return HeadResult(result.curve, result.seconds, log.read(), numbers)

    @torch.no_grad()
    def _measure_row_scale(self, captured_layers: tuple[int, ...]) -> Tensor:
        """The root mean square of the target's rows at each layer, to the nearest power of two."""
        ids = torch.tensor([self._training_replies[0].ids], device=self.device)
        rows = run_target(self._target_model, ids, captured_layers).features[0].float()
        parts = rows.view(len(rows), len(captured_layers), -1)
        sizes = parts.square().mean((0, 2)).sqrt().log2().round().exp2()
        return sizes.repeat_interleave(parts.shape[-1]).cpu()

    @property
    def _target_facts(self) -> dict[str, Any]:
        """What `config.json` says of where a head comes from."""
        return {"target": self.label or self.target.name, "target_sha256": self._target_sha256}

    @cached_property
    def _target_model(self) -> LlamaForCausalLM:
        family = self._config_facts.family
        if family not in LLAMA_LIKE:
            raise UsageError(
                f"heads are trained for models of Llama's kind ({', '.join(LLAMA_LIKE)}); this"
                f" target is a {family}",
                "give another --target: specbench list models",
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
        """Whether the target is of the embedded family, which reads the corpus that made it."""
        return set(SPECIAL_TOKENS) <= set(self._tokenizer.get_vocab())

    @cached_property
    def _encoder(self) -> Encoder | TemplateEncoder:
        if self.is_embedded:
            return Encoder(self._tokenizer)
        return TemplateEncoder(self._tokenizer, self._config_facts.eos)

    def make_replies(self) -> list[EncodedChat]:
        """Replies to train on, made where they lack.

        Those of the embedded family: answers at temperature 1, the same that a draft model is
        trained on, then greedy ones to other questions. Other targets': see `own_asks`.
        """
        encode = self._encoder
        if isinstance(encode, TemplateEncoder):
            problems = self.gsm8k[:-N_HELD_OUT_PROBLEMS]
            asks = make_magpie_prompts(encode, problems, self.seed, self.n_replies)
            kind = get_head_classes().get(self.cached_kind)
            captured_layers = (
                (NORMED,) if kind is None else kind.choose_layers(self._config_facts.n_layers)
            )
            rows = self._hidden_state_files(captured_layers)
            return self._sample_replies("replies", asks, rows)
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
        """Greedy replies that nothing is trained on."""
        encode, seed = self._encoder, self.seed + HELD_OUT_SEED
        if isinstance(encode, TemplateEncoder):
            problems = self.gsm8k[-N_HELD_OUT_PROBLEMS:]
            asks = make_magpie_prompts(
                encode, problems, seed, min(self.n_held_out, N_HELD_OUT_OTHER)
            )
            asks = [ask._replace(greedy=True) for ask in asks]
        else:
            chats = list(islice(generate_chats(seed), self.n_held_out))
            asks = make_prompts(encode, chats, greedy=True)
        return self._sample_replies("replies-held-out", asks)

    def _sample_replies(
        self, name: str, asks: Sequence[ReplyPrompt], rows: HiddenStateFiles | None = None
    ) -> list[EncodedChat]:
        claim(self.out / WORK, {"target_sha256": self._target_sha256})
        # As heads read it: those of a larger target learn from rows in bf16 where that is faster.
        half = not self.is_embedded and supports_bf16(self.device)
        dtype = torch.bfloat16 if half else torch.float32
        found = sample_replies(
            partial(load_decoder, self.target, name="target", device=self.device, dtype=dtype),
            asks,
            self._encoder.ends,
            self._reply_file(name),
            self.seed,
            lambda done: self.progress(name, done, len(asks)),
            rows,
        )
        if not found:
            raise UsageError(
                f"the target answered none of {len(asks)} questions: none of its own ended in time",
                "more of them: --replies N; or another --target",
            )
        return [reply.encode() for reply in found.values()]

    def _reply_file(self, name: str) -> Path:
        return self.out / WORK / f"{name}.jsonl"

    def _hidden_state_files(self, captured_layers: tuple[int, ...]) -> HiddenStateFiles:
        """Where the target's rows at these captured_layers over the replies are kept."""
        return HiddenStateFiles(self.out / WORK, captured_layers, self._config_facts.hidden_size)


def _answer_tokens(chat: EncodedChat) -> Iterator[int]:
    """The answer's tokens."""
    return (token for token, weight in zip(chat.ids, chat.weights, strict=True) if weight == 1.0)

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

from methods._heads.module import DraftHead, ParallelHead, heads
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
    generated_chats,
    reply_chats,
)
from specbench_cli.training.heads import mat as head_mat
from specbench_cli.training.heads.build import (
    SCHEDULES,
    HeadSchedule,
    TorchTarget,
    as_stored,
    begin_linear,
    build,
    build_stateless,
    export,
    head_config,
    schedule_of,
    schedule_of_parallel,
)
from specbench_cli.training.heads.losses import Drafter, Kept, head_loss, read_target
from specbench_cli.training.heads.tuned import masked_loss, save, tune
from specbench_cli.training.loop import WORK, Report, Schedule, claim
from specbench_cli.training.losses import Loss, multiplies_bf16, read
from specbench_cli.training.packing import Encoded
from specbench_cli.training.replies import (
    Ask,
    Replies,
    RowFiles,
    asked,
    own_asks,
    sample_replies,
    written,
)

Progress = Callable[[str, int, int], None]
"""Told what is made (replies, labels), how many are done, and of how many."""

N_REPLIES, N_HELD_OUT = 3000, 96
N_OWN_HELD_OUT = 32
"""Those of a target of another family, which are long."""

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers run one after another on rows alone, under one mask."""

KEPT_BACK = 100
"""Problems of GSM8K, the last ones, that a target of another family is measured on alone."""

GREEDY_SEED, HELD_OUT_SEED = 4000, 5000
"""Added to the seed for the questions answered greedily, and for those that only measure."""
MEASURE_EVERY, ESTIMATES = 200, 4
"""Steps between two checkpoints, and at most between two estimates of MAT; how many of these a
shorter training has."""


Kind = type[DraftHead] | type[FeatureHead] | type[ParallelHead]
"""What can be trained: a head with a state by its torch module, one without by itself."""


@dataclass(frozen=True)
class HeadResult(loop.Result):
    """A run so far, what the head was worth meanwhile, and how many numbers were trained."""

    mat: list[head_mat.Estimate]
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
    counts: Progress = lambda _name, _done, _of: None
    label: str | None = None
    template: str | None = None
    draft: Callable[[], Path] | None = None
    source: str | None = None
    keeps: str = "eagle"

    def smoke(self) -> Self:
        """The same with little data and nothing compiled."""
        return replace(self, n_replies=24, n_held_out=8, fast=False)

    def schedule(self, kind: Kind, *, ours: bool = True) -> Schedule:
        """That of a kind of head for this target.

        Args:
            ours: whether its name begins with the target's, as those of the kinds here do.
        """
        label = self.prefix
        if issubclass(kind, ParallelHead):
            return schedule_of_parallel(kind, label, of_family=self.of_family)
        if issubclass(kind, FeatureHead):
            return schedule_of(kind, of_family=self.of_family, label=label if ours else None)
        if self.of_family:
            return SCHEDULES[kind.kind]
        return HeadSchedule.own(kind, label, self._model.config.intermediate_size)

    @property
    def prefix(self) -> str:
        """What the names of this target's heads begin with."""
        label = (self.label or self.target.name).removesuffix(".gguf").lower()
        return "embedded" if self.of_family else label

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
        folder = self._claimed(recipe, loss)
        answers = (token for chat in self._trained_on for token in _said(chat))
        head = build(recipe, self._model.config, self.seed, answers, self._size).to(self.device)
        result = self._fit(head, recipe, head.recipe.losses[loss], folder)
        config = head_config(self._model.config, recipe.mlp)
        facts = {"kind": recipe.kind, **self._facts, "loss": loss}
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
        folder = self._claimed(schedule, "levels" if loss == "ttt" else loss)
        head, levels = build_stateless(kind, self._model, self.seed)
        aim = Objective(levels, kind.decay, text=loss == "paper")
        result = self._fit(head, schedule, aim, folder)
        with files.staging_folder(self.out / schedule.name, overwrite=None) as staging:
            head.half().save(staging, **self._facts, loss=loss)
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
        folder = self._claimed(schedule, loss)
        torch.manual_seed(self.seed)
        head = kind(TorchTarget(self._model), **kind.trained).to(self.device)
        parts = tune(self._model, kind.tuned)
        both = nn.ModuleList([head, *parts.values()])
        result = self._run(head, schedule, masked_loss(head, self._model), folder, both)
        out = self.out / schedule.name
        with files.staging_folder(out, overwrite=None) as staging:
            head.half().save(staging, target=self._facts["target"])
        save(parts, out, self.source or str(self.target.resolve()))
        return result

    def train_parallel(self, kind: type[ParallelHead], schedule: Schedule, loss: str) -> HeadResult:
        """Train and export one drafter that says all tokens of a draft at once.

        Raises:
            UsageError: as `train`; or there is nothing to adapt.
        """
        folder = self._claimed(schedule, loss)
        torch.manual_seed(self.seed)
        head = kind.new(self._model.config, self.draft).to(self.device)
        result = self._fit(head, schedule, kind.recipe.losses[loss], folder)
        with files.staging_folder(self.out / schedule.name, overwrite=None) as staging:
            head.save(staging, {"kind": kind.kind, **self._facts, "loss": loss})
        return result

    def _claimed(self, schedule: Schedule, loss: str) -> Path:
        """The folder of the work."""
        folder = self.out / WORK / schedule.name
        claim(self.out / WORK, {"target_sha256": self._sha})
        claim(folder, {"loss": loss, "replies": str(self.n_replies)})
        return folder

    def _fit(self, head: Drafter, schedule: Schedule, aim: Objective, folder: Path) -> HeadResult:
        """Train a head, and round it to what its file will hold."""
        kept = self._kept(head.captured_layers)
        if (
            kept is not None
            and isinstance(head, DraftHead)
            and loop.latest_checkpoint(folder) is None
        ):
            begin_linear(head, self._model, map(kept.text, self._trained_on))
        fast = self.fast and self.of_family and not isinstance(head, ParallelHead)
        return self._run(
            head, schedule, head_loss(head, self._model, aim, fast, kept), folder, head
        )

    def _kept(self, captured_layers: tuple[int, ...]) -> Kept | None:
        """The target's rows over the replies to train on; those of a target of the embedded family
        are computed anew each time."""
        if self.of_family:
            return None
        last = max(reply.first for reply in self._trained_on)
        lines = [each for each in written(self._file("replies")) if each.first <= last]
        return Kept(self._rows(captured_layers), self._model, captured_layers, lines)

    def _run(
        self, head: Drafter, schedule: Schedule, step: Loss, folder: Path, learns: nn.Module
    ) -> HeadResult:
        """Train what learns by a loss, and measure the head meanwhile."""
        encode = self._encode
        # Made before the clock of `loop.train` starts: no head's seconds hold it.
        reads = {stage.reads for stage in schedule.stages}
        replies = self._trained_on if "replies" in reads else []
        source: dict[str, loop.Source] = {"replies": Replies(encode.padding, lambda: replies)}
        if isinstance(encode, Encoder):
            source["corpus"] = Corpus(encode, self.gsm8k, self.seed)
        stages = [each.stage(step, source[each.reads]) for each in schedule.stages]
        log = head_mat.Log(folder, head_mat.Estimate)
        every = min(MEASURE_EVERY, -(-sum(stage.steps for stage in stages) // ESTIMATES))

        def measure(after: int) -> None:
            log.add(head_mat.estimate(head, self._model, self.held_out, after))

        def progress(point: loop.Point) -> None:
            if point.step % every == 0 and point.step < point.steps:
                measure(point.step)
            self.report(schedule.name, point)

        result = loop.train(
            learns,
            stages,
            schedule.optimization,
            folder,
            checkpoint_every=MEASURE_EVERY,
            progress=progress,
        )
        as_stored(learns)
        measure(result.curve[-1].step)
        numbers = sum(each.numel() for each in learns.parameters())
        return HeadResult(result.curve, result.seconds, log.read(), numbers)

    @torch.no_grad()
    def _size(self, captured_layers: tuple[int, ...]) -> Tensor:
        """The root mean square of the target's rows at each captured layer, to the nearest power of
        two."""
        ids = torch.tensor([self._trained_on[0].ids], device=self.device)
        rows = read_target(self._model, ids, captured_layers).features[0].float()
        parts = rows.view(len(rows), len(captured_layers), -1)
        sizes = parts.square().mean((0, 2)).sqrt().log2().round().exp2()
        return sizes.repeat_interleave(parts.shape[-1]).cpu()

    @property
    def _facts(self) -> dict[str, Any]:
        """What `config.json` says of where a head comes from."""
        return {"target": self.label or self.target.name, "target_sha256": self._sha}

    @cached_property
    def _model(self) -> LlamaForCausalLM:
        family = self._known.family
        if family not in LLAMA_LIKE:
            raise UsageError(
                f"heads are trained for models of Llama's kind ({', '.join(LLAMA_LIKE)}); this"
                f" target is a {family}",
                "give another --target: specbench list models",
            )
        return read(self.target, self.device)

    @cached_property
    def _known(self) -> CheckpointFacts:
        return read_checkpoint_facts(self.target)

    @cached_property
    def _sha(self) -> str:
        return self._known.sha256

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = read_tokenizer(self.target)
        if self.template and not tokenizer.chat_template:
            tokenizer.chat_template = self.template
        found: PreTrainedTokenizerFast = tokenizer
        return found

    @cached_property
    def of_family(self) -> bool:
        """Whether the target is of the embedded family, which reads the corpus that made it."""
        return set(SPECIAL_TOKENS) <= set(self._tokenizer.get_vocab())

    @cached_property
    def _encode(self) -> Encoder | TemplateEncoder:
        if self.of_family:
            return Encoder(self._tokenizer)
        return TemplateEncoder(self._tokenizer, self._known.eos)

    def replies(self) -> list[Encoded]:
        """Replies to train on, made where they lack.

        Those of the embedded family: answers at temperature 1, the same that a draft model is
        trained on, then greedy ones to other questions. Other targets': see `own_asks`.
        """
        encode = self._encode
        if isinstance(encode, TemplateEncoder):
            problems = self.gsm8k[:-KEPT_BACK]
            asks = own_asks(encode, problems, self.seed, self.n_replies)
            kind = heads().get(self.keeps)
            captured_layers = (
                (NORMED,) if kind is None else kind.choose_layers(self._known.n_layers)
            )
            rows = self._rows(captured_layers)
            return self._replies("replies", asks, rows)
        sampled = reply_chats(self.gsm8k, self.seed + 1, self.n_replies)
        greedy = reply_chats(self.gsm8k, self.seed + GREEDY_SEED, self.n_replies)
        return [
            *self._replies("replies", asked(encode, sampled)),
            *self._replies("replies-greedy", asked(encode, greedy, greedy=True)),
        ]

    @cached_property
    def _trained_on(self) -> list[Encoded]:
        return self.replies()

    @cached_property
    def held_out(self) -> list[Encoded]:
        """Greedy replies that nothing is trained on."""
        encode, seed = self._encode, self.seed + HELD_OUT_SEED
        if isinstance(encode, TemplateEncoder):
            problems = self.gsm8k[-KEPT_BACK:]
            asks = own_asks(encode, problems, seed, min(self.n_held_out, N_OWN_HELD_OUT))
            asks = [ask._replace(greedy=True) for ask in asks]
        else:
            chats = list(islice(generated_chats(seed), self.n_held_out))
            asks = asked(encode, chats, greedy=True)
        return self._replies("replies-held-out", asks)

    def _replies(
        self, name: str, asks: Sequence[Ask], rows: RowFiles | None = None
    ) -> list[Encoded]:
        claim(self.out / WORK, {"target_sha256": self._sha})
        # As heads read it: those of a larger target learn from rows in bf16 where that is faster.
        half = not self.of_family and multiplies_bf16(self.device)
        dtype = torch.bfloat16 if half else torch.float32
        found = sample_replies(
            partial(load_decoder, self.target, name="target", device=self.device, dtype=dtype),
            asks,
            self._encode.ends,
            self._file(name),
            self.seed,
            lambda done: self.counts(name, done, len(asks)),
            rows,
        )
        if not found:
            raise UsageError(
                f"the target answered none of {len(asks)} questions: none of its own ended in time",
                "more of them: --replies N; or another --target",
            )
        return [reply.encoded() for reply in found.values()]

    def _file(self, name: str) -> Path:
        return self.out / WORK / f"{name}.jsonl"

    def _rows(self, captured_layers: tuple[int, ...]) -> RowFiles:
        """Where the target's rows at these captured layers over the replies are kept."""
        return RowFiles(self.out / WORK, captured_layers, self._known.hidden_size)


def _said(chat: Encoded) -> Iterator[int]:
    """The answer's tokens."""
    return (token for token, weight in zip(chat.ids, chat.weights, strict=True) if weight == 1.0)

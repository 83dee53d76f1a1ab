"""Training draft heads for a finished target.

Questions like those of training are answered by the target itself, sampled and greedy, and its
features are computed on the fly.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from methods._heads.module import DraftHead
from methods._heads.recipe import Objective
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.errors import UsageError
from specbench_cli.training import head_mat, loop
from specbench_cli.training.corpus import Chat, Corpus, Encoder, generated_chats, reply_chats
from specbench_cli.training.family import Schedule, read
from specbench_cli.training.head_family import (
    HeadSchedule,
    as_stored,
    build,
    build_stateless,
    export,
    head_config,
)
from specbench_cli.training.head_losses import head_loss, read_target
from specbench_cli.training.packing import Encoded
from specbench_cli.training.replies import Replies, replied, sample_replies
from specbench_cli.training.trainer import WORK, Report, deterministic

N_REPLIES, N_HELD_OUT = 3000, 96
GREEDY_SEED, HELD_OUT_SEED = 4000, 5000
"""Added to the seed for the questions answered greedily, and for those that only measure."""
MADE_FOR = "made_for.json"
MEASURE_EVERY = 200
"""Steps between two estimates of MAT, which are made where checkpoints are."""


@dataclass(frozen=True)
class HeadResult(loop.Result):
    """A run so far, and what the head was worth meanwhile."""

    mat: list[head_mat.Estimate]


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

    def smoke(self) -> Self:
        """The same with little data and nothing compiled."""
        return replace(self, n_replies=24, n_held_out=8, fast=False)

    def train(self, recipe: HeadSchedule, loss: str) -> HeadResult:
        """Train and export one head towards the loss of that name.

        Raises:
            UsageError: the folder holds work for another target or with another loss.
        """
        folder = self._claimed(recipe, loss)
        answers = (token for chat in self._sampled for token in _said(chat))
        head = build(recipe, self._model.config, self.seed, answers, self._size).to(self.device)
        result = self._fit(head, recipe, head.recipe.losses[loss], folder)
        config = head_config(self._model.config, recipe.mlp)
        facts = {"kind": recipe.kind, **self._facts, "loss": loss}
        export(head, config, self.out / recipe.name, facts)
        return result

    def train_stateless(self, kind: type[FeatureHead], schedule: Schedule) -> HeadResult:
        """Train and export one head without a state, towards the target's distributions.

        Raises:
            UsageError: as `train`; or what the head says cannot be trained here.
        """
        folder = self._claimed(schedule, "levels")
        head, levels = build_stateless(kind, self._model, self.seed)
        result = self._fit(head, schedule, Objective(levels, kind.decay), folder)
        head.half().save(self.out / schedule.name, **self._facts)
        return result

    def _claimed(self, schedule: Schedule, loss: str) -> Path:
        """The folder of the work."""
        folder = self.out / WORK / schedule.name
        claim(self.out / WORK, {"target_sha256": self._sha})
        claim(folder, {"loss": loss})
        return folder

    def _fit(
        self, head: DraftHead | FeatureHead, schedule: Schedule, aim: Objective, folder: Path
    ) -> HeadResult:
        """Train a head, and round it to what its file will hold."""
        source = {
            "corpus": Corpus(self._encode, self.gsm8k, self.seed),
            "replies": Replies(self._encode.padding, lambda: [*self._sampled, *self._greedy]),
        }
        step = head_loss(head, self._model, aim, self.fast)
        stages = [
            loop.Stage(s.steps, s.sequences, s.length, step, source[s.reads])
            for s in schedule.stages
        ]
        log = head_mat.Log(folder)

        def measure(after: int) -> None:
            log.add(head_mat.estimate(head, self._model, self._held_out, after))

        def progress(point: loop.Point) -> None:
            if point.step % MEASURE_EVERY == 0:
                measure(point.step)
            self.report(schedule.name, point)

        with deterministic(self.device):
            result = loop.train(
                head,
                stages,
                loop.Optimization(
                    schedule.peak_lr,
                    end_lr=0.05 * schedule.peak_lr,
                    warmup_steps=schedule.warmup_steps,
                    horizon=schedule.horizon,
                ),
                folder,
                checkpoint_every=MEASURE_EVERY,
                progress=progress,
            )
        as_stored(head)
        measure(result.curve[-1].step)
        return HeadResult(result.curve, result.seconds, log.read())

    @torch.no_grad()
    def _size(self, taps: tuple[int, ...]) -> Tensor:
        """The root mean square of the target's rows at each tap, to the nearest power of two."""
        ids = torch.tensor([self._sampled[0].ids], device=self.device)
        rows = read_target(self._model, ids, taps).features[0].float()
        parts = rows.view(len(rows), len(taps), -1)
        sizes = parts.square().mean((0, 2)).sqrt().log2().round().exp2()
        return sizes.repeat_interleave(parts.shape[-1]).cpu()

    @property
    def _facts(self) -> dict[str, Any]:
        """What `config.json` says of where a head comes from."""
        return {"target": self.target.name, "target_sha256": self._sha}

    @cached_property
    def _model(self) -> LlamaForCausalLM:
        return read(self.target, self.device)

    @cached_property
    def _sha(self) -> str:
        return Weights(self.target).sha256()

    @cached_property
    def _encode(self) -> Encoder:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(self.target)
        return Encoder(tokenizer)

    @cached_property
    def _sampled(self) -> list[Encoded]:
        """Replies at temperature 1, the same as those that a draft model is trained on."""
        chats = reply_chats(self.gsm8k, self.seed + 1, self.n_replies)
        return self._replies("replies.jsonl", chats, greedy=False)

    @cached_property
    def _greedy(self) -> list[Encoded]:
        """Replies without chance, to other questions."""
        chats = reply_chats(self.gsm8k, self.seed + GREEDY_SEED, self.n_replies)
        return self._replies("replies-greedy.jsonl", chats, greedy=True)

    @cached_property
    def _held_out(self) -> list[Encoded]:
        """Greedy replies that nothing is trained on."""
        chats = list(islice(generated_chats(self.seed + HELD_OUT_SEED), self.n_held_out))
        return self._replies("replies-held-out.jsonl", chats, greedy=True)

    def _replies(self, name: str, chats: Sequence[Chat], greedy: bool) -> list[Encoded]:
        file = self.out / WORK / name
        answers = sample_replies(self._model, self._encode, chats, file, self.seed, greedy=greedy)
        return replied(self._encode, chats, answers)


def _said(chat: Encoded) -> Iterator[int]:
    """The answer's tokens."""
    return (token for token, weight in zip(*chat, strict=True) if weight == 1.0)


def claim(folder: Path, facts: dict[str, str]) -> None:
    """Note what a folder's work is for, or refuse to go on with work for something else."""
    file = folder / MADE_FOR
    folder.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        file.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    if found != facts:
        raise UsageError(
            f"{folder} holds another run: {found}, wanted {facts}", "use another --out, or --fresh"
        )

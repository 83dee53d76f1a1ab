"""Training loop of all models and heads: AdamW, warm-up, cosine schedule, checkpoints.

The length of a training is counted in steps, not in seconds. Two trainings therefore give the same
loss curve. A training that was killed and resumed also gives this curve. A checkpoint contains the
model, the optimizer and the position in the data, as safetensors and JSON. Nothing is pickled.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specbench_cli import files
from specbench_cli.errors import UsageError
from specbench_cli.training.packing import TrainingBatch

WORK = "training"
"""Folder inside the output folder with tokenizers, checkpoints, replies and loss curves."""

CURVE = "loss.jsonl"
MADE_FOR = "made_for.json"
"""File that says what the work in a folder is for; see `claim`."""
_STEP = re.compile(r"step-\d{7,}(\.part)?")
_CHECKPOINT = frozenset({"model.safetensors", "optimizer.safetensors", "state.json"})
"""Names of a checkpoint's files."""
_TRAINER_FILES = re.compile(
    r"made_for\.json|mat\.jsonl|divergence\.jsonl|labels\.safetensors|own-\d{3,}\.jsonl"
)
"""Names of files that trainers write besides the curve and the checkpoints."""
_MAX_BYTES = 256 * files.MB
"""Maximum size in bytes of a curve or of a checkpoint's state."""
LOST_SECONDS = 300
"""Maximum time in seconds between two checkpoints, which a killed training may lose."""


class BatchSource(Protocol):
    """Source of batches. Each checkpoint stores the position of the source."""

    def batch(self, sequences: int, length: int) -> TrainingBatch:
        """Return the next batch of `sequences` x `length` tokens."""

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a position that an earlier call of `state` returned."""


@dataclass(frozen=True)
class TrainingStage:
    """Stage of a training: `steps` updates with one loss, on batches of `sequences` x `length`
    tokens.
    """

    steps: int
    sequences: int
    length: int
    loss: Callable[[TrainingBatch], Tensor]
    source: BatchSource


@dataclass(frozen=True)
class Optimization:
    """Settings of AdamW and of the learning rate: linear warm-up to `peak_lr`, then a cosine to
    `end_lr`.

    Attributes:
        horizon: step at which the cosine ends. None means the last step of the training.
    """

    peak_lr: float
    end_lr: float
    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    horizon: int | None = None

    def get_learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of update `step` (from 0) of a training with `steps` updates."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        end = self.horizon or steps
        done = (step - self.warmup_steps) / max(1, end - self.warmup_steps)
        return self.end_lr + (self.peak_lr - self.end_lr) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class StagePlan:
    """Plan of one stage of a training: `steps` updates on `sequences` x `length` tokens.

    Attributes:
        objective: "text" (cross-entropy), "target" (labels are the target's distributions), or
            "exits" (cross-entropy after the last and after an earlier layer).
        data: "corpus"; "hard" (task families that are hard for the target); "open" (the same
            families without held-out wordings); or "replies" (the target's own answers).
    """

    steps: int
    sequences: int
    length: int
    objective: Literal["text", "target", "exits"] = "text"
    data: Literal["corpus", "open", "hard", "replies"] = "corpus"

    def make_stage(
        self, loss: Callable[[TrainingBatch], Tensor], source: BatchSource
    ) -> TrainingStage:
        """Return the training stage of this plan, with a loss and a source of batches."""
        return TrainingStage(self.steps, self.sequences, self.length, loss, source)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Training schedule of the model `name`.

    Attributes:
        horizon: step at which the learning rate reaches its final value. None means the last step.
    """

    name: str
    stages: tuple[StagePlan, ...]
    peak_lr: float
    warmup_steps: int = 100
    horizon: int | None = None

    @property
    def tokens(self) -> int:
        """Number of training tokens."""
        return sum(s.steps * s.sequences * s.length for s in self.stages)

    @property
    def optimization(self) -> Optimization:
        """Settings of the optimizer. The final learning rate is a twentieth of the peak."""
        end_lr = 0.05 * self.peak_lr
        return Optimization(self.peak_lr, end_lr, self.warmup_steps, horizon=self.horizon)

    def scale_steps(self, factor: float) -> Self:
        """Return the schedule with all numbers of steps multiplied by a factor.

        Each is at least 1.
        """
        return replace(
            self,
            stages=tuple(replace(s, steps=max(1, round(s.steps * factor))) for s in self.stages),
            warmup_steps=max(1, round(self.warmup_steps * factor)),
            horizon=None if self.horizon is None else max(1, round(self.horizon * factor)),
        )

    def with_batch_size(self, sequences: int) -> Self:
        """Return the schedule with another batch size and the same number of tokens."""
        first = self.stages[0].sequences / sequences
        stages = tuple(
            replace(s, steps=max(1, round(s.steps * s.sequences / sequences)), sequences=sequences)
            for s in self.stages
        )
        return replace(
            self,
            stages=stages,
            warmup_steps=max(1, round(self.warmup_steps * first)),
            horizon=None if self.horizon is None else max(1, round(self.horizon * first)),
        )

    def for_smoke_test(self) -> Self:
        """Return a schedule with two small steps per stage."""
        stages = tuple(replace(s, steps=2, sequences=2, length=256) for s in self.stages)
        return replace(self, stages=stages, warmup_steps=1, horizon=None)


@dataclass(frozen=True)
class TrainingPoint:
    """Point of a loss curve.

    Attributes:
        step: number of the update, from 1.
        steps: number of updates of the training.
        loss: loss in nats per token.
        tokens: number of training tokens so far.
    """

    step: int
    steps: int
    loss: float
    lr: float
    tokens: int


Report = Callable[[str, TrainingPoint], None]
"""Function called after each update, with the name of the trained model."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training.

    Attributes:
        curve: loss of each update.
        seconds: training time, including earlier interrupted runs, but without calls of `progress`.
    """

    curve: list[TrainingPoint]
    seconds: float


@dataclass(frozen=True)
class TrainingProgress:
    """Content of the file state.json in a checkpoint.

    Attributes:
        plan: number of steps and tokens of the training. A training with another plan cannot resume
            this checkpoint.
        sources: position of each source of batches.
    """

    step: int
    tokens: int
    seconds: float
    plan: dict[str, int]
    sources: list[dict[str, Any]]


def train(
    model: nn.Module,
    stages: Sequence[TrainingStage],
    optimization: Optimization,
    folder: Path,
    *,
    checkpoint_every: int = 200,
    progress: Callable[[TrainingPoint], None] = lambda _: None,
) -> TrainingResult:
    """Train a model in place, and resume from the newest checkpoint in `folder` if there is one.

    Each step adds a line to `loss.jsonl`. A new checkpoint replaces the old one every
    `checkpoint_every` steps, every `LOST_SECONDS` seconds, and at the end.

    Args:
        progress: function that is called after each update.

    Raises:
        UsageError: the folder contains another training, or files that training did not write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_work(folder)
    steps = sum(stage.steps for stage in stages)
    plan = {"steps": steps, "tokens": sum(s.steps * s.sequences * s.length for s in stages)}
    optimizer = _adamw(model, optimization)
    at = _resume(folder, model, optimizer, plan)
    sources = list(dict.fromkeys(stage.source for stage in stages))
    for source, state in zip(sources, at.sources, strict=False):
        source.restore(state)
    curve = _read_curve(folder, at.step)
    tokens, seconds = at.tokens, at.seconds
    started = time.monotonic() - seconds
    saved = time.monotonic()
    fd = files.open_own(folder / CURVE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    device = next(model.parameters()).device
    with os.fdopen(fd, "a", encoding="utf-8", buffering=1) as log, _deterministic(device):
        for step, stage in _remaining(stages, at.step):
            lr = optimization.get_learning_rate(step, steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = stage.loss(stage.source.batch(stage.sequences, stage.length))
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), optimization.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += stage.sequences * stage.length
            point = TrainingPoint(step + 1, steps, round(loss.item(), 6), lr, tokens)
            curve.append(point)
            log.write(json.dumps(asdict(point)) + "\n")
            late = time.monotonic() - saved > LOST_SECONDS
            if point.step % checkpoint_every == 0 or point.step == steps or late:
                saved = time.monotonic()
                seconds = saved - started
                at = TrainingProgress(
                    point.step, tokens, seconds, plan, [s.state() for s in sources]
                )
                _save(folder, model, optimizer, at)
            before_progress = time.monotonic()
            progress(point)
            started += time.monotonic() - before_progress
    return TrainingResult(curve, seconds)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms on a CPU.

    Otherwise, compiled code adds up the gradients of an embedding in a different order in each run.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def claim(folder: Path, facts: dict[str, str]) -> None:
    """Write a file that describes the training in a folder, or check that the description is the
    same.

    Raises:
        UsageError: the folder contains a training with another description.
    """
    files.check_no_link(folder)
    file = folder / MADE_FOR
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        files.replace(file, json.dumps(facts) + "\n")
    try:
        found = json.loads(files.read_own(file) or b"")
    except ValueError:
        found = "something else"
    if found != facts:
        raise UsageError(
            f"{folder} contains the work of another training: {found}, expected {facts}",
            "use another --out, or --fresh",
        )


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a training folder, or None."""
    found = (p for p in folder.glob("step-*") if _STEP.fullmatch(p.name) and p.suffix != ".part")
    return max(found, default=None)


def check_work(folder: Path) -> None:
    """Check that files with the names of training files really belong to a training.

    Raises:
        UsageError: a file or folder has such a name, but training did not write it.
    """
    for each in folder.iterdir():
        if each.name == CURVE:
            own = _is_curve(files.read_own(each) or b"")
        elif _STEP.fullmatch(each.name):
            own = _is_checkpoint(each)
        else:
            continue
        if not own:
            raise UsageError(
                f"{each} exists already and was not written by a training",
                "use another --out, or move it away",
            )


def has_work(folder: Path) -> bool:
    """Return True if a folder contains a training that can be resumed.

    Raises:
        UsageError: a file or folder has a name that training uses, but other content.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    check_work(folder)
    return latest_checkpoint(folder) is not None or bool(files.read_own(folder / CURVE))


def remove_work(folder: Path) -> None:
    """Remove the files of a training from its folder. Keep other files.

    Raises:
        UsageError: the folder contains files, but no training.
    """
    claimed = _is_claim(files.read_own(folder / MADE_FOR) or b"")
    names = [each.name for each in folder.iterdir()]
    check_work(folder)
    if names and not claimed and CURVE not in names and not any(map(_STEP.fullmatch, names)):
        raise UsageError(
            f"{folder} contains no training but other files, and --fresh would remove them",
            "choose another --out, or move that folder away",
        )
    for name in names:
        if _STEP.fullmatch(name):
            _remove_checkpoint(folder / name)
        elif name == CURVE or _TRAINER_FILES.fullmatch(name):
            files.remove_own(folder / name)
    with suppress(OSError):
        folder.rmdir()


def _is_claim(content: bytes) -> bool:
    """Return True if the content is that of a description file of a training: a JSON object of
    texts.
    """
    try:
        found = json.loads(content)
    except ValueError:
        return False
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def _is_curve(content: bytes) -> bool:
    """Return True if the content is a loss curve: each line is a `TrainingPoint`.

    The last line may be incomplete.
    """
    try:
        for line in content.split(b"\n")[:-1]:
            TrainingPoint(**json.loads(line))
    except (ValueError, TypeError):
        return False
    return b"\n" in content or content[:1] in (b"", b"{")


def _is_checkpoint(place: Path) -> bool:
    """Return True if a folder contains only a checkpoint's files.

    A complete checkpoint must also have a valid state.json.
    """
    if place.is_symlink() or not place.is_dir():
        return False
    if not _CHECKPOINT.issuperset(each.name for each in place.iterdir()):
        return False
    if place.suffix == ".part":
        return True
    try:
        TrainingProgress(**json.loads(files.read_own(place / "state.json") or b""))
    except (UsageError, ValueError, TypeError):
        return False
    return True


def _remove_checkpoint(place: Path) -> None:
    """Remove a checkpoint's files, and its folder if it is then empty."""
    if place.is_symlink() or not place.is_dir():
        return
    for name in _CHECKPOINT:
        (place / name).unlink(missing_ok=True)
    with suppress(OSError):
        place.rmdir()


def _remaining(stages: Sequence[TrainingStage], done: int) -> Iterator[tuple[int, TrainingStage]]:
    """Yield the remaining updates as (number, stage).

    The first update of a training has number 0.
    """
    first = 0
    for stage in stages:
        for step in range(max(first, done), first + stage.steps):
            yield step, stage
        first += stage.steps


def _adamw(model: nn.Module, optimization: Optimization) -> torch.optim.AdamW:
    """Return the AdamW optimizer. Vectors, such as norm weights, have no weight decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": optimization.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=optimization.peak_lr,
        betas=optimization.betas,
        fused=True,
    )


def _save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, at: TrainingProgress
) -> None:
    """Write a checkpoint to a temporary folder, rename it, and then remove earlier checkpoints."""
    place = folder / f"step-{at.step:07d}"
    part = place.with_suffix(".part")
    _remove_checkpoint(part)
    part.mkdir()
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, part / "model.safetensors")
    moments = {
        f"{name}:{key}": value.contiguous()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    save_file(moments, part / "optimizer.safetensors")
    (part / "state.json").write_text(json.dumps(asdict(at)), encoding="utf-8")
    part.replace(place)
    for old in folder.glob("step-*"):
        if old != place and _STEP.fullmatch(old.name) and _is_checkpoint(old):
            _remove_checkpoint(old)


def _resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, plan: dict[str, int]
) -> TrainingProgress:
    """Load the newest checkpoint, if any, into the model and the optimizer."""
    place = latest_checkpoint(folder)
    if place is None:
        return TrainingProgress(0, 0, 0.0, plan, [])
    at = TrainingProgress(**json.loads(files.read_text(place / "state.json", _MAX_BYTES)))
    if at.plan != plan:
        raise UsageError(
            f"{folder} contains another training: {at.plan}, expected {plan}",
            "use the same recipe, another --out, or --fresh",
        )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in load_file(place / "model.safetensors").items():
            parameters[name].copy_(value)
    for entry, value in load_file(place / "optimizer.safetensors").items():
        name, _, key = entry.rpartition(":")
        optimizer.state[parameters[name]][key] = value.to(parameters[name].device)
    return at


def _read_curve(folder: Path, done: int) -> list[TrainingPoint]:
    """Return the first `done` points of the loss curve.

    Remove later points from the file. A killed run may have written them.
    """
    path = folder / CURVE
    lines = files.read_text(path, _MAX_BYTES).splitlines()[:done] if path.exists() else []
    files.replace(path, "".join(f"{line}\n" for line in lines))
    return [TrainingPoint(**json.loads(line)) for line in lines]

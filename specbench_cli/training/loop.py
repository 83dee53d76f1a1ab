"""One training loop for every model we ship: AdamW, warm-up and cosine, exact stop and resume.

A run is counted in steps, never in seconds: two clean starts give the same loss curve, and so does
a run that was killed and resumed. Checkpoints hold the model, the optimizer and the place in the
data as safetensors and JSON; nothing is pickled.
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
_STEP = re.compile(r"step-\d{7,}(\.part)?")
_CHECKPOINT = frozenset({"model.safetensors", "optimizer.safetensors", "state.json"})
"""Names of a checkpoint's files."""
_BESIDE = re.compile(
    r"made_for\.json|mat\.jsonl|divergence\.jsonl|labels\.safetensors|own-\d{3,}\.jsonl"
)
"""Names of files that trainers write beside the curve and the checkpoints."""
_MOST_BYTES = 256 * files.MB
"""Bytes of a curve or of a checkpoint's state."""
LOST_SECONDS = 300
"""Work that a killed run may lose: where steps are slow, checkpoints are made more often."""


class BatchSource(Protocol):
    """Where batches come from; its state goes into each checkpoint."""

    def batch(self, sequences: int, length: int) -> TrainingBatch:
        """The next batch."""

    def state(self) -> dict[str, Any]:
        """The place in the data, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` gave."""


@dataclass(frozen=True)
class TrainingStage:
    """`steps` updates on batches of `sequences` x `length` tokens of a `source`."""

    steps: int
    sequences: int
    length: int
    loss: Callable[[TrainingBatch], Tensor]
    source: BatchSource


@dataclass(frozen=True)
class Optimization:
    """AdamW and its schedule: linear warm-up to `peak_lr`, then a cosine down to `end_lr`.

    `horizon` is the step at which the cosine ends, if the training stops before that.
    """

    peak_lr: float
    end_lr: float
    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    horizon: int | None = None

    def get_learning_rate(self, step: int, steps: int) -> float:
        """The learning rate of update `step` (from 0) out of `steps`."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        end = self.horizon or steps
        done = (step - self.warmup_steps) / max(1, end - self.warmup_steps)
        return self.end_lr + (self.peak_lr - self.end_lr) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class StagePlan:
    """A stretch of training: `steps` updates of `sequences` x `length` tokens.

    towards: the `text` (cross-entropy), the finished `target` (KL), or `exits` (early ones too).
    reads: the `corpus`; most of what is `hard` for the target, in all wordings or in the `open`
        ones alone; or the target's own `replies`.
    """

    steps: int
    sequences: int
    length: int
    objective: Literal["text", "target", "exits"] = "text"
    data: Literal["corpus", "open", "hard", "replies"] = "corpus"

    def make_stage(
        self, loss: Callable[[TrainingBatch], Tensor], source: BatchSource
    ) -> TrainingStage:
        """Return the stage with its loss and its source of batches."""
        return TrainingStage(self.steps, self.sequences, self.length, loss, source)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long, on what and how fast a model called `name` learns.

    horizon: where the learning rate would reach its end, for a training that stops before.
    """

    name: str
    stages: tuple[StagePlan, ...]
    peak_lr: float
    warmup_steps: int = 100
    horizon: int | None = None

    @property
    def tokens(self) -> int:
        """How many it reads."""
        return sum(s.steps * s.sequences * s.length for s in self.stages)

    @property
    def optimization(self) -> Optimization:
        """The optimizer and its learning rates, which end at a twentieth of the peak."""
        end_lr = 0.05 * self.peak_lr
        return Optimization(self.peak_lr, end_lr, self.warmup_steps, horizon=self.horizon)

    def scale_steps(self, factor: float) -> Self:
        """The same with its steps and warm-up multiplied, at least one of each."""
        return replace(
            self,
            stages=tuple(replace(s, steps=max(1, round(s.steps * factor))) for s in self.stages),
            warmup_steps=max(1, round(self.warmup_steps * factor)),
            horizon=None if self.horizon is None else max(1, round(self.horizon * factor)),
        )

    def with_batch_size(self, sequences: int) -> Self:
        """The same tokens and warm-up, so many sequences an update: the updates are fewer."""
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
        """Two small steps of every stage."""
        stages = tuple(replace(s, steps=2, sequences=2, length=256) for s in self.stages)
        return replace(self, stages=stages, warmup_steps=1, horizon=None)


@dataclass(frozen=True)
class TrainingPoint:
    """One update: its number (from 1) of `steps`, the loss in nats a token, tokens read so far."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens: int


Report = Callable[[str, TrainingPoint], None]
"""Function called after every update, with the name of the model that learns."""


@dataclass(frozen=True)
class TrainingResult:
    """A run so far: its curve, and the seconds spent in it over all its parts, `progress` apart."""

    curve: list[TrainingPoint]
    seconds: float


@dataclass(frozen=True)
class TrainingProgress:
    """What a checkpoint's `state.json` holds; `plan` guards against resuming another run."""

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
    """Run `stages` over `model` in place, continuing from the newest checkpoint in `folder`.

    The folder gets a line of `loss.jsonl` for each step and one checkpoint, replaced every
    `checkpoint_every` steps, after `LOST_SECONDS` at the latest, and at the end.
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
    own = files.open_own(folder / CURVE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    device = next(model.parameters()).device
    with os.fdopen(own, "a", encoding="utf-8", buffering=1) as log, _deterministic(device):
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
            told = time.monotonic()
            progress(point)
            started += time.monotonic() - told
    return TrainingResult(curve, seconds)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On a CPU, make two runs equal: compiled embedding gradients else add up in any order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def claim(folder: Path, facts: dict[str, str]) -> None:
    """Note what a folder's work is for, or refuse to go on with work for something else."""
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
            f"{folder} holds another run: {found}, wanted {facts}", "use another --out, or --fresh"
        )


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a training folder, if any."""
    found = (p for p in folder.glob("step-*") if _STEP.fullmatch(p.name) and p.suffix != ".part")
    return max(found, default=None)


def check_work(folder: Path) -> None:
    """Raise UsageError if a file or folder has a name that training uses and is something else."""
    for each in folder.iterdir():
        if each.name == CURVE:
            own = _is_curve(files.read_own(each) or b"")
        elif _STEP.fullmatch(each.name):
            own = _is_checkpoint(each)
        else:
            continue
        if not own:
            raise UsageError(
                f"{each} is there already, and no training wrote it",
                "give another --out, or move it away",
            )


def has_work(folder: Path) -> bool:
    """Return True if a folder holds a training to go on from.

    Raises:
        UsageError: as `check_work`.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    check_work(folder)
    return latest_checkpoint(folder) is not None or bool(files.read_own(folder / CURVE))


def remove_work(folder: Path) -> None:
    """Remove what a training wrote in its folder; leave other files.

    Raises:
        UsageError: the folder holds no training, but something else.
    """
    claimed = _is_claim(files.read_own(folder / MADE_FOR) or b"")
    names = [each.name for each in folder.iterdir()]
    check_work(folder)
    if names and not claimed and CURVE not in names and not any(map(_STEP.fullmatch, names)):
        raise UsageError(
            f"{folder} contains files of no training, and --fresh would remove them",
            "choose another --out, or move that folder away",
        )
    for name in names:
        if _STEP.fullmatch(name):
            _remove_checkpoint(folder / name)
        elif name == CURVE or _BESIDE.fullmatch(name):
            files.remove_own(folder / name)
    with suppress(OSError):
        folder.rmdir()


def _is_claim(content: bytes) -> bool:
    """Return True if this is a `MADE_FOR`: names and values, all of them text."""
    try:
        found = json.loads(content)
    except ValueError:
        return False
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def _is_curve(content: bytes) -> bool:
    """Return True if every line is a `Point`; the last one may be half written."""
    try:
        for line in content.split(b"\n")[:-1]:
            TrainingPoint(**json.loads(line))
    except (ValueError, TypeError):
        return False
    return b"\n" in content or content[:1] in (b"", b"{")


def _is_checkpoint(place: Path) -> bool:
    """Return True if a folder holds files of a checkpoint alone, and its state unless partial."""
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
    """Remove a checkpoint's files, and its folder if it holds nothing else."""
    if place.is_symlink() or not place.is_dir():
        return
    for name in _CHECKPOINT:
        (place / name).unlink(missing_ok=True)
    with suppress(OSError):
        place.rmdir()


def _remaining(stages: Sequence[TrainingStage], done: int) -> Iterator[tuple[int, TrainingStage]]:
    """The updates still to make, as (number from 0, stage)."""
    first = 0
    for stage in stages:
        for step in range(max(first, done), first + stage.steps):
            yield step, stage
        first += stage.steps


def _adamw(model: nn.Module, optimization: Optimization) -> torch.optim.AdamW:
    """The optimizer; norms do not decay."""
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
    """Write the checkpoint aside, move it into place, and only then drop its predecessors."""
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
    """Load the newest checkpoint, if any, into model and optimizer."""
    place = latest_checkpoint(folder)
    if place is None:
        return TrainingProgress(0, 0, 0.0, plan, [])
    at = TrainingProgress(**json.loads(files.read_text(place / "state.json", _MOST_BYTES)))
    if at.plan != plan:
        raise UsageError(
            f"{folder} holds another run: {at.plan}, wanted {plan}",
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
    """The first `done` points; later ones, made before a kill, are cut off the file."""
    path = folder / CURVE
    lines = files.read_text(path, _MOST_BYTES).splitlines()[:done] if path.exists() else []
    files.replace(path, "".join(f"{line}\n" for line in lines))
    return [TrainingPoint(**json.loads(line)) for line in lines]

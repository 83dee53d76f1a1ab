"""Learning between requests: trainable copies of models, and the memory of a method.

A method may change weights only in `Method.learn`, between two requests. So each request is decoded
with one version of the weights. The method trains its own copies of models, because other methods
use the run's models too.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members

# ---- trainable copies ---------------------------------------------------------------------------


def make_trainable(source: Any, shared: Iterable[Decoder]) -> Any:
    """Return a copy of a model. The weights of the copy are parameters of its `module`.

    A model that computes with the weights of its `module` is copied. Any other model must have a
    function `trainable()` that returns the copy. If this copy does not compute with its `module`,
    it must also have a function `publish()`, which takes over new weights from `module`.

    Args:
        source: A decoder or a trained module.
        shared: Decoders of the run. They are not copied, even if the source refers to them.

    Raises:
        MethodFault: The model has no torch module.
    """
    from specbench_cli.engine.models.fused import FusedDecoder
    from specbench_cli.engine.models.load import FusedCopy  # imports transformers, which is slow

    with torch.inference_mode(False):  # parameters made in that mode take no gradient
        if isinstance(source, FusedDecoder):
            made: Any = FusedCopy(source)
        elif isinstance(getattr(source, "module", None), nn.Module):
            made = copy.deepcopy(source, {id(each): each for each in shared if each is not source})
        elif hasattr(source, "trainable"):
            made = source.trainable()
        else:
            raise MethodFault(f"{_get_name(source)} cannot be trained: it has no torch module")
        made.module.requires_grad_(True)
        made.ran = 0  # the copy counts its own forwards
        made.module.register_forward_pre_hook(_count_call)
    return made


def count_calls(made: Any) -> int:
    """Return how often the torch module of a trainable copy was called."""
    return int(made.module.__dict__.get("called", 0))


def _count_call(module: nn.Module, _: Any) -> None:
    module.__dict__["called"] = module.__dict__.get("called", 0) + 1


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Copy of the contents of a `Memory` at one time."""

    kept: Mapping[str, Any]
    weights: Mapping[Hashable, Mapping[str, Tensor]]
    version: int


class Memory(dict[str, Any]):
    """Data that a method keeps between the prompts of one repeat.

    It is a dict that the method fills. It also stores the method's trainable copies of models. A
    copy stays the same object while its weights change, so an optimizer in the dict stays valid.

    Attributes:
        version: Number of times the method has learned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self._copies: dict[Hashable, Any] = {}
        self._make: dict[Hashable, Callable[[], Any]] = {}
        self._published_versions: dict[Hashable, tuple[tuple[str, int], ...]] = {}

    def get_copy(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return the trainable copy with this name. Create it with `make` at first use."""
        if name not in self._copies:
            self._copies[name], self._make[name] = make(), make
            self._published_versions[name] = _weight_versions(self._copies[name])
        return self._copies[name]

    @property
    def copies(self) -> tuple[Any, ...]:
        """The trainable copies created so far."""
        return tuple(self._copies.values())

    def save(self) -> MemorySnapshot:
        """Return a snapshot of the contents, for `restore`."""
        weights = {
            name: {key: tensor.clone() for key, tensor in made.module.state_dict().items()}
            for name, made in self._copies.items()
        }
        return MemorySnapshot(self._copy_items(self), weights, self.version)

    def restore(self, saved: MemorySnapshot) -> None:
        """Restore a snapshot. Trainable copies created after the snapshot get their initial
        weights.
        """
        self.clear()
        self.update(self._copy_items(saved.kept))
        self.version = saved.version
        for name, made in self._copies.items():
            weights = saved.weights.get(name)
            if weights is None:
                weights = self._make[name]().module.state_dict()
            made.module.load_state_dict(weights)
        self.publish()

    def check(self) -> None:
        """Raise MethodFault if the weights of a trainable copy have changed since the last
        `publish`.
        """
        for name, made in self._copies.items():
            if _weight_versions(made) != self._published_versions[name]:
                raise MethodFault(
                    f"the method changed the weights of {_get_name(made)} outside of `learn`",
                    "collect training data in `observe`, and train in `learn`",
                )

    def publish(self) -> None:
        """Let the trainable copies use the current weights of their modules for drafting."""
        for name, made in self._copies.items():
            if hasattr(made, "publish"):
                with torch.no_grad():
                    made.publish()
            made.module.eval().zero_grad(set_to_none=True)
            self._published_versions[name] = _weight_versions(made)

    def _copy_items(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """Return a deep copy of the items. Trainable copies and their parameters are not
        duplicated.
        """
        fixed = [*self._copies.values(), *self._parameters()]
        return copy.deepcopy(dict(items), {id(each): each for each in fixed})

    def _parameters(self) -> Iterator[nn.Parameter]:
        for made in self._copies.values():
            yield from made.module.parameters()


def _get_name(source: Any) -> str:
    return str(getattr(source, "name", type(source).__name__))


def _weight_versions(made: Any) -> tuple[tuple[str, int], ...]:
    """Return torch's write count of each weight of a trainable copy, to detect changes."""
    return tuple((name, weight._version) for name, weight in made.module.named_parameters())


# ---- topics -------------------------------------------------------------------------------------


@renamed_members(of="classify")
class Topics:
    """Topic classifier for prompts: naive Bayes over the tokens of earlier prompts."""

    def __init__(self) -> None:
        self._prompts = Counter[str]()
        self._tokens: dict[str, Counter[int]] = {}

    def classify(self, ids: Sequence[int]) -> str:
        """Return the most likely topic of a prompt. Before the first `learn`, return ""."""
        if len(self._tokens) < 2:
            return next(iter(self._tokens), "")
        known = len(set().union(*self._tokens.values(), ids))

        def likelihood(topic: str) -> float:
            seen = self._tokens[topic]
            log_total = math.log(seen.total() + known)  # add-one smoothing
            log_likelihood = sum(math.log(seen[token] + 1) - log_total for token in ids)
            return math.log(self._prompts[topic]) + log_likelihood

        return max(self._tokens, key=likelihood)

    def learn(self, ids: Sequence[int], topic: str) -> None:
        """Add the tokens of a prompt and its topic to the training data."""
        self._prompts[topic] += 1
        self._tokens.setdefault(topic, Counter()).update(ids)


# ---- learning after a request -------------------------------------------------------------------


class LearnerSession(Protocol):
    """The part of a session that the function `learn` of this module uses."""

    device: torch.device
    memory: Memory


class Learner(Protocol):
    """The part of a method that the function `learn` of this module uses."""

    name: ClassVar[str]
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]]

    def learn(self, session: Any) -> None:
        """Learn from a request that has ended."""


def learn(method: Learner, session: LearnerSession) -> int:
    """Let a method learn from a request that has ended. The next request uses the new weights.

    Returns:
        Duration of learning in nanoseconds. It delays the next request.

    Raises:
        MethodFault: The method keeps no data between prompts, or it changed weights before `learn`.
    """
    memory = session.memory
    if method.state_scope == "prompt":
        raise MethodFault(
            f"{method.name} defines `learn`, but its `state_scope` is 'prompt'",
            'set `state_scope = "run"` in the class',
        )
    try:
        memory.check()
        start = _synchronized_ns(session.device)
        with torch.inference_mode(False), torch.enable_grad():
            method.learn(session)
    finally:  # also after an error, so that the next request starts in a valid state
        memory.publish()
        memory.version += 1
    return _synchronized_ns(session.device) - start


def _synchronized_ns(device: torch.device) -> int:
    """Wait until the device has finished its work. Return the current time in nanoseconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()

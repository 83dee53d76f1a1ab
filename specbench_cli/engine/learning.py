"""Learning between requests: what a row keeps from prompt to prompt, and when its weights may
change.

A method learns in `Method.learn`, between two requests and nowhere else, so that a request is
decoded by one version of whatever drafts for it. What it may train is a copy that belongs to its
row alone: the run's own models are other rows' too, and one of them is the target.
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

# ---- a copy that may be trained -----------------------------------------------------------------


def make_trainable(source: Any, shared: Iterable[Decoder]) -> Any:
    """A copy of a model of the run whose weights are its own, as parameters of its `module`.

    What computes with the weights of its `module` is copied as it is. Anything else makes the copy
    itself, by a method `trainable()`; the copy has a `publish()` if it takes up what its module has
    learnt only then.

    Args:
        source: a decoder or a trained module.
        shared: the run's decoders, which are not copied along where the source reads from them.
    Raises:
        MethodFault: it has no torch module.
    """
    from specbench_cli.engine.models.fused import FusedDecoder
    from specbench_cli.engine.models.load import FusedCopy  # which takes long: transformers

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
        made.ran = 0  # it is another model than its source
        made.module.register_forward_pre_hook(_count_call)
    return made


def count_calls(made: Any) -> int:
    """How often the module of a copy was called."""
    return int(made.module.__dict__.get("called", 0))


def _count_call(module: nn.Module, _: Any) -> None:
    module.__dict__["called"] = module.__dict__.get("called", 0) + 1


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """What a `Memory` held at some time."""

    kept: Mapping[str, Any]
    weights: Mapping[Hashable, Mapping[str, Tensor]]
    version: int


class Memory(dict[str, Any]):
    """What one row keeps from prompt to prompt of a pass.

    The items are the method's. Beside them are the copies that it trains, which stay the same
    objects while their weights change: optimizers among the items hold on to their parameters.

    Attributes:
        version: how often it has learnt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self._copies: dict[Hashable, Any] = {}
        self._make: dict[Hashable, Callable[[], Any]] = {}
        self._published_versions: dict[Hashable, tuple[tuple[str, int], ...]] = {}

    def get_copy(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """The row's copy of that name, made at first use."""
        if name not in self._copies:
            self._copies[name], self._make[name] = make(), make
            self._published_versions[name] = _weight_versions(self._copies[name])
        return self._copies[name]

    @property
    def copies(self) -> tuple[Any, ...]:
        """The copies made so far."""
        return tuple(self._copies.values())

    def save(self) -> MemorySnapshot:
        """All of it, to come back to."""
        weights = {
            name: {key: tensor.clone() for key, tensor in made.module.state_dict().items()}
            for name, made in self._copies.items()
        }
        return MemorySnapshot(self._copy_items(self), weights, self.version)

    def restore(self, saved: MemorySnapshot) -> None:
        """Return to what was saved; copies made since are as they were at first."""
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
        """Raise MethodFault if weights have changed since they were last published."""
        for name, made in self._copies.items():
            if _weight_versions(made) != self._published_versions[name]:
                raise MethodFault(
                    f"the weights of {_get_name(made)}, its own copy, changed outside of `learn`",
                    "a request is decoded by one version: collect in `observe`, train in `learn`",
                )

    def publish(self) -> None:
        """Have the copies draft by what their modules now hold."""
        for name, made in self._copies.items():
            if hasattr(made, "publish"):
                with torch.no_grad():
                    made.publish()
            made.module.eval().zero_grad(set_to_none=True)
            self._published_versions[name] = _weight_versions(made)

    def _copy_items(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """The items, deeply, but for the copies and their parameters."""
        fixed = [*self._copies.values(), *self._parameters()]
        return copy.deepcopy(dict(items), {id(each): each for each in fixed})

    def _parameters(self) -> Iterator[nn.Parameter]:
        for made in self._copies.values():
            yield from made.module.parameters()


def _get_name(source: Any) -> str:
    return str(getattr(source, "name", type(source).__name__))


def _weight_versions(made: Any) -> tuple[tuple[str, int], ...]:
    """How often each of a copy's weights was written; a tensor counts that itself."""
    return tuple((name, weight._version) for name, weight in made.module.named_parameters())


# ---- which copy it is ---------------------------------------------------------------------------


class Topics:
    """Which topic a prompt is of, by its tokens: naive Bayes over earlier prompts, whose topics are
    told after them."""

    def __init__(self) -> None:
        self._prompts = Counter[str]()
        self._tokens: dict[str, Counter[int]] = {}

    def classify(self, ids: Sequence[int]) -> str:
        """The likeliest topic of a prompt; "" while none was told."""
        if len(self._tokens) < 2:
            return next(iter(self._tokens), "")
        known = len(set().union(*self._tokens.values(), ids))

        def likelihood(topic: str) -> float:
            seen = self._tokens[topic]
            every = math.log(seen.total() + known)  # each token counted once more, unseen ones too
            said = sum(math.log(seen[token] + 1) - every for token in ids)
            return math.log(self._prompts[topic]) + said

        return max(self._tokens, key=likelihood)

    def learn(self, ids: Sequence[int], topic: str) -> None:
        """Take up a prompt whose topic is told."""
        self._prompts[topic] += 1
        self._tokens.setdefault(topic, Counter()).update(ids)


# ---- when it happens ----------------------------------------------------------------------------


class LearnerSession(Protocol):
    """The part of a session that this needs."""

    device: torch.device
    memory: Memory


class Learner(Protocol):
    """The part of a method that this drives."""

    name: ClassVar[str]
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]]

    def learn(self, session: Any) -> None:
        """Learn from a request that has ended."""


def learn(method: Learner, session: LearnerSession) -> int:
    """Have a method learn from a request that has ended; the next one sees a new version.

    Returns:
        nanoseconds that it took: what it delays the next request by.
    Raises:
        MethodFault: the method keeps nothing between prompts, or has changed weights before.
    """
    memory = session.memory
    if method.state_scope == "prompt":
        raise MethodFault(
            f"{method.name} learns between prompts and says that it keeps nothing",
            'give the class `state_scope = "run"`',
        )
    try:
        memory.check()
        start = _synchronized_ns(session.device)
        with torch.inference_mode(False), torch.enable_grad():
            method.learn(session)
    finally:  # after a fault too, so that the next request is judged by itself
        memory.publish()
        memory.version += 1
    return _synchronized_ns(session.device) - start


def _synchronized_ns(device: torch.device) -> int:
    """The time once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()

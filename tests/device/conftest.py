"""A CUDA device that is not there: fake tensors say where tensors are, shadows what is in them.

torch's fake tensors know a device, a shape and a dtype, and refuse to be mixed with tensors of
another device. Here each has a shadow beside it, a tensor on the CPU that everything is done on as
well: the host is answered with true numbers, and a decode gives true tokens.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from specbench_cli import registry
from specbench_cli.audit.models.observed_session import nominal_cost
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.engine import host
from specbench_cli.engine.drafting import levels
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models import meter
from specbench_cli.engine.models.cuda.graphs import CudaGraphs
from specbench_cli.engine.models.fused import FusedStack
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Forward, Step
from specbench_cli.engine.verify import tree
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

CPU, FAR = torch.device("cpu"), torch.device("cuda", 0)
CAPACITY = 128
GREEDY = Sampling()
BEGINNING = (17, 4, 60, 33, 8, 17, 4)
KEPT = (host.cached_ids, levels._positions, levels._mask, tree.build_tree_mask)
"""What keeps tensors by their device: no fake one may outlive its mode there."""

ATEN = torch.ops.aten
LENIENT = {ATEN.copy_.default, ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default}
"""What takes a tensor that was left on the CPU too, by a transfer that nobody asked for."""

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
SEEN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""What the host must see numbers for."""

WHOLE = {
    ATEN._fused_rms_norm.default,
    ATEN._scaled_dot_product_attention_math.default,
    ATEN.flatten.using_ints,
    ATEN.linear.default,
    ATEN.log_softmax.int,
    ATEN.matmul.default,
    ATEN.mT.default,
    ATEN.reshape.default,
    ATEN.rms_norm.default,
    ATEN.scaled_dot_product_attention.default,
    ATEN.softmax.int,
    ATEN.to.dtype,
    ATEN.type_as.default,
}
"""What is made of others none of which waits, or goes to another device, whatever it is given."""

FUSED = {ATEN.lstm_cell.default}
"""What is made of kernels that a CPU, and so a shadow, has none of."""


class WrongDevice(RuntimeError):
    """A tensor left on the CPU, or one that is fetched from the device in passing."""


class FarMode(TorchDispatchMode):
    """While entered, tensors can be made on `FAR`.

    Attributes:
        loading: whether all may be read that is there, as often as one likes: models are made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loading = False
        self._fake = FakeTensorMode()

    def __enter__(self) -> Any:
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        given = {id(tensor) for tensor in tensors if isinstance(tensor, FakeTensor)}
        if not given and not any(isinstance(leaf, torch.device) and leaf == FAR for leaf in leaves):
            return _done(func, args, kwargs)
        if (
            _plain(func)
            and all(id(tensor) in given and tensor.fake_device == FAR for tensor in tensors)
            and not any(isinstance(leaf, torch.device) for leaf in leaves)
        ):
            return self._there(func, args, kwargs, tensors)
        if len(given) < len(set(map(id, tensors))):  # some are on the CPU
            if given and func in LENIENT:
                raise WrongDevice(f"{func}: a tensor was left on the CPU")
            if not given and not self.loading and not _argument(func, args, kwargs, "non_blocking"):
                raise WrongDevice(f"{func} waits until what it sends is on {FAR}: `host.send`")
            args, kwargs = tree_map(_known, (args, kwargs))
        try:
            # The generator is the shadows'; fakes need none.
            settings = {key: kwargs[key] for key in kwargs if key != "generator"}
            out = func(*args, **settings)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.loading:
                raise
            return tree_map(_lifted, _done(func, args, kwargs))
        shadows = _leaves(_done(func, args, kwargs))
        for fake, shadow in zip(_leaves(out), shadows, strict=True):
            if not isinstance(fake, FakeTensor) or id(fake) in given:
                continue
            if fake.device != FAR:
                if self.loading:
                    return shadow
                raise WrongDevice(f"{func} fetches a tensor from {FAR}")
            fake.shadow = shadow
        return out

    def _there(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any]) -> Any:
        """What an operation gives whose tensors are all on `FAR`, and which names no device: that
        is there too, and as large as its shadow, which spares the fakes' own bookkeeping."""
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        fakes = {id(tensor.shadow): tensor for tensor in tensors}
        out = _done(func, args, kwargs)
        if isinstance(out, list | tuple):
            return type(out)(self._wrapped(each, fakes) for each in out)
        return self._wrapped(out, fakes)

    def _wrapped(self, out: Any, fakes: Mapping[int, FakeTensor]) -> Any:
        """A shadow as a tensor on the device; of what an operation wrote in place, the same."""
        if not isinstance(out, Tensor):
            return out
        if id(out) in fakes:
            return fakes[id(out)]
        with unset_fake_temporarily(), torch.inference_mode(out.is_inference()):
            meta = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
            fake: Any = FakeTensor(self._fake, meta, FAR)
        fake.shadow = out
        return fake


@cache
def _composite(func: Any) -> Any:
    """Whether an operation is made of others that must be looked at."""
    return func not in WHOLE and func.has_kernel_for_dispatch_key(COMPOSITE)


@cache
def _plain(func: Any) -> bool:
    """Whether what an operation gives is as large as its shadow says, without torch's help."""
    return func.namespace == "aten" and func not in FUSED and not SEEN & {*func.tags}


def _leaves(given: Any) -> list[Any]:
    """All that is in lists, tuples and dictionaries: an operation is given nothing else that holds
    anything, and torch's own trees, which know more, take most of the time."""
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, list | tuple):
        return [given]
    found = []
    for part in given:
        if isinstance(part, list | tuple | dict):
            found += _leaves(part)
        else:
            found.append(part)
    return found


def _done(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, of shadows and of what is on the CPU."""
    with unset_fake_temporarily():
        return func(*map(_real, args), **{key: _real(kwargs[key]) for key in kwargs})


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """What an operation is given for an argument, if anything."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return kwargs.get(name, args[at] if at < len(args) else None)


def _real(given: Any) -> Any:
    if isinstance(given, FakeTensor):
        return given.shadow
    if isinstance(given, list | tuple):
        return [_real(part) for part in given]
    return CPU if isinstance(given, torch.device) else given


def _known(given: Any) -> Any:
    """A tensor on the CPU as a fake that says so."""
    if not isinstance(given, Tensor) or isinstance(given, FakeTensor):
        return given
    fake: Any = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=CPU)
    with unset_fake_temporarily():
        fake.shadow = given.clone()  # what is made of it on the device is another tensor
    return fake


def _lifted(given: Any) -> Any:
    """A shadow as a tensor on the device."""
    if not isinstance(given, Tensor):
        return given
    fake: Any = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=FAR)
    fake.shadow = given
    return fake


@contextmanager
def _guarded() -> Iterator[None]:
    """Have torch take `FAR` for a device: a build without CUDA has no guard for its kind.

    Fake tensors need none that does anything; torch sets one itself where it was built with CUDA,
    and that of the meta device will do.
    """
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    kinds = torch._C._autograd.DeviceType  # type: ignore[attr-defined]
    name = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = kinds.CUDA.value, kinds.Meta.value
    missing = guards[cuda] is None
    if missing:
        guards[cuda] = guards[meta]
    yield
    if missing:
        guards[cuda] = None


# ---- decoding there -----------------------------------------------------------------------------


Places = Mapping[str, Path]


class Chance(SeededRandom):
    """Draws of a generator on the CPU, for tensors of any device; counted."""

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling.seed, "far/0", 0, 1, CPU)
        self.draws = self.tests = 0

    def categorical(self, p: Tensor) -> Tensor:
        self.draws += 1
        return super().categorical(p)

    def bernoulli(self, a: Tensor) -> Tensor:
        self.tests += 1
        return super().bernoulli(a)


class Uncopied(Memory):
    """In place of a copy that learns, what it is a copy of: making it is loading, and no step."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self._decoder = decoder

    def get_copy(self, name: Any, make: Any) -> Any:
        return self._decoder


@dataclass(frozen=True)
class Told:
    """A step, and what it took.

    room, left: levels of use before and behind it; waits: who waited for the device, by function;
    clocks: how often the device's clock was; draws, tests: what was asked of chance.
    """

    step: Step
    room: int
    waits: tuple[str, ...]
    clocks: int
    draws: int
    tests: int
    left: int


class Far:
    """Models on `FAR`, and on the CPU, of the same weights; and decoding with them.

    Args:
        places: their checkpoints, by role.

    Attributes:
        mode: what those on `FAR` are used in.
        waited: who waited for the device so far, by function.
        clocks: how often the device's clock was waited for.
    """

    def __init__(self, places: Places) -> None:
        self.mode, self.waited, self.clocks = FarMode(), list[str](), 0
        self._places = places
        self._made: dict[Hashable, Workspace] = {}
        # What was said once is said again, so that there is something to look up.
        self.prompt = BEGINNING
        said, _ = self.decode("vanilla", device=CPU)
        self.prompt = (*BEGINNING, *said, *BEGINNING)

    @contextmanager
    def on(self, device: torch.device = FAR, *, loading: bool = False) -> Iterator[None]:
        """Work on a device, as in a step; or as while models are made."""
        self.mode.loading = loading
        with self.mode if device == FAR else nullcontext():
            yield

    def workspace(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        places: Places | None = None,
        hosted: bool = False,
        recorded: bool = False,
    ) -> Workspace:
        """The models, made at first use: fused, or transformers' own; `recorded` ones replay their
        forwards."""
        places = places or self._places
        key = (device, dtype, tuple(places.values()), hosted, recorded)
        if key not in self._made:
            with self.on(device, loading=True):
                decoders = {
                    role: load_decoder(
                        place, name=role, device=device, dtype=dtype, host_module=hosted
                    )
                    for role, place in places.items()
                }
            record = self.record if recorded else lambda model: model
            for decoder in decoders.values():
                record(decoder)
            self._made[key] = Workspace(
                decoders,
                CAPACITY,
                load_artifact=lambda wanted: record(wanted.kind.random(decoders)),
                costs=nominal_cost,
            )
        return self._made[key]

    def decode(
        self,
        name: str,
        params: dict[str, Any] | None = None,
        sampling: Sampling = GREEDY,
        *,
        device: torch.device = FAR,
        dtype: torch.dtype = torch.float32,
        budget: int = 10,
        recording: Sequence[int] | None = None,
        places: Places | None = None,
        hosted: bool = False,
        recorded: bool = False,
    ) -> tuple[list[int], list[Told]]:
        """Decode by a method: the output, and its steps, of which the first waited in prefill."""
        kind = registry.load(name)
        method = kind(kind.Params(**params or {}))
        workspace = self.workspace(device, dtype, places, hosted, recorded)
        with self.on(device, loading=True):
            for wanted in method.artifacts():
                workspace.artifact(wanted)
        chance, told = Chance(sampling), list[Told]()
        request = Request("far/0", 0, self.prompt, StopRule(frozenset(), budget))
        with self.on(device):
            session = Session(
                *(workspace, request, sampling),
                random=chance,
                recording=recording,
                memory=Uncopied(workspace.decoders["draft"]),
            )
            room, before = budget - 2, (len(self.waited), self.clocks, 0, 0)
            for step in method.generate(session):
                after = (len(self.waited), self.clocks, chance.draws, chance.tests)
                _, *counts = (b - a for a, b in zip(before, after, strict=True))
                waits = tuple(self.waited[before[0] :])
                told.append(Told(step, room, waits, *counts, left=session.max_draft_length()))
                room, before = told[-1].left, after
            return list(session.output()), told

    def record(self, model: Any) -> Any:
        """Have forwards recorded: on a device that is not there, the body is run again."""
        if isinstance(model, FusedStack):
            model.record(lambda body: body)
        return model

    def numbers(self, tensor: Any) -> Any:
        """What is on `FAR`."""
        return tensor.shadow.tolist()


class Clock(meter.HostClock):
    """The device's clock: it counts who waits for it."""

    def __init__(self, far: Far) -> None:
        super().__init__()
        self._far = far

    def resolve(self, forwards: Sequence[Forward]) -> None:
        self._far.clocks += 1


class Real(Far):
    """The same on a device that is there; torch itself says if a step waits where it should not."""

    @contextmanager
    def on(self, device: torch.device = FAR, *, loading: bool = False) -> Iterator[None]:
        if device == CPU:
            yield
            return
        self._waiting(allowed=loading)
        try:
            yield
        finally:
            self._waiting(allowed=True)

    def record(self, model: Any) -> Any:
        """See `Far`: as CUDA graphs."""
        if isinstance(model, FusedStack):
            model.record(CudaGraphs(FAR))
        return model

    def numbers(self, tensor: Tensor) -> Any:
        self._waiting(allowed=True)
        found = tensor.tolist()
        self._waiting(allowed=False)
        return found

    @staticmethod
    def _waiting(*, allowed: bool) -> None:
        """Have torch raise where a wait is not allowed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this a prototype
            torch.cuda.set_sync_debug_mode("default" if allowed else "error")


@contextmanager
def _watched(made: Far) -> Iterator[None]:
    """Note who waits."""

    def wait(tensor: Tensor) -> Any:
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] == host.__name__:
            frame = cast(FrameType, frame.f_back)
        made.waited.append(frame.f_code.co_name)
        return made.numbers(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "wait", wait)
        patch.setattr(meter, "CudaClock", lambda _: Clock(made))
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """A target of two layers, and a draft that is the first, which says most."""
    folder = tmp_path_factory.mktemp("far")
    target = copy.deepcopy(create_tiny_models().oracle)
    for part in (target.model.layers[1].self_attn.o_proj, target.model.layers[1].mlp.down_proj):
        part.weight *= 0.3
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    draft = type(target)(config)
    draft.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return {role: folder / role for role in ("target", "draft")}


@pytest.fixture(scope="module")
def far(places: Places) -> Iterator[Far]:
    """The device that is not there."""
    made = Far(places)
    with _watched(made), _guarded():
        for kept in KEPT:
            kept.cache_clear()
        yield made
        for kept in KEPT:
            kept.cache_clear()


@pytest.fixture(scope="module")
def real(places: Places) -> Iterator[Far]:
    """The device, where there is one."""
    made = Real(places)
    with _watched(made):
        yield made

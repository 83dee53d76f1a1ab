"""Simulated CUDA device: fake tensors know their device, and CPU tensors hold their values.

torch's fake tensors have a device, a shape and a dtype, and refuse to be mixed with tensors of
another device. Here each fake tensor has a shadow: a CPU tensor on which every operation is also
run. So the host can read true numbers, and a decode gives true tokens.
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
"""Caches that keep tensors by device. They are cleared because a fake tensor must not outlive its
mode."""

ATEN = torch.ops.aten
LENIENT = {ATEN.copy_.default, ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default}
"""Operations that accept a CPU tensor among device tensors by an implicit transfer."""

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
SEEN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Operations that need a tensor's values on the host."""

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
"""Composite operations whose parts neither wait nor change the device."""

FUSED = {ATEN.lstm_cell.default}
"""Operations with CUDA kernels that have no CPU kernel, so that a shadow cannot run them."""


class WrongDevice(RuntimeError):
    """A tensor was left on the CPU, or is fetched from the device implicitly."""


class FarMode(TorchDispatchMode):
    """Mode in which tensors can be created on `FAR`, the simulated device.

    While `loading` is true, tensors may be read and sent freely, because models are being loaded.
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
        leaves = _list_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fakes = {id(tensor) for tensor in tensors if isinstance(tensor, FakeTensor)}
        if not fakes and not any(isinstance(leaf, torch.device) and leaf == FAR for leaf in leaves):
            return _compute(func, args, kwargs)
        if (
            _plain(func)
            and all(id(tensor) in fakes and tensor.fake_device == FAR for tensor in tensors)
            and not any(isinstance(leaf, torch.device) for leaf in leaves)
        ):
            return self._run_on_shadows(func, args, kwargs, tensors)
        if len(fakes) < len(set(map(id, tensors))):  # some tensors are on the CPU
            if fakes and func in LENIENT:
                raise WrongDevice(f"{func}: a tensor was left on the CPU")
            if (
                not fakes
                and not self.loading
                and not _get_argument(func, args, kwargs, "non_blocking")
            ):
                raise WrongDevice(f"{func} waits until what it sends is on {FAR}: `host.send`")
            args, kwargs = tree_map(_fake_of_cpu, (args, kwargs))
        try:
            # Only the shadows use the generator.
            settings = {key: kwargs[key] for key in kwargs if key != "generator"}
            out = func(*args, **settings)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.loading:
                raise
            return tree_map(_fake_of_device, _compute(func, args, kwargs))
        shadows = _list_leaves(_compute(func, args, kwargs))
        for fake, shadow in zip(_list_leaves(out), shadows, strict=True):
            if not isinstance(fake, FakeTensor) or id(fake) in fakes:
                continue
            if fake.device != FAR:
                if self.loading:
                    return shadow
                raise WrongDevice(f"{func} fetches a tensor from {FAR}")
            fake.shadow = shadow
        return out

    def _run_on_shadows(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any]) -> Any:
        """Run an operation whose tensors are all on `FAR`, and which names no device.

        The result is on `FAR` with its shadow's shape. This avoids the slow dispatch of fake
        tensors.
        """
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        fakes = {id(tensor.shadow): tensor for tensor in tensors}
        out = _compute(func, args, kwargs)
        if isinstance(out, list | tuple):
            return type(out)(self._wrap(each, fakes) for each in out)
        return self._wrap(out, fakes)

    def _wrap(self, out: Any, fakes: Mapping[int, FakeTensor]) -> Any:
        """Return a shadow as a tensor on the device. An in-place operation returns its own
        tensor."""
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
    """Return True if an operation consists of others that must be checked."""
    return func not in WHOLE and func.has_kernel_for_dispatch_key(COMPOSITE)


@cache
def _plain(func: Any) -> bool:
    """Return True if the shape of the shadow is the shape of an operation's result."""
    return func.namespace == "aten" and func not in FUSED and not SEEN & {*func.tags}


def _list_leaves(value: Any) -> list[Any]:
    """Return everything in nested lists, tuples and dictionaries.

    Operations take no other containers. torch's own tree functions are too slow here.
    """
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return [value]
    found = []
    for part in value:
        if isinstance(part, list | tuple | dict):
            found += _list_leaves(part)
        else:
            found.append(part)
    return found


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on shadows and CPU tensors."""
    with unset_fake_temporarily():
        return func(*map(_get_shadow, args), **{key: _get_shadow(kwargs[key]) for key in kwargs})


def _get_argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return the value of an operation's argument, or None."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return kwargs.get(name, args[at] if at < len(args) else None)


def _get_shadow(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.shadow
    if isinstance(value, list | tuple):
        return [_get_shadow(part) for part in value]
    return CPU if isinstance(value, torch.device) else value


def _fake_of_cpu(value: Any) -> Any:
    """Return a fake tensor on the CPU, with the tensor's copy as shadow."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    fake: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
    with unset_fake_temporarily():
        fake.shadow = value.clone()  # a copy: the result on the device is another tensor
    return fake


def _fake_of_device(value: Any) -> Any:
    """Return a fake tensor on the device, with the tensor as shadow."""
    if not isinstance(value, Tensor):
        return value
    fake: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=FAR)
    fake.shadow = value
    return fake


@contextmanager
def _install_device_guard() -> Iterator[None]:
    """Make torch accept `FAR` as a device: a build without CUDA has no device guard for it.

    Fake tensors need only a guard that does nothing, such as the meta device's. A torch build with
    CUDA sets one itself.
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


# ---- decoding on the device ---------------------------------------------------------------------


Places = Mapping[str, Path]


class CountedRandom(SeededRandom):
    """Random source with a CPU generator for tensors of any device. It counts its draws and
    tests."""

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling.seed, "far/0", 0, 1, CPU)
        self.draws = self.tests = 0

    def categorical(self, p: Tensor) -> Tensor:
        self.draws += 1
        return super().categorical(p)

    def bernoulli(self, a: Tensor) -> Tensor:
        self.tests += 1
        return super().bernoulli(a)


class SharedCopies(Memory):
    """Memory that returns the model itself instead of a copy for learning.

    Copying a model would count as loading during a step.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self._decoder = decoder

    def get_copy(self, name: Any, make: Any) -> Any:
        return self._decoder


@dataclass(frozen=True)
class StepTrace:
    """A step, with its waits and random draws.

    `room` and `left` are the usable draft levels before and after the step. `waits` lists the
    functions that waited for the device, and `clocks` counts waits for the device's clock. `draws`
    and `tests` count the random draws and acceptance tests.
    """

    step: Step
    room: int
    waits: tuple[str, ...]
    clocks: int
    draws: int
    tests: int
    left: int


class SimulatedDevice:
    """Models with the same weights on `FAR` and on the CPU, and decoding with them.

    `places` are the checkpoints by role. `mode` is the mode in which models on `FAR` run. `waited`
    lists the functions that waited for the device so far. `clocks` counts waits for the device's
    clock.
    """

    def __init__(self, places: Places) -> None:
        self.mode, self.waited, self.clocks = FarMode(), list[str](), 0
        self._places = places
        self._workspaces: dict[Hashable, Workspace] = {}
        # Repeat an output of the model in the prompt, so that methods find it by lookup.
        self.prompt = BEGINNING
        output, _ = self.decode("vanilla", device=CPU)
        self.prompt = (*BEGINNING, *output, *BEGINNING)

    @contextmanager
    def on(self, device: torch.device = FAR, *, loading: bool = False) -> Iterator[None]:
        """Run operations on a device, as in a step, or with `loading` as while models are
        loaded."""
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
        """Return the models, loaded at first use: fused, or transformers' own if `hosted`.

        `recorded` models replay their forwards.
        """
        places = places or self._places
        key = (device, dtype, tuple(places.values()), hosted, recorded)
        if key not in self._workspaces:
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
            self._workspaces[key] = Workspace(
                decoders,
                CAPACITY,
                load_artifact=lambda wanted: record(wanted.kind.random(decoders)),
                costs=nominal_cost,
            )
        return self._workspaces[key]

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
    ) -> tuple[list[int], list[StepTrace]]:
        """Decode with a method, and return the output and its steps.

        The first step includes the waits of prefill.
        """
        kind = registry.load(name)
        method = kind(kind.Params(**params or {}))
        workspace = self.workspace(device, dtype, places, hosted, recorded)
        with self.on(device, loading=True):
            for wanted in method.artifacts():
                workspace.artifact(wanted)
        random, traces = CountedRandom(sampling), list[StepTrace]()
        request = Request("far/0", 0, self.prompt, StopRule(frozenset(), budget))
        with self.on(device):
            session = Session(
                *(workspace, request, sampling),
                random=random,
                recording=recording,
                memory=SharedCopies(workspace.decoders["draft"]),
            )
            room, before = budget - 2, (len(self.waited), self.clocks, 0, 0)
            for step in method.generate(session):
                after = (len(self.waited), self.clocks, random.draws, random.tests)
                _, *counts = (b - a for a, b in zip(before, after, strict=True))
                waits = tuple(self.waited[before[0] :])
                traces.append(
                    StepTrace(step, room, waits, *counts, left=session.max_draft_length())
                )
                room, before = traces[-1].left, after
            return list(session.output()), traces

    def record(self, model: Any) -> Any:
        """Record a model's forwards. On the simulated device a recorded body is run again."""
        if isinstance(model, FusedStack):
            model.record(lambda body: body)
        return model

    def numbers(self, tensor: Any) -> Any:
        """Return the values of a tensor on `FAR`."""
        return tensor.shadow.tolist()


class CountingClock(meter.HostClock):
    """Clock of the device that counts how often somebody waits for it."""

    def __init__(self, far: SimulatedDevice) -> None:
        super().__init__()
        self._far = far

    def resolve(self, forwards: Sequence[Forward]) -> None:
        self._far.clocks += 1


class RealDevice(SimulatedDevice):
    """The same on a real GPU. torch itself raises if a step waits implicitly."""

    @contextmanager
    def on(self, device: torch.device = FAR, *, loading: bool = False) -> Iterator[None]:
        if device == CPU:
            yield
            return
        self._allow_waits(allowed=loading)
        try:
            yield
        finally:
            self._allow_waits(allowed=True)

    def record(self, model: Any) -> Any:
        """Record a model's forwards as CUDA graphs."""
        if isinstance(model, FusedStack):
            model.record(CudaGraphs(FAR))
        return model

    def numbers(self, tensor: Tensor) -> Any:
        self._allow_waits(allowed=True)
        found = tensor.tolist()
        self._allow_waits(allowed=False)
        return found

    @staticmethod
    def _allow_waits(*, allowed: bool) -> None:
        """Make torch raise on implicit waits, unless they are allowed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this a prototype
            torch.cuda.set_sync_debug_mode("default" if allowed else "error")


@contextmanager
def _record_waits(device: SimulatedDevice) -> Iterator[None]:
    """Record the function that waits in `device.waited`."""

    def wait(tensor: Tensor) -> Any:
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] == host.__name__:
            frame = cast(FrameType, frame.f_back)
        device.waited.append(frame.f_code.co_name)
        return device.numbers(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "wait", wait)
        patch.setattr(meter, "CudaClock", lambda _: CountingClock(device))
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Checkpoints of a target of two layers, and of a draft that has the first of them."""
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
def far(places: Places) -> Iterator[SimulatedDevice]:
    """The simulated device."""
    device = SimulatedDevice(places)
    with _record_waits(device), _install_device_guard():
        for cache in KEPT:
            cache.cache_clear()
        yield device
        for cache in KEPT:
            cache.cache_clear()


@pytest.fixture(scope="module")
def real(places: Places) -> Iterator[SimulatedDevice]:
    """The real device, where there is one."""
    device = RealDevice(places)
    with _record_waits(device):
        yield device

"""Time of forwards on an accelerator that this machine does not have, by a roofline model.

Roofline (Williams, Waterman, Patterson, 2009, doi:10.1145/1498765.1498785): an operation takes the
longer of two times: the time to read its bytes at the memory bandwidth, and the time of its
arithmetic at peak FLOPS. A forward is three operations in sequence: products with the layers'
weights, attention, and the output matrix. Other work takes no time, except `overhead`, which is
added to every forward. Real kernels reach neither the peak bandwidth nor the peak FLOPS, so the
modelled times are lower bounds. Ratios of two modelled times are more accurate.

A row is one token of a forward. In a mixture of experts, only the experts that some row uses are
read. If each of r rows chooses k of E experts uniformly, E (1 - (1 - k/E)^r) experts are read on
average.

With tensor parallelism, D devices share weights, arithmetic and KV cache evenly. Each device has
the keys and values of at least one head. An all-reduce sums the attention output and the MLP output
of every layer. For each sum, a device sends 2 (D - 1) / D times the rows' bytes (ring all-reduce).
Communication does not overlap with computation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from specbench_cli import __version__
from specbench_cli.config.problems import did_you_mean, join_names, shorten
from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import (
    BatchCost,
    CostCurve,
    CostPoint,
    Costs,
    CostSetup,
    HostCost,
    ProbeNoise,
)
from specbench_cli.models.aliases import BYTES
from specbench_cli.models.shapes import ModelShape, get_shape, parse_pair

HARDWARE = Path(__file__).parent / "devices.yaml"
ROWS = (*range(1, 33), 40, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (1, 256, 1024, 4096, 16384, 65536)
"""Numbers of new rows and of context rows at which the table has points.

Between them it is interpolated like measured tables.
"""

MAX_DEVICES = 1025
"""Upper limit (exclusive) of the number of devices that an error message suggests."""

INPUTS = (
    *("bandwidth", "flops", "link"),
    *("target weights", "draft weights", "state", "experts"),
    *("batch", "context", "overhead"),
)
"""Inputs of the model. `Roofline.scaled` multiplies one of them."""


class Accelerator(BaseModel):
    """An accelerator in devices.yaml. The file explains the fields and their units."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    memory: float = Field(gt=0)
    bandwidth: float = Field(gt=0)
    flops: dict[str, float]
    link: float | None
    source: str
    read: tuple[str, ...] = Field(min_length=1)


@cache
def load_accelerators() -> dict[str, Accelerator]:
    """Return the accelerators in devices.yaml, by name."""
    entries = yaml.safe_load(HARDWARE.read_text(encoding="utf-8"))
    return {name: Accelerator.model_validate(entry) for name, entry in entries.items()}


def distinct_experts(experts: float, chosen: float, rows: float) -> float:
    """Return the mean number of experts that at least one row (token) uses.

    Args:
        experts: number of experts.
        chosen: number of experts that each row uses.
        rows: number of rows.
    """
    missed: float = (1 - min(1.0, chosen / experts)) ** rows
    return experts * (1 - missed)


@dataclass(frozen=True)
class Roofline:
    """Roofline model of a target and a draft on one or several accelerators.

    Attributes:
        hardware: name of the devices on the command line.
        accelerator: peak values of one device.
        devices: number of devices in tensor parallel.
        names, shapes: names and shapes of the models, by role.
        dtype: dtype of weights, KV cache and arithmetic.
        batch: number of sequences in a forward. Each has as many new rows as in the trace. context:
            number of rows in the KV cache before every forward. None: as in the trace. overhead:
            additional time of every forward, in ns.
        factors: name of an input (see `INPUTS`) -> factor. Used to compute sensitivities.
    """

    hardware: str
    accelerator: Accelerator
    devices: int
    names: Mapping[str, str]
    shapes: Mapping[str, ModelShape]
    dtype: str
    batch: int = 1
    context: int | None = None
    overhead: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_options(
        cls,
        hardware: str,
        models: str,
        *,
        dtype: str = "bfloat16",
        batch: int = 1,
        context: int | None = None,
        overhead: float = 0.0,
    ) -> Roofline:
        """Construct a roofline from command-line values: `h100`, `h100x8`; `llama-2-70b+7b`.

        Raises:
            UsageError: a name is unknown, or the accelerator has no known FLOPS for the dtype, or
                no known link between devices.
        """
        known = load_accelerators()
        split = re.fullmatch(r"(.+?)x([1-9]\d{0,3})", hardware)
        name, devices = hardware, 1
        if hardware not in known and split is not None:
            name, devices = split[1], int(split[2])
        if name not in known:
            raise UsageError(
                f"unknown hardware {shorten(repr(hardware))}{did_you_mean(name, known)}",
                f"known: {join_names(known)}; several of one kind: {next(iter(known))}x8",
            )
        device = known[name]
        if dtype not in device.flops:
            raise UsageError(
                f"--dtype {dtype}: the peak FLOPS of {name} are not known for this dtype",
                f"known: {', '.join(device.flops)}",
            )
        if devices > 1 and device.link is None:
            raise UsageError(
                f"{hardware}: the bandwidth between devices of this kind is not known",
                f"use one device, or: {', '.join(k for k, each in known.items() if each.link)}",
            )
        names = parse_pair(models)
        return cls(
            hardware=hardware,
            accelerator=device,
            devices=devices,
            names=names,
            shapes={role: get_shape(each) for role, each in names.items()},
            dtype=dtype,
            batch=batch,
            context=context,
            overhead=overhead,
        )

    def scale_input(self, name: str, factor: float) -> Roofline:
        """Return a copy in which one of `INPUTS` is multiplied by a factor."""
        return replace(self, factors={name: factor})

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs in `INPUTS` that influence the modelled times."""
        mixed = any(each.experts > 1 for each in self.shapes.values())
        there = {
            "link": self.devices > 1,
            "draft weights": "draft" in self.shapes,
            "experts": mixed,
            "overhead": self.overhead > 0,
        }
        return tuple(name for name in INPUTS if there.get(name, True))

    def forward_ns(
        self, role: str, new: float, context: float, *, logits: float | None = None
    ) -> float:
        """Return the time in ns of a forward over `new` tokens (rows) of each sequence.

        Args:
            role: "target" or "draft".
            new: number of new rows.
            context: number of rows in the KV cache.
            logits: number of rows of each sequence for which logits are computed. None: all rows.
        """
        of, size, by = self.shapes[role], BYTES[self.dtype], self._factor
        sequences = self.batch * by("batch")
        rows = sequences * new
        before = (context if self.context is None else self.context) * by("context")

        touched = min(of.experts, distinct_experts(of.experts, of.chosen, rows) * by("experts"))
        read = of.layers * (
            of.attention_parameters + of.router_parameters + touched * of.expert_parameters
        )
        each = of.layers * (
            of.attention_parameters + of.router_parameters + of.chosen * of.expert_parameters
        )
        products = self._operation_ns(read * size * by(f"{role} weights"), 2 * rows * each)

        seen = sequences * (new * before + new * (new + 1) / 2)
        state = self._state_bytes(of, sequences * (before + new)) * by("state")
        attention = self._operation_ns(state, 4 * seen * of.layers * of.heads * of.head_width)

        said = rows if logits is None else sequences * logits
        matrix = of.output_parameters * size * by(f"{role} weights")
        output = self._operation_ns(matrix, 2 * said * of.vocab * of.hidden)

        sums = self._all_reduce_ns(rows * of.hidden * size, of.layers)
        return products + attention + output + sums + self.overhead * by("overhead")

    def _factor(self, name: str) -> float:
        return self.factors.get(name, 1.0)

    def _operation_ns(self, nbytes: float, operations: float) -> float:
        """Return the time in ns of an operation that is divided among all devices."""
        peak = self.accelerator.flops[self.dtype] * self._factor("flops")
        bandwidth = self.accelerator.bandwidth * self._factor("bandwidth")
        return 1e9 * max(nbytes / bandwidth, operations / peak) / self.devices

    def _state_bytes(self, of: ModelShape, rows: float) -> float:
        """Return the bytes of some rows of a KV cache, summed over all devices.

        If there are more devices than key-value heads, several devices store copies of the same
        head.
        """
        return (
            rows
            * of.state_row_size
            * BYTES[self.dtype]
            * self.devices
            / min(self.devices, of.kv_heads)
        )

    def _all_reduce_ns(self, nbytes: float, layers: int) -> float:
        """Return the time in ns of the all-reduces in all layers. Each layer has two."""
        link = self.accelerator.link
        if self.devices == 1 or link is None:
            return 0.0
        sent = 2 * (self.devices - 1) / self.devices * nbytes
        return 1e9 * 2 * layers * sent / (link * self._factor("link"))

    def memory_use(self, rows: int) -> dict[str, int]:
        """Return the bytes of weights and of KV caches, summed over all devices.

        Args:
            rows: number of rows (tokens) of each sequence.
        """
        size, found = BYTES[self.dtype], {}
        for role, of in self.shapes.items():
            found[f"weights of {self.names[role]}"] = of.parameters * size
            found[f"state of {self.names[role]}"] = round(self._state_bytes(of, self.batch * rows))
        return found

    def _fits(self, rows: int) -> bool:
        return sum(self.memory_use(rows).values()) <= self.devices * self.accelerator.memory

    def check_fits(self, rows: int) -> None:
        """Raise UsageError if sequences of `rows` rows do not fit in the devices' memory."""
        if self._fits(rows):
            return
        held, room = self.memory_use(rows), int(self.devices * self.accelerator.memory)
        needed = sum(held.values())
        parts = ", ".join(f"{what} {n:,}" for what, n in held.items())
        name = self.hardware if self.devices == 1 else self.hardware.rpartition("x")[0]
        enough = (
            n for n in range(self.devices + 1, MAX_DEVICES) if replace(self, devices=n)._fits(rows)
        )
        least = next(enough, None) if self.accelerator.link else None
        more = "" if least is None else f"--hardware {name}x{least}, or "
        raise UsageError(
            f"the models do not fit: they need {needed:,} bytes ({parts}; batch {self.batch},"
            f" {rows} rows each), but {self.hardware} has {room:,}",
            f"{more}a smaller --batch, --context or --shape",
        )

    def make_cost_table(
        self, models: Mapping[str, Mapping[str, Any]], together: int = 1, mean: float = 0.0
    ) -> Costs:
        """Return the table of forward costs, in the format of measured costs.

        Args:
            models: facts about the models of the recorded run, by role. The table needs their
                numbers of layers to replay traces.
            together: maximum number of sequences in a continuous batch (`Costs.batch`).
            mean: mean number of rows in the KV caches of the sequences.
        """
        beside = {
            role: self._operation_ns(self._state_bytes(of, mean), 0.0)
            for role, of in self.shapes.items()
        }
        none = HostCost(step=0, draft=0, node=0)
        return Costs(
            version=__version__,
            created_utc="modelled",
            machine={
                "id": f"roofline {self.hardware}",
                "hardware": {"accelerators": [{"name": self.accelerator.name}]},
            },
            models={
                role: {
                    "label": f"shape:{self.names[role]}",
                    "n_layers": models.get(role, {}).get("n_layers"),
                }
                for role in self.shapes
            },
            setup=CostSetup(device=self.hardware, dtype=self.dtype, threads=1),
            seed=0,
            quietness=ProbeNoise(rounds=0, void=0, other_cpu=None, noisy=False),
            curves={role: self._make_curve(role) for role in self.shapes},
            host=none,
            batch=None
            if together == 1
            else BatchCost(most=together, beside=beside, step=0, sequence=0, draft=0, node=0),
        )

    def _make_curve(self, role: str) -> CostCurve:
        """Return the costs of a model's forwards and prefills, by number of rows and context."""
        contexts = CONTEXTS if self.context is None else (self.context,)
        lengths = ROWS if self.context is None else (self.context,)
        return CostCurve(
            forwards=tuple(
                CostPoint(
                    n_tokens=n, context=at, ns=self.forward_ns(role, n, at), spread=0, samples=1
                )
                for at in contexts
                for n in ROWS
            ),
            prefills=tuple(
                CostPoint(n_tokens=n, context=0, ns=self._prefill_ns(role, n), spread=0, samples=1)
                for n in lengths
            ),
        )

    def _prefill_ns(self, role: str, n: int) -> float:
        """Return the prefill time of n tokens, with logits for the last row only.

        `self.context` is ignored, because a prefill starts without a context.
        """
        return replace(self, context=None).forward_ns(role, n, 0, logits=1)

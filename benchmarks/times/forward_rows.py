"""The time of a forward against its rows, beside what reading the weights must take.

A target that is bound by memory reads its weights once a forward, however many tokens it verifies:
its time over 6 rows should be near that over 1. Printed for 1 to 64 rows: milliseconds, the share
of the machine's read bandwidth that is reached (bytes of the weights that a forward reads, over
time and bandwidth), and each row count that costs over 10% more than the next larger one.

    python -P benchmarks/times/forward_rows.py smollm2-135m --dtype float32 --threads 2
    python -P benchmarks/times/forward_rows.py smollm2-135m --forms  # each matrix, by form
    python -P benchmarks/times/forward_rows.py shape:llama-2-7b --device cuda --dtype bfloat16
    python -P benchmarks/times/forward_rows.py shape:llama-68m --device cuda --steps

The second gives what the rule of `engine/models/linear.py` is made of. Take either on a quiet
machine; `--cpu-time` counts the thread's own time instead (one thread), which other programs
disturb less. On a GPU forwards are replayed from graphs unless --graphs off, and keys and values
count among what is read. The last says what launching takes of a draft step: a chain of forwards
through the meter, each fed the likeliest token of the one before, and then a wait; the share of its
time in which no kernel ran.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import get_args

import torch

from specbench_cli.engine.models.cuda.graphs import CudaGraphs
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.layers import layer_bytes
from specbench_cli.engine.models.linear import Form, Linear, WeightArena, choose_form, linear
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.types import Tokens
from specbench_cli.models import resolve

ROWS = (*range(1, 18), 20, 24, 28, 32, 33, 40, 48, 56, 64)
PROMPT = 100
"""Rows already in the state."""

ALLOWED = 1.1

DRAFTS, CHAINS = 5, 40
"""Forwards of a draft step, and how many such steps."""


def best(once: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    """The shortest of several times, in seconds, to the end of what was launched on a GPU."""
    once()
    times = []
    for _ in range(repeats):
        start = clock()
        once()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times)


def read_bandwidth(device: torch.device, clock: Callable[[], float], repeats: int) -> float:
    """Bytes a second that a sum reads: over 1 GiB in large pages, on a GPU over 4."""
    gpu = device.type == "cuda"
    numbers = (
        torch.ones(1 << 30, device=device) if gpu else WeightArena().store(torch.ones(1 << 28))
    )
    return numbers.nbytes / best(numbers.sum, clock, repeats)


def prompted(decoder: FusedDecoder) -> KVState:
    """A state that holds a prompt."""
    state = decoder.new_state(PROMPT + max(ROWS))
    ids = torch.arange(PROMPT, device=decoder.device)[None] + 10
    decoder.forward(Tokens(ids), state)
    state.commit(0, range(PROMPT))
    return state


def curve(decoder: FusedDecoder, clock: Callable[[], float], repeats: int) -> dict[int, float]:
    """Seconds of a forward with all logits, by rows."""
    state = prompted(decoder)

    def once(rows: int) -> None:
        ids = torch.arange(rows, device=decoder.device)[None] + 20
        decoder.forward(Tokens(ids), state, logits_at="all")
        state.rollback(0, PROMPT)

    return {rows: best(lambda rows=rows: once(rows), clock, repeats) for rows in ROWS}


def steps_of(decoder: FusedDecoder) -> tuple[float, float]:
    """Seconds of a drafted token, and of these the GPU's kernels'."""
    state = prompted(decoder)
    model = Metered(decoder, Meter(decoder.device), role="draft")

    def once() -> None:
        x = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
        for _ in range(DRAFTS):
            x = model.forward(Tokens(x), state).rows.argmax(-1)[None]
        x.tolist()
        state.rollback(0, PROMPT)

    def several() -> None:
        for _ in range(CHAINS):
            once()

    several()
    start = time.perf_counter()
    several()
    taken = time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        several()
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    return taken / CHAINS / DRAFTS, busy / CHAINS / DRAFTS


def bytes_read(decoder: FusedDecoder) -> int:
    """By a forward over one row: of the weights all but the embedding's other rows; and the keys
    and values of a prompt."""
    weights, sizes = decoder.weights, decoder._sizes
    held = 2 * sizes.kv_heads * sizes.head_dim * PROMPT * decoder.n_layers * decoder.dtype.itemsize
    ends = weights.final_norm.nbytes + weights.head.nbytes
    return sum(map(layer_bytes, weights.layers)) + ends + held


def steps(times: dict[int, float]) -> list[str]:
    """The row counts that cost too much beside the next larger one."""
    pairs = pairwise(ROWS)
    return [
        f"{few} ({times[few] / times[more] - 1:.0%} over {more})"
        for few, more in pairs
        if times[few] > ALLOWED * times[more]
    ]


def multiply(products: Sequence[Linear], x: torch.Tensor) -> None:
    """All products of one input."""
    for product in products:
        product(x)


def forms(decoder: FusedDecoder, clock: Callable[[], float], repeats: int) -> None:
    """Print the milliseconds of each kind of matrix, all of the model's layers together."""
    config = decoder._sizes
    d, hidden, mlp = config.head_dim, config.hidden, config.mlp
    shapes = {
        "qkv": (hidden, (config.heads + 2 * config.kv_heads) * d, decoder.n_layers),
        "out": (config.heads * d, hidden, decoder.n_layers),
        "gate_up": (hidden, 2 * mlp, decoder.n_layers),
        "down": (mlp, hidden, decoder.n_layers),
        "head": (hidden, decoder.vocab_size, 1),
    }
    rows = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
    for name, (n_in, n_out, count) in shapes.items():
        pages = WeightArena()
        weights = [pages.store(torch.randn(n_in, n_out).to(decoder.dtype)) for _ in range(count)]
        print(f"\n{name} {n_in} x {n_out}, {count} of them; the rule: {choose_form(weights[0])}")
        print(f"{'rows':>10}", *(f"{n:>7}" for n in rows))
        for form in get_args(Form):
            if form in ("packed16", "widened") and decoder.dtype == torch.float32:
                continue
            products = [linear(weight, form=form) for weight in weights]
            times = []
            for n in rows:
                x = torch.randn(n, n_in).to(decoder.dtype)
                once = partial(multiply, products, x)
                times.append(best(once, clock, repeats))
            print(f"{form:>10}", *(f"{each * 1e3:7.2f}" for each in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--graphs", default="on", choices=("on", "off"), help="on a GPU")
    parser.add_argument("--steps", action="store_true", help="what launching takes of a draft step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--form", choices=get_args(Form), help="default: the rule's")
    parser.add_argument("--forms", action="store_true", help="each matrix by form")
    parser.add_argument("--cpu-time", action="store_true", help="the thread's own time")
    parser.add_argument("--repeats", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1 if asked.cpu_time else asked.threads)
    clock = time.thread_time if asked.cpu_time else time.perf_counter
    dtype = getattr(torch, asked.dtype)
    device = torch.device(asked.device)
    decoder = load_decoder(
        resolve(asked.model).path, name="target", device=device, dtype=dtype, form=asked.form
    )
    if not isinstance(decoder, FusedDecoder):
        raise SystemExit(f"{asked.model} runs through transformers' module: no kernels of ours")
    if device.type == "cuda" and asked.graphs == "on":
        decoder.record(CudaGraphs(device))
    with torch.inference_mode():
        if asked.steps:
            taken, busy = steps_of(decoder)
            print(
                f"{asked.model} {asked.dtype} on {device}, graphs {asked.graphs}: a drafted token"
                f" takes {taken * 1e6:.0f} us, kernels {busy * 1e6:.0f}: {1 - busy / taken:.0%} is"
                " launching and waiting"
            )
            return
        if asked.forms:
            forms(decoder, clock, asked.repeats)
            return
        bandwidth = read_bandwidth(device, clock, asked.repeats)
        times = curve(decoder, clock, asked.repeats)
    size = bytes_read(decoder)
    print(
        f"{asked.model} {asked.dtype}, {torch.get_num_threads()} threads:"
        f" {size / 1e6:.0f} MB read a forward; read bandwidth {bandwidth / 1e9:.1f} GB/s,"
        f" so at least {size / bandwidth * 1e3:.1f} ms"
    )
    print(f"{'rows':>5} {'ms':>8} {'of 1':>6} {'of the bound':>13}")
    for rows, seconds in times.items():
        share = size / bandwidth / seconds
        print(f"{rows:>5} {seconds * 1e3:>8.2f} {seconds / times[1]:>6.2f} {share:>13.0%}")
    found = steps(times)
    print("over 10% dearer than the next larger:", ", ".join(found) or "none")


if __name__ == "__main__":
    main()

"""Measure forward time by number of rows, against the time to read the weights.

A memory-bound target reads its weights action per forward, however many tokens it verifies. So a
forward over 6 rows should take about as long as one over 1 row. The script prints for 1 to 64 rows:
milliseconds, the share of the read bandwidth that is reached (bytes read by a forward, divided by
time and bandwidth), and each row count that costs over 10% more than the next larger one.

    python -P benchmarks/times/forward_rows.py smollm2-135m --dtype float32 --threads 2
    python -P benchmarks/times/forward_rows.py smollm2-135m --forms  # each matrix, by backend
    python -P benchmarks/times/forward_rows.py shape:llama-2-7b --device cuda --dtype bfloat16
    python -P benchmarks/times/forward_rows.py shape:llama-68m --device cuda --steps

The second command gives the data for the rule of `engine/models/linear.py`. Both need a quiet
machine; `--cpu-time` measures CPU time of one thread instead, which other programs disturb less. On
a GPU, forwards are replayed from CUDA graphs unless --graphs off, and the bytes read include keys
and values. The last command measures the launch overhead of a draft step: a chain of metered
forwards, each fed the likeliest token of the previous one, and a sync at the end. The overhead is
the share of the time in which no kernel runs.
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
from specbench_cli.engine.models.linear import (
    Linear,
    LinearBackend,
    WeightArena,
    choose_backend,
    linear,
)
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.types import Tokens
from specbench_cli.models import resolve

ROWS = (*range(1, 18), 20, 24, 28, 32, 33, 40, 48, 56, 64)
PROMPT = 100
"""Number of rows that are already in the KV cache."""

MAX_RATIO = 1.1

DRAFTS, CHAINS = 5, 40
"""Number of forwards of a draft step, and number of steps."""


def shortest_time(action: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    """Return the shortest of several times in seconds, with a sync at the end on a GPU."""
    action()
    times = []
    for _ in range(repeats):
        start = clock()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times)


def read_bandwidth(device: torch.device, clock: Callable[[], float], repeats: int) -> float:
    """Return the read bandwidth of a sum in bytes/s: over 1 GiB in large pages, or 4 GiB on a
    GPU."""
    gpu = device.type == "cuda"
    numbers = (
        torch.ones(1 << 30, device=device) if gpu else WeightArena().store(torch.ones(1 << 28))
    )
    return numbers.nbytes / shortest_time(numbers.sum, clock, repeats)


def create_prompted_state(decoder: FusedDecoder) -> KVState:
    """Return a KV cache with a prompt."""
    state = decoder.new_state(PROMPT + max(ROWS))
    ids = torch.arange(PROMPT, device=decoder.device)[None] + 10
    decoder.forward(Tokens(ids), state)
    state.commit(0, range(PROMPT))
    return state


def measure_rows(
    decoder: FusedDecoder, clock: Callable[[], float], repeats: int
) -> dict[int, float]:
    """Return the seconds of a forward with all logits, by number of rows."""
    state = create_prompted_state(decoder)

    def run_forward(rows: int) -> None:
        ids = torch.arange(rows, device=decoder.device)[None] + 20
        decoder.forward(Tokens(ids), state, logits_at="all")
        state.rollback(0, PROMPT)

    return {
        rows: shortest_time(lambda rows=rows: run_forward(rows), clock, repeats) for rows in ROWS
    }


def measure_draft_step(decoder: FusedDecoder) -> tuple[float, float]:
    """Return the seconds per drafted token, and the part in which GPU kernels run."""
    state = create_prompted_state(decoder)
    model = Metered(decoder, Meter(decoder.device), role="draft")

    def run_step() -> None:
        x = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
        for _ in range(DRAFTS):
            x = model.forward(Tokens(x), state).rows.argmax(-1)[None]
        x.tolist()
        state.rollback(0, PROMPT)

    def run_steps() -> None:
        for _ in range(CHAINS):
            run_step()

    run_steps()
    start = time.perf_counter()
    run_steps()
    token_seconds = time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_steps()
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    return token_seconds / CHAINS / DRAFTS, busy / CHAINS / DRAFTS


def count_bytes_read(decoder: FusedDecoder) -> int:
    """Return the bytes that a forward over one row reads: weights, and the prompt's keys and
    values.

    Of the embedding it reads one row only.
    """
    weights, sizes = decoder.weights, decoder._sizes
    cached = (
        2 * sizes.kv_heads * sizes.head_dim * PROMPT * decoder.n_layers * decoder.dtype.itemsize
    )
    ends = weights.final_norm.nbytes + weights.head.nbytes
    return sum(map(layer_bytes, weights.layers)) + ends + cached


def find_slow_rows(times: dict[int, float]) -> list[str]:
    """Return the row counts that cost too much compared with the next larger one."""
    pairs = pairwise(ROWS)
    return [
        f"{few} ({times[few] / times[more] - 1:.0%} over {more})"
        for few, more in pairs
        if times[few] > MAX_RATIO * times[more]
    ]


def multiply(products: Sequence[Linear], x: torch.Tensor) -> None:
    """Multiply one input with all matrices."""
    for product in products:
        product(x)


def print_forms(decoder: FusedDecoder, clock: Callable[[], float], repeats: int) -> None:
    """Print the milliseconds of each kind of matrix, summed over the model's layers."""
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
        print(f"\n{name} {n_in} x {n_out}, {count} of them; the rule: {choose_backend(weights[0])}")
        print(f"{'rows':>10}", *(f"{n:>7}" for n in rows))
        for backend in get_args(LinearBackend):
            if backend in ("packed16", "widened") and decoder.dtype == torch.float32:
                continue
            products = [linear(weight, backend=backend) for weight in weights]
            times = []
            for n in rows:
                x = torch.randn(n, n_in).to(decoder.dtype)
                action = partial(multiply, products, x)
                times.append(shortest_time(action, clock, repeats))
            print(f"{backend:>10}", *(f"{each * 1e3:7.2f}" for each in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--graphs", default="on", choices=("on", "off"), help="on a GPU")
    parser.add_argument("--steps", action="store_true", help="launch overhead of a draft step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--form", dest="backend", choices=get_args(LinearBackend), help="default: the rule's"
    )
    parser.add_argument("--forms", action="store_true", help="each matrix by backend")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of one thread")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1 if args.cpu_time else args.threads)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    dtype = getattr(torch, args.dtype)
    device = torch.device(args.device)
    decoder = load_decoder(
        resolve(args.model).path, name="target", device=device, dtype=dtype, backend=args.backend
    )
    if not isinstance(decoder, FusedDecoder):
        raise SystemExit(f"{args.model} runs through transformers' module: no kernels of ours")
    if device.type == "cuda" and args.graphs == "on":
        decoder.record(CudaGraphs(device))
    with torch.inference_mode():
        if args.steps:
            token_seconds, busy = measure_draft_step(decoder)
            print(
                f"{args.model} {args.dtype} on {device}, graphs {args.graphs}: a drafted token"
                f" takes {token_seconds * 1e6:.0f} us, kernels {busy * 1e6:.0f}:"
                f" {1 - busy / token_seconds:.0%} is"
                " launching and waiting"
            )
            return
        if args.forms:
            print_forms(decoder, clock, args.repeats)
            return
        bandwidth = read_bandwidth(device, clock, args.repeats)
        times = measure_rows(decoder, clock, args.repeats)
    size = count_bytes_read(decoder)
    print(
        f"{args.model} {args.dtype}, {torch.get_num_threads()} threads:"
        f" {size / 1e6:.0f} MB read a forward; read bandwidth {bandwidth / 1e9:.1f} GB/s,"
        f" so at least {size / bandwidth * 1e3:.1f} ms"
    )
    print(f"{'rows':>5} {'ms':>8} {'of 1':>6} {'of the bound':>13}")
    for rows, seconds in times.items():
        share = size / bandwidth / seconds
        print(f"{rows:>5} {seconds * 1e3:>8.2f} {seconds / times[1]:>6.2f} {share:>13.0%}")
    found = find_slow_rows(times)
    print("over 10% slower than the next larger:", ", ".join(found) or "none")


if __name__ == "__main__":
    main()

"""Measure the host time of lookup methods by history length: search and update of a step.

    python benchmarks/times/lookups.py --methods pld,suffix,sam --lengths 1000,10000,100000

The text consists of repeating phrases with word frequencies as in natural language. The target
emits exactly this text, so a draft is accepted as far as it agrees. The script times `propose` and
`observe`, without the creation of tensors. The history is the prompt; for `suffix` and `sam` half
of it is an earlier output of the same run. Memory is Python's allocation in a separate decoding.
Times are CPU times, which noise makes longer.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Sequence
from itertools import accumulate
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

from specbench_cli import registry

VOCAB = 4_096
LIMIT = 64


def make_text(n: int, seed: int) -> list[int]:
    """Return n tokens: single draws mixed with repeating phrases of 2 to 12 tokens."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(VOCAB)))  # Zipf and Mandelbrot

    def draw_tokens(n: int) -> list[int]:
        return rng.choices(range(VOCAB), cum_weights=weights, k=n)

    phrases = [draw_tokens(rng.randint(2, 12)) for _ in range(3_000)]
    text: list[int] = []
    while len(text) < n:
        text += rng.choice(phrases) if rng.random() < 0.4 else draw_tokens(1)
    return text[:n]


class ReplayedSession:
    """Minimal session for lookup methods, with a known output."""

    def __init__(self, text: Sequence[int], prompt: int, memory: dict[str, Any]) -> None:
        self.text, self.read_tokens, self.prompt = text, list(text[:prompt]), prompt
        self.memory, self.finish = memory, None
        self.requests = [SimpleNamespace(stop=SimpleNamespace(eos=frozenset()))]

    def tokens(self) -> Sequence[int]:
        return self.read_tokens

    def output(self) -> Sequence[int]:
        return self.read_tokens[self.prompt :]

    def chain(self, ids: Sequence[int]) -> Sequence[int]:
        return ids

    def commit(self, draft: Sequence[int]) -> int:
        """Commit the matching prefix of a draft and one more token; return the prefix length."""
        at = len(self.read_tokens)
        accepted = next(
            (n for n, token in enumerate(draft) if self.text[at + n] != token), len(draft)
        )
        self.read_tokens += self.text[at : at + accepted + 1]
        return accepted


def measure_lookups(
    name: str, length: int, steps: int
) -> tuple[float, list[float], list[int], Any]:
    """Decode after a history of `length` tokens.

    Returns:
        (seconds to read the history, seconds of each step, accepted draft tokens of each step, the
        method, whose memory the caller measures).
    """
    method: Any = registry.build(name, {})
    text, memory = make_text(length + steps * (LIMIT + 1) + LIMIT, seed=1), dict[str, Any]()
    shares = method.state_scope == "run"
    prompt = length // 2 if shares else length
    clock = time.process_time
    start = clock()
    if shares:  # the output of an earlier request is the other half of the history
        earlier: Any = ReplayedSession(make_text(length - prompt + 1, seed=2), 1, memory)
        method.start(earlier)
        earlier.read_tokens = list(earlier.text)
        earlier.finish = "length"
        method.observe(earlier, SimpleNamespace(path=()))
    session: Any = ReplayedSession(text, prompt, memory)
    method.start(session)
    method.propose(session, LIMIT)
    read_seconds = clock() - start
    step_seconds, accepted = [], []
    for _ in range(steps):
        start = clock()
        draft = method.propose(session, LIMIT)
        spent = clock() - start
        accepted.append(session.commit(draft))
        start = clock()
        method.observe(session, SimpleNamespace(path=(0,)))
        step_seconds.append(spent + clock() - start)
    return read_seconds, step_seconds, accepted, method


def main() -> None:
    """Print a line per method and history length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="pld,suffix,sam")
    parser.add_argument("--lengths", default="1000,10000,100000")
    parser.add_argument("--steps", type=int, default=2_000)
    args = parser.parse_args()
    print("method   history  median us  90% us  read us/token  accepted/step  bytes/token")
    for name in args.methods.split(","):
        for length in map(int, args.lengths.split(",")):
            gc.disable()
            read_seconds, step_seconds, accepted, _ = measure_lookups(name, length, args.steps)
            gc.enable()
            tracemalloc.start()
            *_, kept = measure_lookups(name, length, 1)
            bytes_per_token = tracemalloc.get_traced_memory()[0] / length
            tracemalloc.stop()
            del kept
            gc.collect()
            print(
                f"{name:8} {length:7,} {median(step_seconds) * 1e6:10.1f}"
                f" {quantiles(step_seconds, n=10)[-1] * 1e6:7.1f}"
                f" {read_seconds / length * 1e6:14.2f}"
                f" {sum(accepted) / len(accepted):14.2f} {bytes_per_token:12.0f}"
            )


if __name__ == "__main__":
    main()

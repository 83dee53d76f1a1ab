"""What lookups cost on the host: a step's search and update, by the length of what was read.

    python benchmarks/times/lookups.py --methods pld,suffix,sam --lengths 1000,10000,100000

A text of phrases that come again (frequencies fall as in language) is decoded by a target that
says just that text, so that what is drafted stands as far as it agrees. All of a step's work but
the target's is timed: `propose` and `observe`, without the making of tensors. The prompt is of the
length given; half the history of `suffix` and `sam` is an earlier output of the same pass. Memory
is what Python had allocated for it, of another decoding. Processor time; noise makes it longer.
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


def text_of(n: int, seed: int) -> list[int]:
    """Tokens of single draws, and of phrases of 2 to 12 that come again."""
    chance = random.Random(seed)
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(VOCAB)))  # Zipf and Mandelbrot

    def said(n: int) -> list[int]:
        return chance.choices(range(VOCAB), cum_weights=weights, k=n)

    phrases = [said(chance.randint(2, 12)) for _ in range(3_000)]
    text: list[int] = []
    while len(text) < n:
        text += chance.choice(phrases) if chance.random() < 0.4 else said(1)
    return text[:n]


class Replayed:
    """As much of a session as lookups see; its output is known."""

    def __init__(self, text: Sequence[int], prompt: int, memory: dict[str, Any]) -> None:
        self.text, self.known, self.prompt = text, list(text[:prompt]), prompt
        self.memory, self.finish = memory, None
        self.requests = [SimpleNamespace(stop=SimpleNamespace(eos=frozenset()))]

    def tokens(self) -> Sequence[int]:
        return self.known

    def output(self) -> Sequence[int]:
        return self.known[self.prompt :]

    def chain(self, ids: Sequence[int]) -> Sequence[int]:
        return ids

    def commit(self, draft: Sequence[int]) -> int:
        """Commit what of a draft agrees, and a token more; returns how many stood."""
        at = len(self.known)
        stood = next((n for n, token in enumerate(draft) if self.text[at + n] != token), len(draft))
        self.known += self.text[at : at + stood + 1]
        return stood


def decoded(name: str, length: int, steps: int) -> tuple[float, list[float], list[int], Any]:
    """Decode behind so many tokens of history: seconds to read them, seconds of each step, how many
    draft tokens stood, and what is kept."""
    method: Any = registry.build(name, {})
    text, memory = text_of(length + steps * (LIMIT + 1) + LIMIT, seed=1), dict[str, Any]()
    shares = method.state_scope == "run"
    prompt = length // 2 if shares else length
    clock = time.process_time
    start = clock()
    if shares:  # an earlier request, whose output is the other half
        earlier: Any = Replayed(text_of(length - prompt + 1, seed=2), 1, memory)
        method.start(earlier)
        earlier.known = list(earlier.text)
        earlier.finish = "length"
        method.observe(earlier, SimpleNamespace(path=()))
    session: Any = Replayed(text, prompt, memory)
    method.start(session)
    method.propose(session, LIMIT)
    reading = clock() - start
    taken, stood = [], []
    for _ in range(steps):
        start = clock()
        draft = method.propose(session, LIMIT)
        spent = clock() - start
        stood.append(session.commit(draft))
        start = clock()
        method.observe(session, SimpleNamespace(path=(0,)))
        taken.append(spent + clock() - start)
    return reading, taken, stood, method


def main() -> None:
    """Print a line a method and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="pld,suffix,sam")
    parser.add_argument("--lengths", default="1000,10000,100000")
    parser.add_argument("--steps", type=int, default=2_000)
    args = parser.parse_args()
    print("method   history  median us  90% us  read us/token  stood/step  bytes/token")
    for name in args.methods.split(","):
        for length in map(int, args.lengths.split(",")):
            gc.disable()
            reading, taken, stood, _ = decoded(name, length, args.steps)
            gc.enable()
            tracemalloc.start()
            *_, kept = decoded(name, length, 1)
            held = tracemalloc.get_traced_memory()[0] / length
            tracemalloc.stop()
            del kept
            gc.collect()
            print(
                f"{name:8} {length:7,} {median(taken) * 1e6:10.1f}"
                f" {quantiles(taken, n=10)[-1] * 1e6:7.1f} {reading / length * 1e6:14.2f}"
                f" {sum(stood) / len(stood):11.2f} {held:12.0f}"
            )


if __name__ == "__main__":
    main()

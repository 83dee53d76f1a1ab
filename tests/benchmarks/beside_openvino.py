"""Plain decoding by this engine, by transformers and by OpenVINO GenAI, in turn, in float32.

Each decodes the same prompts greedily to the same number of tokens, one prompt at a time, one
program after another, in each of several rounds. Printed: tokens a second of each (the best round;
prefill is in it), ours over theirs, and on how many prompts the ids are ours.

    python3 -m venv ov && ov/bin/pip install openvino-genai optimum-intel
    python -P tests/benchmarks/beside_openvino.py smollm2-135m --openvino ov/bin/python --threads 2

OpenVINO has an environment of its own, since it wants other versions than ours, and a process of
its own, which waits for its turn. The model is exported once, to a folder beside that environment.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Decode = Callable[[list[int]], list[int]]
NEEDS = "openvino-genai optimum-intel"

SERVER = """
import json, sys
import openvino, openvino_genai as genai
import numpy as np
folder, threads, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pipe = genai.LLMPipeline(folder, "CPU", INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32",
    DYNAMIC_QUANTIZATION_GROUP_SIZE=0, INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT="LATENCY")
config = genai.GenerationConfig(max_new_tokens=new, do_sample=False, ignore_eos=True)
print(json.dumps(genai.__version__), flush=True)
for line in sys.stdin:
    ids = np.array([json.loads(line)], dtype=np.int64)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    print(json.dumps(list(map(int, pipe.generate(inputs, config).tokens[0]))), flush=True)
"""
"""Reads the ids of a prompt a line, answers with those of its continuation."""


def openvino(python: Path, model: Path, threads: int, new: int) -> tuple[Decode, str]:
    """OpenVINO GenAI's decoding and its version.

    Raises:
        SystemExit: it, or what exports the model, is not installed there.
    """
    mend = f"python3 -m venv ov && ov/bin/pip install {NEEDS}, then --openvino ov/bin/python"
    if not python.exists():
        raise SystemExit(f"error: there is no {python}\nhint: {mend}")
    wanted = "import openvino_genai, optimum.exporters.openvino"
    tried = subprocess.run([python, "-c", wanted], capture_output=True, text=True, check=False)
    if tried.returncode:
        fault = (tried.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise SystemExit(f"error: {python} cannot run OpenVINO: {fault}\nhint: {mend}")
    folder = python.parent.parent / "exported" / model.name
    if not (folder / "openvino_model.bin").exists():
        print(f"exporting {model.name} to {folder}", flush=True)
        words = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        made = subprocess.run(
            [python.parent / "optimum-cli", "export", "openvino", "--model", model, *words, folder],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if made.returncode:
            raise SystemExit(f"error: the export of {model} failed:\n{made.stderr[-2000:]}")
    server = subprocess.Popen(
        [python, "-c", SERVER, folder, str(threads), str(new)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    asked, told = server.stdin, server.stdout

    def answer() -> Any:
        line = told.readline()
        if not line:
            raise SystemExit("error: OpenVINO's process ended; what it said is above")
        return json.loads(line)

    def decode(ids: list[int]) -> list[int]:
        asked.write(json.dumps(ids) + "\n")
        made: list[int] = answer()
        return made

    return decode, str(answer())


def ours(path: Path, capacity: int, new: int) -> Decode:
    """Vanilla decoding by this engine."""
    from specbench_cli.engine.loop import draft_and_verify
    from specbench_cli.engine.models.load import load_decoder
    from specbench_cli.engine.sequence import StopRule
    from specbench_cli.engine.session import Request, Session
    from specbench_cli.engine.verify.sampling import Sampling
    from specbench_cli.engine.workspace import Workspace
    from specbench_cli.registry import build

    target = load_decoder(path, name="target")
    workspace = Workspace({"target": target}, capacity)

    def decode(ids: list[int]) -> list[int]:
        request = Request.of(target, "prompt", 0, ids, StopRule(frozenset(), new))
        session = Session(workspace, request, Sampling())
        for _ in draft_and_verify(build("vanilla", {}), session):
            pass
        return list(session.tokens()[len(ids) :])

    return decode


def transformers(path: Path, new: int) -> Decode:
    """transformers' `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def decode(ids: list[int]) -> list[int]:
        kept = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        text = torch.tensor([ids])
        out = module.generate(text, attention_mask=torch.ones_like(text), **kept)
        made: list[int] = out[0, len(ids) :].tolist()
        return made

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--openvino", type=Path, default=Path("ov/bin/python"), metavar="PYTHON")
    parser.add_argument("--task", default="mini")
    parser.add_argument("--limit", type=int, default=6, help="prompts, spread over families")
    parser.add_argument("--new", type=int, default=64, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()

    import torch
    from transformers import AutoTokenizer

    from specbench_cli.errors import SpecbenchError
    from specbench_cli.models import resolve
    from specbench_cli.tasks import load_task, render, sample

    torch.set_num_threads(asked.threads)
    try:
        path = resolve(asked.model).path
        questions = sample(load_task(asked.task).questions, asked.limit, seed=0)
    except SpecbenchError as fault:
        raise SystemExit(f"error: {fault}\nhint: {fault.hint}") from None
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [render(tokenizer, [("user", q.turns[0])], raw=False) for q in questions]
    theirs, version = openvino(asked.openvino, path, asked.threads, asked.new)
    programs: dict[str, Decode] = {
        "specbench": ours(path, max(map(len, prompts)) + asked.new + 1, asked.new),
        "transformers": transformers(path, asked.new),
        "openvino": theirs,
    }
    took = {name: [0.0] * asked.rounds for name in programs}
    texts: dict[str, list[list[int]]] = {}
    for decode in programs.values():
        decode(prompts[0])  # warm
    for at in range(asked.rounds):
        for name in programs:
            texts[name] = []
        for prompt in prompts:
            for name, decode in programs.items():
                start = time.perf_counter()
                made = decode(prompt)
                took[name][at] += time.perf_counter() - start
                texts[name].append(made)
    tokens = len(prompts) * asked.new
    print(
        f"{asked.model} float32, {asked.threads} threads, {len(prompts)} prompts of {asked.task},"
        f" {asked.new} tokens each, {asked.rounds} rounds; OpenVINO GenAI {version}"
    )
    print(f"{'':>14} {'tokens/s':>9} {'ours over it':>13} {'ids as ours':>12}")
    best = {name: tokens / min(seconds) for name, seconds in took.items()}
    for name, rate in best.items():
        same = sum(map(list.__eq__, texts[name], texts["specbench"]))
        ratio = best["specbench"] / rate
        print(f"{name:>14} {rate:>9.1f} {ratio:>13.2f} {same:>8} of {len(prompts)}")


if __name__ == "__main__":
    main()

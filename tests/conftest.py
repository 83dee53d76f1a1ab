"""Fixtures shared by all tests.

torch is imported where it is used: the process that only deals tests out to others needs none.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # A processor each: threads of two workers on the same ones would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from specbench_cli.measure import quiet
from specbench_cli.models.aliases import HERE, Alias, aliases
from specbench_cli.testing import few_cases

# A shell has what it starts in the background ignore interrupts, and so would processes that tests
# start, which are interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Containers often say that nothing compiled is kept. Then each process that a test starts compiles
# the whole package for itself, and each worker the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says how busy the machine is.
settings.register_profile("specbench", deadline=None)
settings.load_profile("specbench")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: no worker is alone with it in the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws of torch is the same each time, whatever ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _no_idling() -> Iterator[None]:
    """Runs neither idle until a second of the machine's quietness is measured nor rest before each
    cell: no test believes these times.

    Passes in processes of their own do.
    """
    with (
        patch.object(quiet, "WINDOW_S", 0.02),
        patch("specbench_cli.measure.measurement.PAUSE_S", 0.0),
    ):
        yield


@pytest.fixture(autouse=True, scope="session")
def _permissions_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep permissions of tests out of the user's cache."""
    folder = tmp_path_factory.mktemp("permitted")
    with patch("specbench_cli.config.permission._folder", lambda: folder):
        yield


@pytest.fixture(autouse=True, scope="session")
def _seldom_thawed() -> Iterator[None]:
    """What all tests are made of is no garbage, and no collection goes through it.

    A pass of a run thaws what it froze, and so all of torch and of pytest: here after every
    sixtieth alone.
    """
    passes, thaw = count(1), gc.unfreeze

    def seldom() -> None:
        if next(passes) % 60 == 0:
            thaw()
            gc.collect()
            gc.freeze()

    gc.collect()
    gc.freeze()
    with patch.object(gc, "unfreeze", seldom):
        yield
    thaw()


@pytest.fixture(scope="session")
def _small_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By the names of the shipped pair: its draft, and that draft's first layer alone."""
    from safetensors.torch import load_file, save_file

    draft = HERE / "embedded" / "embedded-1m"
    folder = tmp_path_factory.mktemp("small") / "first-layer"
    shutil.copytree(draft, folder)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    written = json.dumps(config | {"num_hidden_layers": 1})
    (folder / "config.json").write_text(written, encoding="utf-8")
    weights = load_file(draft / "model.safetensors")
    first = {name: weight for name, weight in weights.items() if ".layers.1." not in name}
    save_file(first, folder / "model.safetensors", metadata={"format": "pt"})
    return {"embedded-7m": str(draft), "embedded-1m": str(folder)}


@pytest.fixture(scope="module")
def small_pair(_shipped: dict[str, Alias], _small_folders: dict[str, str]) -> Iterator[None]:
    """A pair of an eighth of the numbers goes by the names of the shipped one in this process, and
    has no heads: for what needs no figure of the shipped pair."""
    names = {
        name: entry.model_copy(update={"folder": _small_folders[name], "heads": {}})
        for name, entry in _shipped.items()
        if name in _small_folders
    }
    with patch.dict(aliases(), names):
        yield


@pytest.fixture(scope="module")
def _shipped() -> dict[str, Alias]:
    return dict(aliases())


@pytest.fixture
def shipped_pair(_shipped: dict[str, Alias], small_pair: None) -> Iterator[None]:
    """The shipped pair in a module of small ones."""
    with patch.dict(aliases(), _shipped):
        yield


@pytest.fixture
def server() -> Iterator[Callable[..., Any]]:
    """Starts servers that answer as real ones do; see `tests/methods/server.py`."""
    double = runpy.run_path(str(Path(__file__).parent / "methods" / "server.py"))["Double"]
    with ExitStack() as started:
        yield lambda *args, **more: started.enter_context(double(*args, **more))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: small models are slower on two."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def short_audit() -> Iterator[None]:
    """Audits look at few cases: those of every method in full are `specbench audit --all`."""
    with few_cases():
        yield


WRITE_FIGURES = "specbench_cli.report.outputs.write_figures"


@pytest.fixture(autouse=True, scope="session")
def _no_figures() -> Iterator[None]:
    """Runs end without their pictures, which take longer than small runs themselves."""
    with patch(WRITE_FIGURES, lambda *_, **__: []):
        yield


@pytest.fixture(scope="module")
def figures() -> Iterator[None]:
    """Runs of a module end with their pictures."""
    from specbench_cli.report.figures import write_figures

    with patch(WRITE_FIGURES, write_figures):
        yield


@pytest.fixture(autouse=True, scope="session")
def curves() -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """Trainings draw no curves, which takes longer than a short training, except inside the
    context manager that this returns."""
    from specbench_cli.commands.training import _shared

    draw = _shared._draw
    with patch.object(_shared, "_draw", lambda *_: None):
        yield lambda: patch.object(_shared, "_draw", draw)


SIZES = {
    "vocab_size": 197,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
"""A model of 100,000 parameters with shared key and value heads."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 7}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba2": (
        "Mamba2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "head_dim": 16,
            "num_heads": 4,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "jamba": (
        "JambaConfig",
        {
            "num_hidden_layers": 4,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "num_hidden_layers": 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_ssm": 64,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
    ),
    "rwkv": ("RwkvConfig", {"hidden_size": 32, "num_hidden_layers": 2}),
    "t5": (
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartConfig",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 256,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": None,
        },
    ),
    "llava": (
        "LlavaConfig",
        {
            "image_token_index": 196,
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
        },
    ),
}
"""Family -> transformers' config class and what its tiny model has of its own."""

IDS = ("vocab_size", "bos_token_id", "eos_token_id")
TAKES = dict.fromkeys(("gpt2", "mamba2", "mamba", "rwkv", "t5", "bart"), IDS)
"""Which of `SIZES` a family's configuration knows by these names; default: all."""

KINDS = {"t5": "Seq2SeqLM", "bart": "Seq2SeqLM", "llava": "ImageTextToText"}
"""Which of transformers' kinds of model a family is; default: causal."""

TinyCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A maker of tiny random checkpoints as transformers writes them, each made once a session.

    `tiny_checkpoint(family, *, seed=0, noise=0.0, dtype=torch.float32, shard=None, **config) ->
    folder`; `noise` is added to each matrix, as a share of its spread; `shard` is the largest size
    of a weight file ("100KB"), `config` overrides the family's configuration.
    """
    import torch

    made: dict[str, Path] = {}

    def make(
        family: str,
        *,
        seed: int = 0,
        noise: float = 0.0,
        dtype: torch.dtype = torch.float32,
        shard: str | None = None,
        **overrides: Any,
    ) -> Path:
        key = f"{family} {seed} {noise} {dtype} {shard} {sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            config_class, own = FAMILIES[family]
            sizes = {key: SIZES[key] for key in TAKES.get(family, SIZES)}
            if family == "llava":
                sizes = {"text_config": {"model_type": "llama", **SIZES}}
            transformers = importlib.import_module("transformers")
            config = getattr(transformers, config_class)(**(sizes | own | overrides))
            kind = KINDS.get(family, "CausalLM")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
                for (
                    weight
                ) in module.parameters():  # so that norms and biases matter, and logits spread
                    weight.data += 0.1 * torch.randn_like(weight)
                for weight in module.parameters() if noise else ():
                    weight.data += noise * weight.std() * torch.randn_like(weight)
            module.to(dtype).save_pretrained(folder, max_shard_size=shard or "1GB")
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="module")
def call_here(tmp_path_factory, request):
    """Runs a command in one folder for all; returns exit code, stdout, stderr."""
    from specbench_cli import app

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp(request.module.__name__.rpartition("_")[2]))
        for name in ("FORCE_COLOR", "SPECBENCH_DEBUG"):
            patch.setenv(name, "")

        def run(capsys, *args):
            code = app._run(list(args))
            return (code, *capsys.readouterr())

        yield run


ISOLATION = {"isolation": "none"}
"""Plug-ins of tests are run by this process: a process of their own takes seconds to start."""


class Log:
    """A view that remembers what it was shown, and may interrupt after some cells."""

    def __init__(self, interrupt_after=None):
        self.interrupt_after = interrupt_after
        self.facts = None
        self.notes = []
        self.cells = []
        self.said = []

    def planned(self, facts):
        self.facts = facts

    def started(self, cells, done, run_dir):
        self.total, self.done = cells, done

    def stage(self, text):
        self.said.append(text)

    def prompt(self, progress):
        self.said.append(progress)

    def window(self, other_cpu, text):
        pass

    def show_record(self, record):
        self.cells.append(record.key)
        if len(self.cells) == self.interrupt_after:
            raise KeyboardInterrupt

    def note(self, text):
        self.notes.append(text)

    def hand_over(self):
        pass

    def flags(self):
        return []


class Outcome:
    """What a run came to."""

    def __init__(self, result, log):
        from specbench_cli.store.run_dir import RunDir

        self.path: Path = result.run_dir
        self.exit_code = result.exit_code
        self.log = log
        run_dir = RunDir.open(result.run_dir)
        self.manifest = run_dir.manifest
        self.prompts = list(run_dir.prompts())
        self.records = list(run_dir.records())

    def by_label(self, label):
        return [record for record in self.records if record.label == label]


@pytest.fixture(scope="session")
def log():
    """The class of views that remember."""
    return Log


@pytest.fixture
def specbench(tmp_path, monkeypatch):
    """Run a configuration through plan, cells and records; returns an `Outcome`."""
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure import run as execute
    from specbench_cli.measure import warm_up

    monkeypatch.setattr(warm_up, "WARM_UP_ROUNDS", 1)
    made = []

    def run(*methods, log=None, resume=None, **config):
        log = log or Log()
        if resume is not None:
            plan, run_dir = execute.resume_run(resume, log)
        else:
            made.append(None)
            rows = [
                {"name": "vanilla"},
                *({"name": m} if isinstance(m, str) else m for m in methods),
            ]
            base = {"limit": 2, "max_new_tokens": 12, "allow_noise": True, **ISOLATION}
            checked = RunConfig.model_validate({"methods": rows, **base, **config})
            plan, run_dir = execute.start_run(checked, {}, tmp_path / f"run{len(made)}", log)
        return Outcome(execute.measure_run(plan, run_dir, log), log)

    run.log = Log
    run.path = lambda n: tmp_path / f"run{n}"
    return run

"""Fixtures shared by all tests.

Fixtures import torch where they use it: the xdist process that only distributes tests needs none.
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
    # One thread per worker: threads of two workers on one core would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from specbench_cli.measure import quiet
from specbench_cli.models.aliases import HERE, Alias, aliases
from specbench_cli.testing import few_cases

# A background process of a shell ignores SIGINT, and its child processes inherit this. Tests
# interrupt child processes, so the default handler is set again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Containers often set this variable. Without bytecode files, each process that a test starts would
# compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline: the time of an example depends on how busy the machine is.
settings.register_profile("specbench", deadline=None)
settings.load_profile("specbench")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long tests first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed torch before each test, so that random values do not depend on earlier tests."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _without_pauses() -> Iterator[None]:
    """Skip the pauses of a run, because tests do not use its times.

    A run waits for a quiet machine, and pauses before each measurement. Repeats in child processes
    keep these pauses.
    """
    with (
        patch.object(quiet, "WINDOW_S", 0.02),
        patch("specbench_cli.measure.measurement.PAUSE_S", 0.0),
    ):
        yield


@pytest.fixture(autouse=True, scope="session")
def _permissions_outside_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store the permissions that tests grant outside the user's cache."""
    folder = tmp_path_factory.mktemp("permitted")
    with patch("specbench_cli.config.permission._folder", lambda: folder):
        yield


@pytest.fixture(autouse=True, scope="session")
def _fewer_collections() -> Iterator[None]:
    """Exclude the modules of torch and pytest from garbage collection, which is then faster.

    Each repeat of a run unfreezes all objects. Here, only every 60th call does.
    """
    calls, unfreeze = count(1), gc.unfreeze

    def unfreeze_every_60th_time() -> None:
        if next(calls) % 60 == 0:
            unfreeze()
            gc.collect()
            gc.freeze()

    gc.collect()
    gc.freeze()
    with patch.object(gc, "unfreeze", unfreeze_every_60th_time):
        yield
    unfreeze()


@pytest.fixture(scope="session")
def _small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the model folders of `small_pair`, by the names of the shipped pair.

    The target is the shipped draft model. The draft model is the first layer of it.
    """
    from safetensors.torch import load_file, save_file

    draft = HERE / "embedded" / "embedded-1m"
    folder = tmp_path_factory.mktemp("small") / "first-layer"
    shutil.copytree(draft, folder)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    config_text = json.dumps(config | {"num_hidden_layers": 1})
    (folder / "config.json").write_text(config_text, encoding="utf-8")
    weights = load_file(draft / "model.safetensors")
    first = {name: weight for name, weight in weights.items() if ".layers.1." not in name}
    save_file(first, folder / "model.safetensors", metadata={"format": "pt"})
    return {"embedded-7m": str(draft), "embedded-1m": str(folder)}


@pytest.fixture(scope="module")
def small_pair(_shipped_aliases: dict[str, Alias], _small_models: dict[str, str]) -> Iterator[None]:
    """Replace the shipped models by a pair of an eighth of the parameters, without heads.

    Tests use it if they do not depend on the outputs of the shipped pair.
    """
    names = {
        name: entry.model_copy(update={"folder": _small_models[name], "heads": {}})
        for name, entry in _shipped_aliases.items()
        if name in _small_models
    }
    with patch.dict(aliases(), names):
        yield


@pytest.fixture(scope="module")
def _shipped_aliases() -> dict[str, Alias]:
    return dict(aliases())


@pytest.fixture
def shipped_pair(_shipped_aliases: dict[str, Alias], small_pair: None) -> Iterator[None]:
    """Restore the shipped pair for one test in a module that uses `small_pair`."""
    with patch.dict(aliases(), _shipped_aliases):
        yield


@pytest.fixture
def server() -> Iterator[Callable[..., Any]]:
    """Return a function that starts a test server; see `tests/methods/server.py`."""
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
    """Reduce the number of cases per audit check. `specbench audit --all` tests all cases."""
    with few_cases():
        yield


WRITE_FIGURES = "specbench_cli.report.outputs.write_figures"


@pytest.fixture(autouse=True, scope="session")
def _no_figures() -> Iterator[None]:
    """Skip the figures of a run, which take longer than a small run."""
    with patch(WRITE_FIGURES, lambda *_, **__: []):
        yield


@pytest.fixture(scope="module")
def figures() -> Iterator[None]:
    """Draw the figures of the runs in a module."""
    from specbench_cli.report.figures import write_figures

    with patch(WRITE_FIGURES, write_figures):
        yield


@pytest.fixture(autouse=True, scope="session")
def curves() -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """Skip the curves of a training, which take longer than a short training.

    Return a context manager in which trainings draw them.
    """
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
"""The config class of each family in transformers, and the settings of its tiny model."""

IDS = ("vocab_size", "bos_token_id", "eos_token_id")
TAKES = dict.fromkeys(("gpt2", "mamba2", "mamba", "rwkv", "t5", "bart"), IDS)
"""The keys of `SIZES` that a family's configuration has. Other families have all of them."""

KINDS = {"t5": "Seq2SeqLM", "bart": "Seq2SeqLM", "llava": "ImageTextToText"}
"""The model type of a family in transformers. Other families are causal language models."""

TinyCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Return a function that writes tiny random checkpoints, each once per session.

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
            config_class, extra_settings = FAMILIES[family]
            sizes = {key: SIZES[key] for key in TAKES.get(family, SIZES)}
            if family == "llava":
                sizes = {"text_config": {"model_type": "llama", **SIZES}}
            transformers = importlib.import_module("transformers")
            config = getattr(transformers, config_class)(**(sizes | extra_settings | overrides))
            kind = KINDS.get(family, "CausalLM")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
                # Noise gives norms and biases an effect, and spreads the logits.
                for weight in module.parameters():
                    weight.data += 0.1 * torch.randn_like(weight)
                for weight in module.parameters() if noise else ():
                    weight.data += noise * weight.std() * torch.randn_like(weight)
            module.to(dtype).save_pretrained(folder, max_shard_size=shard or "1GB")
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="module")
def call_here(tmp_path_factory, request):
    """Return a function that runs a command and returns exit code, stdout and stderr.

    All tests of a module share the working folder.
    """
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
"""Setting to run plug-ins in this process, because a plug-in process takes seconds to start."""


class Log:
    """A view that keeps what a run reports. It can interrupt the run after some records."""

    def __init__(self, interrupt_after=None):
        self.interrupt_after = interrupt_after
        self.facts = None
        self.notes = []
        self.record_keys = []
        self.events = []

    def planned(self, facts):
        self.facts = facts

    def started(self, total, done, run_dir):
        self.total, self.done = total, done

    def stage(self, text):
        self.events.append(text)

    def prompt(self, progress):
        self.events.append(progress)

    def window(self, other_cpu, text):
        pass

    def show_record(self, record):
        self.record_keys.append(record.key)
        if len(self.record_keys) == self.interrupt_after:
            raise KeyboardInterrupt

    def note(self, text):
        self.notes.append(text)

    def hand_over(self):
        pass

    def flags(self):
        return []


class Outcome:
    """The result of a run: exit code, records and the view's log."""

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
    """Return the class of the views that keep what a run reports."""
    return Log


@pytest.fixture
def specbench(tmp_path, monkeypatch):
    """Return a function that plans and measures a run and returns its `Outcome`."""
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

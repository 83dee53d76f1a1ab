"""Fuzzing of model files: checkpoints, heads and GGUF files, all tiny."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from mutate import bytes_changed, changed, line
from subjects import Subject

from specbench_cli import registry
from specbench_cli.engine.models.checkpoint import read_checkpoint_facts
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.measure.bench import check_memory, read_checkpoint
from specbench_cli.models.gguf import convert_gguf
from specbench_cli.models.heads import HeadFiles, resolve_head
from specbench_cli.models.resolve import Checkpoint, resolve

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "num_local_experts": 2,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Gemma2", "Mixtral", "GPT2")
LENGTHS = (0, 1, 2**31, 2**62, 2**63, 2**64 - 1)
"""Metadata keys of a safetensors header."""
HEADS = {
    "embedded": (
        *("medusa", "hydra", "hydra++", "clover", "eagle", "eagle3", "p-eagle", "mtp", "dflash"),
        *("pard", "falcon", "chimera", "hidden-transfer", "specdec++", "rest"),
    ),
    "embedded-space": ("space",),
}
"""Methods with a trained module of their own, by target."""
ROWS = 5


class Checkpoints(Subject):
    """Fuzz target: a checkpoint folder with its config, index and weight header."""

    name = "checkpoints"
    inputs = 150

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        transformers.logging.disable_progress_bar()
        self.seeds = []
        for family in FAMILIES:
            torch.manual_seed(0)
            made = getattr(transformers, f"{family}Config")(**SIZES)
            module = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
            module.save_pretrained(self.folder / family)
            index = {"weight_map": dict.fromkeys(module.state_dict(), "model.safetensors")}
            self.seeds.append((self.folder / family, index))

    def tried(self, rng: Random) -> str | None:
        seed, index = rng.choice(self.seeds)
        folder = self.folder / "x"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(seed, folder)
        draw = rng.random()
        if draw < 0.6:
            changed_file(rng, folder / "config.json")
        elif draw < 0.7:
            changed_file(rng, folder / "generation_config.json")
        elif draw < 0.8:
            listing = folder / "model.safetensors.index.json"
            listing.write_text(line(index))
            changed_file(rng, listing)
        else:
            changed_weights(rng, folder / "model.safetensors")
        checkpoint = Checkpoint("x", "x", folder)
        facts = read_checkpoint(read_checkpoint_facts, checkpoint)
        check_memory([("x", facts)], torch.float32, torch.device("cpu"))
        decoder = read_checkpoint(lambda path: load_decoder(path, name="target"), checkpoint)
        if not all(0 <= each < facts.vocab_size for each in facts.eos):
            return "accepted an end that is no token"
        if decoder.max_positions < ROWS:
            return None
        ids = Tokens(torch.arange(ROWS)[None] % facts.vocab_size)
        logits = decoder.forward(ids, decoder.new_state(ROWS + 1)).logits
        return None if logits.shape[-1] == facts.vocab_size else "accepted another vocabulary"


class Heads(Subject):
    """Fuzz target: the folder of a head, a predictor or a datastore of an embedded target."""

    name = "heads"
    inputs = 125

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        draft = load_decoder(resolve("embedded-1m").path, name="draft")
        self.kinds = []
        for name, methods in HEADS.items():
            target = resolve(name)
            decoders = {"target": load_decoder(target.path, name="target"), "draft": draft}
            for method in methods:
                (wanted,) = registry.build(method, {}).artifacts()
                kind = wanted.kind
                files = resolve_head("auto", kind.kind, target, in_target=kind.inside)
                self.kinds.append((kind, files.path, decoders))

    def tried(self, rng: Random) -> str | None:
        kind, source, decoders = rng.choice(self.kinds)
        folder = self.folder / "x"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
        if rng.random() < 0.7:
            changed_file(rng, folder / "config.json")
        else:
            changed_weights(rng, next(folder.glob("*.safetensors")))
        read_checkpoint(lambda path: kind.load(path, decoders), HeadFiles("x", folder))
        return None


class Ggufs(Subject):
    """Fuzz target: a GGUF file with changes in its header, counts, metadata or end."""

    name = "gguf"
    inputs = 300

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ["SPECBENCH_CACHE"] = str(self.folder / "cache")
        file = self.folder / "good.gguf"
        _tiny_gguf(file)
        self.data = file.read_bytes()
        if self.trial_of(self.data) is not None:
            raise AssertionError("the right file is refused")

    def trial_of(self, data: bytes) -> str | None:
        file = self.folder / "x.gguf"
        file.write_bytes(data)
        try:
            folder = convert_gguf(file)
            checkpoint = Checkpoint("x", "x", folder)
            facts = read_checkpoint(read_checkpoint_facts, checkpoint)
            check_memory([("x", facts)], torch.float32, torch.device("cpu"))
            read_checkpoint(lambda path: load_decoder(path, name="target"), checkpoint)
        finally:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        return None

    def tried(self, rng: Random) -> str | None:
        data, header = bytearray(self.data), len(self.data) * 2 // 3
        draw = rng.random()
        if draw < 0.1:
            del data[rng.randrange(len(data)) :]
        elif draw < 0.4:
            kind, value = rng.choice([("<Q", rng.choice(LENGTHS)), ("<I", rng.randrange(2**32))])
            value = value if kind == "<Q" else rng.choice([value, 0, 1, 2**31, 2**32 - 1, 8, 9])
            struct.pack_into(kind, data, rng.choice([8, 16, rng.randrange(header - 8)]), value)
        elif draw < 0.8:
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(header)] = rng.randrange(256)
        else:
            data = bytearray(bytes_changed(rng, bytes(data[:header])) + bytes(data[header:]))
        return self.trial_of(bytes(data))


def changed_file(rng: Random, file: Path) -> None:
    """Change values or bytes of a JSON file. A link becomes a separate file."""
    data = file.read_bytes()
    file.unlink()
    if rng.random() < 0.15:
        file.write_bytes(bytes_changed(rng, data))
    else:
        file.write_text(line(changed(rng, json.loads(data), rng.choice([1, 1, 2]))[0]))


def changed_weights(rng: Random, file: Path) -> None:
    """Change the header, the length or the end of a safetensors file."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    draw = rng.random()
    if draw < 0.2:
        length = rng.choice([*LENGTHS, length + 1, length - 1])
    elif draw < 0.4:
        rest = rest[: rng.randrange(len(rest))]
    elif draw < 0.6:
        header = bytes_changed(rng, header)
    else:
        header = line(changed(rng, json.loads(header), 1)[0]).encode()
        length = len(header)
    file.unlink()
    file.write_bytes(struct.pack("<Q", length) + header + rest)


def _tiny_gguf(file: Path) -> None:
    """Write a one-layer Llama with a tokenizer of 32 tokens."""
    writer, rng = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
    own = {"context_length": 64, "embedding_length": 16, "block_count": 1}
    for key, value in {**own, "feed_forward_length": 24}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", *(chr(33 + at) for at in range(29)), '!"'])
    writer.add_token_types([3, 3, *[1] * 30])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (32, 16), "output_norm": (16,), "output": (32, 16)}
    block = {"attn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16)}
    block |= {"attn_output": (16, 16), "ffn_norm": (16,), "ffn_gate": (24, 16)}
    block |= {"ffn_up": (24, 16), "ffn_down": (16, 24)}
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

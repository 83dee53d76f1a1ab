"""Decoding with llama.cpp through its Python binding, llama-cpp-python.

The weights of a transformers model are written to a GGUF file in float32. The binding loads this
file and decodes one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from methods._engines import CompletionReply, get_model_folder
from specbench_cli.api import MethodFault, PeerSession, read_output_ids

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Map from transformers' `model_type` to llama.cpp's architecture."""
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_ROWS = 256
"""llama.cpp rounds the context size up to a multiple of this number."""

Ids = NDArray[np.intc]
DraftFunction = Callable[[Ids], Ids]


class CountingDrafter:
    """Draft function for the argument `draft_model` of the binding.

    It counts calls and draft tokens.

    Args:
        guess: Function that takes the token ids so far and returns the draft tokens.

    Attributes:
        steps: Number of calls in the current request.
        drafted: Number of draft tokens in the current request.
    """

    def __init__(self, guess: DraftFunction) -> None:
        self._guess = guess
        self.steps = self.drafted = 0

    def __call__(self, ids: Ids, /, **_: Any) -> Ids:
        found = self._guess(ids)
        self.steps += 1
        self.drafted += len(found)
        return found


@dataclass(frozen=True, slots=True)
class LlamaCppEngine:
    """Target that the binding loaded. It may have a draft function and a draft model."""

    target: Any
    drafting: CountingDrafter | None = None
    draft: Any = None


def load_model(session: PeerSession, role: str, *, ahead: int = 0, **more: Any) -> Any:
    """Load a model with the binding and return it.

    The model uses the same number of threads as torch. Its float32 KV cache has space for the
    longest sequence of the run.

    Args:
        session: Session of the run.
        role: "target" or "draft".
        ahead: Maximum number of draft tokens. The KV cache has additional space for them.
        more: Further arguments of `llama_cpp.Llama`.
    """
    binding, threads = import_module("llama_cpp"), torch.get_num_threads()
    rows = session.state.capacity + ahead + 1
    return binding.Llama(
        model_path=str(get_gguf_file(session.module(role))),
        n_ctx=-(-rows // _ROWS) * _ROWS,
        n_threads=threads,
        n_threads_batch=threads,
        type_k=binding.GGML_TYPE_F32,
        type_v=binding.GGML_TYPE_F32,
        verbose=False,
        **more,
    )


def make_lookup_drafter(ngram: int, length: int) -> CountingDrafter:
    """Return a draft function that uses the binding's prompt lookup."""
    own = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    return CountingDrafter(own(max_ngram_size=ngram, num_pred_tokens=length))


def make_model_drafter(draft: Any, length: int) -> CountingDrafter:
    """Return a draft function that decodes greedily with a draft model.

    The binding reuses the KV entries of tokens that did not change since the last call.
    """

    def guess(ids: Ids) -> Ids:
        return np.array([*islice(draft.generate(ids.tolist(), temp=0.0), length)], dtype=np.intc)

    return CountingDrafter(guess)


def decode(engine: LlamaCppEngine, session: PeerSession) -> CompletionReply:
    """Decode the session's request greedily. KV entries of earlier requests are not reused."""
    request, drafting = session.requests[0], engine.drafting
    stop, reply = request.stop, CompletionReply()
    for model in filter(None, (engine.target, engine.draft)):
        model.reset()
    if drafting is not None:
        drafting.steps = drafting.drafted = 0
    for token in engine.target.generate(request.ids, temp=0.0):
        reply.ids.append(token)
        reply.last_ns = session.now_ns()
        reply.first_ns = reply.first_ns or reply.last_ns
        if token in stop.eos or len(reply.ids) == stop.max_new_tokens:
            break
    if drafting is not None:
        reply.drafted = drafting.drafted
        reply.accepted = len(reply.ids) - 1 - drafting.steps  # one token per step is not drafted
    return reply


def get_gguf_file(module: Any) -> Path:
    """Write the weights of a module to a GGUF file, in float32 and without a tokenizer.

    Return its path.

    Raises:
        MethodFault: llama.cpp or specbench does not support the architecture.
    """
    return get_model_folder(module, "gguf", lambda folder: _write(module, folder / _FILE)) / _FILE


_FILE = "model.gguf"


def _write(module: Any, path: Path) -> None:
    config = module.config
    kind, rope = _read_architecture(config)
    writer = gguf.GGUFWriter(path, kind)
    for key, own in _SIZES.items():
        writer.add_uint32(f"{kind}.{key}", getattr(config, own))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = module.state_dict()
    ids = read_output_ids(tensors, config.vocab_size, "a module")
    for name in ("d2t", "t2d"):  # `ids` contains this information
        tensors.pop(name, None)
    if ids is not None:
        tensors["lm_head.weight"] = _expand_output_matrix(
            tensors["lm_head.weight"], ids, config.vocab_size
        )
    for name, weight in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, (".weight", ".bias"))
        if stored is None:
            raise MethodFault(f"llama.cpp's architecture {kind} has no tensor for {name}", _HINT)
        part = stored.split(".")[-2]
        interleaved = kind == "llama" and part in heads
        rows = _interleave_rotary_rows(weight, heads[part]) if interleaved else weight
        writer.add_tensor(stored, np.ascontiguousarray(rows.float().cpu().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_HINT = "run without this method"


def _expand_output_matrix(rows: Tensor, ids: Tensor, size: int) -> Tensor:
    """Return an output matrix [size, hidden] for all token ids, from a matrix for some token ids.

    llama.cpp needs a row for every id. A missing row is set to the mean of the known rows. Its
    logit is the mean of the known logits, so it is never the most likely token.

    Args:
        rows: Known rows of the output matrix, [r, hidden].
        ids: Token ids of these rows, [r].
        size: Number of token ids.
    """
    whole = rows.mean(0).repeat(size, 1)
    whole[ids] = rows
    return whole


def _read_architecture(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the architecture in llama.cpp, and the settings of the rotary
    embedding.
    """
    kind, rope = ARCHITECTURES.get(config.model_type), config.rope_parameters
    if kind is None:
        written = ", ".join(ARCHITECTURES)
        why = f"model_type {config.model_type} cannot be written as GGUF; supported: {written}"
        raise MethodFault(why, _HINT)
    if rope["rope_type"] != "default":
        why = f"rope_type {rope['rope_type']} cannot be written as GGUF"
        raise MethodFault(why, _HINT)
    if getattr(config, "sliding_window", None) is not None:
        raise MethodFault("a model with sliding_window cannot be written as GGUF", _HINT)
    return kind, rope


def _interleave_rotary_rows(weight: Tensor, heads: int) -> Tensor:
    """Return q_proj or k_proj with its rows in the order that llama.cpp expects.

    llama.cpp's rotary embedding rotates adjacent pairs of dimensions. The two dimensions of a pair
    in transformers are half a head apart.
    """
    halves: Sequence[int] = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(halves).transpose(1, 2).reshape(weight.shape)

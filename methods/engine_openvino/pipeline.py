"""Decoders as OpenVINO models.

transformers' module is traced once. Its keys and values become state, as OpenVINO GenAI requires.
Everything is in float32, including the KV cache.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from methods._engines import CompletionReply, get_model_folder
from specbench_cli.api import PeerSession

PRECISE = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
"""The same precision as our own decoding. OpenVINO's default stores keys and values in 8 bits."""
_TRACED = 2, 3
"""Number of tokens and of KV entries in the traced example. No other size has these values."""


def create_pipeline(tokenizer: Any, module: Any, draft: Any = None, **properties: Any) -> Any:
    """Return GenAI's pipeline for a transformers module, on the CPU, with as many threads as torch.

    Args:
        tokenizer: transformers' tokenizer. GenAI requires one although it gets token ids.
        draft: Draft module, if any.
        properties: Further OpenVINO properties.
    """
    genai = import_module("openvino_genai")
    shared = PRECISE | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    if draft is not None:
        properties["draft_model"] = genai.draft_model(
            export_model(tokenizer, draft), "CPU", **shared
        )
    return genai.LLMPipeline(export_model(tokenizer, module), "CPU", **shared, **properties)


def decode(pipeline: Any, session: PeerSession, **options: Any) -> CompletionReply:
    """Decode the session's request greedily. GenAI itself reports the time of the first token.

    Args:
        options: Further generation settings.
    """
    genai, core = import_module("openvino_genai"), import_module("openvino")
    request, stop = session.requests[0], session.requests[0].stop
    settings = genai.GenerationConfig(
        max_new_tokens=stop.max_new_tokens,
        stop_token_ids=set(stop.eos),
        ignore_eos=not stop.eos,
        do_sample=False,
        **options,
    )
    began = session.now_ns()
    said = pipeline.generate(core.Tensor(np.array([request.ids], dtype=np.int64)), settings)
    ended = session.now_ns()
    first = began + round(said.perf_metrics.get_ttft().mean * 1e6)
    reply = CompletionReply(said.tokens[0], first_ns=min(first, ended), last_ns=ended)
    counted = said.extended_perf_metrics
    if counted is not None:
        reply.drafted = counted.draft_model_metrics.get_num_generated_tokens()
        reply.accepted = counted.get_num_accepted_tokens()
    return reply


def export_model(tokenizer: Any, module: Any) -> str:
    """Return the folder with a module's OpenVINO model and tokenizer."""

    def write(folder: Path) -> None:
        core, own = import_module("openvino"), import_module("openvino_tokenizers")
        encoder, decoder = own.convert_tokenizer(tokenizer, with_detokenizer=True)
        models = {"model": _convert_stateful(module), "tokenizer": encoder, "detokenizer": decoder}
        for name, model in models.items():
            core.save_model(model, folder / f"openvino_{name}.xml", compress_to_fp16=False)
        module.config.save_pretrained(folder)

    return str(get_model_folder(module, "openvino", write))


class _GrowingCache:
    """Cache for transformers that appends new keys and values to the given ones."""

    is_compileable = False

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows = list(rows)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.rows[0].shape[-2]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        for at, new in ((2 * layer, keys), (2 * layer + 1, values)):
            self.rows[at] = torch.cat((self.rows[at], new), -2)
        return self.rows[2 * layer], self.rows[2 * layer + 1]


class _TracedModel(nn.Module):
    """Causal module as a function of its cache. It returns the logits and the new cache."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        accepted = inspect.signature(module.forward).parameters
        self.keeps = "cache" if "cache" in accepted else "past_key_values"  # older than 5.24

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache, at = _GrowingCache(past), torch.arange(attention_mask.shape[1])
        unseen = at[None, None, None, :] > position_ids[:, None, :, None]
        mask = torch.zeros(unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)
        said = self.module(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            **{self.keeps: cache},
            use_cache=True,
        )
        return said.logits, *cache.rows


def _convert_stateful(module: Any) -> Any:
    """Return the OpenVINO model with ids, mask, positions and beams as inputs, logits as output,
    and the cache as state."""
    core, ops = import_module("openvino"), import_module("openvino.opset13")
    transformations = import_module("openvino._offline_transformations")
    config, (n, before) = module.config, _TRACED
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = [torch.zeros(1, heads, before, width) for _ in range(2 * config.num_hidden_layers)]
    ids = torch.ones(1, n, dtype=torch.int64)
    example = (ids, torch.ones(1, before + n, dtype=torch.int64), before + ids.cumsum(1) - 1, *past)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # branches on shapes are the same for all texts
        model = core.convert_model(_TracedModel(module), example_input=example)
    state = {f"past.{at}": f"present.{at}" for at in range(len(past))}
    inputs = ["input_ids", "attention_mask", "position_ids", *state]
    for port, name in zip(model.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
        shape = [-1, heads, -1, width] if name in state else [-1, -1]
        port.get_node().set_partial_shape(core.PartialShape(shape))
    for port, name in zip(model.outputs, ["logits", *state.values()], strict=True):
        port.get_tensor().set_names({name})
    beams = ops.parameter(core.PartialShape([-1]), core.Type.i32, name="beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([beams])
    batch = ops.constant(0, dtype=np.int64)
    for name in state:
        port = model.input(name)
        readers = port.get_target_inputs()
        own = ops.gather(port, beams, batch)
        for reader in readers:
            reader.replace_source_output(own.output(0))
    model.validate_nodes_and_infer_types()
    transformations.apply_make_stateful_transformation(model, state)
    sequences = ops.gather(ops.shape_of(model.input("input_ids"), "i64"), [0], batch)
    sizes = (ops.constant(np.array([size], dtype=np.int64)) for size in (heads, 0, width))
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([sequences, *sizes], 0))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    model.validate_nodes_and_infer_types()
    return model

"""Conversion of transformers modules to OpenVINO models, and decoding with OpenVINO GenAI.

A transformers model is traced once. Its KV cache becomes internal state of the OpenVINO model, as
OpenVINO GenAI requires. Weights, computation and KV cache are in float32.
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
"""OpenVINO properties for float32. By default OpenVINO stores keys and values in 8 bits."""
_TRACED = 2, 3
"""Number of new tokens and of KV entries in the traced example. No other dimension has these
sizes."""


def create_pipeline(tokenizer: Any, module: Any, draft: Any = None, **properties: Any) -> Any:
    """Return an OpenVINO GenAI pipeline on the CPU that decodes with a transformers module.

    Args:
        tokenizer: transformers' tokenizer. OpenVINO GenAI requires a tokenizer, although requests
            contain token ids.
        module: Target, as transformers module.
        draft: Draft model, as transformers module, or None.
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
    """Decode the session's request greedily.

    Args:
        pipeline: Pipeline from `create_pipeline`.
        session: Session with one request.
        options: Further generation settings of OpenVINO GenAI.
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
    start = session.now_ns()
    result = pipeline.generate(core.Tensor(np.array([request.ids], dtype=np.int64)), settings)
    end = session.now_ns()
    first = start + round(result.perf_metrics.get_ttft().mean * 1e6)
    reply = CompletionReply(result.tokens[0], first_ns=min(first, end), last_ns=end)
    counted = result.extended_perf_metrics
    if counted is not None:
        reply.drafted = counted.draft_model_metrics.get_num_generated_tokens()
        reply.accepted = counted.get_num_accepted_tokens()
    return reply


def export_model(tokenizer: Any, module: Any) -> str:
    """Write a module and its tokenizer as OpenVINO models. Return the folder."""

    def write(folder: Path) -> None:
        core, tokenizers = import_module("openvino"), import_module("openvino_tokenizers")
        encoder, decoder = tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
        models = {"model": _convert_stateful(module), "tokenizer": encoder, "detokenizer": decoder}
        for name, model in models.items():
            core.save_model(model, folder / f"openvino_{name}.xml", compress_to_fp16=False)
        module.config.save_pretrained(folder)

    return str(get_model_folder(module, "openvino", write))


class _GrowingCache:
    """KV cache of a transformers model while it is traced.

    It appends new keys and values to tensors.

    Args:
        rows: Keys and values of each layer: keys of layer 0, values of layer 0, and so on.
    """

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
    """Language model with the KV cache as input and output, so that torch can trace the model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        accepted = inspect.signature(module.forward).parameters
        self.keeps = (
            "cache" if "cache" in accepted else "past_key_values"
        )  # before transformers 5.24

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache, at = _GrowingCache(past), torch.arange(attention_mask.shape[1])
        unseen = at[None, None, None, :] > position_ids[:, None, :, None]
        mask = torch.zeros(unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)
        result = self.module(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            **{self.keeps: cache},
            use_cache=True,
        )
        return result.logits, *cache.rows


def _convert_stateful(module: Any) -> Any:
    """Return the OpenVINO model of a transformers module.

    The inputs are token ids, attention mask, positions and beam indices. The output is the logits.
    The KV cache is internal state.
    """
    core, ops = import_module("openvino"), import_module("openvino.opset13")
    transformations = import_module("openvino._offline_transformations")
    config, (n, before) = module.config, _TRACED
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = [torch.zeros(1, heads, before, width) for _ in range(2 * config.num_hidden_layers)]
    ids = torch.ones(1, n, dtype=torch.int64)
    example = (ids, torch.ones(1, before + n, dtype=torch.int64), before + ids.cumsum(1) - 1, *past)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing warns about branches that depend on shapes
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
        gathered = ops.gather(port, beams, batch)
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
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

"""Checks that a checkpoint contains exactly the tensors that its config requires.

A missing or ignored tensor would silently produce another model with plausible output. So both
cases are errors, and the message names the tensor. The checks apply to targets, draft models and
heads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from specbench_cli.engine.models.checkpoint import OUTPUT_ID_TENSORS, Weights
from specbench_cli.errors import EnvironmentFault

_IRRELEVANT = re.compile(
    r"(.*\.)?rotary_emb\.inv_freq"  # computed from config.json
    r"|(.*\.)?(attn|attention)\.masked_bias"  # a constant of old GPT-2 files
    r"|(.*\.)?position_ids"
    r"|(model\.)?mtp(_layers)?\..*"  # multi-token prediction heads, read by the method `mtp`
)
_MASK = re.compile(r"(.*\.)?(attn|attention)\.bias")
"""A causal mask [1, 1, n, n], which old GPT-2 and GPT-NeoX files contain."""

_EXTRA_LAYER = re.compile(r"(model\.layers\.\d+\.).*")
_EXTRA_LAYER_MARK = "eh_proj.weight"
"""Tensor that marks a multi-token prediction layer of DeepSeek and GLM."""

_SCALES = re.compile(
    r".*(scale|scales|scale_inv|scaling_factor|SCB|absmax|qweight|qzeros|g_idx|biases|zero_point"
    r"|quant_map|quant_state.*|weight_packed|weight_shape)"
)
"""Names of tensors of quantized weights, such as scales."""


def is_irrelevant(name: str, weights: Weights) -> bool:
    """Return True if a tensor is known to have no effect on the model's output."""
    if name in OUTPUT_ID_TENSORS or _IRRELEVANT.fullmatch(name):
        return True
    if _MASK.fullmatch(name):
        shape = weights.shape(name)
        return len(shape) == 4 and shape[:2] == (1, 1)
    layer = _EXTRA_LAYER.fullmatch(name)
    return layer is not None and layer[1] + _EXTRA_LAYER_MARK in weights


def check_contents(
    source: str, weights: Weights, required: Mapping[str, tuple[int, ...]], *, tied: bool
) -> None:
    """Raise EnvironmentFault unless a checkpoint contains exactly the required tensors.

    Args:
        source: Name of the folder, for messages.
        weights: The tensors of the folder.
        required: Shapes of the required tensors, by name.
        tied: True if the config ties the output matrix to the embedding. Then the output matrix may
            be missing.
    """
    needed = {name: shape for name, shape in required.items() if not (tied and name == OUTPUT)}
    check_missing(source, [name for name in needed if name not in weights])
    if tied:
        check_tied(source, weights)
    check_unexpected(source, weights, (name for name in weights if name not in required))
    for name, shape in required.items():
        if name in weights and weights.shape(name) != shape:
            raise EnvironmentFault(
                f"{source}: {name} has the shape {list(weights.shape(name))}, but config.json"
                f" requires {list(shape)}",
                hint="specbench list models",
            )
    check_floating(source, weights)


def check_missing(source: str, missing: Collection[str]) -> None:
    """Raise EnvironmentFault if required tensors are missing."""
    if missing:
        raise EnvironmentFault(
            f"{source} lacks the tensor {min(missing)}{_format_others(missing)}, which its"
            " config.json requires",
            hint="download the folder again, or correct config.json (tie_word_embeddings for the"
            " output matrix)",
        )


def check_unexpected(source: str, weights: Weights, names: Iterable[str]) -> None:
    """Raise EnvironmentFault if an unexpected tensor may affect the output of the model."""
    unexpected = [name for name in names if not is_irrelevant(name, weights)]
    if not unexpected:
        return
    scales = [name for name in unexpected if _SCALES.fullmatch(name)]
    first = min(scales or unexpected)
    raise EnvironmentFault(
        f"{source} contains the tensor {first}{_format_others(unexpected)}, which does not belong"
        " to the model of its config.json",
        hint="use a checkpoint in float16 or bfloat16: this quantization is not supported"
        if scales
        else "use the config.json that these weights were saved with",
    )


def check_floating(source: str, weights: Weights) -> None:
    """Raise EnvironmentFault if a weight is stored as integers. It would need a scale
    to be used."""
    for name in weights:
        kind = weights.dtype(name)
        if name.endswith("weight") and not kind.startswith(("F", "BF", "drawn")):
            raise EnvironmentFault(
                f"{source}: {name} is stored as integers ({kind}), but config.json has no"
                " quantization_config",
                hint="use an unquantized checkpoint in float16 or bfloat16",
            )


OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_tied(source: str, weights: Weights) -> None:
    """Raise EnvironmentFault if the config ties output matrix and embedding, but they differ."""
    if OUTPUT not in weights or EMBEDDING not in weights:
        return
    output, embedding = weights[OUTPUT], weights[EMBEDDING]
    if not torch.equal(output, embedding.to(output.dtype)):
        raise untied_fault(source, OUTPUT)


def untied_fault(source: str, output: str) -> EnvironmentFault:
    """Return the error for an output matrix that differs from the embedding although the config
    ties them.
    """
    return EnvironmentFault(
        f"{source}: config.json sets tie_word_embeddings to true, but {output} differs from the"
        " embedding",
        hint="set tie_word_embeddings to false in config.json to use this output matrix, or delete"
        " the tensor",
    )


def check_report(source: str, weights: Weights, module: Any, report: Mapping[str, Any]) -> None:
    """Raise EnvironmentFault unless transformers used every tensor and initialized none randomly.

    Args:
        source: Name of the folder, for messages.
        weights: The tensors of the folder.
        module: The loaded model.
        report: The loading info of transformers (`output_loading_info=True`).
    """
    check_missing(source, sorted(report["missing_keys"]))
    check_unexpected(source, weights, sorted(report["unexpected_keys"]))
    if getattr(module.config, "quantization_config", None) is None:
        check_floating(source, weights)
    declared = module.get_expanded_tied_weights_keys(all_submodels=True)
    for output, embedding in declared.items():
        if module.get_parameter(output) is not module.get_parameter(embedding):
            raise untied_fault(source, output)


def _format_others(names: Collection[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""

"""Loading of decoders from checkpoint folders, and of transformers modules with the
same weights."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_cli.engine.models.attention import RotaryEmbedding
from specbench_cli.engine.models.checkpoint import (
    RandomWeights,
    Weights,
    disable_progress_bars,
    open_weights,
    output_id_tensors,
    read_config,
    read_decoder_config,
    read_output_ids,
    text_config,
)
from specbench_cli.engine.models.checkpoint_checks import check_contents, check_report
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.fused import FAMILIES, FusedDecoder, fits
from specbench_cli.engine.models.layers import FusedWeights, scatter_logits, tensor_shapes
from specbench_cli.engine.models.linear import LinearBackend
from specbench_cli.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    from specbench_cli.engine.models.transformers_decoder import TransformersModuleDecoder

_FOLDERS: WeakKeyDictionary[Decoder, Path] = WeakKeyDictionary()
_MODULES: WeakKeyDictionary[Decoder, Any] = WeakKeyDictionary()


def load_decoder(
    folder: Path,
    *,
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    host_module: bool = False,
    backend: LinearBackend | None = None,
) -> Decoder:
    """Load a decoder from a checkpoint.

    The result is a `FusedDecoder` for the model families that this class supports. For all other
    families, the result runs the transformers module.

    Args:
        folder: Folder with config.json and safetensors, as transformers writes them. A model shape
            has only config.json.
        name: Name of the decoder in traces and messages, "target" or "draft".
        device, dtype: Device and dtype of the computation. Weights are converted.
        host_module: True always uses the transformers module.
        backend: Backend of the fused decoder's linear layers. None uses `choose_backend`.

    Raises:
        EnvironmentFault: The folder is not a model folder, has no safetensors file, or lacks
            tensors.
        UsageError: The model family is not supported.
    """
    device = torch.device(device)
    config, weights = read_decoder_config(folder), open_weights(folder)
    decoder: Decoder
    if fits(config) and not host_module:
        _check_tensors(folder, config, _read_output_ids(folder, config, weights), weights)
        try:
            decoder = FusedDecoder(
                config,
                weights,
                RotaryEmbedding(config),
                name=name,
                device=device,
                dtype=dtype,
                backend=backend,
            )
        except KeyError as error:
            raise _missing_fault(folder, error.args[0]) from error
    else:
        decoder = wrap_module(load_module(folder, device, dtype), name=name)
    _FOLDERS[decoder] = folder
    return decoder


def wrap_module(module: Any, *, name: str) -> TransformersModuleDecoder:
    """Return a decoder that runs a transformers module. Its class depends on the module's kind of
    state.

    Raises:
        UsageError: The module is not supported.
    """
    # Import here: both imports load a large part of transformers, which fused models do not need.
    if module.config.is_encoder_decoder:
        from specbench_cli.engine.models.chain_decoders import Seq2SeqDecoder

        return Seq2SeqDecoder(module, name=name)
    kinds = getattr(text_config(module.config), "layer_types", None) or ()
    if all(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds):
        from specbench_cli.engine.models.transformers_decoder import TransformersDecoder

        return TransformersDecoder(module, name=name)
    from specbench_cli.engine.models.chain_decoders import RecurrentDecoder

    return RecurrentDecoder(module, name=name)


def get_module(decoder: Decoder) -> Any:
    """Return the transformers module with the weights of a loaded decoder, in eval mode.

    Peers (methods that run another project's code) and audits use it. The function creates the
    module on first use and caches it. The module has the checkpoint's weights in the decoder's
    dtype. If the decoder stores a weight in the checkpoint's layout, both share its memory.
    `module_bytes` returns the size of all other weights.
    """
    if not isinstance(decoder, FusedDecoder):
        return cast("TransformersModuleDecoder", decoder).module
    if decoder not in _MODULES:
        shared = decoder.weights.shared_tensors()
        _MODULES[decoder] = _load_module(_FOLDERS[decoder], decoder.device, decoder.dtype, shared)
    return _MODULES[decoder]


class RestrictedOutput(nn.Linear):
    """Output matrix of a transformers module that has rows for only some token ids.

    All other ids get logits of -inf.

    Args:
        weight: Matrix rows [r, hidden].
        output_ids: Token ids [r] of the rows.
        size: Vocabulary size.
    """

    output_ids: Tensor

    def __init__(self, weight: Tensor, output_ids: Tensor, size: int) -> None:
        super().__init__(weight.shape[1], len(output_ids), bias=False, device="meta")
        self.weight, self.size = nn.Parameter(weight, weight.is_floating_point()), size
        self.register_buffer("output_ids", output_ids, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits [..., V] over the full vocabulary."""
        return scatter_logits(F.linear(rows, self.weight), self.output_ids, self.size)


def restrict_output(module: Any, output_ids: Tensor) -> Any:
    """Restrict the output of a transformers module to the token ids `output_ids` [r].

    The module must belong to a built-in model family. It keeps only the rows of these ids in its
    output matrix. The matrix is then no longer tied to the embedding. `load_decoder` and
    `load_module` can read the saved module (see `read_output_ids`).
    """
    whole = module.lm_head.weight.detach()
    rows = whole.index_select(0, output_ids.to(whole.device)).clone()
    near = torch.device("cpu") if whole.is_meta else whole.device
    module.lm_head = RestrictedOutput(rows, output_ids.to(near), len(whole))
    for name, tensor in output_id_tensors(output_ids.cpu(), len(whole)).items():
        module.register_buffer(name, tensor)
    module.config = copy.deepcopy(module.config)  # other modules may share it
    module.config.tie_word_embeddings = False
    module.config.draft_vocab_size = len(output_ids)
    return module


class FusedCopy(FusedDecoder):
    """A copy of a fused decoder with its own trainable module.

    The decoder computes with the weights that the module had at the last `publish`.

    Attributes:
        module: The transformers module, a copy of the source decoder's module.
    """

    def __init__(self, source: FusedDecoder) -> None:
        self.module = module = copy.deepcopy(get_module(source))
        super().__init__(
            module.config,
            module.state_dict(),
            RotaryEmbedding(module.config),
            name=source.name,
            device=source.device,
            dtype=source.dtype,
        )
        self.input_vocab_size = source.input_vocab_size
        self.weight_bytes += sum(weight.nbytes for weight in module.parameters())

    def publish(self) -> None:
        """Make the decoder use the current weights of the module."""
        config = self.module.config
        read = self._reader(config, self.module.state_dict())
        self.weights = FusedWeights(config, read, self._rotary, self.weights.output_ids)


def module_bytes(decoder: Decoder) -> int:
    """Return the size in bytes of the weights in `get_module(decoder)` that are not shared."""
    if not isinstance(decoder, FusedDecoder):
        return 0
    shared = decoder.weights.shared_tensors()
    weights = open_weights(_FOLDERS[decoder])
    item = torch.empty(0, dtype=decoder.dtype).element_size()
    return sum(weights.size(key) * item for key in weights if key not in shared)


def sha256_of(decoder: Decoder, file: str | None = None) -> str | None:
    """Return the SHA-256 of a decoder's weight files, or of another file in their folder.

    Return None if the decoder was not loaded from a folder, or if the file does not exist.
    """
    folder = _FOLDERS.get(decoder)
    if folder is None or file is None:
        return None if folder is None else open_weights(folder).sha256()
    path = folder / file
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def config_of(decoder: Decoder) -> dict[str, Any]:
    """Return the config.json of the folder from which a decoder was loaded, or an empty dict."""
    folder = _FOLDERS.get(decoder)
    file = None if folder is None else folder / "config.json"
    if file is None or not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _load_module(
    folder: Path, device: torch.device, dtype: torch.dtype, shared: Mapping[str, Tensor]
) -> Any:
    """Load the transformers module of a built-in model family. Do not read `shared`
    weights again."""
    config, weights = read_config(folder), open_weights(folder)
    output_ids = _read_output_ids(folder, config, weights)
    module = _skeleton(config, dtype, output_ids)
    tensors = {
        key: shared[key] if key in shared else weights[key].to(device=device, dtype=dtype)
        for key, part in module.state_dict().items()
        if key in weights and part.is_floating_point()
    }
    module.load_state_dict(tensors, strict=False, assign=True)
    module.tie_weights()
    if lacking := [key for key, part in module.state_dict().items() if part.is_meta]:
        raise _missing_fault(folder, lacking[0])
    # Checkpoints do not contain this buffer. The module was created on the meta device, where the
    # buffer has no values.
    module.base_model.rotary_emb = type(module.base_model.rotary_emb)(config).to(device)
    if output_ids is not None:
        module.lm_head.to(device)
    return _ready(module, folder)


def _read_output_ids(folder: Path, config: Any, weights: Weights) -> Tensor | None:
    """Return the token ids of a restricted output matrix. None if the matrix has all ids."""
    return read_output_ids(weights, text_config(config).vocab_size, folder.name)


def _missing_fault(folder: Path, tensor: str) -> EnvironmentFault:
    return EnvironmentFault(f"{folder} lacks the tensor {tensor}", hint="specbench list models")


def _skeleton(config: Any, dtype: torch.dtype, output_ids: Tensor | None) -> Any:
    """Return a transformers module without weights (on the meta device).

    The rows of its output matrix are those of `output_ids`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return module if output_ids is None else restrict_output(module, output_ids)


def load_weights(folder: Path, config: Any) -> Weights:
    """Return the tensors of a checkpoint of a built-in model family.

    Raises:
        EnvironmentFault: The tensors are not those that the config requires.
    """
    weights = open_weights(folder)
    _check_tensors(folder, config, _read_output_ids(folder, config, weights), weights)
    return weights


def _check_tensors(folder: Path, config: Any, output_ids: Tensor | None, weights: Weights) -> None:
    """Raise EnvironmentFault unless the tensors of a checkpoint match the config of a built-in
    family.
    """
    demanded = tensor_shapes(config, None if output_ids is None else len(output_ids))
    check_contents(
        folder.name, weights, demanded, tied=output_ids is None and config.tie_word_embeddings
    )
    _check_attention(folder, config)
    heads, shared, eps = (
        *(config.num_attention_heads, config.num_key_value_heads),
        config.rms_norm_eps,
    )
    if shared < 1 or heads % shared or not 0 <= eps < 1:
        raise EnvironmentFault(
            f"{folder.name}/config.json: {heads} heads over {shared} with rms_norm_eps {eps} are no"
            " model",
            hint="specbench list models",
        )


def _check_attention(folder: Path, config: Any) -> None:
    """Raise EnvironmentFault if a config has attention settings that specbench does not support."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    wrong = None
    if not getattr(config, "is_causal", True):
        wrong = "is_causal false: only causal attention is supported"
    elif config.model_type == "llama" and window is not None:
        wrong = f"sliding_window {window}: a Llama model has none (transformers ignores it)"
    elif window is None and "sliding_attention" in (kinds or ()):
        wrong = "layers of type sliding_attention, but no sliding_window"
    if wrong:
        raise EnvironmentFault(
            f"{folder.name}/config.json has {wrong}",
            hint="correct config.json, or use the one that was published with the weights",
        )


def load_module(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the transformers module of a checkpoint, frozen and in eval mode.

    Raises:
        EnvironmentFault: A tensor is missing.
        UsageError: The model family is not supported, or does not support a restricted output
            matrix.
    """
    config, weights = read_config(folder), open_weights(folder)
    if isinstance(weights, RandomWeights):
        return _load_module(folder, device, dtype, {})
    if _read_output_ids(folder, config, weights) is not None:
        if not fits(config):
            raise UsageError(
                f"{folder.name}: an output matrix for a part of the vocabulary (tensor d2t) is"
                f" supported only for {', '.join(FAMILIES)}; this is a {config.model_type} model"
            )
        load_weights(folder, config)
        return _load_module(folder, device, dtype, {})
    disable_progress_bars()
    quantised = getattr(config, "quantization_config", None)
    try:
        module, report = _auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except ImportError as error:
        if quantised is None:
            raise
        raise EnvironmentFault(
            f"{folder.name} is quantised, and transformers cannot read it here:"
            f" {str(error).strip().splitlines()[0]}",
            hint="install the package that it names, or use the checkpoint in float16 or bfloat16",
        ) from error
    check_report(folder.name, weights, module, report)
    return _ready(module.to(device), folder)


def _auto_class(config: Any) -> Any:
    """Return the transformers auto class of a model family. For a vision model it
    loads all parts."""
    import transformers as hub

    whole = config.is_encoder_decoder
    for loader, known, is_wanted in (
        (hub.AutoModelForSeq2SeqLM, hub.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, whole),
        (
            hub.AutoModelForImageTextToText,
            hub.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            hasattr(config, "vision_config"),
        ),
        (hub.AutoModelForCausalLM, hub.MODEL_FOR_CAUSAL_LM_MAPPING, not whole),
    ):
        if is_wanted and type(config) in known:
            return loader
    raise UsageError(
        f"{config.model_type} checkpoints cannot be decoded here: transformers has no causal,"
        " sequence-to-sequence or image-text language model of the family"
    )


def _ready(module: Any, folder: Path) -> Any:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        # specbench does not decode with these settings, except for the EOS ids that `checkpoint`
        # reads. So invalid settings must not stop the run.
        with suppress(Exception):
            found = GenerationConfig.from_pretrained(folder, local_files_only=True)
            module.generation_config = found
    return module.requires_grad_(False).eval()

"""Draft model of PARD: a small language model adapted to mask tokens.

Zihao An et al.: PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation,
2025, arXiv:2504.18583. File formats are those of github.com/AMD-AGI/PARD: a Llama or Qwen
checkpoint with the id of the mask token, `pard_token`, in config.json.

Mask tokens m_1, m_2, ... (all with the same id) follow the text x_1, ..., x_t, with causal
attention. The output at x_t predicts x_{t+1}, as in any language model. The output at m_k predicts
x_{t+1+k}, from the text and m_1, ..., m_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape, check_tensors
from methods._heads.module import ParallelHead, randomize
from methods._heads.recipe import HeadRecipe, parallel_losses
from methods._heads.slots import LlamaLayer, PastKeyValues, RmsNorm, gather_slots
from specbench_cli.api import (
    Artifact,
    Decoder,
    EnvironmentFault,
    FusedDecoder,
    RotaryEmbedding,
    UsageError,
    Weights,
    fits,
    load_weights,
    read_config,
)


class PardDraft(FusedDecoder, Artifact):
    """PARD's draft model for decoding: a language model with a mask token.

    Attributes:
        mask: Token id of the mask.
    """

    kind: ClassVar[str] = "pard"
    mask: int

    @classmethod
    def from_tensors(cls, config: Any, tensors: Mapping[str, Tensor], target: Decoder) -> Self:
        """Create the model from a transformers config and tensors.

        The model uses the device and the dtype of the target.
        """
        rotary, device, dtype = RotaryEmbedding(config), target.device, target.dtype
        draft = cls(config, tensors, rotary, name=cls.kind, device=device, dtype=dtype)
        draft.mask, draft.input_vocab_size = config.pard_token, target.vocab_size
        return draft

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load a draft model that the authors or specbench trained."""
        config, target = read_config(folder), decoders["target"]
        mask = getattr(config, "pard_token", None)
        if not isinstance(mask, int) or not 0 <= mask < config.vocab_size or not fits(config):
            raise EnvironmentFault(
                f"{folder.name} is not a draft model of PARD: model_type {config.model_type},"
                f" pard_token {mask!r}; supported are Llama and Qwen with a pard_token below"
                f" {config.vocab_size}",
                "use another draft model: --set pard.head=DIR, or train one: specbench train pard",
            )
        return cls.from_tensors(config, _read(folder, config), target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a small model with random weights.

        Its mask token is the last id of the vocabulary.
        """
        from transformers import AutoModelForCausalLM, LlamaConfig

        target = decoders["target"]
        config = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=target.max_positions,
        )
        config.pard_token = target.vocab_size - 1
        module = randomize(AutoModelForCausalLM.from_config(config, trust_remote_code=False), seed)
        return cls.from_tensors(config, module.state_dict(), target)


def _read(folder: Path, config: Any) -> dict[str, Tensor]:
    """Return the tensors of the model in a folder.

    If embedding and output matrix are tied, the result contains only the embedding.
    """
    from transformers import AutoModelForCausalLM

    weights = Weights(folder)
    weights.check_layers(config)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    shapes = {name: tuple(part.shape) for name, part in module.named_parameters()}
    found = check_tensors(folder.name, weights, shapes, PardDraft.kind, exact=False)
    load_weights(folder, config)  # raises EnvironmentFault if there are unknown tensors
    return found


class Pard(ParallelHead):
    """PARD's draft model as a torch module, for training.

    One forward drafts from many positions of a text.

    Args:
        config: transformers' config of the draft model, with `pard_token`. Embedding and output
            matrix must be tied.
        tensors: Tensors of the draft model, by transformers' names. Training starts from these
            weights.
    """

    kind: ClassVar[str] = PardDraft.kind
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=0, reply_updates=240, losses=parallel_losses(8), peak_lr=2e-3
    )
    keep: ClassVar[tuple[float, float]] = (0.7, 0.2)
    """Parameters (base, minimum) of the paper's conditional drop-token strategy.

    Training uses mask m_k after a share of max(base^k, minimum) of the positions.
    """

    def __init__(self, config: Any, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        shape = HeadShape(
            **{name: getattr(config, name) for name in HeadShape.__dataclass_fields__}
        )
        rope, d = {"rope_parameters": config.rope_parameters}, config.hidden_size
        self.config, self.mask = config, config.pard_token
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        layers = (
            LlamaLayer(d, shape, rope, (), normed=True) for _ in range(config.num_hidden_layers)
        )
        self.layers, self.norm = nn.ModuleList(layers), RmsNorm(d, config.rms_norm_eps)
        self.load_state_dict({n.removeprefix("model."): t.float() for n, t in tensors.items()})

    @classmethod
    def new(cls, target: Any, draft: Callable[[], Path] | None) -> Self:
        """Return the target's default draft model, before its training as PARD draft model.

        Its mask token is the padding token.

        Raises:
            UsageError: The target has no default draft model or no padding token.
        """
        if draft is None or target.pad_token_id is None:
            raise UsageError(
                "training for PARD starts from the target's default draft model and uses the"
                " padding token as mask; this target has no "
                + ("padding token" if draft else "default draft model"),
                "choose another --target: specbench list models",
            )
        folder = draft()
        config = read_config(folder)
        config.pard_token, config.spd_type = target.pad_token_id, "pard"
        return cls(config, _read(folder, config))

    def file_config(self) -> dict[str, Any]:
        """Return the content of config.json, with the mask token."""
        found: dict[str, Any] = self.config.to_diff_dict()
        return found | {"architectures": ["LlamaForCausalLM"]}

    def draft(
        self, target: Any, ids: Tensor, read: Any, slots: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and their slots, for each draft token.

        A slot is a position t of the text to draft from. The output at token t + 1 predicts the
        first draft token. The outputs at the masks after it predict the other draft tokens.
        """
        n, last = slots.shape[1], ids.shape[1] - 1
        if self.training:  # each m_k uses a prefix of this order, so m_1 to m_{k-1} exist as well
            order = torch.Generator().manual_seed(n)
            slots = slots[:, torch.randperm(n, generator=order).to(slots.device)]
        share, minimum = self.keep if self.training else (1.0, 1.0)
        counts = [max(1, int(n * max(share**step, minimum))) for step in range(steps)]
        anchors, positions = (slots + 1).clamp(max=last), read.chat_mask.positions
        visible = gather_slots(read.chat_mask.mask[:, 0], anchors)[:, None]
        where = [positions.gather(1, anchors[:, :m]) + step for step, m in enumerate(counts)]
        text = self.embed_tokens(ids)
        mask = self.embed_tokens.weight[self.mask]
        rows = [mask.expand(len(ids), m, -1) for m in counts[1:]]
        for layer in self.layers:
            assert isinstance(layer, LlamaLayer)
            attend, normed = layer.self_attn, layer.norm_input(text)
            memory, own = attend.project_kv(normed, positions), []
            for at, row in enumerate(rows):
                m, read_of_row = counts[at + 1], layer.norm_input(row)
                own.append(attend.project_kv(read_of_row, where[at + 1]))
                before = [(keys[:, :, :m], values[:, :, :m]) for keys, values in own]
                past = PastKeyValues(visible[:, :, :m], memory, before)
                rows[at] = layer.add_residuals(row, attend(read_of_row, where[at + 1], past))
            text = layer.add_residuals(
                text, attend(normed, positions, PastKeyValues(read.chat_mask.mask, memory))
            )
        for m, row in zip(counts, (gather_slots(text, anchors), *rows), strict=True):
            yield self.norm(row) @ self.embed_tokens.weight.T, slots[:, :m]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by transformers' names."""
        return {f"model.{name}": tensor for name, tensor in self.state_dict().items()}

"""The draft model of PARD: a small language model that was adapted to mask tokens.

Zihao An et al.: PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation,
2025, arXiv:2504.18583; files as github.com/AMD-AGI/PARD publishes them: a Llama's or Qwen's, with
`pard_token`, the id that stands for a mask, in config.json.

Behind x_1 ... x_t come masks m_1, m_2, ..., all the same token at the next positions, under plain
causal attention. The row of x_t says x_{t+1} as before, the row of m_k says x_{t+1+k}: it sees the
text up to x_t, and m_1 ... m_k.
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
    """The model in decoding: as any other draft, with a mask token.

    Attributes:
        mask: the id.
    """

    kind: ClassVar[str] = "pard"
    mask: int

    @classmethod
    def of(cls, config: Any, tensors: Mapping[str, Tensor], target: Decoder) -> Self:
        """The model of a transformers config, computing where its target does, in its dtype."""
        rotary, device, dtype = RotaryEmbedding(config), target.device, target.dtype
        draft = cls(config, tensors, rotary, name=cls.kind, device=device, dtype=dtype)
        draft.mask, draft.input_vocab_size = config.pard_token, target.vocab_size
        return draft

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """A published checkpoint, or one that was trained here; see `Artifact.load`."""
        config, target = read_config(folder), decoders["target"]
        mask = getattr(config, "pard_token", None)
        if not isinstance(mask, int) or not 0 <= mask < config.vocab_size or not fits(config):
            raise EnvironmentFault(
                f"{folder.name}: no draft of PARD: a {config.model_type} whose pard_token is"
                f" {mask!r}; needed are a Llama or Qwen and an id below {config.vocab_size}",
                "give the folder of another: --set pard.head=DIR, or specbench train pard",
            )
        return cls.of(config, _read(folder, config), target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """One narrow layer with random weights; its mask is the vocabulary's last id."""
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
        return cls.of(config, module.state_dict(), target)


def _read(folder: Path, config: Any) -> dict[str, Tensor]:
    """The tensors that a model of a config has; of tied matrices the embedding alone."""
    from transformers import AutoModelForCausalLM

    weights = Weights(folder)
    weights.check_layers(config)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    due = {name: tuple(part.shape) for name, part in module.named_parameters()}
    found = check_tensors(folder.name, weights, due, PardDraft.kind, exact=False)
    load_weights(folder, config)  # also refuse tensors that nothing reads
    return found


class Pard(ParallelHead):
    """The torch module in training: a Llama's, over a text and the masks behind many of its places.

    Args:
        config: transformers' config of the model, with `pard_token`; matrices are tied.
        tensors: the draft model that is adapted, by transformers' names.
    """

    kind: ClassVar[str] = PardDraft.kind
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus=0, replies=240, losses=parallel_losses(8), peak_lr=2e-3
    )
    keep: ClassVar[tuple[float, float]] = (0.7, 0.2)
    """The paper's conditional drop-token strategy: a mask k places on is trained behind so large a
    share of the places, to the power of k, but never behind less than the second number's."""

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
        """The target's draft model; its padding, which no text holds, is the mask."""
        if draft is None or target.pad_token_id is None:
            raise UsageError(
                "a draft for PARD is adapted from a draft model, and an id that no text holds"
                " becomes its mask: the target has no "
                + ("padding token" if draft else "customary draft"),
                "give another --target: specbench list models",
            )
        folder = draft()
        config = read_config(folder)
        config.pard_token, config.spd_type = target.pad_token_id, "pard"
        return cls(config, _read(folder, config))

    def file_config(self) -> dict[str, Any]:
        """The draft model's own, and which token is the mask."""
        found: dict[str, Any] = self.config.to_diff_dict()
        return found | {"architectures": ["LlamaForCausalLM"]}

    def draft(
        self, target: Any, ids: Tensor, read: Any, slots: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See `ParallelHead`: the first step is said by the token t + 1, the others by masks."""
        n, last = slots.shape[1], ids.shape[1] - 1
        if self.training:  # any order, always the same: what a mask sees must have been kept too
            order = torch.Generator().manual_seed(n)
            slots = slots[:, torch.randperm(n, generator=order).to(slots.device)]
        share, least = self.keep if self.training else (1.0, 1.0)
        counts = [max(1, int(n * max(share**step, least))) for step in range(steps)]
        anchors, places = (slots + 1).clamp(max=last), read.chats.positions
        sight = gather_slots(read.chats.mask[:, 0], anchors)[:, None]
        where = [places.gather(1, anchors[:, :m]) + step for step, m in enumerate(counts)]
        text = self.embed_tokens(ids)
        mask = self.embed_tokens.weight[self.mask]
        rows = [mask.expand(len(ids), m, -1) for m in counts[1:]]
        for layer in self.layers:
            assert isinstance(layer, LlamaLayer)
            attend, normed = layer.self_attn, layer.norm_input(text)
            memory, own = attend.project_kv(normed, places), []
            for at, row in enumerate(rows):
                m, read_of_row = counts[at + 1], layer.norm_input(row)
                own.append(attend.project_kv(read_of_row, where[at + 1]))
                before = [(keys[:, :, :m], values[:, :, :m]) for keys, values in own]
                past = PastKeyValues(sight[:, :, :m], memory, before)
                rows[at] = layer.add_residuals(row, attend(read_of_row, where[at + 1], past))
            text = layer.add_residuals(
                text, attend(normed, places, PastKeyValues(read.chats.mask, memory))
            )
        for m, row in zip(counts, (gather_slots(text, anchors), *rows), strict=True):
            yield self.norm(row) @ self.embed_tokens.weight.T, slots[:, :m]

    def tensors(self) -> dict[str, Tensor]:
        """By transformers' names."""
        return {f"model.{name}": tensor for name, tensor in self.state_dict().items()}

"""Draft model of PARD: a small language model adapted to mask tokens.

Zihao An et al.: PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation,
2025, arXiv:2504.18583. File formats are those of github.com/AMD-AGI/PARD: a Llama or Qwen
checkpoint with the id of the mask token, `pard_token`, in config.json.

Masks m_1, m_2, ... follow x_1 ... x_t, all the same token at the next positions, under plain causal
attention. The output at x_t predicts x_{t+1} as before. The output at m_k predicts x_{t+1+k}, from
the text up to x_t and m_1 ... m_k.
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
    """Draft model in decoding: an ordinary draft with a mask token.

    Attributes:
        mask: Id of the mask token.
    """

    kind: ClassVar[str] = "pard"
    mask: int

    @classmethod
    def from_tensors(cls, config: Any, tensors: Mapping[str, Tensor], target: Decoder) -> Self:
        """Return the model of a transformers config, with the target's device and dtype."""
        rotary, device, dtype = RotaryEmbedding(config), target.device, target.dtype
        draft = cls(config, tensors, rotary, name=cls.kind, device=device, dtype=dtype)
        draft.mask, draft.input_vocab_size = config.pard_token, target.vocab_size
        return draft

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load a published checkpoint, or one that was trained here; see `Artifact.load`."""
        config, target = read_config(folder), decoders["target"]
        mask = getattr(config, "pard_token", None)
        if not isinstance(mask, int) or not 0 <= mask < config.vocab_size or not fits(config):
            raise EnvironmentFault(
                f"{folder.name}: no draft of PARD: a {config.model_type} whose pard_token is"
                f" {mask!r}; needed are a Llama or Qwen and an id below {config.vocab_size}",
                "give the folder of another: --set pard.head=DIR, or specbench train pard",
            )
        return cls.from_tensors(config, _read(folder, config), target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return one narrow layer with random weights. Its mask is the vocabulary's last id."""
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
    """Return the tensors of a config's model. Tied matrices are returned once, as the embedding."""
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
    """PARD's draft as a torch module for training: a Llama over a text, with masks after many
    positions.

    Args:
        config: transformers' config of the model, with `pard_token`. Embedding and output matrix
            are tied.
        tensors: The draft model that is adapted, by transformers' names.
    """

    kind: ClassVar[str] = PardDraft.kind
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=0, reply_updates=240, losses=parallel_losses(8), peak_lr=2e-3
    )
    keep: ClassVar[tuple[float, float]] = (0.7, 0.2)
    """The paper's conditional drop-token strategy: base and minimum of the share of positions.

    A mask k positions ahead is trained after base^k of the positions, but at least the minimum
    share.
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
        """Return the target's draft model. Its padding token, which no text contains, is the
        mask."""
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
        """Return the draft model's config with the mask token."""
        found: dict[str, Any] = self.config.to_diff_dict()
        return found | {"architectures": ["LlamaForCausalLM"]}

    def draft(
        self, target: Any, ids: Tensor, read: Any, slots: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See `ParallelHead`. Token t + 1 predicts the first step, and masks predict the others."""
        n, last = slots.shape[1], ids.shape[1] - 1
        if self.training:  # a fixed random order, so that a mask's predecessors are kept too
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
        """Return the tensors by transformers' names."""
        return {f"model.{name}": tensor for name, tensor in self.state_dict().items()}

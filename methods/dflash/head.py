"""Draft head of DFlash: a few layers that denoise a block of masks in one forward.

Jian Chen, Yesheng Liang, Zhijian Liu: DFlash: Block Diffusion for Flash Speculative Decoding, 2026,
arXiv:2602.06036. File formats are those of github.com/z-lab/dflash.

Context: the target's hidden states of a committed token at several layers are concatenated. The
matrix `fc` and a norm map them to one context row c. Block: the embeddings of [x_t, m, m, ...],
where x_t is the last committed token and m is the mask token. In every layer, the block attends to
the context rows c_0, ..., c_{t-1} and to itself, in both directions. Row k = 1, 2, ... of the block
predicts x_{t+k}: a norm and the target's output matrix map the row to logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape, head_mismatch, read_head_by_config
from methods._heads.layer import HeadStack
from methods._heads.module import ParallelHead, load_module, randomize
from methods._heads.recipe import HeadRecipe, parallel_losses
from methods._heads.slots import LlamaLayer, PastKeyValues, RmsNorm, gather_slots, make_rotary
from specbench_cli.api import (
    Artifact,
    Decoder,
    Features,
    Input,
    ModelInput,
    ModelOutput,
    Tokens,
    layer_bytes,
)

SUPPORTED = {"hidden_act": "silu", "is_causal": False, "final_logit_softcapping": None}
SUPPORTED |= {"input_embedding_scale": 1.0, "output_multiplier": 1.0}
"""Settings in config.json of which only one value is supported, with this value."""

NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")  # of a Qwen3 layer


class DFlash(ParallelHead, Artifact):  # type: ignore[override]
    """DFlash's draft head as a torch module, for training.

    Args:
        shape: Sizes of the layers.
        rope: Settings of the rotary embedding.
        captured_layers: Target layers whose hidden states the head reads.
        block: Number of tokens of a block: the last committed token and the masks.
        mask: Token id of the mask.
        tensor_names: Names of the optional tensors of a layer.
    """

    kind: ClassVar[str] = "dflash"
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=0, reply_updates=240, losses=parallel_losses(7), mlp=384, peak_lr=3e-3
    )

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        captured_layers: tuple[int, ...],
        block: int,
        mask: int,
        tensor_names: Collection[str] = NORMS,
    ) -> None:
        super().__init__()
        self.shape, self.rope, self.captured_layers, self.block, self.mask = (
            shape,
            rope,
            captured_layers,
            block,
            mask,
        )
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(captured_layers) * d, d, bias=False)
        layers = (
            LlamaLayer(d, shape, rope, tensor_names, normed=True)
            for _ in range(shape.num_hidden_layers)
        )
        self.layers, self.hidden_norm, self.norm = (
            nn.ModuleList(layers),
            RmsNorm(d, eps),
            RmsNorm(d, eps),
        )

    @classmethod
    def new(cls, target: Any, draft: Any) -> Self:
        """Return an untrained head with two layers.

        It reads a low, a middle and a high layer of the target. Its mask token is the padding
        token.
        """
        n, heads, d = target.num_hidden_layers, target.num_attention_heads, target.hidden_size
        eps, most = target.rms_norm_eps, target.max_position_embeddings
        shape = HeadShape(d, cls.recipe.mlp, heads, heads, d // heads, eps, most, 2)
        captured_layers, block = (
            (min(1, n - 1), n // 2, max(0, n - 2)),
            cls.recipe.losses["ttt"].steps + 1,
        )
        rope = {"rope_parameters": target.rope_parameters}
        mask = target.eos_token_id if target.pad_token_id is None else target.pad_token_id
        return cls(shape, rope, captured_layers, block, mask)

    def file_config(self) -> dict[str, Any]:
        """Return the content of config.json in z-lab's format."""
        sizes = {name: getattr(self.shape, name) for name in HeadShape.__dataclass_fields__}
        read = {"mask_token_id": self.mask, "target_layer_ids": list(self.captured_layers)}
        fixed = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu"}
        return {**sizes, **self.rope, **fixed, "block_size": self.block, "dflash_config": read}

    def draft(
        self, target: Any, ids: Tensor, read: Any, slots: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and their slots, for each draft token.

        A slot is a position of the text to draft from. Training uses only every third slot, for
        speed.
        """
        slots = slots[:, ::3] if self.training else slots
        embed, positions = target.model.embed_tokens, read.chat_mask.positions
        anchors = (slots + 1).clamp(max=ids.shape[1] - 1)
        context = self.hidden_norm(self.fc(read.features))
        mask = embed.weight[self.mask].expand(*slots.shape, -1)
        rows = [embed(ids.gather(1, anchors)), *[mask] * (self.block - 1)]
        where = [positions.gather(1, slots) + 1 + k for k in range(self.block)]
        visible = gather_slots(read.chat_mask.mask[:, 0], slots)[:, None]
        for layer in self.layers:
            assert isinstance(layer, LlamaLayer)
            attend, reads = layer.self_attn, [layer.norm_input(row) for row in rows]
            own = [attend.project_kv(*each) for each in zip(reads, where, strict=True)]
            past = PastKeyValues(visible, attend.project_kv(context, positions), own)
            attended = [attend(*each, past) for each in zip(reads, where, strict=True)]
            rows = [layer.add_residuals(*each) for each in zip(rows, attended, strict=True)]
        for row in rows[1 : steps + 1]:
            yield target.lm_head(self.norm(row)), slots

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the module in a folder."""
        files, target = read_head_by_config(folder, decoders["target"]), decoders["target"]
        settings = dict(files.config) | files.config.get("dflash_config", {})
        files.check_supported(settings, SUPPORTED, {"layer_types": {"full_attention"}})
        mask, block = (
            files.read_token_id(settings, "mask_token_id", target),
            settings.get("block_size", 16),
        )
        if type(block) is not int or not 2 <= block <= target.max_positions:
            what = f"block_size is {block!r}; it must be from 2 to {target.max_positions}"
            raise head_mismatch(files, what)
        tensor_names = [name.removeprefix("layers.0.") for name in files.tensors]
        args = (
            files.shape,
            files.rope,
            files.find_captured_layers(target.n_layers),
            block,
            mask,
            tensor_names,
        )
        module = load_module(lambda: cls(*args), files, cls.kind).requires_grad_(False).eval()
        return module.to(target.device, target.dtype)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a small head with random weights."""
        target = decoders["target"]
        shape = HeadShape(target.hidden_size, 2 * target.hidden_size, 1, 1, 8, num_hidden_layers=2)
        args = (0, target.n_layers - 1), 6, target.vocab_size - 1
        return randomize(cls(shape, {}, *args), seed).to(target.device, target.dtype).eval()


class DFlashHead(HeadStack):
    """DFlash's draft head for decoding. Its KV cache contains only committed tokens.

    The input of a forward has n rows of hidden states and n + k token ids: the next token of each
    row, and k masks. The forward adds the rows to the KV cache. The block consists of the last
    token and the k masks.

    Attributes:
        block: Number of tokens of a block.
        mask: Token id of the mask.
    """

    kind: ClassVar[str] = DFlash.kind
    module: ClassVar[type[DFlash]] = DFlash
    parallel: ClassVar[bool] = True

    def __init__(self, module: DFlash, target: Decoder) -> None:
        super().__init__(
            module.shape, make_rotary(module.shape, module.rope), target, module.captured_layers
        )
        self.block, self.mask = module.block, module.mask
        read = self._reader(module.shape, module.state_dict())
        self.layers = [read.layer(f"layers.{at}.") for at in self._all_layers]
        self._fc = read.linear(read.get("fc.weight"))
        self._context, self._final_norm = read.norm("hidden_norm"), read.norm("norm")
        self.weight_bytes = self._fc.nbytes + sum(map(layer_bytes, self.layers))

    def new_state(self, capacity: int, n_seqs: int = 1) -> Any:
        """Return an empty KV cache with additional space for one block."""
        return super().new_state(capacity + self.block, n_seqs)

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Add new committed tokens to the KV cache, and denoise a block.

        Return the logits of the block.
        """
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        if not isinstance(x, Features):
            raise ValueError(f"{self.name} needs Features as input, not {type(x).__name__}")
        n, start = x.rows.shape[1], state.length()
        self._append_kv_to_all(self._norm(self._fc(x.rows[0]), self._context), state)
        if logits_at is None:
            self.ran += 1
            return ModelOutput(None, x.rows)
        block = Tokens(x.ids[:, n - 1 :])
        both_ways = torch.ones((block.ids.shape[1],) * 2, dtype=torch.bool, device=self.device)
        out = super().execute(ModelInput(block, state, mask=both_ways, logits_at=logits_at))
        state.rollback(0, start + n)
        return out

    def _enter(self, x: Input, layers: tuple[int, int] | None) -> tuple[Tensor, int, int]:
        assert isinstance(x, Tokens)
        return self.embed(x.ids.reshape(-1)), *x.ids.shape

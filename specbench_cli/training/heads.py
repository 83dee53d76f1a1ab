"""Draft heads as torch modules to train: EAGLE's, EAGLE-3's and a multi-token-prediction layer.

A head reads, at slot t of a text, the target's features of token x_t beside the token x_{t+1}, and
says x_{t+2}. It has the target's embedding and output matrix, frozen, and none of its own. Drafting
on, it reads its own output in place of the features it cannot know yet; such steps are trained too:
see `DraftHead.forward`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specbench_cli.engine.models.head import NORMED
from specbench_cli.training.head_attention import Attention, Past, take


class Out(NamedTuple):
    """What a head makes of its slots, each [sequences, slots, width].

    hidden: to be fed back in place of the next slot's features.
    normed: for the target's output matrix.
    """

    hidden: Tensor
    normed: Tensor


class Layer(nn.Module):
    """A Llama layer without what comes before its attention, EAGLE's as it is."""

    def __init__(self, reads: int, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(reads, config)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = norm(config)


class NormedLayer(Layer):
    """One with an input norm."""

    def __init__(self, reads: int, config: LlamaConfig) -> None:
        super().__init__(reads, config)
        self.input_layernorm = norm(config)


class PairLayer(NormedLayer):
    """EAGLE-3's: the input norm is the embedding's, and the features have another."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(2 * config.hidden_size, config)
        self.hidden_norm = norm(config)


class DraftHead(nn.Module, ABC):
    """A head: one Llama layer and what joins tokens with features.

    Attributes:
        taps: layers of the target whose outgoing rows it reads side by side, or `NORMED`.
        says: ids of the target's vocabulary that it can say, rising; None: all.
        prefix: of its tensors' names in a file.
    """

    kind: ClassVar[str]
    architecture: ClassVar[str]
    prefix: ClassVar[str] = ""
    taps: tuple[int, ...] = (NORMED,)
    says: Tensor | None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("says", None, persistent=False)

    def read(self, features: Tensor) -> Tensor:
        """The target's features [..., taps * width] as the first step takes them."""
        return features

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The layer."""

    @abstractmethod
    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and the residual stream, each [sequences, n, width]."""

    @abstractmethod
    def out(self, rows: Tensor) -> Out:
        """The rows that leave the layer, to feed back and to read out."""

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        places: Tensor,
        past: Past,
        slots: Tensor | None = None,
    ) -> Out:
        """One step; keys and values are added to `past`.

        Args:
            embedded: of the tokens one after the features, [sequences, n, width].
            features: as `read` gives them at the first step, later what `Out.hidden` was.
            places: of the slots in their chats, counting each later step one further.
            slots: [sequences, slots] at the first step, where all n places of the text are given:
                which of them to go on with. None at later steps.
        """
        layer = self.layer
        rows, residual = self.join(embedded, features)
        seen = layer.self_attn.remember(rows, places)
        if slots is None:
            past.own.append(seen)
        else:
            past.text = seen
            rows, residual = take(rows, slots), take(residual, slots)
            places = places.gather(1, slots)
        residual = residual + layer.self_attn(rows, places, past)
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return self.out(residual)


class Eagle(DraftHead):
    """EAGLE's autoregression on features (Li et al., ICML 2024, arXiv:2401.15077).

    The layer has no input norm, and what leaves it stands for the target's final features.
    """

    kind, architecture = "eagle", "LlamaForCausalLM"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width)
        self.layers = nn.ModuleList([Layer(width, config)])

    @property
    def layer(self) -> Layer:
        """The layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """A projection of both, the embedding first."""
        joined = self.fc(torch.cat([embedded, features], -1))
        return joined, joined

    def out(self, rows: Tensor) -> Out:
        """The rows as they are."""
        return Out(rows, rows)


class Eagle3(DraftHead):
    """EAGLE-3's head on three of the target's layers (Li et al., NeurIPS 2025, arXiv:2503.01840).

    It says the `says` most frequent tokens only. The attention reads the normed embedding beside
    the normed features. Official heads bring an output matrix; this one reads the target's.

    Args:
        size: [taps * width], about how large the target's rows are there; a file's `fc` is divided
            by it. Rows that leave a layer can be tens of times as large as what this layer adds to
            them, and then learning is slow. Powers of two, by which fp16 divides exactly.
    """

    kind, architecture = "eagle3", "LlamaForCausalLMEagle3"

    says: Tensor
    size: Tensor

    def __init__(
        self, config: LlamaConfig, taps: tuple[int, ...], says: Tensor, size: Tensor
    ) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.taps = taps
        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.midlayer = PairLayer(config)
        self.norm = norm(config)
        self.says = says
        self.register_buffer("size", size, persistent=False)

    @property
    def layer(self) -> Layer:
        """The layer."""
        return self.midlayer

    def read(self, features: Tensor) -> Tensor:
        """Three layers' rows as one."""
        joined: Tensor = self.fc(features / self.size)
        return joined

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Both normed side by side; the residual stream is the features alone."""
        layer = self.midlayer
        rows = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(features)], -1)
        return rows, features

    def out(self, rows: Tensor) -> Out:
        """Fed back as they are, normed to be read out."""
        return Out(rows, self.norm(rows))


class Mtp(DraftHead):
    """A multi-token-prediction layer, the names and the order of joining as in MiMo's checkpoints.

    Trained to be fed back: in place of the features goes the output after the final norm, which is
    what takes the place of the target's own final features (after its final norm, too).
    """

    kind, architecture, prefix = "mtp", "MiMoMTPModel", "model.mtp_layers.0."

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.token_layernorm = norm(config)
        self.hidden_layernorm = norm(config)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.block = NormedLayer(width, config)
        self.final_layernorm = norm(config)

    @property
    def layer(self) -> Layer:
        """The layer."""
        return self.block

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """A projection of both normed, the features first, normed once more for the attention."""
        both = [self.hidden_layernorm(features), self.token_layernorm(embedded)]
        joined = self.input_proj(torch.cat(both, -1))
        return self.block.input_layernorm(joined), joined

    def out(self, rows: Tensor) -> Out:
        """Normed, for both ends."""
        normed = self.final_layernorm(rows)
        return Out(normed, normed)


def norm(config: LlamaConfig) -> LlamaRMSNorm:
    """An RMS norm of the head's width."""
    return LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

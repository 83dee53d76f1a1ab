"""Draft heads as torch modules: training runs them, and decoding fuses their weights.

A head reads, at slot t of a text, the target's features of token x_t beside the token x_{t+1}, and
says x_{t+2}. Drafting on, it reads its own output in place of the features it cannot know yet; such
steps are trained too: see `DraftHead.forward`.
"""

from __future__ import annotations

import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadFiles, HeadShape, wrong_size
from methods._heads.layouts import Layout
from methods._heads.recipe import HeadRecipe, Taught
from methods._heads.slots import Layer, Norm, Past, take
from methods._heads.vocabulary import Vocabulary
from specbench_cli.api import NORMED, Decoder, EnvironmentFault

RANDOM_HEAD_DIM = 8


class Out(NamedTuple):
    """What a head makes of its slots, each [sequences, slots, width].

    hidden: to be fed back in place of the next slot's features.
    normed: for the output matrix.
    """

    hidden: Tensor
    normed: Tensor


class DraftHead(nn.Module, ABC):
    """A head: one Llama layer and what joins tokens with features.

    Its tensors have the names that `layouts` lists. A subclass has `fc` and `layer`, and where a
    checkpoint has them, an output matrix `lm_head` and an embedding `embed_tokens` of its own; else
    the target's are read.

    Args:
        shape, rope: of its layer.
        has: names of the tensors that are there; of those only that not every head has.
        own: its vocabulary, where it is not the target's.

    Attributes:
        kind: its word under a model's `heads`.
        layouts: how files hold it; training writes the first.
        config: of config.json, what training writes beside the sizes.
        recipe: how training makes it.
        taps: layers of the target whose outgoing rows it reads side by side, or `NORMED`.
        hidden_first: whether `fc` reads the features before the embedding.
        says: ids of the target's vocabulary that it can say; None: all.
    """

    kind: ClassVar[str]
    layouts: ClassVar[tuple[Layout, ...]]
    config: ClassVar[Mapping[str, Any]]
    recipe: ClassVar[HeadRecipe]
    fc: nn.Linear
    layer: Layer
    lm_head: nn.Linear | None
    embed_tokens: nn.Embedding | None
    vocabulary: Vocabulary | None = None
    taps: tuple[int, ...] = (NORMED,)
    hidden_first: bool = False
    says: Tensor | None

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        has: Collection[str] = (),
        own: Vocabulary | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.lm_head = self.embed_tokens = None
        self.register_buffer("says", None, persistent=False)
        if own is not None:
            self.speak(own)

    # What a kind of head is.

    def read(self, features: Tensor) -> Tensor:
        """The target's features [..., taps * width] as the first step takes them."""
        return features

    @abstractmethod
    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and the residual stream, each [sequences, n, width]."""

    @abstractmethod
    def out(self, rows: Tensor) -> Out:
        """The rows that leave the layer, to feed back and to read out."""

    @classmethod
    def tapped(cls, _n_layers: int) -> tuple[int, ...]:
        """The taps of one to be trained, for a target of so many layers."""
        return cls.taps

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], taught: Taught) -> Self:
        """One to be trained, as torch's modules begin."""
        return cls(shape, rope, own=taught.vocabulary(cls.recipe.says))

    def begin(self, std: float) -> None:
        """Draw the first weights; `std` is how widely the target's own were drawn."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)

    def linear(self, _embedded: Tensor, _features: Tensor) -> Tensor | None:
        """What a linear map [reads, width] to the row before the output matrix would read, for
        `begin_linear`; None: such a head begins otherwise.

        Args:
            _embedded, _features: as of `forward` and `read`, [n, width] and [n, taps * width].
        """
        return None

    def begin_linear(self, _found: Tensor, _norm: Tensor) -> None:
        """Begin as the linear map that was found; the layer then adds nothing until it has learnt.

        Args:
            _norm: weight of the target's final norm.
        """
        raise NotImplementedError(f"{self.kind} has no `linear`")

    @classmethod
    def facts(cls, files: HeadFiles, target: Decoder) -> dict[str, Any]:
        """What else is given to make the head that the files hold.

        Raises:
            EnvironmentFault: the size of `fc` does not go with the target's rows.
        """
        found, due = tuple(files.tensors["fc.weight"].shape), target.hidden_size
        if found != (due, 2 * due):
            raise wrong_size(
                files, f"fc is {list(found)}; this target's rows of {due} need {[due, 2 * due]}"
            )
        return {"own": Vocabulary.of(files, target)}

    @classmethod
    def small(cls, shape: HeadShape, target: Decoder) -> Self:
        """One of this shape, for audits; its weights are drawn then."""
        return cls(shape, {})

    # What all have in common.

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

    def speak(self, own: Vocabulary) -> None:
        """Have another vocabulary than the target's, or matrices of its own for it."""
        self.vocabulary, self.says, width = own, own.says, self.shape.hidden_size
        if own.matrix:
            n = own.size if own.says is None else len(own.says)
            self.lm_head = nn.Linear(width, n, bias=False)
        if own.embeds is not None:
            self.embed_tokens = nn.Embedding(own.embeds, width)

    def new_norm(self) -> Norm:
        """A norm of the head's width."""
        return Norm(self.shape.hidden_size, self.shape.rms_norm_eps)

    @classmethod
    def of(cls, files: HeadFiles, target: Decoder) -> Self:
        """The head that files hold.

        Raises:
            EnvironmentFault: sizes that do not go with the target's, or a tensor is missing.
        """
        facts = cls.facts(files, target)
        with torch.device("meta"):  # nothing is drawn for what is to be replaced
            head = cls(files.shape, files.rope, files.tensors.keys(), **facts)
        head.hidden_first = files.hidden_first
        names = head.state_dict()
        lacking = next((name for name in names if name not in files.tensors), None)
        if lacking is not None:
            raise EnvironmentFault(f"{files.source} has no {lacking}", "specbench list methods")
        try:
            head.load_state_dict({name: files.tensors[name] for name in names}, assign=True)
        except RuntimeError as fault:
            raise wrong_size(files, str(fault).splitlines()[-1].strip()) from None
        return head

    @classmethod
    @torch.no_grad()
    def random(cls, target: Decoder, seed: int = 0) -> Self:
        """One with random weights and one narrow attention head, as wide as the target."""
        width, generator = target.hidden_size, torch.Generator().manual_seed(seed)
        with torch.device("meta"):
            head = cls.small(HeadShape(width, 2 * width, 1, 1, RANDOM_HEAD_DIM), target)
        named = sorted(head.state_dict().items(), key=lambda item: not item[0].startswith("layer."))
        drawn = {
            name: torch.ones(part.shape) if part.dim() == 1 else _random(part, generator)
            for name, part in named
        }
        head.load_state_dict(drawn, assign=True)
        return head

    def tensors(self) -> dict[str, Tensor]:
        """What files hold of it, by our names."""
        told = {} if self.vocabulary is None else self.vocabulary.told()
        return self.state_dict() | told

    def files(self) -> HeadFiles:
        """The head as `of` takes it."""
        source = f"the {self.kind} head"
        return HeadFiles(source, self.tensors(), self.shape, self.rope, self.hidden_first)


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix of that shape, which about keeps the size of what it is multiplied with."""
    drawn = torch.randn(like.shape, generator=generator)
    return drawn.div_(math.sqrt(like.shape[1]))


@cache
def heads() -> Mapping[str, type[DraftHead]]:
    """The heads of this folder, by kind: a file that defines one needs no entry anywhere."""
    import methods._heads as here

    names = sorted(each.name for each in pkgutil.iter_modules(here.__path__, f"{here.__name__}."))
    found = [each for name in names for each in vars(import_module(name)).values()]
    kinds = [each for each in found if isinstance(each, type) and issubclass(each, DraftHead)]
    return {kind.kind: kind for kind in kinds if kind is not DraftHead}

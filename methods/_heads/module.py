"""Draft heads as torch modules: training runs them, and decoding fuses their weights.

A head reads, at slot t of a text, the target's features of token x_t beside the token x_{t+1}, and
says x_{t+2}. Drafting on, it reads its own output in place of the features it cannot know yet; such
steps are trained too: see `DraftHead.forward`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from methods._heads.files import HeadShape, LoadedHead, check_tensors, head_mismatch
from methods._heads.layouts import Layout
from methods._heads.recipe import HeadRecipe, TargetStatistics
from methods._heads.slots import HeadInput, LlamaLayer, RmsNorm, gather_slots
from methods._heads.vocabulary import HeadVocabulary
from specbench_cli.api import NORMED, Decoder, EnvironmentFault

RANDOM_HEAD_DIM = 8


class HeadOutput(NamedTuple):
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
        levels: how many steps it can draft; None: as many as are wanted.
        says: ids of the target's vocabulary that it can say; None: all.
        mask: the id read at later steps in place of drafted tokens, where all are drafted at once.
    """

    kind: ClassVar[str]
    layouts: ClassVar[tuple[Layout, ...]]
    config: ClassVar[Mapping[str, Any]]
    recipe: ClassVar[HeadRecipe]
    fc: nn.Linear
    layer: LlamaLayer
    lm_head: nn.Linear | None
    embed_tokens: nn.Embedding | None
    vocabulary: HeadVocabulary | None = None
    taps: tuple[int, ...] = (NORMED,)
    hidden_first: bool = False
    levels: int | None = None
    says: Tensor | None
    mask: int | None = None

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        has: Collection[str] = (),
        own: HeadVocabulary | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.lm_head = self.embed_tokens = None
        self.register_buffer("says", None, persistent=False)
        if own is not None:
            self.set_vocabulary(own)
        self.build(has)

    # What a kind of head is.

    def build(self, has: Collection[str]) -> None:
        """Create the modules that need no more than the shape and `has`."""

    def read(self, features: Tensor) -> Tensor:
        """The target's features [..., taps * width] as the first step takes them."""
        return features

    @abstractmethod
    def forward(self, x: HeadInput) -> HeadOutput:
        """Run one step, and add its keys and values to `x.past`."""

    @classmethod
    def choose_layers(cls, _n_layers: int) -> tuple[int, ...]:
        """The taps of one to be trained, for a target of so many layers."""
        return cls.taps

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """One to be trained, as torch's modules begin."""
        return cls(shape, rope, own=target.vocabulary(cls.recipe.draft_vocab_size))

    def init_weights(self, std: float) -> None:
        """Draw the first weights; `std` is how widely the target's own were drawn."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)

    def linear_input(self, _embedded: Tensor, _features: Tensor) -> Tensor | None:
        """What a linear map [reads, width] to the row before the output matrix would read, for
        `begin_linear`; None: such a head begins otherwise.

        Args:
            _embedded, _features: as of `forward` and `read`, [n, width] and [n, taps * width].
        """
        return None

    def init_from_linear(self, _found: Tensor, _norm: Tensor) -> None:
        """Begin as the linear map that was found; the layer then adds nothing until it has learnt.

        Args:
            _norm: weight of the target's final norm.
        """
        raise NotImplementedError(f"{self.kind} has no `linear_input`")

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """What else is given to make the head that the files hold.

        Raises:
            EnvironmentFault: the size of `fc` does not go with the target's rows.
        """
        found, due = tuple(files.tensors["fc.weight"].shape), target.hidden_size
        if found != (due, 2 * due):
            raise head_mismatch(
                files, f"fc is {list(found)}; this target's rows of {due} need {[due, 2 * due]}"
            )
        return {"own": HeadVocabulary.of(files, target)}

    @classmethod
    def small(cls, shape: HeadShape, target: Decoder) -> Self:
        """One of this shape, for audits; its weights are drawn then."""
        return cls(shape, {})

    # What all have in common.

    def set_vocabulary(self, own: HeadVocabulary) -> None:
        """Have another vocabulary than the target's, or matrices of its own for it."""
        self.vocabulary, self.says, width = own, own.ids, self.shape.hidden_size
        if own.matrix:
            n = own.size if own.ids is None else len(own.ids)
            self.lm_head = nn.Linear(width, n, bias=False)
        if own.embeds is not None:
            self.embed_tokens = nn.Embedding(own.embeds, width)

    def new_norm(self) -> RmsNorm:
        """A norm of the head's width."""
        return RmsNorm(self.shape.hidden_size, self.shape.rms_norm_eps)

    @classmethod
    def of(cls, files: LoadedHead, target: Decoder) -> Self:
        """The head that files hold.

        Raises:
            EnvironmentFault: sizes that do not go with the target's, or a tensor is missing or not
                finite.
        """
        facts = cls.init_args(files, target)
        with torch.device("meta"):  # nothing is drawn for what is to be replaced
            head = cls(files.shape, files.rope, files.tensors.keys(), **facts)
        head.hidden_first = files.hidden_first
        names = head.state_dict()
        missing = next((name for name in names if name not in files.tensors), None)
        if missing is not None:
            raise EnvironmentFault(f"{files.source} has no {missing}", "specbench list methods")
        known = {*names, "d2t", "t2d", "embed_tokens.weight"}
        if unexpected := sorted(name for name in files.tensors if name not in known):
            raise head_mismatch(files, f"{unexpected[0]} has no place in it, and is not computed")
        not_finite = next((n for n in names if not files.tensors[n].isfinite().all()), None)
        if not_finite is not None:
            raise head_mismatch(files, f"{not_finite} holds numbers that are not finite")
        try:
            head.load_state_dict({name: files.tensors[name] for name in names}, assign=True)
        except RuntimeError as fault:
            raise head_mismatch(files, str(fault).splitlines()[-1].strip()) from None
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
            name: torch.ones(part.shape) if part.dim() == 1 else _random_matrix(part, generator)
            for name, part in named
        }
        head.load_state_dict(drawn, assign=True)
        return head

    def file_config(self) -> dict[str, Any]:
        """What config.json says of it beside its sizes."""
        return dict(self.config)

    def tensors(self) -> dict[str, Tensor]:
        """What files hold of it, by our names."""
        vocabulary = {} if self.vocabulary is None else self.vocabulary.to_tensors()
        return self.state_dict() | vocabulary

    def as_loaded(self) -> LoadedHead:
        """The head as `of` takes it."""
        source = f"the {self.kind} head"
        return LoadedHead(source, self.tensors(), self.shape, self.rope, self.hidden_first)


class JoinedHead(DraftHead):
    """A head whose every step is the same: a token's embedding is joined with the features before
    it, and goes through the layer."""

    @abstractmethod
    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and the residual stream, each [sequences, n, width]."""

    @abstractmethod
    def out(self, rows: Tensor) -> HeadOutput:
        """The rows that leave the layer, to feed back and to read out."""

    def forward(self, x: HeadInput) -> HeadOutput:
        """See `DraftHead.forward`."""
        layer, places, past = self.layer, x.places, x.past
        rows, residual = self.join(x.embedded, x.features)
        key_values = layer.self_attn.project_kv(rows, places)
        if x.slots is None:
            past.own.append(key_values)
        else:
            past.text = key_values
            rows, residual = gather_slots(rows, x.slots), gather_slots(residual, x.slots)
            places = places.gather(1, x.slots)
        return self.out(layer.add_residuals(residual, layer.self_attn(rows, places, past)))


class ParallelHead(nn.Module, ABC):
    """A drafter in training that says all tokens of a draft at once.

    Attributes:
        kind, recipe, taps: as of `DraftHead`.
    """

    kind: ClassVar[str]
    recipe: ClassVar[HeadRecipe]
    taps: tuple[int, ...] = (NORMED,)

    @classmethod
    @abstractmethod
    def new(cls, target: Any, draft: Callable[[], Path] | None) -> Self:
        """One to be trained.

        Args:
            target: transformers' config of the target.
            draft: gives the folder of its customary draft model.
        """

    @property
    def weight_bytes(self) -> int:
        """See `Artifact`, which some are."""
        return sum(part.nbytes for part in self.parameters())

    @abstractmethod
    def file_config(self) -> dict[str, Any]:
        """What config.json says of it."""

    def tensors(self) -> dict[str, Tensor]:
        """What files hold of it, by the names of the published releases: the module's own."""
        return self.state_dict()

    @abstractmethod
    def draft(
        self, target: Any, ids: Tensor, read: Any, slots: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each of `steps` tokens, at which slots it is drafted [sequences, m], and its logits
        [sequences, m, V] there.

        Args:
            target: transformers' module of the target, frozen.
            ids: [sequences, n].
            read: what the target gives for these ids (`head_losses.Read`).
            slots: [sequences, slots]: from slot t the first step says token t + 2, knowing the
                tokens up to t + 1 and the target's features up to t.
        """

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write model.safetensors, in fp16, and config.json; `facts` go under "specbench"."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.half().cpu().contiguous() for name, each in self.tensors().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        words = {**self.file_config(), "dtype": "float16", "specbench": dict(facts)}
        text = json.dumps(words, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def randomize(module: Module, seed: int) -> Module:
    """A module with random matrices, for audits."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.requires_grad_(False).parameters():
        if part.dim() == 2:
            part.copy_(_random_matrix(part, generator))
    return module


def load_module(make: Callable[[], Module], files: LoadedHead, kind: str) -> Module:
    """A module whose tensors are those that files hold, under its own names.

    Raises:
        EnvironmentFault: one is missing, has no place or another size, or is not finite.
    """
    with torch.device("meta"):  # nothing is drawn for what is to be replaced
        module = make()
    shapes = {name: tuple(part.shape) for name, part in module.state_dict().items()}
    tensors = check_tensors(files.source, files.tensors, shapes, kind)
    module.load_state_dict(tensors, assign=True)
    return module


class PrefixHead(JoinedHead):
    """A head whose layer reads the target's rows alone, and no token: prefix attention (Hydra++),
    an augmenting block (Clover). What is drafted is made, step by step, of the row that leaves the
    layer and of the tokens so far.
    """

    def build(self, has: Collection[str]) -> None:
        """See `DraftHead.build`."""
        self.layer = LlamaLayer(self.shape.hidden_size, self.shape, self.rope, has, normed=True)
        self.norm = self.new_norm()

    @abstractmethod
    def step(self, embedded: Tensor, rows: Tensor) -> HeadOutput:
        """What follows tokens, of their embeddings [..., width] and what their parents left.

        Args:
            rows: [..., w], at the first level what leaves the layer; later `Out.hidden`, wider than
                those.
        """

    def init_weights(self, std: float) -> None:
        """The layer's matrices; it begins by passing on what it reads."""
        for module in self.layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for last in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(last.weight)

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The features alone."""
        assert self.layer.input_layernorm is not None
        return self.layer.input_layernorm(features), features

    def out(self, rows: Tensor) -> HeadOutput:
        """Normed."""
        normed = self.norm(rows)
        return HeadOutput(normed, normed)

    def forward(self, x: HeadInput) -> HeadOutput:
        """See `DraftHead`; nothing is added to `past` after the first step."""
        if x.slots is None:
            return self.step(x.embedded, x.features)
        return self.step(gather_slots(x.embedded, x.slots), super().forward(x).hidden)


def _random_matrix(like: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix of that shape, which about keeps the size of what it is multiplied with."""
    drawn = torch.randn(like.shape, generator=generator)
    return drawn.div_(math.sqrt(like.shape[1]))


@cache
def heads() -> Mapping[str, type[DraftHead]]:
    """Return the heads of all methods, by kind. A `head.py` that defines one needs no entry."""
    return {kind.kind: kind for kind in _find_head_classes() if issubclass(kind, DraftHead)}


@cache
def parallel_heads() -> Mapping[str, type[ParallelHead]]:
    """Return the heads that draft all tokens in one forward, by kind."""
    return {kind.kind: kind for kind in _find_head_classes() if issubclass(kind, ParallelHead)}


def _find_head_classes() -> list[type]:
    """Return the classes in the `head.py` of methods, without abstract ones."""
    files = sorted(Path(__file__).parents[1].glob("*/head.py"))
    homes = [import_module(f"methods.{file.parent.name}.head") for file in files]
    found = [each for home in homes for each in vars(home).values()]
    return [each for each in found if isinstance(each, type) and not isabstract(each)]

"""Draft heads as torch modules for training. Decoding fuses their weights.

At slot t of a text, a head reads the target's features of token x_t and the token x_{t+1}, and
predicts x_{t+2}. At later draft steps it reads its own output, because the target's features are
not known yet. Training includes such steps: see `DraftHead.forward`.
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
    """Output of a head at its slots, each [sequences, slots, width].

    Attributes:
        hidden: Input of the next step, in place of the target's features.
        normed: Input of the output matrix.
    """

    hidden: Tensor
    normed: Tensor


class DraftHead(nn.Module, ABC):
    """Draft head: one Llama layer and the modules that join tokens and features.

    Its tensors have the names that `layouts` lists. A subclass has `fc` and `layer`. If the
    checkpoint has an output matrix or an embedding, it also has `lm_head` or `embed_tokens`;
    otherwise the target's are used.

    Args:
        shape, rope: Sizes and rotary settings of the layer.
        has: Names of the tensors in the checkpoint. Only the names of optional tensors matter.
        own: Draft vocabulary, if it is not the target's.

    Attributes:
        kind: Key of the head under a model's `heads`.
        layouts: Checkpoint layouts. Training writes the first.
        config: Entries of config.json that training writes besides the sizes.
        recipe: Training recipe.
        captured_layers: Target layers whose outputs the head reads side by side (aux hidden
            states), or `NORMED`.
        hidden_first: Whether `fc` reads the features before the embedding.
        levels: Maximum number of draft steps. None: no limit.
        says: Target ids that the head can draft. None: all.
        mask: Token id that replaces drafted tokens at later steps, in heads that draft all at once.
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
    captured_layers: tuple[int, ...] = (NORMED,)
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

    # The parts that differ between kinds of heads.

    def build(self, has: Collection[str]) -> None:
        """Create the modules that need only the shape and `has`."""

    def project_features(self, features: Tensor) -> Tensor:
        """Return the input of the first step for the target's features [..., layers * width]."""
        return features

    @abstractmethod
    def forward(self, x: HeadInput) -> HeadOutput:
        """Run one step, and add its keys and values to `x.past`."""

    @classmethod
    def choose_layers(cls, _n_layers: int) -> tuple[int, ...]:
        """Return the captured layers of a new head, for a target with `_n_layers` layers."""
        return cls.captured_layers

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """Return an untrained head with torch's default weights."""
        return cls(shape, rope, own=target.choose_vocabulary(cls.recipe.draft_vocab_size))

    def init_weights(self, std: float) -> None:
        """Draw the initial weights. `std` is the standard deviation of the target's own."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)

    def linear_input(self, _embedded: Tensor, _features: Tensor) -> Tensor | None:
        """Return the input of a linear map [reads, width] to the row before the output matrix.

        The map is fitted, and `init_from_linear` starts from it. None: the head starts otherwise.

        Args:
            _embedded: Embeddings as in `forward`, [n, width].
            _features: Features as in `read`, [n, layers * width].
        """
        return None

    def init_from_linear(self, _found: Tensor, _norm: Tensor) -> None:
        """Start from a fitted linear map. The layer then adds nothing until it is trained.

        Args:
            _found: The fitted map.
            _norm: Weight of the target's final norm.
        """
        raise NotImplementedError(f"{self.kind} has no `linear_input`")

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return further arguments that create the head of these files.

        Raises:
            EnvironmentFault: The size of `fc` does not match the width of the target.
        """
        found, due = tuple(files.tensors["fc.weight"].shape), target.hidden_size
        if found != (due, 2 * due):
            raise head_mismatch(
                files, f"fc is {list(found)}; this target's rows of {due} need {[due, 2 * due]}"
            )
        return {"own": HeadVocabulary.from_files(files, target)}

    @classmethod
    def new_small(cls, shape: HeadShape, target: Decoder) -> Self:
        """Return a head of this shape for audits. The caller draws its weights."""
        return cls(shape, {})

    # The parts that all kinds share.

    def set_vocabulary(self, own: HeadVocabulary) -> None:
        """Use a draft vocabulary, or embedding and output matrices of the head's own."""
        self.vocabulary, self.says, width = own, own.ids, self.shape.hidden_size
        if own.has_output_matrix:
            n = own.size if own.ids is None else len(own.ids)
            self.lm_head = nn.Linear(width, n, bias=False)
        if own.embedding_rows is not None:
            self.embed_tokens = nn.Embedding(own.embedding_rows, width)

    def new_norm(self) -> RmsNorm:
        """Return a norm of the head's width."""
        return RmsNorm(self.shape.hidden_size, self.shape.rms_norm_eps)

    @classmethod
    def from_files(cls, files: LoadedHead, target: Decoder) -> Self:
        """Return the head of these files.

        Raises:
            EnvironmentFault: Sizes do not match the target's, or a tensor is missing or not finite.
        """
        facts = cls.init_args(files, target)
        with torch.device("meta"):  # avoid drawing weights that are replaced
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
        """Return a random head as wide as the target, with one narrow attention head."""
        width, generator = target.hidden_size, torch.Generator().manual_seed(seed)
        with torch.device("meta"):
            head = cls.new_small(HeadShape(width, 2 * width, 1, 1, RANDOM_HEAD_DIM), target)
        named = sorted(head.state_dict().items(), key=lambda item: not item[0].startswith("layer."))
        drawn = {
            name: torch.ones(part.shape) if part.dim() == 1 else _random_matrix(part, generator)
            for name, part in named
        }
        head.load_state_dict(drawn, assign=True)
        return head

    def file_config(self) -> dict[str, Any]:
        """Return the entries of config.json besides the sizes."""
        return dict(self.config)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by our names."""
        vocabulary = {} if self.vocabulary is None else self.vocabulary.to_tensors()
        return self.state_dict() | vocabulary

    def as_loaded(self) -> LoadedHead:
        """Return the head in the form that `of` accepts."""
        source = f"the {self.kind} head"
        return LoadedHead(source, self.tensors(), self.shape, self.rope, self.hidden_first)


class JoinedHead(DraftHead):
    """Head with identical steps: it joins a token's embedding with the features of the previous
    token, and feeds the result to the layer."""

    @abstractmethod
    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention input and the residual stream, each [sequences, n, width]."""

    @abstractmethod
    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the rows to feed back and the rows for the output matrix, from the layer's
        output."""

    def forward(self, x: HeadInput) -> HeadOutput:
        """See `DraftHead.forward`."""
        layer, places, past = self.layer, x.positions, x.past
        rows, residual = self.join(x.embedded, x.features)
        key_values = layer.self_attn.project_kv(rows, places)
        if x.slots is None:
            past.own.append(key_values)
        else:
            past.text = key_values
            rows, residual = gather_slots(rows, x.slots), gather_slots(residual, x.slots)
            places = places.gather(1, x.slots)
        return self.make_output(layer.add_residuals(residual, layer.self_attn(rows, places, past)))


class ParallelHead(nn.Module, ABC):
    """Head in training that drafts all tokens in one forward.

    Attributes:
        kind, recipe, captured_layers: See `DraftHead`.
    """

    kind: ClassVar[str]
    recipe: ClassVar[HeadRecipe]
    captured_layers: tuple[int, ...] = (NORMED,)

    @classmethod
    @abstractmethod
    def new(cls, target: Any, draft: Callable[[], Path] | None) -> Self:
        """Return an untrained head.

        Args:
            target: transformers' config of the target.
            draft: Function that returns the folder of the target's default draft model.
        """

    @property
    def weight_bytes(self) -> int:
        """See `Artifact`, which some subclasses are."""
        return sum(part.nbytes for part in self.parameters())

    @abstractmethod
    def file_config(self) -> dict[str, Any]:
        """Return the content of config.json."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store. Published releases use the module's own names."""
        return self.state_dict()

    @abstractmethod
    def draft(
        self, target: Any, ids: Tensor, read: Any, slots: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each of `steps` tokens, its slots [sequences, m] and its logits.

        The logits are [sequences, m, V], at these slots.

        Args:
            target: transformers' module of the target, frozen.
            ids: [sequences, n].
            read: The target's output for these ids (`head_losses.Read`).
            slots: [sequences, slots]. From slot t the first step predicts token t + 2, from the
                tokens up to t + 1 and the target's features up to t.
        """

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write model.safetensors, in fp16, and config.json, with `facts` under "specbench"."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.half().cpu().contiguous() for name, each in self.tensors().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        words = {**self.file_config(), "dtype": "float16", "specbench": dict(facts)}
        text = json.dumps(words, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def randomize(module: Module, seed: int) -> Module:
    """Fill the matrices of a module with random numbers, for audits."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.requires_grad_(False).parameters():
        if part.dim() == 2:
            part.copy_(_random_matrix(part, generator))
    return module


def load_module(make: Callable[[], Module], files: LoadedHead, kind: str) -> Module:
    """Return a module with the tensors of these files, which have the module's own names.

    Raises:
        EnvironmentFault: A tensor is missing, unexpected, of another shape, or not finite.
    """
    with torch.device("meta"):  # avoid drawing weights that are replaced
        module = make()
    shapes = {name: tuple(part.shape) for name, part in module.state_dict().items()}
    tensors = check_tensors(files.source, files.tensors, shapes, kind)
    module.load_state_dict(tensors, assign=True)
    return module


class PrefixHead(JoinedHead):
    """Head whose layer reads only the target's hidden states, and no token.

    Examples are prefix attention (Hydra++) and the augmenting block (Clover). Each draft step reads
    the output of the layer and the tokens so far.
    """

    def build(self, has: Collection[str]) -> None:
        """See `DraftHead.build`."""
        self.layer = LlamaLayer(self.shape.hidden_size, self.shape, self.rope, has, normed=True)
        self.norm = self.new_norm()

    @abstractmethod
    def step(self, embedded: Tensor, rows: Tensor) -> HeadOutput:
        """Predict the next tokens from embeddings [..., width] and the outputs of the parents.

        Args:
            rows: [..., w], at the first level the output of the layer, later `HeadOutput.hidden`,
                which is wider.
        """

    def init_weights(self, std: float) -> None:
        """Initialise the layer's matrices so that the layer first returns its input."""
        for module in self.layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for last in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(last.weight)

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features only."""
        assert self.layer.input_layernorm is not None
        return self.layer.input_layernorm(features), features

    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the normed rows."""
        normed = self.norm(rows)
        return HeadOutput(normed, normed)

    def forward(self, x: HeadInput) -> HeadOutput:
        """See `DraftHead`. Nothing is added to `past` after the first step."""
        if x.slots is None:
            return self.step(x.embedded, x.features)
        return self.step(gather_slots(x.embedded, x.slots), super().forward(x).hidden)


def _random_matrix(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random matrix of this shape that roughly preserves the magnitude of its input."""
    drawn = torch.randn(like.shape, generator=generator)
    return drawn.div_(math.sqrt(like.shape[1]))


@cache
def get_head_classes() -> Mapping[str, type[DraftHead]]:
    """Return the heads of all methods, by kind. A `head.py` that defines one needs no entry."""
    return {kind.kind: kind for kind in _find_head_classes() if issubclass(kind, DraftHead)}


@cache
def get_parallel_head_classes() -> Mapping[str, type[ParallelHead]]:
    """Return the heads that draft all tokens in one forward, by kind."""
    return {kind.kind: kind for kind in _find_head_classes() if issubclass(kind, ParallelHead)}


def _find_head_classes() -> list[type]:
    """Return the classes in the `head.py` of methods, without abstract ones."""
    files = sorted(Path(__file__).parents[1].glob("*/head.py"))
    homes = [import_module(f"methods.{file.parent.name}.head") for file in files]
    found = [each for home in homes for each in vars(home).values()]
    return [each for each in found if isinstance(each, type) and not isabstract(each)]

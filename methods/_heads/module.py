"""Base classes of draft heads for training. Each head is a torch module.

At position t of a text, a head reads the target's features of token x_t and the embedding of token
x_{t+1}. It predicts x_{t+2}, as in EAGLE. At later draft steps, the target has no features for the
draft tokens, so the head reads its own output instead. Training runs such later steps too.

For decoding, `methods/_heads/layer.py` copies the weights of a module to fused layers.
`methods/_heads/unfused.py` runs the module itself.
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
    """Output of one draft step of a head. Both tensors are [sequences, slots, width].

    Attributes:
        hidden: Input of the next draft step, in place of the target's features.
        normed: Normed hidden states. The output matrix maps them to logits.
    """

    hidden: Tensor
    normed: Tensor


class DraftHead(nn.Module, ABC):
    """Draft head with one Llama layer, as a torch module.

    `methods/_heads/layouts.py` lists the tensor names. Every head has the submodule `layer`.
    `lm_head` and `embed_tokens` are None if the head uses the target's matrices.

    Args:
        shape: Sizes of the layer.
        rope: Settings of the rotary embedding.
        tensor_names: Names of the tensors in the checkpoint. They decide which optional tensors the
            module has, such as biases.
        own: Draft vocabulary. With None, the head drafts all token ids and uses the target's
            embedding and output matrix.

    Attributes:
        kind: Kind of the head, such as "eagle3". aliases.yaml lists published heads under this
            name.
        layouts: Known checkpoint layouts. Training writes the first one.
        config: Entries that training adds to config.json.
        recipe: Training recipe.
        captured_layers: Target layers whose hidden states are concatenated to the features.
            `NORMED` stands for the target's last hidden states after the final norm.
        hidden_first: Order of the concatenated input of the matrix `fc`: True for [features,
            embedding], False for [embedding, features].
        levels: Maximum number of draft steps. None means no limit.
        draft_ids: Target ids that the head can draft, [r]. None means all ids.
        mask: Token id of the mask token, for heads that draft all tokens in one forward. None for
            other heads.
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
    draft_ids: Tensor | None
    mask: int | None = None

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        tensor_names: Collection[str] = (),
        own: HeadVocabulary | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.lm_head = self.embed_tokens = None
        self.register_buffer("draft_ids", None, persistent=False)
        if own is not None:
            self.set_vocabulary(own)
        self.build(tensor_names)

    # ---- methods that subclasses override --------------------------------------------------------

    def build(self, tensor_names: Collection[str]) -> None:
        """Create the submodules. The constructor calls it last."""

    def project_features(self, features: Tensor) -> Tensor:
        """Return the input of the first draft step [..., width], from the target's features.

        Args:
            features: Hidden states of the captured layers, [..., layers * width].
        """
        return features

    @abstractmethod
    def forward(self, x: HeadInput) -> HeadOutput:
        """Run one draft step. Add the keys and values of its input to `x.past`."""

    @classmethod
    def choose_layers(cls, _n_layers: int) -> tuple[int, ...]:
        """Return the captured layers of a new head, for a target with this number of layers."""
        return cls.captured_layers

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """Return an untrained head with torch's default weights."""
        return cls(shape, rope, own=target.choose_vocabulary(cls.recipe.draft_vocab_size))

    def init_weights(self, std: float) -> None:
        """Draw the initial weights. `std` is the standard deviation of the target's weights."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)

    def linear_input(self, _embedded: Tensor, _features: Tensor) -> Tensor | None:
        """Return the input of a linear map that approximates the head, or None.

        Training fits the map by least squares. It passes the map to `init_from_linear`, which sets
        the initial weights. With None, `init_weights` draws the initial weights.

        Args:
            _embedded: Token embeddings, [n, width].
            _features: Features of the previous tokens, [n, layers * width].
        """
        return None

    def init_from_linear(self, _found: Tensor, _norm: Tensor) -> None:
        """Initialise the matrix `fc` from a fitted linear map.

        Initialise the layer so that it returns its input unchanged.

        Args:
            _found: Linear map from the output of `linear_input`, [input width, width].
            _norm: Weight of the target's final norm.
        """
        raise NotImplementedError(f"{self.kind} has no `linear_input`")

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return further constructor arguments besides `shape`, `rope` and `tensor_names`.

        Raises:
            EnvironmentFault: The shape of the matrix `fc` does not match the hidden size of the
                target.
        """
        found, width = tuple(files.tensors["fc.weight"].shape), target.hidden_size
        if found != (width, 2 * width):
            raise head_mismatch(
                files, f"fc has shape {list(found)}; this target needs {[width, 2 * width]}"
            )
        return {"own": HeadVocabulary.from_files(files, target)}

    @classmethod
    def new_small(cls, shape: HeadShape, target: Decoder) -> Self:
        """Return a small head for audits. The caller sets its random weights."""
        return cls(shape, {})

    # ---- methods that all kinds of heads share ---------------------------------------------------

    def set_vocabulary(self, own: HeadVocabulary) -> None:
        """Set the draft vocabulary, and create the head's own matrices if it has any."""
        self.vocabulary, self.draft_ids, width = own, own.ids, self.shape.hidden_size
        if own.has_output_matrix:
            n = own.size if own.ids is None else len(own.ids)
            self.lm_head = nn.Linear(width, n, bias=False)
        if own.embedding_rows is not None:
            self.embed_tokens = nn.Embedding(own.embedding_rows, width)

    def new_norm(self) -> RmsNorm:
        """Return a new norm of the head's hidden size."""
        return RmsNorm(self.shape.hidden_size, self.shape.rms_norm_eps)

    @classmethod
    def from_files(cls, files: LoadedHead, target: Decoder) -> Self:
        """Create the head from loaded files.

        Raises:
            EnvironmentFault: Sizes do not match the target's, or a tensor is missing, unexpected or
                not finite.
        """
        extra_args = cls.init_args(files, target)
        with torch.device("meta"):  # do not draw initial weights: the loaded ones replace them
            head = cls(files.shape, files.rope, files.tensors.keys(), **extra_args)
        head.hidden_first = files.hidden_first
        names = head.state_dict()
        missing = next((name for name in names if name not in files.tensors), None)
        if missing is not None:
            raise EnvironmentFault(
                f"{files.source}: missing tensor {missing}", "specbench list methods"
            )
        known = {*names, "d2t", "t2d", "embed_tokens.weight"}
        if unexpected := sorted(name for name in files.tensors if name not in known):
            raise head_mismatch(files, f"unexpected tensor {unexpected[0]}")
        not_finite = next((n for n in names if not files.tensors[n].isfinite().all()), None)
        if not_finite is not None:
            raise head_mismatch(files, f"{not_finite} contains numbers that are not finite")
        try:
            head.load_state_dict({name: files.tensors[name] for name in names}, assign=True)
        except RuntimeError as fault:
            raise head_mismatch(files, str(fault).splitlines()[-1].strip()) from None
        return head

    @classmethod
    @torch.no_grad()
    def random(cls, target: Decoder, seed: int = 0) -> Self:
        """Return a random head with the target's hidden size and one small attention head."""
        width, generator = target.hidden_size, torch.Generator().manual_seed(seed)
        with torch.device("meta"):
            head = cls.new_small(HeadShape(width, 2 * width, 1, 1, RANDOM_HEAD_DIM), target)
        named = sorted(head.state_dict().items(), key=lambda item: not item[0].startswith("layer."))
        random_tensors = {
            name: torch.ones(part.shape) if part.dim() == 1 else _random_matrix(part, generator)
            for name, part in named
        }
        head.load_state_dict(random_tensors, assign=True)
        return head

    def file_config(self) -> dict[str, Any]:
        """Return the entries that training adds to config.json."""
        return dict(self.config)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by specbench's names."""
        vocabulary = {} if self.vocabulary is None else self.vocabulary.to_tensors()
        return self.state_dict() | vocabulary

    def as_loaded(self) -> LoadedHead:
        """Return the head in the form that `from_files` accepts."""
        source = f"the {self.kind} head"
        return LoadedHead(source, self.tensors(), self.shape, self.rope, self.hidden_first)


class JoinedHead(DraftHead):
    """Draft head that computes the same in every draft step, such as EAGLE, EAGLE-3 and MTP.

    `join` combines a token's embedding with the features of the previous token. The layer reads the
    result. `make_output` computes the output of the draft step from the output of the layer.
    """

    @abstractmethod
    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the attention and the residual stream, each [sequences, n, width].

        Args:
            embedded: Token embeddings, [sequences, n, width].
            features: Features of the previous tokens, [sequences, n, width].
        """

    @abstractmethod
    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the output of the draft step, computed from the output `rows` of the layer."""

    def forward(self, x: HeadInput) -> HeadOutput:
        """Run one draft step."""
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
    """Draft head that drafts all tokens in one forward, as a torch module. PARD and DFlash use it.

    Attributes:
        kind: Kind of the head, such as "pard".
        recipe: Training recipe.
        captured_layers: Target layers whose hidden states the head reads.
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
        """Size of the weights in bytes."""
        return sum(part.nbytes for part in self.parameters())

    @abstractmethod
    def file_config(self) -> dict[str, Any]:
        """Return the content of config.json."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store. Published checkpoints have the names of this module."""
        return self.state_dict()

    @abstractmethod
    def draft(
        self, target: Any, ids: Tensor, read: Any, slots: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pair per draft token: logits [sequences, m, vocab] and slots [sequences, m].

        A slot is a position t of the text from which the head drafts. Draft token k (k = 1, 2, ...)
        predicts token t + 1 + k of the text. It depends on the tokens up to t + 1 and on the
        target's features up to t.

        Args:
            target: transformers' module of the target. It is frozen.
            ids: Token ids of the text, [sequences, n].
            read: Output of the target for `ids`, a `TargetOutput`.
            slots: Positions to draft from, [sequences, slots]. A head may use only some of them.
            steps: Number of draft tokens.
        """

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write model.safetensors (in fp16) and config.json. config.json contains `facts` under the
        key "specbench".
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.half().cpu().contiguous() for name, each in self.tensors().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = {**self.file_config(), "dtype": "float16", "specbench": dict(facts)}
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def randomize(module: Module, seed: int) -> Module:
    """Set the matrices of a module to random values, for audits. Return the module."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.requires_grad_(False).parameters():
        if part.dim() == 2:
            part.copy_(_random_matrix(part, generator))
    return module


def load_module(make: Callable[[], Module], files: LoadedHead, kind: str) -> Module:
    """Create a module and copy the tensors of `files` into it. Tensor names must be equal.

    Args:
        make: Function that creates the module.
        files: Loaded tensors.
        kind: Kind of the head, for error messages.

    Raises:
        EnvironmentFault: A tensor is missing, unexpected, of another shape, or not finite.
    """
    with torch.device("meta"):  # do not draw initial weights: the loaded ones replace them
        module = make()
    shapes = {name: tuple(part.shape) for name, part in module.state_dict().items()}
    tensors = check_tensors(files.source, files.tensors, shapes, kind)
    module.load_state_dict(tensors, assign=True)
    return module


class PrefixHead(JoinedHead):
    """Draft head whose layer reads only the target's hidden states, and no draft tokens.

    The layer is the prefix attention of Hydra++ or the augmenting block of Clover. It runs on the
    committed text. `step` then drafts from the layer's output and the draft tokens so far.
    """

    def build(self, tensor_names: Collection[str]) -> None:
        """Create the submodules of the head.

        The constructor of the base class calls this method.
        """
        self.layer = LlamaLayer(
            self.shape.hidden_size, self.shape, self.rope, tensor_names, normed=True
        )
        self.norm = self.new_norm()

    @abstractmethod
    def step(self, embedded: Tensor, rows: Tensor) -> HeadOutput:
        """Run one draft step. Return the output for the next draft tokens.

        Args:
            embedded: Embeddings of the last drafted or committed tokens, [..., width].
            rows: In the first draft step, the output of the layer, [..., width]. In later steps,
                `HeadOutput.hidden` of the previous step, which is wider.
        """

    def init_weights(self, std: float) -> None:
        """Initialise the layer so that it returns its input unchanged before training."""
        for module in self.layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for last in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(last.weight)

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features. The layer does not read the token embeddings."""
        assert self.layer.input_layernorm is not None
        return self.layer.input_layernorm(features), features

    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the normed output of the layer."""
        normed = self.norm(rows)
        return HeadOutput(normed, normed)

    def forward(self, x: HeadInput) -> HeadOutput:
        """Run one draft step. Only the first draft step runs the layer and adds keys and values to
        `x.past`.
        """
        if x.slots is None:
            return self.step(x.embedded, x.features)
        return self.step(gather_slots(x.embedded, x.slots), super().forward(x).hidden)


def _random_matrix(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random matrix with the shape of `like`.

    Its output has about the magnitude of its input.
    """
    random_tensors = torch.randn(like.shape, generator=generator)
    return random_tensors.div_(math.sqrt(like.shape[1]))


@cache
def get_head_classes() -> Mapping[str, type[DraftHead]]:
    """Return all `DraftHead` subclasses in `methods/*/head.py`.

    The key is the kind, such as "eagle3".
    """
    return {kind.kind: kind for kind in _find_head_classes() if issubclass(kind, DraftHead)}


@cache
def get_parallel_head_classes() -> Mapping[str, type[ParallelHead]]:
    """Return all `ParallelHead` subclasses in `methods/*/head.py`.

    The key is the kind, such as "pard".
    """
    return {kind.kind: kind for kind in _find_head_classes() if issubclass(kind, ParallelHead)}


def _find_head_classes() -> list[type]:
    """Return all concrete classes in `methods/*/head.py`."""
    files = sorted(Path(__file__).parents[1].glob("*/head.py"))
    homes = [import_module(f"methods.{file.parent.name}.head") for file in files]
    found = [each for home in homes for each in vars(home).values()]
    return [each for each in found if isinstance(each, type) and not isabstract(each)]

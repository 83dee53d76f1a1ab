"""Base classes of draft heads, which read hidden states of the target.

The hidden states that a head reads are called features. Features are the output of one or several
target layers, concatenated.

A `Head` is a decoder with a state, such as EAGLE (Li et al., ICML 2024, arXiv:2401.15077). Its row
i combines token i + 1 of the text with the features of token i, and predicts token i + 2.

A `FeatureHead` has no state, such as Medusa (Cai et al., ICML 2024, arXiv:2401.10774). It predicts
several next tokens from the features of one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from specbench_cli.engine import host
from specbench_cli.engine.models.artifact import Artifact
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import ModelOutput
from specbench_cli.errors import EnvironmentFault, MethodFault
from specbench_cli.former_names import renamed_members

NORMED = -1
"""Layer number for the hidden states after the final norm, which the output matrix reads."""

MAX_LEVELS = 64
"""Maximum number of draft levels of a head (tokens that it drafts one after another)."""


@renamed_members(taps="captured_layers", together="block_size", own_place="predicts_own_position")
class Head(Decoder):
    """A draft head with a state. Its forward takes `Features` and returns logits over target ids.

    Ids outside the head's own vocabulary get logits of -inf. For draft tokens there are no target
    features yet. So the next draft level uses the head's own hidden states, `ModelOutput.hidden`.

    Attributes:
        captured_layers: Target layers whose hidden states are concatenated, or `NORMED`.
        levels: Maximum number of draft levels. None means no limit.
        block_size: Number of draft tokens that one forward reads and predicts.
        parallel: True if one forward drafts all tokens. The draft positions then contain mask
            tokens without features. The state does not keep the rows of mask tokens (DFlash, Chen
            et al., arXiv:2602.06036).
        predicts_own_position: True if the row of a mask token predicts the token at its own
            position. If False, it predicts the next token. The last token with features then
            predicts the first draft token (P-EAGLE, Hui et al., arXiv:2602.01469).
    """

    captured_layers: tuple[int, ...]
    levels: int | None = None
    parallel: ClassVar[bool] = False
    predicts_own_position: ClassVar[bool] = True
    block_size: ClassVar[int] = 1
    first = 1


class FeatureCache:
    """Buffer for features of committed tokens that the head has not read yet.

    Args:
        target: The target model.
        captured_layers: Target layers whose hidden states are concatenated, or `NORMED`.

    Attributes:
        layers: Target layers whose output is captured.
        latest: Features of all rows of the target's last forward, including rejected tokens. None
            before the first forward.
    """

    def __init__(self, target: Decoder, captured_layers: Sequence[int]) -> None:
        self._target, self._captured_layers = target, tuple(captured_layers)
        self.layers = tuple(at for at in self._captured_layers if at != NORMED)
        self.latest: Tensor | None = None
        self._pending_rows: list[Tensor] = []
        self._newest: Tensor | None = None  # rows of the last `keep`
        self._was_read = self._dropped_some = False

    def write(self, out: ModelOutput) -> None:
        """Store the features of all rows of a target forward. `keep` later selects the committed
        rows.
        """
        self.latest = features(out, self._captured_layers, self._target)

    def keep(self, path: Sequence[int]) -> None:
        """Keep the features of the committed rows `path` of the last forward. Drop all other
        features of it.
        """
        assert self.latest is not None
        n = len(path)
        if n == 0 or path[-1] == n - 1:
            rows = self.latest[:n]
        else:
            index = host.ids(path, self.latest.device)
            rows = self.latest.index_select(0, index)
        self._pending_rows.append(rows)
        self._newest = rows

    def read(self) -> Tensor:
        """Return the features [n, width] that were kept since the last call.

        Raises:
            MethodFault: Some of these features are gone, because `last` was called before.
        """
        if self._dropped_some:
            raise MethodFault(
                "features for `session.pending_features` were dropped",
                "call `session.pending_features` before the first `session.features`",
            )
        self._was_read = True
        rows = (
            self._pending_rows[0] if len(self._pending_rows) == 1 else torch.cat(self._pending_rows)
        )
        self._pending_rows.clear()
        return rows

    def last(self, n: int) -> Tensor:
        """Return the features [n, width] of the last n committed tokens.

        All of these tokens must come from the last forward.
        """
        if self._newest is None:
            raise MethodFault(
                "there are no features before the prefill", "call `session.features` in `propose`"
            )
        if not 1 <= n <= len(self._newest):
            raise MethodFault(
                f"the last step has features of {len(self._newest)} tokens, {n} were requested",
                "in `observe`, request at most the number of committed tokens",
            )
        if not self._was_read:  # a head that never calls `read` would fill the memory
            self._pending_rows.clear()
            self._dropped_some = True
        return self._newest[-n:]


def features(out: ModelOutput, captured_layers: Sequence[int], target: Decoder) -> Tensor:
    """Return the captured features [n, width] of a target forward over one sequence."""
    parts = [
        target.norm(out.hidden[0]) if at == NORMED else out.aux_hidden_states[at][0]
        for at in captured_layers
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


# ---- heads without a state ----------------------------------------------------------------------


@renamed_members(taps="captured_layers", sized="from_sizes")
class FeatureHead(nn.Module, Artifact):
    """A draft head without a state, which predicts several next tokens from one row of features.

    A subclass creates its parameters in `__init__` and computes logits in `forward`. Decoding and
    training use the same module. A method gets the head from `Session.artifact` and calls it.

    `save` writes a folder with config.json and model.safetensors. config.json contains `sizes` and,
    under "specbench", the kind of the head and the hash of its target.

    Args:
        target: The target decoder. The head may use its `hidden_size`, `vocab_size`, `n_layers`,
            `unembed` and `embed`. In training, `target` is an object with only these attributes.
        sizes: Further arguments of the subclass. They are stored in config.json.

    Attributes:
        captured_layers: Target layers whose hidden states are concatenated, or `NORMED`.
        width: Width of a feature row.
        ran: Number of calls so far.
        peak_lr: Maximum learning rate of `specbench train head`.
        decay: Factor between the training loss weights of a draft level and the level before it,
            for `specbench train head`.
        trained: Values of `sizes` that `specbench train head` uses. Other sizes keep the defaults
            of `__init__`.
    """

    captured_layers: tuple[int, ...] = (NORMED,)
    peak_lr: ClassVar[float] = 1e-3
    decay: ClassVar[float] = 0.8
    trained: ClassVar[Mapping[str, Any]] = {}
    n_layers = 1
    ran: int

    def __init__(self, target: Decoder, **sizes: Any) -> None:
        super().__init__()
        self.target, self.sizes, self.name = target, sizes, self.kind
        self.vocab_size, self.ran = target.vocab_size, 0

    def __call__(self, *rows: Any, **named: Any) -> Any:
        """Call `forward` and increase `ran` by 1."""
        self.__dict__["ran"] += 1  # avoids the slow attribute setter of torch modules
        return super().__call__(*rows, **named)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits [levels, n, V] from features [n, width].

        Level k (from 0) predicts the token k + 2 positions after the token that the features belong
        to. The token 1 position after it is already known: it is the root of the draft, which the
        target has chosen.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")

    @property
    def width(self) -> int:
        """Width of a feature row."""
        return len(self.captured_layers) * self.target.hidden_size

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the head's own weights."""
        return sum(each.nbytes for each in (*self.parameters(), *self.buffers()))

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load a head from a folder that `save` wrote."""
        target, file = decoders["target"], folder / "config.json"
        if not file.is_file():
            raise _head_fault(folder, "no config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
        facts = config.get("specbench", {})
        if facts.get("kind") != cls.kind:
            raise _head_fault(
                folder, f"this is a head of kind {facts.get('kind')}, the method needs {cls.kind}"
            )
        trained_for, loaded = facts.get("target_sha256"), _sha256_of(target)
        if loaded is not None and trained_for not in (None, loaded):
            raise _head_fault(
                folder,
                f"trained for a target whose weights have the SHA-256 {trained_for[:12]}...; this"
                f" run's have {loaded[:12]}...",
            )
        weights = Weights(folder)
        head = cls.from_sizes(target, config.get("sizes", {}), weights, folder)
        try:
            head.load_state_dict(dict(weights))
        except RuntimeError as fault:
            raise _head_fault(folder, str(fault).strip().splitlines()[-1].strip()) from None
        return head.ready()

    @classmethod
    def from_sizes(
        cls, target: Decoder, sizes: Mapping[str, Any], weights: Weights, folder: Path
    ) -> Self:
        """Return a head of the given sizes, before its weights are loaded.

        Raises:
            EnvironmentFault: The sizes are invalid, or need far more parameters than the checkpoint
                has.
        """
        try:
            levels = sizes.get("levels", 1)
            if type(levels) is not int or not 1 <= levels <= MAX_LEVELS:
                raise _head_fault(folder, f"levels is {levels!r}; a head has 1 to {MAX_LEVELS}")
            with _limit_parameters(weights):
                return cls._create(target, sizes)
        except (TypeError, ValueError, AttributeError, RuntimeError) as fault:
            raise _head_fault(folder, str(fault).strip().splitlines()[-1].strip()) from None

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return an untrained head."""
        return cls._create(decoders["target"], {}, seed).ready()

    def save(self, folder: Path, **facts: Any) -> None:
        """Write the files that `load` reads. config.json also stores `facts`, under "specbench"."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.contiguous().cpu() for name, each in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        own = {"kind": self.kind, "target_sha256": _sha256_of(self.target)}
        config = {
            "architectures": [type(self).__name__],
            "sizes": self.sizes,
            "specbench": {**own, **facts},
        }
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    def ready(self) -> Self:
        """Prepare the head for decoding: freeze it, set eval mode, use the target's device and
        dtype.

        A subclass with its own `load` calls this at the end.
        """
        return self.to(self.target.device, self.target.dtype).requires_grad_(False).eval()

    @classmethod
    def _create(cls, target: Decoder, sizes: Mapping[str, Any], seed: int = 0) -> Self:
        """Return a new head with random weights. The state of torch's random generator does not
        change.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds devices too
            return cls(target, **sizes)


class LevelOutput(NamedTuple):
    """Output of a `SequentialHead` for n nodes of one draft level.

    Attributes:
        logits: Logits [n, V] from which the children of the nodes are chosen.
        rows: Hidden states [n, w], which are the input for the next level.
    """

    logits: Tensor
    rows: Tensor


class SequentialHead(FeatureHead):
    """A draft head without a state that reads draft tokens, with one call per draft level.

    Examples are Hydra (Ankner et al., arXiv:2402.05109) and Clover (Xiao et al., arXiv:2405.00263).
    The call for level 0 reads the target's features and the root of the draft, which is the last
    committed token. The call for level k reads the tokens of its nodes, and the hidden states of
    their parents. A call predicts the token after each of its nodes.
    """

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> LevelOutput:  # type: ignore[override]
        """Predict the token after each of n nodes.

        Args:
            rows: At level 0, the target's features [n, width]. At later levels, `LevelOutput.rows`
                of the nodes' parents.
            ids: Tokens of the nodes, [n] int64.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")


class LookAhead(FeatureHead):
    """A draft head whose extra rows pass through upper layers of the target.

    It implements Parallel Decoding via Hidden Transfer (Wu et al., arXiv:2404.12022). The head
    predicts hidden states for future positions, here called extra rows. After the root and each
    node of a draft, `levels` extra rows enter the target at `layer`. Extra row k is k + 1 positions
    after its node, and predicts the token after its own position. It attends to the node, to
    everything that the node attends to, and to the extra rows before it. Rows of the text do not
    attend to extra rows, and the state does not keep extra rows (`Session.reserve`).

    Args:
        levels: Number of extra rows after each node.
        layer: First target layer that the extra rows pass through. None means the middle layer.

    Attributes:
        tuned: LoRA rank for fine-tuning the target together with the head (Hu et al.,
            arXiv:2106.09685). 0 leaves the target unchanged.
        updates: Two numbers of training steps: on the corpus, and on replies of the target.
        sequences: Number of sequences of 512 tokens per training step. It is small, because
            training runs the extra rows through the target.
        captured_layers: The layer whose output `forward` reads. If `layer` is 0, `forward` reads
            embeddings instead.

    Raises:
        MethodFault: The target has no such layer.
    """

    tuned: ClassVar[int] = 0
    updates: ClassVar[tuple[int, int]] = (60, 240)
    sequences: ClassVar[int] = 2
    peak_lr: ClassVar[float] = 3e-3

    def __init__(self, target: Decoder, levels: int, layer: int | None = None, **sizes: Any):
        layer = target.n_layers // 2 if layer is None else layer
        if not 0 <= layer < target.n_layers:
            raise MethodFault(
                f"{target.name} has no layer {layer}: it has {target.n_layers} layers",
                f"choose a layer from 0 to {target.n_layers - 1}",
            )
        super().__init__(target, levels=levels, layer=layer, **sizes)
        self.layer, self.captured_layers = layer, (max(0, layer - 1),)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the extra rows [n, levels, hidden] that enter the target at `layer`.

        Args:
            rows: Hidden states [n, hidden] of the n nodes, at the input of that layer.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `forward`")


@contextmanager
def _limit_parameters(weights: Weights) -> Iterator[None]:
    """Raise ValueError if a module created in this context has too many parameters.

    The limit is twice the number of parameters in `weights`. Without a limit, wrong sizes in
    config.json could fill the memory. Loading the weights finds smaller differences.
    """
    most, made = 2 * weights.parameters, 0
    names = set[tuple[int, str]]()

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal made
        if (place := (id(module), name)) not in names:
            names.add(place)
            made += parameter.numel()
        if made > most or len(names) > 2 * len(weights):
            held = f"{weights.parameters} numbers in {len(weights)} tensors"
            raise ValueError(
                f"its sizes need more than twice the parameters of its weights: {held}"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _sha256_of(decoder: Decoder) -> str | None:
    # Import here: the import takes a second, and a loaded decoder has already imported the module.
    from specbench_cli.engine.models.load import sha256_of

    return sha256_of(decoder)


def _head_fault(folder: Path, what: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{folder.name}: {what}",
        "use another head with --set METHOD.head=DIR, or train one with: specbench train head",
    )

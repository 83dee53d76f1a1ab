"""Workspace: decoders, trained modules and preallocated states that the sessions of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.artifact import ArtifactSpec
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.types import Role
from specbench_cli.engine.workers.transport import InlineTransport, Transport
from specbench_cli.errors import MethodFault


@dataclass
class Workspace:
    """Decoders, trained modules and preallocated model states. They remain after a session ends.

    Attributes:
        decoders: Decoders of the run by role: "target" and, for example, "draft".
        capacity: Number of rows of each model state: the longest prompt plus its token budget.
        modules: Function that loads the transformers module of a role such as "target", for methods
            that run another project's code.
        tokenizer: The transformers tokenizer.
        load_artifact: Function that loads a trained module for a method.
        costs: Function that returns the time of a forward, divided by the time of a target forward
            over one row. Its arguments are the model's name and the number of rows. For the target
            there may be two more: the number of sequences, and whether all of them have the same
            number of rows.
        decoder_factories: For each role, a picklable function that loads the decoder in another
            process.
        transport: Transport that runs drafters in parallel with the target.
        role: Role that the trace records for the target's forwards after prefill.
        synthetic: What is not real in the models, such as random weights. None means that all is
            real.
        token_vocabulary: Bytes of the target's token ids. None means that the tokenizer determines
            them.
        output_vocab_size: Number of ids that an output may contain. None means all ids. If a draft
            model decodes alone, it is limited to the target's ids, because the audit judges its
            output with the target.
    """

    decoders: Mapping[str, Decoder]
    capacity: int
    modules: Callable[[str], Any] | None = None
    tokenizer: Any = None
    load_artifact: Callable[[ArtifactSpec], Any] | None = None
    costs: Callable[..., float] | None = None
    decoder_factories: Mapping[str, Callable[[], Decoder]] = field(default_factory=dict)
    transport: Transport = field(default_factory=InlineTransport)
    role: Role = "verify"
    synthetic: str | None = None
    token_vocabulary: Vocabulary | None = None
    output_vocab_size: int | None = None
    # Use weak keys: when a method's trainable copy of a model is freed, the states of this copy are
    # freed too.
    _states: WeakKeyDictionary[Decoder, dict[tuple[int, int, int], list[State]]] = field(
        default_factory=WeakKeyDictionary
    )
    _artifacts: dict[ArtifactSpec, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = self.decoders.get("target")
        for decoder in self.decoders.values():
            if target is not None and decoder is not target:
                decoder.input_vocab_size = target.vocab_size

    def artifact(self, wanted: ArtifactSpec) -> Any:
        """Return a trained module. It is loaded at first use and then kept."""
        if wanted not in self._artifacts:
            if self.load_artifact is None:
                raise MethodFault(f"this run has no trained module of kind {wanted.kind.kind!r}")
            self._artifacts[wanted] = self.load_artifact(wanted)
        return self._artifacts[wanted]

    def decode_alone(self, model: str) -> Workspace:
        """Return a workspace in which the decoder with role `model` is the target and decodes
        alone.

        If `model` is "target", return this workspace. Both workspaces share their model states.
        """
        if model == "target":
            return self
        size = self.decoders["target"].vocab_size
        return replace(
            self, decoders={"target": self.decoders[model]}, role="draft", output_vocab_size=size
        )

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the target: the bytes of each token id.

        Without a tokenizer, each id gets a different byte string.

        Raises:
            MethodFault: specbench does not support the format of the tokenizer.
        """
        if self.token_vocabulary is None and self.tokenizer is None:
            self.token_vocabulary = Vocabulary.from_size(self.decoders["target"].vocab_size)
        elif self.token_vocabulary is None:
            try:
                size = self.decoders["target"].vocab_size
                self.token_vocabulary = Vocabulary.from_tokenizer(self.tokenizer).with_size(size)
            except ValueError as unknown:
                raise MethodFault(
                    f"the method needs the text of tokens, but the target's tokenizer is not"
                    f" supported: {unknown}",
                    "choose a --target with a byte-level or SentencePiece tokenizer",
                ) from None
        return self.token_vocabulary

    def create_allocator(self, slots: int = 1, slot: int = 0) -> StateAllocator:
        """Return the object that allocates the model states of one request.

        Args:
            slots: Number of sequences that have model states at the same time.
            slot: Index of this request among them.
        """
        return StateAllocator(self, slots, slot)

    def models(self, memory: Memory | None = None) -> list[Decoder | FeatureHead]:
        """Return all models that run forwards: decoders, draft heads, and trainable copies in
        `memory`.
        """
        copies = () if memory is None else memory.copies
        made = (*self._artifacts.values(), *copies)
        heads = (each for each in made if isinstance(each, Decoder | FeatureHead))
        return [*self.decoders.values(), *heads]

    @property
    def heads(self) -> dict[str, Decoder | FeatureHead]:
        """Trained modules that run forwards, by the names under which traces record them."""
        made = self._artifacts.values()
        return {each.name: each for each in made if isinstance(each, Decoder | FeatureHead)}

    def cost(self, model: str, rows: int, *step: int) -> float:
        """Return the time of a forward, divided by the time of a target forward over one row.

        Raises:
            MethodFault: No forward costs were measured.
        """
        if self.costs is None:
            raise MethodFault(
                "this run has not measured the costs of forwards",
                "set `Method.uses_costs` in a method that reads costs",
            )
        return self.costs(model, rows, *step)

    def reserve(self, capacity: int) -> None:
        """Increase the capacity of model states, and free the states that are now too small."""
        if capacity > self.capacity:
            self.capacity = capacity
            self._states.clear()

    def state(
        self, decoder: Decoder, slack: int, index: int, slots: int = 1, slot: int = 0
    ) -> State:
        """Return an empty state of a decoder. States are created at first use and then reused.

        Args:
            index: Number of the state among the states with the same decoder, `slack` and sequence.
            slots: Number of sequences that have states at the same time. If possible, their states
                are views of one state.
            slot: Index of this sequence.
        """
        states, key = self._states.setdefault(decoder, {}), (slack, index, slots)
        if key not in states:
            room = self.capacity + slack
            pool = decoder.new_state(room, slots)
            if slots == 1:
                states[key] = [pool]
            elif isinstance(pool, KVState):
                states[key] = [pool.sequence_state(each) for each in range(slots)]
            else:
                states[key] = [decoder.new_state(room) for _ in range(slots)]
        state = states[key][slot]
        state.clear()
        return state

    def close(self) -> None:
        """Stop the workers that run drafters."""
        self.transport.close()

    @property
    def recorded(self) -> int:
        """Number of CUDA graphs that the models have captured."""
        parts = [*self.decoders.values(), *self._artifacts.values()]
        return sum(part.recorded for part in parts if isinstance(part, Decoder))

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the weights of all models."""
        parts = [*self.decoders.values(), *self._artifacts.values()]
        return sum(part.weight_bytes for part in parts)

    @property
    def state_bytes(self) -> int:
        """Size in bytes of all model states allocated so far."""
        held = (states for own in self._states.values() for states in own.values())
        return sum(state.nbytes for states in held for state in states)


class StateAllocator:
    """Object that allocates the model states of one request.

    A call takes a decoder and the number of extra rows beyond the longest sequence. Each call
    returns another empty state.

    Args:
        slots: Number of sequences that have states at the same time.
        slot: Index of this request among these sequences.
    """

    def __init__(self, workspace: Workspace, slots: int = 1, slot: int = 0) -> None:
        self._workspace = workspace
        self._slots, self._slot = slots, slot
        self._num_allocated: dict[tuple[Decoder, int], int] = {}
        self._states: list[State] = []

    def __call__(self, decoder: Decoder, slack: int) -> State:
        key = (decoder, slack)
        index = self._num_allocated[key] = self._num_allocated.get(key, -1) + 1
        state = self._workspace.state(decoder, slack, index, self._slots, self._slot)
        self._states.append(state)
        return state

    def release(self) -> None:
        """Release the memory of all allocated states, after the request has ended."""
        for state in self._states:
            if isinstance(state, KVState):
                state.free()

"""A method's view of a request: its text, the run's models, and the random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.learning import Memory, make_trainable
from specbench_cli.engine.models.artifact import ArtifactSpec
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.meter import Meter, Metered, MeteredHead
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.request import BatchSlot, Request
from specbench_cli.engine.sequence import Finish, Text
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.verify.random import Random, SeededRandom
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.workers.drafter import Drafter, DraftRequest
from specbench_cli.engine.workers.transport import Worker, WorkerRequest
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@renamed_members(
    since="pending_tokens", room="max_draft_length", hire="start_worker", words="vocabulary"
)
class SessionView:
    """Base class of `Session`: the text, models, model states and random numbers of a request.

    Nothing in this class changes the text.

    Args:
        pass_: Number of the run's repeat, from 1.
        random: Source of random numbers. None derives it from the seed, the prompt and the repeat.
        shared: The batch of the request. None means that the request is decoded alone.

    Attributes:
        requests: The request, as a tuple with one element.
        target: The target, with metered forwards. They count as verification.
        device: The target's device.
        sampling: The decoding rule.
        memory: Data that the method keeps between prompts, if its `state_scope` is not "prompt".
    """

    _allocate_state: Callable[[Decoder, int], State]  # (decoder, extra rows) -> empty state

    def __init__(
        self,
        workspace: Workspace,
        request: Request,
        sampling: Sampling,
        *,
        pass_: int = 1,
        memory: Memory | None = None,
        random: Random | None = None,
        shared: BatchSlot | None = None,
    ) -> None:
        self._workspace, self._pass = workspace, pass_
        decoder = self._decoder("target")
        self.device = decoder.device
        self._meter = meter = Meter(self.device) if shared is None else shared.meter
        self._place = place = None if shared is None else shared.place
        self._workers: list[Worker] = []
        self._random_is_seeded = random is None
        self.requests = (request,)
        self.sampling = sampling
        self.memory = Memory() if memory is None else memory
        self.target = Metered(decoder, meter, role=workspace.role, place=place)
        self._text = Text(request.ids, request.stop, self.device, meter.clock.now_ns)
        size = workspace.output_vocab_size or decoder.vocab_size
        key = sampling.seed, request.prompt_id, request.turn
        self._noise = Noise(*key, size, self.device)
        random = random or SeededRandom(*key, pass_, self.device)
        self._chooser = Chooser(sampling, random, self._noise, size)

    # ---- the text -------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the target: the bytes of each token id, and a function that tokenizes text.

        Raises:
            MethodFault: specbench does not support the format of the target's tokenizer.
        """
        return self._workspace.vocabulary()

    def tokens(self) -> Sequence[int]:
        """Return all token ids so far: the prompt and the committed tokens. Read only."""
        return self._text.tokens

    def output(self) -> Sequence[int]:
        """Return the token ids of the output so far."""
        return self._text.output

    @property
    def finish(self) -> Finish | None:
        """Reason why the output ended. None if it has not ended."""
        return self._text.finish

    def max_draft_length(self) -> int:
        """Return the maximum useful draft length, or number of tree levels.

        It is the remaining token budget minus the token that verification adds.
        """
        return self._text.max_draft_length

    def pending_tokens(self, length: int) -> Tokens:
        """Return the tokens of the text that a model state with `length` rows has not processed."""
        return self._text.pending_tokens(length)

    # ---- models and states ----------------------------------------------------------------------

    def draft(self, name: str = "draft") -> Metered:
        """Return a draft model of the run by its name. Its forwards are metered and count as
        drafting.
        """
        return Metered(self._decoder(name), self._meter, role="draft", place=self._place)

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        """Return an empty state with capacity for the longest sequence of the run plus `slack`
        rows.
        """
        state = self._allocate_state(decoder.decoder, slack)
        source = self.requests[0].source
        if source is not None:
            read = decoder.decoder.attach(state, source)
            if not read and decoder.decoder is self._decoder("target"):
                raise MethodFault(
                    f"{decoder.name} reads only text, but the request has other input"
                )
        return state

    def start_worker(self, kind: type[Drafter], params: MethodParams) -> Worker:
        """Start a drafter that runs in parallel with the target, beginning with the drafter's
        prefill.

        Args:
            kind: Class of the drafter. It must be defined at the top level of a module.
            params: Parameters of the method. The drafter receives them.

        Raises:
            WorkerLost: The process does not start.
        """
        request = self.requests[0]
        draft_request = DraftRequest(
            request.prompt_id,
            request.turn,
            self._pass,
            request.ids,
            # Drafters in other processes do not use the logits processor or contrastive decoding.
            replace(self.sampling, processor=None, contrast=None),
            self._workspace.capacity,
            self.target.vocab_size,
            request.source,
        )
        chooser = None if self._random_is_seeded else self._chooser
        worker = self._workspace.transport.start_worker(
            WorkerRequest(
                kind,
                params,
                draft_request,
                self._workspace.decoders,
                self._workspace.decoder_factories,
                self._meter,
                self._allocate_state,
                chooser,
            )
        )
        self._workers.append(worker)
        return worker

    def artifact(self, wanted: ArtifactSpec) -> Any:
        """Return a trained module of the run. If it is a draft head, its forwards count as
        drafting.
        """
        made = self._workspace.artifact(wanted)
        if isinstance(made, FeatureHead):
            return MeteredHead(made, self._meter, place=self._place)
        if not isinstance(made, Decoder):
            return made
        return Metered(made, self._meter, role="draft", place=self._place)

    def trainable(self, wanted: str | ArtifactSpec = "draft", topic: str = "") -> Any:
        """Return the method's own trainable copy of a decoder or trained module.

        The copy is created at first use, so `Method.start` should request it. The method needs a
        `state_scope` other than "prompt". The forwards of the copy count as drafting.

        The weights are the parameters of the copy's `module`, which is called like a transformers
        model: `module(ids).logits`. They may change only in `Method.learn`. So one request is
        decoded with one version of the weights.

        Args:
            topic: Topic of the copy, for a method with one copy per topic.

        Raises:
            MethodFault: There is no such decoder, or it has no torch module.
        """
        if isinstance(wanted, str):
            source: Any = self._decoder(wanted)
        else:
            source = self._workspace.artifact(wanted)
        make = partial(make_trainable, source, self._workspace.decoders.values())
        made = self.memory.get_copy((wanted, topic), make)
        if wanted == "target":
            made.name = "target's copy"  # forwards of the copy must not count as the target's
        if not isinstance(made, Decoder):
            return made
        return Metered(made, self._meter, role="draft", place=self._place)

    def verify_cost(self, rows: int) -> float:
        """Return the time of a target forward over `rows` rows, divided by the time over one row.

        The rows include the root. The run measures these times if `Method.uses_costs` is True.
        """
        return self._workspace.cost("target", rows)

    def draft_cost(self, model: Metered | MeteredHead, rows: int = 1) -> float:
        """Return the time of a draft model's forward, divided by that of a target forward over one
        row.

        A part of the target costs its share of a full forward.
        """
        return model.portion * self._workspace.cost(model.name, rows)

    # ---- distributions and random numbers -------------------------------------------------------

    @property
    def random(self) -> Random:
        """Source of random numbers, with the functions `categorical` and `bernoulli`."""
        return self._chooser.random

    def warp(self, rows: Tensor) -> Tensor:
        """Return the distributions [..., V] of logits, after temperature, top-k and top-p."""
        return self._chooser.warp(rows)

    def noise(self, first: int, n: int = 1) -> Tensor:
        """Return the Gumbel noise [n, V] for n output positions, starting at position `first`.

        The noise depends only on seed, prompt and position. So all methods have the same noise,
        which is called coupled sampling.
        """
        return self._chooser.noise(first, n)

    def scores(self, rows: Tensor, first: int, depths: Sequence[int] | None = None) -> Tensor:
        """Return the scores of logits [n, V] at the output positions from `first` on.

        The token with the highest score in a row is the chosen token.

        Args:
            depths: Offset of each row's position from `first`. Default: 0, 1, 2, ...
        """
        return self._chooser.scores(rows, first, depths)

    # ---- helpers --------------------------------------------------------------------------------

    def _decoder(self, name: str) -> Decoder:
        decoder = self._workspace.decoders.get(name)
        if decoder is None:
            raise MethodFault(f"this run has no decoder called {name!r}")
        return decoder

"""A session: all that a method may touch while it decodes one request.

It holds the committed tokens, the target behind a meter, the one verifier, the one stop rule and
the two sources of chance. Requests come as a tuple because batches will; today it holds one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from specbench_cli.engine import sampling as law
from specbench_cli.engine import verify
from specbench_cli.engine.decoder import Decoder, State
from specbench_cli.engine.meter import Meter, Metered
from specbench_cli.engine.random import Random, SeededRandom
from specbench_cli.engine.sampling import Noise, Sampling
from specbench_cli.engine.stop import Finish, StopRule
from specbench_cli.engine.types import Draft, Forward, Origin, Out, Outcome, Tokens
from specbench_cli.errors import MethodFault


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `ids` are the prompt's tokens, template included."""

    prompt_id: str
    turn: int
    ids: tuple[int, ...]
    stop: StopRule


@dataclass
class Workspace:
    """What outlives a session: the decoders and their preallocated states.

    decoders: "target", and by role whatever else the run has ("draft").
    capacity: rows every state has room for; the longest prompt plus its budget.
    modules: builds transformers' own module of a role, for peers; tokenizer: transformers' own.
    """

    decoders: Mapping[str, Decoder]
    capacity: int
    modules: Callable[[str], Any] | None = None
    tokenizer: Any = None
    _states: dict[tuple[str, int, int], State] = field(default_factory=dict)

    def reserve(self, capacity: int) -> None:
        """Make room for longer sequences; drops the states that are too small."""
        if capacity > self.capacity:
            self.capacity = capacity
            self._states.clear()

    def state(self, decoder: Decoder, slack: int, index: int) -> State:
        """The index-th cleared state of a decoder, made at first use and kept."""
        key = (decoder.name, slack, index)
        if key not in self._states:
            self._states[key] = decoder.new_state(self.capacity + slack)
        state = self._states[key]
        state.clear()
        return state

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held."""
        return sum(decoder.weight_bytes for decoder in self.decoders.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of all states preallocated so far."""
        return sum(state.nbytes for state in self._states.values())


class Session:
    """One request being decoded by one method.

    Attributes:
        requests: what is decoded (one request today).
        target: the target behind a meter; its forwards count as verification.
        state: the target's state, of which `score` writes and `commit` keeps rows.
        sampling: the decoding rule.
        pass_: which pass of the run this is, from 1; under rejection another pass draws anew.
        random: the primitives `categorical` and `bernoulli`.
        meter: the trace of all forwards.
        finish: why the output ended; None while it has not.
        memory: what the method keeps between prompts when its state scope is "run".
    """

    def __init__(
        self,
        workspace: Workspace,
        request: Request,
        sampling: Sampling,
        *,
        pass_: int = 1,
        memory: dict[str, Any] | None = None,
        random: Random | None = None,
    ) -> None:
        target = workspace.decoders["target"]
        self._workspace = workspace
        self.meter = Meter(target.device)
        self._handed: dict[tuple[str, int], int] = {}
        self._taken = 0
        self.requests = (request,)
        self.sampling = sampling
        self.pass_ = pass_
        self.device = target.device
        self.memory = {} if memory is None else memory
        self.target = self._metered("target")
        self.state = self.new_state(self.target)
        self.random = random or SeededRandom(
            sampling.seed, request.prompt_id, request.turn, pass_, target.device
        )
        self._noise = Noise(
            sampling.seed, request.prompt_id, request.turn, target.vocab_size, target.device
        )
        self._tokens = list(request.ids)
        self._prompt_length = len(request.ids)
        self._prompt = self._tensor(request.ids)
        self._root: Tensor | None = None  # the last committed token, on the device
        self._origin: list[Origin] = []
        self.finish: Finish | None = None
        self.begin()

    def begin(self) -> None:
        """Start the timer: the ids are on the device, the states cleared and preallocated."""
        self.meter.clock.restart()
        self.started_ns = self.first_ns = self.last_ns = time.perf_counter_ns()

    # ---- what there is --------------------------------------------------------------------------

    def draft(self, name: str = "draft") -> Metered:
        """Another decoder of the run, behind the meter; its forwards count as drafting."""
        return self._metered(name)

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        """A cleared state, preallocated for the longest sequence of the run plus `slack` rows."""
        key = (decoder.name, slack)
        index = self._handed[key] = self._handed.get(key, -1) + 1
        return self._workspace.state(decoder.decoder, slack, index)

    def module(self, name: str) -> Any:
        """transformers' own module of a decoder; for peers."""
        if self._workspace.modules is None:
            raise MethodFault(f"this run holds no transformers module of {name!r}")
        return self._workspace.modules(name)

    @property
    def tokenizer(self) -> Any:
        """transformers' own tokenizer of the target; for peers."""
        return self._workspace.tokenizer

    def tokens(self, seq: int = 0) -> Sequence[int]:
        """All ids so far: the prompt and what was committed. Read only."""
        return self._tokens

    def output(self, seq: int = 0) -> Sequence[int]:
        """The committed ids."""
        return self._tokens[self._prompt_length :]

    @property
    def origin(self) -> Sequence[Origin]:
        """How each committed token came to be."""
        return self._origin

    def room(self, seq: int = 0) -> int:
        """Most draft levels of use: the remaining budget, less the token that verification adds."""
        return self.requests[seq].stop.max_new_tokens - self._position() - 1

    def since(self, length: int, seq: int = 0) -> Tokens:
        """The committed tokens that a state of `length` rows has not seen."""
        if self._root is None and length == 0:
            return Tokens(self._prompt[None])
        if self._root is not None and length == len(self._tokens) - 1:
            return Tokens(self._root[None])
        return Tokens(self._tensor(self._tokens[length:])[None])

    def chain(self, ids: Sequence[int]) -> Draft:
        """A chain of tokens chosen without a draw."""
        return Draft(self._tensor(ids))

    # ---- laws and chance ------------------------------------------------------------------------

    def warp(self, rows: Tensor) -> Tensor:
        """The laws that logits [..., V] stand for under this session's temperature and cuts."""
        return law.warp(rows, self.sampling)

    def noise(self, first: int, n: int = 1, seq: int = 0) -> Tensor:
        """Keyed noise of output positions first..first+n-1, [n, V]; the same for every method."""
        return self._noise.rows(first, n)

    def scores(self, rows: Tensor, first: int) -> Tensor:
        """Decision scores of logits [n, V] at output positions first...: their argmax is the
        choice."""
        if self.sampling.rule == "greedy":
            return rows
        return law.log_warp(rows, self.sampling) + self.noise(first, rows.shape[0])

    def pick(self, out: Out, ahead: int = 0) -> tuple[Tensor, Tensor | None]:
        """Draw a draft token from the last row of a draft model's logits, as the rule asks.

        Args:
            out: a forward's result; its vocabulary agrees with the target's where they overlap.
            ahead: how many draft tokens stand between the last committed token and this one.
        Returns:
            (token [1] int64, q [1, V] or None): q where verification needs the law drawn from.
        """
        rows = self._align(cast(Tensor, out.logits)[:, -1])
        if self.sampling.rule == "rejection":
            q = self.warp(rows)
            return self.random.categorical(q), q
        return self.scores(rows, self._position() + ahead).argmax(-1), None

    def drawn(self, picks: Sequence[tuple[Tensor, Tensor | None]]) -> Draft:
        """The chain that consecutive `pick`s make."""
        if not picks:
            return self.chain(())
        tokens = torch.cat([token for token, _ in picks])
        laws = [q for _, q in picks if q is not None]
        return Draft(tokens, law="iid", q=torch.cat(laws)) if laws else Draft(tokens)

    # ---- the target's steps ---------------------------------------------------------------------

    def prefill(self) -> None:
        """Run the prompt through the target and commit the first token."""
        rows = cast(Tensor, self.target.forward(self.since(0), self.state).logits)
        self.state.commit(0, range(self._prompt_length))
        self._append(self._decide(self.chain(()), rows[0], plain="prefill"))

    def score(self, draft: Draft) -> Tensor:
        """One target forward over the last committed token and a chain: logits [m + 1, V]."""
        self._check(draft)
        root = self.since(self.state.length())
        x = Tokens(torch.cat((root.ids, draft.tokens[None]), 1)) if draft.nodes else root
        return cast(Tensor, self.target.forward(x, self.state, logits_at="all").logits)[0]

    def verify(self, draft: Draft, rows: Tensor) -> Outcome:
        """Decide a chain from the target's logits [m + 1, V] at its root and nodes."""
        return self._decide(draft, rows, plain="plain")

    def commit(self, outcome: Outcome) -> Outcome:
        """Take an outcome: cut it by the stop rule, append it, keep its rows of the target's state.

        Returns:
            the outcome as far as it was committed; `finish` is set if the output ends here.
        """
        committed = self._append(outcome)
        # Rows: the root's and the drafted tokens', but for the last committed token, which roots
        # the next.
        nodes = committed.path[: len(committed.committed) - 1]
        self.state.commit(0, (0, *(node + 1 for node in nodes)))
        return committed

    def adopt(self, outcome: Outcome) -> Outcome:
        """Take what a peer decoded with its own means; cut and appended, no state is touched.

        A peer tells its steps once it has all of them: they arrived with the first one told.
        """
        first = self._position() == 0
        arrived = self.last_ns
        kept = self._append(outcome)
        if not first:
            self.last_ns = arrived
        return kept

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the step that they led to."""
        first, self._taken = self._taken, len(self.meter.forwards)
        return self.meter.forwards[first:]

    # ---- inside ---------------------------------------------------------------------------------

    def _metered(self, name: str) -> Metered:
        decoder = self._workspace.decoders.get(name)
        if decoder is None:
            raise MethodFault(f"this run has no decoder called {name!r}")
        return Metered(decoder, self.meter, verifies=name == "target")

    def _position(self) -> int:
        return len(self._tokens) - self._prompt_length

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.device)

    def _align(self, rows: Tensor) -> Tensor:
        """Padding differs between checkpoints of one tokenizer: cut or fill up to the target's
        width."""
        width = self.target.vocab_size - rows.shape[-1]
        if width == 0:
            return rows
        return torch.nn.functional.pad(rows, (0, width), value=-torch.inf)

    def _check(self, draft: Draft) -> None:
        if draft.parents is not None:
            raise MethodFault("a tree was proposed; verification takes chains so far")
        if draft.nodes > self.room():
            raise MethodFault(
                f"{draft.nodes} draft tokens proposed where at most {self.room()} are of use",
                hint="propose no more than the `limit` given",
            )
        if self.sampling.rule == "rejection":
            shape = None if draft.q is None else tuple(draft.q.shape)
            whole = (draft.nodes, self.target.vocab_size)
            if (draft.law, shape) not in (("point", None), ("iid", whole)):
                raise MethodFault(
                    f"a draft of law {draft.law!r} with q of shape {shape}; "
                    f"allowed are 'point' with None and 'iid' with {whole}",
                    hint="take each drawn token and its q from `session.pick`",
                )

    def _decide(self, draft: Draft, rows: Tensor, plain: Origin) -> Outcome:
        # One transfer brings all that the host needs to know: the only wait for the device in a
        # step.
        m = draft.nodes
        if self.sampling.rule == "rejection":
            accepted, token = verify.rejection(draft.tokens, draft.q, self.warp(rows), self.random)
            self._root = token[None]
            n, following, *ids = torch.cat((accepted[None], token[None], draft.tokens)).tolist()
        else:
            choices = self.scores(rows, self._position()).argmax(-1)
            both = torch.cat((choices, draft.tokens)).tolist() if m else choices.tolist()
            ids = both[m + 1 :]
            n = verify.match(ids, both)
            following = both[n]
            self._root = choices[n : n + 1]
        last: Origin = plain if m == 0 else "bonus" if n == m else "recovered"
        return Outcome(
            path=tuple(range(n)),
            committed=(*ids[:n], following),
            origin=(*("accepted",) * n, last),
            tested=min(n + 1, m),
        )

    def _append(self, outcome: Outcome) -> Outcome:
        kept, self.finish = self.requests[0].stop.cut(self.output(), outcome.committed)
        self._tokens.extend(outcome.committed[:kept])
        self._origin.extend(outcome.origin[:kept])
        self.last_ns = time.perf_counter_ns()
        if self._position() == kept:  # these are the first tokens
            self.first_ns = self.last_ns
        if kept == len(outcome.committed):
            return outcome
        return Outcome(
            path=outcome.path[:kept],
            committed=outcome.committed[:kept],
            origin=outcome.origin[:kept],
            tested=min(outcome.tested, kept),
        )

"""A text that a draft and a target write together, span by span."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.session import Session
from specbench_cli.engine.spans.token_accounting import Author, TokenAccounting
from specbench_cli.engine.types import Draft, Step, Tokens
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.choosing import Pick


class Delimiter:
    r"""The end of a span, looked for in its text and not in its ids.

    A delimiter comes as one token, as several, or inside one that says more: "\n\n" is one token to
    some tokenizers, two to others, and a part of ".\n\n" to most. The span ends with the token that
    completes it, whatever else that says.

    Args:
        text: what ends a span; empty: nothing does.
        words: what ids stand for.
    """

    def __init__(self, text: str, words: Vocabulary) -> None:
        self._data, self._pieces = text.encode(), words.pieces

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the last token of a span completes a delimiter that lies in the span."""
        if not self._data or not ids:
            return False
        last = self._piece(ids[-1])
        tail = last
        for token in reversed(ids[:-1]):
            if len(tail) - len(last) >= len(self._data) - 1:
                break
            tail = self._piece(token) + tail
        return self._data in tail[max(0, len(tail) - len(last) - len(self._data) + 1) :]

    def split(self, ids: Sequence[int]) -> list[list[int]]:
        """The spans of a whole text; the last one may lack its delimiter."""
        spans: list[list[int]] = [[]]
        for token in ids:
            if self.ends(spans[-1]):
                spans.append([])
            spans[-1].append(token)
        return [span for span in spans if span]

    def _piece(self, token: int) -> bytes:
        """Bytes of a token; none of one that pads the vocabulary."""
        return self._pieces[token] if token < len(self._pieces) else b""


class Segments:
    """The open span of a session's text, and the two models that may go on with it.

    Made before the session's prefill; the draft then reads the prompt. No token of the target's
    follows a draft that stands as a whole: the next one is whoever's turn it is.

    Args:
        delimiter: text that ends a span, see `Delimiter`.
        cap: tokens of a span at most.

    Attributes:
        words: what the target's ids stand for, as bytes, and how a text is cut into them.
        ledger: what each model wrote, and what became of it.
        begun: spans so far, the open one included.
        graded: drafts that were judged by a rule so far.
    """

    def __init__(self, session: Session, delimiter: str, cap: int) -> None:
        self._session, self._cap = session, cap
        self.words = session.vocabulary
        self._delimiter = Delimiter(delimiter, self.words)
        self._eos = session.requests[0].stop.eos
        self._model = session.draft()
        self._state = session.new_state(self._model)
        self._model.forward(session.pending_tokens(0), self._state, logits_at=None)
        self.token_accounting, self.num_segments, self.num_judged = TokenAccounting(), 0, 0
        self._unreported = Counter[str]()
        self.token_accounting.record_generated(
            "target", 1
        )  # prefill's token, with which the first span begins
        self.token_accounting.record_settled("target", 1, 0)
        self.begin()

    # ---- the open span --------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a span behind the text."""
        self._first, self._judged = len(self._session.tokens()), False
        self.num_segments += 1

    @property
    def open_ids(self) -> Sequence[int]:
        """Ids of the open span so far."""
        return self._session.tokens()[self._first :]

    @property
    def segment_ended(self) -> bool:
        """Whether the open span has come to its end, or the text has."""
        return (
            self._session.finish is not None
            or len(self.open_ids) >= self._cap
            or self.ends_with_delimiter
        )

    @property
    def ends_with_delimiter(self) -> bool:
        """Whether the open span ends with its delimiter, and the text goes on behind it."""
        return self._session.finish is None and self._delimiter.ends(self.open_ids)

    @property
    def is_replacing(self) -> bool:
        """Whether the open span was judged, and the target writes what is left of it."""
        return self._judged and not self.segment_ended

    # ---- who writes -----------------------------------------------------------------------------

    def draft(self, most: int | None = None) -> Draft:
        """Have the draft go on with the open span, or begin the next one where that is over: to its
        end, or for so many tokens at most."""
        if self.segment_ended:
            self.begin()
        session, picks, ids = self._session, list[Pick](), list(self.open_ids)
        room = min(session.max_draft_length(), self._cap - len(ids))
        room = room if most is None else min(room, most)
        x = session.pending_tokens(self._state.length())
        while len(picks) < room:
            picks.append(session.pick(self._model.forward(x, self._state), len(picks)))
            x = Tokens(picks[-1][0][None])
            ids.append(host.number(x.ids))
            if ids[-1] in self._eos or self._delimiter.ends(ids):
                break
        self.token_accounting.record_generated("draft", len(picks))
        return session.chain_of_picks(picks)

    def score_question(self, question: Sequence[int]) -> Tensor:
        """Logits [V] of the target behind a question that it reads behind what it scored last; its
        rows are forgotten at once. `session.reserve` has room for them."""
        session, state = self._session, self._session.state
        length = state.position()
        x = Tokens(host.ids([question], session.device))
        row = session.target.forward(x, state).rows[-1]
        state.rollback(0, length)
        self.token_accounting.record_scored(len(question))
        return row

    def write_with_target(self, length: int, most: int | None = None) -> Iterator[Step]:
        """Have the target write the rest of the open span, or at most so many tokens of it:
        losslessly, with drafts of `length` tokens, or none."""
        end = len(self.open_ids) + (self._cap if most is None else most)
        while not self.segment_ended and len(self.open_ids) < end:
            draft = self.draft(min(length, end - len(self.open_ids)))
            yield self.verify_and_commit(draft, self._session.score(draft))

    def insert_tokens(self, ids: Sequence[int], accept: AcceptRule, **counts: float) -> Step:
        """Write words of the method's own, as far as there is room, where `accept` lets them."""
        draft = self._session.chain(ids[: self._session.max_draft_length()])
        self.token_accounting.record_generated("method", draft.nodes)
        return self.verify_and_commit(
            draft, self._session.score(draft), accept, author="method", **counts
        )

    # ---- what becomes of it ---------------------------------------------------------------------

    def discard(self, draft: Draft, **counts: int) -> None:
        """Throw a draft away that nobody has read; `counts` are told with the next step."""
        self._unreported.update(counts)
        self._state.rollback(0, min(self._state.length(), len(self._session.tokens()) - 1))
        self.token_accounting.record_settled("draft", 0, draft.nodes)

    def verify_and_commit(
        self,
        draft: Draft,
        rows: Tensor,
        accept: AcceptRule | None = None,
        author: Author = "draft",
        **counts: float,
    ) -> Step:
        """Verify a draft, commit what stands, roll both states back, and write it down.

        Args:
            rows: the target's logits [m + 1, V] at the root and the draft's tokens.
            accept: what lets it stand as a whole though the lossless rule does not.
            author: who wrote it.
            counts: of the method's own, for the step.
        """
        session = self._session
        outcome = session.verify(draft, rows[: max(1, draft.nodes)], accept)
        committed = session.commit(outcome)
        self._state.rollback(0, min(self._state.length(), len(session.tokens()) - 1))
        kept, own = len(committed.path), len(outcome.committed) - len(outcome.path)
        stand = len(committed.committed) - kept
        self.token_accounting.record_generated("target", own)
        self.token_accounting.record_settled(author, kept, draft.nodes - kept)
        self.token_accounting.record_settled("target", stand, own - stand)
        if accept is not None:
            self.token_accounting.record_scored(draft.nodes)
            self.num_judged, self._judged = self.num_judged + 1, True
        for name, n in self._unreported.items():
            counts[name] = counts.get(name, 0) + n
        self._unreported.clear()
        return session.step(draft, committed, **self.token_accounting.take_new_counts(), **counts)


def mean_log_prob(rows: Tensor, draft: Draft) -> float:
    """Mean logarithm of the probability that the target gives a span's tokens, at temperature 1
    whatever it decodes at; minus infinity where it cannot say one of them.

    Args:
        rows: [m, V] or more, the target's logits in each token's place.
    """
    said = rows[: draft.nodes].double().log_softmax(-1).gather(1, draft.tokens[:, None])
    mean = float(host.number(said.mean()))
    return -math.inf if math.isnan(mean) else mean

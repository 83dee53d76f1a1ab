"""Text that a draft model and the target write segment by segment.

A segment is a chunk of text, such as a reasoning step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.segments.token_accounting import Author, TokenAccounting
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Step, Tokens
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.choosing import Pick
from specbench_cli.former_names import renamed_members


class Delimiter:
    r"""Text that ends a segment. It is searched in the bytes of the tokens, not in the token ids.

    A delimiter may be one token, several tokens, or part of a token. For example, "\n\n" is one
    token in some tokenizers, two tokens in others, and part of ".\n\n" in most. The segment ends
    with the token that completes the delimiter, even if that token contains more text.

    Args:
        text: The delimiter. If it is empty, no text ends a segment.
        words: Vocabulary, which maps token ids to bytes.
    """

    def __init__(self, text: str, words: Vocabulary) -> None:
        self._data, self._pieces = text.encode(), words.pieces

    def ends(self, ids: Sequence[int]) -> bool:
        """Return True if the last token of a segment completes the delimiter."""
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
        """Split a text into segments. The last segment may lack a delimiter."""
        segments: list[list[int]] = [[]]
        for token in ids:
            if self.ends(segments[-1]):
                segments.append([])
            segments[-1].append(token)
        return [segment for segment in segments if segment]

    def _piece(self, token: int) -> bytes:
        """Return the bytes of a token. Padding tokens of the vocabulary have no bytes."""
        return self._pieces[token] if token < len(self._pieces) else b""


@renamed_members(
    ledger="token_accounting",
    words="vocabulary",
    begun="num_segments",
    graded="num_judged",
    written="open_ids",
    over="segment_ended",
    delimited="ends_with_delimiter",
    replacing="is_replacing",
    ask="score_question",
    target="write_with_target",
    say="insert_tokens",
    settle="verify_and_commit",
)
class Segments:
    """The segments of a session's text. The draft model or the target writes each segment.

    The last segment is open, which means that it can be continued. Create the object before the
    session's prefill, because creation prefills the draft model. No bonus token follows a draft
    that is accepted completely.

    Args:
        delimiter: Text that ends a segment.
        cap: Maximum number of tokens of a segment.

    Attributes:
        vocabulary: The bytes of each target token id, and a function that tokenizes text.
        token_accounting: Numbers of tokens that each model wrote, and how many of them were kept.
        num_segments: Number of segments so far, including the open segment.
        num_judged: Number of drafts that an accept rule has judged.
    """

    def __init__(self, session: Session, delimiter: str, cap: int) -> None:
        self._session, self._cap = session, cap
        self.vocabulary = session.vocabulary
        self._delimiter = Delimiter(delimiter, self.vocabulary)
        self._eos = session.requests[0].stop.eos
        self._model = session.draft()
        self._state = session.new_state(self._model)
        self._model.forward(session.pending_tokens(0), self._state, logits_at=None)
        self.token_accounting, self.num_segments, self.num_judged = TokenAccounting(), 0, 0
        self._unreported = Counter[str]()
        self.token_accounting.record_generated(
            "target", 1
        )  # the token of the prefill is the first of the first segment
        self.token_accounting.record_settled("target", 1, 0)
        self.begin()

    # ---- the open segment -----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a new segment at the end of the text."""
        self._first, self._judged = len(self._session.tokens()), False
        self.num_segments += 1

    @property
    def open_ids(self) -> Sequence[int]:
        """Token ids of the open segment so far. The open segment is the last one."""
        return self._session.tokens()[self._first :]

    @property
    def segment_ended(self) -> bool:
        """True if the last segment has ended, or the whole text has ended."""
        return (
            self._session.finish is not None
            or len(self.open_ids) >= self._cap
            or self.ends_with_delimiter
        )

    @property
    def ends_with_delimiter(self) -> bool:
        """True if the last segment ends with its delimiter and the text has not ended."""
        return self._session.finish is None and self._delimiter.ends(self.open_ids)

    @property
    def is_replacing(self) -> bool:
        """True if a draft for the last segment was judged and the target now writes
        the rest of it."""
        return self._judged and not self.segment_ended

    # ---- writing --------------------------------------------------------------------------------

    def draft(self, most: int | None = None) -> Draft:
        """Draft the rest of the last segment with the draft model. If it has ended, draft the next
        segment.

        Args:
            most: Maximum number of tokens. None means up to the end of the segment.
        """
        if self.segment_ended:
            self.begin()
        session, picks, ids = self._session, list[Pick](), list(self.open_ids)
        max_tokens = min(session.max_draft_length(), self._cap - len(ids))
        max_tokens = max_tokens if most is None else min(max_tokens, most)
        x = session.pending_tokens(self._state.length())
        while len(picks) < max_tokens:
            picks.append(session.pick(self._model.forward(x, self._state), len(picks)))
            x = Tokens(picks[-1][0][None])
            ids.append(host.number(x.ids))
            if ids[-1] in self._eos or self._delimiter.ends(ids):
                break
        self.token_accounting.record_generated("draft", len(picks))
        return session.chain_of_picks(picks)

    def score_question(self, question: Sequence[int]) -> Tensor:
        """Let the target read a question after the last scored tokens.

        The target's state forgets the question immediately. Reserve rows for the question with
        `session.reserve`.

        Returns:
            Logits [V] after the question.
        """
        session, state = self._session, self._session.state
        length = state.position()
        x = Tokens(host.ids([question], session.device))
        row = session.target.forward(x, state).rows[-1]
        state.rollback(0, length)
        self.token_accounting.record_scored(len(question))
        return row

    def write_with_target(self, length: int, most: int | None = None) -> Iterator[Step]:
        """Let the target write the rest of the last segment, losslessly.

        Args:
            length: Number of draft tokens per step. 0 means plain decoding.
            most: Maximum number of tokens. None means up to the end of the segment.
        """
        end = len(self.open_ids) + (self._cap if most is None else most)
        while not self.segment_ended and len(self.open_ids) < end:
            draft = self.draft(min(length, end - len(self.open_ids)))
            yield self.verify_and_commit(draft, self._session.score(draft))

    def insert_tokens(self, ids: Sequence[int], accept: AcceptRule, **counts: float) -> Step:
        """Append tokens that the method chose itself, such as a fixed phrase.

        The target scores these tokens like a draft. Only tokens that `accept` keeps are committed.
        The remaining token budget limits their number.
        """
        draft = self._session.chain(ids[: self._session.max_draft_length()])
        self.token_accounting.record_generated("method", draft.nodes)
        return self.verify_and_commit(
            draft, self._session.score(draft), accept, author="method", **counts
        )

    # ---- decisions ------------------------------------------------------------------------------

    def discard(self, draft: Draft, **counts: int) -> None:
        """Discard a draft without scoring it.

        Args:
            counts: The method's own counts. They are added to the counts of the next step.
        """
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
        """Verify a draft and commit the accepted tokens. Update the model states and the token
        counts.

        Args:
            rows: The target's logits [m + 1, V] at the root and at the m draft tokens.
            accept: Rule that may accept the draft as a whole.
            author: Model that wrote the draft.
            counts: The method's own counts for this step.
        """
        session = self._session
        outcome = session.verify(draft, rows[: max(1, draft.nodes)], accept)
        committed = session.commit(outcome)
        self._state.rollback(0, min(self._state.length(), len(session.tokens()) - 1))
        kept, own = len(committed.path), len(outcome.committed) - len(outcome.path)
        kept_own = len(committed.committed) - kept
        self.token_accounting.record_generated("target", own)
        self.token_accounting.record_settled(author, kept, draft.nodes - kept)
        self.token_accounting.record_settled("target", kept_own, own - kept_own)
        if accept is not None:
            self.token_accounting.record_scored(draft.nodes)
            self.num_judged, self._judged = self.num_judged + 1, True
        for name, n in self._unreported.items():
            counts[name] = counts.get(name, 0) + n
        self._unreported.clear()
        return session.step(draft, committed, **self.token_accounting.take_new_counts(), **counts)


def mean_log_prob(rows: Tensor, draft: Draft) -> float:
    """Return the mean log-probability of a segment's tokens under the target, at temperature 1.

    The result is -inf if a token has probability 0.

    Args:
        rows: Target logits, [m, V] or more rows. Row i predicts token i of the segment.
    """
    log_probs = rows[: draft.nodes].double().log_softmax(-1).gather(1, draft.tokens[:, None])
    mean = float(host.number(log_probs.mean()))
    return -math.inf if math.isnan(mean) else mean

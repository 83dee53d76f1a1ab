"""Lookahead decoding: drafts n-grams that the target generated in earlier steps.

Yichao Fu, Peter Bailis, Ion Stoica, Hao Zhang: Break the Sequential Dependency of LLM Inference
Using Lookahead Decoding, ICML 2024, arXiv:2402.02057.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from specbench_cli.api import (
    ROOT,
    Draft,
    Field,
    Method,
    MethodParams,
    Session,
    Step,
    host,
    merge_trees,
    ranking,
)


class LookaheadParams(MethodParams):
    """Parameters of `Lookahead`."""

    ngram: int = Field(
        5,
        ge=2,
        description="number of tokens of an n-gram, including the token it is stored for (N in"
        " the paper)",
    )
    window: int = Field(7, ge=1, description="number of columns of the window (W in the paper)")
    guesses: int = Field(
        7,
        ge=1,
        description="maximum number of n-grams that are stored per token and verified per step"
        " (G in the paper)",
    )


class Lookahead(Method):
    """Lookahead decoding: Jacobi iterations on a window of guesses yield n-grams to verify.

    Lossless because only n-grams from earlier steps are verified, and these n-grams depend only on
    earlier tokens. The same forward also computes the window, whose tokens are never committed.
    Differs from the authors' code: the window starts with the end of the prompt, not with random
    prompt tokens. N-grams with a common beginning share nodes. A fully accepted n-gram is followed
    by the target's own token. Near the end of the token budget the window has fewer columns.

    Row l of the window contains the guesses of iteration l. Column i is at position l + i after the
    root, the last committed token. A guess attends to the text, to the first row up to its column,
    and to its own column above it. The window (lookahead branch) and the n-grams (verification
    branch) form one tree, in which each n-gram is a further branch of the root.

    One step:
    1. Run one target forward over the window, and over the stored n-grams for the root.
    2. Verify the n-grams; commit.
    3. The target's most likely tokens after the newest row form a new row. Each column together
       with its new token is an n-gram. It is stored for the token to the left of the column. If a
       token has more than `guesses` n-grams, drop the oldest.
    4. Drop the first row, and the first guess of the next row, because the root has moved. Until
       there are `ngram` - 1 rows, keep all rows, drop each row's first guess, and store no n-gram.
    """

    name: ClassVar[str] = "lookahead"
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("fu2024lookahead",)
    Params: ClassVar[type[MethodParams]] = LookaheadParams
    params: LookaheadParams

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request, and yield each decoding step."""
        n, w, g = self.params.ngram - 1, self.params.window, self.params.guesses
        session.reserve(g * n + max((row + 1) * (w + n - 2 - row) for row in range(n)))
        prompt = session.tokens()
        first = [prompt[at % len(prompt)] for at in range(2 - w - n, 0)]
        rows, pool = [first], dict[int, list[tuple[int, ...]]]()
        session.prefill()
        while session.finish is None:
            # Step 1: Drop columns of the window that lie beyond the token budget.
            root, width = session.tokens()[-1], max(0, session.max_draft_length() - len(rows) + 2)
            rows = [rows[0][: max(0, width - 1)], *(row[:width] for row in rows[1:])]
            known = [gram[: session.max_draft_length()] for gram in pool.get(root, ())]
            draft, newest = self._tree(session, known, rows if width else [])
            logits = session.score(self.scored, proposed=draft.nodes)
            # Step 2: verify the n-grams, and commit.
            committed = session.commit(session.verify(draft, logits[: draft.nodes + 1]))
            if newest and session.finish is None:
                # Step 3: Add a row to the window, and store new n-grams.
                rows_after = host.ids([node + 1 for node in newest], session.device)
                new = host.numbers(ranking.argmax(logits.index_select(0, rows_after)))
                full = len(rows) == n
                for at, gram in enumerate(zip(*rows[1:], new, strict=True) if full else ()):
                    kept = pool.setdefault(rows[0][at - 1] if at else root, [])
                    if gram in kept:
                        kept.remove(gram)
                    kept.append(gram)
                    del kept[:-g]
                # Step 4: Drop the guesses that lie before the new root.
                rows = [*rows[1:], new] if full else [*rows, new]
                rows = [row[1:] if not (full and at) else row for at, row in enumerate(rows)]
            yield session.step(draft, committed)

    def _tree(
        self, session: Session, known: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
    ) -> tuple[Draft, list[int]]:
        """Return the draft, and the nodes of the newest window row.

        The target's most likely tokens after these nodes form the next row (step 3 of the class
        docstring). Set `scored` to the tree that the target processes: the draft and the window.
        """
        both = merge_trees((gram, None) for gram in known)
        ids, parents = list(both.ids), list(both.parents)
        above = [ROOT]
        for token in rows[0] if rows else ():  # the first row is a chain ...
            ids.append(token)
            parents.append(above[-1])
            above.append(len(ids) - 1)
        for row in rows[1:]:  # ... to which the columns are attached
            parents += above
            above = [len(ids) + column for column in range(len(row))]
            ids += row
        draft = session.tree(both.ids, both.parents)
        self.scored = session.tree(ids, tuple(parents))
        return draft, above if rows else []

"""The data of the token viewer: some prompts, every row's output on them, token by token.

A sample: what does not fit into the page is left out. Prompts with outputs that differ come first,
then those whose drafts were kept, then the others, spread over the families.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest
from typing import Any

from specbench_cli.predict.lanes import make_lanes
from specbench_cli.report.reading import Reading
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import BASELINE, DraftedTokens, Record
from specbench_cli.summary.comparison import Decode, first_difference

BUDGET = 2_500_000
"""Bytes of the viewer's data."""
_MOST = 60
"""Prompts of which records are looked at."""
_LONGEST = 20_000
"""Characters of a prompt's text."""
_WORST_FIRST = ("mismatch", "near-tie")
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders put in place of bytes that are no character yet."""
_SPREAD = 8
"""Tokens that one character may be spread over; bytes not completed by then are broken."""
_BEFORE = 4
"""Tokens of context that a token is decoded with."""

Cells = dict[tuple[str, int], dict[str, Record]]
"""(prompt_id, turn) -> label -> the worst pass."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """What the viewer shows. prompts: how many of `of` questions are in it."""

    data: dict[str, Any]
    prompts: int
    of: int


def viewer(reading: Reading, decode: Decode | None, budget: int = BUDGET) -> Viewer:
    """The sample of a run's outputs that the page shows token by token.

    Args:
        decode: from ids to text; None: ids are shown.
        budget: bytes; at least one prompt is shown.
    """
    by_id: dict[str, list[Prompt]] = {}
    for prompt in reading.run.prompts():
        by_id.setdefault(prompt.prompt_id, []).append(prompt)
    differing = {cell[1] for cell in chain(reading.incidents.differing, reading.incidents.failed)}
    order = _spread(by_id, lambda each: each not in differing)
    # Drafts are kept on the first prompt of each family.
    first = {turns[0].family: each for each, turns in reversed(by_id.items())}
    cells = _cells(reading.run.records({*order[:_MOST], *first.values()}))
    drafted = {each for (each, _), rows in cells.items() if any(r.drafts for r in rows.values())}
    order = [each for each in order if any((each, turn.turn) in cells for turn in by_id[each])]
    order.sort(key=lambda each: (each not in differing, each not in drafted))
    labels = [row.label for row in reading.summary.rows]
    words = _Words(decode)
    shown: list[dict[str, Any]] = []
    chosen = 0
    for each in order:
        before = len(words.texts)
        turns = [_turn(prompt, cells, labels, words) for prompt in by_id[each]]
        cost = _bytes(turns) + _bytes(words.texts[before:])
        if chosen and cost > budget:
            words.forget(before)
            continue
        budget -= cost
        chosen += 1
        shown += turns
    peers = [row.label for row in reading.summary.rows if row.peer]
    data = {"labels": labels, "peers": peers, "words": words.texts, "turns": shown}
    return Viewer(data, chosen, len(by_id))


def _bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def _spread(by_id: Mapping[str, Sequence[Prompt]], rank: Callable[[str], bool]) -> list[str]:
    """Prompt ids by rank; those of equal rank taken in turn from every family."""
    families: dict[str, list[str]] = {}
    for each, turns in by_id.items():
        families.setdefault(turns[0].family, []).append(each)
    rounds = zip_longest(*(families[family] for family in sorted(families)))
    return sorted((each for together in rounds for each in together if each is not None), key=rank)


class _Words:
    """Texts of drafted tokens, each kept once."""

    def __init__(self, decode: Decode | None) -> None:
        self.decode = decode
        self.texts: list[str] = []
        self._places: dict[int, int] = {}

    def place(self, token: int) -> int:
        """Where a token's text is."""
        if token not in self._places:
            self._places[token] = len(self.texts)
            self.texts.append(piece(token, self.decode))
        return self._places[token]

    def forget(self, length: int) -> None:
        """Leave out all but the first `length` texts."""
        del self.texts[length:]
        self._places = {token: at for token, at in self._places.items() if at < length}


def _cells(records: Iterable[Record]) -> Cells:
    """Of every row of every turn its worst pass."""
    found: Cells = {}
    for record in records:
        rows = found.setdefault((record.prompt_id, record.turn), {})
        held = rows.get(record.label)
        if held is None or _badness(record) < _badness(held):
            rows[record.label] = record
    return found


def _badness(record: Record) -> tuple[int, int]:
    kind = "" if record.verdict is None else record.verdict.kind
    worst = _WORST_FIRST.index(kind) if kind in _WORST_FIRST else len(_WORST_FIRST)
    return worst, record.pass_


def _turn(prompt: Prompt, cells: Cells, labels: Sequence[str], words: _Words) -> dict[str, Any]:
    """One prompt's turn: its text, the texts of its outputs, and what is known of each row's."""
    rows = cells.get((prompt.prompt_id, prompt.turn), {})
    texts: list[dict[str, Any]] = []
    places: dict[tuple[int, ...], int] = {}
    shown = []
    reference = rows[BASELINE].output_ids if BASELINE in rows else None
    for label in labels:
        record = rows.get(label)
        if record is None or record.output_ids is None:
            continue
        ids = tuple(record.output_ids)
        if ids not in places:
            places[ids] = len(texts)
            texts.append({"ids": list(ids), "pieces": pieces(ids, words.decode)})
        differs = None if reference is None else first_difference(ids, reference)
        shown.append(
            {
                "label": label,
                "text": places[ids],
                "finish": record.finish,
                "pass": record.pass_,
                "verdict": None if record.verdict is None else record.verdict.kind,
                "differs": differs,
                "origin": record.origin and _runs(record.origin),
                "logp": record.log_probs and [round(value, 3) for value in record.log_probs],
                **_steps(record, words),
            }
        )
    return {
        "id": prompt.prompt_id,
        "turn": prompt.turn,
        "family": prompt.family,
        "text": prompt.text[:_LONGEST],
        "texts": texts,
        "rows": shown,
    }


def _runs(words: Sequence[str]) -> list[list[Any]]:
    """Equal neighbours as [word, how many]."""
    found: list[list[Any]] = []
    for word in words:
        if found and found[-1][0] == word:
            found[-1][1] += 1
        else:
            found.append([word, 1])
    return found


def _steps(record: Record, words: _Words) -> dict[str, Any]:
    """A row's steps: counters, drafts and ends (microseconds since the timer's start); nulls where
    they are not known."""
    steps = record.steps
    if steps is None:
        return {"steps": None, "drafts": None, "ends": None, "total": _total(record)}
    relaxed = steps.relaxed or [0] * len(steps.levels)
    counters = zip(
        *(steps.levels, steps.nodes, steps.tested, steps.accepted, steps.committed, relaxed),
        strict=True,
    )
    return {
        "steps": [list(each) for each in counters],
        "drafts": record.drafts and [_draft(drafted, words) for drafted in record.drafts],
        "ends": _ends(record),
        "total": _total(record),
    }


def _total(record: Record) -> int | None:
    """Microseconds since the timer's start, which is behind what was learnt."""
    ns = record.ns
    return None if record.void or ns.total is None else round((ns.total - (ns.learn or 0)) / 1e3)


def _draft(drafted: DraftedTokens, words: _Words) -> list[Any]:
    """[words, parents or null for a chain, path]."""
    return [[words.place(token) for token in drafted.tokens], drafted.parents, drafted.path]


def _ends(record: Record) -> list[int] | None:
    """When prefill ended, then each step; the last one with the output. Null where the trace does
    not say."""
    total, prefill = record.ns.total, record.ns.prefill
    if record.void or total is None or prefill is None or record.steps is None:
        return None
    total -= record.ns.learn or 0
    verified = [step.end for step in make_lanes(record).steps]
    if len(verified) != len(record.steps.levels):
        return None
    # Where workers overlap, a step may be known before an earlier one's forward has ended.
    ends = accumulate([prefill, *verified[:-1], total] if verified else [total], max)
    return [round(end / 1e3) for end in ends]


# ---- the text of each token ----------------------------------------------------------------------
#
# Token ids cannot be decoded one by one: a blank may depend on the token before, and with
# byte-level vocabularies a character may be spread over several tokens. The piece of a token is
# therefore what it adds to the text before it. The token that completes a character has all of it,
# and the tokens before have none.


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text of every token; together they are the text of all, as far as it is UTF-8.

    Args:
        ids: [n] tokens of one text.
        decode: from ids to text; None: the pieces are the ids in words, with a blank between.
    Returns:
        [n] pieces, some of them empty.
    """
    if decode is None:
        return [f"{' ' if place else ''}{token}" for place, token in enumerate(ids)]
    found: list[str] = []
    settled = 0  # tokens whose text is complete
    start, before = 0, ""  # the context and its text
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        waits = text.endswith(INCOMPLETE) and end < len(ids) and end - settled < _SPREAD
        added = "" if waits else text[_shared(before, text) :]
        if not waits:
            settled = end
            start = max(0, end - _BEFORE)
            before = decode(ids[start:end])
        found.append(added)
    return found


def _shared(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


def piece(token: int, decode: Decode | None) -> str:
    """A token's text where nothing is known of its neighbours; its id where it has none alone."""
    text = "" if decode is None else decode([token])
    return text if text and INCOMPLETE not in text else f"#{token}"

"""Data of the HTML page's token viewer: prompts with every method's output, token by token.

The page has a size limit, so it shows a sample of the prompts. Prompts whose outputs differ come
first, then prompts whose draft tokens are stored, then others from all task families.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest
from typing import Any

from specbench_cli.predict.lanes import make_lanes
from specbench_cli.report.report_data import ReportData
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import BASELINE, DraftedTokens, Record
from specbench_cli.summary.comparison import Decode, first_difference

BUDGET = 2_500_000
"""Maximum size of the viewer's data, in bytes."""
_MAX_PROMPTS = 60
"""Maximum number of prompts whose records are read."""
_MAX_PROMPT_CHARS = 20_000
"""Maximum length of a prompt's text, in characters."""
_WORST_FIRST = ("mismatch", "near-tie")
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character that a tokenizer returns for bytes of an incomplete character."""
_MAX_TOKENS_PER_CHARACTER = 8
"""Maximum number of tokens of one character. After these, its bytes are taken as invalid."""
_CONTEXT_TOKENS = 4
"""Number of previous tokens that are decoded together with a token, as its context."""

RecordsByTurn = dict[tuple[str, int], dict[str, Record]]
"""(prompt_id, turn) -> label -> the record with the worst verdict of all repeats."""


@dataclass(frozen=True, slots=True)
class ViewerData:
    """Data of the token viewer.

    Attributes:
        prompts: Number of questions in the sample.
        content: JSON data that the script of the page reads.
        total_prompts: Number of questions in the run.
    """

    content: dict[str, Any]
    prompts: int
    total_prompts: int


def make_viewer_data(data: ReportData, decode: Decode | None, budget: int = BUDGET) -> ViewerData:
    """Return the sample of outputs that the page shows token by token.

    Args:
        decode: Converts ids to text. None shows the ids.
        budget: Maximum size in bytes. At least one prompt is shown.
    """
    by_id: dict[str, list[Prompt]] = {}
    for prompt in data.run.prompts():
        by_id.setdefault(prompt.prompt_id, []).append(prompt)
    differing = {cell[1] for cell in chain(data.incidents.differing, data.incidents.failed)}
    order = _alternate_families(by_id, lambda each: each not in differing)
    # Records have draft tokens only for the first prompt of each family.
    first = {turns[0].family: each for each, turns in reversed(by_id.items())}
    records = _worst_records(data.run.records({*order[:_MAX_PROMPTS], *first.values()}))
    drafted = {each for (each, _), rows in records.items() if any(r.drafts for r in rows.values())}
    order = [each for each in order if any((each, turn.turn) in records for turn in by_id[each])]
    order.sort(key=lambda each: (each not in differing, each not in drafted))
    labels = [row.label for row in data.summary.rows]
    token_texts = _TokenTexts(decode)
    turns_shown: list[dict[str, Any]] = []
    chosen = 0
    for each in order:
        before = len(token_texts.texts)
        turns = [_describe_turn(prompt, records, labels, token_texts) for prompt in by_id[each]]
        cost = _bytes(turns) + _bytes(token_texts.texts[before:])
        if chosen and cost > budget:
            token_texts.forget(before)
            continue
        budget -= cost
        chosen += 1
        turns_shown += turns
    peers = [row.label for row in data.summary.rows if row.peer]
    content = {"labels": labels, "peers": peers, "words": token_texts.texts, "turns": turns_shown}
    return ViewerData(content, chosen, len(by_id))


def _bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def _alternate_families(
    by_id: Mapping[str, Sequence[Prompt]], rank: Callable[[str], bool]
) -> list[str]:
    """Return the prompt ids sorted by rank. Ids of equal rank alternate between task families."""
    families: dict[str, list[str]] = {}
    for each, turns in by_id.items():
        families.setdefault(turns[0].family, []).append(each)
    rounds = zip_longest(*(families[family] for family in sorted(families)))
    return sorted((each for ids in rounds for each in ids if each is not None), key=rank)


class _TokenTexts:
    """List of the texts of draft tokens. Each token has one index in the list."""

    def __init__(self, decode: Decode | None) -> None:
        self.decode = decode
        self.texts: list[str] = []
        self._indices: dict[int, int] = {}

    def index(self, token: int) -> int:
        """Return the index of a token's text."""
        if token not in self._indices:
            self._indices[token] = len(self.texts)
            self.texts.append(token_text(token, self.decode))
        return self._indices[token]

    def forget(self, length: int) -> None:
        """Drop all but the first `length` texts."""
        del self.texts[length:]
        self._indices = {token: at for token, at in self._indices.items() if at < length}


def _worst_records(records: Iterable[Record]) -> RecordsByTurn:
    """Return the record with the worst verdict of each method and turn, over all repeats."""
    found: RecordsByTurn = {}
    for record in records:
        rows = found.setdefault((record.prompt_id, record.turn), {})
        known = rows.get(record.label)
        if known is None or _severity(record) < _severity(known):
            rows[record.label] = record
    return found


def _severity(record: Record) -> tuple[int, int]:
    kind = "" if record.verdict is None else record.verdict.kind
    worst = _WORST_FIRST.index(kind) if kind in _WORST_FIRST else len(_WORST_FIRST)
    return worst, record.pass_


def _describe_turn(
    prompt: Prompt, records: RecordsByTurn, labels: Sequence[str], token_texts: _TokenTexts
) -> dict[str, Any]:
    """Return the JSON data of one turn: its text, the distinct outputs, and data per method."""
    rows = records.get((prompt.prompt_id, prompt.turn), {})
    texts: list[dict[str, Any]] = []
    indices: dict[tuple[int, ...], int] = {}
    rows_shown = []
    reference = rows[BASELINE].output_ids if BASELINE in rows else None
    for label in labels:
        record = rows.get(label)
        if record is None or record.output_ids is None:
            continue
        ids = tuple(record.output_ids)
        if ids not in indices:
            indices[ids] = len(texts)
            texts.append({"ids": list(ids), "pieces": split_text(ids, token_texts.decode)})
        differs = None if reference is None else first_difference(ids, reference)
        rows_shown.append(
            {
                "label": label,
                "text": indices[ids],
                "finish": record.finish,
                "pass": record.pass_,
                "verdict": None if record.verdict is None else record.verdict.kind,
                "differs": differs,
                "origin": record.origin and _run_lengths(record.origin),
                "logp": record.log_probs and [round(value, 3) for value in record.log_probs],
                **_describe_steps(record, token_texts),
            }
        )
    return {
        "id": prompt.prompt_id,
        "turn": prompt.turn,
        "family": prompt.family,
        "text": prompt.text[:_MAX_PROMPT_CHARS],
        "texts": texts,
        "rows": rows_shown,
    }


def _run_lengths(words: Sequence[str]) -> list[list[Any]]:
    """Return runs of equal words as [word, length of the run]."""
    found: list[list[Any]] = []
    for word in words:
        if found and found[-1][0] == word:
            found[-1][1] += 1
        else:
            found.append([word, 1])
    return found


def _describe_steps(record: Record, token_texts: _TokenTexts) -> dict[str, Any]:
    """Return the JSON data of a record's steps: counters, drafts, and end times in µs.

    Unknown values are None.
    """
    steps = record.steps
    if steps is None:
        return {"steps": None, "drafts": None, "ends": None, "total": _total_us(record)}
    relaxed = steps.relaxed or [0] * len(steps.levels)
    counters = zip(
        *(steps.levels, steps.nodes, steps.tested, steps.accepted, steps.committed, relaxed),
        strict=True,
    )
    return {
        "steps": [list(each) for each in counters],
        "drafts": record.drafts and [_draft(drafted, token_texts) for drafted in record.drafts],
        "ends": _step_ends_us(record),
        "total": _total_us(record),
    }


def _total_us(record: Record) -> int | None:
    """Return the wall time in µs, without the time for learning. None if it is noisy."""
    ns = record.ns
    return None if record.void or ns.total is None else round((ns.total - (ns.learn or 0)) / 1e3)


def _draft(drafted: DraftedTokens, token_texts: _TokenTexts) -> list[Any]:
    """Return the JSON data of a draft: [indices of the token texts, parents, accepted path].

    The parents are None if the draft is a chain.
    """
    return [[token_texts.index(token) for token in drafted.tokens], drafted.parents, drafted.path]


def _step_ends_us(record: Record) -> list[int] | None:
    """Return the end of prefill and of each step, in µs. The last step ends with the output.

    None if the trace does not contain the times.
    """
    total, prefill = record.ns.total, record.ns.prefill
    if record.void or total is None or prefill is None or record.steps is None:
        return None
    total -= record.ns.learn or 0
    verified = [step.end for step in make_lanes(record).steps]
    if len(verified) != len(record.steps.levels):
        return None
    # Make end times increase: if workers overlap, a step can end before a forward of an earlier
    # step.
    ends = accumulate([prefill, *verified[:-1], total] if verified else [total], max)
    return [round(end / 1e3) for end in ends]


# ---- the text of each token ----------------------------------------------------------------------
#
# Token ids cannot be decoded one by one. A space may depend on the previous token, and in
# byte-level vocabularies one character may span several tokens. The text of a token is therefore
# what it adds to the text before it. The token that completes a character gets the whole character,
# and the tokens before it get nothing.


def split_text(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """Return the text of each token. Joined, the texts are the decoded output.

    Args:
        ids: [n] tokens of one text.
        decode: Converts ids to text. None returns the ids as text, separated by spaces.

    Returns:
        [n] texts, some of them empty.
    """
    if decode is None:
        return [f"{' ' if index else ''}{token}" for index, token in enumerate(ids)]
    found: list[str] = []
    complete = 0  # tokens whose text is complete
    start, before = 0, ""  # the context and its text
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        incomplete = (
            text.endswith(INCOMPLETE)
            and end < len(ids)
            and end - complete < _MAX_TOKENS_PER_CHARACTER
        )
        added = "" if incomplete else text[_common_prefix(before, text) :]
        if not incomplete:
            complete = end
            start = max(0, end - _CONTEXT_TOKENS)
            before = decode(ids[start:end])
        found.append(added)
    return found


def _common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def token_text(token: int, decode: Decode | None) -> str:
    """Return the text of a single token, or "#id" if it is only a part of a character."""
    text = "" if decode is None else decode([token])
    return text if text and INCOMPLETE not in text else f"#{token}"

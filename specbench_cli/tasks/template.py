"""Messages to token ids and token ids to answers, with whatever tokenizer is handed in.

A tokenizer is anything with `encode` and `decode` as transformers has them; with `chat_template`
and `apply_chat_template` besides, its own template is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.tasks.schema import Message


def conversation(
    turns: Sequence[str], answers: Sequence[str], before: Sequence[Message] = ()
) -> list[Message]:
    """The messages up to the turn that is to be answered: those `before`, then turns 1..n+1 around
    n answers.

    Raises:
        ValueError: no turn is left to answer.
    """
    if len(answers) >= len(turns):
        raise ValueError(f"{len(answers)} answers leave none of {len(turns)} turns to answer")
    messages: list[Message] = [*before]
    for turn, answer in zip(turns, answers, strict=False):
        messages += [("user", turn), ("assistant", answer)]
    return [*messages, ("user", turns[len(answers)])]


def render(tokenizer: Any, messages: Sequence[Message], raw: bool) -> list[int]:
    """Token ids of a prompt.

    With the tokenizer's chat template, up to where the assistant starts to speak. Without one, or
    with `raw`, plain texts joined by blank lines, under the tokenizer's own special tokens.

    A template writes its special tokens itself, so none are added to its text; to plain text they
    are added, but a beginning-of-sequence token never twice.
    """
    if not raw and getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        return list(tokenizer.encode(text, add_special_tokens=False))
    ids = list(tokenizer.encode("\n\n".join(content for _, content in messages)))
    bos = getattr(tokenizer, "bos_token_id", None)
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def written_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """An answer's text without special tokens, but with its blanks: code may begin with some."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def answer_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """An answer's text, special tokens and surrounding blanks removed."""
    return written_text(tokenizer, ids).strip()

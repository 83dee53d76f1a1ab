"""Conversion of messages to token ids, and of token ids to answers.

A tokenizer has `encode` and `decode` as in transformers. If it also has `chat_template` and
`apply_chat_template`, its chat template is used.

Chat templates and tokenizers come with checkpoints, so both are untrusted input. An exception in
them becomes a `PromptError`. The time, memory and output of a chat template are limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.errors import PromptError, is_library_error, reason_of
from specbench_cli.tasks.limits import TimeLimitExceeded, resource_limits
from specbench_cli.tasks.schema import Message

TEMPLATE_S = 5.0
"""Maximum processor time in seconds of a chat template for one prompt."""
TEMPLATE_BYTES = 1 << 30
"""Maximum memory in bytes that a chat template may allocate for one prompt."""
TEMPLATE_CHARACTERS = 1_000_000
"""Maximum number of characters that a chat template may add to the messages of one prompt."""

_RAW = "use --raw, which applies no chat template"


def build_messages(
    turns: Sequence[str], answers: Sequence[str], before: Sequence[Message] = ()
) -> list[Message]:
    """Return all messages up to and including the user's next message.

    These are the messages of `before`, then the turns that are already answered with their answers,
    then the next turn.

    Raises:
        ValueError: all turns are answered.
    """
    if len(answers) >= len(turns):
        raise ValueError(f"{len(answers)} answers leave none of {len(turns)} turns to answer")
    messages: list[Message] = [*before]
    for turn, answer in zip(turns, answers, strict=False):
        messages += [("user", turn), ("assistant", answer)]
    return [*messages, ("user", turns[len(answers)])]


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], raw: bool, label: str = "this model"
) -> list[int]:
    """Return the token ids of a prompt.

    The tokenizer's chat template formats the messages and appends the generation prompt. Without a
    template, or with `raw`, the messages are joined by blank lines. Only in that case the tokenizer
    adds special tokens, because a template contains them already. A beginning-of-sequence token is
    never added twice.

    Args:
        label: name of the model for messages.

    Raises:
        PromptError: the template or the tokenizer fails on the messages, or exceeds its limits.
    """
    if not raw and getattr(tokenizer, "chat_template", None):
        text = apply_template(tokenizer, messages, label)
        return _encode(tokenizer, text, label, add_special_tokens=False)
    ids = _encode(tokenizer, "\n\n".join(content for _, content in messages), label)
    bos = getattr(tokenizer, "bos_token_id", None)
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def apply_template(tokenizer: Any, messages: Sequence[Message], label: str) -> str:
    """Return the text of messages, formatted with the tokenizer's chat template.

    Raises:
        PromptError: the template fails, or exceeds its limits.
    """
    chat = [{"role": role, "content": content} for role, content in messages]
    name = f"the chat template of {label}"
    template = tokenizer.chat_template
    if not isinstance(template.get("default", "") if isinstance(template, dict) else template, str):
        raise PromptError(f"{name} must be a text, got {reason_of(template)}", _RAW)
    try:
        with resource_limits(TEMPLATE_S, TEMPLATE_BYTES):
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TimeLimitExceeded:
        raise PromptError(
            f"{name} takes more than {TEMPLATE_S:g} s on the conversation", _RAW
        ) from None
    except MemoryError:
        raise PromptError(
            f"{name} needs more than {TEMPLATE_BYTES >> 20} MiB of memory on the conversation", _RAW
        ) from None
    except Exception as fault:  # a template can raise anything
        raise PromptError(f"{name} rejects the conversation: {reason_of(fault)}", _RAW) from fault
    most = TEMPLATE_CHARACTERS + sum(len(content) for _, content in messages)
    if not isinstance(text, str) or len(text) > most:
        size = f"{len(text):,} characters" if isinstance(text, str) else type(text).__name__
        raise PromptError(
            f"{name} returns {size} for the conversation; at most {most:,} characters are allowed",
            _RAW,
        )
    return text


def _encode(tokenizer: Any, text: str, label: str, **options: Any) -> list[int]:
    """Return the token ids of a text. Raise PromptError if the tokenizer fails."""
    try:
        return list(tokenizer.encode(text, **options))
    except BaseException as fault:
        if not is_library_error(fault):
            raise
        raise PromptError(
            f"the tokenizer of {label} cannot encode the prompt: {reason_of(fault)}",
            "leave the question out, or replace the model's tokenizer files",
        ) from fault


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of an answer without special tokens.

    Leading spaces are kept, because code may begin with them.

    Raises:
        PromptError: the tokenizer cannot decode the ids. Some tokenizers fail on ids above their
            vocabulary, which a model with a padded output layer can choose.
    """
    try:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    except BaseException as fault:
        if not is_library_error(fault):
            raise
        raise PromptError(
            f"the tokenizer of the target cannot decode an answer: {reason_of(fault)}",
            "replace the model's tokenizer files",
        ) from fault


def decode_answer(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of an answer without special tokens and surrounding white space."""
    return decode_text(tokenizer, ids).strip()

"""Messages to token ids and token ids to answers, with whatever tokenizer is handed in.

A tokenizer is anything with `encode` and `decode` as transformers has them; with `chat_template`
and `apply_chat_template` besides, its own template is used.

Chat templates and tokenizers come with checkpoints, so both are untrusted input. All their
exceptions become a `PromptError`, and a template has limits on time, memory and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.errors import PromptError, is_foreign, reason_of
from specbench_cli.tasks.limits import OutOfTime, resource_limits
from specbench_cli.tasks.schema import Message

TEMPLATE_S = 5.0
"""Maximum processor time in seconds of a chat template for one prompt."""
TEMPLATE_BYTES = 1 << 30
"""Maximum memory in bytes that a chat template may allocate for one prompt."""
TEMPLATE_CHARACTERS = 1_000_000
"""Maximum number of characters that a chat template may add to the messages of one prompt."""

_RAW = "use --raw, which applies no chat template"


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


def render(
    tokenizer: Any, messages: Sequence[Message], raw: bool, label: str = "this model"
) -> list[int]:
    """Token ids of a prompt.

    With the tokenizer's chat template, up to where the assistant starts to speak. Without one, or
    with `raw`, plain texts joined by blank lines, under the tokenizer's own special tokens.

    A template writes its special tokens itself, so none are added to its text; to plain text they
    are added, but a beginning-of-sequence token never twice.

    Args:
        label: name of the model in errors.

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
    except OutOfTime:
        raise PromptError(
            f"{name} takes more than {TEMPLATE_S:g} s on the conversation", _RAW
        ) from None
    except MemoryError:
        raise PromptError(
            f"{name} needs more than {TEMPLATE_BYTES >> 20} MiB of memory on the conversation", _RAW
        ) from None
    except Exception as fault:  # a template can raise anything
        raise PromptError(f"{name} refuses the conversation: {reason_of(fault)}", _RAW) from fault
    most = TEMPLATE_CHARACTERS + sum(len(content) for _, content in messages)
    if not isinstance(text, str) or len(text) > most:
        size = f"{len(text):,} characters" if isinstance(text, str) else type(text).__name__
        raise PromptError(
            f"{name} makes {size} of the conversation, and at most {most:,} are allowed", _RAW
        )
    return text


def _encode(tokenizer: Any, text: str, label: str, **options: Any) -> list[int]:
    """Return the token ids of a text. Raise PromptError if the tokenizer fails."""
    try:
        return list(tokenizer.encode(text, **options))
    except BaseException as fault:
        if not is_foreign(fault):
            raise
        raise PromptError(
            f"the tokenizer of {label} cannot encode the prompt: {reason_of(fault)}",
            "leave the question out, or replace the model's tokenizer files",
        ) from fault


def written_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of an answer without special tokens.

    Leading spaces are kept, because code may begin with them.

    Raises:
        PromptError: the tokenizer cannot decode the ids. Some fail on the ids of padding rows.
    """
    try:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    except BaseException as fault:
        if not is_foreign(fault):
            raise
        raise PromptError(
            f"the tokenizer of the target cannot decode an answer: {reason_of(fault)}",
            "replace the model's tokenizer files",
        ) from fault


def answer_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """An answer's text, special tokens and surrounding blanks removed."""
    return written_text(tokenizer, ids).strip()

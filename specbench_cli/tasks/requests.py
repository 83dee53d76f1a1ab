"""Recorded traffic: requests of OpenAI's chat completions API and of its batch files.

Each request is one question. The model answers its last message. All messages before the last one,
including those of the assistant, are used unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench_cli.tasks.schema import Message, Role

MESSAGES = "messages"
_BODY = "body"
"""Key of a request in a row of a batch file."""

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",  # the later name of "system", which few chat templates support
    "user": "user",
    "assistant": "assistant",
}
_LIMITS = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion request.

    Attributes:
        before: messages before the last one.
        text: the last message, which is answered.
        budget: maximum number of new tokens, or None.
        cluster: hash of the messages, equal for equal requests.
    """

    before: tuple[Message, ...]
    text: str
    budget: int | None
    cluster: str


def unwrap_request(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request inside a row of a batch file, with the row's id.

    Any other row is returned unchanged.
    """
    body = row.get(_BODY)
    if not isinstance(body, dict):
        return row
    named = {"id": row["custom_id"]} if row.get("custom_id") is not None else {}
    return {**body, **named}


def parse_request(row: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a row with `messages`.

    Raises:
        ValueError: the request is not supported. The message contains the reason.
    """
    if row.get("tools") or row.get("functions"):
        raise ValueError(
            "it has tools, which are not supported: remove them, or give the complete text of the"
            ' prompt as "prompt" and run with --raw'
        )
    listed = row[MESSAGES]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"'messages' must be a list of messages, got {_short(listed)}")
    messages = [_message(place, each) for place, each in enumerate(listed)]
    role, text = messages[-1]
    if role != "user":
        raise ValueError(
            f"the last message has the role {role!r}, but it must be the user's: remove the"
            " messages after the user's last one"
        )
    if not text.strip():
        raise ValueError(f"messages[{len(messages) - 1}] is empty; the last message is answered")
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
    return ChatRequest(tuple(messages[:-1]), text, _budget(row), digest[:16])


def _message(place: int, message: Any) -> Message:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise ValueError(f"{where} must have a role and a content, got {_short(message)}")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise ValueError(
            f"{where} has the role {_short(message.get('role'))}, which is not one of"
            f" {', '.join(_ROLES)}"
        )
    if message.get("tool_calls") or message.get("function_call"):
        raise ValueError(f"{where} calls a tool, which is not supported: remove the request")
    content = message.get("content")
    if isinstance(content, str):
        return role, content
    if not isinstance(content, list) or not content:
        raise ValueError(f"{where} must have a text as content, got {_short(content)}")
    return role, "\n".join(_get_part_text(where, part) for part in content)


def _get_part_text(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{where} contains a part that is not a text: {_short(part)}")
    return text


def _budget(row: Mapping[str, Any]) -> int | None:
    for name in _LIMITS:
        value = row.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ValueError(f"{name!r} must be a whole number from 1, got {_short(value)}")
        return value
    return None


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."

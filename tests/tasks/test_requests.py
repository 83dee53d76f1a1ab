"""Files of OpenAI requests as a task, and the errors of malformed lines."""

import json

import pytest

from specbench_cli.errors import UsageError
from specbench_cli.tasks import build_messages, load_task, render_prompt

QUESTION = {"role": "user", "content": "How many?"}


def task(tmp_path, *rows):
    path = tmp_path / "traffic.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_task(str(path))


def test_the_last_message_is_the_question_and_earlier_ones_precede_it(tmp_path):
    system = {"role": "system", "content": "Be short."}
    messages = [system, QUESTION, {"role": "assistant", "content": "Three."}, QUESTION]
    (question,) = task(
        tmp_path, {"model": "any", "messages": messages, "temperature": 0.3}
    ).questions
    assert question.turns == ("How many?",)
    assert question.before == (
        ("system", "Be short."),
        ("user", "How many?"),
        ("assistant", "Three."),
    )
    built = build_messages(question.turns, (), question.before)
    assert built == [*question.before, ("user", "How many?")]


def test_a_chat_template_gets_all_messages_with_their_roles():
    class Tokenizer:
        chat_template = "own"

        def apply_chat_template(self, messages, **_):
            return " ".join(f"{m['role']}:{m['content']}" for m in messages)

        def encode(self, text, **_):
            return text.split()

    built = build_messages(["b"], (), [("system", "a")])
    assert render_prompt(Tokenizer(), built, raw=False) == ["system:a", "user:b"]


def test_the_lines_of_a_batch_file_are_requests_with_their_ids_and_limits(tmp_path):
    body = {"messages": [QUESTION], "max_tokens": 40}
    row = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (question,) = task(tmp_path, row).questions
    assert (question.prompt_id, question.max_new_tokens) == ("traffic/r-1", 40)


def test_content_parts_are_joined_and_developer_messages_become_system_messages(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    (question,) = task(tmp_path, {"messages": messages}).questions
    assert (question.before, question.turns) == ((("system", "x"),), ("a\nb",))


def test_equal_requests_share_a_cluster(tmp_path):
    other = {"messages": [{"role": "user", "content": "Why?"}]}
    first, again, third = task(
        tmp_path, {"messages": [QUESTION]}, {"messages": [QUESTION]}, other
    ).questions
    assert first.cluster == again.cluster != third.cluster
    assert first.prompt_id != again.prompt_id


WRONG = [
    ({"messages": []}, "must be a list of messages"),
    ({"messages": "hello"}, "must be a list of messages"),
    ({"messages": ["hello"]}, r"messages\[0\] must have a role and a content"),
    ({"messages": [{"role": "bot", "content": "x"}]}, r"role \"bot\", which is not one of system"),
    (
        {"messages": [QUESTION, {"role": "assistant", "content": "3"}]},
        "last message has the role 'assistant'",
    ),
    ({"messages": [{"role": "user", "content": " "}]}, "is empty"),
    ({"messages": [{"role": "user", "content": None}]}, "must have a text as content, got null"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "contains a part that is not a text",
    ),
    (
        {"messages": [QUESTION], "max_tokens": 0},
        "'max_tokens' must be a whole number from 1, got 0",
    ),
    ({"messages": [QUESTION], "tools": [{"type": "function"}]}, "it has tools"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}, QUESTION]},
        "calls a tool",
    ),
]


@pytest.mark.parametrize(("row", "message"), WRONG)
def test_a_malformed_request_is_refused_with_its_line(tmp_path, row, message):
    with pytest.raises(UsageError, match=rf"traffic\.jsonl:2: .*{message}") as caught:
        task(tmp_path, {"messages": [QUESTION]}, row)
    assert "messages" in caught.value.hint


def test_an_empty_file_of_requests_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no question"):
        task(tmp_path)

"""Prompts equal those that transformers renders."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specbench_cli.tasks import build_messages, decode_answer, decode_text, render_prompt

WORDS = "<s> </s> <user> <bot> <unk> hello world again yes".split()
CHAT = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
MESSAGES = build_messages(["hello", "again"], ["world"])


def tokenizer(chat: str | None = None, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words.

    With `adds_bos` it puts <s> before plain text, as Llama's does.
    """
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<bot>"],
        chat_template=chat,
    )


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_a_conversation_alternates_roles_and_ends_with_the_turn_to_answer():
    assert MESSAGES == [("user", "hello"), ("assistant", "world"), ("user", "again")]
    assert build_messages(["hello", "again"], []) == [("user", "hello")]
    with pytest.raises(ValueError, match="leave none of 2 turns"):
        build_messages(["hello", "again"], ["world", "yes"])


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHAT, "{{ bos_token }} " + CHAT])
def test_chat_ids_equal_those_of_transformers(template, adds_bos):
    tok = tokenizer(template, adds_bos)
    expected = tok.apply_chat_template(
        [{"role": role, "content": text} for role, text in MESSAGES],
        add_generation_prompt=True,
        return_dict=False,
    )
    rendered = render_prompt(tok, MESSAGES, raw=False)
    assert rendered == expected
    assert words(rendered).endswith("<user> hello <bot> world <user> again <bot>")
    assert words(rendered).count("<s>") == template.startswith("{{ bos_token }}")


@pytest.mark.parametrize("chat", [None, CHAT])
def test_raw_text_is_joined_under_the_tokenizers_own_bos(chat):
    assert words(render_prompt(tokenizer(chat, adds_bos=True), MESSAGES, raw=True)) == (
        "<s> hello world again"
    )
    assert words(render_prompt(tokenizer(chat), MESSAGES, raw=True)) == "hello world again"


def test_without_a_template_the_prompt_is_plain_text():
    assert words(render_prompt(tokenizer(), MESSAGES, raw=False)) == "hello world again"


def test_bos_written_in_the_text_is_not_doubled():
    tok = tokenizer(adds_bos=True)
    assert words(render_prompt(tok, [("user", "<s> hello")], raw=True)) == "<s> hello"


def test_plain_turns_are_separated_by_blank_lines():
    class Recorder:
        def encode(self, text: str) -> list[int]:
            self.text = text
            return [1]

    recorder = Recorder()
    assert render_prompt(recorder, MESSAGES, raw=False) == [1]
    assert recorder.text == "hello\n\nworld\n\nagain"


def test_answer_is_without_special_tokens():
    tok = tokenizer(CHAT)
    assert decode_answer(tok, tok.convert_tokens_to_ids(["<bot>", "yes", "world", "</s>"])) == (
        "yes world"
    )


def test_decoded_text_keeps_its_spaces():
    class Plain:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert ids == [3, 4] and skip_special_tokens
            return "    return x\n"

    assert decode_text(Plain(), (3, 4)) == "    return x\n"
    assert decode_answer(Plain(), (3, 4)) == "return x"

"""The training corpus: seeded, resumable, with the documented mixture."""

import json
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from recipes.embedded.tokenizer import tokenizer_texts, train_tokenizer
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.training import corpus, generated
from specbench_cli.training.corpus import (
    Corpus,
    Encoder,
    generate_chats,
    load_gsm8k,
)

PROBLEMS: list[corpus.Chat] = [
    [(f"Tom has {n} pens and buys {n} more. How many?", f"He has {n}+{n} = {2 * n}.\n#### {2 * n}")]
    for n in range(40)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(islice(tokenizer_texts([], 0, 300), 600), vocab_size=600)


@pytest.fixture(scope="module")
def encode(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    return Encoder(tokenizer)


def test_the_target_of_each_token_is_the_next_one(encode: Encoder) -> None:
    batch = Corpus(encode, PROBLEMS, 0).batch(2, 512)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_every_chat_is_complete_in_one_sequence(
    encode: Encoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = Corpus(encode, [], 0).batch(6, 512)
    complete_chats = {tuple(encode(chat).ids) for chat in islice(generate_chats(0), 400)}
    begin, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    for inputs, last in zip(batch.inputs.tolist(), batch.targets[:, -1].tolist(), strict=True):
        text = [token for token in [*inputs, last] if token != pad]
        starts = [i for i, token in enumerate(text) if token == begin]
        chats = [tuple(text[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]
        assert starts[0] == 0
        assert complete_chats.issuperset(chats)


def test_few_tokens_are_padding_and_padding_has_weight_0(
    encode: Encoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = Corpus(encode, PROBLEMS, 0).batch(32, 512)
    padding = batch.targets == tokenizer.pad_token_id
    assert padding.float().mean() < 0.06
    assert torch.equal(padding, batch.weights == 0)


def test_a_chat_longer_than_a_sequence_waits_for_a_stage_with_longer_sequences(
    encode: Encoder,
) -> None:
    long = [[("Tell me" + " why?" * 300, "because.")]]
    question_ids = torch.tensor(encode.encode_text(" why?" * 20))

    def holds_it(length: int) -> bool:
        ids = Corpus(encode, long, 0).batch(2, length).inputs
        return bool((ids.unfold(1, len(question_ids), 1) == question_ids).all(-1).any())

    assert not holds_it(512)
    assert holds_it(2048)


def test_a_sequence_too_short_for_every_chat_is_a_usage_error(encode: Encoder) -> None:
    with pytest.raises(UsageError, match="longer than a sequence of 9 tokens"):
        Corpus(encode, PROBLEMS, 0).batch(1, 8)


def test_a_restored_corpus_continues_with_the_same_batches(encode: Encoder) -> None:
    stream = Corpus(encode, PROBLEMS, 0)
    for _ in range(5):
        stream.batch(4, 512)
    state = json.loads(json.dumps(stream.state()))
    other = Corpus(encode, PROBLEMS, 0)
    other.restore(state)
    for ours, theirs in zip(stream.batch(4, 512), other.batch(4, 512), strict=True):
        assert torch.equal(ours, theirs)


def test_gsm8k_is_a_tenth_of_the_tokens(encode: Encoder) -> None:
    stream = Corpus(encode, PROBLEMS, 0)
    stream.batch(64, 256)
    state = stream.state()
    share = state["problem_tokens"] / (state["problem_tokens"] + state["row_tokens"])
    assert share == pytest.approx(0.1, abs=0.02)


def test_a_family_named_twice_is_read_twice_as_often_in_order(encode: Encoder) -> None:
    mixed = Corpus(encode, [], 0, ("rag", "qa", "rag"))
    token_ids = [mixed.draw().ids for _ in range(6)]
    rows = list(islice(generated.generate_rows(0, "train"), 24))
    rag, qa = ([r for r in rows if r["family"] == family] for family in ("rag", "qa"))
    expected = [rag[0], qa[0], rag[1], rag[2], qa[1], rag[3]]
    assert token_ids == [encode(corpus.make_chat(row)).ids for row in expected]


def test_answers_have_weight_1_and_prompts_less(
    encode: Encoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = encode([("How are you?", "Fine."), ("And now?", "Better.")])
    answering = False
    for token, weight in zip(tokenizer.convert_ids_to_tokens(chat.ids), chat.weights, strict=True):
        assert weight == pytest.approx(1.0 if answering else corpus.PROMPT_LOSS_WEIGHT), token
        answering = token == "<|assistant|>" or (answering and token != "<|end|>")


def test_another_gsm8k_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(UsageError, match="not the GSM8K training file"):
        load_gsm8k(tmp_path)


def test_missing_data_without_a_network_names_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_args: object, **_more: object) -> None:
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(EnvironmentFault) as fault:
        load_gsm8k(tmp_path)
    assert fault.value.hint is not None
    assert "SPECBENCH_DATA" in fault.value.hint


@pytest.mark.data
def test_gsm8k_has_7473_problems_with_answers_and_without_annotations() -> None:
    chats = load_gsm8k()
    assert len(chats) == 7473
    assert all("####" in answer and "<<" not in answer for ((_, answer),) in chats)

"""The training stream: seeded, resumable, mixed as stated."""

import json
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.training import corpus
from specbench_cli.training.corpus import Corpus, load_gsm8k, tokenizer_texts
from specbench_cli.training.tokenizer import train_tokenizer

PROBLEMS: list[corpus.Chat] = [
    [(f"Tom has {n} pens and buys {n} more. How many?", f"He has {n}+{n} = {2 * n}.\n#### {2 * n}")]
    for n in range(40)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(islice(tokenizer_texts([], 0, 300), 600), vocab_size=600)


def test_the_target_of_each_token_is_the_next_one(tokenizer: PreTrainedTokenizerFast) -> None:
    first = Corpus(tokenizer, PROBLEMS, 0).batch(2, 16)
    whole = Corpus(tokenizer, PROBLEMS, 0).batch(1, 33).inputs[0]
    assert torch.equal(first.inputs.flatten(), whole[:32])
    assert torch.equal(first.targets.flatten(), whole[1:33])


def test_batches_follow_each_other_without_a_gap(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = Corpus(tokenizer, PROBLEMS, 0)
    parts = torch.cat([stream.batch(2, 16).inputs.flatten() for _ in range(4)])
    assert torch.equal(parts, Corpus(tokenizer, PROBLEMS, 0).batch(4, 32).inputs.flatten())


def test_a_restored_stream_continues_exactly(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = Corpus(tokenizer, PROBLEMS, 0)
    for _ in range(5):
        stream.batch(4, 64)
    state = json.loads(json.dumps(stream.state()))
    other = Corpus(tokenizer, PROBLEMS, 0)
    other.restore(state)
    for ours, theirs in zip(stream.batch(4, 64), other.batch(4, 64), strict=True):
        assert torch.equal(ours, theirs)


def test_gsm8k_is_three_tenths_of_the_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = Corpus(tokenizer, PROBLEMS, 0)
    stream.batch(64, 256)
    state = stream.state()
    share = state["problem_tokens"] / (state["problem_tokens"] + state["row_tokens"])
    assert share == pytest.approx(0.3, abs=0.02)


def test_answers_and_their_end_count_fully_and_prompts_less(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    batch = Corpus(tokenizer, [], 0).batch(1, 512)
    answering = False
    for token, weight in zip(
        tokenizer.convert_ids_to_tokens(batch.targets[0].tolist()), batch.weights[0], strict=True
    ):
        assert weight == pytest.approx(1.0 if answering else corpus.PROMPT_WEIGHT), token
        answering = token == "<|assistant|>" or (answering and token != "<|end|>")


def test_another_gsm8k_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(UsageError, match="not the GSM8K training file"):
        load_gsm8k(tmp_path)


def test_without_data_and_network_the_error_says_what_to_set(
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

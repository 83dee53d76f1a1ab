"""Sequence-to-sequence models: the encoder reads the prompt, the decoder emits the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specbench_cli.engine.models.chain_decoders import Seq2SeqDecoder
from specbench_cli.engine.models.decoder import ChainsOnly
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.transformers_decoder import TransformersState
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import ExtraInput
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault, UsageError
from tests.engine.models.feeding import CLOSE, logits, relative_difference, some_ids

Maker = Callable[..., Path]
STOP = StopRule(frozenset(), 4)


def reading(
    decoder: Seq2SeqDecoder, question: Tensor, seq: int = 0, n_seqs: int = 1
) -> TransformersState:
    state = decoder.new_state(40, n_seqs)
    assert decoder.attach(state, ExtraInput(ids=tuple(question[0].tolist())), seq)
    return state


@pytest.fixture(params=["t5", "bart"])
def decoder(request: pytest.FixtureRequest, tiny_checkpoint: Maker) -> Seq2SeqDecoder:
    found = load_decoder(tiny_checkpoint(request.param), name="target")
    assert isinstance(found, Seq2SeqDecoder)
    return found


def test_logits_are_those_of_transformers(decoder: Seq2SeqDecoder) -> None:
    question, ids = some_ids(11), some_ids(20)
    with torch.no_grad():
        due = decoder.module(input_ids=question, decoder_input_ids=ids).logits
    state = reading(decoder, question)
    found = [logits(decoder, ids[:, :1], state), logits(decoder, ids[:, 1:5], state)]
    logits(decoder, 196 - ids[:, 5:9], state)
    state.rollback(0, 5)
    found.append(logits(decoder, torch.cat((ids[:, 5:7], 196 - ids[:, 7:9]), 1), state)[:, :2])
    state.commit(0, range(7))
    found.append(logits(decoder, ids[:, 7:], state))
    assert state.length() == 20
    assert relative_difference(torch.cat(found, 1), due) <= CLOSE
    assert (decoder.n_layers, decoder.start) == (3, 0)


def test_rows_that_are_kept_are_those_of_reading_from_scratch(decoder: Seq2SeqDecoder) -> None:
    question, ids = some_ids(6), some_ids(9)
    state, fresh = reading(decoder, question), reading(decoder, question)
    for part in ids.split((1, 5, 3), 1):
        logits(decoder, part, state)
    state.rollback(0, 7)
    logits(decoder, ids[:, :7], fresh)
    for layer in range(decoder.n_layers):
        for rows in ("keys", "values"):
            ours, due = (getattr(each, rows)(layer)[:, :, :7] for each in (state, fresh))
            assert relative_difference(ours, due) <= CLOSE


def test_sequences_have_questions_of_their_own(decoder: Seq2SeqDecoder) -> None:
    ids, questions = some_ids(4, 2), [some_ids(7), some_ids(3)]
    state = decoder.new_state(9, n_seqs=2)
    for seq, question in enumerate(questions):
        decoder.attach(state, ExtraInput(ids=tuple(question[0].tolist())), seq)
    found = logits(decoder, ids, state)
    for seq, question in enumerate(questions):
        alone = logits(decoder, ids[seq : seq + 1], reading(decoder, question))
        assert relative_difference(found[seq], alone[0]) <= CLOSE


def test_a_cleared_state_has_forgotten_its_question(decoder: Seq2SeqDecoder) -> None:
    state = reading(decoder, some_ids(5))
    logits(decoder, some_ids(2), state)
    state.clear()
    with pytest.raises(MethodFault, match="the request has no input for its encoder"):
        logits(decoder, some_ids(2), state)
    decoder.attach(state, ExtraInput(ids=(3, 4)))
    again = logits(decoder, some_ids(2), state)
    assert (
        relative_difference(
            again, logits(decoder, some_ids(2), reading(decoder, torch.tensor([[3, 4]])))
        )
        == 0
    )


def test_what_stands_at_positions_of_its_own_is_refused(decoder: Seq2SeqDecoder) -> None:
    state = reading(decoder, some_ids(5))
    with pytest.raises(ChainsOnly, match="target supports only chains"):
        logits(decoder, some_ids(2), state, positions=torch.zeros(1, 2))
    with pytest.raises(ChainsOnly, match="only full forwards"):
        logits(decoder, some_ids(2), state, layers=(0, 1))
    with pytest.raises(MethodFault, match="output matrix"):
        decoder.unembed(torch.zeros(1, 1, 32))


def test_a_request_begins_with_the_start_token_and_its_prefill_counts_the_question(
    tiny_checkpoint: Maker,
) -> None:
    target = load_decoder(tiny_checkpoint("t5"), name="target")
    request = Request.create(target, "a", 1, [5, 6, 7], STOP)
    assert (request.ids, request.source) == ((0,), ExtraInput(ids=(5, 6, 7)))
    session = Session(Workspace({"target": target}, 16), request, Sampling())
    session.prefill()
    assert (len(session.tokens()), len(session.output())) == (2, 1)
    assert session.pending_tokens(0).ids.tolist() == [[0, session.output()[0]]]
    session.score(session.chain(()))
    forwards = session.harness.meter.forwards
    assert [(f.role, f.n_tokens) for f in forwards] == [("prefill", 4), ("verify", 1)]


def test_a_target_of_text_alone_refuses_what_stands_beside_it(tiny_checkpoint: Maker) -> None:
    target = load_decoder(tiny_checkpoint("llama"), name="target")
    request = Request("a", 1, (5, 6), STOP, ExtraInput(ids=(1, 2)))
    with pytest.raises(MethodFault, match="target reads only text"):
        Session(Workspace({"target": target}, 16), request, Sampling())


def test_a_family_without_a_start_token_is_refused(tiny_checkpoint: Maker) -> None:
    folder = tiny_checkpoint("t5", decoder_start_token_id=None, bos_token_id=None)
    (folder / "generation_config.json").unlink()
    with pytest.raises(
        UsageError, match="t5 checkpoints cannot be decoded here: its configuration"
    ):
        load_decoder(folder, name="target")

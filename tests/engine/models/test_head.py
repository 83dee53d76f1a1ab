"""Input of a head: the target's features of committed tokens, one position behind the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specbench_cli.engine.models.artifact import Artifact, ArtifactSpec
from specbench_cli.engine.models.head import NORMED, features
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

Maker = Callable[..., Path]
Open = Callable[..., Session]

V = 5


@pytest.fixture
def table(random_table: Callable[..., Tensor]) -> Tensor:
    return random_table(V, seed=4)


def rows_of_text(table: Tensor, text: list[int], first: int, n: int) -> Tensor:
    """Return the table's rows of the tokens first to first + n - 1."""
    before = [0, *text][first : first + n]
    return table[before, text[first : first + n]]


def test_after_prefill_a_head_reads_the_prompt_one_position_behind(
    open_session: Open, table: Tensor
) -> None:
    session = open_session(table, prompt=(3, 1, 4))
    session.capture_layers((NORMED,))
    session.prefill()
    read, text = session.pending_features(0), list(session.tokens())
    assert read.ids.tolist() == [text[1:]]
    assert read.rows[0].equal(rows_of_text(table, text, 0, 3))


def test_after_a_tree_a_head_reads_only_the_rows_of_the_accepted_path(
    open_session: Open, table: Tensor
) -> None:
    session = open_session(table, prompt=(3, 1, 4))
    session.reserve(4)
    session.capture_layers((NORMED,))
    session.prefill()
    session.pending_features(0)
    # a wrong child, then the right one, which has a right and a wrong child
    right = int(table[4, session.tokens()[-1]].argmax())
    next_ = int(table[session.tokens()[-1], right].argmax())
    wrong = [(right + 1) % V, (next_ + 1) % V]
    draft = Draft(torch.tensor([wrong[0], right, wrong[1], next_]), (-1, -1, 1, 1))
    session.commit(session.verify(draft, session.score(draft)))
    read, text = session.pending_features(3), list(session.tokens())
    assert text[4:6] == [right, next_]
    assert read.ids.tolist() == [text[4:]]
    assert read.rows[0].equal(rows_of_text(table, text, 3, 3))


def test_features_are_pending_until_they_are_read(open_session: Open, table: Tensor) -> None:
    session = open_session(table, prompt=(2,))
    session.capture_layers((NORMED,))
    session.prefill()
    for _ in range(2):
        plain = session.chain(())
        session.commit(session.verify(plain, session.score(plain)))
    read, text = session.pending_features(0), list(session.tokens())
    assert read.ids.tolist() == [text[1:]]
    assert read.rows[0].equal(rows_of_text(table, text, 0, 3))


@pytest.mark.parametrize("hosted", [False, True])
def test_normed_rows_through_the_output_matrix_are_the_logits(
    tiny_checkpoint: Maker, hosted: bool
) -> None:
    decoder = load_decoder(tiny_checkpoint("llama"), name="target", host_module=hosted)
    out = decoder.forward(Tokens(torch.arange(6)[None]), decoder.new_state(6), logits_at="all")
    rows = features(out, (NORMED,), decoder)
    torch.testing.assert_close(decoder.unembed(rows), out.logits[0])


@pytest.mark.parametrize("hosted", [False, True])
def test_embedded_ids_are_the_first_layers_input(tiny_checkpoint: Maker, hosted: bool) -> None:
    decoder = load_decoder(tiny_checkpoint("llama"), name="target", host_module=hosted)
    ids = torch.arange(6)[None]
    own = get_module(decoder).get_input_embeddings()(ids)
    torch.testing.assert_close(decoder.embed(ids), own)


def test_several_captured_layers_are_concatenated(tiny_checkpoint: Maker) -> None:
    decoder = load_decoder(tiny_checkpoint("llama"), name="target")
    out = decoder.forward(
        Tokens(torch.arange(4)[None]), decoder.new_state(4), captured_layers=(0, 1)
    )
    rows = features(out, (1, 0), decoder)
    assert rows.equal(torch.cat((out.aux_hidden_states[1][0], out.aux_hidden_states[0][0]), -1))


def test_reading_features_that_were_not_requested_is_a_fault(
    open_session: Open, table: Tensor
) -> None:
    session = open_session(table, prompt=(3, 1, 4))
    session.prefill()
    with pytest.raises(MethodFault, match=r"session\.capture_layers"):
        session.pending_features(0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling("coupled", 0.7, seed=1),
        *(Sampling("rejection", temperature) for temperature in (0.7, 1.0, 2.0)),
    ],
)
def test_candidates_are_the_most_likely_by_the_sessions_decision_scores(
    open_session: Open, table: Tensor, sampling: Sampling
) -> None:
    session = open_session(table, sampling=sampling)
    session.prefill()
    rows = table[0, :2].float()
    tokens, values = session.candidates(rows, 2, ahead=1)
    scores = rows / (sampling.temperature or 1.0)
    if sampling.rule == "coupled":
        scores = scores.log_softmax(-1) + session.noise(2)
    distribution = scores.log_softmax(-1).sort(-1, descending=True)
    assert tokens.equal(distribution.indices[:, :2])
    torch.testing.assert_close(values, distribution.values[:, :2], check_dtype=False)


def test_a_missing_module_is_named() -> None:
    class Missing(Artifact):
        kind = "missing"

    with pytest.raises(MethodFault, match="'missing'"):
        Workspace({}, capacity=1).artifact(ArtifactSpec(Missing))

"""Metering: every forward is recorded with its role, size and times."""

import pytest
import torch

from specbench_cli.engine.models.meter import HostClock, Meter, Metered
from specbench_cli.engine.types import Tokens


@pytest.fixture
def meter():
    return Meter(torch.device("cpu"))


@pytest.fixture
def decoder(table_decoder, random_table):
    return table_decoder("tables", random_table(4, seed=0))


def ids(*tokens):
    return Tokens(torch.tensor([tokens]))


@pytest.mark.parametrize("role", ["verify", "draft"])
def test_the_first_forward_on_a_state_is_a_prefill_and_later_ones_have_the_models_role(
    meter, decoder, role
):
    metered = Metered(decoder, meter, role=role)
    state = decoder.new_state(10)
    metered.forward(ids(0, 1, 2), state)
    metered.forward(ids(3), state)
    metered.forward(ids(1, 2), state)
    assert [f.role for f in meter.forwards] == ["prefill", role, role]
    assert [f.n_tokens for f in meter.forwards] == [3, 1, 2]


def test_a_caller_may_set_the_role(meter, decoder):
    metered = Metered(decoder, meter, role="verify")
    metered.forward(ids(0), decoder.new_state(4), role="aux")
    assert meter.forwards[0].role == "aux"


def test_a_record_names_the_model_its_layers_and_the_batch(meter, decoder):
    metered = Metered(decoder, meter, role="verify")
    state = decoder.new_state(4)
    metered.forward(ids(0), state)
    metered.forward(ids(0), state, layers=(0, 1))
    for forward in meter.forwards:
        assert (forward.model, forward.layers, forward.batch, forward.worker, forward.used) == (
            "tables",
            (0, 1),
            1,
            0,
            True,
        )


def test_a_record_has_the_share_of_the_weights_that_was_read(meter, table_decoder, random_table):
    table = random_table(4, seed=0)
    metered = Metered(table_decoder("tables", table, table + 1), meter, role="verify")
    state = metered.new_state(9)
    metered.forward(ids(0), state)
    first = metered.forward(ids(1), state, layers=(0, 1), early=True, logits_at="all")
    assert torch.equal(first.logits, first.hidden)
    assert metered.forward(ids(1), state, layers=(0, 1), early=True, logits_at=None).logits is None
    metered.forward(ids(2), state, skip=frozenset({(1, "mlp")}))
    metered.forward(ids(2), state, skip=frozenset({0, (1, "attention")}))
    assert [f.share for f in meter.forwards] == [1, 0.5, 0.5, 0.75, 0.25]


def test_metering_does_not_change_input_or_output(meter, decoder):
    metered = Metered(decoder, meter, role="verify")
    ours, plain = decoder.new_state(4), decoder.new_state(4)
    a = metered.forward(ids(0, 2), ours, logits_at="all")
    b = decoder.forward(ids(0, 2), plain, logits_at="all")
    assert torch.equal(a.logits, b.logits)
    assert ours.ids == plain.ids


def test_other_attributes_are_the_decoders(meter, decoder):
    metered = Metered(decoder, meter, role="verify")
    assert metered.vocab_size == 4
    assert metered.name == "tables"
    assert metered.decoder is decoder


def test_times_are_ordered_and_measured_from_the_start(meter, decoder):
    metered = Metered(decoder, meter, role="verify")
    state = decoder.new_state(4)
    meter.clock.restart()
    for token in range(3):
        metered.forward(ids(token), state)
    meter.resolve()
    marks = [t for f in meter.forwards for t in (f.t0_ns, f.t1_ns)]
    assert marks == sorted(marks)
    assert 0 <= marks[0] <= marks[-1] < 60e9


def test_restarting_sets_the_time_to_zero():
    clock = HostClock()
    first = clock.mark()
    clock.restart()
    assert 0 <= clock.mark() < 60e9
    assert first >= 0


def test_a_forward_that_fails_is_not_recorded(meter, decoder):
    metered = Metered(decoder, meter, role="verify")
    with pytest.raises(ValueError, match="fit"):
        metered.forward(ids(0, 1, 2), decoder.new_state(2))
    assert meter.forwards == []

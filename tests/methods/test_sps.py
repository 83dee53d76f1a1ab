"""Tests of speculative sampling: draft lengths, draft model inputs and bounds on acceptance."""

import pytest
import torch
from pydantic import ValidationError

from methods.sps import Sps, SpsParams
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import ModelOutput
from specbench_cli.engine.verify.sampling import Sampling

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, top_k=24, top_p=0.95, seed=3)
REJECTION = Sampling("rejection", 0.8, top_k=24, seed=3)
RULES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)


class Contrary(Decoder):
    """A model that never predicts the `kept` likeliest tokens of another model."""

    def __init__(self, decoder, kept):
        self.decoder = decoder
        self.kept = kept
        self.name = "contrary"

    def __getattr__(self, name):
        return getattr(self.decoder, name)

    def new_state(self, capacity, n_seqs=1):
        return self.decoder.new_state(capacity, n_seqs)

    def forward(self, x, state, **rest):
        out = self.decoder.forward(x, state, **rest)
        if out.logits is None:
            return out
        likeliest = out.logits.topk(self.kept, dim=-1).indices
        return ModelOutput(out.logits.scatter(-1, likeliest, -torch.inf), out.hidden)


class Wider(Decoder):
    """A model with a padded vocabulary. The padding has the highest logits and must be ignored."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.name = "wider"
        self.vocab_size = decoder.vocab_size + 7

    def __getattr__(self, name):
        return getattr(self.decoder, name)

    def new_state(self, capacity, n_seqs=1):
        return self.decoder.new_state(capacity, n_seqs)

    def forward(self, x, state, **rest):
        out = self.decoder.forward(x, state, **rest)
        if out.logits is None:
            return out
        return ModelOutput(torch.nn.functional.pad(out.logits, (0, 7), value=99.0), out.hidden)


def run(session, length):
    return list(Sps(SpsParams(length=length)).generate(session))


# ---- bounds -------------------------------------------------------------------------------------


@pytest.mark.smoke
@RULES
@pytest.mark.parametrize("length", range(1, 9))
def test_with_a_draft_equal_to_the_target_a_full_step_commits_length_plus_1(
    open_session, clear_prompts, sampling, length
):
    clear = GREEDY if sampling is REJECTION else sampling
    for prompt in clear_prompts(clear, 6):
        session = open_session(prompt, sampling, draft="target")
        *full, last = run(session, length)
        assert [len(step.outcome.committed) for step in full] == [length + 1] * len(full)
        assert 1 <= len(last.outcome.committed) <= length + 1
        assert len(session.output()) == 40


@RULES
def test_a_target_with_shuffled_output_rows_is_fully_accepted_as_draft(
    open_session, clear_prompts, sampling
):
    for prompt in clear_prompts(GREEDY if sampling is REJECTION else sampling, 3):
        *full, _ = run(open_session(prompt, sampling, draft="shuffled"), 4)
        assert [len(step.outcome.committed) for step in full] == [5] * len(full)


@RULES
def test_a_draft_has_only_tokens_of_the_draft_vocabulary(family, open_session, sampling):
    output_ids = family.modules["cut"].lm_head.output_ids.tolist()
    for prompt in range(0, 40, 8):
        steps = run(open_session(prompt, sampling, draft="cut"), 3)
        assert {token for step in steps for token in step.draft.tokens.tolist()} <= {*output_ids}


@pytest.mark.smoke
@RULES
@pytest.mark.parametrize("length", [1, 5])
def test_a_useless_draft_commits_one_token_per_step(family, open_session, sampling, length):
    useless = Contrary(family.decoders["target"], max(1, sampling.top_k))
    for prompt in range(0, 40, 8):
        session = open_session(prompt, sampling, draft=useless)
        steps = run(session, length)
        assert len(steps) == len(session.output()) - 1 == 39
        assert all(step.outcome.path == () for step in steps)
        assert {step.outcome.tested for step in steps[:-1]} == {1}


@RULES
def test_a_good_draft_is_accepted_in_part(open_session, sampling):
    steps = [step for prompt in range(8) for step in run(open_session(prompt, sampling), 4)]
    lengths = {len(step.outcome.path) for step in steps if step.draft.levels == 4}
    assert lengths == {0, 1, 2, 3, 4}


# ---- drafting -----------------------------------------------------------------------------------


@RULES
def test_a_draft_is_cut_at_the_remaining_budget(open_session, sampling):
    session = open_session(5, sampling, budget=23)
    committed = 1
    for step in run(session, 4):
        assert step.draft.levels == min(4, 23 - committed - 1)
        committed += len(step.outcome.committed)
    assert committed == 23


@RULES
def test_a_step_runs_one_draft_forward_per_token_and_one_target_forward(open_session, sampling):
    session = open_session(7, sampling)
    pending = 1
    for step in run(session, 3):
        *drafting, verifying = step.forwards
        assert [(f.model, f.role) for f in drafting] == [("near", "draft")] * step.draft.levels
        assert (verifying.model, verifying.role) == ("target", "verify")
        assert verifying.n_tokens == step.draft.levels + 1
        if drafting:
            assert [f.n_tokens for f in drafting] == [pending] + [1] * (len(drafting) - 1)
        # After full acceptance the draft model has not processed its last token. It reads that
        # token together with the bonus token.
        pending = 2 if len(step.outcome.path) == step.draft.levels else 1


def test_the_draft_model_is_prefilled_once_without_logits(open_session):
    session = open_session(7)
    run(session, 3)
    prefills = [f for f in session.harness.meter.forwards if f.role == "prefill"]
    assert [f.model for f in prefills] == ["near", "target"]
    assert {f.n_tokens for f in prefills} == {len(session.requests[0].ids)}


def test_only_sampled_drafts_carry_a_distribution(open_session):
    for step in run(open_session(3, REJECTION), 3):
        if step.draft.nodes:
            assert step.draft.draw_mode == "independent"
            assert step.draft.q.shape == (step.draft.nodes, 96)
            drawn = step.draft.q.gather(1, step.draft.tokens[:, None])
            assert (drawn > 0).all()
    for sampling in (GREEDY, COUPLED):
        for step in run(open_session(3, sampling), 3):
            assert (step.draft.draw_mode, step.draft.q) == ("deterministic", None)


@RULES
def test_a_padded_draft_vocabulary_does_not_change_the_drafts(family, open_session, sampling):
    outputs = []
    for draft in ("near", Wider(family.decoders["near"])):
        session = open_session(9, sampling, draft=draft)
        steps = run(session, 3)
        outputs.append((session.output(), [step.draft.tokens.tolist() for step in steps]))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("wrong", [{"length": 0}, {"length": -1}, {"length": "few"}, {"gamma": 4}])
def test_parameters_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValidationError):
        SpsParams(**wrong)

"""Tests of plain decoding against `generate` of transformers."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from methods.vanilla import Vanilla
from specbench_cli.engine.verify.sampling import Noise, Sampling


class AddNoise(LogitsProcessor):
    """Adds to log softmax(scores / temperature) the Gumbel noise of the output position.

    Coupled sampling keys this noise by seed and position.
    """

    def __init__(self, sampling, prompt_id, prompt_length, vocab):
        self.noise = Noise(sampling.seed, prompt_id, 0, vocab, torch.device("cpu"))
        self.temperature = sampling.temperature
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores):
        log_p = (scores / self.temperature).log_softmax(-1)
        return log_p + self.noise.rows(input_ids.shape[1] - self.prompt_length, 1)


def generate(module, ids, n, eos=None, processors=()):
    prompt = torch.tensor([ids])
    output = module.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        logits_processor=LogitsProcessorList(processors),
    )
    return output[0, len(ids) :].tolist()


@pytest.mark.smoke
def test_greedy_output_equals_that_of_generate(family, open_session, clear_prompts):
    for prompt in clear_prompts(Sampling(), 8):
        session = open_session(prompt)
        list(Vanilla().generate(session))
        expected = generate(family.modules["target"], family.prompts[prompt], 40)
        assert session.output() == expected


@pytest.mark.smoke
def test_coupled_output_equals_that_of_generate_with_noise(family, open_session, clear_prompts):
    sampling = Sampling("coupled", 0.8, seed=11)
    for prompt in clear_prompts(sampling, 5):
        session = open_session(prompt, sampling)
        list(Vanilla().generate(session))
        ids = family.prompts[prompt]
        add = AddNoise(sampling, f"tiny/{prompt}", len(ids), session.target.vocab_size)
        assert session.output() == generate(family.modules["target"], ids, 40, processors=[add])


def test_eos_ends_the_output_as_in_generate(family, open_session, clear_prompts, plain):
    for prompt in clear_prompts(Sampling(), 6):
        eos = plain(prompt, Sampling()).ids[5]
        session = open_session(prompt, eos=[eos])
        list(Vanilla().generate(session))
        assert session.finish == "eos"
        assert session.output() == generate(
            family.modules["target"], family.prompts[prompt], 40, eos
        )


def test_every_step_is_one_plain_forward_of_one_token(open_session):
    session = open_session(0, budget=9)
    steps = list(Vanilla().generate(session))
    assert [step.outcome.origin for step in steps] == [("plain",)] * 8
    assert [step.draft.levels for step in steps] == [0] * 8
    assert [step.outcome.tested for step in steps] == [0] * 8
    assert [(f.role, f.n_tokens) for f in session.harness.meter.forwards] == [
        ("prefill", len(session.requests[0].ids)),
        *[("verify", 1)] * 8,
    ]
    assert all(len(step.forwards) == 1 for step in steps)

"""OSD: what it stores of a request, what it learns from, and when its draft changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from methods.osd import DRAFT, Osd, OsdParams
from methods.vanilla import Vanilla
from specbench_cli.engine.learning import Memory, learn
from specbench_cli.engine.models.load import load_decoder, load_module, restrict_output
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

CPU = torch.device("cpu")
PROMPT = tuple(range(5, 17))


@pytest.fixture(scope="module")
def folders(tiny_checkpoint):
    """Folders of a tiny target, and of a draft that is often wrong."""
    return {"target": tiny_checkpoint("llama"), "draft": tiny_checkpoint("llama", noise=0.5)}


@pytest.fixture(scope="module")
def space(folders):
    return Workspace({role: load_decoder(path, name=role) for role, path in folders.items()}, 64)


def opened(space, memory=None, number=0, topic=""):
    stop = StopRule(frozenset(), 24)
    prompt = tuple(token + number for token in PROMPT)
    request = Request(f"r/{number}", 0, prompt, stop, topic=topic)
    return Session(space, request, Sampling(), memory=memory)


def answered(space, method, memory=None, number=0, topic=""):
    """Decode a request, and return its session and the rejected positions."""
    session, rejected = opened(space, memory, number, topic), []
    for step in method.generate(session):
        if step.outcome.origin[-1] == "recovered":
            rejected.append(len(session.tokens()) - 1)
    return session, rejected


def weights(memory):
    (made,) = memory.copies
    return {name: each.clone() for name, each in made.module.state_dict().items()}


def test_places_are_where_a_token_was_rejected_and_distributions_are_the_targets_there(
    space, folders
):
    method = Osd(OsdParams(length=3))
    session, rejected = answered(space, method)
    assert rejected and method.places == rejected
    target = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32)
    with torch.no_grad():
        logits = target(torch.tensor([session.tokens()])).logits[0]
    for place, distribution in zip(method.places, method.distributions, strict=True):
        assert torch.allclose(distribution, logits[place - 1], atol=1e-4)
        assert (
            distribution.argmax().item() == session.tokens()[place]
        )  # greedy: the token at this position


def test_the_draft_changes_after_the_set_number_of_requests(space):
    method, memory = Osd(OsdParams(length=3, every=2)), Memory()
    seen = []
    for number in range(4):
        session, _ = answered(space, method, memory, number)
        learn(method, session)
        seen.append(weights(memory))
        assert len(memory[DRAFT][1]) == (number + 1) % 2
    same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in pairwise(seen)]
    assert same == [False, True, False]


def test_an_update_uses_the_divergence_at_rejected_positions_only(space):
    """Its gradient is that of the mean KL(p || q) at these positions."""
    method, memory = Osd(OsdParams(length=3, every=1)), Memory()
    session, rejected = answered(space, method, memory)
    (made,) = memory.copies
    with torch.inference_mode(False), torch.enable_grad():
        ids = torch.tensor([session.tokens()])
        logits = made.module(ids).logits
        logits.retain_grad()
        q = logits[0, [place - 1 for place in rejected]].log_softmax(-1)
        p = torch.stack(method.distributions).float().log_softmax(-1)
        (kl_div(q, p, reduction="sum", log_target=True) / len(rejected)).backward()
        due = {name: each.grad.clone() for name, each in made.module.named_parameters()}
        made.module.zero_grad()
    rows = logits.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert rows == [place - 1 for place in rejected]
    found = {}
    step = torch.optim.AdamW.step

    def looked_at(self, *rest):
        found.update({n: each.grad.clone() for n, each in made.module.named_parameters()})
        return step(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", looked_at)
        learn(method, session)
    assert all(torch.allclose(found[name], due[name], atol=1e-6) for name in due)


def test_a_draft_whose_output_is_cut_learns_what_it_can_say(folders, tmp_path):
    says = torch.arange(0, 197, 2)
    restrict_output(load_module(folders["draft"], CPU, torch.float32), says).save_pretrained(
        tmp_path
    )
    paths = {"target": folders["target"], "draft": tmp_path}
    space = Workspace({role: load_decoder(path, name=role) for role, path in paths.items()}, 64)
    method, memory = Osd(OsdParams(length=3, every=1)), Memory()
    session, rejected = answered(space, method, memory)
    (made,) = memory.copies
    with torch.inference_mode(False), torch.enable_grad():
        rows = made.module(torch.tensor([session.tokens()])).logits[0]
        q = rows[[place - 1 for place in rejected]][:, says].log_softmax(-1)
        p = torch.stack(method.distributions).float().softmax(-1)[:, says]
        (-(p * q).sum() / len(rejected)).backward()
        due = made.module.lm_head.weight.grad.clone()
        made.module.zero_grad()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        seen = made.module.lm_head.weight
        patch.setattr(torch.optim.AdamW, "step", lambda self: found.append(seen.grad.clone()))
        learn(method, session)
    assert due.abs().max() > 0 and torch.allclose(found[0], due, atol=1e-6)


@pytest.mark.parametrize(("rate", "left"), [(0.0, 22), (0.01, 5)])
def test_a_repeated_text_is_learned_and_a_rate_of_0_learns_nothing(space, rate, left):
    vanilla = answered(space, Vanilla(Vanilla.Params()))[0].tokens()
    method, memory, missed = Osd(OsdParams(length=3, every=1, rate=rate)), Memory(), []
    for _ in range(9):
        session, rejected = answered(space, method, memory)
        learn(method, session)
        assert session.tokens() == vanilla
        missed.append(len(rejected))
    assert missed[0] == 22 and missed[-1] <= left, missed
    assert (len(set(missed)) == 1) == (rate == 0)


def test_each_topic_has_its_own_draft_which_only_its_prompts_train(space):
    method, memory, drafted = Osd(OsdParams(length=3, every=1, route=True)), Memory(), []
    for number in range(6):
        topic, of_topic = "ab"[number % 2], 90 * (number % 2)
        before = versions(space, memory)
        session, rejected = answered(space, method, memory, of_topic, topic)
        drafting = method.model.decoder
        drafted += [t for t in TOPICS if session.trainable("draft", t).decoder is drafting]
        assert changed(before, versions(space, memory)) == [] and rejected
        learn(method, session)
        assert changed(before, versions(space, memory)) == [topic]
        vanilla = answered(space, Vanilla(Vanilla.Params()), number=of_topic)[0]
        assert session.tokens() == vanilla.tokens()
    # Before the first request no topic was known, and before the second not b.
    assert drafted == ["", "a", "a", "b", "a", "b"]


TOPICS = ("", "a", "b")


def versions(space, memory):
    """Return the weights of each topic's draft."""
    session = opened(space, memory)
    modules = {each: session.trainable("draft", each).module for each in TOPICS}
    return {
        topic: {name: weight.clone() for name, weight in module.state_dict().items()}
        for topic, module in modules.items()
    }


def changed(before, after):
    """Return the topics whose draft has changed."""
    return [
        topic
        for topic in TOPICS
        if not all(torch.equal(before[topic][name], after[topic][name]) for name in after[topic])
    ]


def test_without_routes_a_method_has_one_draft_for_all_topics(space):
    method, memory = Osd(OsdParams(length=3, every=1)), Memory()
    for topic in ("a", "b", "a"):
        learn(method, answered(space, method, memory, topic=topic)[0])
    assert len(memory.copies) == 1

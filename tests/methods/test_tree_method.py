"""A minimal tree method: vanilla's tokens, the target's law, honest counts, a truthful cache."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from methods.vanilla import Vanilla
from specbench_cli.audit.choice import distance, walk
from specbench_cli.audit.models import table as table_model
from specbench_cli.audit.models.table import TableDecoder
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.hosted import HostedDecoder
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Out, Step, Tokens
from specbench_cli.engine.verify.sampling import Sampling, warp
from specbench_cli.engine.workspace import Workspace

FILE = Path(__file__).with_name("tree_method.py")
spec = importlib.util.spec_from_file_location("specbench_test_tree_method", FILE)
assert spec is not None
assert spec.loader is not None
tree_method = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tree_method  # where pydantic looks up what annotations mean
spec.loader.exec_module(tree_method)

FAMILIES = {"llama": FusedDecoder, "mistral": FusedDecoder, "gpt2": HostedDecoder}
PROMPTS = [
    tuple(torch.randint(2, 197, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (1, 9)
]
BUDGET = 14
GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.7, top_k=40, top_p=0.95, seed=3)
REJECTION = Sampling("rejection", 0.7, top_k=8, seed=3)
RULES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)
EXACT = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
FAMILY = pytest.mark.parametrize("family", FAMILIES)
SHAPES = [(2, 2), (3, 1), (1, 4), (2, 3)]


class Watched(Session):
    """A session that remembers every state it handed out, with the model it is a state of."""

    def new_state(self, decoder: Metered, slack: int = 0) -> Any:
        state = super().new_state(decoder, slack)
        self.__dict__.setdefault("held", {})[id(state)] = decoder.decoder, state
        return state


class Contrary(Decoder):
    """A model's opposite: what is likeliest there is least likely here."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.name = "contrary"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def new_state(self, capacity: int, n_seqs: int = 1) -> Any:
        return self.decoder.new_state(capacity, n_seqs)

    def forward(self, x: Any, state: Any, **rest: Any) -> Out:
        out = self.decoder.forward(x, state, **rest)
        return out if out.logits is None else Out(-out.logits, out.hidden)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def workspace(tiny_checkpoint: Callable[..., Path]) -> Callable[[str, str], Workspace]:
    """A family's target with its twin, a near one, a stranger or its opposite as the draft."""
    made: dict[tuple[str, str], Workspace] = {}

    def make(family: str, draft: str) -> Workspace:
        if (family, draft) not in made:
            target = load_decoder(tiny_checkpoint(family), name="target")
            assert isinstance(target, FAMILIES[family])
            seed = 1 if draft == "stranger" else 0
            other = load_decoder(tiny_checkpoint(family, seed=seed), name="draft")
            decoders = {"target": target, "draft": Contrary(other) if draft == "useless" else other}
            made[family, draft] = Workspace(decoders, capacity=max(map(len, PROMPTS)) + BUDGET)
        return made[family, draft]

    return make


def decode(
    method: Any, workspace: Workspace, prompt: tuple[int, ...], sampling: Sampling
) -> Iterator[tuple[Watched, Step]]:
    request = Request(f"tiny/{len(prompt)}", 0, prompt, StopRule(frozenset((5, 6)), BUDGET))
    session = Watched(workspace, request, sampling)
    for step in method.generate(session):
        yield session, step


def output(*args: Any) -> list[int]:
    *_, (session, _) = decode(*args)
    return list(session.output())


def tree(width: int, depth: int, law: str = "wor") -> Any:
    return tree_method.PlainTree(tree_method.PlainTreeParams(width=width, depth=depth, law=law))


# ---- identity -----------------------------------------------------------------------------------


def shaped():
    """Every family, rule and draft, with two of the shapes in turn: each couple of all four."""
    every = itertools.product(FAMILIES, [GREEDY, COUPLED], ["twin", "stranger"])
    for turn, (family, sampling, draft) in enumerate(every):
        for shape in (SHAPES[turn % 4], SHAPES[(turn + 2 - turn // 4 % 2) % 4]):
            id_ = f"{family}-{sampling.rule}-{shape}-{draft}"
            yield pytest.param(family, sampling, shape, draft, id=id_)


@pytest.mark.parametrize(("family", "sampling", "shape", "draft"), list(shaped()))
def test_the_output_is_vanillas(workspace, family, sampling, shape, draft):
    models = workspace(family, draft)
    for prompt in PROMPTS:
        expected = output(Vanilla(), models, prompt, sampling)
        assert output(tree(*shape), models, prompt, sampling) == expected


# ---- counts -------------------------------------------------------------------------------------


@FAMILY
@RULES
@pytest.mark.parametrize("law", ["point", "iid", "wor"])
def test_a_step_counts_levels_and_nodes_apart(workspace, family, sampling, law):
    for session, step in decode(tree(2, 3, law), workspace(family, "twin"), PROMPTS[1], sampling):
        draft, outcome = step.draft, step.outcome
        accepted = outcome.origin.count("accepted")
        assert draft.nodes == 2 ** (draft.levels + 1) - 2
        assert accepted == len(outcome.path) <= outcome.tested <= draft.levels <= 3
        if session.finish is None:
            assert outcome.tested == min(accepted + 1, draft.levels)
        ids = draft.tokens.tolist()
        assert [ids[node] for node in outcome.path] == list(outcome.committed[:accepted])
        above = [-1, *outcome.path]
        assert [draft.parents[node] for node in outcome.path] == above[: len(outcome.path)]


@RULES
def test_a_step_is_one_draft_forward_a_level_and_one_of_the_target(workspace, sampling):
    for session, step in decode(tree(2, 3), workspace("llama", "twin"), PROMPTS[1], sampling):
        *drafting, verifying = step.forwards
        assert [(f.model, f.role) for f in drafting] == [("draft", "draft")] * step.draft.levels
        assert (verifying.model, verifying.role) == ("target", "verify")
        assert verifying.n_tokens == step.draft.nodes + 1
        assert session.harness.meter.forwards[1].model == "target"


# ---- bounds -------------------------------------------------------------------------------------


@FAMILY
@pytest.mark.parametrize(
    ("sampling", "law"),
    [(GREEDY, "wor"), (COUPLED, "wor"), (REJECTION, "iid"), (REJECTION, "wor")],
    ids=["greedy", "coupled", "iid", "wor"],
)
def test_a_twin_draft_has_every_level_accepted(workspace, family, sampling, law):
    for prompt in PROMPTS:
        *full, _ = decode(tree(2, 3, law), workspace(family, "twin"), prompt, sampling)
        assert [len(step.outcome.committed) for _, step in full] == [4] * len(full)
        assert {step.outcome.origin[-1] for _, step in full} <= {"bonus"}


@FAMILY
@RULES
def test_a_useless_draft_commits_one_token_a_step(workspace, family, sampling):
    for prompt in PROMPTS:
        for _, step in decode(tree(2, 2), workspace(family, "useless"), prompt, sampling):
            assert step.outcome.path == ()
            assert len(step.outcome.committed) == 1
            assert step.outcome.tested == min(1, step.draft.levels)


# ---- the cache tells the truth ------------------------------------------------------------------


def audit(session: Watched) -> None:
    """Every state against one forward over the committed tokens: keys, values, and the length."""
    text = list(session.tokens())
    assert session.state.length() == len(text) - 1
    for decoder, state in session.held.values():
        n = state.length()
        fresh = decoder.new_state(n + 1)
        decoder.forward(Tokens(torch.tensor([text[: n + 1]])), fresh)
        for layer in range(decoder.n_layers):
            assert state.length(layer=layer) == n
            for rows in ("keys", "values"):
                ours, theirs = (getattr(s, rows)(layer)[:, :, :n] for s in (state, fresh))
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@FAMILY
@RULES
@pytest.mark.parametrize("draft", ["twin", "stranger"])
def test_after_every_step_the_cache_equals_recomputation(workspace, family, sampling, draft):
    paths = set()
    for prompt in PROMPTS:
        for session, step in decode(tree(2, 3), workspace(family, draft), prompt, sampling):
            audit(session)
            paths.add(step.outcome.path)
    assert draft == "stranger" or any(path != tuple(range(len(path))) for path in paths)


# ---- the target's law ---------------------------------------------------------------------------

PROMPT = (1, 0, 1)


def law_of_target(table: torch.Tensor, sampling: Sampling, n: int) -> dict[tuple[int, ...], float]:
    """Law of the first n tokens after PROMPT, by the chain rule and from the table alone."""
    law = {}
    for ids in itertools.product(range(table.shape[-1]), repeat=n):
        text = (*PROMPT, *ids)
        rows = [table[text[at - 2], text[at - 1]] for at in range(len(PROMPT), len(text))]
        weight = math.prod(float(warp(row, sampling)[x]) for row, x in zip(rows, ids, strict=True))
        if weight > 0:
            law[ids] = weight
    return law


def crossed():
    """Every kind of pair with every law, and each of both with every shape."""
    shapes = [((2, 2), 2, 4), ((2, 1), 3, 3), ((3, 1), 3, 3)]
    for i, kind in enumerate(("peaked", "flat", "near", "equal", "disjoint")):
        for j, law in enumerate(("point", "iid", "wor")):
            yield kind, law, *shapes[(i + j) % 3]


@pytest.mark.parametrize(("kind", "law", "shape", "vocab", "budget"), list(crossed()))
def test_the_output_has_the_targets_law(kind, law, shape, vocab, budget):
    sampling = Sampling("rejection", 0.8)
    target, draft = table_model.pair(kind, vocab=vocab)
    decoders = {"target": TableDecoder("target", target), "draft": TableDecoder("draft", draft)}

    def run(random):
        request = Request("table/0", 0, PROMPT, StopRule(frozenset(), budget))
        session = Session(
            Workspace(decoders, len(PROMPT) + budget), request, sampling, random=random
        )
        list(tree(*shape, law).generate(session))
        return tuple(session.output())

    found, expected = walk(run), law_of_target(target, sampling, budget)
    assert distance(found, expected) < 1e-9

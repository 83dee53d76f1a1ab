"""A head without state: metering, audit, and acceptance on a trained target."""

import ast
import json
from pathlib import Path

import pytest
import torch

from specbench_cli import app, registry
from specbench_cli.audit.runner import CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.models.head import NORMED, features
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.models import resolve
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

FILE = Path(__file__).parent / "plugins" / "stateless_head.py"
LEVELS = 3
TEXTS = 40


@pytest.fixture(scope="module")
def linear():
    registry.load_plugin(str(FILE))
    return registry.load("linear")


@pytest.fixture(scope="module")
def target():
    return load_decoder(resolve("embedded").path, name="target")


@pytest.fixture(scope="module")
def folder(linear, target, tmp_path_factory):
    """Head whose maps are fitted by least squares to features of the target."""
    rows = [read_features(target, seed) for seed in range(TEXTS)]
    now = torch.cat([each[: -LEVELS - 1] for each in rows])
    product = now.T @ now + 1e-2 * len(now) * torch.eye(now.shape[1])
    head = linear(linear.Params()).artifacts()[0].kind.random({"target": target})
    for level in range(LEVELS):
        due = torch.cat([each[level + 1 : len(each) - LEVELS + level] for each in rows])
        head.maps[level] = torch.linalg.solve(product, now.T @ due)
    place = tmp_path_factory.mktemp("heads") / "fitted"
    head.save(place, fitted="least squares")
    return place


def read_features(target, seed):
    """Return the features `[n, width]` of a question of `mini`, from one forward."""
    from transformers import AutoTokenizer

    lines = (FILE.parents[3] / "datasets_cfg" / "mini" / "mini.jsonl").read_text().splitlines()
    turn = json.loads(lines[-1 - 7 * seed])["turns"][0]
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded").path)
    chat = [{"role": "user", "content": turn}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    out = target.forward(Tokens(torch.tensor([ids])), target.new_state(len(ids)))
    return features(out, (NORMED,), target)


def test_it_imports_only_the_api_and_torch():
    text = FILE.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert modules == {"torch", "specbench_cli.api"}


def test_it_passes_the_audit_with_the_twin_draft_check(linear):
    found = run_checks(AuditSubject.from_method("linear", linear), CHECKS)
    assert not [each for each in found if not each.passed]
    twin = next(each for each in found if each.check == "twin draft")
    assert twin.figure["steps"] > 0
    assert twin.figure["mat"] > 2


def run(tmp_path, folder, *more):
    words = [
        "run",
        "--plugin",
        str(FILE),
        "--isolation",
        "none",
        "-m",
        "linear",
        "--set",
        f"linear.head={folder}",
    ]
    words += ["--limit", "2", "--max-new-tokens", "24", "--allow-noise", "--threads", "1"]
    code = app._run([*words, "--out", str(tmp_path / "run"), *more])
    return code, RunDir.open(tmp_path / "run")


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param((), marks=pytest.mark.smoke),
        ("--temperature", "1"),
        ("--temperature", "1", "--verify", "coupled"),
    ],
)
def test_on_a_trained_target_it_is_lossless_metered_and_accepted(
    tmp_path, linear, target, folder, rule
):
    code, found = run(tmp_path, folder, *rule)
    assert code == 0
    records = [each for each in found.records() if each.label == "linear"]
    assert len(records) >= 2
    for record in records:
        allowed = ("unchecked",) if record.guarantee == "exact_law" else ("identical", "near-tie")
        assert record.verdict.kind in allowed
        kinds = {kind.model: kind for kind in record.forwards.kinds if kind.model == "linear"}
        assert (kinds["linear"].role, tuple(kinds["linear"].layers)) == ("draft", (0, 1))
        assert record.draft_forwards == len(record.steps.levels)
    if not rule:
        steps = sum(len(record.steps.committed) for record in records)
        assert sum(sum(record.steps.committed) for record in records) / steps > 1.1
    held = found.manifest["heads"]["linear fitted"]
    assert held["weight_bytes"] == LEVELS * target.hidden_size**2 * 4

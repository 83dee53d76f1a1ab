"""The pages under docs: what they show runs."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

from specbench_cli import api, app, registry
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.checks.model import check_model
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import EnvironmentFault
from specbench_cli.models import resolve
from specbench_cli.store.run_dir import RunDir

DOCS = Path(__file__).parents[1] / "docs"
HEADS = (DOCS / "how-to/heads.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "tutorials/add-a-head.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The complete example of the tutorial, as a file."""
    (after,) = TUTORIAL.split("<!-- plugin with a head -->\n")[1:]
    file = tmp_path_factory.mktemp("plugin") / "bottleneck.py"
    file.write_text(re.match(r"```\w*\n(.*?)```", after, re.DOTALL)[1])
    assert registry.load_plugin(str(file)) == ["bottleneck"]
    return file


@pytest.fixture(scope="module")
def kind(plugin):
    (wanted,) = registry.build("bottleneck", {}).artifacts()
    return wanted.kind


@pytest.mark.parametrize("check", [check_bookkeeping, check_bounds, check_model])
def test_the_head_of_the_page_passes_the_audit(plugin, check):
    found = check(AuditSubject.from_method("bottleneck", registry.load("bottleneck")))
    assert found
    assert not [each for each in found if not each.passed]


def test_the_folder_of_the_page_is_what_is_saved(kind, tmp_path):
    target = load_decoder(resolve("embedded-1m").path, name="target")
    kind.random({"target": target}).save(tmp_path, target="embedded-1m")
    config = json.loads((tmp_path / "config.json").read_text())
    (shown,) = (block for block in re.findall(r"```json\n(.*?)```", HEADS, re.DOTALL))
    said = json.loads(shown)
    assert config.keys() == said.keys()
    assert config["sizes"] == said["sizes"]
    assert config["specbench"].keys() == said["specbench"].keys()


def test_the_load_of_the_page_reads_a_checkpoint_of_others(kind, tmp_path):
    code = next(block for block in re.findall(r"```python\n(.*?)```", HEADS, re.DOTALL)
                if block.startswith("@classmethod\ndef load"))  # fmt: skip
    names = {name: getattr(api, name) for name in ("EnvironmentFault", "Weights")}
    exec(code, names)  # noqa: S102
    target = load_decoder(resolve("embedded-1m").path, name="target")
    (tmp_path / "config.json").write_text("{}")
    save = pytest.importorskip("safetensors.torch").save_file
    save({f"heads.{k}.weight": torch.zeros(2, 2) for k in range(5)}, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=r"size mismatch|Missing key"):
        names["load"].__func__(kind, tmp_path, {"target": target})


@pytest.mark.smoke
def test_the_head_of_the_page_runs(plugin, kind, tmp_path, capsys):
    target = load_decoder(resolve("embedded-1m").path, name="target")
    kind.random({"target": target}).save(tmp_path / "head")
    words = f"run --plugin {plugin} --target embedded-1m --limit 1 --max-new-tokens 8 --threads 1"
    sets = f"--allow-noise --set bottleneck.head={tmp_path / 'head'} --out {tmp_path / 'run'}"
    assert app._run([*words.split(), *sets.split()]) == 0
    (record,) = (r for r in RunDir.open(tmp_path / "run").records() if r.label == "bottleneck")
    assert record.verdict.kind in ("identical", "near-tie")
    assert record.draft_forwards == len(record.steps.levels)


def test_a_run_without_the_heads_folder_says_what_to_type(plugin, capsys, tmp_path):
    words = f"run --plugin {plugin} --target embedded-1m --limit 1 --out {tmp_path / 'run'}"
    assert app._run(words.split()) == 2
    said = capsys.readouterr().err
    assert "no bottleneck head is known for embedded-1m" in said
    assert "--set METHOD.head=FOLDER" in said


def test_all_names_of_the_page_are_in_the_api():
    imported = re.findall(r"from specbench_cli\.api import \((.*?)\)", TUTORIAL, re.DOTALL)
    names = {name.strip() for block in imported for name in block.split(",") if name.strip()}
    names |= {"Artifact", "FeatureHead", "Head", "NORMED", "Levels", "Weights", "EnvironmentFault"}
    names |= {"MethodFault", "UsageError", "tree_of_choices", "tree_of_widths"}
    assert names <= set(api.__all__)


@pytest.mark.parametrize(
    ("section", "kind"),
    [("Class attributes", api.Method), ("Hooks", api.Method), ("Session", api.Session)],
)
def test_names_of_the_reference_of_hooks_exist(section, kind):
    page = (DOCS / "reference/hooks.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    cells = re.findall(r"^\| (`.*?) \| ", table, re.M)
    names = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    source = "".join(inspect.getsource(each) for each in kind.__mro__[:-1])
    assert len(names) > 5
    assert [each for each in names if not re.search(rf"\b{each}(\(| =|:)", source)] == []

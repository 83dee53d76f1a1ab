"""Tests of the code examples in docs/."""

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
    """Write the complete example of the tutorial to a file, and return its path."""
    (after,) = TUTORIAL.split("<!-- plugin with a head -->\n")[1:]
    file = tmp_path_factory.mktemp("plugin") / "bottleneck.py"
    file.write_text(re.match(r"```\w*\n(.*?)```", after, re.DOTALL)[1])
    assert registry.load_plugin(str(file)) == ["bottleneck"]
    return file


@pytest.fixture(scope="module")
def kind(plugin):
    (artifact,) = registry.build("bottleneck", {}).artifacts()
    return artifact.kind


@pytest.mark.parametrize("check", [check_bookkeeping, check_bounds, check_model])
def test_the_head_of_the_tutorial_passes_the_audit(plugin, check):
    findings = check(AuditSubject.from_method("bottleneck", registry.load("bottleneck")))
    assert findings
    assert not [each for each in findings if not each.passed]


def test_a_saved_head_has_the_config_of_the_page(kind, tmp_path):
    target = load_decoder(resolve("embedded-1m").path, name="target")
    kind.random({"target": target}).save(tmp_path, target="embedded-1m")
    config = json.loads((tmp_path / "config.json").read_text())
    (shown_text,) = (block for block in re.findall(r"```json\n(.*?)```", HEADS, re.DOTALL))
    shown_config = json.loads(shown_text)
    assert config.keys() == shown_config.keys()
    assert config["sizes"] == shown_config["sizes"]
    assert config["specbench"].keys() == shown_config["specbench"].keys()


def test_the_load_function_of_the_page_reads_a_foreign_checkpoint(kind, tmp_path):
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
def test_the_head_of_the_tutorial_runs(plugin, kind, tmp_path, capsys):
    target = load_decoder(resolve("embedded-1m").path, name="target")
    kind.random({"target": target}).save(tmp_path / "head")
    arguments = (
        f"run --plugin {plugin} --target embedded-1m --limit 1 --max-new-tokens 8 --threads 1"
    )
    more_arguments = (
        f"--allow-noise --set bottleneck.head={tmp_path / 'head'} --out {tmp_path / 'run'}"
    )
    assert app._run([*arguments.split(), *more_arguments.split()]) == 0
    (record,) = (r for r in RunDir.open(tmp_path / "run").records() if r.label == "bottleneck")
    assert record.verdict.kind in ("identical", "near-tie")
    assert record.draft_forwards == len(record.steps.levels)


def test_a_run_without_the_head_names_the_option_to_use(plugin, capsys, tmp_path):
    arguments = f"run --plugin {plugin} --target embedded-1m --limit 1 --out {tmp_path / 'run'}"
    assert app._run(arguments.split()) == 2
    stderr = capsys.readouterr().err
    assert "no bottleneck head is known for embedded-1m" in stderr
    assert "--set METHOD.head=FOLDER" in stderr


def test_all_names_of_the_tutorial_are_in_the_api():
    imported = re.findall(r"from specbench_cli\.api import \((.*?)\)", TUTORIAL, re.DOTALL)
    names = {name.strip() for block in imported for name in block.split(",") if name.strip()}
    names |= {"Artifact", "FeatureHead", "Head", "NORMED", "Levels", "Weights", "EnvironmentFault"}
    names |= {"MethodFault", "UsageError", "tree_of_choices", "tree_of_widths"}
    assert names <= set(api.__all__)


@pytest.mark.parametrize(
    ("section", "kind"),
    [("Class attributes", api.Method), ("Hooks", api.Method), ("Session", api.Session)],
)
def test_names_on_the_hooks_page_exist(section, kind):
    page = (DOCS / "reference/hooks.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    table_cells = re.findall(r"^\| (`.*?) \| ", table, re.M)
    names = {name for cell in table_cells for name in re.findall(r"`(\w+)", cell)}
    source = "".join(inspect.getsource(each) for each in kind.__mro__[:-1])
    assert len(names) > 5
    assert [each for each in names if not re.search(rf"\b{each}(\(| =|:)", source)] == []

"""Tests of the repository: pages, links, dependencies, the Docker image and the wheel."""

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
import yaml

from recipes import reference
from specbench_cli import __version__, registry
from specbench_cli.config.sources import OTHER_VARIABLES
from specbench_cli.errors import ExitCode

ROOT = Path(__file__).parents[1]
PACKAGES = ("specbench_cli", "methods", "datasets_cfg")
DATA_ONLY_CLASSES = ("PreTrainedTokenizerFast", "GenerationConfig")
"""Classes of transformers that load data only, and never run code of a checkpoint."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""README and the pages in docs/."""


def page_name(page: Path) -> str:
    """Return the path of a page from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def block_after(marker: str, page: str = README) -> str:
    """Return the one code block that follows a marker in a page."""
    (after,) = page.split(f"<!-- {marker} -->\n")[1:]
    return re.match(r"```\w*\n(.*?)```", after, re.DOTALL)[1]


def list_package_files() -> set[str]:
    """Return the paths of all files in the packages, without caches."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(("name", "text"), reference.pages().items())
def test_reference_pages_equal_the_generated_ones(name, text):
    """`python -m recipes.reference` writes these pages."""
    assert (ROOT / "docs/reference" / name).read_text(encoding="utf-8") == text


def test_the_reference_has_all_environment_variables():
    assert reference.VARIABLES.keys() == OTHER_VARIABLES


ARCHITECTURE = (ROOT / "docs/explanations/architecture.md").read_text(encoding="utf-8")
STATION = re.compile(r"^\| \d+ \| `(\S+\.py)` \| `(\S+)` \|", re.MULTILINE)


@pytest.mark.parametrize(("file", "function"), STATION.findall(ARCHITECTURE))
def test_each_station_of_the_architecture_page_is_a_function(file, function):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for name in function.split("."):
        tree = next(node for node in tree.body if getattr(node, "name", None) == name)
    assert isinstance(tree, ast.FunctionDef)


def test_an_option_passes_at_most_six_stations():
    (section,) = re.findall(r"^## An option, .*?(?=^## |\Z)", ARCHITECTURE, re.M | re.S)
    assert 1 < len(STATION.findall(section)) <= 6


def test_all_exit_codes_are_documented():
    codes = (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for line in re.findall(r"^\| ([\d, ]+) \|", codes, re.M)
                  for code in line.split(",")}  # fmt: skip
    assert documented == {int(code) for code in ExitCode}


def test_the_documented_layout_has_every_folder_of_modules():
    listed = set()
    for line in block_after("layout", ARCHITECTURE).splitlines():
        for name in re.findall(r"\S+/(?=\s|$)", line.split("   ")[0] + " "):
            folder, _, several = name.rstrip("/").partition("{")
            inside = several.rstrip("}").split(",") if several else [""]
            listed |= {(folder + each).rstrip("/") for each in inside}
    modules = {path.rpartition("/")[0] for path in list_package_files() if path.endswith(".py")}
    top = {"/".join(folder.split("/")[:2]) for folder in modules} - {"specbench_cli"}
    engine_folders = {folder for folder in modules if folder.startswith("specbench_cli/engine/")}
    one_each = ("datasets_cfg/", "methods/")  # a folder for each dataset, and for a method
    packages = {name for name in top if "/_" not in name and not name.startswith(one_each)}
    assert packages | engine_folders <= listed
    assert all((ROOT / folder).is_dir() for folder in listed)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_examples_in_the_docs_equal_tested_files(page):
    text = page.read_text(encoding="utf-8")
    for file, code in re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```", text, re.DOTALL):
        assert code == (ROOT / file).read_text(encoding="utf-8"), file


def test_readme_commands_are_one_line_each():
    assert "pip install -e . &&" in block_after("ci: run")
    assert "python -m pytest" in block_after("ci: test")
    assert (
        len(block_after("ci: run").splitlines()) == len(block_after("ci: test").splitlines()) == 1
    )


def test_readme_has_a_table_and_figures():
    assert "speedup" in block_after("table: the real output of that command")
    figures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert figures
    assert all((ROOT / figure).is_file() for figure in figures)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_local_links_have_targets(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        linked_path = page.parent / file if file else page
        assert linked_path.exists(), link
        assert not anchor or anchor in anchors(linked_path), link


def test_readme_links_to_every_page():
    assert not [page for page in PAGES if f"({page_name(page)})" not in README][1:]


def test_the_site_has_every_page_and_the_gallery():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"[\w/-]+\.md", str(config["nav"])))
    pages = {page_name(page).removeprefix("docs/") for page in PAGES[1:]}
    assert pages | {"index.md"} <= listed
    assert (ROOT / "docs/gallery.md").read_text(encoding="utf-8").count("<!-- gallery -->") == 1


def test_the_plugin_in_readme_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})
    code = block_after("plugin")
    (tmp_path / "repeat_last.py").write_text(code)
    assert registry.load_plugin(str(tmp_path / "repeat_last.py")) == ["repeat-last"]
    assert registry.build("repeat-last", {"times": 5}).params.times == 5


def test_no_code_of_a_checkpoint_is_trusted():
    """The `Auto...` classes run code of a checkpoint unless `trust_remote_code` is False."""
    files = [
        path for folder in ("specbench_cli", "methods") for path in (ROOT / folder).rglob("*.py")
    ]
    calls = [
        call
        for path in files
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and not (isinstance(call.func.value, ast.Name) and call.func.value.id in DATA_ONLY_CLASSES)
    ]
    trusting_calls = [
        ast.unparse(call)
        for call in calls
        if not any(
            k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in call.keywords
        )
    ]
    assert len(calls) >= 7
    assert not trusting_calls


def test_tokenizers_of_models_are_read_in_one_place():
    """Other code calls `read_tokenizer`, which turns errors in tokenizer files into one error."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("specbench_cli", "methods")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "from_pretrained"
        and "Tokenizer" in ast.unparse(call.func.value)
    }
    assert not found


def test_versions_agree():
    cited_version = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert cited_version == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"
    )


def test_imported_and_declared_dependencies_are_equal():
    """Compare the imported distributions with the dependencies in pyproject.toml.

    `pydantic_core` belongs to pydantic, triton comes with torch for CUDA, and an example imports
    pytest.
    """
    distribution_names = importlib.metadata.packages_distributions()
    imported = set()
    for path in (ROOT / name for name in list_package_files() if name.endswith(".py")):
        imported |= set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.M))
    imported -= {*sys.stdlib_module_names, *PACKAGES, "pydantic_core", "pytest", "triton"}
    distributions = {
        re.sub("_", "-", name.lower())
        for word in imported
        for name in distribution_names.get(word, ())
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert distributions == {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}


def test_ci_script_is_executable_and_valid():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)


def list_copied_paths() -> set[str]:
    """Return the files and folders that the Dockerfile copies from the repository."""
    lines = re.findall(r"^COPY (?!--)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    return {name for line in lines for name in line.split()}


def test_the_image_copies_only_what_a_wheel_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = {"pyproject.toml", "hatch_build.py", "README.md", *project["license-files"]}
    assert list_copied_paths() == {*files, *PACKAGES}
    assert all((ROOT / name).exists() for name in list_copied_paths())
    everything, *rest = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert everything == "*"
    assert {line[1:] for line in rest if line.startswith("!")} == list_copied_paths()


def test_the_image_runs_specbench_as_an_unprivileged_user():
    last = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]
    assert re.findall(r"^USER (\d+)$", last, re.M) == re.findall(r"--uid (\d+)", last) != ["0"]
    assert 'ENTRYPOINT ["specbench"]' in last


def test_pre_commit_hooks_are_the_linters_of_ci():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = config["repos"]
    ci = (ROOT / ".ci/run").read_text()
    for hook in local["hooks"]:
        program, *_ = hook["entry"].split(" --force")
        assert re.search(rf"^ *{re.escape(program)}", ci, re.M), hook["id"]
    test = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {each.partition("==")[0] for each in test["test"] if "==" in each}
    assert pinned == {"ruff", "mypy", "import-linter"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from the repository, and return the content of its files by name."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_contains_exactly_the_packages(wheel):
    files = {name for name in wheel if ".dist-info/" not in name}
    assert files == list_package_files()


def test_a_wheel_contains_data_files(wheel):
    assert "specbench_cli/py.typed" in wheel
    assert {"specbench_cli/models/aliases.yaml", "methods/papers.yaml"} <= wheel.keys()
    assert {"datasets_cfg/mini.yaml", "datasets_cfg/gsm8k.yaml"} <= wheel.keys()
    weights = [name for name in wheel if name.endswith(".safetensors")]
    assert {Path(name).parent.name for name in weights} >= {"embedded-7m", "embedded-1m"}
    assert not [name for name in wheel if name.endswith((".bin", ".pt", ".pkl", ".pyc"))]


def test_description_of_the_wheel_has_no_relative_link(wheel):
    text = wheel[f"specbench_cli-{__version__}.dist-info/METADATA"].decode()
    assert "# specbench" in text
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if "://" not in link] == []


def test_links_in_the_description_lead_to_the_tag():
    readme = "![a](docs/a.png) [b](docs/b.md#c) [d](https://e.org)"
    describe = runpy.run_path(str(ROOT / "hatch_build.py"))["description"]
    assert describe(readme, "https://f.org/g/h", "v1") == (
        "![a](https://f.org/g/h/raw/v1/docs/a.png) [b](https://f.org/g/h/blob/v1/docs/b.md#c)"
        " [d](https://e.org)"
    )
    assert describe(readme, "", "v1") == " b [d](https://e.org)"


def test_wheel_installs_both_commands_and_the_licence(wheel):
    info = f"specbench_cli-{__version__}.dist-info"
    points = wheel[f"{info}/entry_points.txt"].decode()
    assert "specbench = specbench_cli.__main__:main" in points
    assert "specbench-cli = specbench_cli.__main__:main" in points
    assert f"{info}/licenses/LICENSE" in wheel


def test_there_are_no_import_cycles():
    """The import contracts do not cover the folders inside the engine. This test covers all
    modules.
    """
    graph = grimp.build_graph("specbench_cli", "methods", "recipes", cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    imports["specbench_cli"] -= {"specbench_cli.python"}  # imported when a name is first used
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules

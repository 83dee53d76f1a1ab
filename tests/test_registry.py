"""Tests of the registry: its entries, names, aliases, parameters and plug-ins."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import methods
from specbench_cli import registry
from specbench_cli.api import Method
from specbench_cli.errors import UsageError
from specbench_cli.registry import built_in_methods, parse_entries

REPEATER = '''
from specbench_cli.api import Draft, Field, Method, MethodParams, Session


class Params(MethodParams):
    times: int = Field(3, ge=1, description="how often")


class RepeatLast(Method):
    """The draft is the last token, again and again."""

    Params = Params

    def propose(self, session: Session, limit: int) -> Draft:
        return session.chain(session.tokens()[-1:] * min(self.params.times, limit))
'''


@pytest.fixture(autouse=True)
def _forget_plugins(monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})


@pytest.fixture
def plugin(tmp_path):
    def write(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def find_method_classes() -> dict[str, type[Method]]:
    found = {}
    for module in pkgutil.iter_modules(methods.__path__):
        if module.name.startswith("_"):
            continue
        name = f"methods.{module.name}{'.method' * module.ispkg}"
        for member in vars(importlib.import_module(name)).values():
            is_defined_here = inspect.isclass(member) and member.__module__ == name
            is_method = is_defined_here and issubclass(member, Method)
            if is_method and not member.__name__.startswith("_"):
                found[member.name] = member
    return found


def test_the_registry_has_all_methods_on_disk():
    assert sorted(built_in_methods()) == sorted(find_method_classes())


@pytest.mark.parametrize("name", built_in_methods())
def test_an_entry_is_equal_to_its_class(name):
    entry, found = built_in_methods()[name], registry.load(name)
    assert entry.target == f"{found.__module__}:{found.__qualname__}"
    assert found.name == name
    assert entry.summary == inspect.getdoc(found).partition("\n")[0]
    assert set(entry.needs) == found.needs
    assert (entry.peer, entry.baseline) == (found.peer, found.baseline)
    assert (entry.family, entry.project) == (found.family, found.project)
    assert (entry.proposed_in, entry.builds_on) == (found.proposed_in, found.builds_on)
    assert set(entry.aliases) <= set(found.aliases)
    exact = found().guarantee("greedy") == "exact_tokens"
    assert entry.guarantee == (registry.LOSSLESS if exact else registry.LOSSY)


def test_a_computed_declaration_is_refused_with_its_line():
    text = 'class A(Method):\n    name: ClassVar[str] = "a"\n    family: ClassVar[str] = f()\n'
    with pytest.raises(ValueError, match=r"methods\.a:3: A\.family must be a literal"):
        parse_entries(text, "methods.a")


def test_a_class_inherits_declarations_except_name_and_aliases():
    text = (
        'class A(Method):\n    name: ClassVar[str] = "a"\n    aliases: ClassVar[Any] = ("b",)\n'
        '    family: ClassVar[str] = "x"\n    peer: ClassVar[bool] = True\n'
        'class C(A):\n    name: ClassVar[str] = "c"\n'
        'class Rule:\n    name: ClassVar[str] = "rule"\n'
    )
    found = parse_entries(text, "methods.a")
    assert found.keys() == {"a", "c"}
    assert (found["c"].peer, found["c"].family, found["c"].aliases) == (True, "x", ())


def test_reading_the_registry_does_not_import_torch():
    code = "import sys; from specbench_cli import registry"
    code += "; registry.built_in_methods(); registry.papers('sps')"
    code += "; assert not {'torch', 'methods.sps'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vanilla_comes_first():
    assert next(iter(registry.entries())) == "vanilla"


@pytest.mark.parametrize(
    ("alias", "canonical"),
    [
        ("ar", "vanilla"),
        ("autoregressive", "vanilla"),
        ("sd", "sps"),
        ("SPS ", "sps"),
        ("speculative", "sps"),
        ("prompt-lookup", "pld"),
        ("hf:assisted", "hf:assisted"),
    ],
)
def test_an_alias_resolves_to_the_canonical_name(alias, canonical):
    assert registry.resolve(alias) == canonical


def test_an_unknown_method_error_suggests_the_nearest_name():
    with pytest.raises(UsageError, match="no method 'spss'; did you mean 'sps'") as caught:
        registry.resolve("spss")
    assert caught.value.hint == "specbench list methods"


def test_an_unknown_method_error_without_a_near_name_lists_all():
    with pytest.raises(UsageError, match="there are vanilla, "):
        registry.resolve("quux")


def test_aliases_are_unique():
    aliases = [alias for entry in built_in_methods().values() for alias in entry.aliases]
    assert len({*aliases, *built_in_methods()}) == len(aliases) + len(built_in_methods())


def test_parameters_have_their_defaults():
    assert registry.build("sps", {}).params.length == 5


def test_an_unknown_parameter_error_suggests_the_nearest_name():
    with pytest.raises(
        UsageError, match=r"sps\.lenght is not known; did you mean 'length'"
    ) as caught:
        registry.build("sps", {"lenght": 7})
    assert caught.value.hint == "specbench list methods sps"


def test_parameter_out_of_bounds_names_value_and_bound():
    with pytest.raises(UsageError, match=r"sps\.length must be at least 1, got 0"):
        registry.build("sps", {"length": 0})


def test_built_method_has_the_parameters_passed():
    assert registry.build("sps", {"length": 7}).params.length == 7


def test_plugin_is_named_after_its_class(plugin):
    assert registry.load_plugin(plugin(REPEATER)) == ["repeat-last"]
    entry = registry.entries()["repeat-last"]
    assert entry.summary == "The draft is the last token, again and again."
    assert entry.origin == "mine.py"
    assert registry.build("repeat-last", {"times": 2}).params.times == 2


def test_a_plugin_may_declare_its_name(plugin):
    plugin_text = REPEATER.replace("    Params = Params", '    name = "echo"\n    Params = Params')
    assert registry.load_plugin(plugin(plugin_text)) == ["echo"]
    assert registry.load("echo").__name__ == "RepeatLast"


def test_a_plugin_may_be_loaded_twice(plugin):
    path = plugin(REPEATER)
    assert registry.load_plugin(path) == registry.load_plugin(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import specbench_cli\ndef f(:\n    pass\n", r"mine\.py:2: SyntaxError"),
        (
            "x = 1\n\nraise RuntimeError('broken [red]')\n",
            r"mine\.py:3: RuntimeError: broken \[red\]",
        ),
        ("import no_such_module_anywhere\n", r"mine\.py:1: ModuleNotFoundError"),
        ("import sys\nsys.exit(0)\n", r"mine\.py:2: SystemExit"),
        ("x = 1\n", "defines no method"),
        (REPEATER.replace("class RepeatLast", "class Sps"), "the name 'sps' is taken by specbench"),
    ],
)
def test_broken_plugin_is_one_clear_error(plugin, text, message):
    with pytest.raises(UsageError, match=message):
        registry.load_plugin(plugin(text))


def test_a_missing_plugin_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"the plug-in file .*gone\.py"):
        registry.load_plugin(str(tmp_path / "gone.py"))


def test_private_bases_of_a_plugin_are_not_methods(plugin):
    text = REPEATER.replace("class RepeatLast(Method)", "class _Base(Method)")
    text += "\n\nclass Twice(_Base):\n    '''Twice.'''\n"
    assert registry.load_plugin(plugin(text)) == ["twice"]


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return a function that installs a distribution with one `specbench.methods` entry point."""

    def install(module_text: str, target: str = "their_methods:Theirs", name: str = "theirs"):
        site = tmp_path / "site"
        info = site / "their_package-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[specbench.methods]\n{name} = {target}\n")
        (site / "their_methods.py").write_text(module_text)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "their_methods", raising=False)
        registry._entry_point_methods.cache_clear()
        return Path(site)

    yield install
    registry._entry_point_methods.cache_clear()


def test_entry_point_is_listed_without_being_imported(distribution):
    distribution("raise RuntimeError('imported')\n")
    assert registry.entries()["theirs"].origin == "their-package"


def test_entry_point_loads_on_demand(distribution):
    distribution(REPEATER.replace("RepeatLast", "Theirs"))
    assert registry.load("theirs").__name__ == "Theirs"


def test_entry_point_that_does_not_import_names_its_distribution(distribution):
    distribution("raise RuntimeError('their bug')\n")
    with pytest.raises(
        UsageError, match=r"method 'theirs' of their-package does not import.*their bug"
    ):
        registry.load("theirs")


def test_an_entry_point_cannot_replace_a_built_in_method(distribution):
    distribution("", name="sps")
    assert registry.entries()["sps"].origin == "specbench"

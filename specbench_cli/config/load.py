"""Configuration of a run: merges all sources into one RunConfig and tracks each value's source.

Precedence: flag > --set > SPECBENCH_* > --config file > ./specbench.yaml > profile > defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from math import isfinite
from operator import or_
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from specbench_cli.config import permission, plugin_file, problems, sweep
from specbench_cli.config.problems import Place, usage_error
from specbench_cli.config.profile import from_profile
from specbench_cli.config.run import DEFAULT_METHODS, MethodChoice, RunConfig
from specbench_cli.config.sources import (
    ANSWERED,
    BLOCKS,
    Given,
    Sourced,
    from_env,
    from_file,
)
from specbench_cli.errors import UsageError

DEFAULT_METHODS_TOGETHER = ("vanilla", "sps", "pld")
"""Default methods that support batching, a grammar and contrastive decoding."""

SHORT_RUN = {"limit": 12, "max_new_tokens": 64}
"""Limits of the default run: 2 prompts per family, 64 tokens."""

CIRCUMSTANCES = frozenset(
    (
        "batch prefill_chunk load memory_budget grammar contrast acceptance seed threads device"
        " devices dtype graphs allow_noise isolation executor timeout_per_prompt"
    ).split()
)
"""Settings that do not turn the default run into a full run."""


class Methods(Protocol):
    """Registry functions that `load` needs."""

    def resolve(self, name: str, /) -> str:
        """Return the canonical name of a method.

        Raises:
            UsageError: The method is unknown.
        """

    def load_plugin(self, path: str, /) -> list[str]:
        """Register the methods of a file and return their names."""

    def lossless(self) -> list[str]:
        """Return the registered methods that guarantee vanilla's output."""


def load(
    asked: Given,
    file: Path | None,
    *,
    methods: Methods,
    env: Mapping[str, str],
    folder: Path,
    vet: Callable[[str], None] | None = None,
    check: permission.Check = permission.check,
) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration of a run, and the source of each value.

    Args:
        asked: values from the command line or from a call.
        file: the --config file.
        methods: the registry.
        env: environment variables.
        folder: folder to search for specbench.yaml.
        vet: inspects a plug-in before this process imports it. Not called if `isolation` is "none".
        check: raises UsageError for programs in `specbench.yaml` that the user did not permit.

    Raises:
        UsageError: a value, key, method or file is invalid.
    """
    plugin_file.release()
    own = folder / "specbench.yaml"
    files = [path for path in (own if own.is_file() else None, file) if path]
    layers = [*map(from_file, files), from_env(env), asked]

    # Load plug-ins first, since any layer may name their methods.
    first = reduce(or_, layers).fields
    plugins = _split(first.get("plugins", Sourced([], "")).value)
    # The file in the working folder is read automatically, so another person may have written it.
    found = layers[0] if own.is_file() and file != own else Given()
    foreign = partial(_is_of, found)
    if isinstance(plugins, list):
        wanted = permission.plugins(map(str, plugins))
        if foreign("plugins", first):
            check(wanted, str(own))
        else:
            permission.permit(wanted)
    if foreign("uncontained", first) and permission.is_given(first["uncontained"].value):
        check([permission.uncontained(own, own.read_text(encoding="utf-8"))], str(own))
    if vet is not None and first.get("isolation", Sourced("", "")).value != "none":
        for path in plugins:
            vet(str(path))
    plugged = [name for path in plugins for name in methods.load_plugin(str(path))]

    said = reduce(or_, (_canonical(layer, methods) for layer in layers))
    named = [*dict.fromkeys([*plugged, *(name for name, _ in said.swept)])]
    given = _profile(said, named, methods) | said
    if given.fields.keys() <= CIRCUMSTANCES and not given.params and not given.swept:
        short = {key: Sourced(value, "default run") for key, value in SHORT_RUN.items()}
        given = Given(short) | given
    held = ("load", "memory_budget", "grammar", "contrast")
    together = not given.fields.keys().isdisjoint(held)
    together = together or str(given.fields.get("batch", Sourced(1, "")).value) != "1"
    usual = DEFAULT_METHODS_TOGETHER if together else DEFAULT_METHODS
    given.fields.setdefault("methods", Sourced(named or list(usual), "default"))
    config, sources = _validated(given, methods)
    if "methods" in found.fields or found.params or found.swept:
        check(permission.keys(config), str(own))
    return config, sources


def _is_of(source: Given, name: str, fields: Mapping[str, Sourced]) -> bool:
    """Return True if the value of a field comes from a source."""
    return name in fields and fields[name] is source.fields.get(name)


def _profile(given: Given, asked: Sequence[str], methods: Methods) -> Given:
    """Return the settings of the chosen profile. `asked` methods are measured in addition to its
    own."""
    name = given.fields.get("profile", Sourced(None, "")).value
    if name is None:
        return Given()
    profile = _canonical(from_profile(str(name), methods.lossless()), methods)
    listed, source = profile.fields["methods"]
    profile.fields["methods"] = Sourced([*listed, *asked], source)
    return profile


def _canonical(given: Given, methods: Methods) -> Given:
    """Return the same settings with the canonical method name for every parameter."""
    params, swept = (
        {(methods.resolve(name), key): got for (name, key), got in block.items()}
        for block in (given.params, given.swept)
    )
    return Given(given.fields, params, swept)


def _validated(given: Given, methods: Methods) -> tuple[RunConfig, dict[str, str]]:
    values = {key: got.value for key, got in given.fields.items()}
    for key in values.keys() & {"tasks", "targets", "drafts", "category", "plugins"}:
        values[key] = _split(values[key])
    values["methods"] = _rows(values["methods"], given, methods)
    if values.get("executor", "local") != "local":
        values["methods"] = _with_aa(values["methods"])
    values["set"], values["sweep"] = _by_method(given.params), _by_method(given.swept)
    sources = {key: got.source for key, got in given.fields.items()}
    for key, value in values.items():
        _plain(value, (key,), sources)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as found:
        raise usage_error(
            found,
            subject=lambda place: _subject(place, sources),
            keys=lambda place: list((MethodChoice if len(place) > 1 else RunConfig).model_fields),
            hint="specbench run --help",
        ) from found
    defaults = {key: "default" for key in RunConfig.model_fields if key not in BLOCKS}
    of_params = {
        f"{block}.{name}.{key}": got.source
        for block, params in (("set", given.params), ("sweep", given.swept))
        for (name, key), got in params.items()
    }
    return config, {**defaults, **sources, **of_params}


def _plain(value: Any, place: Place, sources: Mapping[str, str]) -> None:
    """Raise UsageError unless JSON can store a value, since a run must store its settings to be
    resumed."""
    if isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in entries:
            if isinstance(key, str) or not isinstance(value, dict):
                _plain(each, (*place, key), sources)
            else:
                raise UsageError(f"{_subject(place, sources)}: {key!r} is no name")
        return
    usual = value is None or isinstance(value, str | int | float)
    endless = isinstance(value, float) and not isfinite(value)
    if not usual or (endless and len(place) > 1):  # the checks of fields have clearer messages
        raise UsageError(
            f"{_subject(place, sources)} must be a text, a finite number, true, false or null,"
            f" got {problems.shown(repr(value))}"
        )
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as fault:
            raise UsageError(
                f"{_subject(place, sources)} holds half a character: {problems.shown(repr(value))}"
            ) from fault
        if not _is_of_params(place):
            problems.check_one_line(_subject(place, sources), value)


def _is_of_params(place: Place) -> bool:
    """Return True if a value is a method parameter. Those may have several lines."""
    return place[0] in BLOCKS or "params" in place


def _rows(listed: Any, given: Given, methods: Methods) -> list[dict[str, Any]] | Any:
    """Return the methods to measure, by canonical name: vanilla first, without duplicates.

    A method's own `params` (config file) override a `set` block. --set on the command line, or
    `set` of a call, overrides both. A swept method appears once per combination, unless the run is
    tuned, since tuning chooses one. The model rejects invalid entries.
    """
    flagged = {key: got for key, got in given.params.items() if got.source in ANSWERED}
    block, final = _by_method(given.params), _by_method(flagged)
    rows: list[Any] = []
    for entry in ["vanilla", *_split(listed)]:
        row = {"name": entry} if isinstance(entry, str) else entry
        if isinstance(row, dict) and isinstance(row.get("name"), str):
            name = methods.resolve(row["name"])
            own = row.get("params") or {}
            if isinstance(own, dict):
                own = {**block.get(name, {}), **own, **final.get(name, {})}
            row = {**row, "name": name, "params": own}
        if row not in rows:
            rows.append(row)
    names = [str(row["name"]) for row in rows if isinstance(row, dict) and "name" in row]
    for asked in (flagged, given.swept):
        for (name, key), got in asked.items():
            if name not in names:
                raise UsageError(
                    f"{got.source} {name}.{key} is for a method that is not"
                    f" run ({problems.listed(names)})",
                    f"add --method {name}",
                )
    for name, key in flagged.keys() & given.swept.keys():
        raise UsageError(
            f"{name}.{key} is both set ({flagged[name, key].source})"
            f" and swept ({given.swept[name, key].source})",
            "drop one of the two",
        )
    tuned = given.fields.get("tune", Sourced(None, "")).value is not None
    return rows if tuned or not given.swept else _swept(rows, _by_method(given.swept))


def _with_aa(rows: Sequence[Any]) -> list[Any]:
    """Return the methods with a second vanilla.

    The difference between the two vanillas shows the noise of devices that are not monitored.
    """
    named = [row.get("name") for row in rows if isinstance(row, dict)]
    second = {"name": "vanilla", "label": "vanilla-2", "params": {}}
    return [*rows, second] if named.count("vanilla") == 1 else [*rows]


def _swept(rows: Sequence[Any], swept: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[Any]:
    """Return the methods, with swept methods once per combination of values."""

    def own(row: Any) -> Mapping[str, Sequence[Any]]:
        return swept.get(str(row.get("name")), {}) if isinstance(row, dict) else {}

    count = sum(sweep.size(own(row)) for row in rows)
    if count > sweep.MAX_ROWS:
        sizes = (f"{name} {sweep.size(params)}" for name, params in swept.items())
        raise UsageError(
            f"the sweep makes {count} rows ({', '.join(sizes)}), and a run takes"
            f" {sweep.MAX_ROWS} at most",
            "sweep over fewer values, or in several runs",
        )
    return [each for row in rows for each in (sweep.rows(row, own(row)) if own(row) else [row])]


def _by_method(params: Mapping[tuple[str, str], Sourced]) -> dict[str, dict[str, Any]]:
    """Return method -> parameter -> value."""
    block: dict[str, dict[str, Any]] = {}
    for (name, key), got in params.items():
        block.setdefault(name, {})[key] = got.value
    return block


def _split(listed: Any) -> list[Any]:
    """Return a list. Texts are split at commas, unless they are an existing path."""
    entries = listed if isinstance(listed, (list, tuple)) else [listed]
    words: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and not _exists(entry):
            words += [word.strip() for word in entry.split(",") if word.strip()]
        else:
            words.append(entry)
    return words


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # the name is too long for a file
        return False


def _subject(place: Place, sources: Mapping[str, str]) -> str:
    """Return a place for messages: `--limit`, `SPECBENCH_LIMIT`, `specbench.yaml:3: limit`."""
    if not place:
        return "the configuration"
    source = sources.get(str(place[0]), "default")
    keys = [str(part) for part in place if not isinstance(part, int)]
    if source.startswith(("--", "SPECBENCH_")):
        return ".".join([source, *keys[1:]])
    return f"{source}: {'.'.join(keys)}"

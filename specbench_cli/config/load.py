"""Configuration of a run: merge the settings of all sources, and store the source of each value.

Precedence: command line (options and --set), environment, --config file, ./specbench.yaml,
profile, default.
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
    EXPLICIT_SOURCES,
    PARAM_FIELDS,
    SettingsLayer,
    SourcedValue,
    from_env,
    from_file,
)
from specbench_cli.errors import UsageError

DEFAULT_BATCH_METHODS = ("vanilla", "sps", "pld")
"""Default methods of runs with batching, load, a grammar or contrastive decoding."""

SHORT_RUN = {"limit": 12, "max_new_tokens": 64}
"""Limits of the default run: 2 questions per task family, 64 tokens per output."""

NEUTRAL_SETTINGS = frozenset(
    (
        "batch prefill_chunk load memory_budget grammar contrast acceptance seed threads device"
        " devices dtype graphs allow_noise isolation executor timeout_per_prompt"
    ).split()
)
"""Settings that keep the limits of the default run. Any other setting removes them."""


class MethodRegistry(Protocol):
    """The functions of the module `registry` that `load` calls."""

    def resolve(self, name: str, /) -> str:
        """Return the canonical name of a method.

        Raises:
            UsageError: The method is unknown.
        """

    def load_plugin(self, path: str, /) -> list[str]:
        """Register the methods in a plug-in file and return their names."""

    def lossless_methods(self) -> list[str]:
        """Return the registered methods that guarantee vanilla's output."""


def load(
    explicit: SettingsLayer,
    file: Path | None,
    *,
    methods: MethodRegistry,
    env: Mapping[str, str],
    folder: Path,
    vet: Callable[[str], None] | None = None,
    check: permission.Check = permission.check,
) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration of a run, and where each value comes from.

    Args:
        explicit: settings from the command line or from a Python call.
        file: the config file that the user named with `--config`.
        methods: the method registry.
        env: environment variables.
        folder: folder in which to search for specbench.yaml.
        vet: function that imports a plug-in in another process and raises UsageError if that fails.
            It is not called if the setting `isolation` is "none".
        check: function that raises UsageError for plug-ins in `specbench.yaml` that the user did
            not permit.

    Raises:
        UsageError: a value, key, method or file is invalid.
    """
    plugin_file.unpin_all()
    local_file = folder / "specbench.yaml"
    files = [path for path in (local_file if local_file.is_file() else None, file) if path]
    layers = [*map(from_file, files), from_env(env), explicit]

    # Load plug-ins first, because any source of settings may contain parameters of their methods.
    merged = reduce(or_, layers).fields
    plugins = _split(merged.get("plugins", SourcedValue([], "")).value)
    # specbench.yaml is read automatically, and another person may have written it. So its plug-ins
    # need the user's permission.
    local_layer = layers[0] if local_file.is_file() and file != local_file else SettingsLayer()
    is_local = partial(_comes_from, local_layer)
    if isinstance(plugins, list):
        requests = permission.plugin_requests(map(str, plugins))
        if is_local("plugins", merged):
            check(requests, str(local_file))
        else:
            permission.permit(requests)
    if is_local("uncontained", merged) and permission.is_enabled(merged["uncontained"].value):
        check(
            [permission.uncontained_request(local_file, local_file.read_text(encoding="utf-8"))],
            str(local_file),
        )
    if vet is not None and merged.get("isolation", SourcedValue("", "")).value != "none":
        for path in plugins:
            vet(str(path))
    plugin_methods = [name for path in plugins for name in methods.load_plugin(str(path))]

    chosen = reduce(or_, (_use_canonical_names(layer, methods) for layer in layers))
    added_methods = [*dict.fromkeys([*plugin_methods, *(name for name, _ in chosen.sweeps)])]
    settings = _load_profile(chosen, added_methods, methods) | chosen
    if settings.fields.keys() <= NEUTRAL_SETTINGS and not settings.params and not settings.sweeps:
        short_run = {key: SourcedValue(value, "default run") for key, value in SHORT_RUN.items()}
        settings = SettingsLayer(short_run) | settings
    batch_settings = ("load", "memory_budget", "grammar", "contrast")
    is_batched = not settings.fields.keys().isdisjoint(batch_settings)
    is_batched = is_batched or str(settings.fields.get("batch", SourcedValue(1, "")).value) != "1"
    default_methods = DEFAULT_BATCH_METHODS if is_batched else DEFAULT_METHODS
    settings.fields.setdefault(
        "methods", SourcedValue(added_methods or list(default_methods), "default")
    )
    config, sources = _validate(settings, methods)
    if "methods" in local_layer.fields or local_layer.params or local_layer.sweeps:
        check(permission.server_requests(config), str(local_file))
    return config, sources


def _comes_from(source: SettingsLayer, name: str, fields: Mapping[str, SourcedValue]) -> bool:
    """Return True if the final value of a setting comes from this source."""
    return name in fields and fields[name] is source.fields.get(name)


def _load_profile(
    settings: SettingsLayer, added_methods: Sequence[str], methods: MethodRegistry
) -> SettingsLayer:
    """Return the settings of the chosen profile, or empty settings if no profile is chosen.

    Args:
        settings: Settings of all sources other than the profile.
        added_methods: Methods to measure in addition to those of the profile.
    """
    name = settings.fields.get("profile", SourcedValue(None, "")).value
    if name is None:
        return SettingsLayer()
    profile = _use_canonical_names(from_profile(str(name), methods.lossless_methods()), methods)
    listed, source = profile.fields["methods"]
    profile.fields["methods"] = SourcedValue([*listed, *added_methods], source)
    return profile


def _use_canonical_names(layer: SettingsLayer, methods: MethodRegistry) -> SettingsLayer:
    """Return settings whose method parameters use canonical method names instead of aliases."""
    params, swept = (
        {(methods.resolve(name), key): got for (name, key), got in block.items()}
        for block in (layer.params, layer.sweeps)
    )
    return SettingsLayer(layer.fields, params, swept)


def _validate(settings: SettingsLayer, methods: MethodRegistry) -> tuple[RunConfig, dict[str, str]]:
    values = {key: got.value for key, got in settings.fields.items()}
    for key in values.keys() & {"tasks", "targets", "drafts", "category", "plugins"}:
        values[key] = _split(values[key])
    values["methods"] = _make_method_rows(values["methods"], settings, methods)
    if values.get("executor", "local") != "local":
        values["methods"] = _add_second_vanilla(values["methods"])
    values["set"], values["sweep"] = _by_method(settings.params), _by_method(settings.sweeps)
    sources = {key: got.source for key, got in settings.fields.items()}
    for key, value in values.items():
        _check_storable(value, (key,), sources)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as found:
        raise usage_error(
            found,
            subject=lambda place: _describe_place(place, sources),
            keys=lambda place: list((MethodChoice if len(place) > 1 else RunConfig).model_fields),
            hint="specbench run --help",
        ) from found
    defaults = {key: "default" for key in RunConfig.model_fields if key not in PARAM_FIELDS}
    of_params = {
        f"{block}.{name}.{key}": got.source
        for block, params in (("set", settings.params), ("sweep", settings.sweeps))
        for (name, key), got in params.items()
    }
    return config, {**defaults, **sources, **of_params}


def _check_storable(value: Any, place: Place, sources: Mapping[str, str]) -> None:
    """Raise UsageError if JSON cannot store a value. A run stores its settings as JSON.

    Args:
        place: Path to the value inside the settings, for the error message.
        sources: Where each setting comes from, for the error message.
    """
    if isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in entries:
            if isinstance(key, str) or not isinstance(value, dict):
                _check_storable(each, (*place, key), sources)
            else:
                raise UsageError(f"{_describe_place(place, sources)}: {key!r} is not a name")
        return
    usual = value is None or isinstance(value, str | int | float)
    endless = isinstance(value, float) and not isfinite(value)
    if not usual or (
        endless and len(place) > 1
    ):  # RunConfig rejects top-level numbers with clearer messages
        raise UsageError(
            f"{_describe_place(place, sources)} must be a text, a finite number, true, false or"
            f" null, got {problems.shorten(repr(value))}"
        )
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as fault:
            raise UsageError(
                f"{_describe_place(place, sources)} contains half a character:"
                f" {problems.shorten(repr(value))}"
            ) from fault
        if not _is_parameter(place):
            problems.check_one_line(_describe_place(place, sources), value)


def _is_parameter(place: Place) -> bool:
    """Return True if this is the path of a method parameter. Only these may have several lines."""
    return place[0] in PARAM_FIELDS or "params" in place


def _make_method_rows(
    entries: Any, settings: SettingsLayer, methods: MethodRegistry
) -> list[dict[str, Any]] | Any:
    """Return the methods to measure with their parameters. Vanilla is first; duplicates are
    removed.

    In a config file, the `params` of a method override the key `set`. The option --set, or the
    argument `set` of a Python call, overrides both. A method with a sweep appears once per
    combination of swept values. If the run is tuned, it appears once, because tuning selects one
    combination. Invalid entries are returned unchanged, because RunConfig rejects them later.
    """
    explicit = {key: got for key, got in settings.params.items() if got.source in EXPLICIT_SOURCES}
    block, final = _by_method(settings.params), _by_method(explicit)
    rows: list[Any] = []
    for entry in ["vanilla", *_split(entries)]:
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
    for params in (explicit, settings.sweeps):
        for (name, key), got in params.items():
            if name not in names:
                raise UsageError(
                    f"{got.source} {name}.{key} names a method that is not"
                    f" measured ({problems.join_names(names)})",
                    f"add --method {name}",
                )
    for name, key in explicit.keys() & settings.sweeps.keys():
        raise UsageError(
            f"{name}.{key} is both set ({explicit[name, key].source})"
            f" and swept ({settings.sweeps[name, key].source})",
            "omit one of them",
        )
    tuned = settings.fields.get("tune", SourcedValue(None, "")).value is not None
    return (
        rows if tuned or not settings.sweeps else _expand_sweep(rows, _by_method(settings.sweeps))
    )


def _add_second_vanilla(rows: Sequence[Any]) -> list[Any]:
    """Return the methods with a second vanilla added, for an A/A test.

    Both vanilla methods do the same work, so any difference between their times is noise. A cluster
    needs this test, because specbench does not monitor the load of the cluster's other machines.
    """
    named = [row.get("name") for row in rows if isinstance(row, dict)]
    second = {"name": "vanilla", "label": "vanilla-2", "params": {}}
    return [*rows, second] if named.count("vanilla") == 1 else [*rows]


def _expand_sweep(
    rows: Sequence[Any], swept: Mapping[str, Mapping[str, Sequence[Any]]]
) -> list[Any]:
    """Return the methods. A method with swept parameters is repeated for each combination of
    values.
    """

    def get_sweep(row: Any) -> Mapping[str, Sequence[Any]]:
        return swept.get(str(row.get("name")), {}) if isinstance(row, dict) else {}

    count = sum(sweep.count_combinations(get_sweep(row)) for row in rows)
    if count > sweep.MAX_ROWS:
        sizes = (f"{name} {sweep.count_combinations(params)}" for name, params in swept.items())
        raise UsageError(
            f"the sweep has {count} combinations ({', '.join(sizes)}), at most {sweep.MAX_ROWS} are"
            " allowed",
            "sweep over fewer values, or in several runs",
        )
    return [
        each
        for row in rows
        for each in (sweep.expand_method(row, get_sweep(row)) if get_sweep(row) else [row])
    ]


def _by_method(params: Mapping[tuple[str, str], SourcedValue]) -> dict[str, dict[str, Any]]:
    """Return parameters as nested dictionaries: method -> parameter -> value."""
    block: dict[str, dict[str, Any]] = {}
    for (name, key), got in params.items():
        block.setdefault(name, {})[key] = got.value
    return block


def _split(value: Any) -> list[Any]:
    """Return a value as a list. A text is split at commas, unless it is the path of an existing
    file.
    """
    entries = value if isinstance(value, (list, tuple)) else [value]
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


def _describe_place(place: Place, sources: Mapping[str, str]) -> str:
    """Return how messages name a setting: by its option, variable, or line in a file.

    Examples: `--limit`, `SPECBENCH_LIMIT`, `specbench.yaml:3: limit`.
    """
    if not place:
        return "the configuration"
    source = sources.get(str(place[0]), "default")
    keys = [str(part) for part in place if not isinstance(part, int)]
    if source.startswith(("--", "SPECBENCH_")):
        return ".".join([source, *keys[1:]])
    return f"{source}: {'.'.join(keys)}"

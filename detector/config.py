"""The configuration: one YAML file into the dataclasses of `schema`, checked before anything starts.

No torch and no cv2 here: a laptop without them checks a configuration before it travels. What is wrong
is said in one sentence that names the key, the place, and the nearest key or an example.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from detector.hub import PREFIX, HubError, HubReference
from detector.models.specs import find_spec
from detector.schema import (
    LIMITS,
    SECTIONS,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    RuntimeConfig,
    SolverConfig,
    option_names,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "RuntimeConfig",
    "SolverConfig",
    "find_config",
    "list_configs",
    "load_config",
    "option_names",
    "packed_configs_dir",
    "referenced_environment",
]

SUFFIX: Final = ".yaml"
_CALLBACK: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_ENVIRONMENT_NAME: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class ConfigError(ValueError):
    """The configuration is wrong. `str(error)` is one sentence: what, where, and what to write."""


_NOTHING: Final = frozenset({"null", "none", "~", ""})  # what an override may write for no value
_EXAMPLES: Final[dict[type | str, str]] = {
    int: "8",
    float: "0.0002",
    bool: "true",
    str: "data/coins",  # a path, but for
    "model.backbone_name": "hgnetv2_n",
    "runtime.callbacks": "[my_module:my_function]",
}
_STRIDE: Final = 32  # the coarsest feature map: sides must be a multiple


def load_config(
    name_or_path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    search: str | os.PathLike[str] | None = None,
) -> Config:
    """Read a configuration, apply `section.key=value` overrides, expand `${NAME}`, check everything.

    `search` is the project folder (default: the current one). A variable is looked up only for a
    value that no override replaced, so a name that is not set here does no harm where it is not used.

    Raises:
        ConfigError: for an unknown file, key or environment variable, a wrong type or value.
    """
    path = find_config(name_or_path, search)
    values = _merged(path, overrides)
    expanded = {
        key: (_expand(value, key, where, environ), where) for key, (value, where) in values.items()
    }
    sections = {}
    hints = {section: typing.get_type_hints(kind) for section, kind in SECTIONS.items()}
    for section, kind in SECTIONS.items():
        given = {}
        for key, (value, where) in expanded.items():
            owner, _, item = key.partition(".")
            if owner == section:
                given[item] = _convert(value, hints[section][item], key, where)
        sections[section] = kind(**given)
    config = Config(**sections, source=str(path))
    _check_values(config, {key: where for key, (_, where) in expanded.items()})
    return config


def referenced_environment(
    name_or_path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    search: str | os.PathLike[str] | None = None,
) -> tuple[str, ...]:
    """Return the names that stand as `${NAME}` in values left after the overrides, sorted."""
    values = _merged(find_config(name_or_path, search), overrides)
    names = {
        name
        for value, _ in values.values()
        for text in _strings(value)
        for name in _ENVIRONMENT_NAME.findall(text)
    }
    return tuple(sorted(names))


def packed_configs_dir() -> Path:
    """Return the folder of the configurations that come with the package."""
    here = Path(__file__).resolve().parent
    packed = here / "_configs"  # in a wheel
    return packed if packed.is_dir() else here.parent / "configs"  # in a checkout


def find_config(
    name: str | os.PathLike[str], project_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Find a file by path or name (`coins/hgnetv2_n`): in the project first, then in the package.

    Raises:
        ConfigError: none there; lists the nearest names.
    """
    text = os.fspath(name)
    project = Path(project_dir or ".")
    for base in (project, project / "configs", packed_configs_dir()):
        for candidate in _spellings(text):
            path = base / candidate
            with contextlib.suppress(OSError):  # a name too long for the system
                if path.is_file():
                    return path
    known = list_configs(project)
    short = text.removeprefix("configs/").removesuffix(SUFFIX)
    near = difflib.get_close_matches(short, known, n=3, cutoff=0.4) or list(known[:6])
    raise ConfigError(
        f"There is no configuration {text!r} in {project.resolve()} or in the package; "
        f"nearest: {', '.join(near) or 'none at all'}."
    )


def list_configs(project_dir: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Return the names that `find_config` knows, such as `coins/hgnetv2_n`, sorted."""
    names = set()
    for base in (Path(project_dir or ".") / "configs", packed_configs_dir()):
        for path in base.rglob(f"*{SUFFIX}"):
            names.add(path.relative_to(base).with_suffix("").as_posix())
    return tuple(sorted(names))


def _spellings(text: str) -> Iterator[str]:
    stems = [text]
    if text.startswith("configs/"):
        stems.append(text.removeprefix("configs/"))
    for stem in stems:
        yield stem
        if not stem.endswith((SUFFIX, ".yml")):
            yield stem + SUFFIX


def _merged(path: Path, overrides: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Return `{section.key: (raw value, where it was written)}`; the last override wins."""
    values = dict(_read_file(path))
    for override in overrides:
        key, sign, text = override.partition("=")
        key = key.strip()
        if not sign or not key:
            raise ConfigError(
                f"{override!r} is not an override; write section.key=value, such as solver.epochs=5."
            )
        where = f"--set {override}"
        _check_key(key, where)
        values[key] = (_Raw(text.strip()), where)
    return values


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice: the second would silently replace the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose the section and look at its keys, before merges add to them."""
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} stands twice in one section", node.start_mark
                )
        return node


def _read_file(path: Path) -> Iterator[tuple[str, tuple[Any, str]]]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {detail}.") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path} must hold the sections {', '.join(SECTIONS)}.")
    for section, entries in (tree or {}).items():
        if section not in SECTIONS:
            raise ConfigError(
                f"Unknown section {section!r} in {path}; {_nearest(str(section), SECTIONS)}."
            )
        if not isinstance(entries, dict | None):
            raise ConfigError(f"Section {section!r} in {path} must hold `key: value` lines.")
        for item, value in (entries or {}).items():
            key = f"{section}.{item}"
            _check_key(key, str(path))
            yield key, (value, str(path))


def _check_key(key: str, where: str) -> None:
    known = option_names()
    if key in known:
        return
    section, _, item = key.partition(".")
    inside = [name for name in known if name.startswith(f"{section}.")]
    homes = [name for name in known if name.endswith(f".{item or key}")]
    if homes:
        hint = f"did you mean {homes[0]!r}?"
    elif inside and item:
        hint = _nearest(key, inside)
    else:
        hint = _nearest(key, known)
    raise ConfigError(f"Unknown key {key!r} in {where}; {hint.rstrip('.')}".rstrip("?") + "?")


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"did you mean {near[0]!r}" if near else f"known: {', '.join(names)}"


class _Raw(str):
    """The text of an override: read by the type of its key, not by YAML's own rules."""

    __slots__ = ()


def _expand(value: Any, key: str, where: str, environ: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_expand(item, key, where, environ) for item in value]
    if not isinstance(value, str):
        return value

    def look_up(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in environ:
            raise ConfigError(
                f"{key} in {where} needs the environment variable {name}, which is not set; "
                f"set it, or override the key with --set {key}=VALUE."
            )
        return environ[name]

    text = _ENVIRONMENT_NAME.sub(look_up, value)
    return _Raw(text) if isinstance(value, _Raw) else text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _convert(value: Any, hint: Any, key: str, where: str) -> Any:
    """Return `value` as the type that `key` is declared with, or raise."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, _Raw) and value.lower() in _NOTHING):
            return None
        (hint,) = (kind for kind in arguments if kind is not types.NoneType)
        return _convert(value, hint, key, where)
    if origin is Literal:
        if str(value) in arguments:
            return str(value)
        raise _wrong(value, key, where, f"one of {', '.join(arguments)}", str(arguments[0]))
    if origin is tuple:
        items = _convert_items(value, arguments[0], key, where)
        return tuple(_convert(item, arguments[0], key, where) for item in items)
    if isinstance(value, _Raw) and hint is not str:
        value = _parse_scalar(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        value = _parse_float(value)
    if hint is float and type(value) is int:
        value = _parse_float(str(value))
    if hint is str and isinstance(value, str):
        return str(value)
    if type(value) is hint:
        return value
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    raise _wrong(value, key, where, names[hint], _EXAMPLES.get(key, _EXAMPLES[hint]))


def _convert_items(value: Any, hint: Any, key: str, where: str) -> list[Any]:
    """Return the items of a list, still as they were written; of no value, none."""
    if value is None or (isinstance(value, _Raw) and value.lower() in _NOTHING):
        return []
    if isinstance(value, _Raw):
        parts = (part.strip() for part in value.strip("[]").split(","))
        return [_Raw(part) for part in parts if part]
    if isinstance(value, list) and (hint is not str or all(isinstance(v, str) for v in value)):
        return value
    if hint is float:
        raise _wrong(value, key, where, "a list of numbers", "[0.7, 0.9]")
    example = _EXAMPLES.get(key) or f"[{', '.join(typing.get_args(hint)[:2]) or 'car, bus'}]"
    raise _wrong(value, key, where, "a list of names", example)


def _parse_scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # ValueError: the 45th of a month, a number without end
        return str(text)


def _parse_float(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _wrong(value: Any, key: str, where: str, expected: str, example: str) -> ConfigError:
    shown = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
    shown = " ".join(str(shown).replace("...", "").split())
    return ConfigError(
        f"{key} must be {expected}, not {shown!r} (in {where}); for example {key}={example}."
    )


def _check_values(config: Config, wheres: Mapping[str, str]) -> None:
    try:
        find_spec(config.model.backbone_name)
    except ValueError as error:
        where = wheres.get("model.backbone_name", "default")
        raise ConfigError(f"model.backbone_name in {where}: {error}") from error
    for key, (least, greatest) in LIMITS.items():
        section, _, item = key.partition(".")
        found = getattr(getattr(config, section), item)
        for value in found if isinstance(found, tuple) else (found,):
            if value is None or (
                math.isfinite(value) and value >= least and (greatest is None or value <= greatest)
            ):
                continue
            bound = f"at least {least}" if greatest is None else f"from {least} to {greatest}"
            bound = "finite, " * (value == math.inf) + bound
            raise ConfigError(
                f"{key} must be {bound}, not {value} (in {wheres.get(key, 'default')})."
            )
    size = config.data.image_size
    if size % _STRIDE:
        lower = size // _STRIDE * _STRIDE
        raise ConfigError(
            f"data.image_size must be a multiple of {_STRIDE}, not {size}; "
            f"{max(lower, _STRIDE)} and {lower + _STRIDE} are."
        )
    digest = config.data.archive_sha256
    if digest is not None and not _SHA256.fullmatch(digest):
        raise ConfigError(
            f"data.archive_sha256 must be 64 hexadecimal digits, not {digest!r} "
            f"(in {wheres['data.archive_sha256']})."
        )
    _check_weights(config, wheres)
    for callback in config.runtime.callbacks:
        if not _CALLBACK.fullmatch(callback):
            raise ConfigError(
                f"runtime.callbacks must be a list of module:function, not {callback!r} "
                f"(in {wheres['runtime.callbacks']}); for example [my_module:my_function]."
            )


def _check_weights(config: Config, wheres: Mapping[str, str]) -> None:
    """Whether the file is there is known only where it trains; what is asked for, here already."""
    model = config.model
    if model.weights is not None and model.backbone_weights is not None:
        raise ConfigError(
            "model.weights fills the backbone too, so model.backbone_weights cannot be given beside "
            "it; set one of them to null."
        )
    for item in ("weights", "backbone_weights"):
        reference = getattr(model, item)
        if reference is not None and reference.startswith(PREFIX):
            try:
                HubReference.parse(reference)
            except HubError as error:
                raise ConfigError(
                    f"model.{item} (in {wheres[f'model.{item}']}): {error}"
                ) from error

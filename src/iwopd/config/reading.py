"""Recipes and overrides: from TOML and the command line to a validated tree, and back."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from iwopd import recipes
from iwopd.config.cluster import Cluster
from iwopd.config.engines import RENAMED, Engines, engine_type
from iwopd.config.mix import MixSettings
from iwopd.config.tree import Config
from iwopd.config.wording import in_words, shown
from iwopd.errors import ConfigError
from iwopd.section import Section

if TYPE_CHECKING:
    from iwopd.rollout.engine import EngineChoice

TEMPLATE_TABLES = tuple(f"{section}.chat_template_kwargs" for section in ("data", "eval", "teacher"))
OPEN_TABLES = ("method.params", "eval.data", "teacher.others", *TEMPLATE_TABLES)
"""Tables whose keys are the user's."""

NO_SETTINGS = {
    "device": "training takes the accelerator that torch finds, or else the CPU (CUDA_VISIBLE_DEVICES chooses: empty for the "
    "CPU); the teacher's device is 'models.teacher_device'",
}
"""What is asked for by names that are no settings, and how to get it."""

KEPT_QUIET = ("url", "urls", "api_key_env")
"""Settings whose wrong values are not repeated: somebody may have put a key there."""


def load_config(recipe: Path | None, overrides: Mapping[str, Any] | None = None, *, saved: bool = False) -> Config:
    """Read a TOML recipe, apply dotted overrides (`{"optim.lr": "1e-4"}`), validate. `saved`: by a run, maybe an older one."""
    values: dict[str, Any] = {}
    if recipe is not None:
        try:
            values = tomllib.loads(recipe.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if saved:
                raise ConfigError(
                    f"there is no {recipe}, so nobody knows what was trained: copy the whole run directory"
                ) from None
            raise ConfigError(f"no recipe at {recipe}{_nearby(recipe)} (the recipe comes first, settings after it)") from None
        except IsADirectoryError:
            raise ConfigError(f"{recipe} is a folder, and neither a recipe nor a run directory: name a TOML file") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{recipe} is not TOML: it is not text in UTF-8; name a recipe") from None
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{recipe} is not TOML: {error}; correct it there") from None
        except OSError as error:
            raise ConfigError(f"cannot read {recipe}: {error.strerror}") from None
    if saved:
        _upgrade(values, overrides or {})
    for name, value in (overrides or {}).items():
        _set(values, name, value)
    return make_config(values, where=recipes.title(recipe) if recipe else "the settings")


def _upgrade(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Saved settings as this version writes them: under their new names, and without what the chosen method does not use."""
    from iwopd.algo.objectives import objective_class

    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        if key in values.get(section, {}):
            _set(values, new, values[section].pop(key))
            if not values[section]:
                del values[section]
    method = values.get("method", {})
    chosen = {
        **method,
        **{name.removeprefix("method."): value for name, value in overrides.items() if name.startswith("method.")},
    }
    try:
        known = objective_class(chosen).settings(chosen)
    except (ValueError, ImportError, TypeError):
        return  # validation says it
    values["method"] = {name: value for name, value in method.items() if name == "objective" or name in known}


def make_config(values: Mapping[str, Any], where: str = "the settings") -> Config:
    """Validate a plain dictionary; a wrong one becomes a `ConfigError` with one line per fault."""
    _refuse_unknown(values, where)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explained(error, where)) from None


def make_engine_choice(name: str, values: Mapping[str, Any], where: str) -> EngineChoice:
    """An engine and its settings, outside a recipe and outside training."""
    from iwopd.rollout.engine import EngineChoice  # late: it imports this package

    engine = engine_type(name)
    try:
        settings = engine.settings_type.model_validate(values)
        engine.check(settings, trained=False)
    except ValidationError as error:
        raise ConfigError(_explained(error, where)) from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return EngineChoice(name, settings)


def config_toml(config: Config) -> str:
    """The resolved tree as TOML; settings that are empty are left out, so reading it gives the same tree."""
    tree = config.model_dump(exclude_none=True)
    if config.cluster == Cluster():  # most runs never see a cluster
        del tree["cluster"]
    if config.reward.checker is None:
        del tree["reward"]
    if config.rollout.mix == MixSettings():  # most runs have the student's own answers only
        del tree["rollout"]["mix"]
    for name in list(tree["engine"]):
        section = config.engine.of(name)
        if name != config.rollout.engine and section == type(section)():  # most runs use one engine
            del tree["engine"][name]
    tree["method"]["params"] = {name: value for name, value in config.method.params.items() if value is not None}
    return tomli_w.dumps(tree)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested dictionary; an open table counts as one value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" not in OPEN_TABLES:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def settings(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every setting, in order: what `--help` prints."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from settings(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


EMPTY: Any = object()
"""Value of an override that empties a setting."""


def parse_setting(name: str, text: str) -> Any:
    """The value of a setting from the command line; no text empties it. What takes a text gets it as it stands: `2024`."""
    if not text.strip():
        return EMPTY
    value = parse_value(text)
    info = dict(settings()).get(name)
    return text if info is not None and str in _kinds(info) and not isinstance(value, str) else value


def _nothing(name: str) -> Any:
    """How a setting is empty: None where it may be left out, a text or list of nothing; a number cannot be empty."""
    info = dict(settings()).get(name)
    kinds = {types.NoneType} if info is None else _kinds(info)
    return next((make() for kind, make in _EMPTY.items() if kind in kinds), "")


_EMPTY: dict[type, Any] = {types.NoneType: lambda: None, list: list, dict: dict}


def _kinds(info: FieldInfo) -> set[Any]:
    """The plain types that a setting takes."""
    kind: Any = info.annotation
    members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    bare = [typing.get_args(one)[0] if typing.get_origin(one) is typing.Annotated else one for one in members]
    return {typing.get_origin(one) or one for one in bare}


def parse_value(text: str) -> Any:
    """A value from the command line: TOML where it is TOML (`1e-4`, `true`, `{gamma = 1}`), else the text itself (`drift`)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: {section} is a setting, not a section")
    if value is EMPTY and _is_open(name):
        values.pop(last, None)
    else:
        values[last] = _nothing(name) if value is EMPTY else value


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    known = [name for name, _ in settings()]
    for name, _ in flatten(values):
        if name in RENAMED:
            raise ConfigError(f"{where}: {name!r} is called {RENAMED[name]!r} now")
        if name not in known and not _is_open(name):
            if inside := next((key for key in known if key.startswith(f"{name}.")), None):
                raise ConfigError(
                    f"{where}: {name!r} is a section, not a setting: write [{name}] in a recipe, and its settings below it, "
                    f"such as {inside.rpartition('.')[2]}; on the command line --{inside}"
                )
            tail = name.rpartition(".")[2]
            siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == name.rpartition(".")[0]}
            near = [siblings[key] for key in difflib.get_close_matches(tail, siblings, n=1, cutoff=0.8)]
            near = near or [key for key in known if key.rpartition(".")[2] == tail]
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near[:3]))}?"
            if not near:
                hint = "`iwopd train --help` lists all settings, `iwopd methods` those of [method]"
            raise ConfigError(f"{where}: unknown setting {name!r}; {NO_SETTINGS.get(tail, hint)}")


def _is_open(name: str) -> bool:
    """Whether a setting is checked elsewhere: a key of the user's, of a plug-in engine, or of a method (by its objective)."""
    table, _, inner = name.partition(".")
    further = table == "engine" and "." in inner and inner.partition(".")[0] not in Engines.model_fields
    return further or name.startswith(tuple(f"{table}." for table in (*OPEN_TABLES, "method", "rollout.horizon")))


def _explained(error: ValidationError, where: str) -> str:
    return f"{where}: " + "; ".join(_explain(fault) for fault in error.errors())


def _explain(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    message = in_words(fault)
    value = fault.get("input")
    lost = getattr(fault.get("ctx", {}).get("error"), "setting", None)  # of a method: it may belong to another section
    elsewhere = [key for key, _ in settings() if key.rpartition(".")[2] == lost]
    message += f"; did you mean {elsewhere[0]!r}?" if elsewhere else ""
    quiet = isinstance(value, (Mapping, BaseModel)) or value is None or any(part in KEPT_QUIET for part in fault["loc"])
    given = "" if quiet else f" (given: {shown(value)})"
    if fault.get("type") == "extra_forbidden":  # inside a list: `_refuse_unknown` sees lists as one value
        known = {field for section in Section.__subclasses__() for field in section.model_fields}
        near = difflib.get_close_matches(name.rpartition(".")[2], sorted(known - {name.rpartition(".")[2]}), n=1, cutoff=0.75)
        message = "there is no such setting" + (f"; did you mean {near[0]!r}?" if near else "")
    return f"{name}: {message}{given}" if name else message


def _nearby(recipe: Path) -> str:
    """A file beside it, or a recipe of the package, that looks like it."""
    folder = recipe.parent
    names = {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder.is_dir() else {}
    if near := difflib.get_close_matches(recipe.stem, names, n=1):
        return f"; did you mean {names[near[0]]}?"
    packaged = recipes.nearby(recipe.as_posix())
    return f"; did you mean {packaged[0]}?" if packaged else "; `iwopd recipes` lists those of the package"

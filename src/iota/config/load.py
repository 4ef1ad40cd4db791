"""Run files: TOML text to a typed `RunConfig` and back, and every check that must hold before anything is built.

`load_run` knows names and types only, and writes a preset's values (`iota.config.presets`) out under the file's own;
`check` knows what the values mean together and fills in what a documented 0 leaves to be derived. An explicit value is
honoured or refused by name, never replaced by a default. All problems of a run file are reported at once, one line
each, with the key, the value and what to write instead (design section 7).
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from iota.config import rules
from iota.config.presets import presets
from iota.config.schema import RunConfig, Section
from iota.errors import ConfigError

BIG = 2**63 - 1
"""Largest integer a run file may hold: the manifest travels as msgpack."""
PRESET = "preset"
"""A key of run files that is no field of `RunConfig`: its values are written out when the file is read."""


# ------------------------------------------------------------------------------------------------ TOML to values


def load_run(path: str | Path) -> RunConfig:
    """Read one run file. Names and types are checked here; call `check` before building anything from it.

    Raises `ConfigError` when the file cannot be read, is no TOML, or holds an unknown key or a value of another type.
    """
    place = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"run file {place} does not exist", "Give the path of a run file, e.g. recipes/demo.toml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"run file {place} cannot be read: {error}", "Give the path of a readable UTF-8 TOML file"
        ) from None
    return parse_run(text, place)


def parse_run(text: str, place: str = "run file") -> RunConfig:
    """The same from TOML text; `place` names it in errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{place} is not valid TOML: {error}", "Correct the line named") from None
    return _typed(data, place)


def _typed(data: dict[str, Any], place: str) -> RunConfig:
    """Names and types checked, the preset written out."""
    problems = list(misfits(data, RunConfig, ""))
    if problems:
        raise _refusal(place, problems)
    return msgspec.convert(_with_preset(data), RunConfig, strict=True)


def _with_preset(data: dict[str, Any]) -> dict[str, Any]:
    """The same without the key `preset`, with its values under those of [model] and [stages]."""
    rest = {key: value for key, value in data.items() if key != PRESET}
    if PRESET not in data:
        return rest
    under = dict(zip(("model", "stages"), presets()[data[PRESET]], strict=True))
    return rest | {name: msgspec.structs.asdict(part) | data.get(name, {}) for name, part in under.items()}


def _refusal(place: str, problems: list[str]) -> ConfigError:
    """One error for all problems, one line each."""
    if len(problems) == 1:
        return ConfigError(f"{place}: {problems[0]}")
    return ConfigError(f"{place}: {len(problems)} problems\n  " + "\n  ".join(problems))


def misfits(data: dict[str, Any], kind: type[Section], section: str) -> Iterator[str]:
    """Unknown keys, missing required keys and wrong types of one section, then of the sections in it."""
    hints = get_type_hints(kind)
    if kind is RunConfig:
        hints[PRESET] = str
        name = data.get(PRESET)
        if isinstance(name, str) and name not in presets():
            yield f"{PRESET} = {_show(name)} does not exist; write one of: {', '.join(presets())}"
    where = f"section [{section}]" if section else "the top level"
    for key, value in data.items():
        path = f"{section}.{key}" if section else key
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            guess = f" Did you mean {near[0]!r}?" if near else _elsewhere(key)
            yield f"unknown key {key!r} in {where}.{guess} Valid keys there: {', '.join(hints)}"
        elif isinstance(hints[key], type) and issubclass(hints[key], Section):
            if isinstance(value, dict):
                yield from misfits(value, hints[key], path)
            else:
                yield f"{path} = {_show(value)} is {_kind(value)}; it is a section: write [{path}] and its keys below"
        elif not _fits(value, hints[key]):
            yield f"{path} = {_show(value)} is {_kind(value)}; write {_wanted(hints[key])}"
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in data:
            yield f"{field.name} is missing in {where}; write {_wanted(hints[field.name])}"


def _elsewhere(key: str) -> str:
    """A hint when the key exists, but in another section (the commonest slip in a TOML file)."""
    homes = [
        name
        for name, kind in get_type_hints(RunConfig).items()
        if isinstance(kind, type) and issubclass(kind, Section) and key in get_type_hints(kind)
    ]
    return f" It belongs in [{'] or ['.join(homes)}]." if homes else ""


def _fits(value: object, hint: Any) -> bool:
    """Whether a TOML value may stand for a type. A bool is no number, an integer may stand for a float."""
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(hint)[1]) for item in value.values())
    if hint is float:
        if isinstance(value, int):
            return not isinstance(value, bool) and -BIG <= value <= BIG
        return isinstance(value, float) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -BIG <= value <= BIG
    return isinstance(value, hint)


def _wanted(hint: Any) -> str:
    if isinstance(hint, types.GenericAlias):
        inner = get_args(hint)
        if get_origin(hint) is tuple:
            return f"a list, each item {_wanted(inner[0])}"
        return f"a table, each value {_wanted(inner[1])}"
    return {
        int: "a whole number, e.g. 4",
        float: "a finite number, e.g. 0.5",
        str: 'a text in quotes, e.g. "abc"',
        bool: "true or false",
    }[hint]


def _kind(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > BIG:
        return "too large"
    names = {
        bool: "true/false",
        int: "a whole number",
        float: "a fraction",
        str: "a text",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------------------------------- values from the command line


def with_values(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The configuration with `section.key=value` settings applied in order. A value is TOML; what is none is a text, so
    `stop=epochs >= 2` needs no quotes of its own. `preset=NAME` puts its values in place of [model] and [stages].
    Raises ConfigError as `parse_run` does."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    for setting in settings:
        path, sign, text = setting.partition("=")
        if not sign:
            raise ConfigError(f"{setting!r} sets nothing", "Write KEY=VALUE, e.g. swarm.port=9000")
        inner = data
        *sections, key = path.strip().split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{setting!r}: {section} is no section", "Write SECTION.KEY=VALUE")
        inner[key] = _value(text.strip())
        if inner is data and key == PRESET and isinstance(data[PRESET], str) and data[PRESET] in presets():
            data = _with_preset({name: value for name, value in data.items() if name not in ("model", "stages")})
    return _typed(_lists(data), "--set")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _lists(value: Any) -> Any:
    """As TOML has it: lists, no tuples."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------------------------ values to TOML


def save_run(config: RunConfig) -> str:
    """TOML text of a run, every key written out. `parse_run(save_run(c)) == c`."""
    lines: list[str] = []
    sections: list[tuple[str, Section]] = []
    for field in RunConfig.__struct_fields__:
        value = getattr(config, field)
        if isinstance(value, Section):
            sections.append((field, value))
        else:
            lines.append(f"{field} = {_toml(value)}")
    for name, section in sections:
        lines += ["", f"[{name}]"]
        lines += [f"{field} = {_toml(getattr(section, field))}" for field in section.__struct_fields__]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """One value as TOML. JSON strings are TOML basic strings but for DEL, which TOML wants escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    assert isinstance(value, dict), type(value)
    return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"


# -------------------------------------------------------------------------------------------------------- checks


def check(config: RunConfig, place: str = "run file") -> RunConfig:
    """Check everything that concerns more than a type, and fill in derived values (`model.ffn`, `train.max_in_flight`,
    `train.lr_tokens` where they are 0). Idempotent. Raises `ConfigError` naming every problem.
    """
    problems = list(rules.problems(config))
    if problems:
        raise _refusal(place, problems)
    return rules.derive(config)

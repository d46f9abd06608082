"""Frozen config trees: strict reading, dotted overrides and a hash that names a run."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import types
import typing
from typing import Any, TypeVar

C = TypeVar("C")


def nearest(what: str, given: str, allowed: typing.Iterable[str]) -> str:
    """The message for a wrong name: what was given, the nearest right one, and all of them."""
    allowed = list(allowed)
    guess = difflib.get_close_matches(given, allowed, n=1, cutoff=0)
    hint = f"; did you mean {guess[0]!r}?" if guess else "."
    return f"unknown {what} {given!r}{hint} One of: {', '.join(allowed)}"


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: type[C], values: dict[str, Any], path: str = "") -> C:
    """Build a frozen config from plain values; an unknown key or a wrong type is a ``ValueError`` that says where."""
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(nearest("config key", f"{path}{key}", [f"{path}{name}" for name in fields]))
        arguments[key] = _convert(hints[key], value, f"{path}{key}")
    return cls(**arguments)


def override(config: C, path: str, value: Any) -> C:
    """A copy with the field at dotted ``path`` replaced; a string is read as the field's own type."""
    head, _, rest = path.partition(".")
    fields = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    if head not in fields:
        raise ValueError(nearest("config key", head, fields))
    if rest:
        value = override(getattr(config, head), rest, value)
    else:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        value = _convert(typing.get_type_hints(type(config))[head], value, path)
    return dataclasses.replace(config, **{head: value})  # type: ignore[type-var]


def config_hash(config: Any) -> str:
    """Twelve hex digits that name this exact tree."""
    text = json.dumps(to_dict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        hint = next(argument for argument in arguments if argument is not type(None))
        return _convert(hint, value, path)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value, f"{path}.")  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(arguments[0], item, path) for item in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(nearest(f"value of {path}", str(value), map(str, arguments)))
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"config key {path!r} must be {getattr(hint, '__name__', hint)}; got {value!r}")

"""Messages as JSON lines: frozen dataclasses out, and in again with every field held against its annotation.

Laws:
    1. Nothing that comes in is trusted: a line that is too long, is not JSON, nests too deep, or has a missing,
       unknown or wrong field raises MessageInvalid, which names the field, and nothing else.
    2. Sizes are checked before anything is built from them.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitctl.errors import ConfigInvalid, SplitctlError
from splitctl.placement import Changes, Placement

#: Characters of what is shown.
_SHOWN = 60
_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_SURROGATE = re.compile("[\ud800-\udfff]")

#: Metadata of a field that came after a release: it is not written at its default, so that an older reader takes it.
LATER = {"later": True}

#: Entries of a list in a message: token lists are the longest that there are.
MAX_ITEMS = 1 << 24


@dataclasses.dataclass(eq=False, repr=False)
class MessageInvalid(SplitctlError):
    """A message that is not what it should be.

    Attributes:
        field: its name, with dots where it lies deeper; empty for the message as a whole.
        found: what is there, shortened.
        wanted: what should be, as a phrase.
    """

    field: str
    found: str
    wanted: str

    def __str__(self) -> str:
        where = f"{self.field!r} of the message" if self.field else "the message"
        return f"{where} is {self.found}; wanted: {self.wanted}"


def kinds_of(union: Any) -> Mapping[str, type]:
    """Name the classes of a union as messages are named: in small letters, and without Request at the end."""
    return {kind.__name__.removesuffix("Request").lower(): kind for kind in typing.get_args(union)}


def to_line(message: object, kinds: Mapping[str, type]) -> bytes:
    """Write a message of one of the kinds as one line: JSON with its name under ``kind``, and a line feed."""
    return line_of(to_object(message, kinds))


def to_object(message: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Write a message as an object that JSON can hold."""
    return {"kind": _names(tuple(kinds.items()))[type(message)], **_plain_fields(message)}


def line_of(body: Mapping[str, Any]) -> bytes:
    """Write an object as one line; JSON escapes every line feed within."""
    return json.dumps(body, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def from_line(line: bytes, kinds: Mapping[str, type], *, max_bytes: int) -> Any:
    """Read a message from one line.

    Args:
        line: with or without its line feed.
        kinds: name -> class, for all messages that may stand here.
        max_bytes: a longer line is refused before it is read.

    Raises:
        MessageInvalid: it is none.
    """
    return from_object(object_of(line, max_bytes=max_bytes), kinds)


def object_of(line: bytes, *, max_bytes: int) -> dict[str, Any]:
    """Read one JSON object from a line.

    Raises:
        MessageInvalid: it is none.
    """
    if len(line) > max_bytes:
        raise MessageInvalid("", f"{len(line)} bytes long", f"{max_bytes} bytes at most")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageInvalid("", shown(line), "a JSON object in UTF-8") from error
    if not isinstance(body, dict):
        raise MessageInvalid("", shown(line), "a JSON object")
    return body


def from_object(body: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    """Read a message from an object.

    Raises:
        MessageInvalid: it is none.
    """
    name = body.get("kind")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise MessageInvalid("kind", shown(name), f"one of {', '.join(sorted(kinds))}")
    return _build(kind, {key: value for key, value in body.items() if key != "kind"}, "")


def shown(value: object) -> str:
    """Show the start of what was found, in a time that does not grow with it."""
    text = _start_of(value, 2)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _start_of(value: object, depth: int) -> str:
    match value:
        case str() | bytes():
            return repr(value[:_SHOWN])
        case int() if abs(value) >= 10**_SHOWN:
            return "a huge number"
        case list() | dict() if value and not depth:
            return "[...]" if isinstance(value, list) else "{...}"
        case list():
            return f"[{', '.join(_start_of(one, depth - 1) for one in value[:_SHOWN])}]"
        case dict():
            first = itertools.islice(value.items(), _SHOWN)
            return f"{{{', '.join(f'{key!r:.{_SHOWN}}: {_start_of(one, depth - 1)}' for key, one in first)}}}"
        case _:
            return repr(value)


@functools.cache
def _names(kinds: tuple[tuple[str, type], ...]) -> dict[type, str]:
    return {kind: name for name, kind in kinds}


def _plain_fields(message: Any) -> dict[str, Any]:
    said = ((field, getattr(message, field.name)) for field in dataclasses.fields(message))
    return {one.name: _plain(value) for one, value in said if "later" not in one.metadata or value != one.default}


def _plain(value: Any) -> Any:
    match value:
        case Placement() | Changes():
            return value.to_json()
        case enum.Enum():
            return value.value
        case Path():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case tuple() | list():
            return [_plain(one) for one in value]
        case _ if dataclasses.is_dataclass(value):
            return _plain_fields(value)
        case _:
            return value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, body: Mapping[str, Any], where: str) -> Any:
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(body) - set(fields))
    if unknown:
        raise MessageInvalid(f"{where}{shown(unknown[0])[1:-1]}", "not a field", f"one of {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in body:
            values[name] = _value(hints[name], body[name], f"{where}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise MessageInvalid(f"{where}{name}", "missing", "a value")
    try:
        return kind(**values)
    except ConfigInvalid as error:
        raise MessageInvalid(f"{where}{error.field}", shown(error.value), error.wanted) from error


def _value(hint: Any, value: Any, where: str) -> Any:
    """Turn one JSON value into what an annotation says, or say why not."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in {types.UnionType, typing.Union}:
        # In these messages: of one kind, or null.
        (kind,) = (one for one in inner if one is not types.NoneType)
        return None if value is None else _value(kind, value, where)
    if origin is tuple:
        return _tuple(inner, value, where)
    if hint is Any:
        return value
    if hint is Placement:
        return _placement(value, where)
    if hint is Changes:
        return _changes(value, where)
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise MessageInvalid(where, shown(value), "an object")
        return _build(hint, value, f"{where}.") if dataclasses.is_dataclass(hint) else value
    if hint in _WORDS:
        # A whole number is a number too. The comparison is exact, and false for NaN.
        fits = type(value) is hint or (hint is float and type(value) is int)
        if not fits or (hint is float and not abs(value) <= sys.float_info.max):
            raise MessageInvalid(where, shown(value), _WORDS[hint])
        if hint is str and _SURROGATE.search(value):
            raise MessageInvalid(where, "a text with half a character", "a text that UTF-8 can hold")
        return hint(value)
    return _of_text(hint, value, where)


def _tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise MessageInvalid(where, shown(value), f"a list of {MAX_ITEMS} entries at most")
    if inner[-1] is not Ellipsis and len(value) != len(inner):
        raise MessageInvalid(where, shown(value), f"a list of {len(inner)} entries")
    if inner[0] is int and all(type(one) is int for one in value):
        return tuple(value)
    return tuple(_value(inner[0], one, f"{where}[{index}]") for index, one in enumerate(value))


def _placement(value: Any, where: str) -> Placement:
    if not isinstance(value, dict):
        raise MessageInvalid(where, shown(value), "a placement, as an object")
    try:
        return Placement.from_json(value)
    except (SplitctlError, TypeError, ValueError, OverflowError) as error:
        raise MessageInvalid(where, shown(value), f"a placement ({error})") from error


def _changes(value: Any, where: str) -> Changes:
    if not isinstance(value, dict):
        raise MessageInvalid(where, shown(value), "an object")
    try:
        return Changes.from_json(value)
    except ConfigInvalid as error:
        raise MessageInvalid(error.field, shown(error.value), error.wanted) from error


def _of_text(hint: Any, value: Any, where: str) -> Any:
    """Read what JSON writes as a text: bytes, a path, or one of an enum."""
    if not isinstance(value, str):
        raise MessageInvalid(where, shown(value), "a text")
    if hint is Path and (not value or "\0" in value or _SURROGATE.search(value)):
        raise MessageInvalid(where, shown(value), "the path of a file")
    try:
        return base64.b64decode(value, validate=True) if hint is bytes else hint(value)
    except ValueError as error:
        wanted = "bytes in base64" if hint is bytes else f"one of {', '.join(str(one.value) for one in hint)}"
        raise MessageInvalid(where, shown(value), wanted) from error

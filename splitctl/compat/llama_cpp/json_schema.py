"""A JSON schema as a grammar in GBNF, the form that the library's grammar sampler reads. Pure.

What the grammar lets through is valid by the schema; it need not let through all that is valid (keys come in the
schema's order, keys that it does not name are left out). A keyword that a grammar cannot hold is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splitctl.errors import ConfigInvalid

_PRIMITIVES: Mapping[str, str] = {
    "ws": r'| " " | "\n" [ \t]{0,20}',
    "char": r'[^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": 'integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": r'"{" ws (string ":" ws value ("," ws string ":" ws value)*)? ws "}"',
    "array": r'"[" ws (value ("," ws value)*)? ws "]"',
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [1-2] [0-9] | "3" [0-1])',
    "time": '([0-1] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? '
    '("Z" | [-+] ([0-1] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "uuid": '[0-9a-fA-F]{8} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{12}',
}
_FORMATS: Mapping[str, str] = {
    "date": r'"\"" date "\""',
    "time": r'"\"" time "\""',
    "date-time": r'"\"" date "T" time "\""',
    "uuid": r'"\"" uuid "\""',
}
#: Keywords that describe and do not restrict.
_SAID = frozenset(
    {
        "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default",
        "definitions", "deprecated", "description", "discriminator", "example", "examples", "readOnly", "strict",
        "title", "writeOnly",
    }
)  # fmt: skip
#: Keywords that restrict values of a type.
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "additionalItems"}),
    "string": frozenset({"minLength", "maxLength", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}),
    "number": frozenset({"format"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_TYPES = tuple(_OF_TYPE)
#: Most repetitions of one part; the library's own limit is of this order.
_MAX_REPEATS = 2000

JSON_GBNF = "root ::= object\n" + "".join(f"{name} ::= {_PRIMITIVES[name]}\n" for name in (
    "object", "value", "array", "string", "number", "integer", "boolean", "null", "char", "ws",
))  # fmt: skip
"""Any JSON object."""


def to_gbnf(schema: Any) -> str:
    """Write the grammar of the values that a schema allows.

    Args:
        schema: an object as JSON gives it, or True.

    Returns:
        Rules, the first of which is ``root``.

    Raises:
        ConfigInvalid: the schema is none, or has a keyword that a grammar cannot hold (named in the error).
    """
    return _Converter(schema).grammar()


def _refused(keyword: str, value: object, wanted: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"schema {keyword}", value, f"{wanted}; leave it out, or check the answer against it afterwards"
    )


class _Converter:
    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._rules: dict[str, str] = {}
        self._refs: dict[str, str] = {}
        self._makers: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
        }

    def grammar(self) -> str:
        root = self._of(self._root)
        pending, known = [root, *self._rules.values()], dict(self._rules)
        while pending:
            text = pending.pop()
            for name, rule in _PRIMITIVES.items():
                if name not in known and name in _words(text):
                    known[name] = rule
                    pending.append(rule)
        return f"root ::= {root}\n" + "".join(f"{name} ::= {rule}\n" for name, rule in known.items())

    def _rule(self, text: str) -> str:
        """Name a rule, and return its name."""
        for name, rule in self._rules.items():
            if rule == text:
                return name
        name = f"r{len(self._rules)}"
        self._rules[name] = text
        return name

    def _of(self, schema: Any) -> str:
        """Return the expression of a schema: one symbol."""
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, Mapping):
            raise _refused("", schema, "an object, such as {'type': 'object', 'properties': {...}}")
        if "$ref" in schema:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            return self._ref(schema["$ref"]) if rest.keys() <= _SAID else self._of(self._with_target(schema))
        if "allOf" in schema:
            merged: dict[str, Any] = {name: value for name, value in schema.items() if name != "allOf"}
            for one in schema["allOf"]:
                merged = _merged(merged, self._with_target(one))
            return self._of(merged)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                base = {name: value for name, value in schema.items() if name != keyword and name not in _SAID}
                ways = schema[keyword]
                if not isinstance(ways, Sequence) or not ways:
                    raise _refused(keyword, ways, "a list of schemas")
                ways = [_merged(base, self._with_target(one)) if base else one for one in ways]
                return self._rule(" | ".join(self._of(one) for one in ways))
        if "const" in schema:
            return self._rule(_literal(schema["const"]))
        if "enum" in schema:
            return self._rule(" | ".join(_literal(one) for one in schema["enum"]))
        return self._of_types(schema)

    def _of_types(self, schema: Mapping[str, Any]) -> str:
        if not schema.keys() - _SAID:
            return "value"
        named = schema.get("type")
        if named is None:
            # Keywords say which type is meant, and "format" is of several.
            meant = (kind for kind in _TYPES if schema.keys() & (_OF_TYPE[kind] - {"format"}))
            named = next(meant, "string" if "format" in schema else None)
            if named is None:
                keyword = next(iter(schema.keys() - _SAID))
                raise _refused(keyword, schema[keyword], "a keyword that a grammar can hold")
        kinds = [str(kind) for kind in named] if isinstance(named, list | tuple) else [str(named)]
        if not kinds or not all(kind in _OF_TYPE for kind in kinds):
            raise _refused("type", named, "one of " + " ".join(_TYPES))
        known = _SAID.union({"type"}, *(_OF_TYPE[kind] for kind in kinds))
        for keyword in schema:
            if keyword not in known:
                raise _refused(keyword, schema[keyword], "a keyword that a grammar can hold")
        made = [self._makers[kind](schema) if kind in self._makers else kind for kind in kinds]
        return made[0] if len(made) == 1 else self._rule(" | ".join(made))

    # ---- references ----

    def _target(self, ref: Any) -> Any:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise _refused("$ref", ref, "a reference within the schema, such as #/$defs/Name")
        found = self._root
        for part in ref[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Sequence) and not isinstance(found, str) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise _refused("$ref", ref, "a reference to a part that is there")
        return found

    def _with_target(self, schema: Any, depth: int = 32) -> Mapping[str, Any]:
        """Return a schema with what it refers to in place of the reference."""
        if not isinstance(schema, Mapping):
            raise _refused("", schema, "an object")
        if "$ref" not in schema:
            return schema
        if not depth:
            raise _refused("$ref", schema["$ref"], "a reference that leads to something else than itself")
        rest = {name: value for name, value in schema.items() if name != "$ref" and name not in _SAID}
        return _merged(self._with_target(self._target(schema["$ref"]), depth - 1), rest)

    def _ref(self, ref: Any) -> str:
        if ref in self._refs:
            return self._refs[ref]
        target = self._target(ref)
        # The name stands before the rule does: a schema may refer to itself.
        name = self._refs[ref] = f"ref{len(self._refs)}"
        self._rules[name] = ""
        made = self._of(target)
        if made == name:
            raise _refused("$ref", ref, "a reference that leads to something else than itself")
        self._rules[name] = made
        return name

    # ---- types ----

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        others = schema.get("additionalProperties")
        if not isinstance(properties, Mapping):
            raise _refused("properties", properties, "an object of schemas by name")
        if unnamed := [name for name in required if name not in properties]:
            if others is False:
                raise _refused("required", unnamed[0], "a name that properties has")
            properties = {**properties, **dict.fromkeys(unnamed, True if others in {None, True} else others)}
        if not properties:
            return self._map(others)
        pairs = [
            (self._rule(rf'{_literal(str(name))} ":" ws {self._of(one)}'), name in required)
            for name, one in properties.items()
        ]
        # After the first pair each comes with its comma. Any up to the first that must be there can be the first.
        tails = [""]
        for pair, is_needed in reversed(pairs):
            one = f'"," ws {pair}' if is_needed else f'("," ws {pair})?'
            tails.append(self._rule(f"{one} {tails[-1]}".strip()))
        tails.reverse()
        n_firsts = next((at + 1 for at, (_, is_needed) in enumerate(pairs) if is_needed), None)
        ways = [f"{pair} {tails[at + 1]}".strip() for at, (pair, _) in enumerate(pairs[:n_firsts])]
        inner = f"({' | '.join(ways)})" + ("?" if n_firsts is None else "")
        return self._rule(rf'"{{" ws {inner} ws "}}"')

    def _map(self, others: Any) -> str:
        if others is False:
            return self._rule('"{" ws "}"')
        if others in (None, True, {}):
            return "object"
        pair = self._rule(f'string ":" ws {self._of(others)}')
        return self._rule(rf'"{{" ws ({pair} ("," ws {pair})*)? ws "}}"')

    def _array(self, schema: Mapping[str, Any]) -> str:
        first = schema.get("prefixItems")
        items = schema.get("items", True)
        if first is None and isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        first = [self._of(one) for one in first or ()]
        low, high = _bounds(schema, "minItems", "maxItems")
        if first:
            # A tuple has its items and no more.
            if low > len(first) or (high is not None and high < len(first)):
                raise _refused("minItems, maxItems", (low, high), f"{len(first)}, the items that prefixItems names")
            return self._rule('"[" ws ' + ' "," ws '.join(first) + ' ws "]"')
        if high == 0 or items is False:
            return self._rule('"[" ws "]"')
        item = self._of(items)
        more = _repeated(f'("," ws {item})', max(low - 1, 0), None if high is None else high - 1)
        inner = f"{item} {more}".strip()
        return self._rule(f'"[" ws {inner} ws "]"' if low else f'"[" ws ({inner})? ws "]"')

    def _string(self, schema: Mapping[str, Any]) -> str:
        made = _FORMATS.get(str(schema.get("format")))
        low, high = _bounds(schema, "minLength", "maxLength")
        if made is not None:
            return self._rule(made)
        if not low and high is None:
            return "string"
        return self._rule(rf'"\"" {_repeated("char", low, high)} "\""')

    def _integer(self, schema: Mapping[str, Any]) -> str:
        low, high = _limits(schema)
        if low is None and high is None:
            return "integer"
        if low is not None and high is not None and low > high:
            raise _refused("minimum", low, f"at most the maximum, {high}")
        ways = []
        if low is None or low < 0:
            most = max(1, -high) if high is not None and high < 0 else 1
            ways += [f'"-" ({" | ".join(_digits(most, None if low is None else -low))})']
        if high is None or high >= 0:
            ways += _digits(max(low or 0, 0), high)
        return self._rule(" | ".join(ways))


def _words(text: str) -> set[str]:
    """Return the symbols of an expression: its words outside of literals and character classes."""
    words, word, closing, escaped = set(), "", "", False
    for char in text + " ":
        if closing:
            closing = closing if escaped or char != closing else ""
            escaped = not escaped and char == "\\"
        elif char in '"[':
            closing = '"' if char == '"' else "]"
        elif char.isalnum():
            word += char
            continue
        words.add(word)
        word = ""
    return words


def _literal(value: Any) -> str:
    return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of what both allow, where their keywords can be put side by side."""
    merged = dict(one)
    for name, value in other.items():
        mine = merged.get(name, value)
        if name == "properties":
            both = [key for key in mine if key in value and mine[key] != value[key]]
            if both:
                raise _refused("allOf", both[0], "properties that one of the schemas has")
            merged[name] = {**mine, **value}
        elif name == "required":
            merged[name] = [*mine, *(key for key in value if key not in mine)]
        elif mine != value and name not in _SAID:
            raise _refused(name, value, f"the same everywhere, beside {mine!r}")
        else:
            merged[name] = mine
    return merged


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    for name, value in ((least, low), (most, high)):
        if value is not None and not (isinstance(value, int) and 0 <= value <= _MAX_REPEATS):
            raise _refused(name, value, f"a whole number from 0 to {_MAX_REPEATS}")
    if high is not None and low > high:
        raise _refused(least, low, f"at most {most}, {high}")
    return low, high


def _repeated(part: str, low: int, high: int | None) -> str:
    if high is None:
        return f"{part}*" if not low else f"{part}{{{low},}}"
    return f"{part}{{{low},{high}}}" if high else ""


def _limits(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the least and the largest whole number that a schema allows."""
    ends: list[int | None] = []
    for name, inner, step in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        found = [schema[name]] if name in schema else []
        if (bound := schema.get(inner)) is not None:
            if isinstance(bound, bool):  # as older drafts say it
                found = [one + step for one in found] if bound else found
            else:
                found.append(bound + step)
        for one in found:
            if not isinstance(one, int):
                raise _refused(name, one, "a whole number")
        ends.append(None if not found else max(found) if step > 0 else min(found))
    return ends[0], ends[1]


def _digits(low: int, high: int | None) -> list[str]:
    """Return expressions whose texts are the whole numbers from low to high, both at least 0."""
    n_low = len(str(low))
    if high is None:
        # As long as the least: up to all nines. Longer ones: any.
        longer = f"[1-9] [0-9]{{{n_low},{max(15, n_low + 4)}}}"
        return [*_digits(low, int("9" * n_low)), longer]
    ways = []
    for n in range(n_low, len(str(high)) + 1):
        first = max(low, 10 ** (n - 1) if n > 1 else 0)
        ways += _same_length(str(first), str(min(high, 10**n - 1)))
    return ways


def _same_length(low: str, high: str) -> list[str]:
    """Return expressions for the texts of digits between two of the same length."""
    if not low:
        return [""]
    rest = len(low) - 1
    if rest == 0:
        return [f"[{low}-{high}]"]
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return [f"[{low[0]}-{high[0]}] [0-9]{{{rest}}}"]
    if low[0] == high[0]:
        return [f'"{low[0]}" {way}' for way in _same_length(low[1:], high[1:])]
    ways = [f'"{low[0]}" {way}' for way in _same_length(low[1:], "9" * rest)]
    if int(high[0]) - int(low[0]) > 1:
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{rest}}}")
    return ways + [f'"{high[0]}" {way}' for way in _same_length("0" * rest, high[1:])]

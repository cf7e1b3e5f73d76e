"""A JSON schema as a grammar in GBNF, the form that the library's grammar sampler reads. Pure.

What the grammar lets through is valid by the schema; it need not let through all that is valid (keys come in the
schema's order, keys that it does not name are left out). A keyword that a grammar cannot hold is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splitctl.errors import ConfigInvalid
from splitctl.placement import whole

_PRIMITIVES: Mapping[str, str] = {
    "ws": r'| " " | "\n" [ \t]{0,20}',
    # Without halves of a character: an escaped one is one character too.
    "char": r'[^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" ([0-9a-ce-fA-CE-F] [0-9a-fA-F] | [dD] [0-7]) '
    "[0-9a-fA-F]{2})",
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": 'integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
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
#: Types of JSON by those of Python; a tuple is an array.
_KINDS: Mapping[type, set[str]] = {
    dict: {"object"}, str: {"string"}, int: {"integer", "number"}, float: {"number"}, bool: {"boolean"},
    type(None): {"null"},
}  # fmt: skip
#: Most repetitions of one part; the library's own limit is of this order.
_MAX_REPEATS = 2000
#: More than any schema of use: schemas in it, once for each reference that is replaced; characters of its grammar.
_MAX_PARTS, _MAX_CHARACTERS = 20_000, 1 << 17
_MAX_WHOLE = (1 << 63) - 1
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')

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
    try:
        grammar = _Converter(schema).grammar()
        grammar.encode()
    except RecursionError as error:
        raise _refused("", "nested too deeply", "one of fewer levels") from error
    except UnicodeEncodeError as error:
        raise _refused("", "text with half a character", "text that UTF-8 can hold") from error
    if len(grammar) > _MAX_CHARACTERS:
        raise _refused("", f"a grammar of {len(grammar)} characters", f"one of {_MAX_CHARACTERS} at most")
    return grammar


def _refused(keyword: str, value: object, wanted: str) -> ConfigInvalid:
    shown = value if len(repr(value)) < 80 else f"{repr(value)[:80]}..."
    hint = "; leave it out, or check the answer against it afterwards" if keyword else ""
    return ConfigInvalid(f"schema {keyword}".strip(), shown, f"{wanted}{hint}")


class _Converter:
    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._refs: dict[str, str] = {}
        self._n_parts = 0
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
            for name in re.findall("[a-z]+", _LITERALS.sub(" ", pending.pop())):
                if name in _PRIMITIVES and name not in known:
                    known[name] = _PRIMITIVES[name]
                    pending.append(known[name])
        return f"root ::= {root}\n" + "".join(f"{name} ::= {rule}\n" for name, rule in known.items())

    def _rule(self, text: str) -> str:
        """Name a rule, and return its name."""
        name = self._names.setdefault(text, f"r{len(self._rules)}")
        self._rules[name] = text
        return name

    def _of(self, schema: Any) -> str:
        """Return the expression of a schema: one symbol."""
        self._n_parts += 1
        if self._n_parts > _MAX_PARTS:
            raise _refused("", "too large", f"one of {_MAX_PARTS} schemas at most, with what its references repeat")
        if schema is True or schema == {}:
            return "value"
        _check(schema)
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
                ways = [_merged(base, self._with_target(one)) if base else one for one in schema[keyword]]
                return self._rule(" | ".join(self._of(one) for one in ways))
        if "const" in schema or "enum" in schema:
            return self._rule(" | ".join(_values(schema)))
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
        kinds = _kinds(named)
        # Those of other types restrict nothing here; but what limits whole numbers limits all numbers.
        known = _SAID.union({"type"}, *_OF_TYPE.values())
        known -= _OF_TYPE["integer"] - _OF_TYPE["number"] if "number" in kinds else frozenset()
        for keyword in schema:
            if keyword not in known:
                raise _refused(keyword, schema[keyword], "a keyword that a grammar can hold")
        made = [self._makers[kind](schema) if kind in self._makers else kind for kind in kinds]
        return made[0] if len(made) == 1 else self._rule(" | ".join(made))

    # ---- references ----

    def _target(self, ref: Any) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
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

    def _with_target(self, schema: Any, depth: int = 32) -> dict[str, Any]:
        """Return a schema with what it refers to in place of the reference."""
        _check(schema)
        if "$ref" not in schema:
            return dict(schema)
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
        others = schema.get("additionalProperties", True)
        if unnamed := [name for name in required if name not in properties]:
            if others is False:
                raise _refused("required", unnamed[0], "a name that properties has")
            properties = {**properties, **dict.fromkeys(unnamed, others)}
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
        if others in (True, {}):
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
        if items is False and low:
            raise _refused("minItems", low, "0 beside items that are false")
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
            if low or high is not None:
                raise _refused("minLength, maxLength", (low, high), f"none beside format {schema['format']}")
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


def _check(schema: Any) -> None:
    """Refuse what is no schema, or has lists and objects where others are wanted."""
    if not isinstance(schema, Mapping):
        raise _refused("", schema, "an object, such as {'type': 'object', 'properties': {...}}")
    if not isinstance(schema.get("properties", {}), Mapping):
        raise _refused("properties", schema["properties"], "an object of schemas by name")
    for keyword in ("allOf", "anyOf", "oneOf", "enum", "required", "prefixItems"):
        value = schema.get(keyword, (None,))
        if not isinstance(value, list | tuple) or not (value or keyword in {"required", "prefixItems"}):
            raise _refused(keyword, value, "a list that is not empty")


def _kinds(named: Any) -> list[str]:
    kinds = list(named) if isinstance(named, list | tuple) else [named]
    if not kinds or not all(isinstance(kind, str) and kind in _OF_TYPE for kind in kinds):
        raise _refused("type", named, "one of " + " ".join(_TYPES))
    return kinds


def _values(schema: Mapping[str, Any]) -> list[str]:
    """Return the literals of the values that "const" and "enum" leave, of the types that are named beside them."""
    if others := schema.keys() - _SAID - {"const", "enum", "type"}:
        raise _refused(min(others), schema[min(others)], "no further keyword beside enum or const")
    values = [schema["const"]] if "const" in schema else schema["enum"]
    allowed = {_literal(one) for one in schema.get("enum", values)}
    kinds = set(_kinds(schema.get("type", _TYPES)))
    found = [_literal(one) for one in values if kinds & _KINDS.get(type(one), {"array"})]
    found = [one for one in dict.fromkeys(found) if one in allowed]
    if not found:
        raise _refused("enum", values[:3], "a value that the keywords beside it allow")
    return found


def _literal(value: Any) -> str:
    try:
        return json.dumps(json.dumps(value, ensure_ascii=False, allow_nan=False), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _refused("enum", value, f"values that JSON can hold ({error})") from error


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of what both allow, where their keywords can be put side by side."""
    for mine, theirs in ((one, other), (other, one)):
        # "Additional" and "items" mean what stands beside them.
        strange = theirs.get("properties", {}).keys() - mine.get("properties", {}).keys()
        if strange and mine.get("additionalProperties", True) not in (True, {}):
            raise _refused("additionalProperties", mine["additionalProperties"], "none, where schemas are joined")
        if "items" in mine and "prefixItems" in theirs and "prefixItems" not in mine:
            raise _refused("items", mine["items"], "prefixItems in the same schema, where schemas are joined")
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


def _whole(keyword: str, value: object, low: int, high: int) -> int:
    found = whole(value)
    if found is None or not low <= found <= high:
        shown = value if found is None or found.bit_length() <= 64 else f"{found.bit_length()} bits long"
        raise _refused(keyword, shown, f"a whole number from {low} to {high}")
    return found


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    low = _whole(least, schema.get(least, 0), 0, _MAX_REPEATS)
    high = _whole(most, schema[most], 0, _MAX_REPEATS) if most in schema else None
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
        inside = schema.get(inner, False)
        # Older drafts say of the bound whether it is meant itself.
        given = [(name, step if inside is True else 0)] + ([] if isinstance(inside, bool) else [(inner, step)])
        found = [
            _whole(keyword, schema[keyword], -_MAX_WHOLE, _MAX_WHOLE) + by for keyword, by in given if keyword in schema
        ]
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

"""JSON schemas as grammars: what a grammar lets through is valid, and what it cannot hold is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from splitctl.compat.llama_cpp.json_schema import JSON_GBNF, to_gbnf
from splitctl.compat.llama_cpp.llama_grammar import LlamaGrammar
from splitctl.errors import ConfigInvalid

_DEPTH = 3
"""How often a rule may stand in itself."""


def pattern_of(grammar: str) -> re.Pattern[str]:
    """Write a grammar as a regular expression; a rule that stands in itself to a depth."""
    rules = dict(line.split(" ::= ", 1) for line in grammar.splitlines())
    part = re.compile(r'"((?:\\.|[^"\\])*)"|(\[(?:\\.|[^\]\\])*\])|([a-z][a-z0-9]*)|(\{\d*,?\d*\})|([|()*+?])| ')

    def expanded(text: str, within: tuple[str, ...]) -> str:
        out, at = "", 0
        while at < len(text):
            found = part.match(text, at)
            assert found is not None, text[at:]
            literal, chars, name, count, sign = found.groups()
            if literal is not None:
                out += f"(?:{re.escape(json.loads(found[0]))})"
            elif name is not None:
                is_deep = within.count(name) >= _DEPTH
                out += "(?!)" if is_deep else f"(?:{expanded(rules[name], (*within, name))})"
            else:
                out += chars or count or ("(?:" if sign == "(" else sign) or ""
            at = found.end()
        return out

    return re.compile(expanded(rules["root"], ()))


def lets_through(schema: Any, value: Any) -> bool:
    """Whether a value, written with and without spaces, fits the grammar of a schema."""
    pattern = pattern_of(to_gbnf(schema))
    texts = {json.dumps(value, ensure_ascii=False), json.dumps(value, separators=(",", ":"))}
    found = {pattern.fullmatch(text) is not None for text in texts}
    assert len(found) == 1, texts
    return found.pop()


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}},
    "required": ["b"],
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (OBJECT, [{"b": ""}, {"a": 1, "b": "x"}, {"b": "x", "c": None}, {"a": -3, "b": "é\n", "c": None}],
         [{}, {"a": 1}, {"a": 1.5, "b": ""}, {"b": "", "d": 1}, {"b": 3}]),
        ({"properties": {"a": {}, "b": {"type": "boolean"}}}, [{}, {"a": [1]}, {"b": True}, {"a": "", "b": False}],
         [{"b": 1}, {"c": 1}, []]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"x": 1}]),
        ({"type": "object", "required": ["x"]}, [{"x": "any"}], [{}, {"y": 1}]),
        ({"type": "array", "items": {"enum": ["x", 2, None]}, "minItems": 1, "maxItems": 3},
         [["x"], [2, None], ["x", "x", "x"]], [[], ["y"], ["x"] * 4]),
        ({"prefixItems": [{"type": "number"}, {"const": "k"}]}, [[1.5, "k"], [2e9, "k"]],
         [[1], []]),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", 'a"c'], ["a", "abcd", 12]),
        ({"type": "string", "format": "date-time"}, ["2026-01-31T23:59:00Z"], ["2026-13-31T23:59:00Z", "now"]),
        ({"format": "uuid"}, ["0f3b9a52-9d3e-4a8e-8f5e-2d4f6a7b8c9d"], ["0f3b"]),
        ({"type": ["integer", "null"], "minimum": -12, "exclusiveMaximum": 105}, [-12, -9, 0, 7, 99, 104, None],
         [-13, 105, 1000, "7"]),
        ({"type": "integer", "minimum": 30}, [30, 99, 100, 12345], [29, 3, -30]),
        ({"type": "integer", "maximum": -30}, [-30, -99, -100], [-29, 0, 30]),
        ({"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "integer"}}]}, [True, [1, 2]], [1, ["x"]]),
        ({"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"q": {"const": 1}}, "required": ["q"]}],
          "$defs": {"p": {"type": "object", "properties": {"p": {"const": 0}}, "required": ["p"]}}},
         [{"p": 0, "q": 1}], [{"p": 0}, {"q": 1}]),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
            "v": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}, "required": ["v"]}}},
         [{"v": 1}, {"v": 1, "next": {"v": 2}}], [{}, {"v": 1, "next": {}}]),
        (True, [{"a": [1, "x", None, 1.5, True]}, 3], []),
    ],
)  # fmt: skip
def test_a_grammar_lets_valid_values_through_alone(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """Values that the schema allows fit, values that it does not allow do not."""
    assert [value for value in valid if not lets_through(schema, value)] == []
    assert [value for value in invalid if lets_through(schema, value)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "^a+$"}, "pattern"),
        ({"type": "number", "minimum": 0}, "minimum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "null"}}, "not"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "strin"}, "one of object array string"),
        ({"$ref": "https://example.org/x.json"}, "within the schema"),
        ({"$ref": "#/$defs/none"}, "a part that is there"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "something else than itself"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "the same everywhere"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "at most maxItems"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "at most the maximum"),
        ([], "an object"),
    ],
)
def test_what_a_grammar_cannot_hold_is_refused_by_name(schema: Any, words: str) -> None:
    """With what is wanted in its place."""
    with pytest.raises(ConfigInvalid, match=re.escape(words)):
        to_gbnf(schema)


def test_any_json_object_fits_the_grammar_of_json() -> None:
    """And nothing but an object does."""
    pattern = pattern_of(JSON_GBNF)
    assert pattern.fullmatch('{"a": [1, -2.5e3, "\\u00e9\\n", {"b": null}], "c": true}')
    assert not pattern.fullmatch("[1]")


def test_a_schema_that_is_no_json_is_refused() -> None:
    """By where it breaks."""
    with pytest.raises(ConfigInvalid, match="line 1 column 2"):
        LlamaGrammar.from_json_schema("{type}")

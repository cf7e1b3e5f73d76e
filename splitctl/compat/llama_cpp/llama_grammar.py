"""A grammar that an answer follows, as llama-cpp-python's programs make one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from splitctl.compat.llama_cpp import json_schema
from splitctl.errors import ConfigInvalid


class LlamaGrammar:
    """A grammar in GBNF. It holds text alone: the library reads it when an answer begins, and again after a switch."""

    def __init__(self, grammar: str) -> None:
        """Take the rules, the first of which is ``root``."""
        if not grammar.strip():
            raise ConfigInvalid("grammar", grammar, 'rules in GBNF, such as \'root ::= "yes" | "no"\'')
        self._grammar = grammar

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> Self:  # noqa: FBT001, FBT002, ARG003 - as it is called
        """Take the rules as text."""
        return cls(grammar)

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> Self:  # noqa: FBT001, FBT002, ARG003
        """Read the rules from a file; OSError where it cannot be read."""
        return cls(Path(file).read_text(encoding="utf-8"))

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> Self:  # noqa: FBT001, FBT002, ARG003
        """Make the grammar of a schema, given as JSON.

        Raises:
            ConfigInvalid: it is no JSON, or has a keyword that a grammar cannot hold.
        """
        return cls(of_schema(json_schema))


def of_schema(schema: Any) -> str:
    """Return the grammar of a schema, given as JSON or as the object that JSON gives."""
    if isinstance(schema, str | bytes):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ConfigInvalid("schema", str(schema)[:80], f"a JSON schema ({error})") from error
    return json_schema.to_gbnf(schema)


def of_response_format(response_format: Any) -> str:
    """Return the grammar of OpenAI's ``response_format``; "" where any text will do.

    Raises:
        ConfigInvalid: it is something else.
    """
    if response_format is None:
        return ""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        schema = response_format.get("schema")
        return json_schema.JSON_GBNF if schema is None else of_schema(schema)
    if kind == "json_schema":
        named = response_format.get("json_schema")
        return of_schema(named.get("schema", True) if isinstance(named, dict) else named)
    wanted = "None, or an object of type text, json_object or json_schema"
    raise ConfigInvalid("response_format", response_format, wanted)

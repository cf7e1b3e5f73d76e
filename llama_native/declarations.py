"""A small reader of C declarations: the structs, enums and function prototypes of a llama.h or of our own cdefs.

It reads what those headers are written in (plain structs, no bit fields, no nested structs by value) and refuses the
rest, so that a header which it misunderstands becomes an error and not a wrong offset. Pure: text in, values out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_POINTER_TYPEDEFS = frozenset(
    {
        "ggml_abort_callback",
        "ggml_backend_dev_t",
        "ggml_backend_sched_eval_callback",
        "ggml_log_callback",
        "llama_memory_t",
        "llama_model_set_tensor_data_t",
        "llama_progress_callback",
    }
)
"""Typedefs of the public headers that are pointers without a star. Source: llama.h, ggml.h, ggml-backend.h."""

_SCALARS = {
    "bool": (1, "?"),
    "int8_t": (1, "b"),
    "uint8_t": (1, "B"),
    "int32_t": (4, "i"),
    "uint32_t": (4, "I"),
    "int": (4, "i"),
    "float": (4, "f"),
    "llama_pos": (4, "i"),
    "llama_token": (4, "i"),
    "llama_seq_id": (4, "i"),
    "int64_t": (8, "q"),
    "uint64_t": (8, "Q"),
    "double": (8, "d"),
}
_KEYWORDS = frozenset({"const", "volatile", "struct", "enum", "unsigned", "signed"})
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*\{([^{}]*)\}")
_NAMED_CALLBACK = re.compile(r"\(\s*\*\s*(\w+)\s*\)\s*\(")
_PROTOTYPE = re.compile(r"(?:^|(?<=[;{}]))\s*(?P<result>[\w\s*]+?)\b(?P<name>\w+)\s*\((?P<arguments>[^()]*)\)\s*$")


class DeclarationError(ValueError):
    """C text that this reader does not understand; says which declaration it was."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a C struct: where it lies and how its bytes are read.

    ``offset`` and ``size`` in bytes; ``code`` is the struct-module letter ("P" for any pointer).
    """

    name: str
    ctype: str
    offset: int
    size: int
    code: str

    @property
    def end(self) -> int:
        """Offset of the first byte behind the field."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class StructLayout:
    """The layout of one C struct under the platform's natural alignment; all numbers in bytes."""

    name: str
    fields: tuple[Field, ...]
    size: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind the last field: what a library must have written at least."""
        return self.fields[-1].end if self.fields else 0

    def field(self, name: str) -> Field:
        """Return the field with this name.

        Args:
            name: a field's name.

        Returns:
            The field.

        Raises:
            KeyError: the struct has no such field.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(field.name == name for field in self.fields)


@dataclass(frozen=True, slots=True)
class Slot:
    """What crosses a call in one place: the base type without qualifiers, and how many pointers deep it is."""

    base: str
    depth: int


@dataclass(frozen=True, slots=True)
class Prototype:
    """One function's declaration."""

    name: str
    result: Slot
    arguments: tuple[Slot, ...]


def strip(text: str) -> str:
    """Remove comments, preprocessor lines and the headers' decorations.

    Args:
        text: C text, such as a whole llama.h.

    Returns:
        Declarations only; an empty space stands for what was taken out.
    """
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", " ", text)
    text = text.replace("\\\n", " ")
    text = re.sub(r"^[ \t]*#[^\n]*$", " ", text, flags=re.MULTILINE)
    text = re.sub(r'extern\s+"C"\s*\{', " ", text)
    text = re.sub(r"\b(?:LLAMA_API|GGML_API|GGML_BACKEND_API|extern|static|inline)\b", " ", text)
    return re.sub(r"\b(?:__attribute__|GGML_DEPRECATED_ATTR)\s*\(\([^()]*\)\)", " ", text)


def _undeprecate(text: str) -> str:
    """Turn ``DEPRECATED(prototype, "hint");`` into the prototype, quotes and all."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    return re.sub(r"\bDEPRECATED\s*\((.*?),\s*(?:\"\"\s*)+\)\s*;", r"\1;", text, flags=re.DOTALL)


def struct_layout(text: str, name: str, *, pointer_size: int = 8) -> StructLayout:
    """Compute the layout of one struct from its declaration.

    Args:
        text: C text that holds ``struct <name> { ... }``.
        name: the struct's tag.
        pointer_size: bytes of a pointer and of size_t.

    Returns:
        Fields in order with offsets and sizes in bytes, under natural alignment.

    Raises:
        DeclarationError: the struct is absent or has a field that this reader does not understand.
    """
    for match in _STRUCT.finditer(strip(text)):
        if match.group(1) == name:
            body = match.group(2)
            break
    else:
        raise DeclarationError(f"no declaration of struct {name}")
    fields: list[Field] = []
    offset = 0
    widest = 1
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        ctype, field_name = _split_field(declaration, name)
        size, code = _scalar(ctype, pointer_size, f"{name}.{field_name}")
        offset = _aligned(offset, size)
        fields.append(Field(field_name, ctype, offset, size, code))
        offset += size
        widest = max(widest, size)
    if not fields:
        raise DeclarationError(f"struct {name} has no fields")
    return StructLayout(name, tuple(fields), _aligned(offset, widest))


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _split_field(declaration: str, struct: str) -> tuple[str, str]:
    named = _NAMED_CALLBACK.search(declaration)
    if named:
        return "void *", named.group(1)
    if any(sign in declaration for sign in "[]:,()"):
        raise DeclarationError(f"struct {struct} has a field that is no plain scalar: {declaration!r}")
    words = _IDENTIFIER.findall(declaration)
    if len(words) < 2:
        raise DeclarationError(f"struct {struct} has a field without type or name: {declaration!r}")
    ctype = declaration[: declaration.rindex(words[-1])]
    return " ".join(ctype.replace("*", " * ").split()), words[-1]


def _scalar(ctype: str, pointer_size: int, where: str) -> tuple[int, str]:
    words = ctype.split()
    plain = [word for word in words if word not in {"const", "volatile"}]
    if "*" in plain or plain[0] in _POINTER_TYPEDEFS:
        return pointer_size, "P"
    if plain[0] == "enum":
        return 4, "i"
    if plain == ["size_t"]:
        return pointer_size, "N"
    try:
        return _SCALARS[" ".join(plain)]
    except KeyError as error:
        raise DeclarationError(f"{where} has the unknown type {ctype!r}") from error


def prototypes(text: str) -> dict[str, tuple[Prototype, ...]]:
    """Read every function prototype.

    Args:
        text: C text; functions that take a function pointer in place (not by typedef) are left out.

    Returns:
        Name -> its prototypes (more than one where a text declares variants).
    """
    found: dict[str, tuple[Prototype, ...]] = {}
    plain = re.sub(r"\{[^{}]*\}", " ", _undeprecate(strip(text)))
    plain = re.sub(r"\{[^{}]*\}", " ", plain)
    for statement in plain.split(";"):
        words = " ".join(statement.split())
        match = _PROTOTYPE.search(words)
        if match is None or "typedef" in words or not match.group("result").strip(" *"):
            continue
        arguments = [part.strip() for part in match.group("arguments").split(",")]
        if arguments in (["void"], [""]):
            arguments = []
        prototype = Prototype(
            match.group("name"),
            _slot(match.group("result"), named=False),
            tuple(_slot(argument, named=True) for argument in arguments),
        )
        if prototype not in found.get(prototype.name, ()):
            found[prototype.name] = (*found.get(prototype.name, ()), prototype)
    return found


def _slot(text: str, *, named: bool) -> Slot:
    depth = text.count("*") + text.count("[")
    words = [word for word in _IDENTIFIER.findall(text.split("[", maxsplit=1)[0]) if word not in _KEYWORDS]
    if named and len(words) > 1:
        words.pop()
    return Slot(" ".join(words) or "int", depth)


def prototype_differences(bound: str, header: str) -> tuple[str, ...]:
    """Hold bound prototypes against a header: number of arguments and pointer depth of each place.

    Args:
        bound: our C text (``cdefs/api.h`` and the like).
        header: the text of the headers of one release; functions that it lacks are passed over.

    Returns:
        One line a difference, empty where all agree. A bound function with variants must match in one of them.
    """
    theirs = prototypes(header)
    lines = []
    for name, variants in prototypes(bound).items():
        if name not in theirs or any(_alike(ours, other) for ours in variants for other in theirs[name]):
            continue
        wanted = " or ".join(_shape(other) for other in theirs[name])
        lines.append(f"{name}: bound as {' or '.join(map(_shape, variants))}, the header says {wanted}")
    return tuple(lines)


def _alike(ours: Prototype, other: Prototype) -> bool:
    return (
        _depth(ours.result) == _depth(other.result)
        and len(ours.arguments) == len(other.arguments)
        and all(_depth(a) == _depth(b) for a, b in zip(ours.arguments, other.arguments, strict=True))
    )


def _depth(slot: Slot) -> int:
    return slot.depth + (slot.base in _POINTER_TYPEDEFS or slot.base.endswith("_callback"))


def _shape(prototype: Prototype) -> str:
    inside = ", ".join(slot.base + "*" * slot.depth for slot in prototype.arguments)
    return f"{prototype.result.base}{'*' * prototype.result.depth}({inside})"

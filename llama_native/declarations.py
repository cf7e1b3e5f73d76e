"""A small reader of C declarations: the structs of a llama.h or of our own cdefs.

It reads what those headers are written in (plain structs, no bit fields, no nested structs by value) and refuses the
rest, so that a header which it misunderstands becomes an error and not a wrong offset. Pure: text in, values out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

POINTER_TYPEDEFS = frozenset(
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
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*\{([^{}]*)\}")
_NAMED_CALLBACK = re.compile(r"\(\s*\*\s*(\w+)\s*\)\s*\(")


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

        Raises:
            KeyError: the struct has no such field.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(field.name == name for field in self.fields)


def strip(text: str) -> str:
    """Remove comments, preprocessor lines and the headers' decorations from C text; a space stands for each."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", " ", text)
    text = text.replace("\\\n", " ")
    text = re.sub(r"^[ \t]*#[^\n]*$", " ", text, flags=re.MULTILINE)
    text = re.sub(r'extern\s+"C"\s*\{', " ", text)
    text = re.sub(r"\b(?:LLAMA_API|GGML_API|GGML_BACKEND_API|extern|static|inline)\b", " ", text)
    return re.sub(r"\b(?:__attribute__|GGML_DEPRECATED_ATTR)\s*\(\([^()]*\)\)", " ", text)


def struct_layout(text: str, name: str, *, pointer_size: int = 8) -> StructLayout:
    """Compute the layout of one struct from C text that holds ``struct <name> { ... }``.

    ``pointer_size`` is that of a pointer and of size_t, bytes.

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
    words = IDENTIFIER.findall(declaration)
    if len(words) < 2:
        raise DeclarationError(f"struct {struct} has a field without type or name: {declaration!r}")
    ctype = declaration[: declaration.rindex(words[-1])]
    return " ".join(ctype.replace("*", " * ").split()), words[-1]


def _scalar(ctype: str, pointer_size: int, where: str) -> tuple[int, str]:
    words = ctype.split()
    plain = [word for word in words if word not in {"const", "volatile"}]
    if "*" in plain or plain[0] in POINTER_TYPEDEFS:
        return pointer_size, "P"
    if plain[0] == "enum":
        return 4, "i"
    if plain == ["size_t"]:
        return pointer_size, "N"
    try:
        return _SCALARS[" ".join(plain)]
    except KeyError as error:
        raise DeclarationError(f"{where} has the unknown type {ctype!r}") from error

r"""Make the layout profile of a new llama.cpp release from its header, and from a real build where one can be opened.

    python -m tools.make_profile --header llama.h --library libllama.so \
        --name 2026_11 --build 11800 --seen-in "xllamacpp 2026.11.11800"

The header is a llama.h or the C declarations inside a llama-cpp-py-sync wheel (``_cffi_bindings.py``). Printed are each
struct's size, which layouts are new, and bound prototypes that the header contradicts. With --write the fragments in
``llama_native/cdefs`` and the table ``llama_native/data/layouts.json`` are brought up to date; read the change
before it is committed.

Default values come from the library, opened in a child process, its default structs written into patterned buffers.
Where no build can be opened, a field keeps the value of the nearest known layout, and a new field needs
--default FIELD=VALUE.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_native import abi, declarations, layouts
from llama_native.declarations import Field, StructLayout
from tools.places import CHECKOUT
from tools.prototypes import prototype_differences, prototypes

STRUCTS = {"model": "llama_model_params", "context": "llama_context_params", "batch": "llama_batch"}
ASKED = {
    "model": "llama_model_default_params",
    "context": "llama_context_default_params",
    "batch": "llama_batch_get_one",
}
BUFFER_BYTES = 1024
RULES = {"n_threads": "positive", "n_threads_batch": "positive"}
"""Defaults that may differ between machines, so that a rule stands in the table instead of a value."""
BATCH_RULES = {"token": "given"}
KEPT_POINTERS = {"float *", "const float *", "int32_t *", "int32_t **", "int8_t *", "ggml_backend_dev_t *"}
KEPT_TYPEDEFS = {"llama_progress_callback", "ggml_abort_callback"}
INTEGER_TYPEDEFS = {"llama_token", "llama_pos", "llama_seq_id"}

Default = float | int | str | None


class ProfileError(Exception):
    """The header, the library or the arguments do not make a profile; says which and why."""


@dataclass(frozen=True)
class Release:
    """What is known of the release that the profile is for."""

    name: str
    build: int | None
    seen_in: str
    refused: str
    exports: tuple[str, ...]


def read_header(path: Path) -> str:
    """Read C declarations from a header, or from the longest string of a Python module that holds them.

    Args:
        path: llama.h, or a module with a cffi declaration string.

    Returns:
        C text.

    Raises:
        ProfileError: a Python module without any string.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    if not strings:
        raise ProfileError(f"{path} holds no declarations")
    return max(strings, key=len)


def observe(library: Path) -> abi.Observed:
    """Open a library in a child process and see what its default functions write.

    Args:
        library: a shared library with the llama.cpp API.

    Returns:
        The observation, without exports.

    Raises:
        ProfileError: the child could not open the library, or died in it.
    """
    child = subprocess.run(
        [sys.executable, "-m", "tools.make_profile", "--observe-child", str(library.absolute())],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        raise ProfileError(f"{library} cannot be observed: {last[0]}")
    fills: dict[str, list[str]] = json.loads(child.stdout)
    answers = {kind: layouts.StructAnswer.from_fills(*map(bytes.fromhex, pair)) for kind, pair in fills.items()}
    return abi.Observed(**answers, exports=frozenset())


def _observe_child(library: str) -> dict[str, list[str]]:
    lib = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    tokens = (ctypes.c_int32 * 2)()
    answers: dict[str, list[str]] = {}
    for kind, name in ASKED.items():
        answers[kind] = []
        for fill in abi.FILLS:
            buffer = ctypes.create_string_buffer(bytes([fill]) * BUFFER_BYTES, BUFFER_BYTES)
            if hasattr(lib, name):
                function = getattr(lib, name)
                function.restype = ctypes.c_void_p
                rest = (ctypes.byref(tokens), ctypes.c_int32(2)) if kind == "batch" else ()
                function(ctypes.byref(buffer), *rest)
                answers[kind].append(buffer.raw.hex())
            else:
                answers[kind].append("")
    return answers


def fragment(layout: StructLayout) -> str:
    """Write a struct as our own C text: enums as int32_t, pointers that nobody here follows as ``void *``.

    Args:
        layout: a struct read from a header.

    Returns:
        C text that stands after ``cdefs/types.h``.
    """
    lines = [f"struct {layout.name} {{"]
    for field in layout.fields:
        ctype, note = _our_type(field.ctype)
        lines.append(f"    {ctype}{'' if ctype.endswith('*') else ' '}{field.name};{note}")
    return "\n".join([*lines, "};", ""])


def _our_type(ctype: str) -> tuple[str, str]:
    words = [("int32_t" if word in INTEGER_TYPEDEFS else word) for word in ctype.split()]
    plain = re.sub(r"\s*\*", "*", " ".join(words)).replace("*", " *", 1)
    if words[0] == "enum":
        return "int32_t", f" /* enum {words[1]} */"
    if plain in KEPT_POINTERS or plain in KEPT_TYPEDEFS:
        return plain, ""
    layout = declarations.struct_layout(f"struct one {{ {ctype} field; }};", "one")
    if layout.fields[0].code == "P":
        note = "" if plain == "void *" else f" /* {plain} */"
        return "void *", note
    return plain, ""


def read_defaults(kind: str, layout: StructLayout, answer: layouts.StructAnswer) -> dict[str, Default]:
    """Take the table of default values out of a library's answer.

    Args:
        kind: "model", "context" or "batch".
        layout: the struct as the header declares it.
        answer: what the library wrote.

    Returns:
        Field -> value, None for NULL, or the name of a rule.

    Raises:
        ProfileError: the answer is not as long as the header's struct, lacks a field, or has a non-NULL pointer.
    """
    if answer.extent is not None and not layout.end <= answer.extent <= layout.size:
        raise ProfileError(f"the library writes {answer.extent} bytes of {layout.name}; the header's has {layout.size}")
    rules = BATCH_RULES if kind == "batch" else RULES
    defaults: dict[str, Default] = {}
    for field in layout.fields:
        if answer.written is not None and not all(answer.written[field.offset : field.end]):
            raise ProfileError(
                f"{layout.name}.{field.name} at offset {field.offset} is not written: header or library is wrong"
            )
        value = _value(field, answer.values)
        if field.name in rules:
            defaults[field.name] = rules[field.name]
        elif field.code == "P" and value:
            raise ProfileError(f"{layout.name}.{field.name} at offset {field.offset} is {value:#x}, no NULL pointer")
        else:
            defaults[field.name] = None if field.code == "P" else value
    return defaults


def _value(field: Field, values: bytes) -> int | float:
    code = {"P": "Q", "N": "Q", "?": "B"}.get(field.code, field.code)
    (value,) = struct.unpack_from(f"={code}", values, field.offset)
    assert isinstance(value, int | float)  # noqa: S101 - the codes above are all numbers
    return value


def inherited_defaults(kind: str, layout: StructLayout, given: dict[str, Default]) -> dict[str, Default]:
    """Take default values over from the newest known layout that shares most fields.

    Args:
        kind: "model", "context" or "batch".
        layout: the struct as the header declares it.
        given: values named on the command line.

    Returns:
        Field -> value.

    Raises:
        ProfileError: a field has no value anywhere.
    """
    known = layouts.known_layouts(kind)
    nearest = max(known, key=lambda one: (sum(f.name in one.defaults for f in layout.fields), one.name), default=None)
    values = {**(nearest.defaults if nearest else {}), **given}
    absent = [field.name for field in layout.fields if field.name not in values]
    if absent:
        raise ProfileError(f"no default value known for {', '.join(absent)}: name a library, or --default FIELD=VALUE")
    return {field.name: values[field.name] for field in layout.fields}


def merge(
    data: dict[str, Any], release: Release, structs: dict[str, tuple[StructLayout, dict[str, Default]]]
) -> dict[str, str]:
    """Bring the table of layouts up to date with one release.

    Args:
        data: the content of ``layouts.json``; changed in place.
        release: what the profile is for.
        structs: per kind the layout and its default values.

    Returns:
        Fragment file name -> C text, for layouts that are new.
    """
    fragments: dict[str, str] = {}
    chosen: dict[str, str] = {}
    for kind, (layout, defaults) in structs.items():
        text = fragment(layout)
        rows = data["layouts"][kind]
        row = next((row for row in rows if row["defaults"] == defaults and _same(kind, row["name"], layout)), None)
        if row is None:
            row = {"name": release.name, "builds": [release.build, release.build], "seen_in": [], "defaults": defaults}
            fragments[f"{STRUCTS[kind].removeprefix('llama_')}_{release.name}.h"] = text
            rows.append(row)
            rows.sort(key=lambda one: str(one["name"]))
        elif release.build is not None:
            low, high = row["builds"]
            row["builds"] = [
                min(release.build, low if low is not None else release.build),
                max(release.build, high if high is not None else release.build),
            ]
        if release.seen_in not in row["seen_in"]:
            row["seen_in"].append(release.seen_in)
        chosen[kind] = row["name"]
    _merge_profile(data["profiles"], release, chosen)
    return fragments


def _same(kind: str, name: str, layout: StructLayout) -> bool:
    shape = [(field.name, field.offset, field.size) for field in layout.fields]
    return any(
        one.name == name and [(field.name, field.offset, field.size) for field in one.layout.fields] == shape
        for one in layouts.known_layouts(kind)
    )


def _merge_profile(rows: list[dict[str, Any]], release: Release, chosen: dict[str, str]) -> None:
    for row in rows:
        same = all(row[kind] == name for kind, name in chosen.items())
        if same and row["exports"] == list(release.exports) and row["refused"] == release.refused:
            if release.seen_in not in row["seen_in"]:
                row["seen_in"].append(release.seen_in)
            return
    newest = max((row for row in rows if not row["refused"]), key=lambda row: str(row["name"]), default=None)
    rows.append(
        {
            "name": release.name,
            **chosen,
            "penalties_take_n_vocab": bool(newest and newest["penalties_take_n_vocab"]),
            "exports": list(release.exports),
            "refused": release.refused,
            "seen_in": [release.seen_in],
        }
    )
    rows.sort(key=lambda row: str(row["name"]))


def penalties_take_n_vocab(header: str) -> bool | None:
    """Read from a header whether ``llama_sampler_init_penalties`` takes the vocabulary's size first.

    Args:
        header: C text.

    Returns:
        True with five arguments, False with four, None where the header does not declare it.
    """
    variants = prototypes(header).get("llama_sampler_init_penalties")
    return None if not variants else len(variants[0].arguments) == 5


def _parse_default(text: str) -> tuple[str, Default]:
    name, _, value = text.partition("=")
    if value.upper() == "NULL":
        return name, None
    return name, float(value) if "." in value else int(value, 0)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--observe-child", metavar="LIBRARY", help=argparse.SUPPRESS)
    parser.add_argument("--header", type=Path, help="llama.h, or _cffi_bindings.py of a llama-cpp-py-sync wheel")
    parser.add_argument("--library", type=Path, help="a build of the same release, to read default values from")
    parser.add_argument("--name", help="name of the layouts that are new: year and month, such as 2026_11")
    parser.add_argument("--build", type=int, help="llama.cpp build number")
    parser.add_argument("--seen-in", help="package and version that has it")
    parser.add_argument(
        "--refused", default="", help="why this build is known and refused, such as: has no tensor mode"
    )
    parser.add_argument(
        "--export", action="append", default=[], help="a symbol that tells this profile from a like one"
    )
    parser.add_argument("--default", action="append", default=[], type=_parse_default, metavar="FIELD=VALUE")
    parser.add_argument("--data", type=Path, default=CHECKOUT / "llama_native" / "data" / "layouts.json")
    parser.add_argument("--cdefs", type=Path, default=CHECKOUT / "llama_native" / "cdefs")
    parser.add_argument("--write", action="store_true", help="change the fragments and the table")
    options = parser.parse_args(argv)
    if not options.observe_child and not (options.header and options.name and options.seen_in):
        parser.error("--header, --name and --seen-in are needed")
    return options


def main(argv: list[str]) -> int:
    """Run the program.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        0, or 1 with one line on stderr.
    """
    options = _arguments(argv)
    if options.observe_child:
        print(json.dumps(_observe_child(options.observe_child)))
        return 0
    try:
        return _make(options)
    except (ProfileError, declarations.DeclarationError, OSError) as error:
        print(f"make_profile: {error}", file=sys.stderr)
        return 1


def _make(options: argparse.Namespace) -> int:
    header = read_header(options.header)
    observed = observe(options.library) if options.library else None
    structs: dict[str, tuple[StructLayout, dict[str, Default]]] = {}
    for kind, name in STRUCTS.items():
        layout = declarations.struct_layout(header, name)
        if observed is None:
            defaults = inherited_defaults(kind, layout, dict(options.default))
        else:
            defaults = read_defaults(kind, layout, getattr(observed, kind))
        structs[kind] = (layout, defaults)
        print(f"{name}: {layout.size} bytes, {len(layout.fields)} fields")
    data = json.loads(options.data.read_text(encoding="utf-8"))
    release = Release(options.name, options.build, options.seen_in, options.refused, tuple(options.export))
    fragments = merge(data, release, structs)
    takes = penalties_take_n_vocab(header)
    for row in data["profiles"]:
        if takes is not None and release.seen_in in row["seen_in"]:
            row["penalties_take_n_vocab"] = takes
    bound = "".join((options.cdefs / file).read_text(encoding="utf-8") for file in _bound_files(options.cdefs))
    for line in prototype_differences(bound, header):
        print(f"prototype: {line}")
    for file, text in fragments.items():
        print(f"new: {file}\n{text}", end="")
        if options.write:
            (options.cdefs / file).write_text(text, encoding="utf-8")
    if options.write:
        options.data.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.data}")
    return 0


def _bound_files(cdefs: Path) -> list[str]:
    return sorted(path.name for path in cdefs.glob("*.h") if path.name == "api.h" or path.name.startswith("penalties_"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Small C libraries for the tests of the native layer, compiled on the spot, to be opened in child processes only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from llama_native import abi

TYPES = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
typedef struct ggml_backend_device *ggml_backend_dev_t;
typedef bool (*llama_progress_callback)(float progress, void *user_data);
typedef bool (*ggml_abort_callback)(void *data);
"""

NEEDED = [
    "llama_model_load_from_file",
    "llama_model_free",
    "llama_backend_init",
    "llama_init_from_model",
    "llama_free",
    "llama_n_ctx",
    "llama_decode",
    "llama_get_logits_ith",
    "llama_synchronize",
    "llama_model_get_vocab",
    "llama_vocab_n_tokens",
    "llama_tokenize",
    "llama_token_to_piece",
    "llama_get_memory",
    "llama_memory_clear",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_pos_max",
    "llama_state_get_size",
    "llama_state_get_data",
    "llama_state_set_data",
    "llama_sampler_chain_init",
    "llama_sampler_chain_add",
    "llama_sampler_apply",
    "llama_sampler_accept",
    "llama_sampler_free",
    "llama_sampler_init_dist",
    "llama_sampler_init_greedy",
    "llama_n_rs_seq",
    "ggml_backend_dev_count",
    "ggml_backend_dev_get",
    "ggml_backend_dev_name",
    "ggml_backend_dev_memory",
]
"""Functions that a session cannot do without, besides the three that tell the layout."""


def compile_library(folder: Path, name: str, source: str, *flags: str) -> Path:
    """Compile a shared library, or skip the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.c"
    written.write_text(source, encoding="utf-8")
    library = folder / f"{name}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(written), *flags], check=True)
    return library


def known(kind: str, name: str) -> abi.KnownLayout:
    """Return one layout of the table by its name."""
    return next(layout for layout in abi.known_layouts(kind) if layout.name == name)


def default_struct_source(
    model: str = "2026_09",
    context: str = "2026_10",
    *,
    insert_after: Mapping[str, str] | None = None,
    values: Mapping[str, str] | None = None,
    batch_tail: str = "",
) -> str:
    """Write C text of a library whose default functions answer like a layout of the table, or like a variation of it.

    Args:
        model: name of the layout of the model parameters.
        context: name of the layout of the context parameters.
        insert_after: field -> a declaration that stands behind it in the struct.
        values: field -> a C expression in place of its default value.
        batch_tail: declarations at the end of the batch struct.
    """
    parts = [TYPES]
    for kind, name in (("model", model), ("context", context), ("batch", "2025_03")):
        layout = known(kind, name)
        cdef = layout.cdef
        for field, declaration in (insert_after or {}).items():
            cdef = cdef.replace(f" {field};", f" {field};\n    {declaration}").replace(
                f"*{field};", f"*{field};\n    {declaration}"
            )
        parts.append(cdef.replace("\n};", f"\n    {batch_tail}\n}};") if kind == "batch" else cdef)
        if kind != "batch":
            chosen = {f.name: _expression(layout.defaults[f.name]) for f in layout.layout.fields} | {
                field: value for field, value in (values or {}).items() if field in layout.layout
            }
            assigned = ", ".join(f".{field} = {value}" for field, value in chosen.items())
            tag = layout.layout.name
            parts.append(
                f"struct {tag} llama_{kind}_default_params(void) {{ struct {tag} p = {{ {assigned} }}; return p; }}"
            )
    parts.append(
        "struct llama_batch llama_batch_get_one(int32_t *tokens, int32_t n)"
        "{ struct llama_batch b = { .n_tokens = n, .token = tokens }; return b; }"
    )
    return "\n".join(parts) + "\n"


def _expression(default: float | str | None) -> str:
    if default is None:
        return "0"
    return {"positive": "4"}.get(str(default), repr(default))


def functions(*names: str) -> str:
    """Write C text that exports functions which do nothing."""
    return "".join(f"void {name}(void) {{}}\n" for name in names)

"""Compile a variant of the stub with the system's compiler, once for each state of its sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from enum import Enum
from pathlib import Path

import platformdirs
import pytest

COMPILER = shutil.which("cc")
_SOURCES = Path(__file__).with_name("src")
_FLAGS = (
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
)


class Variant(Enum):
    """Flags of one build of the stub; the epochs are those of xllamacpp's releases of 2026."""

    # Some Pythons of 3.11 take an empty tuple for no value at all, so the default is spelt out.
    STOCK = ('-DSTUB_ID="1"',)
    NATIVE_SPLIT = ("-DSTUB_NATIVE_SPLIT",)
    EPOCH_2606 = ("-DSTUB_EPOCH=2606",)
    EPOCH_2608 = ("-DSTUB_EPOCH=2608",)
    EPOCH_2609 = ("-DSTUB_EPOCH=2609",)
    # A u32 that no header has, and with it the size of the next epoch's struct.
    EXTRA_U32 = ("-DSTUB_EPOCH=2609", "-DSTUB_EXTRA_U32")
    # The last two fields (16 bytes) are missing.
    SHORT_CONTEXT = ("-DSTUB_SHORT_CONTEXT",)
    # The right size, and an abort callback that points nowhere.
    JUNK_CALLBACK = ("-DSTUB_JUNK_CALLBACK",)
    # llama_kv_self_* in place of llama_memory_*.
    OLD_MEMORY = ("-DSTUB_OLD_MEMORY",)
    NO_SEQ_RM = ("-DSTUB_NO_SEQ_RM",)
    # llama_sampler_init_penalties without its first argument, in a build of an epoch that has it.
    OLD_PENALTIES = ("-DSTUB_OLD_PENALTIES",)
    # The same names, other structs: a fork.
    FORK = ("-DSTUB_FORK",)
    # The same library again, in another file.
    TWIN = ('-DSTUB_ID="2"',)


def build(variant: Variant = Variant.STOCK, *extra: str) -> Path:
    """Compile a variant, or take the one that was compiled from the same sources.

    Args:
        variant: which flags.
        extra: further flags, such as those of a sanitizer.

    Returns:
        The path of its ``libllama.so``, in a folder of its own.
    """
    assert COMPILER is not None
    command = [COMPILER, *_FLAGS, *variant.value, *extra]
    sources = sorted(_SOURCES.glob("*.c"))
    digest = hashlib.sha256("\0".join(command).encode())
    for path in [*sources, *sorted(_SOURCES.glob("*.h"))]:
        digest.update(path.read_bytes())
    folder = (
        Path(platformdirs.user_cache_dir("splitctl")) / "stublib" / f"{variant.name.lower()}-{digest.hexdigest()[:16]}"
    )
    library = folder / "libllama.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # Several test runs may build at once: each writes a file of its own and the last rename wins.
    made = folder / f"libllama.{os.getpid()}.tmp"
    subprocess.run([*command, "-o", str(made), *map(str, sources), "-lm"], check=True, timeout=120)
    made.rename(library)
    return library


needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="the stub library needs a C compiler on PATH as cc, and there is none"
)

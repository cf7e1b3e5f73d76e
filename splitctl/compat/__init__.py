"""The names of other libraries over a splitctl session, so that programs written for them can switch.

`splitctl.compat.llama_cpp` has what programs call of llama-cpp-python.
"""

from __future__ import annotations

import sys
from importlib import import_module

_HOME = "splitctl.compat.llama_cpp"


def install() -> None:
    """Let ``import llama_cpp`` give `splitctl.compat.llama_cpp` in this process, for libraries that import it by name.

    Raises:
        ImportError: llama-cpp-python itself was imported before.
    """
    ours = import_module(_HOME)
    there = sys.modules.setdefault("llama_cpp", ours)
    if there is not ours:
        raise ImportError("llama_cpp has been imported already; call splitctl.compat.install() before that")
    for name in ("llama", "llama_cache", "llama_chat_format", "llama_grammar", "llama_speculative", "llama_types"):
        sys.modules[f"llama_cpp.{name}"] = import_module(f"{_HOME}.{name}")

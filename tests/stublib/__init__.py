"""A small C libllama that misbehaves on request: building it, models for it, and children that load it.

Main path: ``build(Variant.STOCK)`` compiles ``src/*.c`` once (kept by the hash of the sources and flags) ->
``run_child(function, path, ...)`` runs a function of a test module in a process of its own -> there ``Stub(path)``
asks for faults and reads the log of calls. One library per process, so a test never loads it itself.

Its own call for a switch (``Variant.NATIVE_SPLIT``) is there for what no real library can be made to do: a call that
changes the state, the carried rows or what is decoded later, says no and has changed something, moves a model under
another context, or aborts. And for the laws that a run without the build of ``ci/builds --native`` is to hold to: one
machine for both ways, a fallback from a failed proof and trial, any order of calls and faults, what else changes is
composed. What the call does right is tested on that build (tests/real/test_own_call.py, tests/native).
"""

from __future__ import annotations

from tests.stublib.build import COMPILER, Variant, build, needs_compiler
from tests.stublib.child import Child, run_child
from tests.stublib.control import Call, FaultFile, Stub
from tests.stublib.models import write_model

__all__ = [
    "COMPILER",
    "Call",
    "Child",
    "FaultFile",
    "Stub",
    "Variant",
    "build",
    "needs_compiler",
    "run_child",
    "write_model",
]

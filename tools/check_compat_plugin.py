"""A plugin for pytest: `splitctl.compat` in the place of ``llama_cpp``, and models of this machine for downloads.

Used by check_compat, which runs other projects' tests with it. SPLITCTL_COMPAT_MODELS is a JSON object: a model that
those tests would download -> a file. With SPLITCTL_COMPAT_REAL the real ``llama_cpp`` stays where it is.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

from splitctl import compat


def _local(repo_id: str, *_: Any, **__: Any) -> str:
    found: dict[str, str] = json.loads(os.environ["SPLITCTL_COMPAT_MODELS"])
    return found[repo_id]


def pytest_configure() -> None:
    """Before any test is imported."""
    if "SPLITCTL_COMPAT_REAL" in os.environ:
        # Before the folder of its own tests comes first, where its sources lie without a library.
        importlib.import_module("llama_cpp")
    else:
        compat.install()
        # The bindings of C functions are not there; a test that calls them fails, the others of its file can run.
        sys.modules["llama_cpp._internals"] = ModuleType("llama_cpp._internals")
        sys.modules["llama_cpp"].__dict__.setdefault("_internals", sys.modules["llama_cpp._internals"])
    hub = importlib.import_module("huggingface_hub")
    hub.__dict__["hf_hub_download"] = _local

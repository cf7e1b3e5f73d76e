"""The child's side of ``run_child``: call one function of one test module and send its result back."""

from __future__ import annotations

import importlib
import json
import os
import sys


def _main(fd: str, request: str) -> None:
    module, name, arguments = json.loads(request)
    result = getattr(importlib.import_module(module), name)(*arguments)
    os.write(int(fd), json.dumps(result, default=str).encode())


if __name__ == "__main__":
    _main(*sys.argv[1:])

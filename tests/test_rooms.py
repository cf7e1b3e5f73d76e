"""The rooms of the house, enforced; and proof that each rule can be broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rooms import PACKAGES, RULES, House, Rule, faults_of_tests

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def house() -> House:
    """The packages of this checkout."""
    return House.read(_ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(house: House, rule: Rule) -> None:
    """No module of the three packages breaks the rule."""
    assert len(house.modules) > len(PACKAGES)
    assert not (found := [str(violation) for violation in rule(house)]), "\n".join(["", rule.__doc__ or "", *found])


_DOC = '"""What it is for."""\n'
_PURE = '"""What it is for. Pure."""\n'

#: Rule, a house of snippets that breaks it, and a word of the message.
_BROKEN: list[tuple[str, dict[str, str], str]] = [
    ("leaves_do_not_see_each_other", {"statecodec.parse": "import llama_native"}, "a leaf knows no other"),
    (
        "leaves_do_not_see_each_other",
        {"llama_native.model": "from splitctl.errors import Busy"},
        "a leaf knows no other",
    ),
    (
        "leaves_do_not_see_each_other",
        {"splitctl.session.session": "def f():\n    import tools.bench"},
        "use the packages",
    ),
    ("leaves_do_not_see_each_other", {"splitctl.session.session": "from tests import rooms"}, "use the packages"),
    ("only_declared_packages", {"llama_native.model": "import click"}, "not for this package"),
    ("only_declared_packages", {"llama_native.model": "import subprocess"}, "does without"),
    ("only_declared_packages", {"splitctl.model.facts": "import gguf"}, "not for this package"),
    ("only_declared_packages", {"splitctl.cli.run": "import starlette"}, "not for this package"),
    (
        "only_declared_packages",
        {"splitctl.model.facts": "from typing_extensions import Buffer"},
        "not for this package",
    ),
    *(
        ("only_declared_packages", {"statecodec.parse": f"import {name}"}, "does without")
        for name in ("os", "mmap", "threading", "time", "logging", "pathlib", "os.path")
    ),
    ("only_declared_packages", {"statecodec.parse": "import cffi"}, "not for this package"),
    ("imports_go_down", {"splitctl.session.session": "from splitctl.cli import run"}, "above or beside"),
    (
        "imports_go_down",
        {"splitctl.carry.file": "def f():\n    from splitctl.session import Session"},
        "above or beside",
    ),
    ("imports_go_down", {"splitctl.planning.cost": "import splitctl.switching.rules"}, "above or beside"),
    ("imports_go_down", {"splitctl.probing.probe": "from splitctl.switching import machine"}, "above or beside"),
    ("imports_go_down", {"splitctl.worker.main": "from ..http import app"}, "above or beside"),
    (
        "imports_go_down",
        {"splitctl.errors": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import splitctl.outcome"},
        "above or beside",
    ),
    ("imports_go_down", {"splitctl.attic.trunk": ""}, "has no height"),
    (
        "no_import_cycles",
        {"splitctl.a": "from splitctl import b", "splitctl.b": "def f():\n    import splitctl.a", "splitctl": ""},
        "splitctl.a -> splitctl.b -> splitctl.a",
    ),
    ("leaves_are_used_where_said", {"splitctl.session.session": "import statecodec"}, "imports statecodec"),
    ("leaves_are_used_where_said", {"splitctl.cli.devices": "import llama_native"}, "imports llama_native"),
    (
        "leaves_are_used_where_said",
        {"splitctl.host.supervisor": "from llama_native import Library"},
        "imports llama_native",
    ),
    ("leaves_are_used_where_said", {"splitctl.ipc.process": "import splitctl.worker.run"}, "in the worker alone"),
    (
        "leaves_are_used_where_said",
        {
            "splitctl.switching.transfer": "import statecodec, llama_native",
            "splitctl.model.facts": "import statecodec\nimport llama_native",
        },
        "both leaves",
    ),
    ("leaves_are_entered_by_the_front", {"splitctl.session.session": "import llama_native.model"}, "stand in __init__"),
    ("native_objects_stay_inside", {"splitctl.session.session": "import cffi"}, "outside llama_native"),
    ("native_objects_stay_inside", {"splitctl.session.session": "def f(m):\n    return m._ffi.NULL"}, "no C object"),
    ("native_objects_stay_inside", {"llama_native.model": "def f(ffi):\n    ffi.dlopen('x')"}, "one door"),
    ("native_objects_stay_inside", {"llama_native.library": "import ctypes"}, "imports ctypes"),
    ("codec_reads_no_files", {"statecodec.parse": "def f(p):\n    return open(p)"}, "bytes come in"),
    ("codec_reads_no_files", {"statecodec.parse": "def f(p):\n    return np.memmap(p)"}, "bytes come in"),
    ("codec_reads_no_files", {"statecodec.parse": "def f(b):\n    return struct.unpack('<I', b)"}, "cursor alone"),
    ("codec_reads_no_files", {"statecodec.image": "def f(b):\n    return np.frombuffer(b[4:])"}, "cursor alone"),
    ("codec_reads_no_files", {"statecodec.image": "def f(b):\n    return np.frombuffer(b, offset=4)"}, "cursor alone"),
    ("pure_modules_are_pure", {"splitctl.switching.machine": _PURE + "from time import monotonic"}, "is pure"),
    ("pure_modules_are_pure", {"splitctl.host.ledger": _PURE + "def f():\n    import random"}, "is pure"),
    ("pure_modules_are_pure", {"splitctl.planning.cost": "def f(p):\n    open(p)"}, "is pure"),
    ("pure_modules_are_pure", {"splitctl.switching.machine": _PURE + "def f():\n    global x\n    x = 1"}, "is pure"),
    ("the_command_line_alone_speaks", {"splitctl.session.session": "def f():\n    print(1)"}, "cli alone"),
    (
        "the_command_line_alone_speaks",
        {"splitctl.session.session": "import sys\ndef f():\n    sys.exit(1)"},
        "cli alone",
    ),
    ("the_command_line_alone_speaks", {"llama_native.discover": "import os\nX = os.environ"}, "cli alone"),
    ("the_command_line_alone_speaks", {"splitctl.ipc.process": "from os import getenv"}, "cli alone"),
    ("the_command_line_alone_speaks", {"splitctl.carry.file": "import sys\nX = sys.argv[1]"}, "cli alone"),
    ("importing_does_nothing", {"llama_native.library": "start()"}, "when it is imported"),
    ("importing_does_nothing", {"splitctl.session.session": "import os\nos.environ['A'] = 'b'"}, "when it is imported"),
    ("importing_does_nothing", {"splitctl.session.session": "with open('x') as f:\n    pass"}, "when it is imported"),
    ("modules_say_one_thing", {"splitctl.session.session": "x = 1\n" * 650}, "lines"),
    (
        "modules_say_one_thing",
        {"splitctl.session.session": "def f():\n    raise NotImplementedError"},
        "leaves something out",
    ),
]


@pytest.mark.parametrize(("name", "sources", "word"), _BROKEN)
def test_a_rule_sees_what_breaks_it(name: str, sources: dict[str, str], word: str) -> None:
    """Every rule finds the snippet that was written to break it, and names the module."""
    (rule,) = [rule for rule in RULES if rule.__name__ == name]
    found = list(
        rule(House.of({module: text if text.startswith(_PURE) else _DOC + text for module, text in sources.items()}))
    )
    assert any(word in violation.text and violation.module in sources for violation in found), found


def test_every_rule_is_tried() -> None:
    """No rule is without a snippet that breaks it."""
    assert {name for name, _, _ in _BROKEN} == {rule.__name__ for rule in RULES}


def test_a_module_without_docstring_is_seen() -> None:
    """The table above gives every snippet a docstring, so this case stands alone."""
    (rule,) = [rule for rule in RULES if rule.__name__ == "modules_say_one_thing"]
    assert [violation.text for violation in rule(House.of({"splitctl.x": "y = 1"}))] == ["has no docstring"]


def test_rules_leave_sound_code_alone() -> None:
    """A house that does what is allowed, in every place that has a permission of its own, breaks no rule."""
    sound = {
        "llama_native": "from llama_native.library import Library",
        "llama_native.library": "import cffi\nimport os\n_FFI = cffi.FFI()\ndef f(p):\n    return _FFI.dlopen(p)",
        "llama_native.discover": "def f(env):\n    return env.get('LLAMA_NATIVE_LIB')",
        "statecodec": "from statecodec.cursor import Cursor",
        "statecodec.cursor": "import struct\ndef f(b):\n    return struct.unpack('<I', b)",
        "statecodec.image": "import numpy as np\ndef f(b):\n    return np.frombuffer(b, dtype=np.uint8)",
        "statecodec.transcode": "from gguf import quants",
        "splitctl": "from splitctl.session.session import Session",
        "splitctl.errors": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pathlib import Path",
        "splitctl.carry.file": "import statecodec\nfrom splitctl.errors import Busy",
        "splitctl.switching": "",
        "splitctl.switching.machine": "from enum import Enum\nfrom splitctl.errors import Busy",
        "splitctl.switching.transfer": "import time, llama_native, statecodec\nfrom splitctl.switching import machine",
        "splitctl.session": "",
        "splitctl.session.session": "from llama_native import Library\nfrom splitctl.switching.transfer import perform",
        "splitctl.host": "",
        "splitctl.worker.main": "import sys\nfrom splitctl.session import Session\ndef main():\n    sys.exit(0)",
        "splitctl.ipc.process": "import subprocess\nimport sys\nX = sys.executable",
        "splitctl.cli": "import click\nimport sys\ndef main():\n    print(sys.argv)\n    sys.exit(0)",
    }
    house = House.of({module: text if text.startswith(_PURE) else _DOC + text for module, text in sound.items()})
    assert not [str(violation) for rule in RULES for violation in rule(house)]


def test_tests_have_their_sentence_and_do_not_sleep() -> None:
    """Each test says in one line what it shows, and waits for events instead of a clock."""
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    found = [
        str(violation)
        for path in paths
        for violation in faults_of_tests(path.relative_to(_ROOT), path.read_text(encoding="utf-8"))
    ]
    assert paths
    assert not found, "\n".join(found)


def test_the_judge_of_tests_sees_faults() -> None:
    """A test without a sentence, one with a paragraph, and one that sleeps are each found."""
    bare = "def test_a():\n    pass\n"
    long = 'def test_b():\n    """One.\n\n    Two.\n    """\n'
    sleepy = 'def test_c():\n    """Waits."""\n    time.sleep(1)\n'
    assert [violation.line for violation in faults_of_tests(Path("x"), bare + long + sleepy)] == [1, 3, 10]


_IMPORT_ALL = """
import importlib, json, os, pkgutil, signal, sys, threading

def look():
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = {line.split(None, 5)[5].strip() for line in maps if len(line.split(None, 5)) == 6}
    return {
        "native": sorted(p for p in mapped if any(w in os.path.basename(p) for w in ("llama", "ggml", "libcuda"))),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": len(os.listdir("/proc/self/task")),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    }

import numpy  # starts the threads of its linear algebra, which are not ours
name = sys.argv[1]
before = look()
package = importlib.import_module(name)
names = [name]
if "." not in name:
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            names.append(found.name)
after = look()
print(json.dumps({"names": names, "changed": [k for k in before if before[k] != after[k]], "native": after["native"]}))
"""


@pytest.mark.parametrize("name", [*PACKAGES, "splitctl.cli"])
def test_importing_has_no_effects(name: str) -> None:
    """Importing every module of a package maps no native library, starts, opens, changes and prints nothing."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, name], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["names"]
    assert (answer["changed"], answer["native"], done.stderr) == ([], [], "")

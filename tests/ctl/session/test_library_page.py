"""docs/library.md says what programs can do with splitctl, and its programs run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import splitctl
from splitctl import SwitchStatus
from tests.ctl import one_kv_head
from tests.native.real import NEWEST, library_of

_ROOT = Path(__file__).parents[3]
_PAGE = (_ROOT / "docs" / "library.md").read_text(encoding="utf-8")
_USER = Path(__file__).parent / "user_program.py"


@pytest.mark.build
@pytest.mark.model
def test_its_programs_run(smollm2: Path, tmp_path: Path) -> None:
    """One after the other, without trials: they switch, draw under a grammar, and bring back what was saved."""
    blocks = re.findall(r"```py\n(.*?)```", _PAGE, re.DOTALL)
    assert len(blocks) == 6
    (tmp_path / "model.gguf").symlink_to(one_kv_head.made(smollm2))
    env = {
        **os.environ,
        "LLAMA_NATIVE_LIB": str(library_of(NEWEST)),
        "PYTHONPATH": str(_ROOT),
    }
    # A trial in a child for each placement takes longer than all of them; README's program has it.
    program = re.sub(r'open\("model.gguf", (\w+)', r"\g<0>, prober=None", "\n".join([*blocks, "print('end')"]))
    assert program.count("prober=None") == len(blocks)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert re.search(r"(yes|no)\.$", said, re.MULTILINE)
    assert len(re.findall(r"switched ", said)) == 2
    assert "Fed(n_kept=0, n_read=" in said
    assert "finish_reason=" in said
    assert re.search(r"^False \d+$", said, re.MULTILINE)
    assert said.endswith("end\n")


def test_it_names_everything_public_once() -> None:
    """In its tables of names and errors; the ends of a switch have a row each."""
    tables = _PAGE[_PAGE.index("## Names") :]
    rows = [row.split("|")[1] for row in tables.splitlines() if row.startswith("|")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    # It stands above the table that it is the root of.
    assert sorted([*named, "SplitctlError"]) == sorted(splitctl.__all__)
    assert "is a `SplitctlError`" in tables
    switching = _PAGE[_PAGE.index("| `outcome.status`") : _PAGE.index("`check` finds")]
    ends = re.findall(r"^\| `(\w+)` \|", switching, re.MULTILINE)
    assert sorted(ends) == sorted(one.value for one in SwitchStatus)


def test_a_typed_program_uses_every_public_name() -> None:
    """`ci/check` has mypy read it, strictly."""
    program = ast.parse(_USER.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(program) if isinstance(node, ast.Attribute)}
    assert sorted(set(splitctl.__all__) - used) == []
    assert "tests/ctl/session/user_program.py" in (_ROOT / "ci" / "check").read_text(encoding="utf-8")


def test_an_import_takes_no_quarter_of_a_second() -> None:
    """Of processor time, the best of a few children, beside what Python takes by itself; numpy comes with a session."""
    says = "import sys; print('numpy' in sys.modules, __import__('time').process_time())"

    def best(program: str) -> tuple[str, float]:
        told = [
            subprocess.run(
                [sys.executable, "-c", f"{program}; {says}"], cwd=_ROOT, capture_output=True, text=True, check=True
            ).stdout.split()
            for _ in range(3)
        ]
        return told[0][0], min(float(one) for _, one in told)

    _, bare = best("pass")
    has_numpy, front = best("import splitctl")
    assert has_numpy == "False"
    assert front - bare < 0.25
    _, client = best("import splitctl; splitctl.connect")
    assert client - bare < 0.25

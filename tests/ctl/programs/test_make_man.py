"""The man page says what the help says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tools.make_man import PAGE, commands
from tools.places import CHECKOUT


def test_the_page_is_made_from_the_command_line(tmp_path: Path) -> None:
    """docs/splitctl.1 is what the program makes of the commands; UPDATE_DOCS=1 writes it."""
    # In a process of its own: click keeps the help flag that a command had when a test called it by itself.
    out = PAGE if os.environ.get("UPDATE_DOCS") else tmp_path / "splitctl.1"
    subprocess.run([sys.executable, "-m", "tools.make_man", "--out", out], cwd=CHECKOUT, check=True)
    assert PAGE.read_text(encoding="utf-8") == out.read_text(encoding="utf-8")


def test_every_command_and_every_flag_is_in_the_page() -> None:
    """A chapter for each command, with all spellings of its flags and their help."""
    text = PAGE.read_text(encoding="utf-8").replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    chapters = dict(re.findall(r'^\.SS "(.+?)"\n(.*?)(?=^\.S[SH])', text, re.MULTILINE | re.DOTALL))
    met = list(commands())
    assert list(chapters) == [context.command_path for context in met]
    for context in met:
        lines = chapters[context.command_path].splitlines()
        heads = [set(re.split(r"[ ,/]+", line)) for line in lines if line.startswith("-")]
        options = [param for param in context.command.get_params(context) if isinstance(param, click.Option)]
        assert len(options) == len(heads)
        for option, head in zip(options, heads, strict=True):
            assert {*option.opts, *option.secondary_opts} <= head
            assert any(line.startswith(option.help or "no help") for line in lines)


def test_it_is_set_without_a_warning() -> None:
    """groff, or mandoc where that is the system's, finds nothing to say, and words keep their dashes and quotes."""
    setter = next((one for one in ("groff", "mandoc") if shutil.which(one)), None)
    if setter is None:
        pytest.skip("no groff and no mandoc")
    arguments = {"groff": ["-ww", "-man", "-Tascii", "-P-cbou"], "mandoc": ["-Wwarning", "-Tascii"]}[setter]
    done = subprocess.run([setter, *arguments, str(PAGE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    assert {"SPLITCTL(1)", "--split-mode", "-psm", "--no-kv-offload", "LLAMA_ARG_SPLIT_MODE."} <= set(words)

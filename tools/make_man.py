"""Make the man page, `docs/splitctl.1`, from the help of all commands.

    python -m tools.make_man [--out FILE]

The wheel brings the page along as share/man/man1/splitctl.1. A test compares it with the command line.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from splitctl.cli.main import cli
from tools.places import CHECKOUT

PAGE = CHECKOUT / "docs" / "splitctl.1"
_EXAMPLES = (
    ("splitctl run -m model.gguf --device CUDA0,CUDA1 -psm layer -sm tensor --chat -f question.txt",
     "Read a prompt under a layer split, switch, and answer under a tensor split."),
    ("splitctl serve -m model.gguf --device CUDA0,CUDA1 --port 8080",
     "Keep a session and serve it, over HTTP too."),
    ("splitctl switch --to tensor", "Switch it while it answers."),
)  # fmt: skip


def man_page() -> str:
    """Give the page in man's macros: name, synopsis, each command with its flags, exit status, examples."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    summary = cli.get_short_help_str(200).rstrip(".")
    yield '.\\" Made by tools.make_man from the help of the commands.'
    yield '.TH SPLITCTL 1 "" "splitctl" "User Commands"'
    yield from (".SH NAME", f"splitctl \\- {_text(summary)}")
    yield from (".SH SYNOPSIS", ".B splitctl", _text("COMMAND [OPTIONS] [ARGS]..."))
    yield from (".SH DESCRIPTION", *_paragraphs(cli.help or ""))
    yield from (".SH OPTIONS", *_options(_root()))
    yield ".SH COMMANDS"
    for context in commands():
        yield f'.SS "{_text(context.command_path)}"'
        yield from (".PP", f"\\fB{_text(context.command_path)}\\fR {_text(' '.join(_usage(context)))}")
        yield from _paragraphs(context.command.help or "")
        yield from _options(context)
    yield ".SH EXIT STATUS"
    table = (CHECKOUT / "docs" / "commands.md").read_text(encoding="utf-8")
    for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE):
        yield from (".TP", code, _text(f"{meaning}."))
    yield ".SH EXAMPLES"
    for line, meaning in _EXAMPLES:
        yield from (".PP", _text(meaning), ".PP", ".RS 4", ".nf", _text(line), ".fi", ".RE")


def commands(above: click.Context | None = None) -> Iterator[click.Context]:
    """Give every command of the command line as its context, those of groups after the group.

    Args:
        above: the group's context; None: all.
    """
    above = above or _root()
    if not isinstance(above.command, click.Group):
        return
    for name in above.command.list_commands(above):
        if command := above.command.get_command(above, name):
            context = click.Context(command, info_name=name, parent=above)
            yield context
            yield from commands(context)


def _root() -> click.Context:
    return click.Context(cli, info_name="splitctl", **cli.context_settings)


def _usage(context: click.Context) -> list[str]:
    return context.command.collect_usage_pieces(context)


def _options(context: click.Context) -> Iterator[str]:
    for param in context.command.get_params(context):
        record = param.get_help_record(context)
        if record is None:
            continue
        flags, meaning = record
        variables = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
        also = f" Variable: {', '.join(variables)}." if variables else ""
        yield ".TP"
        yield re.sub(r"(?<![\w-])(\\-[\w\\-]*)", r"\\fB\1\\fR", _text(flags))
        yield _text(meaning + also)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield from (".PP", _text(" ".join(paragraph.split())))


def _text(plain: str) -> str:
    """Spell a line for man: backslashes, a dash that begins a word, a point or quote that begins the line."""
    spelled = re.sub(r"(?<!\w)-+", lambda dashes: "\\-" * len(dashes[0]), plain.replace("\\", "\\e"))
    spelled = re.sub(r"(?<=\\-)(\w+(?:-\w+)+)", lambda flag: flag[0].replace("-", "\\-"), spelled)
    return f"\\&{spelled}" if spelled[:1] in {".", "'"} else spelled


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; gives the exit status."""
    words = argparse.ArgumentParser(prog="python -m tools.make_man", description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--out", type=Path, default=PAGE, help="the file, instead of docs/splitctl.1")
    out: Path = words.parse_args(argv).out
    out.write_text(man_page(), encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The prompt of a command: from its argument, a file or stdin, as text."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from splitctl.errors import SplitctlError

#: A longer prompt is no prompt [bytes].
_MAX_PROMPT_BYTES = 64 * 1024 * 1024


class PromptUnreadable(SplitctlError):
    """A prompt that cannot be read as text."""


def read_prompt(text: str | None, file: str | None, *, needed: bool) -> str:
    """Take the prompt from `-p`, or from the file of `-f` (`-` is stdin); empty only where none is needed.

    Raises:
        click.UsageError: no source, two, or an empty prompt.
        PromptUnreadable: the source cannot be read, or is not UTF-8.
    """
    if text is None and file is None and not needed:
        return ""
    if (text is None) == (file is None):
        raise click.UsageError("give the prompt with -p TEXT or with -f FILE (one of them)")
    if text is not None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where = f"byte {error.start} of -p"
            raise PromptUnreadable(f"the prompt is not UTF-8 ({where}); convert it, for example with iconv") from error
    else:
        text = _decoded(_read(str(file)), str(file))
    if not text:
        raise click.UsageError("the prompt is empty; give some text with -p or -f")
    return text


def read_up_to(file: str, limit: int) -> bytes:
    """Read a file, or stdin for `-`; one byte more than `limit` says that it is longer."""
    if file == "-":
        return sys.stdin.buffer.read(limit + 1)
    with Path(file).open("rb") as handle:
        return handle.read(limit + 1)


def _read(file: str) -> bytes:
    try:
        raw = read_up_to(file, _MAX_PROMPT_BYTES)
    except OSError as error:
        text = f"the prompt file {file} cannot be read: {error.strerror}; name a text file, or - for stdin"
        raise PromptUnreadable(text) from error
    if len(raw) > _MAX_PROMPT_BYTES:
        raise PromptUnreadable(f"the prompt file {file} is over {_MAX_PROMPT_BYTES} bytes; name a text file")
    return raw


def _decoded(raw: bytes, file: str) -> str:
    """Read bytes as UTF-8; llama.cpp drops one line feed at the end, and so do we."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{raw[error.start]:02x}"
        message = f"the prompt file {file} is not UTF-8 ({found}); convert it, for example with iconv"
        raise PromptUnreadable(message) from error
    return text.removesuffix("\n")

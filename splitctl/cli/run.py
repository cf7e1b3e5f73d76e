"""`splitctl run`: read a prompt, switch if asked to, generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from splitctl.cli.child import ask
from splitctl.cli.options import (
    MODES,
    Mode,
    json_option,
    library_option,
    placement_options,
    rpc_option,
    sampler_options,
    verbose_option,
)
from splitctl.cli.output import ExitCode, Screen, error_body, one_line, print_json, switch_table
from splitctl.host import RunRequest
from splitctl.placement import Placement, SplitMode
from splitctl.sequence import SamplerSpec

_PROOFS = ("bytes", "positions", "off")

#: A longer prompt is no prompt [bytes].
_MAX_PROMPT_BYTES = 64 * 1024 * 1024

_EXIT_OF_STATUS = {
    "switched": ExitCode.DONE,
    "unchanged": ExitCode.DONE,
    "fell_back": ExitCode.FELL_BACK,
    "refused": ExitCode.REFUSED,
    "cancelled": ExitCode.CANCELLED,
    "parked": ExitCode.PARKED,
}


class PromptUnreadable(click.ClickException):
    """A prompt that cannot be read as text."""

    exit_code = ExitCode.FAILED


@click.command()
@click.option(
    "-m", "--model", type=click.Path(path_type=Path), envvar="LLAMA_ARG_MODEL", required=True, help="The GGUF file."
)
@click.option("-p", "--prompt", help="The prompt, as raw text.")
@click.option("-f", "--file", "prompt_file", type=click.Path(), metavar="FILE", help="Read the prompt; - is stdin.")
@click.option("--chat", is_flag=True, help="Apply the model's chat template to the prompt.")
@click.option(
    "-n",
    "--predict",
    "--n-predict",
    "n_predict",
    type=int,
    envvar="LLAMA_ARG_N_PREDICT",
    default=-1,
    show_default=True,
    help="Most tokens to generate; -1 goes on until the model ends or the context is full.",
)
@click.option(
    "-psm",
    "--prompt-split-mode",
    "prompt_mode",
    type=Mode(),
    metavar=MODES,
    help="Split mode for the prompt; where it is not -sm's, the session switches before it generates.",
)
@click.option("--proof", type=click.Choice(_PROOFS), default="bytes", show_default=True, help="How a switch is proved.")
@click.option("--no-convert", is_flag=True, help="Refuse a switch that would have to convert the cache.")
@click.option("--force", is_flag=True, help="Switch in spite of warnings.")
@click.option(
    "--restore",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Begin with a saved session: a carry, or a session or slot file of llama.cpp. The prompt follows it.",
)
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Save the session at the end.")
@placement_options
@sampler_options
@library_option
@rpc_option
@verbose_option
@json_option
def run(
    *,
    model: Path,
    prompt: str | None,
    prompt_file: str | None,
    chat: bool,
    n_predict: int,
    prompt_mode: SplitMode | None,
    proof: str,
    no_convert: bool,
    force: bool,
    restore: Path | None,
    save: Path | None,
    placement: Placement,
    sampler: SamplerSpec,
    library: Path | None,
    rpc: tuple[str, ...],
    verbose: bool,
    as_json: bool,
) -> int:
    """Read a prompt under one split mode, switch to another, and generate."""
    with Screen(as_json=as_json, verbose=verbose) as screen:
        try:
            text = _prompt(prompt, prompt_file, needed=restore is None)
        except PromptUnreadable as error:
            return screen.fail("PromptUnreadable", error.message, ExitCode.FAILED)
        request = RunRequest(
            model=model,
            library=library,
            prompt=text,
            chat=chat,
            n_predict=n_predict,
            placement=placement,
            prompt_mode=prompt_mode,
            sampler=sampler,
            proof=proof,
            force=force,
            rpc=rpc,
            convert=not no_convert,
            restore=restore,
            save=save,
        )
        answer = ask(request, screen)
        if answer.code is not ExitCode.DONE:
            return answer.code
        return _finish(answer.body, screen, as_json=as_json)


def _finish(body: dict[str, Any], screen: Screen, *, as_json: bool) -> ExitCode:
    """Show what came of a run that answered, and choose its exit status."""
    outcome = body["switch"]
    code = _EXIT_OF_STATUS[outcome["status"]] if outcome is not None else ExitCode.DONE
    screen.end_text()
    if as_json and code is ExitCode.CANCELLED:
        print_json(error_body("Cancelled", outcome["reason"], code, body))
    elif as_json:
        print_json(body)
    if outcome is None:
        screen.line(_rates(body))
        return code
    if not as_json:
        screen.table(switch_table(outcome))
    screen.line(_rates(body))
    if body["payoff"] is not None:
        screen.line(body["payoff"]["sentence"])
    if code is not ExitCode.DONE:
        ended = "; ".join(one["text"] for one in outcome["reasons"]) or outcome["reason"]
        status = outcome["status"].replace("_", " ")
        screen.line(f"splitctl: the switch to {outcome['requested']} ended: {status}: {one_line(ended)}")
    return code


def _rates(body: dict[str, Any]) -> str:
    """Say how fast it was, in one line."""
    timings = body["timings"]
    parts = {"load": f"load {timings['load_ms']:,.0f} ms"}
    for name in ("prompt", "generate"):
        part = timings[name]
        rate = f"{part['tps']:,.1f} tokens/s" if part["tps"] is not None else "-"
        parts[name] = f"{name} {part['n']} tokens at {rate}"
    if body["payoff"] is not None:
        parts["generate"] = f"switch {body['payoff']['rates']['switch_s']:,.2f} s, {parts['generate']}"
    return ", ".join(parts.values())


def _prompt(text: str | None, file: str | None, *, needed: bool) -> str:
    """Take the prompt from its one source.

    Args:
        text: the prompt of `-p`.
        file: the file of `-f`, `-` for stdin.
        needed: whether a run without a prompt makes no sense.

    Returns:
        The prompt; empty only where none is needed.

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


def _read(file: str) -> bytes:
    """Read a prompt's bytes."""
    try:
        if file == "-":
            raw = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
        else:
            with Path(file).open("rb") as handle:
                raw = handle.read(_MAX_PROMPT_BYTES + 1)
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

"""`splitctl run`: read a prompt, switch if asked to, generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from splitctl.carry.durable import check_place
from splitctl.carry.sampling import SAMPLER_PARAMS, SamplerSpec
from splitctl.cli.attach import Talk, answer_once
from splitctl.cli.child import ask
from splitctl.cli.completions import ModelFile, session_names
from splitctl.cli.hosts import address_of, with_screen
from splitctl.cli.options import (
    MODE,
    Parsed,
    library_option,
    named,
    placement_options,
    predict_option,
    prompt_options,
    rpc_option,
    sampler_options,
    switch_options,
    verbose_option,
    weights_option,
)
from splitctl.cli.output import EXIT_OF_STATUS, ExitCode, Screen, error_body, print_json
from splitctl.cli.prompts import read_prompt
from splitctl.cli.switch import outcome_line, show_switch
from splitctl.ipc.jobs import RunRequest
from splitctl.outcome import SwitchOptions, WeightsTier
from splitctl.placement import Placement, SplitMode

_MAX_BATCH = 2**31 - 1

#: Parameters that make sense for a session that is served.
_WITH_SESSION = {"session", "prompt", "prompt_file", "chat", "n_predict", "verbose", "as_json", *SAMPLER_PARAMS}


def _chunk(text: str) -> int:
    if text == "auto":
        return 0
    try:
        tokens = int(text)
    except ValueError:
        tokens = 0
    if not 1 <= tokens <= _MAX_BATCH:
        raise ValueError(f"{text!r} is not a number of tokens from 1 on, or auto")
    return tokens


@click.command()
@click.option("-m", "--model", type=ModelFile(), envvar="LLAMA_ARG_MODEL", help="The GGUF file; or use --session.")
@click.option(
    "--session",
    metavar="NAME",
    shell_complete=session_names,
    help="Generate with a session that splitctl serve holds, instead of opening a model (see splitctl attach).",
)
@prompt_options
@click.option("--chat", is_flag=True, help="Apply the model's chat template to the prompt.")
@predict_option
@click.option(
    "-psm",
    "--prompt-split-mode",
    "prompt_mode",
    type=MODE,
    help="Split mode for the prompt; if it is not that of -sm, the session switches before it generates.",
)
@click.option(
    "-pb",
    "--prompt-batch-size",
    "prompt_batch",
    type=click.IntRange(1, _MAX_BATCH),
    metavar="N",
    help="Most tokens of one decode of the prompt; -b is for the generation.",
)
@click.option(
    "-pub",
    "--prompt-ubatch-size",
    "prompt_ubatch",
    type=Parsed("[N|auto]", _chunk),
    help="Most tokens of the prompt computed at once; auto takes the most that every device has memory for.",
)
@switch_options
@weights_option
@click.option(
    "--restore",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Start from a saved session: a carry, or a session or slot file of llama.cpp. The prompt follows it.",
)
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Save the session at the end.")
@placement_options
@sampler_options
@library_option
@rpc_option
@verbose_option
@with_screen
def run(
    *,
    model: Path | None,
    session: str | None,
    prompt: str | None,
    prompt_file: str | None,
    chat: bool,
    n_predict: int,
    prompt_mode: SplitMode | None,
    prompt_batch: int | None,
    prompt_ubatch: int | None,
    options: SwitchOptions,
    weights: WeightsTier,
    restore: Path | None,
    save: Path | None,
    placement: Placement,
    sampler: SamplerSpec,
    library: Path | None,
    rpc: tuple[str, ...],
    screen: Screen,
) -> int:
    """Read a prompt under one split mode, switch to another, and generate."""
    if model is None and session is None:
        hint = "'-m' / '--model'"
        raise click.MissingParameter(ctx=click.get_current_context(), param_hint=hint, param_type="option")
    text = read_prompt(prompt, prompt_file, needed=restore is None)
    if model is None or session is not None:
        _refuse_other_flags()
        return answer_once(Talk(address_of(session), sampler, n_predict, chat), text, screen)
    if save is not None:
        check_place(save)
    request = RunRequest(
        model=model,
        library=library,
        prompt=text,
        chat=chat,
        n_predict=n_predict,
        placement=placement,
        prompt_mode=prompt_mode,
        sampler=sampler,
        options=options,
        rpc=rpc,
        restore=restore,
        save=save,
        prompt_batch=prompt_batch,
        prompt_ubatch=prompt_ubatch,
        sampler_named=named(SAMPLER_PARAMS),
        weights=weights,
    )
    answer = ask(request, screen)
    if answer.code is not ExitCode.DONE:
        return answer.code
    return _finish(answer.body, screen)


def _refuse_other_flags() -> None:
    """Refuse flags that make no sense for a session that another process holds."""
    context = click.get_current_context()
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if source is ParameterSource.COMMANDLINE and param.name not in _WITH_SESSION:
            raise click.UsageError(f"{param.opts[0]} is not for a session that is served; leave it out, or --session")


def _finish(body: dict[str, Any], screen: Screen) -> ExitCode:
    outcome = body["switch"]
    code = EXIT_OF_STATUS[outcome["status"]] if outcome is not None else ExitCode.DONE
    screen.end_text()
    if screen.as_json and code is ExitCode.CANCELLED:
        print_json(error_body("Cancelled", outcome["reason"], code, body))
    elif screen.as_json:
        print_json(body)
    if outcome is not None and not screen.as_json:
        show_switch(outcome, screen)
    screen.line(_rates(body))
    if body["payoff"] is not None and (verdict := _verdict(body["payoff"])):
        screen.line(verdict)
    if outcome is not None and code is not ExitCode.DONE:
        screen.line(f"splitctl: {outcome_line(outcome)}")
    return code


def _verdict(payoff: dict[str, Any]) -> str:
    """Say what the switch was worth, or that one would have paid; nothing where the mode was well chosen."""
    known = payoff["by_profile"]
    if payoff["rates"]["switch_s"] is None:
        is_worth_a_line = known["saved_s"] < 0.0 and not known["close"]
        return str(known["sentence"]) if is_worth_a_line else ""
    # What the run shows by itself is certain; what it cannot tell the profile can.
    return str(payoff["sentence"] if known is None or payoff["paid"] is not None else known["sentence"])


def _rates(body: dict[str, Any]) -> str:
    timings = body["timings"]
    parts = {"load": f"load {timings['load_ms']:,.0f} ms"}
    for name in ("prompt", "generate"):
        part = timings[name]
        rate = f"{part['tps']:,.1f} tokens/s" if part["tps"] is not None else "-"
        parts[name] = f"{name} {part['n']} tokens at {rate}"
    if body["payoff"] is not None and body["payoff"]["rates"]["switch_s"] is not None:
        parts["generate"] = f"switch {body['payoff']['rates']['switch_s']:,.2f} s, {parts['generate']}"
    return ", ".join(parts.values())

"""Flags that several commands share: names, defaults and LLAMA_ARG_* variables are llama.cpp's.

Source: common/arg.cpp of llama.cpp.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from splitctl.carry.sequence import RANDOM_SEED, SamplerSpec
from splitctl.errors import ConfigInvalid
from splitctl.placement import KV_TYPES, FlashAttn, Placement, PlacementInvalid, SplitMode, parse_tensor_split

Command = Callable[..., Any]

_MODES = [mode.value for mode in SplitMode]

#: How help shows a split mode.
MODES = f"[{'|'.join(_MODES)}]"
_TRUE = {"on", "enabled", "true", "1"}
_FALSE = {"off", "disabled", "false", "0"}

#: Sequences of a server.  Source: llama-server.
_N_SERVED = 4

#: A field of a placement, as the user knows it.
FLAG_OF_FIELD = {
    "mode": "-sm",
    "devices": "--device",
    "tensor_split": "-ts",
    "main_gpu": "-mg",
    "n_gpu_layers": "-ngl",
    "n_ctx": "-c",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "offload_kqv": "-nkvo",
    "flash_attn": "-fa",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "n_seq_max": "-np",
    "kv_unified": "-kvu",
    "n_threads": "-t",
    "n_threads_batch": "-tb",
}


class Layers(click.ParamType[int]):
    """A number of layers, or `auto` or `all`."""

    name = "N|auto|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number; auto and all are negative, which means every layer."""
        if value in {"auto", "all"}:
            return -1
        try:
            layers = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of layers, auto or all", param, ctx)
        return layers


class Flash(click.ParamType[FlashAttn]):
    """Flash attention: on, off or auto, in llama.cpp's spellings."""

    name = "on|off|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FlashAttn:
        """Read the word."""
        if isinstance(value, FlashAttn):
            return value
        if value in {"auto", "-1"}:
            return FlashAttn.AUTO
        if value in _TRUE:
            return FlashAttn.ON
        if value in _FALSE:
            return FlashAttn.OFF
        return self.fail(f"{value!r} is not on, off or auto", param, ctx)


class Mode(click.ParamType[SplitMode]):
    """A split mode."""

    name = "|".join(_MODES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SplitMode:
        """Read the word."""
        if isinstance(value, SplitMode):
            return value
        try:
            return SplitMode(value)
        except ValueError:
            self.fail(f"{value!r} is not one of {', '.join(_MODES)}", param, ctx)


class OffloadOption(click.Option):
    """`-kvo/-nkvo`, with llama.cpp's two variables: the one that says no wins."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Read LLAMA_ARG_NO_KV_OFFLOAD (set to anything) and LLAMA_ARG_KV_OFFLOAD."""
        if "LLAMA_ARG_NO_KV_OFFLOAD" in os.environ:
            return "off"
        value = super().resolve_envvar_value(ctx)
        return {"enabled": "on", "disabled": "off"}.get(value, value) if value is not None else None


def _applied(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    """Put options on a command so that help lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def library_option(command: Command) -> Command:
    """Add `--lib`."""
    return click.option(
        "--lib",
        "library",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="The libllama to use, instead of looking for one (splitctl doctor shows where).",
    )(command)


class Servers(click.ParamType[tuple[str, ...]]):
    """RPC servers, separated by commas."""

    name = "HOST:PORT,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Take the text apart; what each part is worth the library's side says."""
        if isinstance(value, tuple):
            return value
        servers = tuple(part.strip() for part in str(value).split(","))
        if not all(servers):
            self.fail(f"{value!r} is not a list of HOST:PORT, separated by commas", param, ctx)
        return servers


def rpc_option(command: Command) -> Command:
    """Add `--rpc`."""
    return click.option(
        "--rpc",
        type=Servers(),
        envvar="LLAMA_ARG_RPC",
        default=(),
        metavar="HOST:PORT,...",
        help="Add the devices of these RPC servers (builds with RPC only).",
    )(command)


def json_option(command: Command) -> Command:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")(
        command
    )


def verbose_option(command: Command) -> Command:
    """Add `-v`."""
    return click.option("-v", "--verbose", is_flag=True, help="Show the library's own output on stderr.")(command)


def prompt_options(command: Command) -> Command:
    """Add `-p` and `-f`."""
    options = [
        click.option("-p", "--prompt", help="The prompt, as raw text."),
        click.option(
            "-f", "--file", "prompt_file", type=click.Path(), metavar="FILE", help="Read the prompt; - is stdin."
        ),
    ]
    return _applied(options, command)


def predict_option(command: Command) -> Command:
    """Add `-n`."""
    return click.option(
        "-n",
        "--predict",
        "--n-predict",
        "n_predict",
        type=int,
        envvar="LLAMA_ARG_N_PREDICT",
        default=-1,
        show_default=True,
        help="Most tokens to generate; -1 goes on until the model ends or the context is full.",
    )(command)


def placement_options(command: Command) -> Command:
    """Add the placement flags; the command gets them as one `placement`."""

    @functools.wraps(command)
    def with_placement(**given: Any) -> Any:
        return command(placement=_placement(given), **given)

    return _applied(_placement_flags(Placement(), named_only=False), with_placement)


def some_placement_options(command: Command, left_out: Sequence[str]) -> Command:
    """Add the placement flags but some, for a command that takes several values of those.

    Args:
        command: gets the others as one `placement`.
        left_out: fields whose flags are not added.
    """

    @functools.wraps(command)
    def with_placement(**given: Any) -> Any:
        named = {name: given.pop(name) for name in FLAG_OF_FIELD if name not in left_out}
        return command(placement=Placement(**_changes(named)), **given)

    def every(**_: Any) -> None:
        """Stand for a command with all the flags."""

    _applied(_placement_flags(Placement(), named_only=False), every)
    flags = getattr(every, "__click_params__", ())
    _params_of(with_placement).extend(flag for flag in flags if flag.name not in left_out)
    return with_placement


def _params_of(command: Command) -> list[click.Parameter]:
    """Give click's list of a command's parameters; it grows from the last one up."""
    found: list[click.Parameter] = getattr(command, "__click_params__", [])
    command.__click_params__ = found  # type: ignore[attr-defined]
    return found


def serving_placement_options(command: Command) -> Command:
    """Add the placement flags with a server's defaults: four sequences that share one cache, if nobody says how many.

    Source: llama-server's -np and -kvu.
    """

    @functools.wraps(command)
    def with_placement(**given: Any) -> Any:
        source = click.get_current_context().get_parameter_source("n_seq_max")
        if given["kv_unified"] is None:
            given["kv_unified"] = source is ParameterSource.DEFAULT
        return command(placement=_placement(given), **given)

    flags = _placement_flags(Placement(n_seq_max=_N_SERVED), named_only=False, unified=None)
    return _applied(flags, with_placement)


def changes_options(command: Command) -> Command:
    """Add the placement flags without defaults or variables.

    The command gets as `changes` the fields that were named on the command line, by name.
    """

    @functools.wraps(command)
    def with_changes(**given: Any) -> Any:
        named = {name: value for name in FLAG_OF_FIELD if (value := given.pop(name)) is not None}
        return command(changes=_changes(named), **given)

    return _applied(_placement_flags(Placement(), named_only=True), with_changes)


def _placement_flags(
    plain: Placement, *, named_only: bool, unified: bool | None = False
) -> list[Callable[[Command], Command]]:
    """Make the options.

    Args:
        plain: where defaults come from.
        named_only: no defaults and no variables: what is not on the command line is None.
        unified: default of -kvu; None: the command decides.
    """

    def flag(*names: str, default: Any, envvar: str | None = None, **more: Any) -> Callable[[Command], Command]:
        if named_only:
            return click.option(*names, default=None, **{**more, "cls": click.Option})
        return click.option(*names, default=default, envvar=envvar, show_default=default not in {"", None}, **more)

    return [
        flag(
            "-sm", "--split-mode", "mode", type=Mode(), metavar=MODES, envvar="LLAMA_ARG_SPLIT_MODE",
            default=plain.mode.value, help="How the model is split over devices.",
        ),
        flag(
            "-ts", "--tensor-split", envvar="LLAMA_ARG_TENSOR_SPLIT", default="", metavar="N0,N1,...",
            help="Share of each device, such as 3,1.",
        ),
        flag(
            "-mg", "--main-gpu", type=int, envvar="LLAMA_ARG_MAIN_GPU", default=plain.main_gpu,
            help="The device that mode none uses, by index.",
        ),
        flag(
            "-dev", "--device", "devices", envvar="LLAMA_ARG_DEVICE", default="", metavar="DEV1,DEV2,...",
            help="Devices in order (splitctl devices lists them); a name may come twice.",
        ),
        flag(
            "-ngl", "--gpu-layers", "--n-gpu-layers", "n_gpu_layers", type=Layers(), metavar="[N|auto|all]",
            envvar="LLAMA_ARG_N_GPU_LAYERS", default="auto", help="Layers placed on devices.",
        ),
        flag(
            "-c", "--ctx-size", "n_ctx", type=int, envvar="LLAMA_ARG_CTX_SIZE", default=plain.n_ctx,
            help="Context size in tokens; 0 is the model's own.",
        ),
        flag(
            "-ctk", "--cache-type-k", "type_k", type=click.Choice(KV_TYPES), envvar="LLAMA_ARG_CACHE_TYPE_K",
            default=plain.type_k, help="Cache type of keys.",
        ),
        flag(
            "-ctv", "--cache-type-v", "type_v", type=click.Choice(KV_TYPES), envvar="LLAMA_ARG_CACHE_TYPE_V",
            default=plain.type_v, help="Cache type of values.",
        ),
        flag(
            "-kvo/-nkvo", "--kv-offload/--no-kv-offload", "offload_kqv", cls=OffloadOption,
            envvar="LLAMA_ARG_KV_OFFLOAD", default=plain.offload_kqv,
            help="Keep the cache on the devices, or in host memory.",
        ),
        flag(
            "-fa", "--flash-attn", "flash_attn", type=Flash(), metavar="[on|off|auto]", envvar="LLAMA_ARG_FLASH_ATTN",
            default=plain.flash_attn.value, help="Flash attention.",
        ),
        flag(
            "-b", "--batch-size", "n_batch", type=int, envvar="LLAMA_ARG_BATCH", default=plain.n_batch,
            help="Most tokens of one decode.",
        ),
        flag(
            "-ub", "--ubatch-size", "n_ubatch", type=int, envvar="LLAMA_ARG_UBATCH", default=plain.n_ubatch,
            help="Most tokens of one computed batch.",
        ),
        flag(
            "-np", "--parallel", "n_seq_max", type=int, envvar="LLAMA_ARG_N_PARALLEL", default=plain.n_seq_max,
            help="Most sequences at once.",
        ),
        flag(
            "-kvu/-no-kvu", "--kv-unified/--no-kv-unified", "kv_unified", envvar="LLAMA_ARG_KV_UNIFIED",
            default=unified, help="One cache for all sequences, or a part for each.",
        ),
        flag(
            "-t", "--threads", "n_threads", type=int, envvar="LLAMA_ARG_THREADS", default=-1,
            help="Threads for generating; -1 is one a core.",
        ),
        flag(
            "-tb", "--threads-batch", "n_threads_batch", type=int, default=-1,
            help="Threads for the prompt; -1 is the same as -t.",
        ),
    ]  # fmt: skip


def _placement(given: dict[str, Any]) -> Placement:
    """Take the placement's flags out of `given` and build it."""
    named = {name: given.pop(name) for name in FLAG_OF_FIELD}
    return Placement(**_changes({name: value for name, value in named.items() if value is not None}))


def _changes(named: dict[str, Any]) -> dict[str, Any]:
    """Turn what was given on the command line into fields of a placement.

    Raises:
        click.BadParameter: a value that no placement can have.
    """
    changes = dict(named)
    try:
        if "devices" in named:
            changes["devices"] = tuple(name.strip() for name in named["devices"].split(",")) if named["devices"] else ()
        if "tensor_split" in named:
            changes["tensor_split"] = parse_tensor_split(named["tensor_split"])
        for name in {"n_threads", "n_threads_batch"} & named.keys():
            changes[name] = max(0, named[name])
        Placement(**changes)
    except PlacementInvalid as error:
        flag = FLAG_OF_FIELD.get(error.field, error.field)
        text = f"{error.value!r} is not possible; wanted: {error.wanted}"
        raise click.BadParameter(text, param_hint=flag) from error
    return changes


def sampler_options(command: Command) -> Command:
    """Add the sampler flags; the command gets them as one `sampler`."""
    plain = SamplerSpec()

    @functools.wraps(command)
    def with_sampler(**given: Any) -> Any:
        names = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed", "stop")
        fields = {name: given.pop(name) for name in names}
        fields["seed"] = RANDOM_SEED if fields["seed"] == -1 else fields["seed"]
        try:
            sampler = SamplerSpec(**fields)
        except ConfigInvalid as error:
            flag = "--" + error.field.replace("_", "-")
            raise click.BadParameter(f"{error.value!r}; wanted: {error.wanted}", param_hint=flag) from error
        return command(sampler=sampler, **given)

    options = [
        click.option(
            "--temp", "--temperature", "temp", type=float, envvar="LLAMA_ARG_TEMPERATURE", default=plain.temp,
            show_default=True, help="Temperature; 0 takes the likeliest token.",
        ),
        click.option(
            "--top-k", type=int, envvar="LLAMA_ARG_TOP_K", default=plain.top_k, show_default=True,
            help="Keep this many of the likeliest tokens; 0 keeps all.",
        ),
        click.option(
            "--top-p", type=float, envvar="LLAMA_ARG_TOP_P", default=plain.top_p, show_default=True,
            help="Keep tokens up to this probability together; 1 keeps all.",
        ),
        click.option(
            "--min-p", type=float, envvar="LLAMA_ARG_MIN_P", default=plain.min_p, show_default=True,
            help="Keep tokens at least this likely, relative to the likeliest; 0 keeps all.",
        ),
        click.option(
            "--repeat-penalty", type=float, envvar="LLAMA_ARG_REPEAT_PENALTY", default=plain.repeat_penalty,
            show_default=True, help="Divide the logits of tokens seen lately by this; 1 is none.",
        ),
        click.option(
            "--repeat-last-n", type=int, default=plain.repeat_last_n, show_default=True,
            help="How many tokens count as lately; 0 is none.",
        ),
        click.option("-s", "--seed", type=int, default=-1, show_default=True, help="Random seed; -1 draws one."),
        click.option(
            "-r", "--stop", "--reverse-prompt", "stop", multiple=True, metavar="TEXT",
            help="End before this text; may be given more than once.",
        ),
    ]  # fmt: skip
    return _applied(options, with_sampler)

"""Flags that several commands share: names, defaults and LLAMA_ARG_* variables are llama.cpp's.

Source: common/arg.cpp of llama.cpp.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from splitctl.carry.sampling import RANDOM_SEED, SAMPLER_PARAMS, SamplerParam, SamplerSpec
from splitctl.cli.completions import ModelFile, device_names
from splitctl.errors import ConfigInvalid
from splitctl.outcome import Proof, SwitchOptions, WeightsTier
from splitctl.placement import (
    FLAGS,
    KV_TYPES,
    Changes,
    FlashAttn,
    Placement,
    PlacementInvalid,
    SplitMode,
    parse_tensor_split,
)

Command = Callable[..., Any]
_T = TypeVar("_T")

#: Sequences of a server.  Source: llama-server.
_N_SERVED = 4


class Parsed(click.ParamType[_T]):
    """A value that is read from its text by a function, which raises ValueError with what is wrong."""

    def __init__(self, metavar: str, read: Callable[[str], _T]) -> None:
        self.name = metavar
        self._read = read

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Give the value's form as it was named, not in capitals."""
        del param, ctx
        return self.name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Complete the words that the value's form lists: small letters, with bars between them."""
        del ctx, param
        words = self.name.strip("[]").split("|") if "|" in self.name else []
        return [CompletionItem(one) for one in words if one.islower() and one.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _T:
        """Read a text; any other value has been read before."""
        if not isinstance(value, str):
            read: _T = value
            return read
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _layers(text: str) -> int:
    try:
        return -1 if text in {"auto", "all"} else int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a number of layers, auto or all") from error


def _flash(text: str) -> FlashAttn:
    spellings = {
        FlashAttn.AUTO: {"auto", "-1"},
        FlashAttn.ON: {"on", "enabled", "true", "1"},
        FlashAttn.OFF: {"off", "disabled", "false", "0"},
    }
    for state, words in spellings.items():
        if text in words:
            return state
    raise ValueError(f"{text!r} is not on, off or auto")


def _mode(text: str) -> SplitMode:
    try:
        return SplitMode(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not one of {', '.join(mode.value for mode in SplitMode)}") from error


def _servers(text: str) -> tuple[str, ...]:
    """Take a list apart; the library's side judges each part."""
    servers = tuple(part.strip() for part in text.split(","))
    if not all(servers):
        raise ValueError(f"{text!r} is not a list of HOST:PORT, separated by commas")
    return servers


def _tier(text: str) -> WeightsTier:
    try:
        return WeightsTier(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not one of {', '.join(tier.value for tier in WeightsTier)}") from error


MODE = Parsed(f"[{'|'.join(mode.value for mode in SplitMode)}]", _mode)
"""A split mode."""


class OffloadOption(click.Option):
    """`-kvo/-nkvo`, with llama.cpp's two variables: the one that says no wins."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Read LLAMA_ARG_NO_KV_OFFLOAD (set to anything) and LLAMA_ARG_KV_OFFLOAD."""
        if "LLAMA_ARG_NO_KV_OFFLOAD" in os.environ:
            return "off"
        value = super().resolve_envvar_value(ctx)
        return {"enabled": "on", "disabled": "off"}.get(value, value) if value is not None else None


def _applied(options: Iterable[Callable[[Command], Command]], command: Command) -> Command:
    """Put options on a command in the order in which help lists them."""
    for option in reversed(list(options)):
        command = option(command)
    return command


model_option = click.option(
    "-m", "--model", type=ModelFile(), envvar="LLAMA_ARG_MODEL", required=True, help="The GGUF file."
)
library_option = click.option(
    "--lib",
    "library",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The libllama to use, instead of looking for one (see splitctl doctor).",
)
rpc_option = click.option(
    "--rpc",
    type=Parsed("HOST:PORT,...", _servers),
    envvar="LLAMA_ARG_RPC",
    default=(),
    help="Add the devices of these RPC servers (builds with RPC only).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Show the library's own output on stderr.")
weights_option = click.option(
    "--weights",
    type=Parsed("[file|pinned|resident|auto]", _tier),
    default=WeightsTier.FILE.value,
    show_default=True,
    help="Where a switch takes the weights from. file: the library loads the file again. pinned: a copy in host memory "
    "that the devices read directly. resident: both placements stay on the devices, if they fit. auto: whichever "
    "pays.",
)
predict_option = click.option(
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


def prompt_options(command: Command) -> Command:
    """Add `-p` and `-f`."""
    options = [
        click.option("-p", "--prompt", help="The prompt, as plain text."),
        click.option(
            "-f", "--file", "prompt_file", type=click.Path(), metavar="FILE", help="Read the prompt; - is stdin."
        ),
    ]
    return _applied(options, command)


def switch_options(command: Command) -> Command:
    """Add `--proof`, `--no-convert` and `--force`; the command gets them as one `options`."""

    @functools.wraps(command)
    def with_options(*, proof: str, no_convert: bool, force: bool, **given: Any) -> Any:
        return command(options=SwitchOptions(Proof(proof), convert=not no_convert, force=force), **given)

    options = [
        click.option(
            "--proof", type=click.Choice([one.value for one in Proof]), default=Proof.BYTES.value, show_default=True,
            help="How the restored state is checked after a switch.",
        ),
        click.option("--no-convert", is_flag=True, help="Refuse a switch that needs the cache converted."),
        click.option(
            "--force", is_flag=True,
            help="Switch even if a trial in a child process failed, or memory seems too small.",
        ),
    ]  # fmt: skip
    return _applied(options, with_options)


def named(fields: Iterable[str]) -> tuple[str, ...]:
    """Return those of a command's parameters that the command line or a variable names."""
    context, sources = click.get_current_context(), {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT}
    return tuple(one for one in fields if context.get_parameter_source(one) in sources)


# -- placement ---------------------------------------------------------------------------------------------------------


def placement_options(command: Command, *, left_out: Sequence[str] = (), serving: bool = False) -> Command:
    """Add the placement flags; the command gets them as one `placement`.

    Args:
        command: gets it.
        left_out: fields without a flag, for a command that takes several values of them.
        serving: with a server's defaults: four sequences that share one cache, unless -np says how many. Source:
            llama-server's -np and -kvu.
    """

    @functools.wraps(command)
    def with_placement(**given: Any) -> Any:
        named = {name: given.pop(name) for name in FLAGS if name not in left_out}
        if named.get("kv_unified", False) is None:
            source = click.get_current_context().get_parameter_source("n_seq_max")
            named["kv_unified"] = source is ParameterSource.DEFAULT
        return command(placement=Placement(**_changes(named)), **given)

    plain = Placement(n_seq_max=_N_SERVED) if serving else Placement()
    flags = _placement_flags(plain, kv_unified=None if serving else False)
    return _applied((flag for name, flag in flags.items() if name not in left_out), with_placement)


serving_placement_options = functools.partial(placement_options, serving=True)


def changes_options(command: Command) -> Command:
    """Add the placement flags without defaults or variables.

    The command gets as `changes` the fields that were named on the command line, by name.
    """

    @functools.wraps(command)
    def with_changes(**given: Any) -> Any:
        named = {name: value for name in FLAGS if (value := given.pop(name)) is not None}
        return command(changes=_changes(named), **given)

    return _applied(_placement_flags(None).values(), with_changes)


def _placement_flags(plain: Placement | None, **defaults: Any) -> dict[str, Callable[[Command], Command]]:
    """Make an option for each field; without `plain`, what is not on the command line is None."""

    def flag(field: str, *names: str, envvar: str | None = None, **more: Any) -> tuple[str, Any]:
        default = getattr(Placement(), field)
        if type(default) is int:
            more = {"type": int, **more}
        if plain is None:
            return field, click.option(field, *names, default=None, **{**more, "cls": click.Option})
        default = {**spelled, **defaults}.get(field, getattr(plain, field))
        if isinstance(default, Enum):
            default = default.value
        return field, click.option(
            field, *names, default=default, envvar=envvar, show_default=default not in {"", None}, **more
        )

    spelled = {"tensor_split": "", "devices": "", "n_gpu_layers": "auto", "n_threads": -1, "n_threads_batch": -1}
    return dict([
        flag(
            "mode", "-sm", "--split-mode", type=MODE, envvar="LLAMA_ARG_SPLIT_MODE",
            help="How the model is split over devices.",
        ),
        flag(
            "tensor_split", "-ts", "--tensor-split", envvar="LLAMA_ARG_TENSOR_SPLIT", metavar="N0,N1,...",
            help="Share of each device, such as 3,1.",
        ),
        flag(
            "main_gpu", "-mg", "--main-gpu", envvar="LLAMA_ARG_MAIN_GPU",
            help="Index of the device that mode none uses.",
        ),
        flag(
            "devices", "-dev", "--device", envvar="LLAMA_ARG_DEVICE", metavar="DEV1,DEV2,...",
            shell_complete=device_names, help="Devices in order (splitctl devices lists them); a name can come twice.",
        ),
        flag(
            "n_gpu_layers", "-ngl", "--gpu-layers", "--n-gpu-layers", type=Parsed("[N|auto|all]", _layers),
            envvar="LLAMA_ARG_N_GPU_LAYERS", help="Layers placed on devices.",
        ),
        flag(
            "n_ctx", "-c", "--ctx-size", envvar="LLAMA_ARG_CTX_SIZE",
            help="Context size in tokens; 0 takes the model's own.",
        ),
        flag(
            "type_k", "-ctk", "--cache-type-k", type=click.Choice(KV_TYPES), envvar="LLAMA_ARG_CACHE_TYPE_K",
            help="Cache type of keys.",
        ),
        flag(
            "type_v", "-ctv", "--cache-type-v", type=click.Choice(KV_TYPES), envvar="LLAMA_ARG_CACHE_TYPE_V",
            help="Cache type of values.",
        ),
        flag(
            "offload_kqv", "-kvo/-nkvo", "--kv-offload/--no-kv-offload", cls=OffloadOption,
            envvar="LLAMA_ARG_KV_OFFLOAD", help="Keep the cache on the devices, or in host memory.",
        ),
        flag(
            "flash_attn", "-fa", "--flash-attn", type=Parsed("[on|off|auto]", _flash), envvar="LLAMA_ARG_FLASH_ATTN",
            help="Flash attention.",
        ),
        flag("n_batch", "-b", "--batch-size", envvar="LLAMA_ARG_BATCH", help="Most tokens of one decode."),
        flag("n_ubatch", "-ub", "--ubatch-size", envvar="LLAMA_ARG_UBATCH", help="Most tokens computed at once."),
        flag("n_seq_max", "-np", "--parallel", envvar="LLAMA_ARG_N_PARALLEL", help="Most sequences at once."),
        flag(
            "kv_unified", "-kvu/-no-kvu", "--kv-unified/--no-kv-unified", envvar="LLAMA_ARG_KV_UNIFIED",
            help="One cache for all sequences, or a part for each.",
        ),
        flag(
            "n_threads", "-t", "--threads", envvar="LLAMA_ARG_THREADS",
            help="Threads for generation; -1 takes one for each core.",
        ),
        flag("n_threads_batch", "-tb", "--threads-batch", help="Threads for the prompt; -1 takes those of -t."),
    ])  # fmt: skip


def _changes(named: dict[str, Any]) -> Changes:
    changes = Changes(named)
    try:
        if "devices" in named:
            changes["devices"] = tuple(name.strip() for name in named["devices"].split(",")) if named["devices"] else ()
        if "tensor_split" in named:
            changes["tensor_split"] = parse_tensor_split(named["tensor_split"])
        for name in {"n_threads", "n_threads_batch"} & named.keys():
            changes[name] = max(0, named[name])
        Placement(**changes)
    except PlacementInvalid as error:
        text = f"{error.value!r} is not possible; wanted: {error.wanted}"
        raise click.BadParameter(text, param_hint=FLAGS.get(error.field, error.field)) from error
    return changes


# -- sampler -----------------------------------------------------------------------------------------------------------


def sampler_options(command: Command) -> Command:
    """Add the sampler flags; the command gets them as one `sampler`."""

    @functools.wraps(command)
    def with_sampler(**given: Any) -> Any:
        fields = {name: given.pop(name) for name in SAMPLER_PARAMS}
        if fields["seed"] == -1:
            fields["seed"] = RANDOM_SEED
        try:
            sampler = SamplerSpec(**fields)
        except ConfigInvalid as error:
            flag = "--" + error.field.replace("_", "-")
            raise click.BadParameter(f"{error.value!r}; wanted: {error.wanted}", param_hint=flag) from error
        return command(sampler=sampler, **given)

    def option(name: str, param: SamplerParam) -> Callable[[Command], Command]:
        if isinstance(param.default, tuple):
            return click.option(*param.flags, name, multiple=True, help=param.help)
        default = -1 if name == "seed" else param.default
        return click.option(
            *param.flags, name, type=type(default), envvar=param.envvar, default=default, show_default=True,
            help=param.help,
        )  # fmt: skip

    return _applied((option(name, param) for name, param in SAMPLER_PARAMS.items()), with_sampler)

"""Requests as a program writes them: words for enums, texts or tokens for prompts, names for fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitctl.carry.sampling import SAMPLER_PARAMS, SamplerSpec
from splitctl.control.requests import (
    CheckRequest,
    GenerateRequest,
    RestoreRequest,
    SaveRequest,
    SwitchRequest,
)
from splitctl.errors import ConfigInvalid
from splitctl.outcome import Proof, Route
from splitctl.placement import Changes, Placement, PlacementInvalid, SplitMode, flag, seconds, whole, word

Sampler = SamplerSpec | Mapping[str, Any] | None
Stop = str | Sequence[str] | None


def generation(
    prompt: str | Sequence[int],
    *,
    n: int,
    sampler: Sampler,
    stop: Stop,
    grammar: str,
    add_special: bool,
    parse_special: bool,
) -> GenerateRequest:
    """Ask for an answer to a text or tokens; raises ConfigInvalid."""
    more: dict[str, Any] = {
        "n_predict": _count("n", n),
        "sampler": sampler_of(sampler, stop),
        "grammar": _text("grammar", grammar),
    }
    if isinstance(prompt, str):
        flags = {
            "add_special": flag("add_special", add_special),
            "parse_special": flag("parse_special", parse_special),
        }
        return GenerateRequest(prompt=prompt, **flags, **more)  # type: ignore[arg-type]
    tokens = [] if isinstance(prompt, bytes) else _list("prompt", prompt, "a text, or tokens")
    found = [whole(one) for one in tokens]
    if not found or None in found:
        raise ConfigInvalid("prompt", prompt, "a text, or a sequence of tokens, whole numbers, at least one")
    return GenerateRequest(tokens=tuple(one for one in found if one is not None), **more)


def chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    n: int,
    sampler: Sampler,
    stop: Stop,
    grammar: str,
    template: Mapping[str, Any] | None,
    continues: bool,
) -> GenerateRequest:
    """Ask for an answer to a chat; raises ConfigInvalid."""
    said = _list("messages", messages, "a sequence of messages, each with role and content")
    if not said or not all(isinstance(one, Mapping) for one in said):
        raise ConfigInvalid("messages", messages, "a sequence of messages, each with role and content, at least one")
    return GenerateRequest(
        messages=tuple(dict(one) for one in said),
        n_predict=_count("n", n),
        sampler=sampler_of(sampler, stop),
        grammar=_text("grammar", grammar),
        chat_template_kwargs=None if template is None else _variables(template),
        continue_final_message="content" if flag("continues", continues) else None,
    )


def switch(
    target: SplitMode | str | Placement | None,
    changes: Mapping[str, Any],
    *,
    proof: Proof | str,
    convert: bool,
    force: bool,
    via: Route | str,
    timeout_s: float | None,
) -> SwitchRequest:
    """Ask for a switch; raises ConfigInvalid."""
    return SwitchRequest(
        changes_of(target, changes),
        word("proof", proof, Proof),
        convert=flag("convert", convert),
        force=flag("force", force),
        timeout_s=seconds("timeout_s", timeout_s),
        via=word("via", via, Route),
    )


def check(
    target: SplitMode | str | Placement | None,
    changes: Mapping[str, Any],
    *,
    convert: bool,
    force: bool,
    via: Route | str,
) -> CheckRequest:
    """Ask what a switch would do; raises ConfigInvalid."""
    found = changes_of(target, changes)
    flags = {"convert": flag("convert", convert), "force": flag("force", force)}
    return CheckRequest(found, **flags, via=word("via", via, Route))


def save(path: str | Path, *, is_web: bool) -> SaveRequest:
    """Ask for a file; raises ConfigInvalid."""
    return SaveRequest(_path(path, is_web=is_web))


def restore(path: str | Path, *, is_web: bool) -> RestoreRequest:
    """Ask for what is in a file; raises ConfigInvalid."""
    return RestoreRequest(_path(path, is_web=is_web))


def changes_of(target: SplitMode | str | Placement | None, named: Mapping[str, Any]) -> Changes:
    """Give the fields of a placement that change: a mode and fields by name, or all of a whole placement."""
    if isinstance(target, Placement):
        if named:
            raise ConfigInvalid("target", target.describe(), "a whole placement alone, or a mode and fields by name")
        return Changes({name: getattr(target, name) for name in target.to_json()})
    mode = {} if target is None else {"mode": word("target", target, SplitMode)}
    if mode and "mode" in named:
        raise ConfigInvalid("mode", named["mode"], "one mode, first or by name")
    changes = {**named, **mode}
    if not changes:
        raise PlacementInvalid("target", None, "a mode, a Placement, or fields of one: switch('tensor', n_ctx=8192)")
    whole_one = Placement().changed(**changes)
    return Changes({name: getattr(whole_one, name) for name in changes})


def sampler_of(given: Sampler, stop: Stop) -> SamplerSpec:
    """Give how tokens are drawn: a spec, or its fields by name; `stop` goes before its own stop texts."""
    if given is None:
        spec = SamplerSpec()
    elif isinstance(given, SamplerSpec):
        spec = given
    elif isinstance(given, Mapping):
        if unknown := sorted(set(given).difference(SAMPLER_PARAMS)):
            raise ConfigInvalid("sampler", unknown[0], f"fields of a SamplerSpec: {' '.join(SAMPLER_PARAMS)}")
        spec = SamplerSpec(**given)
    else:
        raise ConfigInvalid("sampler", given, "a SamplerSpec, or an object of its fields")
    if stop is None:
        return spec
    fields = {name: getattr(spec, name) for name in SAMPLER_PARAMS}
    return SamplerSpec(**{**fields, "stop": stop})


def limit(name: str, value: object) -> float:
    """Take a time, seconds; raises ConfigInvalid."""
    found = seconds(name, value)
    if found is None:
        raise ConfigInvalid(name, value, "seconds, 0 or more")
    return found


def _count(name: str, value: object) -> int:
    found = whole(value)
    if found is None:
        raise ConfigInvalid(name, value, "a whole number; -1: until the model ends or the context is full")
    return found


def _variables(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(one, str) for one in value):
        raise ConfigInvalid("template", value, "variables of the template, by name")
    return dict(value)


def _list(name: str, value: object, wanted: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping):
        raise ConfigInvalid(name, value, wanted)
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError as error:
        raise ConfigInvalid(name, value, wanted) from error


def _path(value: object, *, is_web: bool) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigInvalid("path", value, "the path of a file")
    if not is_web:
        # The host may have been started elsewhere.
        return Path(value).absolute()
    if len(Path(value).parts) != 1:
        raise ConfigInvalid("path", str(value), "a name without a folder: a server has one for files")
    return Path("/") / value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigInvalid(name, value, "a text")
    return value

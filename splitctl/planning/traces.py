"""Traces of requests, line by line: JSON lines, CSV with a header, OpenAI's usage objects; names taken by pattern.

Laws:
    1. A line that is no request is refused, with its number and what was wanted; none is left out in silence.
    2. Lines are taken one by one: neither too many, nor too long ones, nor requests that nobody asked for are kept.
    3. Requests come out in the order in which they came, the first at 0 s.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn

from splitctl.errors import ConfigInvalid
from splitctl.planning.cost import MAX_TOKENS

#: More lines are no trace for this.
MAX_LINES = 1_000_000
#: A longer line is no request [characters].
MAX_LINE = 65_536
#: Seconds from here on are milliseconds since 1970: as seconds it would be the year 5138.
_MS_FROM = 1e11

_NAMES: Mapping[str, re.Pattern[str]] = {
    "arrival": re.compile(r"arrival(time|at|s)?|timestamp|time|ts|created(at)?"),
    "prompt": re.compile(r"prompt|(num|n)?(prompt|context|input|request)(tokens|length)"),
    "cached": re.compile(r"cached|(num|n)?(prompt)?cached?(tokens|length)"),
    "generated": re.compile(r"generated|(num|n)?(generated|completion|output|response)(tokens|length)"),
    "max": re.compile(r"max|(n)?max(completion|output|generated|new)?tokens"),
}
"""What each number of a request is called, in small letters and without anything between words."""

_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d(?:\.\d+)?) ?(?:Z|UTC|([+-])(\d\d):?(\d\d))?", re.ASCII
)


class TraceInvalid(ConfigInvalid):
    """A line of a trace that is no request."""

    def __str__(self) -> str:
        return f"{self.field} is {self.value}; wanted: {self.wanted}"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        arrival: when it comes, s.
        prompt: tokens of its prompt.
        cached: of them, those that the cache holds.
        generated: tokens that it generates.
        n_max: most tokens that it asked for; None: no limit.
    """

    arrival: float
    prompt: int
    cached: int = 0
    generated: int = 0
    n_max: int | None = None


def parse_trace(text: str) -> list[Request]:
    """Read a trace.

    Args:
        text: JSON lines, an object each, with `arrival` (seconds, or a date), `prompt`, `generated`, and if they are
            known `cached` and `max_tokens`; or CSV whose header names the same. `docs/commands.md` has other names.

    Raises:
        TraceInvalid: there is no request, or too many, or a line is none.
    """
    return read_trace(text.split("\n"))[0]


def read_trace(lines: Iterable[str], n_most: int = MAX_LINES) -> tuple[list[Request], int]:
    """Read the first requests of a trace that comes line by line, with how many there are in all; raises as above."""
    numbered = _numbered(lines)
    start = next((one for one in numbered if one[1].strip()), None)
    if start is None:
        raise TraceInvalid("the trace", "empty", "a line for each request")
    taken = itertools.chain([start], numbered)
    rows = _of_json(taken) if start[1].lstrip().startswith("{") else _of_csv(taken, start[0])
    requests: list[Request] = []
    n_all = 0
    for number, row in rows:
        n_all += 1
        requests.append(_request(number, row))
        # Whatever has to be thrown away is thrown away now and then.
        if len(requests) >= 2 * n_most:
            requests = sorted(requests, key=_arrival)[:n_most]
    if not requests:
        raise TraceInvalid("the trace", "a header alone", "a line for each request")
    requests = sorted(requests, key=_arrival)[:n_most]
    first = requests[0].arrival
    return [replace(one, arrival=one.arrival - first) for one in requests], n_all


def _arrival(one: Request) -> float:
    return one.arrival


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Count lines from 1 on, and refuse one that is too long, or one too many."""
    for number, line in enumerate(lines, 1):
        if number > MAX_LINES + 1 or (number > MAX_LINES and line.strip()):
            raise TraceInvalid("the trace", f"of more than {MAX_LINES:,} lines", f"{MAX_LINES:,} at most; cut it")
        if len(line) > MAX_LINE:
            raise TraceInvalid(f"line {number}", f"of more than {MAX_LINE:,} characters", "a line of one request")
        yield number, line.removesuffix("\r")


def _of_json(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            plain = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise TraceInvalid(where, f"no JSON ({error})", "an object of one request") from error
        if not isinstance(plain, dict):
            raise TraceInvalid(where, _shown(plain), "an object of one request")
        yield number, _flat(plain)


def _of_csv(lines: Iterable[tuple[int, str]], start: int) -> Iterator[tuple[int, Mapping[str, object]]]:
    rows = csv.reader((line for _, line in lines), strict=True)
    header: list[str] | None = None
    number = start - 1
    try:
        for row in rows:
            number = start - 1 + rows.line_num
            if not any(one.strip() for one in row):
                continue
            if header is None:
                header = [one.lstrip("\ufeff") for one in row]
                _require(number, dict.fromkeys(header))
            elif len(row) != len(header):
                raise TraceInvalid(f"line {number}", f"of {len(row)} fields", f"{len(header)}, as in the header")
            else:
                yield number, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise TraceInvalid(f"line {number + 1}", f"no CSV ({error})", "fields between commas") from error


def _require(number: int, row: Mapping[str, object]) -> None:
    known = {_kind(name) for name in row}
    if not {"arrival", "prompt", "generated"} <= known:
        what = "fields of arrival, prompt and generated, as docs/commands.md names them"
        raise TraceInvalid(f"line {number}", _shown(",".join(row)), what)


def _flat(plain: Mapping[str, object]) -> dict[str, object]:
    """Bring up what OpenAI's answers have further in: usage, and the details of the prompt in it."""
    found = dict(plain)
    for name in ("request", "response", "usage", "prompt_tokens_details"):
        inner = found.pop(name, None)
        if isinstance(inner, Mapping):
            found |= {key: value for key, value in inner.items() if isinstance(key, str)}
    return found


def _request(number: int, row: Mapping[str, object]) -> Request:
    found: dict[str, tuple[str, object]] = {}
    for name, value in row.items():
        kind = _kind(name)
        if kind is None or (kind in {"cached", "max"} and (value is None or value == "")):
            continue
        if kind in found:
            raise TraceInvalid(f"line {number}", f"with {found[kind][0]} and {name}", "one of the two")
        found[kind] = name, value
    for kind in ("arrival", "prompt", "generated"):
        if kind not in found:
            raise TraceInvalid(f"line {number}", f"without {kind}", "arrival, prompt and generated of one request")
    arrival = _seconds(f"line {number}: {found['arrival'][0]}", found["arrival"][1])
    numbers = {kind: one for kind, one in found.items() if kind != "arrival"}
    counts = {kind: _tokens(f"line {number}: {name}", value) for kind, (name, value) in numbers.items()}
    cached = counts.get("cached", 0)
    if cached > counts["prompt"]:
        wanted = f"{counts['prompt']} at most, as the prompt has no more tokens"
        raise TraceInvalid(f"line {number}: {found['cached'][0]}", str(cached), wanted)
    return Request(arrival, counts["prompt"], cached, counts["generated"], counts.get("max"))


@lru_cache(maxsize=1024)
def _kind(name: str) -> str | None:
    """Tell which number of a request a name is of; None: of none."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for kind, pattern in _NAMES.items() if pattern.fullmatch(plain)), None)


def _tokens(where: str, value: object) -> int:
    wanted = f"whole tokens, from 0 to {MAX_TOKENS:.0e}"
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value.strip(), re.ASCII):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise TraceInvalid(where, _shown(value), wanted)
    return value


def _seconds(where: str, value: object) -> float:
    wanted = "seconds, milliseconds since 1970, or a date like 2023-11-16 18:17:03.98"
    if isinstance(value, str):
        if (date := _TIME.fullmatch(value.strip())) is not None:
            return _since_1970(where, date)
        try:
            value = float(value)
        except ValueError:
            raise TraceInvalid(where, _shown(value), wanted) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
        raise TraceInvalid(where, _shown(value), wanted)
    return float(value) / 1e3 if value >= _MS_FROM else float(value)


def _since_1970(where: str, date: re.Match[str]) -> float:
    year, month, day, hour, minute = (int(date[index]) for index in range(1, 6))
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and float(date[6]) < 61):
        raise TraceInvalid(where, _shown(date[0]), "a date that there is")
    # Days by the civil calendar, whose year begins in March here: then the leap day is the last one.
    shifted = year - (month <= 2)
    days = shifted * 365 + shifted // 4 - shifted // 100 + shifted // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day
    zone = (int(date[8]) * 60 + int(date[9])) * (-60 if date[7] == "+" else 60) if date[7] else 0
    return (days - 719_469) * 86_400.0 + hour * 3600 + minute * 60 + float(date[6]) + zone


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _shown(value: object, limit: int = 60) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."

"""What `bench_gpu_switch` found, as numbers, tables and a picture; and the part of docs/speed.md made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from splitctl.outcome import WeightsTier
from splitctl.planning.cost import TIMED, Work, compare, parse_rates
from tools.gpu_meter import HOST
from tools.places import CHECKOUT

if TYPE_CHECKING:
    from tools.bench_gpu_switch import Moved

_MIB = 1024 * 1024
_LAYER_TO_TENSOR = "layer->tensor"
#: What a process keeps in memory: its own, memory files, and pages of the page cache that it has mapped.
_HOST_KINDS = ("anon", "shmem", "file")
DOCS = CHECKOUT / "docs"
_BEGIN, _END = "<!-- measured -->\n", "<!-- end of measured -->\n"
#: Stages in the order in which they come, with a colour; those of llama-server's way among them.
_STAGES = {
    "quiescing": "#bbbbbb", "checking": "#999999", "saving": "#4477aa", "sealing": "#66ccee", "freeing": "#aa3377",
    "stopping": "#aa3377", "starting": "#ee6677", "placing": "#ee6677", "switching_natively": "#ee6677",
    "building": "#ccbb44", "restoring": "#228833",
    "proving": "#88cc88",
}  # fmt: skip
#: Stages that a second worker passes, or that are passed, while streams go on.
_MEANWHILE = {"checking", "starting", "placing", "building", "freeing"}
#: What moves the state, and the direction of the link that it uses.
_STATE_MOVES = {"saving": "from", "restoring": "to"}
#: The tier of the planner that an arm goes by, where that is not its name.
_TIERS = {"bare": "file", "beside-idle": "beside", "native": "file", "native-pinned": "pinned"}
_LIMIT = {"own_ms": 50.0, "gb_s": 40.0, "rate": 0.98}
#: Aims for a model of 28 GB: arm -> what, at most so many ms.
_AIMS_MS = {
    "file": ("total_ms without placing", 600.0),
    "pinned": ("total_ms", 1000.0),
    "resident": ("pause_ms", 300.0),
    "beside": ("pause_ms", 300.0),
    "beside-idle": ("pause_ms", 100.0),
}


def rounded(value: Any) -> Any:
    """Shorten every fraction in a body."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Give median, least and most of what is there; None where nothing is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return {"median": round(statistics.median(there), 2), "min": round(min(there), 2), "max": round(max(there), 2)}


# ---- numbers ----


def body_of(arms: Sequence[Moved], plan: Mapping[str, Any] | None, groups: Sequence[str]) -> dict[str, Any]:
    """Sum up what was seen of arms.

    Args:
        arms: those that were asked for.
        plan: what `splitctl plan` says of each tier.
        groups: the memory that each device has.
    """
    opened = [arm for arm in arms if arm.opened]
    fresh = {arm.name.removeprefix("fresh-"): _fresh(arm) for arm in opened if arm.name.startswith("fresh")}
    link = next((arm.opened["link_gb_s"] for arm in opened if arm.opened.get("link_gb_s")), None)
    rows = [
        _row(arm, way, moves, fresh.get(way.rpartition(">")[2]), link)
        for arm in arms
        if not arm.name.startswith("fresh")
        for way, moves in arm.moves.items()
    ]
    body = {
        "link_gb_s": link,
        "fresh": fresh,
        "rows": rows,
        "memory": [one for arm in arms for one in _memory(arm, plan, groups)],
        "opened": {arm.name: arm.opened for arm in opened},
        "lost": {arm.name: arm.lost for arm in arms if arm.lost},
    }
    body["aims"] = list(_aims(rows))
    return body | {"rates": _rates(body)}


def _fresh(arm: Moved) -> dict[str, Any]:
    moves = [one for each in arm.moves.values() for one in each]
    first = arm.opened["first"]
    return {
        "prompt_tps": round(arm.opened["prompt_tps"], 1),
        "open_s": round(arm.opened["open_s"], 3),
        "first_ms": round(first["first_ms"], 2),
        "tps": spread([first["tps"], *(one["tps"] for one in moves)]),
    }


def _row(
    arm: Moved,
    way: str,
    moves: Sequence[Mapping[str, Any]],
    fresh: Mapping[str, Any] | None,
    link: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Sum up an arm's moves one way."""
    last = moves[-1]
    stages = {}
    for name in _STAGES:
        ms = spread(one["stages_ms"].get(name) for one in moves)
        if ms is not None:
            stages[name] = ms["median"]
    row: dict[str, Any] = {"arm": arm.name, "way": way, "n": len(moves)}
    for name in ("total_ms", "pause_ms", "wall_ms", "gap_ms", "own_ms", "library_ms", "first_ms", "tps"):
        row[name] = spread(one.get(name) for one in moves)
    row |= {"stages_ms": stages, "gb_s": _gb_s(stages, last), "link": {}}
    least = {
        name: min((one[name] for one in (link or {}).values() if one), default=None) for name in _STATE_MOVES.values()
    }
    for stage, direction in _STATE_MOVES.items():
        if least[direction] and row["gb_s"].get(stage):
            row["link"][stage] = round(row["gb_s"][stage] / least[direction], 3)
    if fresh is not None and fresh["tps"] and row["tps"]:
        row["rate_ratio"] = round(row["tps"]["median"] / fresh["tps"]["median"], 4)
    if fresh is not None and row["first_ms"]:
        row["first_ratio"] = round(row["first_ms"]["median"] / fresh["first_ms"], 3)
    for name in ("state_bytes", "weight_bytes", "n_tokens", "via", "weights", "weights_reason", "carry_pinned",
                 "carry_pinned_reason", "ahead_bytes", "ahead_reason", "calls_ms", "n_read"):  # fmt: skip
        if name in last:
            row[name] = last[name]
    return row


def _gb_s(stages: Mapping[str, float], move: Mapping[str, Any]) -> dict[str, float]:
    """Say how fast stages moved what they move, GB/s."""
    n_state = (move.get("state_bytes") or 0) - (move.get("ahead_bytes") or 0)
    moved: dict[str, int | None] = dict.fromkeys(("saving", "sealing", "restoring", "proving"), n_state)
    moved["switching_natively"] = move.get("weight_bytes")
    if move.get("weights") != "resident":
        moved["placing"] = move.get("weight_bytes")
    return {name: round(n / stages[name] / 1e6, 2) for name, n in moved.items() if n and stages.get(name)}


def _memory(arm: Moved, plan: Mapping[str, Any] | None, groups: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compare what an arm held with what the planner says of its tier, MiB."""
    name = _TIERS.get(arm.name, arm.name)
    tier = (plan or {}).get(name)
    for group, (last, most) in arm.device_bytes.items():
        said = None
        if tier is not None and arm.name != "server":
            names = [index for index, one in enumerate(groups) if one == group]
            said = sum(share["total"] for share in tier["devices"] if share["index"] in names)
        yield {
            "arm": arm.name,
            "group": group,
            "most": round(most / _MIB, 1),
            "last": round(last / _MIB, 1),
            "plan": None if said is None else round(said / _MIB, 1),
        }
    if arm.host_bytes is not None:
        sizes = {kind: round(size / _MIB, 1) for kind, size in arm.host_bytes.items()}
        host = None if tier is None else round(tier["host"]["total"] / _MIB, 1)
        yield {"arm": arm.name, "group": HOST, **sizes, "plan": host}


def _rates(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Give the rates as `splitctl explain --rates` reads them; None where something that it needs was not measured."""
    fresh = body["fresh"]
    there = {row["arm"]: row for row in body["rows"] if row["way"] == _LAYER_TO_TENSOR}
    if "file" not in there or not all(fresh.get(mode, {}).get("tps") for mode in ("layer", "tensor")):
        return None
    rates: dict[str, Any] = {
        "switch_s": _still_s(there["file"]),
        "modes": {
            mode: {"prompt_tps": fresh[mode]["prompt_tps"], "generate_tps": fresh[mode]["tps"]["median"]}
            for mode in ("layer", "tensor")
        },
        "tier_switch_s": {name: _still_s(row) for name, row in there.items() if name in TIMED and name != "file"},
    }
    if "pinned" in there and there["pinned"]["tps"]:
        more = 1e3 / there["pinned"]["tps"]["median"] - 1e3 / fresh["tensor"]["tps"]["median"]
        rates["pinned_ms_per_token"] = round(max(more, 0.0), 4)
    return rates


def _aims(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Hold the rows against the aims, which are for a model of 28 GB and two H200."""
    for row in rows:
        arm, found = row["arm"], []
        if arm in _AIMS_MS:
            what, most = _AIMS_MS[arm]
            value = row["pause_ms"] if what == "pause_ms" else row["total_ms"]
            if value is not None:
                without = row["stages_ms"].get("placing", 0.0) if "without" in what else 0.0
                ms = value["median"] - without
                found.append((what, ms, most, ms <= most))
        if row.get("own_ms"):
            own = row["own_ms"]["median"]
            found.append(("own_ms", own, _LIMIT["own_ms"], own <= _LIMIT["own_ms"]))
        if arm in {"file", "pinned", "resident", "beside"}:
            found += [
                (f"GB/s of state, {stage}", rate, _LIMIT["gb_s"], rate >= _LIMIT["gb_s"])
                for stage, rate in row["gb_s"].items()
                if stage in _STATE_MOVES
            ]
        if arm in {"file", "resident", "native", "native-pinned"} and "rate_ratio" in row:
            found.append(
                ("rate against a fresh load", row["rate_ratio"], _LIMIT["rate"], row["rate_ratio"] >= _LIMIT["rate"])
            )
        for what, value, limit, is_met in found:
            yield {
                "arm": arm, "way": row["way"], "what": what, "value": round(value, 3), "limit": limit, "is_met": is_met,
            }  # fmt: skip


# ---- tables ----


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _spread(value: Mapping[str, float] | None) -> str:
    """Say a spread, ms."""
    if value is None:
        return ""
    if value.get("min") in {None, value["median"]} and value.get("max") in {None, value["median"]}:
        return f"{value['median']:,.0f}"
    return f"{value['median']:,.0f} ({value['min']:,.0f} to {value['max']:,.0f})"


def tables(body: Mapping[str, Any]) -> str:
    """Tell a body in Markdown."""
    rows = body["rows"]
    note = _wrapped(body["note"]) if body.get("note") else ""
    parts = [f"{_said_of(body)}\n{_times(rows)}", note, _speeds(rows), _memory_table(body.get("memory", ()))]
    parts += [band(body)] if body.get("rates") else []
    parts += [_wrapped(f"Not measured: {name}: {why}") for name, why in body.get("lost", {}).items()]
    return "\n".join(filter(None, parts))


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    stages = [name for name in _STAGES if any(name in row["stages_ms"] for row in rows)]
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "": _name,
        "way": _way,
        "whole switch, ms": lambda row: _spread(row["total_ms"]),
        "pause, ms": lambda row: _spread(row.get("pause_ms")),
        "ahead, MB": lambda row: _megabytes(row, row.get("ahead_bytes")),
        "in the pause, MB": lambda row: _megabytes(row, (row.get("state_bytes") or 0) - (row.get("ahead_bytes") or 0)),
        **{name: partial(_stage, name) for name in stages},
        "own": lambda row: _spread(row.get("own_ms")),
        "first token, ms": lambda row: _spread(row.get("first_ms")),
        "tokens/s": lambda row: f"{row['tps']['median']:,.1f}" if row.get("tps") else "",
        "against a fresh load": lambda row: f"{row['rate_ratio']:.3f}" if "rate_ratio" in row else "",
    }
    lines = [[say(row) for say in columns.values()] for row in rows]
    used = [index for index in range(len(columns)) if index < 2 or any(line[index] for line in lines)]
    head = list(columns)
    return _table([head[index] for index in used], [[line[index] for index in used] for line in lines])


def _megabytes(row: Mapping[str, Any], n_bytes: int | None) -> str:
    """Tell bytes of a state of which some went ahead."""
    return f"{n_bytes / 1e6:,.1f}" if row.get("ahead_bytes") and n_bytes is not None else ""


def _stage(name: str, row: Mapping[str, Any]) -> str:
    return f"{row['stages_ms'][name]:,.0f}" if name in row["stages_ms"] else ""


def _speeds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tell GB/s of stages; nothing where none moved bytes."""
    moved = [row for row in rows if row.get("gb_s")]
    names = [name for name in _STAGES if any(name in row["gb_s"] for row in moved)]
    lines = [
        [_name(row), _way(row), *(f"{row['gb_s'][name]:.1f}" if name in row["gb_s"] else "" for name in names)]
        for row in moved
    ]
    return f"GB/s of each stage:\n\n{_table(['', 'way', *names], lines)}" if moved else ""


def _memory_table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [
            str(one["arm"]),
            str(one["group"]),
            f"{one['most']:,.0f}" if "most" in one else ", ".join(f"{name} {one[name]:,.0f}" for name in _HOST_KINDS),
            f"{one['last']:,.0f}" if "last" in one else "",
            "" if one["plan"] is None else f"{one['plan']:,.0f}",
        ]
        for one in found
    ]
    return f"Memory, MiB:\n\n{_table(['', 'where', 'most', 'at the end', 'planned'], lines)}" if lines else ""


def _said_of(body: Mapping[str, Any]) -> str:
    """Say what was measured, where and when."""
    gpus = body.get("gpus") or body.get("devices", ())
    where = f"{len(body.get('devices', ()))} devices on {', '.join(dict.fromkeys(gpus))}" if gpus else ""
    words = [
        f"**{body['model']}**", f"{body['weight_bytes'] / 1e9:.2f} GB of weights", f"{body['n_tokens']:,} tokens",
        where, body.get("build", ""), body["date"], body.get("source", ""),
    ]  # fmt: skip
    return _wrapped(", ".join(word for word in words if word) + ":")


def _wrapped(text: str, columns: int = 100) -> str:
    """Break a paragraph into lines."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > columns:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines) + "\n"


def band(body: Mapping[str, Any]) -> str:
    """Say from where on a switch pays in every way, by the rates of a body."""
    given = parse_rates(json.dumps(body["rates"]))
    lines = []
    for row in body["rows"]:
        name = row.get("tier", row["arm"])
        tier = name if name in TIMED else WeightsTier.FILE.value
        found = compare(given.in_tier(tier, _still_s(row)), Work(1, 1))
        even = found.break_even
        if found.switch is None or found.switch.value == row["way"]:
            prompt, generate = ("never" if n is None else f"{n:,.0f}" for n in (even.prompt, even.generate))
            lines.append([_name(row), _way(row), f"{found.rates.switch_s:.2f}", prompt, generate])
    modes = body["rates"]["modes"].items()
    said = ", ".join(f"{mode} {one['prompt_tps']:,.0f} and {one['generate_tps']:,.1f}" for mode, one in modes)
    more = f"{given.pinned_ms_per_token:.2g} ms more a token after pinned weights"
    text = f"When it pays, with tokens a second of prompt and generation of {said}, and {more}:"
    return f"{_wrapped(text)}\n" + _table(["", "way", "S, s", "prompt of more than", "answer of more than"], lines)


def _still_s(row: Mapping[str, Any]) -> float:
    """How long nobody gets a token in a switch, seconds."""
    return float((row.get("pause_ms") or row["total_ms"])["median"]) / 1e3


def _name(row: Mapping[str, Any]) -> str:
    """Name a row, with its date where that is not its run's."""
    return f"{row['arm']}, {row['date']}" if "date" in row else str(row["arm"])


def _way(row: Mapping[str, Any]) -> str:
    return str(row["way"]).replace("->", " to ")


# ---- the picture ----

_LEFT, _RIGHT, _BAR, _GAP, _TOP = 230, 70, 16, 6, 58
_FONT = 'font-family="sans-serif" font-size="12"'


def picture(body: Mapping[str, Any], width: int = 960) -> str:
    """Draw the stages of every row as bars, SVG; what happens while streams go on is pale."""
    rows = body["rows"]
    longest = max((sum(row["stages_ms"].values()) for row in rows), default=1.0) or 1.0
    scale = (width - _LEFT - _RIGHT) / longest
    names = [name for name in _STAGES if any(name in row["stages_ms"] for row in rows)]
    height = _TOP + len(rows) * (_BAR + _GAP) + 14
    title = f"{body['model']}: where the time of a switch goes, ms; pale: while streams go on"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="14">{escape(title)}</text>',
    ]
    x = 10
    for name in names:
        out.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{_STAGES[name]}"/>')
        out.append(f'<text x="{x + 16}" y="41">{name}</text>')
        x += 28 + 7 * len(name)
    for number, row in enumerate(rows):
        y = _TOP + number * (_BAR + _GAP)
        label = f"{row['arm']}, {row['way'].replace('->', ' to ')}"
        out.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
        at = float(_LEFT)
        for name in names:
            ms = row["stages_ms"].get(name, 0.0)
            if ms <= 0.0:
                continue
            is_pale = name == "checking" or (name in _MEANWHILE and row.get("via") == "beside")
            pale = ' fill-opacity="0.3"' if is_pale else ""
            out.append(
                f'<rect x="{at:.1f}" y="{y}" width="{max(ms * scale, 0.5):.1f}" height="{_BAR}" '
                f'fill="{_STAGES[name]}"{pale}><title>{name} {ms:,.0f} ms</title></rect>'
            )
            at += ms * scale
        out.append(f'<text x="{at + 6:.1f}" y="{y + 12}">{row["total_ms"]["median"]:,.0f}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


# ---- docs/speed.md ----


def page(old: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Make the measured part of the page anew."""
    head, begin, rest = old.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"docs/speed.md has no part between {_BEGIN.strip()} and {_END.strip()}")
    parts = [
        f"![stages of a switch of the {run['model']}, as bars]({picture_name(run)})\n\n{tables(run)}" for run in runs
    ]
    return f"{head}{begin}\n" + "\n".join(parts) + f"\n{end}{tail}"


def picture_name(run: Mapping[str, Any]) -> str:
    """Name the picture of a run in docs/."""
    return f"speed-{run['model'].removesuffix('.gguf')}.svg"


def write_docs(bodies: Sequence[Mapping[str, Any]]) -> None:
    """Put results in the place of older ones of the same models, and draw the page and the pictures."""
    path = DOCS / "speed.json"
    runs = {run["model"]: run for run in json.loads(path.read_text(encoding="utf-8"))}
    for body in bodies:
        left_out = {"library", "opened", "took_s", "is_over"}
        runs[body["model"]] = {name: value for name, value in body.items() if name not in left_out}
    path.write_text(json.dumps(list(runs.values()), indent=1) + "\n", encoding="utf-8")
    draw_docs()


def draw_docs() -> None:
    """Draw the page and the pictures from docs/speed.json."""
    for path, text in drawn().items():
        (DOCS / path).write_text(text, encoding="utf-8")


def drawn() -> dict[str, str]:
    """Make every file of docs/ that is drawn from docs/speed.json: name -> text."""
    runs = json.loads((DOCS / "speed.json").read_text(encoding="utf-8"))
    files = {picture_name(run): picture(run) for run in runs}
    return {"speed.md": page((DOCS / "speed.md").read_text(encoding="utf-8"), runs), **files}

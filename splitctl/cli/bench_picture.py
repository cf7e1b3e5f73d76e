"""Where a switch pays, as a picture: prompt by answer, drawn with matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from splitctl.planning.cost import Choice, Comparison
from splitctl.planning.plane import Plane, plane_of
from splitctl.planning.profile import Profile

#: Kinds of files, by the end of their names.
KINDS = ("png", "svg", "pdf")

_COLORS = {
    Choice.LAYER: "#9ecae1",
    Choice.TENSOR: "#fdae6b",
    Choice.LAYER_TO_TENSOR: "#74c476",
    Choice.TENSOR_TO_LAYER: "#bcbddc",
}
#: Points along each side.
_N_POINTS = 33


def picture(profile: Profile, n_ctx: int, title: str, kind: str) -> bytes:
    """Draw the best choice for each prompt and answer, with the lines on which a switch breaks even.

    Args:
        profile: what was measured.
        n_ctx: tokens of the longest prompt and answer.
        title: above it.
        kind: one of `KINDS`.

    Raises:
        ModeNotMeasured: layer mode, tensor mode, or every switch between them is missing.
    """
    plane = plane_of(profile, n_ctx, _N_POINTS)
    figure = Figure(figsize=(8.0, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    choices = list(Choice)
    best = [[choices.index(one.best) for one in row] for row in plane.found]
    colors = ListedColormap([_COLORS[one] for one in choices])
    axes.pcolormesh(plane.prompts, plane.answers, best, cmap=colors, vmin=-0.5, vmax=len(choices) - 0.5)
    handles: list[Patch | Line2D] = [
        Patch(color=_COLORS[one], label=_label(one))
        for one in choices
        if any(choices.index(one) in row for row in best)
    ]
    handles += _draw_lines(axes, plane)
    axes.set(
        xscale="log", yscale="log", title=title, xlabel="tokens of prompt (none cached)", ylabel="tokens generated"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    file = io.BytesIO()
    # Without a date the same profile gives the same file.
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(file, format=kind, dpi=120, metadata=dates.get(kind))
    return file.getvalue()


def _draw_lines(axes: Axes, plane: Plane) -> list[Line2D]:
    """Draw where a switch takes as long as staying in either mode; returns what the legend says of the lines."""
    found = []
    styles: tuple[tuple[Choice, Literal["--", ":"]], ...] = ((Choice.LAYER, "--"), (Choice.TENSOR, ":"))
    for stay, style in styles:
        gains = [[_gain(one, stay) for one in row] for row in plane.found]
        flat = [gain for row in gains for gain in row]
        if min(flat) < 0.0 < max(flat):
            axes.contour(plane.prompts, plane.answers, gains, levels=[0.0], colors="black", linestyles=style)
            found.append(Line2D([], [], color="black", linestyle=style, label=f"breaks even with {stay.value} mode"))
    return found


def _gain(one: Comparison, stay: Choice) -> float:
    """Tell what the better switch saves against staying in a mode, seconds."""
    return one.seconds[stay] - min(one.seconds[choice] for choice in Choice if choice.is_switch)


def _label(choice: Choice) -> str:
    if choice.is_switch:
        return f"read in {choice.reads_in.value}, switch, generate in {choice.generates_in.value}"
    return f"stay in {choice.value}"

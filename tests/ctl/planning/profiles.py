"""Profiles made up for tests: modes whose every token takes the same, and switches between them."""

from __future__ import annotations

from dataclasses import replace

from splitctl.placement import SplitMode
from splitctl.planning.profile import MeasuredMode, Profile, Read, Spread, Step, SwitchTime

LENGTHS = (32, 128, 512)
DEPTHS = (0, 1024, 4096)
CHUNK = max(LENGTHS)


def exactly(seconds: float, share: float = 0.0) -> Spread:
    return Spread(seconds, seconds * (1 - share), seconds * (1 + share), 3)


def constant(mode: SplitMode, prompt_tps: float, generate_tps: float, share: float = 0.0) -> MeasuredMode:
    """Make a mode whose every token takes the same."""
    reads = [Read(1, 0, exactly(1 / prompt_tps, share))]
    reads += [Read(n, 0, exactly(n / prompt_tps, share)) for n in LENGTHS]
    reads += [Read(CHUNK, depth, exactly(CHUNK / prompt_tps, share)) for depth in DEPTHS[1:]]
    steps = [Step(1, depth, exactly(1 / generate_tps, share)) for depth in DEPTHS]
    return MeasuredMode(mode, 512, tuple(reads), tuple(steps))


def switch(before: SplitMode, after: SplitMode, pause: float, **more: object) -> SwitchTime:
    return replace(SwitchTime(before, after, "file", False, 512, exactly(pause), exactly(pause)), **more)  # type: ignore[arg-type]


MEASURED = Profile(
    (constant(SplitMode.LAYER, 800.0, 15.0), constant(SplitMode.TENSOR, 500.0, 20.0)),
    (
        switch(SplitMode.LAYER, SplitMode.TENSOR, 5.0),
        switch(SplitMode.LAYER, SplitMode.TENSOR, 9.0, is_first=True),
        switch(SplitMode.LAYER, SplitMode.TENSOR, 1.0, way="pinned", more_ms=0.5),
        switch(SplitMode.TENSOR, SplitMode.LAYER, 4.0),
    ),
)

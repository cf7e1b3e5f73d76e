"""The tier of a switch: what was asked for where it can be, the file where not, and for auto what pays."""

from __future__ import annotations

import pytest

from splitctl.engine.weights import Chosen, Seen, choose, saves_ms
from splitctl.outcome import WeightsTier

AUTO, FILE, PINNED, RESIDENT = WeightsTier.AUTO, WeightsTier.FILE, WeightsTier.PINNED, WeightsTier.RESIDENT
SHORT, NONE = "CUDA0 lacks 7 MiB", "the copy of the weights is 42% filled"
#: 8.5 GB on two H200: 1.2 s from the file, 0.5 s from the copy, and 0.6 ms a token after it.
MEASURED = {"extra_ms": 0.6, "saves_ms": 700.0}


@pytest.mark.parametrize(
    ("asked", "seen", "tier", "reason", "back"),
    [
        (FILE, Seen(), FILE, "", FILE),
        (FILE, Seen(beside=SHORT, pinned=NONE), FILE, "", FILE),
        (RESIDENT, Seen(), RESIDENT, "", FILE),
        (RESIDENT, Seen(beside=SHORT, back=NONE), FILE, SHORT, FILE),
        (PINNED, Seen(), PINNED, "", PINNED),
        (PINNED, Seen(back=NONE), PINNED, "", FILE),
        (PINNED, Seen(pinned=NONE), FILE, NONE, PINNED),
        (PINNED, Seen(pinned=NONE, back=NONE), FILE, NONE, FILE),
        (PINNED, Seen(n_tokens=10_000, extra_ms=0.6, saves_ms=700.0), PINNED, "", PINNED),
        (AUTO, Seen(), RESIDENT, "both placements fit", PINNED),
        (AUTO, Seen(beside=SHORT, pinned=NONE, back=NONE), FILE, f"{SHORT}; {NONE}", FILE),
        (
            AUTO,
            Seen(beside=SHORT, n_tokens=1000, **MEASURED),
            PINNED,
            f"{SHORT}; a pinned load saves 700 ms, and 1000 tokens take 600 ms more after it",
            PINNED,
        ),
        (
            AUTO,
            Seen(beside=SHORT, n_tokens=1200, **MEASURED),
            FILE,
            f"{SHORT}; a pinned load saves 700 ms, and 1200 tokens take 720 ms more after it",
            PINNED,
        ),
        (
            AUTO,
            Seen(beside=SHORT),
            FILE,
            f"{SHORT}; a pinned load saves 0 ms, and 0 tokens take 0 ms more after it",
            PINNED,
        ),
    ],
)
def test_the_tier_is_what_was_asked_for_or_says_why_not(
    asked: WeightsTier, seen: Seen, tier: WeightsTier, reason: str, back: WeightsTier
) -> None:
    """Each tier with what stands against it; auto weighs what a pinned load saves against what it costs later."""
    assert choose(asked, seen) == Chosen(tier, reason, back)


def test_what_a_pinned_load_saves_is_measured_or_estimated() -> None:
    """Times of this session count; where there is none, the rates of two H200 do."""
    n_bytes = 8_540_000_000
    assert saves_ms(n_bytes, {}) == pytest.approx(718, abs=1)
    assert saves_ms(n_bytes, {FILE: 3000.0}) == pytest.approx(2498, abs=1)
    assert saves_ms(n_bytes, {FILE: 3000.0, PINNED: 400.0}) == 2600

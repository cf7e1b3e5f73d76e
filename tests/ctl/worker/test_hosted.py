"""What a dry run says of the way that a switch would go."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from splitctl.engine.weights import Chosen
from splitctl.errors import Reason
from splitctl.outcome import Route, SwitchOptions, Via, WeightsTier
from splitctl.placement import Placement, SplitMode
from splitctl.switching.checking import Checked
from splitctl.worker.hosted import in_place, judgement

NOW = Placement(devices=("CPU", "CPU"))
TARGET = dataclasses.replace(NOW, mode=SplitMode.TENSOR)
_FILE = Chosen(WeightsTier.FILE, "there is no copy")
_FULL = "the host lacks memory"
_WRONG = "the library's own call is refused with this build"


@pytest.mark.parametrize(
    ("target", "asked", "why_not", "via", "via_reason", "weights", "codes"),
    [
        (TARGET, Route.AUTO, "", Via.BESIDE, "", None, []),
        (TARGET, Route.AUTO, _FULL, Via.COMPOSED, f"{_FULL}; {_WRONG}", WeightsTier.FILE, []),
        (TARGET, Route.IN_PLACE, None, Via.COMPOSED, _WRONG, WeightsTier.FILE, []),
        (TARGET, Route.BESIDE, _FULL, None, "", None, ["does-not-fit"]),
        (NOW, Route.AUTO, None, None, "", None, []),
    ],
    ids=["fits", "does-not-fit", "in-place", "refused", "unchanged"],
)
def test_a_dry_run_says_which_way_a_switch_would_go(
    target: Placement,
    asked: Route,
    why_not: str | None,
    via: Via | None,
    via_reason: str,
    weights: WeightsTier | None,
    codes: list[str],
) -> None:
    """Beside, or in place and why no faster way, with the tier of its weights; beside that cannot be is refused."""
    session = mock.Mock(placement=NOW)
    session.handing.choose_via = lambda found: dataclasses.replace(found, via=Via.COMPOSED, via_reason=_WRONG)
    session.model.library.rpc_servers = ()
    session.model.size_bytes, session.state_bytes.return_value = 5, 6
    checked = in_place(session, Checked(target, SwitchOptions(via=asked), weights=_FILE), why_not)
    found = judgement(session, 1, checked, why_not)
    assert (found.via, found.via_reason, found.weights) == (via, via_reason, weights)
    assert found.weights_reason == (_FILE.reason if weights else "")
    assert [one["code"] for one in found.reasons] == codes


def test_a_dry_run_names_no_way_for_what_is_refused() -> None:
    """A rule's reason stands alone."""
    refused = Checked(TARGET, SwitchOptions(), (Reason("no-row", "there is none"),))
    found = judgement(mock.Mock(placement=NOW), 1, refused, None)
    assert (found.via, found.weights, [one["code"] for one in found.reasons]) == (None, None, ["no-row"])

"""The check of pinned memory: with a driver that works, with one that fails, and without a device that gains."""

from __future__ import annotations

from typing import cast

import pytest

from llama_native import Library
from tests.ctl.pins import FakePin, FakePins
from tools import check_pinning

NOBODY = cast("Library", None)
MIB = 1 << 20


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> FakePins:
    """The driver."""
    driver = FakePins(refuses_twice=True)

    def pin(_library: object, _devices: object, memory: memoryview) -> FakePin | str:
        return driver(memory)

    monkeypatch.setattr(check_pinning, "pin", pin)
    monkeypatch.setattr(check_pinning, "pinnable", lambda _library, _devices: {"CUDA0": 0})
    monkeypatch.setattr(check_pinning, "link_gb_s", lambda _library, _name: {"to": 55.0, "from": 52.0})
    return driver


def test_a_driver_that_works_has_no_failures(pins: FakePins) -> None:
    """Both kinds of memory are pinned, let go, and pinned again; nothing stays pinned."""
    found = check_pinning.check(NOBODY, (), MIB)
    assert found["failures"] == []
    assert [found[kind]["second"] for kind in ("private", "memory_file")] == ["registered twice"] * 2
    assert pins.held == {}


def test_what_cannot_be_pinned_is_a_failure(pins: FakePins, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver's reason, and the link that could not be measured."""
    pins.refusal = "no driver"
    monkeypatch.setattr(check_pinning, "link_gb_s", lambda _library, _name: None)
    assert check_pinning.check(NOBODY, (), MIB)["failures"] == [
        "no link of CUDA0",
        "private: it is not pinned: no driver",
        "memory_file: it is not pinned: no driver",
    ]


def test_without_a_device_that_gains_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor's memory is where it is."""
    monkeypatch.setattr(check_pinning, "pinnable", lambda _library, _devices: {})
    assert check_pinning.check(NOBODY, (), MIB) == {"devices": [], "failures": []}

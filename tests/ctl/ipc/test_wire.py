"""Messages between processes: everything goes out and comes in again, and nothing wrong comes in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.seal import Segment
from splitctl.ipc import orders
from splitctl.ipc.ahead import CopiedAhead, CopyAhead, TakeAhead, TookAhead
from splitctl.ipc.jobs import Fault
from splitctl.ipc.measuring import Measure, Measured, Timed
from splitctl.ipc.wire import MessageInvalid, from_line, from_object, to_line, to_object
from splitctl.outcome import Proof, Route, SwitchOptions, WeightsTier
from splitctl.placement import FlashAttn, Placement, SplitMode

PLACEMENT = Placement(mode=SplitMode.TENSOR, devices=("CPU", "CPU"), tensor_split=(3.0, 1.0), flash_attn=FlashAttn.ON)
SEAL = orders.Seal(1, 100, "ab" * 16, 128, 50, "cd" * 16, PLACEMENT)
SEGMENT = Segment(3, 4096, 50, "ef" * 16)
BOOK = orders.SequenceSnapshot(2, (1, 2, 3), is_pending=True, sampler=SamplerSpec(seed=7, stop=("\n", "é")), n_draws=3)

ORDERS = (
    orders.Open(PLACEMENT, (orders.AdapterFile(Path("/a.gguf"), 0.5),), force=True, seal=SEAL, sequences=(BOOK,)),
    orders.Open(PLACEMENT),
    orders.Tokenize(1, text="a\nb"),
    orders.Tokenize(1, messages=({"role": "user", "content": "é"},)),
    orders.Start(3, 0, tuple(range(1000)), SamplerSpec(), 5, n_draws=2, is_pending=True, n_delivered=3),
    orders.Halt(3),
    orders.Switch(4, PLACEMENT, SwitchOptions(Proof.OFF, convert=False, force=True)),
    CopyAhead(4),
    TakeAhead(4, 1, (SEGMENT,)),
    orders.HandOver(4),
    orders.GoOn(4),
    orders.TakeOver(4, dataclasses.replace(SEAL, segments=(SEGMENT,)), SwitchOptions(via=Route.BESIDE)),
    orders.Check(5, PLACEMENT),
    orders.Save(6, Path("/x/y")),
    orders.Restore(7, Path("/x/y")),
    Measure(8, (512,), (1, 4), (0, 1024), 512, 8, 64, PLACEMENT, 100),
    orders.Close(),
)
REPORTS = (
    orders.Opened(PLACEMENT, {"name": "m"}, recomputed=True, reason="r", load_ms=1.5),
    orders.Tokenized(1, ()),
    orders.Reading(1, 10, 5, 0.25),
    orders.Step((orders.Drawn(1, 5, b"\xff\x00", 1), orders.Drawn(2, 6, b"", 0, is_end=True)), 2.0),
    orders.Ended(1, "error", Fault.MODEL, "m"),
    orders.Forgot(1),
    orders.StageReached(1, "placing", 0.5),
    orders.Sealed(SEAL),
    orders.Unsealed(0),
    orders.Switched(1, {"status": "switched"}),
    orders.FitsBeside(1, PLACEMENT, 2.5),
    CopiedAhead(1, 1, (SEGMENT,)),
    TookAhead(1),
    orders.HandedOver(1, 12.5, {"saving": 1.5}, 2, 3, False, "why", 5, "why"),
    orders.TookOver(1, {"restoring": 1.5}, ("x",), 5, WeightsTier.PINNED, "why"),
    orders.FirstStep(1),
    orders.Trial({"status": "switched"}),
    orders.Checked(1, PLACEMENT, reasons=({"code": "c", "text": "t"},), conversions=("x",), state_bytes=5),
    orders.Saved(1, 2),
    orders.Replaced(1, (BOOK,)),
    Timed(1, is_read=True, n=512, depth=0, seconds=0.5),
    Timed(1, is_read=False, n=1, depth=8, seconds=0.5, n_others=1024),
    Measured(1, {"status": "switched"}),
    orders.Failed(1, Fault.CONFIG, "ConfigInvalid", "m", {"a": 1}),
    orders.Alive(),
)


@pytest.mark.parametrize("message", ORDERS, ids=lambda one: type(one).__name__)
def test_orders_come_back(message: orders.Order) -> None:
    """Every order is read as what was written."""
    assert from_line(to_line(message, orders.ORDERS), orders.ORDERS, max_bytes=1 << 20) == message


@pytest.mark.parametrize("message", REPORTS, ids=lambda one: type(one).__name__)
def test_reports_come_back(message: orders.Report) -> None:
    """Every report is read as what was written."""
    assert from_line(to_line(message, orders.REPORTS), orders.REPORTS, max_bytes=1 << 20) == message


def test_every_kind_is_tried() -> None:
    """The two lists above leave out no message."""
    assert {type(one) for one in ORDERS} == set(orders.ORDERS.values())
    assert {type(one) for one in REPORTS} == set(orders.REPORTS.values())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "nothing"}, "kind"),
        ({"kind": ["start"]}, "kind"),
        ({"stream": "3"}, "stream"),
        ({"stream": True}, "stream"),
        ({"stream": 1.0}, "stream"),
        ({"tokens": 5}, "tokens"),
        ({"tokens": [1, "2"]}, "tokens[1]"),
        ({"tokens": [1, None]}, "tokens[1]"),
        ({"sampler": []}, "sampler"),
        ({"sampler": {"temp": "hot"}}, "sampler.temp"),
        ({"sampler": {"temp": 1e400}}, "sampler.temp"),
        ({"sampler": {"top_p": 2.0}}, "sampler.top_p"),
        ({"sampler": {"heat": 1}}, "sampler.heat"),
        ({"sampler": {"stop": ["\ud800"]}}, "sampler.stop[0]"),
        ({"is_pending": 1}, "is_pending"),
        ({"more": 1}, "more"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], field: str) -> None:
    """An order with one wrong field is refused by its name."""
    body = {**to_object(orders.Start(3, 0, (1,), SamplerSpec()), orders.ORDERS), **change}
    with pytest.raises(MessageInvalid) as caught:
        from_object(body, orders.ORDERS)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_a_missing_field_is_named() -> None:
    """An order without a field that has no default is refused."""
    with pytest.raises(MessageInvalid, match="stream"):
        from_object({"kind": "halt"}, orders.ORDERS)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[]", "object"),
        (b"3", "object"),
        (b'{"kind":"halt","stream":' + b"1" * 5000 + b"}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"kind":"halt","stream":1}' + b" " * 3_000_000, "bytes at most"),
        (b'{"kind":"restore","order":1,"path":""}', "path"),
        (b'{"kind":"restore","order":1,"path":"a\\u0000b"}', "path"),
        (b'{"kind":"switch","order":1,"target":{"mode":"sideways"}}', "target"),
        (b'{"kind":"switch","order":1,"target":[]}', "target"),
        (b'{"kind":"switch","order":1,"target":{"tensor_split":[1e999]}}', "target"),
    ],
)
def test_lines_that_are_none_are_refused(line: bytes, wanted: str) -> None:
    """Whatever else a line is, it is one error."""
    with pytest.raises(MessageInvalid, match=wanted):
        from_line(line, orders.ORDERS, max_bytes=2_000_000)


def test_bytes_must_be_base64() -> None:
    """A piece that is no base64 is refused."""
    body = to_object(orders.Step((orders.Drawn(1, 5, b"a", 1),)), orders.REPORTS)
    body["tokens"][0]["piece"] = "!"
    with pytest.raises(MessageInvalid, match="base64"):
        from_object(body, orders.REPORTS)


def test_enums_name_their_values() -> None:
    """A fault that does not exist is refused with those that do."""
    body = to_object(orders.Failed(1, Fault.CONFIG, "a", "b"), orders.REPORTS)
    with pytest.raises(MessageInvalid, match="internal"):
        from_object({**body, "fault": "mine"}, orders.REPORTS)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), message=st.sampled_from(ORDERS + REPORTS))
def test_damaged_messages_are_read_or_refused(data: st.DataObject, message: object) -> None:
    """A message with any field replaced by anything is either a message or MessageInvalid."""
    kinds = orders.ORDERS if type(message) in orders.ORDERS.values() else orders.REPORTS
    body = to_object(message, kinds)
    name = data.draw(st.sampled_from(sorted(body)))
    body[name] = data.draw(_JSON)
    try:
        read = from_line(json.dumps(body).encode(), kinds, max_bytes=1 << 20)
    except MessageInvalid:
        return
    assert dataclasses.is_dataclass(read)

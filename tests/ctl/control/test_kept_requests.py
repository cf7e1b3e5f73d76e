"""Request lines of the first release's client: read to the same requests, and still written like that."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import (
    MAX_REQUEST_BYTES,
    REQUESTS,
    CheckRequest,
    ControlRequest,
    EventsRequest,
    GenerateRequest,
    PolicyRequest,
    RestoreRequest,
    SaveRequest,
    StatusRequest,
    StopRequest,
    SwitchRequest,
)
from splitctl.ipc.wire import MessageInvalid, from_line, to_line
from splitctl.outcome import Proof, Route
from splitctl.placement import Changes, FlashAttn, Placement, SplitMode

KEPT = Path(__file__).parents[2] / "golden" / "control" / "requests.jsonl"
LINES = KEPT.read_bytes().splitlines(keepends=True)

TARGET = Placement(
    mode=SplitMode.TENSOR, devices=("CUDA0", "CUDA1"), tensor_split=(3.0, 1.0), main_gpu=1, n_gpu_layers=20, n_ctx=8192,
    type_k="q8_0", type_v="q4_0", offload_kqv=False, flash_attn=FlashAttn.ON, n_batch=1024, n_ubatch=256, n_seq_max=4,
    kv_unified=True, n_threads=6, n_threads_batch=12,
)  # fmt: skip
CHANGES = Changes.from_json(TARGET.to_json())
SAMPLER = SamplerSpec(
    temp=1.25, top_k=20, top_p=0.9, min_p=0.125, repeat_penalty=1.5, repeat_last_n=-1, seed=4294967294,
    stop=("\n", "énd"),
)  # fmt: skip
WANTED: tuple[ControlRequest, ...] = (
    StatusRequest(),
    SwitchRequest(Changes(mode=SplitMode.TENSOR)),
    SwitchRequest(CHANGES, Proof.POSITIONS, convert=False, force=True, timeout_s=2.5),
    SwitchRequest(Changes(tensor_split=None), Proof.OFF, timeout_s=30.0),
    CheckRequest(Changes()),
    CheckRequest(CHANGES, convert=False, force=True),
    GenerateRequest(prompt='a "b"\né \U0001f600'),
    GenerateRequest(prompt="x", add_special=False, parse_special=True, n_predict=5, sampler=SAMPLER),
    GenerateRequest(messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hé"})),
    GenerateRequest(tokens=(1, 2, 2147483647), n_predict=0, sampler=SamplerSpec(temp=0.0)),
    SaveRequest(Path("/a b/é.carry")),
    RestoreRequest(Path("/a/b")),
    StopRequest(),
    EventsRequest(),
    PolicyRequest("off"),
)


@pytest.mark.parametrize(("line", "wanted"), list(zip(LINES, WANTED, strict=True)))
def test_a_kept_line_is_read_and_written_as_before(line: bytes, wanted: ControlRequest) -> None:
    """A host of today reads the same request from it, and a client of today writes the same line."""
    assert from_line(line, REQUESTS, max_bytes=MAX_REQUEST_BYTES) == wanted
    assert to_line(wanted, REQUESTS) == line


def test_the_kept_lines_leave_nothing_out() -> None:
    """Every kind of request is there, with every field of a placement and of a sampler at no default."""
    assert {type(one) for one in WANTED} == set(REQUESTS.values())
    defaults = Placement().to_json()
    assert not [name for name, value in TARGET.to_json().items() if value == defaults[name]]
    assert Placement(**CHANGES) == TARGET
    assert not [name for name, value in asdict(SAMPLER).items() if value == asdict(SamplerSpec())[name]]


def test_the_route_of_a_switch_is_written_where_it_is_named() -> None:
    """A host of the first release still reads a switch that names none; the wanted words stand in the error."""
    for kind in (SwitchRequest, CheckRequest):
        asked = kind(Changes(mode=SplitMode.TENSOR), via=Route.IN_PLACE)
        line = to_line(asked, REQUESTS)
        assert b'"via":"in-place"' in line
        assert from_line(line, REQUESTS, max_bytes=MAX_REQUEST_BYTES) == asked
        assert asked.options.via is Route.IN_PLACE
        with pytest.raises(
            MessageInvalid, match="'via' of the message is 'moon'; wanted: one of auto, beside, in-place"
        ):
            from_line(line.replace(b"in-place", b"moon"), REQUESTS, max_bytes=MAX_REQUEST_BYTES)

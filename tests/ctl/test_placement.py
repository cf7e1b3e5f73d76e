"""Placements: what parses, what is refused, what counts as the same."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from splitctl.errors import ConfigInvalid, SplitctlError
from splitctl.placement import (
    FlashAttn,
    Placement,
    PlacementInvalid,
    SplitMode,
    parse_tensor_split,
)


@pytest.mark.parametrize(
    ("text", "shares"),
    [("3,1", (3.0, 1.0)), ("3/1", (3.0, 1.0)), ("1", (1.0,)), (" 0.5 , 0 ", (0.5, 0.0)), ("", None), ("  ", None)],
)
def test_split_text_is_read(text: str, shares: tuple[float, ...] | None) -> None:
    """A split text becomes its shares, an empty one the library's default."""
    assert parse_tensor_split(text) == shares


@pytest.mark.parametrize(
    "text", ["nan,1", "inf,1", "1e308,1e308", "1e39", "1e-60,0", "-1,2", "0,0", "a,b", "1,,2", "1;2", ",", "0x1,1"]
)
def test_split_text_that_is_no_split_is_refused(text: str) -> None:
    """NaN, negative and words are refused with the field's name, and so is what a 32-bit float makes infinity or 0."""
    with pytest.raises(PlacementInvalid, match="tensor_split") as caught:
        parse_tensor_split(text)
    assert caught.value.field == "tensor_split"


def test_split_text_longer_than_the_build_takes_is_refused() -> None:
    """More shares than the build has devices is refused before a list is built, in a short message."""
    with pytest.raises(PlacementInvalid, match="16 shares at most") as caught:
        parse_tensor_split("1," * 100_000 + "1", max_shares=16)
    assert len(str(caught.value)) < 200


def test_split_longer_than_the_devices_is_refused() -> None:
    """Three shares for two devices are refused by the placement itself."""
    with pytest.raises(PlacementInvalid, match="2 shares at most"):
        Placement(devices=("CPU", "CPU"), tensor_split=(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_ctx", -1),
        ("n_batch", 0),
        ("n_ubatch", 0),
        ("n_seq_max", 0),
        ("n_seq_max", 257),
        ("main_gpu", -1),
        ("n_threads", -2),
        ("type_k", "q3_k"),
        ("type_v", ""),
        ("devices", ("CPU", "")),
        ("tensor_split", (math.nan, 1.0)),
        ("tensor_split", ()),
    ],
)
def test_values_that_no_build_could_mean_are_refused(field: str, value: object) -> None:
    """Each field refuses what is out of its range, by name."""
    with pytest.raises(PlacementInvalid) as caught:
        dataclasses.replace(Placement(), **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_whoever_catches_the_root_catches_a_placement() -> None:
    """It is one of the errors of the package, a value that the user gave, and crosses a process boundary whole."""
    error = PlacementInvalid("n_ctx", -1, "from 0 to 9")
    assert isinstance(error, SplitctlError)
    assert isinstance(error, ConfigInvalid)
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert (type(back), back.args) == (PlacementInvalid, ("n_ctx", -1, "from 0 to 9"))


def test_the_same_shares_in_another_unit_are_the_same_placement() -> None:
    """A split of 3,1 is one of 0.75,0.25, and a missing share is zero."""
    first = Placement(devices=("A", "B"), tensor_split=(3.0, 1.0))
    assert first.differs(dataclasses.replace(first, tensor_split=(0.75, 0.25))) == []
    short = dataclasses.replace(first, tensor_split=(1.0,))
    assert short.differs(dataclasses.replace(first, tensor_split=(1.0, 0.0))) == []
    assert short.differs(first) == ["tensor_split"]


def test_a_single_device_mode_has_no_split() -> None:
    """Mode none ignores a split, so it does not tell two placements apart."""
    plain = Placement(mode=SplitMode.NONE)
    assert plain.differs(dataclasses.replace(plain, tensor_split=(1.0, 2.0))) == []


def test_differences_are_named_in_order() -> None:
    """Every differing field is named, in the order of the class."""
    other = Placement(mode=SplitMode.TENSOR, n_ctx=512, flash_attn=FlashAttn.ON)
    assert Placement().differs(other) == ["mode", "n_ctx", "flash_attn"]


def test_any_negative_layer_count_means_all() -> None:
    """All layers is one placement, however it was written."""
    assert Placement(n_gpu_layers=-5).differs(Placement(n_gpu_layers=-1)) == []


def test_a_target_keeps_what_is_not_named() -> None:
    """What a request does not name stays as it is."""
    current = Placement(devices=("A", "B"), tensor_split=(2.0, 1.0), n_ctx=777)
    assert current.changed(n_ctx=999) == dataclasses.replace(current, n_ctx=999)


def test_a_split_is_kept_only_within_a_mode() -> None:
    """On a change of mode an unnamed split goes back to the default, a named one counts."""
    current = Placement(devices=("A", "B"), tensor_split=(2.0, 1.0))
    assert current.changed(mode=SplitMode.TENSOR).tensor_split is None
    assert current.changed(mode=SplitMode.LAYER).tensor_split == (2.0, 1.0)
    assert current.changed(mode=SplitMode.TENSOR, tensor_split=(1.0, 1.0)).tensor_split == (1.0, 1.0)
    assert current.changed(devices=("A",)).tensor_split is None


def test_an_unknown_field_of_a_target_is_refused() -> None:
    """A request that names no field of a placement is refused with the names there are."""
    with pytest.raises(PlacementInvalid, match="n_gpu_layers"):
        Placement().changed(gpu_layers=3)


def test_json_round_trip() -> None:
    """A placement written as JSON reads back equal."""
    placement = Placement(
        mode=SplitMode.TENSOR,
        devices=("CPU", "CPU"),
        tensor_split=(3.0, 1.0),
        flash_attn=FlashAttn.ON,
        offload_kqv=False,
        kv_unified=True,
    )
    assert Placement.from_json(json.loads(json.dumps(placement.to_json()))) == placement
    assert Placement.from_json({}) == Placement()


@pytest.mark.parametrize(
    "plain",
    [
        5,
        None,
        {"mode": "rows"},
        {"n_ctx": "4"},
        {"n_ctx": True},
        {"devices": 3},
        {"tensor_split": ["a"]},
        {"colour": 1},
    ],
)
def test_json_of_the_wrong_kind_is_refused(plain: Any) -> None:
    """A field of the wrong kind, or no field at all, is refused by name."""
    with pytest.raises(PlacementInvalid):
        Placement.from_json(plain)


def test_description_is_in_the_words_of_the_command_line() -> None:
    """The one-line description leaves defaults out and uses llama.cpp's flags."""
    placement = Placement(
        mode=SplitMode.TENSOR,
        devices=("CPU", "CPU"),
        tensor_split=(3.0, 1.0),
        n_ctx=4096,
        flash_attn=FlashAttn.ON,
        offload_kqv=False,
        kv_unified=True,
    )
    assert placement.describe() == "-sm tensor --device CPU,CPU -ts 3,1 -c 4096 -fa on -nkvo -kvu"


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"mode": "tensor"}, {"mode": SplitMode.TENSOR}),
        ({"mode": "Layer"}, {"mode": SplitMode.LAYER}),
        ({"flash_attn": "on"}, {"flash_attn": FlashAttn.ON}),
        ({"flash_attn": False}, {"flash_attn": FlashAttn.OFF}),
        ({"devices": ["CUDA0", "CUDA1"]}, {"devices": ("CUDA0", "CUDA1")}),
        ({"devices": "CUDA0, CUDA1"}, {"devices": ("CUDA0", "CUDA1")}),
        ({"devices": "CPU"}, {"devices": ("CPU",)}),
        ({"tensor_split": [3, 1]}, {"tensor_split": (3.0, 1.0)}),
        ({"tensor_split": "3/1"}, {"tensor_split": (3.0, 1.0)}),
        ({"tensor_split": np.array([3, 1], np.float32)}, {"tensor_split": (3.0, 1.0)}),
        ({"n_ctx": np.int64(4096)}, {"n_ctx": 4096}),
        ({"type_k": "Q8_0"}, {"type_k": "q8_0"}),
    ],
)
def test_values_are_taken_as_people_write_them(given: dict[str, Any], held: dict[str, Any]) -> None:
    """Words, lists, texts and numbers of numpy become what the field holds, in a new placement and a changed one."""
    wanted = Placement(**held)
    for made in (Placement(**given), Placement().changed(**given)):
        assert made == wanted
        assert [type(getattr(made, name)) for name in held] == [type(value) for value in held.values()]
        assert hash(made) == hash(wanted)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("mode", "rows", "none layer row tensor"),
        ("mode", 3, "none layer row tensor"),
        ("mode", None, "none layer row tensor"),
        ("flash_attn", "yes", "auto on off"),
        ("devices", None, "names of devices"),
        ("devices", 2, "names of devices"),
        ("devices", [0, 1], "names of devices"),
        ("devices", {"CPU": 1}, "names of devices"),
        ("tensor_split", 3, "numbers, one a device"),
        ("tensor_split", ["3", "1"], "numbers, one a device"),
        ("tensor_split", [True, False], "numbers, one a device"),
        ("tensor_split", [10**400], "numbers, one a device"),
        ("n_ctx", "4096", "a whole number from 0"),
        ("n_ctx", 4096.5, "a whole number from 0"),
        ("n_ctx", None, "a whole number from 0"),
        ("n_batch", True, "a whole number from 1"),
        ("type_k", 1, "f32 f16"),
        ("offload_kqv", "off", "True or False"),
        ("kv_unified", 1, "True or False"),
    ],
)
def test_values_of_another_kind_are_refused_with_what_is_wanted(field: str, value: object, wanted: str) -> None:
    """Never a TypeError, and never a placement that means something else."""
    for make in (lambda: Placement(**{field: value}), lambda: Placement().changed(**{field: value})):  # type: ignore[arg-type]
        with pytest.raises(PlacementInvalid, match=wanted) as caught:
            make()
        assert caught.value.field == field


def test_a_word_for_the_mode_keeps_a_split_within_the_mode() -> None:
    """A changed mode is the same, whether it comes as a word or not."""
    current = Placement(devices=("A", "B"), tensor_split=(2.0, 1.0))
    assert current.changed(mode="layer").tensor_split == (2.0, 1.0)
    assert current.changed(mode="tensor").tensor_split is None

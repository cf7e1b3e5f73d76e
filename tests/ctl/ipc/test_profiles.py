"""Profiles that are kept: given for what they hold for, and told to be stale by name for anything else."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splitctl.ipc import profiles
from splitctl.ipc.profiles import KeptProfile, ProfileKey, keep, look_up, with_kept
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.outcome import StageTimes
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.profile import Crowd, LeftOut, MeasuredMode, Profile, Read, Served, Spread, Step, SwitchTime
from tests.stublib import write_model

_PLACEMENT = Placement(devices=("CPU", "CPU"), n_threads=1)
_TWO = Spread(2.0, 1.0, 3.0, 3)


def _profile(seconds: float = 2.0) -> Profile:
    spread = Spread(seconds, seconds, seconds, 1)
    modes = tuple(
        MeasuredMode(mode, 512, (Read(512, 0, spread), Read(512, 1024, _TWO)), (Step(1, 0, spread), Step(4, 0, _TWO)))
        for mode in (SplitMode.LAYER, SplitMode.TENSOR)
    )
    stages = StageTimes(quiescing=0.5, saving=1.0, freeing=None)
    switch = SwitchTime(SplitMode.LAYER, SplitMode.TENSOR, "file", False, 100, spread, _TWO, stages, 0.25)
    return Profile(modes, (switch,), (LeftOut("beside", "nobody tried"),))


class _Place:
    """A model, a library file and a folder of profiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "profiles"
        self.model = write_model(folder / "tiny.gguf")
        self.library = folder / "libllama.so"
        self.library.write_bytes(b"x")

    @property
    def facts(self) -> ModelFacts:
        return read_facts(self.model)

    def kept(self, placement: Placement = _PLACEMENT, **changes: object) -> KeptProfile:
        one = KeptProfile(
            key=ProfileKey.of(self.library, self.facts, placement),
            profile=_profile(),
            made_at=1_700_000_000.0,
            library_version="2026.10 (b1)",
            driver=profiles.driver_text(),
            model_path=self.model,
            model_name="tiny",
            splitctl_version="1",
        )
        return dataclasses.replace(one, **changes)  # type: ignore[arg-type]

    def look(self, placement: Placement = _PLACEMENT) -> profiles.Found:
        return look_up(self.library, self.facts, placement, folder=self.folder)


@pytest.fixture
def place(tmp_path: Path) -> _Place:
    return _Place(tmp_path)


def test_a_profile_comes_back(place: _Place) -> None:
    """What was kept is found as it was, whatever mode, context, batches and sequences are asked about."""
    kept = place.kept()
    keep(kept, place.folder)
    other = _PLACEMENT.changed(mode=SplitMode.TENSOR, n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=4)
    assert place.look() == place.look(other) == profiles.Found(kept)


def test_a_profile_of_before_is_read(place: _Place) -> None:
    """A file without the fields that came later is a profile in which they are empty, and is written as it was."""
    kept = place.kept()
    old = keep(kept, place.folder).read_text()
    assert not any(name in old for name in ("crowds", "served", "older_at"))
    assert place.look().kept == kept
    crowd = Crowd(128, 2048, _TWO, _TWO)
    modes = tuple(dataclasses.replace(one, crowds=(crowd,)) for one in kept.profile.modes)
    served = (Served(SplitMode.LAYER, 4, _TWO),)
    newer = place.kept(profile=dataclasses.replace(kept.profile, modes=modes, served=served), older_at=2.0)
    assert "crowds" in keep(newer, place.folder).read_text()
    assert place.look().kept == newer


def test_a_bench_of_a_part_loses_nothing_that_is_kept(place: _Place) -> None:
    """A new bench of one mode is kept with the rest of the earlier one, and says so; of another driver it is alone."""
    old = place.kept(cuts=("a", "b"))
    keep(old, place.folder)
    part = Profile(_profile(1.0).modes[:1])
    new = place.kept(profile=part, made_at=1_800_000_000.0, cuts=("b", "c"))
    whole, stays = with_kept(new, place.folder)
    assert [one.mode for one in whole.profile.modes] == [SplitMode.LAYER, SplitMode.TENSOR]
    assert whole.profile.modes[0] == part.modes[0]
    assert whole.profile.switches == old.profile.switches
    assert (whole.made_at, whole.older_at, whole.cuts) == (new.made_at, old.made_at, ("b",))
    assert "parts from 2023-11-1" in profiles.day_of(whole)
    assert stays.startswith("tensor mode, layer -> tensor file of 2023-11-1")
    assert with_kept(dataclasses.replace(new, driver="another"), place.folder)[0].profile == part
    assert with_kept(new, place.folder / "none") == (new, "")
    keep(whole, place.folder)
    assert place.look().kept == whole


def test_a_flash_attention_that_the_library_chose_is_found(place: _Place) -> None:
    """A profile with flash attention off is found where the choice is left to the library, and not where it is on."""
    off = place.kept(_PLACEMENT.changed(flash_attn=FlashAttn.OFF))
    keep(off, place.folder)
    assert place.look().kept == off
    assert "its flash attention off, not on" in place.look(_PLACEMENT.changed(flash_attn=FlashAttn.ON)).why


def test_without_a_profile_the_command_is_named(place: _Place) -> None:
    """Where nothing was measured the answer is the command that measures it."""
    found = place.look(_PLACEMENT.changed(tensor_split=(3, 1), n_ctx=512))
    assert found.kept is found.stale is None
    assert found.why.endswith(f"splitctl bench -m {place.model} --device CPU,CPU -ts 3,1 -t 1")


def _other_build(place: _Place, patch: pytest.MonkeyPatch) -> Placement:
    del patch
    place.library.write_bytes(b"other")
    return _PLACEMENT


def _other_driver(place: _Place, patch: pytest.MonkeyPatch) -> Placement:
    del place
    patch.setattr(profiles, "driver_text", lambda: "NVIDIA 9")
    return _PLACEMENT


def _other_file(place: _Place, patch: pytest.MonkeyPatch) -> Placement:
    del patch
    data = bytearray(place.model.read_bytes())
    data[-1] ^= 1
    place.model.write_bytes(data)
    return _PLACEMENT


def _other_devices(place: _Place, patch: pytest.MonkeyPatch) -> Placement:
    del place, patch
    return _PLACEMENT.changed(devices=("CPU",))


def _other_threads(place: _Place, patch: pytest.MonkeyPatch) -> Placement:
    del place, patch
    return _PLACEMENT.changed(n_threads=2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_build, "the library is another build than 2026.10 (b1)"),
        (_other_driver, "the driver is NVIDIA 9 now"),
        (_other_file, "the model's file holds other weights now"),
        (_other_devices, "its devices CPU,CPU, not CPU"),
        (_other_threads, "its threads 1,1, not 2,2"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_stale_profile_is_told_and_not_given(
    place: _Place, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Placement], said: str
) -> None:
    """A profile of another build, driver, file or devices is not given, and the answer names what differs."""
    kept = place.kept()
    keep(kept, place.folder)
    found = place.look(change(place, monkeypatch))
    assert found.kept is None
    assert found.stale == kept
    assert said in found.why
    assert "splitctl bench -m" in found.why


def test_of_several_the_nearest_and_newest_is_named(place: _Place) -> None:
    """The profile that differs in least is compared with, and of equally near ones the newest."""
    older = place.kept(_PLACEMENT.changed(n_threads=3), made_at=1.0)
    newer = place.kept(_PLACEMENT.changed(n_threads=4), made_at=2.0)
    far = place.kept(_PLACEMENT.changed(n_threads=5, type_k="q8_0"), made_at=3.0)
    for one in (newer, far, older):
        keep(one, place.folder)
    assert place.look().stale == newer


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"median":2.0', '"median":-1'),
        lambda text: text.replace('"layer"', '"sideways"'),
        lambda text: text.replace('"made_at":1700000000.0', '"made_at":NaN'),
        lambda text: text.replace('"rpc":[]', '"rpc":["h:1"]'),
        lambda text: text.replace('"made_at":1700000000.0', '"made_at":1e300'),
        lambda text: text.replace('"made_at":1700000000.0', '"made_at":-1e12'),
        lambda text: text.replace('"depth":0', '"depth":1' + "0" * 400),
        lambda text: json.dumps([text]),
    ],
    ids=["cut", "negative", "mode", "nan", "another key", "far time", "early time", "huge depth", "no object"],
)
def test_a_damaged_profile_counts_as_none(place: _Place, damage: Callable[[str], str]) -> None:
    """A file that is no profile of its name is not given; the answer says that it is damaged and how to measure."""
    path = keep(place.kept(), place.folder)
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    found = place.look()
    assert found.kept is found.stale is None
    assert f"the profile in {path} is damaged" in found.why
    assert "splitctl bench -m" in found.why


def test_a_pipe_in_place_of_a_profile_is_not_waited_for(place: _Place) -> None:
    """What is no regular file counts as damaged, and the look for a profile comes back."""
    place.folder.mkdir(parents=True)
    os.mkfifo(place.folder / place.kept().key.file_name)
    found = place.look()
    assert found.kept is None
    assert "is damaged (the message is no regular file" in found.why


def test_a_damaged_profile_beside_it_does_no_harm(place: _Place) -> None:
    """A damaged file of another key is passed over."""
    kept = place.kept()
    keep(kept, place.folder)
    (place.folder / "0.json").write_text("{")
    assert place.look().kept == kept
    assert place.look(_PLACEMENT.changed(n_threads=2)).stale == kept


def test_a_model_that_is_gone_is_told(place: _Place) -> None:
    """A model whose file was removed has no profile, and nothing is raised."""
    facts = place.facts
    place.model.unlink()
    found = look_up(place.library, facts, _PLACEMENT, folder=place.folder)
    assert found.kept is None
    assert "cannot be told from others" in found.why


_WRITE_MANY = """
import pickle, sys
from splitctl.ipc.profiles import keep
kept, folder = pickle.load(sys.stdin.buffer)
for _ in range(50):
    keep(kept, folder)
"""


def test_two_processes_write_whole_files(place: _Place) -> None:
    """While two processes write one profile, whoever reads finds one of the two, whole, and nothing is left beside."""
    mine, theirs = place.kept(made_at=1.0), place.kept(made_at=2.0)
    keep(mine, place.folder)
    seen = []
    with subprocess.Popen([sys.executable, "-c", _WRITE_MANY], stdin=subprocess.PIPE) as other:
        assert other.stdin is not None
        other.stdin.write(pickle.dumps((theirs, place.folder)))
        other.stdin.close()
        while other.poll() is None:
            keep(mine, place.folder)
            seen.append(place.look().kept)
    assert other.returncode == 0
    assert set(seen) <= {mine, theirs}
    assert [one.name for one in place.folder.iterdir()] == [mine.key.file_name]


def test_a_profile_that_cannot_be_kept_leaves_the_old_one(place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails raises, and what was kept before is still there, with nothing beside it."""
    kept = place.kept()
    path = keep(kept, place.folder)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        keep(place.kept(made_at=5.0), place.folder)
    assert place.look().kept == kept
    assert list(place.folder.iterdir()) == [path]


def test_drivers_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names processor, driver and models of GPUs, as the system tells them."""
    card = tmp_path / "nvidia" / "gpus" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n"
    (tmp_path / "nvidia" / "version").write_text(text)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\n")
    monkeypatch.setattr(profiles, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(profiles, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(profiles, "_MODULE_VERSIONS", {"amdgpu": tmp_path / "none"})
    assert profiles.driver_text() == "AMD EPYC 9654, NVIDIA 570.86.15, GPU 0 NVIDIA H200"

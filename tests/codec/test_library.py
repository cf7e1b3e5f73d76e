"""The library is the oracle: what the codec writes is taken by real builds, and what they go on with is right."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statecodec import ModelFacts, Rotation, StateImage, TensorType, emit, parse, salvage, transcode
from tests.tool import CHECKOUT, tool_command
from tools.make_goldens import BUILDS

_NEWEST, _BEFORE, _NINE = "xllamacpp-2026.10.11549", "llama-cpp-python-0.3.36", "xllamacpp-2026.8.10566"
_NEXT = 4242
_64 = Rotation(64, 64)

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]


@dataclass(frozen=True)
class Setting:
    """A context: build, sequences, and how its cache is stored."""

    build: str = _NEWEST
    n_tokens: tuple[int, ...] = (12,)
    n_seq_max: int = 1
    unified: bool = True
    flash: bool = True
    type_k: TensorType = TensorType.F16
    type_v: TensorType = TensorType.F16
    form: str = "context"
    seq_id: int = 0


@dataclass
class Lab:
    """Runs jobs on real builds, each build in one child, each job in a fresh context; the same job is run once."""

    model: Path
    builds: Path
    folder: Path
    kept: dict[Setting, tuple[bytes, np.ndarray]] = field(default_factory=dict)
    children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def natively(self, setting: Setting) -> tuple[bytes, np.ndarray]:
        """The state after the prompt, and the logits of the next token of the setting's sequence."""
        if setting not in self.kept:
            self.kept[setting] = self.run(setting, {})
        return self.kept[setting]

    def restored(self, setting: Setting, blob: bytes) -> tuple[bytes, np.ndarray]:
        """The state that a fresh context holds after it was given a blob, and the logits of the next token."""
        (self.folder / "given").write_bytes(blob)
        return self.run(setting, {"load": str(self.folder / "given")})

    def run(self, setting: Setting, more: dict[str, Any]) -> tuple[bytes, np.ndarray]:
        """One job: the state, and the logits of the next token."""
        told = BUILDS[setting.build]
        library = self.builds / told.folder / told.library
        if not library.exists():
            pytest.skip(f"{library} is not there: run ci/builds")
        own = {"seq_id": setting.seq_id, "token": _NEXT, "pos": setting.n_tokens[setting.seq_id]}
        job = {
            "name": "state",
            "form": setting.form,
            "seq_id": setting.seq_id,
            "n_tokens": setting.n_tokens,
            "n_seq_max": setting.n_seq_max,
            "unified": setting.unified,
            "flash": setting.flash,
            "type_k": int(setting.type_k),
            "type_v": int(setting.type_v),
            "n_ctx": 64 * setting.n_seq_max,
            "next": own,
            **more,
        }
        child = self.child(setting.build, library)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(job) + "\n")
        child.stdin.flush()
        if not child.stdout.readline():
            child.wait()
            pytest.fail(f"the child of {setting.build} ended: {self.said(setting.build)}")
        logits = np.frombuffer((self.folder / "state.logits").read_bytes(), dtype="<f4")
        return (self.folder / "state").read_bytes(), logits

    def child(self, build: str, library: Path) -> subprocess.Popen[str]:
        """The child that holds a build and the model; started for the first job, and again where one ended."""
        child = self.children.get(build)
        if child is None or child.poll() is not None:
            with (self.folder / f"{build}.err").open("w", encoding="utf-8") as errors:
                child = subprocess.Popen(
                    tool_command("capture_state"),
                    cwd=CHECKOUT,
                    env={**os.environ, "GGML_NO_BACKTRACE": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self.children[build] = child
            request = {
                "library": str(library),
                "epoch": BUILDS[build].epoch,
                "model": str(self.model),
                "folder": str(self.folder),
                "jobs": [],
            }
            assert child.stdin is not None
            child.stdin.write(json.dumps(request) + "\n")
        return child

    def said(self, build: str) -> str:
        """The end of what a build's child wrote to stderr."""
        return (self.folder / f"{build}.err").read_text(encoding="utf-8", errors="replace")[-2000:]

    def close(self) -> None:
        """End the children, all of which must end well."""
        for build, child in self.children.items():
            child.communicate()
            assert child.returncode == 0, self.said(build)


@pytest.fixture(scope="module")
def lab(smollm2: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Real builds and the real model."""
    lab = Lab(smollm2, cache_dir / "builds", tmp_path_factory.mktemp("states"))
    yield lab
    lab.close()


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


def written(image: StateImage) -> bytes:
    return b"".join(emit(image))


@pytest.mark.parametrize("build", [_NEWEST, _BEFORE, _NINE, "xllamacpp-2026.4.8929", "xllamacpp-0.2.14"])
@pytest.mark.parametrize("form", ["context", "sequence"])
def test_a_build_takes_what_was_read_and_written_again(lab: Lab, build: str, form: str) -> None:
    """emit(parse(x)) is x; the build takes it, holds equal bytes, and goes on with bit-equal logits."""
    setting = Setting(build, form=form)
    blob, logits = lab.natively(setting)
    assert written(parse(blob)) == blob
    held, after = lab.restored(setting, blob)
    assert held == blob
    assert np.array_equal(after, logits)


_F16 = Setting()
_Q8 = Setting(type_k=TensorType.Q8_0, type_v=TensorType.Q8_0)
_OFF = Setting(flash=False)
_UNIFIED = Setting(n_tokens=(5, 7, 12, 3), n_seq_max=4, seq_id=2)
_STREAMS = Setting(n_tokens=(5, 7, 12, 3), n_seq_max=4, seq_id=2, unified=False)
_OLD, _OLDER = Setting(_BEFORE), Setting(_NINE)


def to_f16(image: StateImage) -> StateImage:
    return transcode.to_types(image, type_k=TensorType.F16, type_v=TensorType.F16)


@pytest.mark.parametrize(
    ("source", "target", "change", "bound"),
    [
        (_OFF, _F16, lambda image: transcode.to_v_trans(image, v_trans=False), 1e-3),
        (_F16, _OFF, lambda image: transcode.to_v_trans(image, v_trans=True), 1e-3),
        (_Q8, _F16, to_f16, None),
        (_Q8, _OFF, lambda image: transcode.to_v_trans(to_f16(image), v_trans=True), None),
        (_UNIFIED, _STREAMS, lambda image: transcode.to_streams(image, 4), 1e-3),
        (_STREAMS, _UNIFIED, lambda image: transcode.to_streams(image, 1), 1e-3),
        (_OLD, _F16, lambda image: transcode.to_version(image, 11), 1e-2),
        (_F16, _OLD, lambda image: transcode.to_version(image, 10), 1e-2),
        (_OLDER, _F16, lambda image: transcode.to_version(image, 11), 1e-2),
        (_F16, _OLDER, lambda image: transcode.to_version(image, 9), 1e-2),
    ],
    ids=[
        "off-on",
        "on-off",
        "q8-f16",
        "q8-off",
        "unified-streams",
        "streams-unified",
        "10-11",
        "11-10",
        "9-11",
        "11-9",
    ],
)
def test_a_converted_state_goes_on_as_if_it_had_been_read_there(
    lab: Lab, source: Setting, target: Setting, change: Callable[[StateImage], StateImage], bound: float | None
) -> None:
    """The target takes the converted bytes whole, holds them, and its next logits are those of its own reading."""
    blob = written(change(parse(lab.natively(source)[0])))
    held, after = lab.restored(target, blob)
    assert held == blob
    found = nmse(after, lab.natively(target)[1])
    print(f"nmse {found:.2e}")
    # From a quantized cache: twice what that type itself costs on this build, measured where nothing else differs.
    own = nmse(lab.natively(_Q8)[1], lab.natively(_F16)[1])
    assert found <= (2 * own if bound is None else bound)


@pytest.mark.parametrize("kind", [TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1])
def test_a_quantized_conversion_is_as_good_as_the_builds_own(lab: Lab, kind: TensorType) -> None:
    """f16 to a quantized cache costs at most twice what the build's own quantized cache costs."""
    target = Setting(type_k=kind, type_v=kind)
    image = parse(lab.natively(_F16)[0])
    blob = written(transcode.to_types(image, type_k=kind, type_v=kind, rotation=_64))
    held, after = lab.restored(target, blob)
    assert held == blob
    truth = lab.natively(_F16)[1]
    own, ours = nmse(lab.natively(target)[1], truth), nmse(after, truth)
    print(f"own {own:.2e} ours {ours:.2e}")
    assert ours <= 2 * own


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.BF16])
def test_plain_types_become_each_other(lab: Lab, kind: TensorType) -> None:
    """Wider and coarser plain caches go on with the same answer."""
    target = Setting(type_k=kind, type_v=kind)
    blob = written(transcode.to_types(parse(lab.natively(_F16)[0]), type_k=kind, type_v=kind))
    held, after = lab.restored(target, blob)
    assert held == blob
    assert nmse(after, lab.natively(_F16)[1]) <= 1e-3


def test_a_sequence_taken_out_goes_on_alone(lab: Lab) -> None:
    """One sequence of four, given to a context of its own, goes on as it would have."""
    image = transcode.extract(parse(lab.natively(_UNIFIED)[0]), 2, as_id=0)
    alone = Setting(n_tokens=(12,), form="sequence")
    held, after = lab.restored(alone, written(image))
    assert held == written(image)
    assert nmse(after, lab.natively(_UNIFIED)[1]) <= 1e-3


def test_sequences_put_together_go_on_in_one_context(lab: Lab) -> None:
    """Four sequence states, merged, are a context's state."""
    image = parse(lab.natively(_UNIFIED)[0])
    parts = {seq_id: transcode.extract(image, seq_id) for seq_id in image.sequences()}
    for setting, n_stream in ((_UNIFIED, 1), (_STREAMS, 4)):
        blob = written(transcode.merge(parts, architecture="llama", n_stream=n_stream))
        held, after = lab.restored(setting, blob)
        assert held == blob
        assert nmse(after, lab.natively(_UNIFIED)[1]) <= 1e-3


def test_the_first_tokens_go_on_from_there(lab: Lab) -> None:
    """A state cut to its first tokens goes on like one that was never longer."""
    image = transcode.keep_first(parse(lab.natively(_F16)[0]), 8)
    short = Setting(n_tokens=(8,))
    held, after = lab.restored(short, written(image))
    assert held == written(image)
    assert nmse(after, lab.natively(short)[1]) <= 1e-3


@pytest.mark.parametrize("build", [_NEWEST, _BEFORE, _NINE])
def test_what_is_whole_of_a_cut_state_goes_on_from_there(lab: Lab, build: str) -> None:
    """A blob whose last V is cut goes on like one that was never longer; the streams before a cut like themselves."""
    setting = Setting(build)
    blob = lab.natively(setting)[0]
    facts = ModelFacts(sections=("attention",))
    row = parse(blob).sections[0].streams[0].values[-1].row_bytes  # type: ignore[union-attr]
    image = salvage(blob[: -4 * row], facts=facts).image
    assert image is not None
    short = Setting(build, n_tokens=(8,))
    held, after = lab.restored(short, written(image))
    assert held == written(image)
    assert nmse(after, lab.natively(short)[1]) <= 1e-3
    streams = Setting(build, n_tokens=(5, 7, 12, 3), n_seq_max=4, seq_id=1, unified=False)
    blob, logits = lab.natively(streams)
    image = salvage(blob[: len(blob) * 2 // 3], facts=facts).image
    assert image is not None
    assert sorted(image.sequences()) == [0, 1]
    _, after = lab.restored(streams, written(image))
    assert nmse(after, logits) <= 1e-3

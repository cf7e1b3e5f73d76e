"""`splitctl plan`, as a user calls it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from splitctl.cli.main import main
from splitctl.cli.output import ExitCode
from splitctl.cli.plan_picture import Bar, bars_png
from splitctl.ipc.reserving import Reserved, Reserver
from splitctl.model.facts import read_facts
from splitctl.placement import Placement
from splitctl.planning.reservation import Reservation
from splitctl.planning.survey import Size
from tools.make_dummies import make_many
from tools.places import default_folder
from tools.time_rules import make_sparse

_MIB = 1024 * 1024


@pytest.fixture(scope="module", autouse=True)
def asked_once() -> Iterator[None]:
    """The library is asked about each size of a model and placement once for all tests: a child costs a second."""
    ask, known, libraries = Reserver.__call__, dict[Any, Reservation](), dict[Any, Any]()

    def answer(self: Reserver, placement: Placement, sizes: Sequence[Size] = ()) -> Reserved:
        question = (self.model, self.library, dataclasses.replace(placement, n_ctx=0))
        new = [size for size in sizes if (question, size) not in known]
        if new or question not in libraries:
            said = ask(self, placement, new)
            if len(said.reservations) < len(new):
                return said if new == list(sizes) else ask(self, placement, sizes)
            libraries[question] = said.library
            known.update(((question, size), one) for size, one in zip(new, said.reservations, strict=True))
        return Reserved(tuple(known[question, size] for size in sizes), "", libraries[question])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reserver, "__call__", answer)
        yield


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    out = capsys.readouterr().out
    body: dict[str, Any] = json.loads(out)
    return code, body


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "'-m'"),
        (["-m", "x", "--free", "CUDA0"], "DEVICE=GiB"),
        (["-m", "x", "--free", "=3"], "DEVICE=GiB"),
        (["-m", "x", "--free", "CUDA0=-1"], "DEVICE=GiB"),
        (["-m", "x", "--free", "CUDA0=nan"], "DEVICE=GiB"),
        (["-m", "x", "--ubatch", "some"], "a number of tokens or auto"),
        (["-m", "x", "-psm", "sideways"], "none, layer, row, tensor"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """Refused before anything is read."""
    assert main(["plan", *arguments]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Said before any child is started."""
    code, body = _plan(capsys, "-m", str(tmp_path / "none.gguf"))
    assert (code, body["error"]["kind"]) == (ExitCode.FAILED, "BadModelFile")


def test_a_library_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2: Path) -> None:
    """A plan needs to know the build."""
    code, body = _plan(capsys, "-m", str(smollm2), "--lib", str(tmp_path / "none.so"))
    assert code == ExitCode.FAILED
    assert body["error"]["kind"] == "LibraryUnusable"


def test_a_plan_of_a_real_model(capsys: pytest.CaptureFixture[str], smollm2: Path, tmp_path: Path) -> None:
    """Modes, a switch, the largest chunk and a picture: the library itself says the compute buffers."""
    picture = tmp_path / "plan.png"
    code, body = _plan(
        capsys, "-m", str(smollm2), "-c", "1000", "--device", "CPU,CPU", "-psm", "layer", "-sm", "tensor", "-fa", "on",
        "--ubatch", "auto", "--plot", str(picture), "--free", "host=16",
    )  # fmt: skip
    assert code == ExitCode.DONE
    assert set(body["modes"]) == {"none", "layer", "tensor"}
    for mode in body["modes"].values():
        assert mode["compute_by"] == "library"
        assert mode["fits"]
        assert mode["n_ctx"] == 1024
        assert mode["total"] == sum(device["total"] for device in mode["devices"])
    tensor = body["modes"]["tensor"]
    assert round(tensor["devices"][0]["compute"] / _MIB, 2) == 101.52
    assert round(max(device["weights"] for device in tensor["devices"]) / _MIB, 2) == 60.46
    assert tensor["largest_context"] == {"n_ctx": 8192, "lacking": []}
    assert body["ubatch"]["n_ubatch"] == 4096
    assert (body["switch"]["from"], body["switch"]["to"], body["switch"]["fits"]) == ("layer", "tensor", True)
    assert body["switch"]["carry"] > 2 * 22.5 * _MIB
    assert {name: tier["fits"] for name, tier in body["tiers"].items()} == dict.fromkeys(
        ("file", "pinned", "resident", "beside"), True
    )
    assert body["tiers"]["file"]["devices"] == body["switch"]["devices"]
    assert (
        body["tiers"]["pinned"]["host"]["total"] - body["switch"]["host"]["total"] == read_facts(smollm2).weight_bytes
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_refused_with_numbers(capsys: pytest.CaptureFixture[str], smollm2: Path) -> None:
    """A chunk of 256 tokens too: both numbers are told."""
    code, body = _plan(
        capsys, "-m", str(smollm2), "-c", "1000", "--device", "CPU,CPU", "-sm", "tensor", "-fa", "on",
        "--ubatch", "auto", "--free", "host=0.28",
    )  # fmt: skip
    assert code == ExitCode.REFUSED
    assert not body["modes"]["tensor"]["fits"]
    assert body["ubatch"]["refused"]
    assert 0 < body["ubatch"]["n_ubatch"] < 256
    assert "256 are wanted" in body["ubatch"]["text"]
    assert body["ubatch"]["limited_by"]["wanted"] > body["ubatch"]["limited_by"]["free"]


def test_a_plan_for_devices_that_are_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model of 400 GB and two cards that are not here: no body is read, and every pool is judged alone."""
    first = make_sparse(tmp_path, n_bytes=400 * 10**9, n_parts=3)
    facts = read_facts(first)
    assert facts.file_bytes > 400 * 10**9
    assert sum(path.stat().st_blocks * 512 for path in facts.files) < 10_000_000
    code, body = _plan(
        capsys, "-m", str(first), "-c", "8192", "-sm", "tensor", "--device", "CUDA0,CUDA1", "-ts", "1,3",
        "--free", "CUDA0=120,CUDA1=500,host=800",
    )  # fmt: skip
    assert code == ExitCode.DONE
    tensor = body["modes"]["tensor"]
    assert tensor["compute_by"] == "formula"
    assert "not here" in tensor["unsaid"]
    assert [need["fits"] for need in tensor["needs"]] == [True, True, True]
    layer = body["modes"]["layer"]
    assert len(layer["tensor_split"]["balanced"]) == 2
    code, body = _plan(
        capsys, "-m", str(first), "-c", "8192", "-sm", "tensor", "--device", "CUDA0,CUDA1",
        "--free", "CUDA0=120,CUDA1=500,host=800",
    )  # fmt: skip
    assert code == ExitCode.REFUSED
    assert [need["pool"] for need in body["modes"]["tensor"]["needs"] if not need["fits"]] == ["CUDA0"]


def _trained_for(model: Path, path: Path, n_ctx: int) -> Path:
    """Make the header of a model that was trained for another context; its tensors are a hole."""
    facts = read_facts(model)
    with model.open("rb") as file:
        header = file.read(facts.header_bytes)
    key = b"llama.context_length" + struct.pack("<I", 4)
    old, new = (key + struct.pack("<I", n) for n in (facts.n_ctx_train, n_ctx))
    assert header.count(old) == 1
    path.write_bytes(header.replace(old, new))
    os.truncate(path, facts.file_bytes)
    return path


def test_the_largest_context_does_not_depend_on_the_one_that_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model for 10M tokens: the same with any -c, and tried with just that context and with one step more."""
    ((_, dummy, why),) = make_many(default_folder(), ["llama"])
    assert dummy is not None, why
    model = _trained_for(dummy, tmp_path / "long.gguf", 10 << 20)

    def plan(n_ctx: int) -> tuple[int, dict[str, Any], dict[str, int]]:
        code, body = _plan(
            capsys, "-m", str(model), "-c", str(n_ctx), "--device", "CPU,CPU", "-psm", "layer", "-sm", "tensor",
            "-fa", "on", "--free", "host=0.5",
        )  # fmt: skip
        answers = {**body["modes"], "switch": body["switch"]}
        return code, answers, {name: answer["largest_context"]["n_ctx"] for name, answer in answers.items()}

    _, _, largest = plan(0)
    assert 256 < largest["switch"] < largest["layer"] < largest["tensor"] < 10 << 20
    for n_ctx, fits in ((largest["switch"], True), (largest["switch"] + 256, False)):
        code, answers, again = plan(n_ctx)
        assert again == largest
        assert answers["switch"]["fits"] is fits
        assert (code == ExitCode.DONE) is fits


def test_the_terminal_gets_a_bar_for_every_device(capsys: pytest.CaptureFixture[str], smollm2: Path) -> None:
    """With the words that explain it."""
    assert main(["plan", "-m", str(smollm2), "-c", "1000", "--device", "CPU,CPU", "-sm", "layer", "-fa", "on"]) == 0
    out = capsys.readouterr().out
    for words in ("0 CPU", "1 CPU", "host", "█", "layer->tensor", "largest context", "all devices together", "asked"):
        assert words in out
    for way in ("weights file", "weights pinned", "weights resident", "beside"):
        assert f"  {way:<17}fits: CPU " in out


def test_a_picture_holds_what_was_drawn() -> None:
    """A bar of three quarters is three quarters."""
    blue, grey = (66, 133, 196), (225, 225, 225)
    data = bars_png("A plan", [(blue, "weights")], [Bar("x", ((blue, 0.75), (grey, 0.25)), "3 MiB")])
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    middle = [image.getpixel((x, 70)) for x in range(image.width)]
    assert middle.count(blue) == 3 * middle.count(grey) > 0


def test_a_picture_without_pillow_names_the_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is read or measured; the plan itself does without."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "splitctl.cli.plan_picture")
    assert main(["plan", "-m", "x", "--plot", str(tmp_path / "plan.png")]) == ExitCode.USAGE
    assert "pip install 'splitctl[plot]'" in capsys.readouterr().err
    assert main(["plan", "-m", "x"]) == ExitCode.FAILED

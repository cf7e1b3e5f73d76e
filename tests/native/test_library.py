"""The one door: what an open library says of itself, and every way in which it refuses to be opened or called."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from llama_native import (
    CapabilityMissing,
    DeviceKind,
    ForkedProcess,
    Library,
    LibraryNotFound,
    LibraryUnusable,
    Reentered,
    SecondLibrary,
    observing,
)
from tests.native.real import NEWEST, OLDER, WITH_RPC, library_of
from tests.stublib import run_child

pytestmark = pytest.mark.build


def child_facts(path: str, by_value: bool) -> dict[str, Any]:
    if by_value:
        observing.takes_hidden_pointer = lambda: False  # type: ignore[assignment]
    library = Library.open(path)
    devices, names = library.devices(), library.devices(memory=False)
    with pytest.raises(CapabilityMissing) as missing:
        library.need("native-switch")
    return {
        "same": library is Library.open(path) is Library.open() is Library.open(Path(path)),
        "path": str(library.path),
        "profile": library.profile.name,
        "seen_in": library.profile.seen_in,
        "build": library.build,
        "capabilities": sorted(library.capabilities),
        "draws_on_single": library.draws_on_single,
        "max_devices": library.max_devices,
        "devices": [(one.name, one.kind is DeviceKind.CPU, one.memory_total > 0) for one in devices],
        "unasked": [one.memory_total for one in names],
        "info": library.system_info(),
        "exports": [library.exports("llama_decode"), library.exports("llama_model_get_split_mode")],
        "missing": missing.value.symbols,
        "folders": library.backend_folders,
        "forked": library.forked,
    }


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("folder", [NEWEST, OLDER, WITH_RPC])
def test_a_real_build_opens_and_says_what_it_is(folder: str, by_value: bool) -> None:
    """The layout is found in both ways of looking; one processor, memory only where asked for, one object a process."""
    path = library_of(folder)
    facts = run_child(child_facts, path, by_value).value()
    assert facts["same"]
    assert facts["path"] == str(path)
    assert any(folder.rpartition("-")[2] in build for build in facts["seen_in"])
    assert str(path.stat().st_size) in facts["build"]
    assert {"load", "decode", "state", "samplers", "shift", "adapters"} <= set(facts["capabilities"])
    assert ("rpc" in facts["capabilities"]) is (folder == WITH_RPC)
    assert facts["draws_on_single"] is (folder != OLDER)
    assert facts["max_devices"] >= 2
    assert facts["devices"] == [["CPU", True, True]]
    assert facts["unasked"] == [0]
    assert "CPU" in facts["info"]
    assert facts["exports"] == [True, False]
    assert facts["missing"] == ["llama_context_set_split_mode", "llama_model_get_split_mode"]
    assert facts["folders"] == []
    assert not facts["forked"]


def child_refusals(path: str, other: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, wrong in (("missing", f"{folder}/none.so"), ("text", f"{folder}/text.so"), ("folder", folder)):
        try:
            Library.open(wrong)
        except (LibraryUnusable, LibraryNotFound) as error:
            found[name] = [type(error).__name__, str(error)]
    library = Library.open(path)
    try:
        Library.open(other)
    except SecondLibrary as error:
        found["second"] = [error.open_path, error.asked]
    found["still"] = library is Library.open(path)
    return found


def test_what_cannot_be_opened_is_named_and_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """A missing file, a text and an empty folder are refused by name; then the right one opens, and no second one."""
    path, other = library_of(NEWEST), library_of(OLDER)
    (tmp_path / "text.so").write_text("not a library", encoding="utf-8")
    found = run_child(child_refusals, path, other, tmp_path).value()
    for name, word in (("missing", "none.so"), ("text", "text.so"), ("folder", str(tmp_path))):
        assert word in found[name][1], name
    assert found["second"] == [str(path), str(other)]
    assert found["still"]


def child_calls(path: str) -> dict[str, Any]:
    library = Library.open(path)
    found: dict[str, Any] = {}
    with library.calling():
        with pytest.raises(Reentered) as inner:
            library.devices()
        found["reentered"] = str(inner.value)
        waited: list[int] = []
        thread = threading.Thread(target=lambda: waited.append(library.max_devices))
        thread.start()
        found["held"] = not waited
    thread.join(30)
    found["served_after"] = waited == [library.max_devices]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            library.devices()
        except ForkedProcess as error:
            try:
                Library.open(path)
            except ForkedProcess:
                code = 0 if error.opened_in == os.getppid() and library.forked else 2
        os._exit(code)
    found["fork"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found["after_fork"] = len(library.devices())
    return found


def test_one_call_at_a_time_and_none_from_a_fork() -> None:
    """A call inside a call is refused on its own thread, waits on another, and is refused in a fork of the process."""
    found = run_child(child_calls, library_of(NEWEST)).value()
    assert "another call on this thread" in found["reentered"]
    assert found["held"]
    assert found["served_after"]
    assert found["fork"] == 0
    assert found["after_fork"] == 1


def child_without_rpc(path: str) -> list[Any]:
    library = Library.open(path)
    nothing = library.add_rpc_servers([])
    with pytest.raises(CapabilityMissing) as adding:
        library.add_rpc_servers(["127.0.0.1:1"])
    with pytest.raises(CapabilityMissing) as serving:
        library.serve_rpc("127.0.0.1:1")
    return [nothing, str(adding.value), str(serving.value), len(library.devices(memory=False))]


def test_a_build_without_rpc_says_so() -> None:
    """No server is asked, none is started, and an empty list is no request."""
    nothing, adding, serving, n_devices = run_child(child_without_rpc, library_of(NEWEST)).value()
    assert nothing == []
    assert "ggml_backend_rpc_add_server" in adding
    assert "ggml_backend_rpc_start_server" in serving
    assert n_devices == 1

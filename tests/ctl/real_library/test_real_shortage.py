"""A real library that runs out of memory, or dies of its first decode, under a hosted session that goes on serving."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.client import ask
from splitctl.control.requests import GenerateRequest, StatusRequest, SwitchRequest
from splitctl.control.sockets import Address
from splitctl.outcome import Route
from splitctl.placement import Changes, SplitMode
from tools.make_dummies import make_big
from tools.places import default_folder

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]

_ROOT = Path(__file__).parents[3]
_GUARD_S = 600.0
"""How long anything may take before a test fails; no test measures it."""

_GREEDY = SamplerSpec(temp=0.0)
_MAIN = "import sys; from splitctl.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def library(cache_dir: Path) -> Path:
    path = cache_dir / "builds" / "xllamacpp-2026.10.11549" / "xllamacpp" / "xllamacpp.abi3.so"
    if not path.is_file():
        pytest.skip("xllamacpp-2026.10.11549 is not there: run ci/builds")
    return path


@dataclass
class Host:
    """A `splitctl serve` that runs, and what reaches it."""

    address: Address
    env: dict[str, str]

    def status(self) -> dict[str, Any]:
        """How the session is."""
        return ask(self.address, StatusRequest(), timeout_s=_GUARD_S)

    def worker_peak(self) -> int:
        """The most address space that the worker has had, bytes."""
        text = Path(f"/proc/{self.status()['worker_pid']}/status").read_text()
        found = re.search(r"VmPeak:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    def switch(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Switch from another process: its exit code and the outcome that it prints."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", _MAIN, "switch", *arguments, "--json"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=_GUARD_S,
            check=False,
        )
        print(done.stderr)
        return done.returncode, json.loads(done.stdout)


@dataclass
class Reader:
    """A client that reads one stream in a thread."""

    host: Host
    tokens: tuple[int, ...]
    n: int
    got: list[int] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    has_some: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        """Begin to read; the thread ends with the stream."""
        thread = threading.Thread(target=self._read)
        thread.start()
        return thread

    def _read(self) -> None:
        def on_event(body: dict[str, Any]) -> None:
            if body["kind"] == "delta" and body["token"] is not None:
                assert body["index"] == len(self.got)
                self.got.append(body["token"])
                if len(self.got) >= 4:
                    self.has_some.set()

        try:
            request = GenerateRequest(tokens=self.tokens, n_predict=self.n, sampler=_GREEDY)
            self.result = ask(self.host.address, request, on_event=on_event, timeout_s=_GUARD_S)
        finally:
            self.has_some.set()


@contextmanager
def _serving(folder: Path, *arguments: str | Path, limit: int | None = None) -> Iterator[Host]:
    """Host a session; with a limit on the address space of the host, and so of its workers, bytes."""
    folder.mkdir(mode=0o700)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "STUB_"))}
    env |= {"PYTHONPATH": str(_ROOT), "XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder)}
    shrink = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); " if limit else ""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", shrink + _MAIN, "serve", *map(str, arguments)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("ready: session default at "), ready
            yield Host(Address("default", Path(ready.split(" at ")[1].strip())), env)
        finally:
            process.terminate()
            process.wait(_GUARD_S)
        assert process.returncode == 0


def test_a_shortage_of_memory_leaves_the_session_where_it_was(library: Path, tmp_path: Path) -> None:
    """Tensor mode aborts for want of memory: exit 3, signal and assertion in the reason, and layer goes on unharmed."""
    model = make_big(default_folder(), 500)
    placement = ("--device", "CPU,CPU", "-c", "256", "-t", "1", "-np", "1")
    arguments = ("-m", model, "--lib", library, *placement)
    prompt = tuple(range(1, 9))
    with _serving(tmp_path / "free", *arguments) as host:
        wanted = Reader(host, prompt, 40)
        wanted.start().join()
        layer = host.worker_peak()
        code, outcome = host.switch("--to", "tensor", "--via", "in-place")
        assert (code, outcome["status"]) == (0, "switched")
        tensor = host.worker_peak()
    assert len(wanted.got) == 40
    # A second copy of the weights is what tensor mode wants.
    assert tensor > layer + model.stat().st_size
    with _serving(tmp_path / "short", *arguments, limit=(layer + tensor) // 2) as host:
        before = host.status()
        reader = Reader(host, prompt, 40)
        thread = reader.start()
        reader.has_some.wait()
        # A try in a child would meet the same shortage, and refuse.
        code, outcome = host.switch("--to", "tensor", "--force", "--via", "in-place")
        thread.join()
        after = host.status()
    assert code == 3
    assert (outcome["status"], outcome["requested"], outcome["effective"]) == ("fell_back", "tensor", "layer")
    assert outcome["recomputed"] is False
    assert "signal 6" in outcome["reason"]
    assert "GGML_ASSERT" in outcome["reason"]
    assert after["worker_pid"] != before["worker_pid"]
    assert (after["state"], after["effective"]) == ("serving", "layer")
    assert reader.result["why"] == "length"
    assert reader.got == wanted.got


def test_a_model_that_dies_of_its_first_decode(library: Path, gemma3_270m: Path, tmp_path: Path) -> None:
    """The try refuses it, and a second worker dies of it alone; forced in place, it dies on trial and is undone."""
    arguments = ("-m", gemma3_270m, "--lib", library, "--device", "CPU,CPU", "-c", "256", "-t", "1", "-np", "1")
    with _serving(tmp_path / "host", *arguments) as host:
        prompt = (2, 3689, 563, 506)
        wanted = Reader(host, prompt, 30)
        wanted.start().join()
        before = host.status()
        code, outcome = host.switch("--to", "tensor")
        assert (code, outcome["status"], outcome["effective"]) == (4, "refused", "layer")
        assert "SIGABRT" in outcome["reason"]
        assert host.status()["worker_pid"] == before["worker_pid"]
        request = SwitchRequest(Changes(mode=SplitMode.TENSOR), force=True, via=Route.BESIDE)
        beside = ask(host.address, request, timeout_s=_GUARD_S)
        assert (beside["status"], beside["stage"], beside["stages_ms"]["saving"]) == ("fell_back", "trial", None)
        assert host.status()["worker_pid"] == before["worker_pid"]
        reader = Reader(host, prompt, 30)
        thread = reader.start()
        reader.has_some.wait()
        request = SwitchRequest(Changes(mode=SplitMode.TENSOR), force=True, via=Route.IN_PLACE)
        first = ask(host.address, request, timeout_s=_GUARD_S)
        thread.join()
        after = host.status()
    assert (first["status"], first["confirmed"]) == ("switched", False)
    last = after["last_switch"]
    assert (last["status"], last["stage"], last["effective"]) == ("fell_back", "trial", "layer")
    assert last["stages_ms"]["proving"] is not None
    assert "signal 6" in last["reason"]
    assert "GGML_ASSERT" in last["reason"]
    assert (after["state"], after["effective"]) == ("serving", "layer")
    assert after["worker_pid"] != before["worker_pid"]
    assert reader.result["why"] == "length"
    assert reader.got == wanted.got

"""A llama-server of `bench_gpu_switch`: started in a mode, its slot saved and restored over HTTP, stopped."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from splitctl.placement import Placement
from tools.children import last_words

#: How often a server that loads is asked for its health [s], and how long a whole start, or an answer, may take.
_POLL_S = 0.005
_TIMEOUT_S = 180.0
_SLOT_FILE = "slot.bin"


class ServerFailed(OSError):
    """A server that ended, or refused what it was asked."""


class Server:
    """One process of llama-server.

    Args:
        program: the file.
        model: the GGUF.
        placement: how it is started.
        folder: for its slot.
    """

    def __init__(self, program: Path, model: Path, placement: Placement, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        devices = () if all(name == "CPU" for name in placement.devices) else ("--device", ",".join(placement.devices))
        self._command = [
            str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(self._port),
            "--split-mode", placement.mode.value, *devices, "--n-gpu-layers", "999",
            "--ctx-size", str(placement.n_ctx), "--batch-size", str(placement.n_batch),
            "--ubatch-size", str(placement.n_ubatch), "--flash-attn", "on", "--parallel", "1",
            "--slot-save-path", f"{folder}/",
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self) -> Server:
        """Start it and wait until it is ready; ServerFailed where it never is."""
        folder = str(Path(self._command[0]).parent)
        paths = ":".join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH", ""))))
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            env={**os.environ, "LD_LIBRARY_PATH": paths, "GGML_NO_BACKTRACE": "1"},
        )  # fmt: skip
        deadline = perf_counter() + _TIMEOUT_S
        while perf_counter() < deadline:
            if self._process.poll() is not None:
                said = self._last_words()
                self._log.close()
                raise ServerFailed(f"llama-server ended with {self._process.returncode}: {said}")
            try:
                if self._ask("GET", "/health")[0] == http.client.OK:
                    return self
            except OSError:
                pass
            time.sleep(_POLL_S)
        self.stop()
        raise ServerFailed(f"llama-server was not ready within {_TIMEOUT_S:g} s")

    def complete(self, tokens: Sequence[int], n: int) -> dict[str, Any]:
        """Generate so many tokens after a prompt, as far as possible from the slot; first_ms, tps, n_read."""
        began = perf_counter()
        body = self._done("POST", "/completion", {
            "prompt": list(tokens), "n_predict": n, "temperature": 0.0, "cache_prompt": True, "id_slot": 0,
            "ignore_eos": True,
        })  # fmt: skip
        took = perf_counter() - began
        timings = body.get("timings", {})
        spent_s = timings.get("predicted_ms", 0.0) / 1e3
        return {
            "first_ms": max(0.0, (took - spent_s)) * 1e3,
            "tps": (n - 1) / spent_s if spent_s and n > 1 else None,
            "n_read": timings.get("prompt_n"),
        }

    def save(self) -> int:
        """Save the slot; gives its bytes."""
        return int(self._done("POST", "/slots/0?action=save", {"filename": _SLOT_FILE})["n_written"])

    def restore(self) -> None:
        """Restore the slot."""
        self._done("POST", "/slots/0?action=restore", {"filename": _SLOT_FILE})

    def stop(self) -> None:
        """End it and wait for its end."""
        self._process.terminate()
        try:
            self._process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _done(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        status, answer = self._ask(method, path, body)
        if status != http.client.OK:
            raise ServerFailed(f"llama-server answers {path} with {status}: {answer[:200]!r}; {self._last_words()}")
        told: dict[str, Any] = json.loads(answer)
        return told

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return last_words(self._log.read().decode(errors="replace"))

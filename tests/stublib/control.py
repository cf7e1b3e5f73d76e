"""Control of a stub: by its own exports in this process, by a file in another; faults in, log and counters out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

_INJECT = Path(__file__).with_name("inject")


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the stub's log: a function and the arguments that it noted."""

    name: str
    arguments: dict[str, str]

    @classmethod
    def parse(cls, line: str) -> Call:
        """Read ``name key=value ...``; a line that starts with MISTAKE keeps its words in ``arguments["text"]``."""
        name, _, rest = line.partition(" ")
        if name == "MISTAKE":
            return cls(name, {"text": rest})
        words = [word.partition("=") for word in rest.split(" ") if "=" in word]
        return cls(name, {key: value for key, _, value in words})


class FaultFile:
    """Faults for stubs in other processes: they look at the file that ``STUB_FAULTS_FILE`` names before every call.

    An item with a turn (``@n``) fires once, in one process; others fire wherever they fit until :meth:`clear`. A worker
    of a hosted session also knows ``at-STAGE:ACTION`` (inject/sitecustomize.py), whichever library it has.
    """

    def __init__(self, path: Path) -> None:
        """Use a path in a folder that exists; nothing is asked for yet."""
        self.path = path

    @property
    def env(self) -> dict[str, str]:
        """What the other processes need in their environment."""
        return {"STUB_FAULTS_FILE": str(self.path), "PYTHONPATH": str(_INJECT)}

    def arm(self, text: str) -> None:
        """Ask for faults in place of those before; turns count from here, and what fired is forgotten."""
        self.clear()
        whole = self.path.with_name(f"{self.path.name}~")
        whole.write_text(text, encoding="ascii")
        whole.rename(self.path)

    def clear(self) -> None:
        """Ask for none, and forget what fired."""
        self.path.unlink(missing_ok=True)
        for mark in self._marks():
            mark.unlink()

    def fired(self) -> list[str]:
        """The items that a process has done since they were asked for, as they were written."""
        return sorted(mark.name.removeprefix(f"{self.path.name}.") for mark in self._marks())

    def _marks(self) -> list[Path]:
        return list(self.path.parent.glob(f"{self.path.name}.*"))


class Stub:
    """Control of the stub that this process has loaded (or will load) from ``path``."""

    def __init__(self, path: str | Path) -> None:
        """Attach; the system's loader gives the same copy to everyone who opens the same file."""
        lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        lib.stub_control.argtypes = [ctypes.c_char_p]
        lib.stub_control.restype = ctypes.c_bool
        lib.stub_calls.restype = ctypes.c_char_p
        lib.stub_count.argtypes = [ctypes.c_char_p]
        lib.stub_count.restype = ctypes.c_int64
        lib.stub_id.restype = ctypes.c_char_p
        self.lib = lib

    def faults(self, text: str) -> None:
        """Ask for faults: items ``call:action[=value][:mode][@n[+]]``, or ``clear``."""
        if not self.lib.stub_control(text.encode()):
            message = f"the stub does not understand {text!r}"
            raise ValueError(message)

    def calls(self) -> list[Call]:
        """The log since the last reset, oldest first."""
        return [Call.parse(line) for line in self.lib.stub_calls().decode().splitlines()]

    def names(self) -> list[str]:
        """The names of the logged calls, oldest first."""
        return [call.name for call in self.calls()]

    def reset(self) -> None:
        """Forget the log and the counters; live objects and faults stay."""
        self.lib.stub_reset()

    def count(self, name: str) -> int:
        """How often a call was made since the last reset, or a counter: ``draws``, ``storm_threads``."""
        return int(self.lib.stub_count(name.encode()))

    def live(self) -> dict[str, int]:
        """Objects alive now, and mistakes seen since the last reset."""
        kinds = ("models", "contexts", "samplers", "adapters")
        return {kind: self.count(f"live_{kind}") for kind in kinds} | {"mistakes": self.count("MISTAKE")}

    def mistakes(self) -> list[str]:
        """What was called in a way that the library does not allow."""
        return [call.arguments["text"] for call in self.calls() if call.name == "MISTAKE"]

    def max_inside(self) -> int:
        """The most threads that were inside one context at once."""
        return int(self.lib.stub_max_inside())

    def wait_hanging(self, n: int = 1) -> None:
        """Return when ``n`` threads hang in a fault."""
        self.lib.stub_wait_hanging(n)

    def release(self) -> None:
        """Let the threads that hang go on."""
        self.lib.stub_release()

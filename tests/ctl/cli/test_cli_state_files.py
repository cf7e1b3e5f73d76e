"""`splitctl state` on files of any size, and on files that change while they are read."""

from __future__ import annotations

import fcntl
import os
import resource
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitctl.cli.state_file import StateUnreadable, opened
from tests.codec.goldens import golden


def sparse(path: Path, n_cells: int, n_layers: int, width: int) -> int:
    """A context blob whose rows are holes; returns its size."""
    head = struct.pack("<I", 5) + b"llama" + struct.pack("<II", 1, n_cells)
    table = np.zeros((n_cells, 3), dtype="<i4")
    table[:, 0], table[:, 1] = np.arange(n_cells), 1
    with path.open("wb") as file:
        file.write(head + table.tobytes() + struct.pack("<IIII", 0, n_layers, 0, 0))
        for _ in range(2 * n_layers):
            file.write(struct.pack("<iQ", 1, width))
            file.seek(n_cells * width, os.SEEK_CUR)
        file.truncate()
        return file.tell()


_MEASURE = """
import resource, sys
from splitctl.cli.main import main
main(["state", "validate", sys.argv[2]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(["state", sys.argv[3], sys.argv[1]])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_a_large_file_takes_little_memory(command: str, tmp_path: Path, kept: Any) -> None:
    """Four GiB of rows are inspected and validated with less than 32 MiB more in memory."""
    path = tmp_path / "large"
    assert sparse(path, 16384, 64, 2048) > 4 << 30
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, path, kept("x11549-dense"), command],
        capture_output=True,
        text=True,
        check=True,
    )
    code, grown = done.stdout.split()[-2:]
    assert code == "0"
    assert int(grown) < 32 * 1024


def test_a_large_file_is_compared_in_slices(tmp_path: Path) -> None:
    """A quarter of a GiB on each side is compared in less memory than one of them; holes are pages of the file."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        sparse(path, 4096, 16, 2048)
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    program = (
        "import resource, sys\nfrom splitctl.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (384 << 20, 384 << 20))\n"
        "raise SystemExit(main(['state', 'diff', *sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert limit == resource.getrlimit(resource.RLIMIT_DATA)


def test_a_file_that_shrinks_is_told(kept: Any) -> None:
    """A file that became shorter, or was written to, while it was open is no answer."""
    path = kept("x11549-dense")

    def shrinking() -> None:
        with opened(path) as file:
            file.parsed()
            # Through a descriptor from before, as a writer that has it open all along would do it.
            os.ftruncate(writer, 1000)

    def growing() -> None:
        with opened(path):
            os.pwrite(writer, b"x", 5000)

    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(StateUnreadable, match="became shorter"):
            shrinking()
        with pytest.raises(StateUnreadable, match="written to"):
            growing()
    finally:
        os.close(writer)


def test_a_writer_waits_and_is_told_of(kept: Any) -> None:
    """Where the system grants a lease, a program that opens the file for writing stops us before it can cut it."""
    path = kept("x11549-dense")
    probe = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        pytest.skip(f"this file system grants no lease: {error}")
    finally:
        os.close(probe)
    code = f"import os; os.truncate({str(path)!r}, 10)"
    children: list[subprocess.Popen[bytes]] = []

    def reading() -> None:
        with opened(path):
            children.append(subprocess.Popen([sys.executable, "-c", code]))
            children[0].wait()

    with pytest.raises(StateUnreadable, match="another program"):
        reading()
    assert children[0].wait() == 0
    assert path.stat().st_size == 10


def test_another_thread_may_open_files_too(kept: Any) -> None:
    """Signals arrive in the main thread alone; elsewhere a file is read without a lease."""
    path = kept("x11549-dense")
    seen: list[int] = []

    def look() -> None:
        with opened(path) as file:
            seen.append(file.parsed().n_bytes)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [len(golden("x11549-dense"))]

"""A copy of a model's weights in host memory, from which its tensors are uploaded without a detour.

It lies in a memory file (memfd), which another process may hold, so that it outlives the one that filled it. What lies
there is a GGUF file of its own (all parts of a split model joined), with a page behind it that tells which files it is
of and whether it is complete: the library can also load it as a file, where the model's own is gone.

Who has it mapped holds a lock on the memory file: shared where it is complete, and alone while it is filled.

Laws:
    1. A copy is used only when it is complete and of the files that the session was opened from.
    2. It is filled beside the work, and pinned when nothing is placed.
    3. It takes no more than leaves the host as much free again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from llama_native import Weights
from splitctl.errors import BadModelFile, FileChanged
from splitctl.host_memory import host_memory
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.model.gguf_bytes import Unfit, joined, with_output
from splitctl.model.header import GgufHeader, read_header
from splitctl.model.identity import FileIdentity

_PAGE = mmap.PAGESIZE
_PIECE = 16 << 20
_MIB = 1 << 20
_FORMAT = 1
_SHARE = struct.Struct("<QQ")
"""At the end of the page: bytes that are filled, and all."""
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(slots=True)
class _Fill:
    """What the thread that fills and the copy share; it holds no copy, which may be dropped meanwhile."""

    block: mmap.mmap
    stop: threading.Event = field(default_factory=threading.Event)
    filled: threading.Event = field(default_factory=threading.Event)
    pinned: threading.Event = field(default_factory=threading.Event)
    n_all: int = 1
    n_done: int = 0
    why: str = ""
    is_pinning: bool = False
    lock: int = -1
    pin: Any = None
    pin_reason: str = ""

    def __del__(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)


class HostCopy:
    """The copy of one model.

    Lifetime: until :meth:`close`. Thread: any; what it says may be a moment old.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            fd: a memory file, empty or with a copy; it is borrowed. None: one of this process alone.
        """
        self._fd = os.memfd_create("splitctl-weights", os.MFD_CLOEXEC) if fd is None else fd
        self._own = (self._fd,) if fd is None else ()
        self._fill: _Fill | None = None
        self._n_bytes = 0
        self._why = "the copy of the weights is not begun"
        self._places: dict[str, tuple[int, int]] = {}
        self._waits_for: tuple[FileIdentity, ...] = ()
        self._image: int | None = None

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Look at a model's file as a copy, without copying it; a split one is copied.

        Raises:
            BadModelFile, FileChanged, OSError: it cannot be read.
        """
        headers = read_facts(path).headers
        if len(headers) > 1:
            joined = cls()
            joined.start([FileIdentity.of(one) for one in headers])
            joined.wait()
            return joined
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        mapped = cls(fd)
        mapped._own = (fd,)
        mapped._fill = mapped._lay_out(headers[0], prot=mmap.PROT_READ)
        mapped._fill.filled.set()
        return mapped

    @property
    def path(self) -> str:
        """Where the library can open it as a file, in this process."""
        return f"/proc/self/fd/{self._fd}"

    @property
    def why(self) -> str:
        """Why it cannot be used now; empty where it is complete."""
        fill = self._fill
        if fill is None or fill.why:
            return self._why if fill is None else fill.why
        return "" if fill.filled.is_set() else f"the copy of the weights is {self.share:.0%} filled"

    @property
    def share(self) -> float:
        """How much of it is filled, 0 to 1."""
        return 0.0 if self._fill is None else self._fill.n_done / self._fill.n_all

    @property
    def pin_reason(self) -> str:
        """Why it is not pinned; empty where it is, or no device would gain by it."""
        return "" if self._fill is None else self._fill.pin_reason

    @property
    def n_bytes(self) -> int:
        """Bytes of host memory that it takes, or will."""
        return self._n_bytes

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each tensor's data lie: offset and size, bytes; a tied output's are the embedding's."""
        return self._places

    @property
    def weights(self) -> Weights:
        """It as the library takes it; only where :attr:`why` is empty."""
        if self._fill is None or self._image is None:
            raise AssertionError("a copy that cannot be used has no data")
        # Metadata with every tensor's type, a tied output's too, and no data.
        image = f"/proc/self/fd/{self._image}"
        return Weights(image, memoryview(self._fill.block), self._places, self.path)

    def is_of(self, files: Sequence[FileIdentity]) -> bool:
        """Tell whether what lies in the memory file is complete and a copy of these files."""
        told = _read_told(self._fd)
        return told is not None and told.get("complete") is True and told.get("files") == _digests(files)

    def facts(self, path: Path, files: Sequence[FileIdentity]) -> ModelFacts:
        """Read the facts of the model out of a copy of these files, as they were read at ``path``."""
        told = _read_told(self._fd) or {}
        return dataclasses.replace(
            read_facts(self.path),
            path=path,
            files=tuple(one.path for one in files),
            file_bytes=sum(one.status.n_bytes for one in files),
            header_bytes=int(told["header_bytes"]),
            header_digest=files[0].header_xxh3_128,
            part_tensors=tuple(told["part_tensors"]),
        )

    def start(self, files: Sequence[FileIdentity], *, n_threads: int = 0) -> None:
        """Take over what lies there, or fill it from the files in a thread.

        Args:
            files: of the model, every part.
            n_threads: threads that read; 0: one a core, 8 at most.
        """
        self._waits_for = ()
        try:
            is_there = self.is_of(files)
            lock = self._locked(fcntl.LOCK_SH if is_there else fcntl.LOCK_EX)
            if lock is None:
                self._waits_for = tuple(files)
                self._why = "another process fills the copy of the weights"
            elif is_there or self.is_of(files):
                fcntl.flock(lock, fcntl.LOCK_SH)
                self._fill = self._lay_out(read_header(Path(self.path)))
                self._fill.lock = lock
                self._fill.n_done = self._fill.n_all
                self._fill.filled.set()
            else:
                self._begin(files, n_threads or min(8, os.cpu_count() or 1), lock)
        except (OSError, BadModelFile, FileChanged, Unfit) as error:
            self._why = f"there is no copy of the weights: {error}"

    def look_again(self) -> None:
        """Take the copy over, where another process was still filling it and has done so by now."""
        if self._waits_for and self._fill is None and self.is_of(self._waits_for):
            self.start(self._waits_for)

    def _locked(self, how: int) -> int | None:
        """Lock the memory file for this process; None where another one has it."""
        # An open file of its own: what a parent and its children share has one lock for all of them.
        lock = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def pin(self, pin: Callable[[mmap.mmap], Any]) -> None:
        """Pin it in a thread when it is filled; ``pin`` gives what holds the memory, or why it cannot be held."""
        if self._fill is not None:
            self._fill.is_pinning = True
            threading.Thread(target=_pinning, args=(self._fill, pin), name="splitctl-pin", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is filled, and pinned where that was asked for, or cannot be; tells whether it is complete."""
        if (fill := self._fill) is not None:
            fill.filled.wait(timeout_s)
            if fill.is_pinning:
                fill.pinned.wait(timeout_s)
        return not self.why

    def close(self) -> None:
        """Stop filling, unpin and let go; a second call does nothing."""
        fill, self._fill = self._fill, None
        self._why = "the copy of the weights is closed"
        if fill is not None:
            fill.stop.set()
            fill.filled.wait()
            if fill.is_pinning:
                fill.pinned.wait()
            _let_go(fill)
        own, self._own = (*self._own, *(() if self._image is None else (self._image,))), ()
        self._image = None
        for fd in own:
            os.close(fd)

    def __del__(self) -> None:
        for fd in (*getattr(self, "_own", ()), *filter(None, (getattr(self, "_image", None),))):
            os.close(fd)

    def _begin(self, files: Sequence[FileIdentity], n_threads: int, lock: int) -> None:
        try:
            fill, pieces, page = self._plan(files)
        except BaseException:
            os.close(lock)
            raise
        fill.lock = lock
        self._fill = fill
        weakref.finalize(self, fill.stop.set).atexit = False
        work = (fill, tuple(files), pieces, n_threads, page)
        threading.Thread(target=_filling, args=work, name="splitctl-weights", daemon=True).start()

    def _plan(self, files: Sequence[FileIdentity]) -> tuple[_Fill, list[tuple[Path, int, int, int]], bytes]:
        """Make room, and say what is read from where to where, and what the last page says then."""
        headers = [read_header(one.path) for one in files]
        if [one.digest for one in headers] != [one.header_xxh3_128 for one in files]:
            raise FileChanged(files[0].path, "another model is in its place")
        head = joined(headers, raw_header(headers[0]))
        size = len(head) + sum(one.file_bytes - one.data_offset for one in headers)
        # What lies there of others, or half of this, is given back first.
        free, wanted = host_memory().available + os.fstat(self._fd).st_blocks * 512, _total(size)
        if free < 2 * wanted:
            text = f"it takes {wanted / _MIB:,.0f} MiB and as much shall stay free, the host has {free / _MIB:,.0f} MiB"
            raise Unfit(text)
        # Whatever lay there is of other files from here on.
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, wanted)
        os.pwrite(self._fd, head, 0)
        fill = self._lay_out(headers[0] if len(headers) == 1 else read_header(Path(self.path)))
        pieces: list[tuple[Path, int, int, int]] = []
        at = len(head)
        for one in headers:
            n_data = one.file_bytes - one.data_offset
            pieces += [
                (one.path, one.data_offset + start, at + start, min(_PIECE, n_data - start))
                for start in range(0, n_data, _PIECE)
            ]
            at += n_data
        fill.n_all = sum(piece[3] for piece in pieces) or 1
        told = {
            "format": _FORMAT,
            "complete": True,
            "files": _digests(files),
            "header_bytes": headers[0].header_bytes,
            "part_tensors": [len(one.tensors) for one in headers],
        }
        return fill, pieces, json.dumps(told).encode()

    def _lay_out(self, header: GgufHeader, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> _Fill:
        """Map the memory file, and note where the tensors of the joined GGUF are."""
        size = os.fstat(self._fd).st_size
        raw = os.pread(self._fd, header.data_offset, 0)
        self._places = {one.name: (header.data_offset + one.offset, one.n_bytes or 0) for one in header.tensors}
        if _EMBEDDING in self._places:
            self._places.setdefault(_OUTPUT, self._places[_EMBEDDING])
        self._image = os.memfd_create("splitctl-metadata", os.MFD_CLOEXEC)
        image = with_output(header, raw)
        os.ftruncate(self._image, len(image))
        os.pwrite(self._image, image, 0)
        block = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, prot=prot)
        with contextlib.suppress(OSError):  # a kernel without huge pages for memory files
            block.madvise(mmap.MADV_HUGEPAGE)
        self._n_bytes = size
        return _Fill(block)


def raw_header(header: GgufHeader) -> bytes:
    """Read a header as it stands in its file, with its padding."""
    with header.path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), header.data_offset, 0)


def _total(size: int) -> int:
    """Size of the memory file for a GGUF of so many bytes: whole pages, and the one that tells of it."""
    return -(-size // _PAGE) * _PAGE + _PAGE


def _digests(files: Sequence[FileIdentity]) -> list[list[str]]:
    return [[one.header_xxh3_128, one.samples_xxh3_128] for one in files]


def _read_told(fd: int) -> dict[str, Any] | None:
    """Read the page that tells of a copy; None where there is none."""
    size = os.fstat(fd).st_size
    try:
        page = os.pread(fd, _PAGE - _SHARE.size, size - _PAGE).rstrip(b"\0")
        told = json.loads(page) if size >= 2 * _PAGE else None
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and told.get("format") == _FORMAT else None


def share_of(fd: int) -> float | None:
    """Tell how much of a copy is filled, 0 to 1, and 1 only where it is complete; None where there is none."""
    size = os.fstat(fd).st_size
    if size < 2 * _PAGE:
        return None
    if (_read_told(fd) or {}).get("complete") is True:
        return 1.0
    n_done, n_all = _SHARE.unpack(os.pread(fd, _SHARE.size, size - _SHARE.size))
    return min(n_done / n_all, 0.99) if n_all else None


def _pinning(fill: _Fill, pin: Callable[[mmap.mmap], Any]) -> None:
    fill.filled.wait()
    try:
        if not fill.stop.is_set() and not fill.why:
            held = pin(fill.block)
            if isinstance(held, str):
                fill.pin_reason = held
            else:
                fill.pin = held
    except Exception as error:  # noqa: BLE001 - without it the copy is slower, and as good
        fill.pin_reason = f"memory could not be pinned: {error}"
    finally:
        fill.pinned.set()


def _filling(
    fill: _Fill,
    files: tuple[FileIdentity, ...],
    pieces: Sequence[tuple[Path, int, int, int]],
    n_threads: int,
    page: bytes,
) -> None:
    """Fill a copy and write the page that tells of it, if the files are the same before and after."""
    try:
        for one in files:
            one.confirmed()
        _read_all(fill, pieces, n_threads)
        for one in files:
            one.confirmed()
        if fill.stop.is_set():
            fill.why = "the copy of the weights was given up"
            return
        at = len(fill.block) - _PAGE
        fill.block[at : at + len(page)] = page
        fcntl.flock(fill.lock, fcntl.LOCK_SH)
    except (OSError, FileChanged) as error:
        fill.why = f"there is no copy of the weights: {error}"
    finally:
        fill.filled.set()


def _read_all(fill: _Fill, pieces: Sequence[tuple[Path, int, int, int]], n_threads: int) -> None:
    handles = {path: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in {piece[0] for piece in pieces}}
    lock = threading.Lock()

    def read(piece: tuple[Path, int, int, int]) -> None:
        path, source, target, n_bytes = piece
        with memoryview(fill.block)[target : target + n_bytes] as view:
            done = 0
            while done < n_bytes and not fill.stop.is_set():
                n = os.preadv(handles[path], [view[done:]], source + done)
                if not n:
                    raise FileChanged(path, "it became shorter")
                done += n
        with lock:
            fill.n_done += done
            _SHARE.pack_into(fill.block, len(fill.block) - _SHARE.size, fill.n_done, fill.n_all)

    try:
        with ThreadPoolExecutor(n_threads) as threads:
            for _ in threads.map(read, pieces):
                pass
    finally:
        for handle in handles.values():
            os.close(handle)


def _let_go(fill: _Fill) -> None:
    pin, fill.pin = fill.pin, None
    if pin is not None:
        pin.release()
    with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with the last view
        fill.block.close()
    lock, fill.lock = fill.lock, -1
    if lock >= 0:
        os.close(lock)

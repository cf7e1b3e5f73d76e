"""Opens files that hold a state: mapped, never read whole, and watched while they are looked at.

Laws:
    1. A file is mapped read-only, so its size costs no memory; our own carry is one more wrapping of the same bytes.
    2. A mapped file that becomes shorter would end the process by a signal. Where the system grants it, a lease makes
       other writers wait and tells us; everywhere the file's size and time are compared before an answer is believed.
    3. A damaged state is read without its tail where that was asked for, and only whole cells are kept of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import statecodec
from splitctl.carry import file as carries
from splitctl.carry.text import Words, from_texts
from splitctl.errors import CarryDamaged, SplitctlError
from splitctl.model.facts import ModelFacts
from splitctl.switching.state_facts import read_state, state_facts
from splitctl.switching.tables import SEEN_MEMORIES
from statecodec import Carried, Salvage, StateFormatError, StateImage


@dataclass(eq=False, repr=False)
class StateUnreadable(SplitctlError):
    """A file that cannot be looked at, or that another program changed meanwhile."""

    path: Path
    found: str
    action: str

    def __str__(self) -> str:
        return f"{self.found}; {self.action}"


@dataclass(frozen=True, slots=True)
class CarryAround:
    """What our own carry says beside the state.

    Args:
        words: everything of it that is no tensor.
        checksums: tensor name -> xxh3-128.
        found: its tensors, as views on the mapped file.
    """

    words: Words
    checksums: Mapping[str, str]
    found: Carried

    def refuse_other_model(self, path: Path, facts: ModelFacts) -> None:
        """Compare the model's file with the one that the session had; its rope settings and adapters may differ.

        Raises:
            StateUnreadable: it is another one.
        """
        own = self.words.fingerprint.identity
        for what, found, wanted in (
            ("architecture", own.architecture, facts.architecture),
            ("model header with the checksum", own.header_xxh3_128, facts.header_digest),
            ("model file size in bytes", own.file_bytes, facts.file_bytes),
        ):
            if found != wanted:
                told = f"it is the carry of another model ({what}: {found}, {facts.path}: {wanted})"
                raise StateUnreadable(path, told, "name the model that it was saved with")


class StateFile:
    """A mapped file and the state in it.

    Attributes:
        path: the file.
        n_bytes: its size, in bytes.
        view: the bytes of the state; the whole file unless it is a carry.
        carry: what a carry says beside them.

    Lifetime: `view` and everything made from it borrow the mapping, which lives as long as they do.
    Thread: the main thread, where signals arrive.
    """

    def __init__(self, path: Path, fd: int) -> None:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            kind = "a folder" if stat.S_ISDIR(about.st_mode) else "no regular file"
            raise StateUnreadable(path, f"it is {kind}", "name a file that holds a state")
        self.path = path
        self.n_bytes = about.st_size
        self._fd = fd
        self._seen = (about.st_size, about.st_mtime_ns)
        # An empty file cannot be mapped.
        self.view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if about.st_size else b"")
        self.carry: CarryAround | None = None
        found = statecodec.carried(self.view)
        if found is not None:
            self.carry = _carry(path, found)
            self.view = found.state

    def parsed(self, facts: ModelFacts | None = None) -> StateImage:
        """Read the state, as one of a model where that is given.

        Raises:
            StateUnreadable: it is the carry of another model.
            statecodec.StateFormatError: it is no sound state, or none of the model.
        """
        if self.carry is not None and facts is not None:
            self.carry.refuse_other_model(self.path, facts)
        if self.is_stateless:
            return statecodec.parse(self.view, facts=statecodec.ModelFacts(sections=()))
        return read_state(self.view, facts)

    @property
    def is_stateless(self) -> bool:
        """Whether it is a carry without a state: of a model without a memory, or of a session's tokens alone."""
        return self.carry is not None and not self.view

    def refuse_stateless(self) -> None:
        """Refuse a carry without a state, of which nothing else can be made.

        Raises:
            StateUnreadable: it is one.
        """
        if self.is_stateless:
            action = "splitctl run --restore reads its tokens again"
            raise StateUnreadable(self.path, "it is a carry without a state", action)

    def check(self) -> None:
        """Make sure that the file is still what was mapped."""
        about = os.fstat(self._fd)
        if about.st_size < self._seen[0]:
            found = f"it became shorter while it was read ({self._seen[0]} bytes before, {about.st_size} now)"
            raise StateUnreadable(self.path, found, "wait until its writer is done and try again")
        if (about.st_size, about.st_mtime_ns) != self._seen:
            found = "it was written to while it was read"
            raise StateUnreadable(self.path, found, "wait until its writer is done and try again")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[StateFile]:
    """Open a file that holds a state, or follow a link to one; it is checked once more when the block ends well.

    Raises:
        StateUnreadable: it cannot be opened, is no regular file, or changed meanwhile.
        CarryDamaged: it is a carry whose description is wrong.
        statecodec.StateFormatError: it is a safetensors file and no carry.
    """
    try:
        # Not blocking, so that a pipe with nobody behind it is refused like every other kind.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StateUnreadable(path, error.strerror or str(error), "name a file that can be read") from error
    try:
        with _lease(path, fd):
            file = StateFile(path, fd)
            yield file
            file.check()
    finally:
        os.close(fd)


@contextlib.contextmanager
def _lease(path: Path, fd: int) -> Iterator[None]:
    """Hold other writers off, where the system grants that: it tells us by a signal and makes them wait.

    Source: fcntl(2), F_SETLEASE; refused for files of other users, open for writing, and on some file systems.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.getsignal(signal.SIGIO)

    def broken(number: int, frame: FrameType | None) -> None:
        # Several files may be open, each with its handler; the one whose lease is being broken is meant.
        if fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK and callable(before):
            before(number, frame)
            return
        found = "another program is about to write to it"
        raise StateUnreadable(path, found, "wait until its writer is done and try again")

    signal.signal(signal.SIGIO, broken)
    is_held = False
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            is_held = True
        yield
    finally:
        if is_held:
            # It may have been broken by now.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        signal.signal(signal.SIGIO, before)


@dataclass(eq=False, repr=False)
class NothingKept(SplitctlError):
    """A damaged state of which no cell is whole, or none that can be told."""

    path: Path
    damage: StateFormatError
    found: Salvage

    @property
    def tokens(self) -> list[int]:
        """Those that are sound."""
        return [] if self.found.tokens is None else self.found.tokens.text.tolist()

    def __str__(self) -> str:
        damage, found = self.damage, self.found
        place = f"{damage.field} at byte {damage.offset}: found {damage.found}, expected {damage.expected}"
        told = f"{place}. Nothing of the memory is kept: {found.reason}."
        if found.has_all_tokens and found.tokens is not None and not found.tokens.media:
            return f"{told} {len(self.tokens)} tokens are whole: splitctl run --restore {self.path} reads them again."
        listed = f" The first {len(self.tokens)} tokens are there." if self.tokens else ""
        return f"{told}{listed} Read the tokens again."


def repaired(file: StateFile, facts: ModelFacts | None) -> StateImage:
    """Read a state, without its tail where that is damaged; its changes say what went.

    Without the model's facts nobody can tell whether a whole part of the memory is missing.

    Raises:
        NothingKept: no cell is whole, or none that can be told.
        statecodec.StateFormatError: the state is sound in several ways, or is a part of a memory.
        statecodec.NotRepresentable: the memory has a format of its own.
    """
    try:
        image = file.parsed(facts)
    except statecodec.Ambiguous:
        raise
    except StateFormatError as damage:
        found = statecodec.salvage(file.view, facts=None if facts is None else state_facts(facts)[0])
        if found.image is None:
            if isinstance(damage, statecodec.Inconsistent) and _is_sound(file.view):
                # Nothing is wrong with it: it is another model's.
                raise
            raise NothingKept(file.path, found.damage or damage, found) from None
        image = found.image
    refuse_part(image)
    if image.is_opaque:
        found_, wanted = "a memory with a format of its own", "a state whose end can be told"
        raise statecodec.NotRepresentable("the tail", found_, wanted, "Save the session again.")
    return image


def _is_sound(view: memoryview) -> bool:
    try:
        statecodec.parse(view)
    except StateFormatError:
        return False
    return True


def refuse_part(image: StateImage) -> None:
    """Refuse a state that is not the whole of a memory.

    Raises:
        statecodec.Inconsistent: it is not.
        statecodec.Truncated: it ends behind the name of an architecture whose models keep a memory.
    """
    if not image.sections and image.architecture in SEEN_MEMORIES - {"t5encoder"}:
        wanted = f"the memory, which models of {image.architecture} keep"
        raise statecodec.Truncated(image.n_bytes, "section 0", "the end of the bytes", wanted)
    if image.content is not statecodec.Content.FULL:
        offset = image.sections[0].offset if image.sections else image.n_bytes
        found = {
            statecodec.Content.PARTIAL: "a part of the memory alone (a window or the recurrent layers)",
            statecodec.Content.ON_DEVICE: "cells without their rows, which stayed on the device",
        }[image.content]
        raise statecodec.Inconsistent(offset, "the memory", found, "all of it")


def _carry(path: Path, found: Carried) -> CarryAround:
    try:
        return CarryAround(from_texts(found.metadata), carries.checksum_texts(found.metadata), found)
    except (ValueError, RecursionError) as error:
        raise CarryDamaged(path, f"its description is wrong: {error}") from error

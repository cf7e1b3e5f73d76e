"""Which bytes a session was opened from: told apart from whatever lies at the same path later.

A file is told by its place on the device, its size and times, and by digests of its header and of samples of its
tensors' data. As long as the first are what they were, nothing is read. Where they are not, the digests decide: a file
that was replaced by its equal is the same.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from splitctl.errors import BadModelFile, FileChanged
from splitctl.model.header import FileStatus, GgufHeader, read_header

#: What is read of each sample [bytes]; a tensor has one in its middle and one at its end.
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A GGUF file as it was when a session opened.

    Args:
        path: where it was opened.
        status: what the file system said of it.
        header_xxh3_128: checksum of its header, 32 hex digits.
        samples_xxh3_128: checksum of samples of every tensor's data, 32 hex digits.
    """

    path: Path
    status: FileStatus
    header_xxh3_128: str
    samples_xxh3_128: str

    @classmethod
    def of(cls, header: GgufHeader) -> Self:
        """Identify the file that a header was read from.

        Raises:
            FileChanged: it is another file by now, or cannot be read any more.
        """
        digest = xxhash.xxh3_128()
        try:
            with header.path.open("rb", buffering=0) as file:
                for sample in _samples(header, file):
                    digest.update(sample)
                now = FileStatus.of(os.fstat(file.fileno()))
        except OSError as error:
            raise FileChanged(header.path, f"it cannot be read ({error.strerror or error})") from error
        if now != header.status:
            raise FileChanged(header.path, "it was written to while it was read")
        return cls(header.path, header.status, header.digest, digest.hexdigest())

    def confirmed(self) -> FileIdentity:
        """Return the file as it is now, which differs at most in its status.

        Raises:
            FileChanged: it is gone, or holds other bytes.
        """
        try:
            found = self.path.stat()
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            raise FileChanged(self.path, "it is gone" if is_gone else error.strerror or str(error)) from error
        now = FileStatus.of(found)
        if now == self.status:
            return self
        if not stat.S_ISREG(found.st_mode):
            what = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise FileChanged(self.path, f"it is {what} now")
        if now.n_bytes != self.status.n_bytes:
            raise FileChanged(self.path, f"it has {now.n_bytes} bytes now, and had {self.status.n_bytes}")
        try:
            other = FileIdentity.of(read_header(self.path))
        except BadModelFile as error:
            raise FileChanged(self.path, f"it is {error.kind.value} now, {error.detail}") from error
        if other.header_xxh3_128 != self.header_xxh3_128:
            raise FileChanged(self.path, "another model is in its place")
        if other.samples_xxh3_128 != self.samples_xxh3_128:
            raise FileChanged(self.path, "other weights are in its place")
        return other


def statuses(files: Iterable[Path]) -> tuple[FileStatus | None, ...]:
    """Say what the file system says of files now; None for one that it does not show."""
    return tuple(map(_status, files))


def model_digest(files: Iterable[Path]) -> str:
    """Tell the files of a model apart from all others, those with other weights under the same headers too.

    Returns:
        32 hex digits.

    Raises:
        BadModelFile, FileChanged: a file cannot be read, or is being written to.
    """
    found = [FileIdentity.of(read_header(path)) for path in files]
    told = "".join(one.header_xxh3_128 + one.samples_xxh3_128 for one in found)
    return xxhash.xxh3_128_hexdigest(told.encode())


def _status(path: Path) -> FileStatus | None:
    try:
        return FileStatus.of(path.stat())
    except OSError:
        return None


def _samples(header: GgufHeader, file: BinaryIO) -> Iterator[bytes]:
    fd = file.fileno()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for tensor in header.tensors:
        start = header.data_offset + tensor.offset
        last = max((tensor.n_bytes or 0) - _SAMPLE_BYTES, 0)
        for at in (last // 2, last):
            yield os.pread(fd, _SAMPLE_BYTES, start + at)

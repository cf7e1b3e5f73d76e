"""A bounded walk of a GGUF header: metadata and tensor list, never the tensors' data.

Laws:
    1. No count or length of the file reaches an allocation, a slice or a loop before a limit and the bytes that are
       really left have passed it.
    2. Whatever the bytes, the walk returns a header or raises BadModelFile.
    3. Bytes are read once, in order, in windows; string arrays (vocabularies) are stepped over without making objects.
    4. Nothing behind the header is read: a window is never longer than what the header has left at the least.

Source: docs/gguf.md of the ggml project; limits from ggml's own reader (gguf.cpp) where it has one.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from splitctl.errors import BadModelFile, ModelFileFault
from splitctl.model.tensor_types import TENSOR_TYPES, VALUE_FORMATS, ValueType

MAX_PAIRS = 65_536
MAX_TENSORS = 262_144
MAX_ARRAY = 1 << 24
MAX_KEY_BYTES = 65_535
MAX_TEXT_BYTES = 1 << 26
MAX_HEADER_BYTES = 1 << 30
MAX_DIMS = 4
#: Numeric arrays up to this length are kept as values (per-layer counts); longer ones are only counted.
MAX_KEPT = 4096

_WINDOW_BYTES = 1 << 20
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
#: What an entry takes at the least, bytes: a key or name without a letter, and the fields behind it.
_LEAST_PAIR, _LEAST_TENSOR = 13, 32

_AGAIN = "download or convert it again"


Value = bool | int | float | str | tuple[bool | int | float, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file.

    Args:
        name: its name.
        dims: sizes, fastest first.
        type_id: number of its type.
        n_bytes: size of its data, bytes; None when the type is not in ``TENSOR_TYPES``.
        offset: start of its data, bytes from the start of the file's data section.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    n_bytes: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What the file system says of a file; a write or a replacement changes it.

    Args:
        device: number of the device.
        inode: number of the file on it.
        n_bytes: size, bytes.
        mtime_ns: time of the last write, ns.
        ctime_ns: time of the last change of any kind, which nobody can set back, ns.
    """

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """Take it from what a stat gave."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the tensor data of one file.

    Args:
        path: the file.
        status: what the file system said of it.
        version: GGUF version.
        header_bytes: size of the header without its padding, bytes.
        data_offset: start of the data section, bytes.
        read_bytes: how much of the file was read, bytes.
        digest: xxh3-128 of the header, hexadecimal.
        values: metadata by key; arrays of text and arrays above ``MAX_KEPT`` are left out.
        array_sizes: length of every array by key.
        tensors: the tensors in file order.
    """

    path: Path
    status: FileStatus
    version: int
    header_bytes: int
    data_offset: int
    read_bytes: int
    digest: str
    values: Mapping[str, Value]
    array_sizes: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]

    @property
    def file_bytes(self) -> int:
        """Size of the file, bytes."""
        return self.status.n_bytes


def read_header(path: Path) -> GgufHeader:
    """Walk the header of one GGUF file; every tensor's data lies inside the file.

    Raises:
        BadModelFile: missing, no file, unreadable, empty, no GGUF, cut short, over a limit, or of an unknown version.
    """
    try:
        # Opening a FIFO or a device must not block, so that it can be told by name.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise BadModelFile(path, ModelFileFault.MISSING, "there is no such file", "check the path") from error
    except OSError as error:
        raise BadModelFile(path, ModelFileFault.UNREADABLE, error.strerror or str(error), "check its rights") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            what = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise BadModelFile(path, ModelFileFault.NOT_A_FILE, f"it is {what}", "name the .gguf file itself")
        if status.st_size == 0:
            raise BadModelFile(path, ModelFileFault.EMPTY, "it has 0 bytes", _AGAIN)
        with os.fdopen(handle, "rb", buffering=0, closefd=False) as file:
            return _Walk(path, file, FileStatus.of(status)).header()
    finally:
        os.close(handle)


class _Walk:
    """One pass over one file."""

    def __init__(self, path: Path, file: BinaryIO, status: FileStatus) -> None:
        self._path = path
        self._file = file
        self._status = status
        self._file_bytes = status.n_bytes
        self._window = b""
        self._at = 0
        self._before = 0
        self._read_bytes = 0
        self._pairs_left = 0
        self._tensors_left = 0
        self._array_left = 0
        self._hash = xxhash.xxh3_128()

    def header(self) -> GgufHeader:
        """Read everything before the data section."""
        version = self._preamble()
        n_tensors = self._count("tensors", MAX_TENSORS, _LEAST_TENSOR)
        n_pairs = self._count("metadata pairs", MAX_PAIRS, _LEAST_PAIR)
        values: dict[str, Value] = {}
        sizes: dict[str, int] = {}
        self._tensors_left = n_tensors
        for index in range(n_pairs):
            self._pairs_left = n_pairs - index - 1
            key = self._text("a metadata key", MAX_KEY_BYTES)
            if key in values or key in sizes:
                raise self._bad(f"metadata key {key!r} is there twice")
            kind = self._value_type(key)
            if kind is ValueType.ARRAY:
                kept, sizes[key] = self._array(key)
                if kept is not None:
                    values[key] = kept
            else:
                values[key] = self._scalar(key, kind)
        tensors = tuple(self._tensor(n_tensors - index - 1) for index in range(n_tensors))
        header_bytes = self._before + self._at
        self._hash.update(self._window[: self._at])
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._bad(f"general.alignment is {alignment!r}, which is no power of two")
        data_offset = -(-header_bytes // alignment) * alignment
        self._check_data(tensors, data_offset, alignment)
        return GgufHeader(
            path=self._path,
            status=self._status,
            version=version,
            header_bytes=header_bytes,
            data_offset=data_offset,
            read_bytes=self._read_bytes,
            digest=self._hash.hexdigest(),
            values=values,
            array_sizes=sizes,
            tensors=tensors,
        )

    def _preamble(self) -> int:
        """Check magic, byte order and version."""
        self._fill(min(4, self._file_bytes))
        magic = self._window[:4]
        if magic != _MAGIC:
            detail = f"it starts with {magic!r}, a GGUF starts with {_MAGIC!r}"
            raise BadModelFile(
                self._path, ModelFileFault.NOT_GGUF, detail, "name a GGUF file, or convert the model to one"
            )
        self._at = 4
        version = self._whole("I", "the version")
        if version & 0xFFFF == 0 and version:
            raise BadModelFile(
                self._path,
                ModelFileFault.UNSUPPORTED,
                "it is big-endian and this machine is little-endian",
                "convert it with gguf-py's gguf_convert_endian",
            )
        if version not in _VERSIONS:
            detail = f"it has GGUF version {version}, known are {' and '.join(map(str, _VERSIONS))}"
            raise BadModelFile(
                self._path, ModelFileFault.UNSUPPORTED, detail, "convert the model again, or update splitctl"
            )
        return version

    def _check_data(self, tensors: tuple[TensorInfo, ...], data_offset: int, alignment: int) -> None:
        """Check that every tensor's data lies inside the file."""
        names: set[str] = set()
        end = 0
        for tensor in tensors:
            if tensor.name in names:
                raise self._bad(f"tensor {tensor.name!r} is there twice")
            names.add(tensor.name)
            if tensor.offset % alignment:
                raise self._bad(f"tensor {tensor.name!r} starts at {tensor.offset}, no multiple of {alignment}")
            end = max(end, data_offset + tensor.offset + (tensor.n_bytes or 0))
        if end > self._file_bytes:
            detail = f"its tensors end at byte {end}, the file ends at byte {self._file_bytes}"
            raise BadModelFile(self._path, ModelFileFault.TRUNCATED, detail, "finish or repeat the download")

    def _tensor(self, n_left: int) -> TensorInfo:
        """Read one entry of the tensor list, behind which so many are left."""
        self._tensors_left = n_left
        name = self._text("a tensor's name", MAX_KEY_BYTES)
        n_dims = self._whole("I", f"the dimensions of {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._bad(f"tensor {name!r} has {n_dims} dimensions, 1 to {MAX_DIMS} are possible")
        dims = tuple(self._whole("Q", f"the sizes of {name!r}") for _ in range(n_dims))
        type_id = self._whole("I", f"the type of {name!r}")
        offset = self._whole("Q", f"the offset of {name!r}")
        n_values = 1
        for size in dims:
            n_values *= size
            if size < 1 or n_values >= 1 << 63:
                raise self._bad(f"tensor {name!r} has the sizes {dims}")
        n_bytes = None
        if type_id in TENSOR_TYPES:
            _, per_block, block_bytes = TENSOR_TYPES[type_id]
            if dims[0] % per_block:
                raise self._bad(f"tensor {name!r} has rows of {dims[0]} values, its type has blocks of {per_block}")
            n_bytes = n_values // per_block * block_bytes
        return TensorInfo(name, dims, type_id, n_bytes, offset)

    def _value_type(self, key: str) -> ValueType:
        """Read the type of a value."""
        number = self._whole("I", f"the type of {key!r}")
        try:
            return ValueType(number)
        except ValueError as error:
            raise self._bad(f"{key!r} has value type {number}, known are 0 to 12") from error

    def _scalar(self, key: str, kind: ValueType) -> Value:
        """Read one value that is no array."""
        if kind is ValueType.STR:
            return self._text(f"the value of {key!r}", MAX_TEXT_BYTES)
        return self._numbers(VALUE_FORMATS[kind], 1, f"the value of {key!r}")[0]

    def _array(self, key: str) -> tuple[tuple[bool | int | float, ...] | None, int]:
        """Read an array: its values when they are few numbers, and its length."""
        kind = self._value_type(key)
        if kind is ValueType.ARRAY:
            raise self._bad(f"{key!r} is an array of arrays, which no reader takes")
        width = 8 if kind is ValueType.STR else struct.calcsize(f"<{VALUE_FORMATS[kind]}")
        count = self._count(f"values of {key!r}", MAX_ARRAY, width)
        if kind is ValueType.STR:
            self._step_over_texts(count, key)
            return None, count
        if count > MAX_KEPT:
            self._step_over(count * width, f"the values of {key!r}")
            return None, count
        return tuple(self._numbers(VALUE_FORMATS[kind], count, f"the values of {key!r}")), count

    def _step_over_texts(self, count: int, key: str) -> None:
        """Step over an array of strings; this loop runs once a token, so it makes no objects but the lengths."""
        unpack = struct.Struct("<Q").unpack_from
        done = 0
        while done < count:
            window, at = self._window, self._at
            room = len(window) - 8
            while done < count and at <= room:
                (n_bytes,) = unpack(window, at)
                if n_bytes > room - at:
                    break
                at += 8 + n_bytes
                done += 1
            self._at = at
            if done < count:
                self._array_left = 8 * (count - done - 1)
                n_bytes = self._whole("Q", f"a string of {key!r}")
                if n_bytes > MAX_TEXT_BYTES:
                    raise self._limit(f"a string of {key!r} has {n_bytes} bytes", MAX_TEXT_BYTES)
                self._step_over(n_bytes, f"a string of {key!r}", 8 * (count - done - 1))
                done += 1
        self._array_left = 0

    def _count(self, what: str, limit: int, least_bytes: int) -> int:
        """Read a count of things of which each takes at least so many bytes."""
        count = self._whole("Q", f"the count of {what}")
        if count > limit:
            raise self._limit(f"it claims {count} {what}", limit)
        left = self._file_bytes - self._before - self._at
        if count * least_bytes > left:
            raise self._short(f"{count} {what} take {count * least_bytes} bytes at least, {left} are left")
        return count

    def _text(self, what: str, limit: int) -> str:
        """Read one string."""
        n_bytes = self._whole("Q", f"the length of {what}")
        if n_bytes > limit:
            raise self._limit(f"{what} has {n_bytes} bytes", limit)
        self._want(n_bytes, what)
        raw = self._window[self._at : self._at + n_bytes]
        self._at += n_bytes
        # Metadata in other encodings exists in the wild; the keys that are looked up are ASCII.
        return raw.decode("utf-8", "replace")

    def _whole(self, code: str, what: str) -> int:
        """Read one whole number."""
        return int(self._numbers(code, 1, what)[0])

    def _numbers(self, code: str, count: int, what: str) -> tuple[bool | int | float, ...]:
        """Read numbers of one kind; the caller has bounded the count."""
        layout = struct.Struct(f"<{count}{code}")
        self._want(layout.size, what)
        values = layout.unpack_from(self._window, self._at)
        self._at += layout.size
        return values

    def _step_over(self, n_bytes: int, what: str, behind: int = 0) -> None:
        """Go past bytes, window by window, behind which an array has some left; they count for the digest."""
        left = self._file_bytes - self._before - self._at
        if n_bytes > left:
            raise self._short(f"{what} takes {n_bytes} bytes, {left} are left")
        while n_bytes:
            self._array_left = n_bytes - 1 + behind
            self._want(1, what)
            step = min(n_bytes, len(self._window) - self._at)
            self._at += step
            n_bytes -= step
        self._array_left = behind

    def _want(self, n_bytes: int, what: str) -> None:
        """Make sure that so many bytes are in the window."""
        if self._at + n_bytes > len(self._window):
            left = self._file_bytes - self._before - self._at
            if n_bytes > left:
                raise self._short(f"{what} takes {n_bytes} bytes, {left} are left")
            self._fill(n_bytes)

    def _fill(self, n_bytes: int) -> None:
        """Drop what has been used and read on until so many bytes are there."""
        self._hash.update(self._window[: self._at])
        self._before += self._at
        if self._before > MAX_HEADER_BYTES:
            raise self._limit(f"its header goes past byte {self._before}", MAX_HEADER_BYTES)
        parts = [self._window[self._at :]]
        have = len(parts[0])
        self._at = 0
        ahead = n_bytes + self._array_left + _LEAST_PAIR * self._pairs_left + _LEAST_TENSOR * self._tensors_left
        while have < n_bytes:
            try:
                more = self._file.read(max(n_bytes - have, min(ahead - have, _WINDOW_BYTES)))
            except OSError as error:
                reason = error.strerror or str(error)
                raise BadModelFile(self._path, ModelFileFault.UNREADABLE, reason, "check the disk") from error
            if not more:
                raise self._short("the file became shorter while it was read")
            self._read_bytes += len(more)
            have += len(more)
            parts.append(more)
        self._window = b"".join(parts)

    def _short(self, detail: str) -> BadModelFile:
        """Make the error of a file that ends too early."""
        at = self._before + self._at
        return BadModelFile(
            self._path, ModelFileFault.TRUNCATED, f"at byte {at}, {detail}", "finish or repeat the download"
        )

    def _limit(self, detail: str, limit: int) -> BadModelFile:
        """Make the error of a count that no sound file has."""
        return BadModelFile(self._path, ModelFileFault.LIMIT, f"{detail}, the limit is {limit}", _AGAIN)

    def _bad(self, detail: str) -> BadModelFile:
        """Make the error of a value that no sound file has."""
        return BadModelFile(self._path, ModelFileFault.BAD_VALUE, detail, _AGAIN)

"""A bounded reader of what the dynamic linker wants from an ELF file, so that a failure is explained before dlopen.

It reads 64-bit little-endian files, as all the packages hold; of others it only tells the machine.
No count or offset from the file reaches a read or a loop before a limit has passed it; hostile bytes raise ElfError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MACHINES = {
    3: "x86",
    8: "MIPS",
    20: "PowerPC",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
}
"""e_machine -> name as in platform.machine(). Source: the ELF gABI's table of machines."""

_MAX_PROGRAM_HEADERS = 256
_MAX_DYNAMIC = 4096
_MAX_STRINGS = 64 << 20
_MAX_SYMBOLS = 1 << 20
_MAX_VERSIONS = 4096
_MAX_BUCKETS = 1 << 20
_MAX_NAME = 4096

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 1, 4, 5, 6, 10, 15, 29
_DT_GNU_HASH = 0x6FFFFEF5
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_SYMBOL_BYTES = 24
_VERSION_IS_WEAK = 2


class ElfError(ValueError):
    """The file is no ELF file, or one whose tables make no sense; says what."""


@dataclass(frozen=True, slots=True)
class VersionNeed:
    """A symbol version that the file wants of one of its libraries."""

    library: str
    version: str


@dataclass(frozen=True, slots=True)
class ElfFile:
    """What a shared library is, wants and gives."""

    machine: str
    bits: int
    shared: bool
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    version_needs: tuple[VersionNeed, ...] = ()
    versions: frozenset[str] = frozenset()
    """Symbol versions that the file defines."""
    exports: frozenset[str] = frozenset()
    """Names of its defined global dynamic symbols; empty unless asked for."""


class _Reader:
    """Reads of one file that check their bounds."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.n_bytes = file.seek(0, 2)
        self.segments: list[tuple[int, int, int]] = []
        """Of the loaded image: address, file offset, size in bytes."""

    def at(self, offset: int, n_bytes: int) -> bytes:
        """Read exactly ``n_bytes`` at a file offset."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.n_bytes:
            raise ElfError(f"its tables point to {n_bytes} bytes at {offset}, behind its end at {self.n_bytes}")
        self._file.seek(offset)
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise ElfError(f"it ended at {offset + len(data)} while being read")
        return data

    def offset_of(self, address: int) -> int:
        """Translate an address of the loaded image to a file offset."""
        for start, offset, n_bytes in self.segments:
            if start <= address < start + n_bytes:
                return address - start + offset
        raise ElfError(f"its tables point to the address {address:#x}, which no segment of the file holds")


def read_elf(path: Path, *, exports: bool = False) -> ElfFile:
    """Read a shared library's header and dynamic tables, with `exports` its symbol table as well.

    Of a file with another word size or byte order only the machine is told.

    Raises:
        ElfError: it is not an ELF file, or is damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            return _read(_Reader(file), exports=exports)
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ElfError(f"its tables are damaged: {error}") from error


def _read(reader: _Reader, *, exports: bool) -> ElfFile:
    ident = reader.at(0, 20) if reader.n_bytes >= 20 else b""
    if ident[:4] != b"\x7fELF":
        raise ElfError("it is not an ELF file")
    bits = {1: 32, 2: 64}.get(ident[4], 0)
    little = ident[5] == 1
    kind, machine = struct.unpack("<HH" if little else ">HH", ident[16:20])
    name = MACHINES.get(machine, f"machine {machine}")
    if bits != 64 or not little:
        return ElfFile(name, bits, kind == 3)
    header = reader.at(0, 64)
    (program_offset,) = struct.unpack_from("<Q", header, 32)
    entry_bytes, n_entries = struct.unpack_from("<HH", header, 54)
    if entry_bytes != 56 or n_entries > _MAX_PROGRAM_HEADERS:
        raise ElfError(f"it claims {n_entries} program headers of {entry_bytes} bytes")
    programs = reader.at(program_offset, entry_bytes * n_entries)
    dynamic = b""
    for kind_, _flags, offset, address, _physical, n_file, _n_memory, _align in struct.iter_unpack(
        "<IIQQQQQQ", programs
    ):
        if kind_ == _PT_LOAD:
            reader.segments.append((address, offset, n_file))
        elif kind_ == _PT_DYNAMIC:
            dynamic = reader.at(offset, min(n_file, 16 * _MAX_DYNAMIC) & ~15)
    entries: list[tuple[int, int]] = []
    for tag, value in struct.iter_unpack("<qQ", dynamic):
        if tag == 0:
            break
        entries.append((tag, value))
    return _read_dynamic(reader, name, entries, shared=kind == 3, exports=exports)


def _read_dynamic(
    reader: _Reader, machine: str, entries: list[tuple[int, int]], *, shared: bool, exports: bool
) -> ElfFile:
    table = dict(entries)
    n_strings = table.get(_DT_STRSZ, 0)
    if n_strings > _MAX_STRINGS:
        raise ElfError(f"its string table claims {n_strings} bytes")
    strings = reader.at(reader.offset_of(table[_DT_STRTAB]), n_strings) if _DT_STRTAB in table else b""

    def all_of(tag: int) -> tuple[str, ...]:
        return tuple(_string(strings, value) for found, value in entries if found == tag)

    def folders(tag: int) -> tuple[str, ...]:
        return tuple(folder for value in all_of(tag) for folder in value.split(":") if folder)

    return ElfFile(
        machine=machine,
        bits=64,
        shared=shared,
        needed=all_of(_DT_NEEDED),
        rpath=folders(_DT_RPATH),
        runpath=folders(_DT_RUNPATH),
        version_needs=tuple(_version_needs(reader, table, strings)),
        versions=frozenset(_versions(reader, table, strings)),
        exports=frozenset(_exports(reader, table, strings)) if exports else frozenset(),
    )


def _string(strings: bytes, offset: int) -> str:
    end = strings.find(b"\0", offset, offset + _MAX_NAME)
    if offset >= len(strings) or end < 0:
        raise ElfError(f"it has no string at {offset} of its string table")
    return strings[offset:end].decode("utf-8", "backslashreplace")


def _version_needs(reader: _Reader, table: dict[int, int], strings: bytes) -> Iterator[VersionNeed]:
    if _DT_VERNEED not in table:
        return
    offset = reader.offset_of(table[_DT_VERNEED])
    left = _MAX_VERSIONS
    for _ in range(min(table.get(_DT_VERNEEDNUM, 0), _MAX_VERSIONS)):
        _version, n_aux, file_name, aux, following = struct.unpack("<HHIII", reader.at(offset, 16))
        library = _string(strings, file_name)
        place = offset + aux
        for _ in range(n_aux):
            left -= 1
            if left < 0:
                raise ElfError(f"it wants more than {_MAX_VERSIONS} symbol versions")
            _hash, flags, _other, name, next_aux = struct.unpack("<IHHII", reader.at(place, 16))
            if not flags & _VERSION_IS_WEAK:
                yield VersionNeed(library, _string(strings, name))
            place += next_aux
        if following == 0:
            return
        offset += following


def _versions(reader: _Reader, table: dict[int, int], strings: bytes) -> Iterator[str]:
    if _DT_VERDEF not in table:
        return
    offset = reader.offset_of(table[_DT_VERDEF])
    for _ in range(min(table.get(_DT_VERDEFNUM, 0), _MAX_VERSIONS)):
        _version, _flags, _index, n_aux, _hash, aux, following = struct.unpack("<HHHHIII", reader.at(offset, 20))
        if n_aux:
            (name,) = struct.unpack("<I", reader.at(offset + aux, 4))
            yield _string(strings, name)
        if following == 0:
            return
        offset += following


def _exports(reader: _Reader, table: dict[int, int], strings: bytes) -> Iterator[str]:
    if _DT_SYMTAB not in table:
        return
    n_symbols = _count_symbols(reader, table)
    symbols = reader.at(reader.offset_of(table[_DT_SYMTAB]), n_symbols * _SYMBOL_BYTES)
    for name, info, other, section, _value, _size in struct.iter_unpack("<IBBHQQ", symbols):
        is_global = info >> 4 in {1, 2, 10}
        is_visible = other & 3 in {0, 3}
        if section and is_global and is_visible and name:
            yield _string(strings, name)


def _count_symbols(reader: _Reader, table: dict[int, int]) -> int:
    """Find the length of the symbol table, which only the hash tables tell."""
    if _DT_HASH in table:
        _n_buckets, n_symbols = struct.unpack("<II", reader.at(reader.offset_of(table[_DT_HASH]), 8))
    elif _DT_GNU_HASH in table:
        n_symbols = _count_by_gnu_hash(reader, reader.offset_of(table[_DT_GNU_HASH]))
    else:
        n_symbols = 0
    if n_symbols > _MAX_SYMBOLS:
        raise ElfError(f"it claims {n_symbols} symbols")
    return int(n_symbols)


def _count_by_gnu_hash(reader: _Reader, offset: int) -> int:
    n_buckets, first, n_bloom, _shift = struct.unpack("<IIII", reader.at(offset, 16))
    if n_buckets > _MAX_BUCKETS or n_bloom > _MAX_BUCKETS:
        raise ElfError(f"its hash table claims {n_buckets} buckets and {n_bloom} bloom words")
    buckets_at = offset + 16 + 8 * n_bloom
    buckets = reader.at(buckets_at, 4 * n_buckets)
    last = max((bucket for (bucket,) in struct.iter_unpack("<I", buckets)), default=0)
    if last < first:
        return int(first)
    if last > _MAX_SYMBOLS:
        raise ElfError(f"its hash table points to symbol {last}")
    chain_at = buckets_at + 4 * n_buckets
    while last < _MAX_SYMBOLS:
        (entry,) = struct.unpack("<I", reader.at(chain_at + 4 * (last - first), 4))
        last += 1
        if entry & 1:
            return last
    raise ElfError("its hash chain has no end")

"""A file is put in its place whole or not at all, whatever fails."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from splitctl.carry import durable
from splitctl.errors import CarryNotWritten

OLD = b"the old content"


def only(folder: Path) -> dict[str, bytes]:
    """Every file by its content; a folder left over counts as one."""
    return {one.name: one.read_bytes() if one.is_file() else b"(not a file)" for one in folder.iterdir()}


def replace_file(path: Path, content: bytes, n_bytes: int | None = None) -> None:
    with durable.replacing(path, len(content) if n_bytes is None else n_bytes) as temporary:
        temporary.write_bytes(content)


def n_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_new_file_and_a_replaced_one(tmp_path: Path) -> None:
    """The content, private, and nothing else in the folder."""
    path = tmp_path / "f"
    for content in (b"abcdef", b"", b"x"):
        replace_file(path, content)
        assert only(tmp_path) == {"f": content}
        assert path.stat().st_mode & 0o777 == 0o600


def test_nobody_else_can_reach_what_is_being_written(tmp_path: Path) -> None:
    """The writer works in a folder of its own; what it leaves beside the file goes with that folder."""
    with durable.replacing(tmp_path / "f", 3) as temporary:
        assert temporary.parent.parent == tmp_path
        assert temporary.parent.stat().st_mode & 0o777 == 0o700
        assert not temporary.exists()
        (temporary.parent / "beside").write_bytes(b"left over")
        (temporary.parent / "other").write_bytes(b"new")
        (temporary.parent / "other").rename(temporary)
    assert only(tmp_path) == {"f": b"new"}


def test_a_file_system_without_modes_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAT refuses to make a file private; the file is put in its place all the same."""

    def refuse(_fd: int, _mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    replace_file(tmp_path / "f", b"new")
    assert only(tmp_path) == {"f": b"new"}


def test_a_writer_that_writes_nothing_replaces_nothing(tmp_path: Path) -> None:
    """Without a new file the old one stays; nor is a link that the writer left followed."""
    path = tmp_path / "f"
    path.write_bytes(OLD)
    with pytest.raises(FileNotFoundError), durable.replacing(path, 3):
        pass
    with pytest.raises(OSError, match="symbolic links"), durable.replacing(path, 3) as temporary:
        temporary.symlink_to(path)
    assert only(tmp_path) == {"f": OLD}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """S29: neither a link to a file nor one that leads nowhere is written through or replaced."""
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)
    for target in (victim, tmp_path / "nowhere"):
        link = tmp_path / "link"
        link.symlink_to(target)
        with pytest.raises(OSError, match=r"symbolic link \(to .*\), which is not followed") as caught:
            replace_file(link, b"new")
        assert caught.value.errno == errno.ELOOP
        assert link.is_symlink()
        link.unlink()
    assert only(tmp_path) == {"victim": OLD}


@pytest.mark.parametrize("path", ["/", "/usr/..", "."])
def test_a_path_that_names_a_folder_is_refused(path: str) -> None:
    """Root, a parent, the folder itself: named for what they are."""
    with pytest.raises(IsADirectoryError, match="folder"):
        replace_file(Path(path), b"x")


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    """A folder, a pipe, a device: not replaced, not opened (a pipe without a reader would block)."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"x")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(OSError, match="not a regular file"):
            replace_file(path, b"x")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_disk_that_is_too_small_is_found_before_a_byte_is_written(tmp_path: Path) -> None:
    """An exabyte fits nowhere; both numbers are said and no temporary file was made."""
    with (
        pytest.raises(OSError, match=r"1152921504606846976 bytes wanted, \d+ free") as caught,
        durable.replacing(tmp_path / "f", 1 << 60),
    ):
        pytest.fail("it was tried")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_know_its_size_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems report no blocks; the write itself decides."""
    unknown = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: unknown)
    replace_file(tmp_path / "f", b"x")
    assert only(tmp_path) == {"f": b"x"}


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """A child that may write 64 KiB only (the kernel stops it part way): the old file is whole, the temporary gone."""
    path = tmp_path / "f"
    path.write_bytes(OLD)
    program = (
        "import sys; from pathlib import Path; from splitctl.carry.durable import replacing\n"
        "try:\n    with replacing(Path(sys.argv[1]), 100000) as new, new.open('wb', 0) as file:\n"
        "        while True:\n            file.write(bytes(50000))\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),
    )
    assert done.stdout.strip() == str(errno.EFBIG)
    assert only(tmp_path) == {"f": OLD}


@pytest.mark.parametrize("call", ["the block", "fsync", "rename"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_at_any_call_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    """A failing disk or Ctrl-C while writing, syncing or renaming; no descriptor is left open either."""
    path = tmp_path / "f"
    path.write_bytes(OLD)
    before = n_open()

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if call != "the block":
            patch.setattr(os, call, fail)
        with pytest.raises(type(error)), durable.replacing(path, 3) as temporary:  # noqa: PT012 (one act)
            temporary.write_bytes(b"new")
            if call == "the block":
                fail()
    assert only(tmp_path) == {"f": OLD}
    assert n_open() == before


def test_an_interrupt_after_the_rename_keeps_the_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no temporary file to remove any more, and that is not an error."""
    rename = os.rename

    def then_interrupt(old: str, new: str, *, dst_dir_fd: int) -> None:
        rename(old, new, dst_dir_fd=dst_dir_fd)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "f", b"new")
    assert only(tmp_path) == {"f": b"new"}


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_told: bool
) -> None:
    """A file system without folder sync is fine; a failing one is told, with the file in its place."""
    sync, calls = os.fsync, []

    def second_fails(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))
        sync(fd)

    monkeypatch.setattr(os, "fsync", second_fails)
    if is_told:
        with pytest.raises(OSError, match="in its place, but its folder could not be synced"):
            replace_file(tmp_path / "f", b"new")
    else:
        replace_file(tmp_path / "f", b"new")
    assert only(tmp_path) == {"f": b"new"}


def test_a_good_place_is_left_as_it_was(tmp_path: Path) -> None:
    """A place for a carry is tried without a trace: what is there stays, and nothing comes beside it."""
    durable.check_place(tmp_path / "new")
    assert only(tmp_path) == {}
    replace_file(tmp_path / "f", OLD)
    durable.check_place(tmp_path / "f")
    assert only(tmp_path) == {"f": OLD}


def test_a_place_that_cannot_be_is_told_before_there_is_anything_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a device, a missing or read-only folder, a full disk, with and without numbers: each by its cause."""
    for path, said in (
        (tmp_path, "it is a folder"),
        (Path("/dev/full"), "not a regular file"),
        (tmp_path / "missing" / "f", "No such file or directory"),
        (Path("/proc/f"), "No such file or directory"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(CarryNotWritten, match=said):
            durable.check_place(path)
    full = os.statvfs_result((4096, 4096, 9, 0, 0, 0, 0, 0, 0, 255))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda _fd: full)
        with pytest.raises(CarryNotWritten, match="0 free on the disk"):
            durable.check_place(tmp_path / "f")

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.raises(CarryNotWritten, match="No space left on device"):
        durable.check_place(tmp_path / "f")
    assert only(tmp_path) == {}

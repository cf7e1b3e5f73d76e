"""Names, sockets and locks: who has a session, who had one, and whose folder it is."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitctl.control import sockets
from splitctl.control.sockets import NoSuchSession, RuntimeFolderUnsafe, SessionTaken, claim, find, prepared, sessions
from splitctl.errors import ConfigInvalid

_ROOT = Path(__file__).parents[3]

_HOLD = """
import sys
from pathlib import Path
from splitctl.control.sockets import claim, prepared
held = claim(prepared(Path(sys.argv[1])), sys.argv[2])
listening = held.listen()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    # An address of a socket is short, and tmp_path is not.
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "run" / "splitctl"


def _holder(folder: Path, name: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def _end(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.communicate()


def test_folder_and_socket_are_this_users_alone(folder: Path) -> None:
    """The folder is made with mode 0700, and a socket in it has 0600 from its first moment."""
    assert prepared(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with claim(folder, "a") as held, held.listen() as listening:
        assert stat.S_IMODE(held.address.path.lstat().st_mode) == 0o600
        assert listening.getsockname() == str(held.address.path)
        assert [one.name for one in sessions(folder)] == ["a"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "ä", "a b", "x" * 65, "a\n", "../a"])
def test_what_is_no_name_is_refused(name: str, folder: Path) -> None:
    """A name that could be a path, an option or a surprise is refused by all that take one."""
    prepared(folder)
    with pytest.raises(ConfigInvalid, match="letters, digits"):
        claim(folder, name)
    with pytest.raises(ConfigInvalid, match="letters, digits"):
        find(folder, name)


def test_a_folder_too_deep_for_a_socket_is_told(tmp_path: Path) -> None:
    """The kernel's limit on the address of a socket is named, with the folder."""
    deep = tmp_path / ("d" * 100)
    with pytest.raises(ConfigInvalid, match="107 bytes together at most"):
        claim(prepared(deep), "a")


def test_two_hosts_cannot_have_one_name(folder: Path) -> None:
    """A name that a living host has is refused, in this process and in another; a different one is not."""
    process = _holder(folder, "a")
    try:
        with pytest.raises(SessionTaken, match="a session a is served already"):
            claim(folder, "a")
        with claim(folder, "b"):
            assert find(folder, "a").name == "a"
    finally:
        _end(process)


def test_a_killed_host_leaves_a_stale_socket_that_is_cleaned(folder: Path) -> None:
    """After SIGKILL nothing is listed, the files are removed, and the name can be had again."""
    process = _holder(folder, "a")
    assert [one.name for one in sessions(folder)] == ["a"]
    _end(process)
    assert sorted(path.name for path in folder.iterdir()) == ["a.lock", "a.sock"]
    assert sessions(folder) == []
    assert list(folder.iterdir()) == []
    _end(_holder(folder, "a"))
    with claim(folder, "a") as held:
        held.listen().close()


def test_a_socket_without_a_lock_is_stale_as_well(folder: Path) -> None:
    """A socket that nobody listens on and nobody has locked is removed."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(prepared(folder) / "old.sock"))
    with pytest.raises(NoSuchSession):
        find(folder, "old")
    assert list(folder.iterdir()) == []


def test_a_session_is_found_by_name_or_alone(folder: Path) -> None:
    """One session needs no name; two do, and both are named; without any the command to start one is told."""
    with pytest.raises(NoSuchSession, match=r"no session is served; start one with splitctl serve"):
        find(folder, None)
    prepared(folder)
    with pytest.raises(NoSuchSession, match="nor any other"):
        find(folder, "a")
    with claim(folder, "a") as first, first.listen():
        assert find(folder, None).name == "a"
        with claim(folder, "b") as second, second.listen():
            with pytest.raises(NoSuchSession, match=r"several sessions are served \(a, b\); name one with --session"):
                find(folder, None)
            assert find(folder, "b").path == folder / "b.sock"
            with pytest.raises(NoSuchSession, match="no session c is served; there are: a, b"):
                find(folder, "c")


def _as_link(folder: Path) -> None:
    real = folder.with_name("elsewhere")
    real.mkdir(parents=True)
    folder.symlink_to(real)


def _as_file(folder: Path) -> None:
    folder.parent.mkdir()
    folder.touch()


def _open_to_others(folder: Path) -> None:
    prepared(folder).chmod(0o770)


def _below_others(folder: Path) -> None:
    prepared(folder).parent.chmod(0o777)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_as_link, "is a link"),
        (_as_file, "is no folder"),
        (_open_to_others, "may be written by others"),
        (_below_others, "may be written by others"),
    ],
)
def test_a_folder_that_is_not_private_is_not_used(make: object, said: str, folder: Path) -> None:
    """A folder that is a link, a file, or writable by others holds no sockets, for hosts and for clients."""
    assert callable(make)
    make(folder)
    for use in (prepared, sessions):
        with pytest.raises(RuntimeFolderUnsafe, match=said) as caught:
            use(folder)
        assert "XDG_RUNTIME_DIR" in str(caught.value)


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that somebody else made first is refused with their number."""
    prepared(folder)
    monkeypatch.setattr("splitctl.control.sockets.os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(RuntimeFolderUnsafe, match=f"belongs to user {os.geteuid()}"):
        sessions(folder)


def test_the_folder_follows_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR names it; without one there is another, and no warning about that."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert sockets.runtime_folder() == tmp_path / "splitctl"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert sockets.runtime_folder().name == "splitctl"

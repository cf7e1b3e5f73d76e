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


def _far_below_others(folder: Path) -> None:
    prepared(folder)
    folder.parents[1].chmod(0o777)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_as_link, "splitctl cannot hold the sockets of sessions: it is a link"),
        (_as_file, "splitctl cannot hold the sockets of sessions: it is no folder"),
        (_open_to_others, r"splitctl cannot hold .*: it may be written by others \(mode 0770\)"),
        (_below_others, r"run cannot hold .*: it may be written by others \(mode 0777\)"),
        (_far_below_others, r"run cannot hold .*: it lies in .*, which may be written by others \(mode 0777\)"),
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
    """A folder that somebody else made first is refused with their number and its mode."""
    prepared(folder)
    monkeypatch.setattr("splitctl.control.sockets.os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(RuntimeFolderUnsafe, match=rf"belongs to user {os.geteuid()} and not to .* \(mode 0700\)"):
        sessions(folder)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711, 0o1777])
def test_what_others_may_read_is_the_owners(mode: int, folder: Path) -> None:
    """RuntimeDirectory= of systemd and WSL make it with mode 0755, and /tmp has 1777: hosts and clients use it."""
    folder.parent.mkdir()
    folder.parent.chmod(mode)
    with claim(prepared(folder), "a") as held, held.listen():
        assert find(folder, "a").path == folder / "a.sock"
        folder.chmod(mode & 0o755)
        assert [one.name for one in sessions(folder)] == ["a"]


def test_the_folder_that_is_named_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR counts whatever its mode; without it the system's folder of this user, then one for this boot."""
    monkeypatch.setattr(sockets, "_SYSTEM", tmp_path / "run-user")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    named = tmp_path / "named"
    named.mkdir(mode=0o755)
    assert sockets.runtime_folder({"XDG_RUNTIME_DIR": str(named)}) == named / "splitctl"
    for env in ({}, {"XDG_RUNTIME_DIR": ""}):
        assert sockets.runtime_folder(env) == tmp_path / "tmp" / f"runtime-{os.getuid()}" / "splitctl"
    own = tmp_path / "run-user" / str(os.getuid())
    own.mkdir(mode=0o755, parents=True)
    assert sockets.runtime_folder({}) == own / "splitctl"
    own.chmod(0o777)
    with pytest.raises(RuntimeFolderUnsafe, match=rf"{own} cannot hold .* \(mode 0777\)"):
        prepared(sockets.runtime_folder({}))


def test_without_any_folder_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative XDG_RUNTIME_DIR, one that is no folder or cannot be made, and no folder at all: each by its path."""
    with pytest.raises(RuntimeFolderUnsafe, match=r"run cannot hold .*: it is no absolute path"):
        sockets.runtime_folder({"XDG_RUNTIME_DIR": "run"})
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFolderUnsafe, match=r"file cannot hold .*: it is no folder"):
        prepared(sockets.runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path / "file")}))
    with pytest.raises(RuntimeFolderUnsafe, match=r"missing/run cannot hold .*: it cannot be made \(No such file"):
        prepared(sockets.runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path / "missing" / "run")}))
    with pytest.raises(RuntimeFolderUnsafe, match=r"cannot be looked into \(Not a directory\)"):
        sessions(sockets.runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path / "file" / "run")}))

    def nowhere() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(sockets, "_SYSTEM", tmp_path / "run-user")
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(RuntimeFolderUnsafe, match=f"run-user/{os.getuid()} cannot hold .*no folder for temporary"):
        sockets.runtime_folder({})

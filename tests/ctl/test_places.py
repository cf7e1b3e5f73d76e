"""Where files lie for users who have a home, and for those who have none."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splitctl.ipc.probes import verdicts_file
from splitctl.places import cache_folder, state_folder
from tests.ctl.houses import GUARD_S, ROOT, house
from tests.stublib import build, needs_compiler, write_model

#: No system has an entry for it.
_BARE_UID = "54321"


@pytest.mark.parametrize(
    ("folder", "variable", "name"), [(state_folder, "STATE", ".local/state"), (cache_folder, "CACHE", ".cache")]
)
def test_without_a_home_there_is_a_name_all_the_same(
    folder: Callable[[], Path], variable: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG's variable, then HOME, then the user's entry; without any of them / is the home, as in a container."""

    def unknown(_uid: int) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setenv(f"XDG_{variable}_HOME", "/elsewhere")
    assert folder() == Path("/elsewhere/splitctl")
    monkeypatch.delenv(f"XDG_{variable}_HOME")
    assert folder() == Path("/home/a", name, "splitctl")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for home in ("relative", None):
        if home is None:
            monkeypatch.delenv("HOME")
        else:
            monkeypatch.setenv("HOME", home)
        assert folder() == Path("/", name, "splitctl")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert verdicts_file() == Path("/.cache/splitctl/probes.json")


@needs_compiler
@pytest.mark.stub
def test_a_bare_uid_runs_and_serves() -> None:
    """A user without HOME and passwd entry gets an answer, and a session that says that it cannot be saved."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("only root becomes another user, with util-linux's setpriv")
    # Reading is left to it: the interpreter may lie in somebody's home.
    reads = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    bare = [setpriv, f"--reuid={_BARE_UID}", f"--regid={_BARE_UID}", "--clear-groups", *reads]
    with house() as home:
        home.folder.chmod(0o755)
        (home.folder / "tmp").mkdir()
        (home.folder / "tmp").chmod(0o1777)
        model = write_model(home.folder / "tiny.gguf")
        library = home.folder / "libllama.so"
        shutil.copyfile(build(), library)
        library.chmod(0o755)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(home.folder / "tmp")}
        command = [*bare, sys.executable, "-P", "-m", "splitctl"]
        arguments = ["-m", str(model), "--lib", str(library), "--device", "STUB0,STUB1", "-c", "256", "-t", "1"]
        done = subprocess.run(
            [*command, "run", *arguments, "-p", "x", "-n", "3", "-psm", "layer", "-sm", "tensor"],
            env=env,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        with subprocess.Popen(
            [*command, "serve", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                assert process.stdout is not None
                ready = process.stdout.readline().decode()
                process.terminate()
                _, err = process.communicate(timeout=GUARD_S)
            finally:
                process.kill()
        assert str(home.folder / "tmp" / f"runtime-{_BARE_UID}" / "splitctl" / "default.sock") in ready
        assert process.returncode == 0
        warned = "could not be saved as /.local/state/splitctl/sessions/default.safetensors: Permission denied"
        assert warned in err.decode()

"""States that a library refuses, again and again: nothing that an error keeps may take the interpreter along."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

import statecodec
from llama_native import CallFailed, Context, ContextParams, Library, Model, ModelParams, state_set
from splitctl import Placement, Session, SplitctlError
from tests.codec.goldens import golden
from tests.ctl.houses import house, run_here, served
from tests.native.real import NEWEST, library_of
from tests.stublib import build, needs_compiler, run_child, write_model
from tools.make_dummies import make_many
from tools.places import default_folder

PROMPT = [5, 9, 2, 7]
N_TIMES = 50


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A sound sequence file of a model with attention, five tokens long."""
    path = tmp_path / "llama.seq"
    path.write_bytes(golden("x11549-dense-sequence-file"))
    return path


@pytest.fixture
def recurrent() -> Path:
    """A model that can hold nothing of it."""
    ((_, path, why),) = make_many(default_folder(), ["mamba"])
    assert isinstance(path, Path), why
    return path


def child_parse_in_the_handler(path: str, model_path: str) -> int:
    n_refused = 0
    with (
        Model.load(Library.open(path), model_path, ModelParams()) as model,
        Context(model, ContextParams(n_ctx=64)) as context,
    ):

        def refused() -> int:
            bad = memoryview(bytearray(64))
            try:
                state_set(context, bad)
            except CallFailed as error:
                kept = error  # this frame is in the error's traceback, so the two are garbage together
                try:
                    statecodec.parse(bad)
                except statecodec.StateFormatError:
                    return 1 if kept.__traceback__ else 0
            return 0

        for _ in range(N_TIMES):
            n_refused += refused()
            gc.collect()
    return n_refused


@needs_compiler
@pytest.mark.stub
def test_a_refused_state_that_the_handler_parses_does_not_kill_the_collector(tmp_path: Path) -> None:
    """The buffer is let go of before the error leaves, so a collector may end frame, error and view in any order."""
    model = write_model(tmp_path / "tiny.gguf")
    assert run_child(child_parse_in_the_handler, build(), model).value() == N_TIMES


def child_restores(path: str, model: str, foreign: str) -> list[Any]:
    placement = Placement(devices=("CPU", "CPU"), n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1)
    ends = set()
    with Session.open(model, placement, library=Library.open(path)) as session:
        session.prefill(PROMPT)
        for _ in range(N_TIMES):
            try:
                session.restore(foreign)
                ends.add("read again")
            except SplitctlError as error:
                ends.add(type(error).__name__)
            gc.collect()
        return [sorted(ends), len([*session.generate(n=2)])]


@pytest.mark.build
def test_a_file_of_another_model_is_restored_fifty_times_in_this_process(recurrent: Path, foreign: Path) -> None:
    """Each end is the same one, and the session goes on."""
    ends, n_more = run_child(child_restores, library_of(NEWEST), recurrent, foreign).value()
    assert len(ends) == 1
    assert n_more == 2


@pytest.mark.build
def test_a_file_of_another_model_is_restored_by_a_run(recurrent: Path, foreign: Path) -> None:
    """The run ends with a status of its own, however often it is tried."""
    arguments = ["--lib", library_of(NEWEST), "--device", "CPU,CPU", "-c", "256", "-t", "1", "-n", "2", "--json"]
    command = ["run", "-m", recurrent, "--restore", foreign, *arguments]
    ends = {run_here(command, dict(os.environ)).returncode for _ in range(3)}
    assert len(ends) == 1
    assert ends <= {0, 1}


@pytest.mark.build
def test_a_file_of_another_model_is_restored_fifty_times_by_a_host(recurrent: Path, foreign: Path) -> None:
    """It is the same worker all the time."""
    arguments = ["-m", recurrent, "--lib", library_of(NEWEST), "--device", "CPU,CPU", "-c", "256", "-t", "1"]
    with house() as home, served(home, *arguments) as host:
        workers = {child.pid for child in host.below()}
        ends = {home.run("restore", foreign).returncode for _ in range(N_TIMES)}
        assert len(ends) == 1
        assert ends <= {0, 1}
        assert workers
        assert {child.pid for child in host.below()} == workers
        assert host.end()[0] == 0

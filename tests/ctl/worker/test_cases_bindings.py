"""Real reports about bindings (the rows named B), each with the right answer for it; the stub library has the fault."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from llama_native import (
    CapabilityMissing,
    Context,
    ContextParams,
    ForkedProcess,
    Library,
    LibraryUnusable,
    Model,
    ModelParams,
    SecondLibrary,
    SplitMode,
    UnsupportedAbi,
)
from splitctl.errors import WorkerLost
from splitctl.ipc.jobs import ProbeRequest
from splitctl.ipc.process import WorkerProcess
from splitctl.placement import Placement
from splitctl.placement import SplitMode as Mode
from tests.stublib import COMPILER, Stub, Variant, build, needs_compiler, run_child, write_model
from tools.prototypes import prototype_differences, prototypes

pytestmark = [pytest.mark.stub, needs_compiler]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def open_model(path: str, model_path: str) -> tuple[Library, Stub, Model]:
    """Open a stub, forget what opening did, and load a model on it."""
    library = Library.open(path)
    stub = Stub(path)
    stub.reset()
    return library, stub, Model.load(library, model_path, ModelParams(split_mode=SplitMode.LAYER))


def decode(context: Context, tokens: list[int], first: int) -> None:
    n = len(tokens)
    context.decode(tokens, range(first, first + n), [0] * n, [False] * (n - 1) + [True])


def child_layout(path: str) -> str:
    try:
        return f"accepted {Library.open(path).profile.name}"
    except UnsupportedAbi as error:
        return f"refused {error}"


# -- B1: a field inserted in the middle of the context params ----------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "answer"),
    [
        (Variant.EPOCH_2606, "accepted 2026_06"),
        (Variant.EPOCH_2608, "accepted 2026_08"),
        (Variant.EPOCH_2609, "accepted 2026_09"),
        (Variant.STOCK, "accepted 2026_10"),
    ],
)
def test_b1_same_size_other_layout_is_told_apart(variant: Variant, answer: str) -> None:
    """Three releases whose context params have 160 bytes, and one with 168, each get their own layout."""
    assert run_child(child_layout, build(variant)).value() == answer


def test_b1_an_unknown_field_of_a_known_size_is_refused() -> None:
    """A u32 that no header has moves the fields but gives a known size: refused, naming what it is nearest to."""
    answer = run_child(child_layout, build(Variant.EXTRA_U32)).value()
    assert answer.startswith("refused")
    assert "llama_context_params" in answer
    assert "168 bytes" in answer
    assert "nearest known" in answer


def _sanitizer() -> str:
    found = subprocess.run(
        [str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    return str(Path(found).resolve()) if Path(found).is_absolute() else ""


def test_b1_looking_is_free_of_memory_errors() -> None:
    """Under AddressSanitizer a library that writes more than expected is refused, and nothing is overrun."""
    runtime = _sanitizer()
    if not runtime:
        pytest.skip("the C compiler has no AddressSanitizer runtime (libasan)")
    path = build(Variant.EXTRA_U32, "-fsanitize=address")
    ended = run_child(
        child_layout, path, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0:exitcode=99", PYTHONMALLOC="malloc"
    )
    assert ended.value().startswith("refused")
    assert "AddressSanitizer" not in ended.stderr


# -- B3: a struct 16 bytes short, a garbage callback pointer -----------------------------------------------------------


def test_b3_a_short_struct_is_refused() -> None:
    """Params that lack their last 16 bytes are refused with both sizes."""
    answer = run_child(child_layout, build(Variant.SHORT_CONTEXT)).value()
    assert answer.startswith("refused")
    assert "152" in answer
    assert "168" in answer


def test_b3_a_callback_that_is_not_null_by_default_is_refused() -> None:
    """Junk where a callback pointer stands is refused before anything could call it."""
    answer = run_child(child_layout, build(Variant.JUNK_CALLBACK)).value()
    assert answer.startswith("refused")
    assert "abort_callback" in answer
    assert "0x7f00deadbeef" in answer


# -- B5: a removed symbol ----------------------------------------------------------------------------------------------


def child_old_memory(path: str, model_path: str) -> dict[str, Any]:
    _library, stub, model = open_model(path, model_path)
    with model, Context(model, ContextParams(n_ctx=256, n_seq_max=2)) as context:
        decode(context, [1, 2, 3, 4], 0)
        context.seq_cp(0, 1)
        seen = {"cut": context.seq_rm(0, 2, -1), "pos": [context.pos_min(0), context.pos_max(0), context.pos_max(1)]}
        context.clear()
        seen["cleared"] = context.pos_max(1)
    return seen | {"mistakes": stub.mistakes()}


def test_b5_old_names_of_the_memory_functions_work(model: Path) -> None:
    """A build with llama_kv_self_* and without llama_memory_* is used by the old names."""
    seen = run_child(child_old_memory, build(Variant.OLD_MEMORY), model).value()
    assert seen == {"cut": True, "pos": [0, 1, 3], "cleared": -1, "mistakes": []}


def child_missing(path: str) -> str:
    try:
        Library.open(path)
    except CapabilityMissing as error:
        return str(error)
    return "accepted"


def test_b5_neither_name_is_one_error_with_both() -> None:
    """A build that has neither the new nor the old function is refused in one message that names both."""
    text = run_child(child_missing, build(Variant.NO_SEQ_RM)).value()
    assert "llama_memory_seq_rm" in text
    assert "llama_kv_self_seq_rm" in text
    assert "\n" not in text


def test_b5_importing_binds_nothing() -> None:
    """Importing the package opens no library, whatever the environment names."""
    assert run_child(child_imported, LLAMA_NATIVE_LIB=str(build(Variant.NO_SEQ_RM))).value() == []


def child_imported() -> list[str]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted({line.split()[-1] for line in maps.splitlines() if "libllama" in line})


# -- B7: the log callback is collected, or called at shutdown ----------------------------------------------------------

N_THREADS = 4
N_MESSAGES = 10_000


def child_storm(path: str, model_path: str) -> int:
    library, stub, model = open_model(path, model_path)
    heard: list[int] = []
    library.log.listen(lambda level, _text: heard.append(level))
    gc.collect()
    stub.lib.stub_storm(N_THREADS, N_MESSAGES)
    gc.collect()
    model.close()
    return len(heard)


def test_b7_the_log_callback_survives_collection(model: Path) -> None:
    """10,000 messages from each of 4 threads of the library arrive after a collection, and the tail stays bounded."""
    assert run_child(child_storm, build(), model).value() >= N_THREADS * N_MESSAGES


def child_exits_while_logging(path: str, model_path: str) -> None:
    _library, stub, _model = open_model(path, model_path)
    stub.lib.stub_storm(2, -1)


def test_b7_the_interpreter_ends_while_threads_still_log(model: Path, tmp_path: Path) -> None:
    """With threads of the library logging for ever the process ends with 0: a C function stands in at the end."""
    calls = tmp_path / "calls"
    ended = run_child(child_exits_while_logging, build(), model, STUB_CALLS=str(calls))
    assert ended.returncode == 0, ended.stderr
    assert sum("llama_log_set" in line for line in calls.read_text().splitlines()) == 2


def child_log_order(path: str) -> list[str]:
    Library.open(path)
    return [name for name in Stub(path).names() if name in {"llama_log_set", "llama_backend_init"}]


def test_b7_the_callback_is_set_before_the_backends_start() -> None:
    """What the backends say while they start is heard: the callback comes first."""
    assert run_child(child_log_order, build()).value() == ["llama_log_set", "llama_backend_init"]


# -- B9: two libraries in one process ----------------------------------------------------------------------------------


def child_second(path: str, twin: str) -> dict[str, Any]:
    # A stranger has the other copy open with its symbols in the global scope, as a badly behaved package does.
    other = ctypes.CDLL(twin, mode=ctypes.RTLD_GLOBAL)
    other.stub_id.restype = ctypes.c_char_p
    library = Library.open(path)
    try:
        Library.open(twin)
        second = "accepted"
    except SecondLibrary as error:
        second = str(error)
    return {
        "id": Stub(path).lib.stub_id().decode(),
        "other": other.stub_id().decode(),
        "version": library.version,
        "info": library.system_info(),
        "same": Library.open(path) is library,
        "second": second,
    }


def test_b9_a_second_library_is_refused_and_answers_are_our_own() -> None:
    """A second libllama is refused by name; beside a stranger's copy in the global scope ours answers for itself."""
    path, twin = build(), build(Variant.TWIN)
    seen = run_child(child_second, path, twin).value()
    assert (seen["id"], seen["other"], seen["version"]) == ("1", "2", "0.0.1-stub")
    assert "ID = 1" in seen["info"]
    assert seen["same"]
    assert str(path) in seen["second"]
    assert str(twin) in seen["second"]


def child_foreign_ggml(path: str, foreign: str) -> str:
    ctypes.CDLL(foreign, mode=ctypes.RTLD_GLOBAL)
    try:
        Library.open(path)
    except LibraryUnusable as error:
        return str(error)
    return "accepted"


def test_b9_a_ggml_from_another_folder_is_noticed(tmp_path: Path) -> None:
    """A libggml of the same name that is mapped already, from another folder, is refused and named."""
    source = tmp_path / "ggml.c"
    source.write_text("int ggml_stub_abi(void) { return 1; }\n")
    made = []
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir()
        library = tmp_path / folder / "libggml-base.so.0"
        command = ["-shared", "-fPIC", "-Wl,-soname,libggml-base.so.0", "-o", str(library), str(source)]
        subprocess.run([str(COMPILER), *command], check=True, timeout=60)
        made.append(library)
    needs = build(
        Variant.STOCK, "-Wl,--no-as-needed", f"-L{made[0].parent}", "-l:libggml-base.so.0", "-Wl,-rpath,$ORIGIN"
    )
    ours = made[0].parent / "libllama.so"
    ours.write_bytes(needs.read_bytes())
    assert run_child(child_foreign_ggml, ours, made[0]).value() == "accepted"
    answer = run_child(child_foreign_ggml, ours, made[1]).value()
    assert str(made[1]) in answer


# -- B10: a fork with the same names and other structs -----------------------------------------------------------------


def test_b10_a_fork_is_recognised() -> None:
    """A build with a fork's names and structs is refused as a fork, with the builds that would do."""
    answer = run_child(child_layout, build(Variant.FORK)).value()
    assert answer.startswith("refused")
    assert "fork" in answer
    assert "llama_set_offload_policy" in answer
    assert "xllamacpp" in answer


# -- B11: pointer or value in a prototype ------------------------------------------------------------------------------

_CDEFS = Path(__file__).parents[3] / "llama_native" / "cdefs"


def test_b11_bound_prototypes_match_the_installed_headers(cache_dir: Path) -> None:
    """Every function that we bind has the arity and the pointer depth that the headers of a real build declare."""
    include = cache_dir / "builds" / "llama-cpp-python-0.3.36" / "include"
    if not (include / "llama.h").is_file():
        pytest.skip(f"{include} has no llama.h: run ci/builds --llama-cpp-python (llama-cpp-python-0.3.36)")
    header = "\n".join((include / name).read_text() for name in ("llama.h", "ggml.h", "ggml-backend.h", "gguf.h"))
    bound = (
        (_CDEFS / "types.h").read_text() + (_CDEFS / "api.h").read_text() + (_CDEFS / "penalties_n_vocab.h").read_text()
    )
    assert prototype_differences(bound, header) == ()
    assert len(set(prototypes(bound)) & set(prototypes(header))) > 80


def test_b11_a_prototype_with_an_argument_less_is_noticed() -> None:
    """A build of a known layout whose penalties take no n_vocab is refused: it would take it for the window."""
    answer = run_child(child_layout, build(Variant.OLD_PENALTIES)).value()
    assert answer.startswith("refused")
    assert "llama_sampler_init_penalties" in answer


# -- B13: a fork after the library was opened --------------------------------------------------------------------------


def child_forks(path: str, model_path: str) -> dict[str, Any]:
    library, stub, model = open_model(path, model_path)
    context = Context(model, ContextParams(n_ctx=256))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        refused = []
        for call in (library.devices, context.synchronize, lambda: Library.open(path), lambda: model.tokenize("x")):
            try:
                call()
            except ForkedProcess:
                refused.append(True)
        context.close()
        model.close()
        os.write(writing, f"{len(refused)} {stub.count('llama_free')} {stub.count('llama_model_free')}".encode())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    os.close(writing)
    said = os.read(reading, 100).decode()
    decode(context, [1, 2], 0)
    works = context.pos_max(0)
    context.close()
    model.close()
    return {"child": said, "exit": os.waitstatus_to_exitcode(status), "parent": works, "live": stub.live()}


def test_b13_a_forked_child_is_refused_and_frees_nothing(model: Path) -> None:
    """Calls from a forked child are refused, closing there touches nothing, and the parent goes on."""
    seen = run_child(child_forks, build(), model).value()
    assert seen["child"] == "4 0 0"
    assert seen["exit"] == 0
    assert seen["parent"] == 1
    assert set(seen["live"].values()) == {0}


# -- B14: abort cannot be caught ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["load", "get_data", "decode"])
def test_b14_an_abort_of_the_library_is_an_error_with_its_words(model: Path, call: str) -> None:
    """A library that aborts ends a worker, not this process: the error has the signal and the assert's text."""
    env = {**os.environ, "STUB_FAULTS": f"{call}:abort:tensor"}
    request = ProbeRequest(model, build(), Placement(mode=Mode.TENSOR, devices=("STUB0", "STUB1")))
    with WorkerProcess(request, env=env) as worker:
        with pytest.raises(WorkerLost) as lost:
            list(worker.events(deadline_s=60.0))
        assert "SIGABRT" in lost.value.how or "signal 6" in lost.value.how
        assert any("GGML_ASSERT(stub_was_asked_to_abort) failed" in line for line in lost.value.log_tail)
        pid = worker.pid
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


# -- B15: the library's calls release the interpreter's lock -----------------------------------------------------------


def child_two_threads(path: str, model_path: str) -> dict[str, Any]:
    _library, stub, model = open_model(path, model_path)
    context = Context(model, ContextParams(n_ctx=256, n_seq_max=2))
    stub.faults("decode:hang@1")
    done: list[int] = []

    def work(seq_id: int) -> None:
        context.decode([65], [0], [seq_id], [True])
        done.append(seq_id)

    threads = [threading.Thread(target=work, args=(seq_id,)) for seq_id in range(2)]
    threads[0].start()
    stub.wait_hanging()
    threads[1].start()
    inside = (list(done), stub.count("llama_decode"), stub.max_inside())
    stub.release()
    for thread in threads:
        thread.join()
    seen = {"while": inside, "done": sorted(done), "decodes": stub.count("llama_decode"), "inside": stub.max_inside()}
    context.close()
    model.close()
    return seen


def test_b15_one_thread_at_a_time_is_inside(model: Path) -> None:
    """While one thread is inside a decode a second one waits: the library never sees two at once."""
    seen = run_child(child_two_threads, build(), model).value()
    assert seen == {"while": [[], 1, 1], "done": [0, 1], "decodes": 2, "inside": 1}

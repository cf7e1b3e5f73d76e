"""One part of check_native: a session that is switched while something fails, and what is left of it.

Runs in a child of `check_native`, which survives its death. Says on stdout, one JSON object a line, where it is and
what came of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_native import (
    Adapter,
    CallFailed,
    Context,
    ContextParams,
    FlashAttn,
    KvType,
    Library,
    LoadMode,
    Model,
    ModelParams,
    SplitMode,
    state_get,
    state_size,
)
from llama_native.user_model import MetaKind, MetaValue, TensorSlot
from splitctl.model.header import read_header
from tools.children import say
from tools.gguf_out import write_gguf

_MIB = 1024 * 1024
_TOKENS = (5, 9, 11, 40, 33)
_NEXT = 7
_WAYS = ((SplitMode.LAYER, SplitMode.TENSOR), (SplitMode.TENSOR, SplitMode.LAYER))
#: How many allocations fail in a row, besides one alone.
_IN_A_ROW = 40


class Broken(Exception):
    """A law that did not hold."""


def need(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    """End the part unless a law holds."""
    if not holds:
        raise Broken(what)


class Place:
    """A model, a context with a few tokens in it, and what they are in each mode."""

    def __init__(
        self, library: Library, path: str, mode: SplitMode, *, load_mode: LoadMode = LoadMode.AUTO, **context: Any
    ) -> None:
        self.library = library
        self.mode = mode
        self.model = Model.load(
            library, path, ModelParams(split_mode=mode, devices=("CPU", "CPU"), load_mode=load_mode)
        )
        wanted: dict[str, Any] = {"flash_attn": FlashAttn.ON, "n_seq_max": 2, **context}
        self.context = Context(
            self.model, ContextParams(n_ctx=256, n_batch=32, n_ubatch=32, n_threads=1, n_threads_batch=1, **wanted)
        )
        n = len(_TOKENS)
        self.context.decode([t % self.model.n_vocab for t in _TOKENS], range(n), [0] * n, [False] * (n - 1) + [True])
        self.state = self.read_state()
        self.rows: dict[SplitMode, bytes] = {}

    def read_state(self) -> bytes:
        """Give the bytes of all sequences."""
        buffer = bytearray(state_size(self.context))
        return bytes(buffer[: state_get(self.context, buffer)])

    def next_row(self) -> bytes:
        """Decode one token more, and take it out again: its row tells whether everything is right."""
        n = len(_TOKENS)
        self.context.decode([_NEXT], [n], [0], [True])
        row = self.context.logits(0)
        need(self.context.seq_rm(0, n, -1), "the memory could not be cut")
        return row

    def switch(self, mode: SplitMode) -> bool:
        """Switch by the library's own call."""
        done = self.context.native_switch(mode.value, None)
        if done:
            self.mode = mode
        return done

    def learn(self, *modes: SplitMode) -> None:
        """Note the row of each mode, with nothing failing; the last mode is where it stays."""
        for mode in modes:
            need(self.mode is mode or self.switch(mode), f"no switch to {mode.name} with nothing failing")
            self.rows[mode] = self.next_row()

    def check(self, at: str) -> None:
        """Hold what is there against what was."""
        need(self.read_state() == self.state, f"{at}: other bytes of state")
        need(self.next_row() == self.rows[self.mode], f"{at}: another row in {self.mode.name} mode")


class Failing:
    """The allocator that was preloaded."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        self._lib.failing_arm.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_int]
        self._lib.failing_disarm.restype = ctypes.c_long

    @contextmanager
    def failing(self, number: int, more: int = 0, *, by_others: bool = False) -> Iterator[list[int]]:
        """Fail allocations in the block; gives a list that holds their count after it."""
        count: list[int] = []
        self._lib.failing_arm(number, more, by_others)
        try:
            yield count
        finally:
            count.append(int(self._lib.failing_disarm()))


def part_allocations(library: Library, job: Mapping[str, Any]) -> Iterator[str]:
    """Fail every allocation of a switch, there and back."""
    allocator = Failing(job["allocator"])
    for first, other in _WAYS:
        place = Place(library, job["tiny"], first)
        place.learn(other, first, other, first)
        with allocator.failing(-1) as count:
            place.switch(other)
        place.switch(first)
        for more in (0, _IN_A_ROW):
            yield _each_fails(place, allocator, other, range(0, count[0], job["step"]), more=more, by_others=False)
        place.model.close()


def part_uploads(library: Library, job: Mapping[str, Any]) -> Iterator[str]:
    """Fail the allocations of the upload threads."""
    allocator = Failing(job["allocator"])
    first, other = _WAYS[0]
    place = Place(library, job["model"], first)
    place.learn(other, first)
    with allocator.failing(-1, by_others=True) as count:
        place.switch(other)
    need(count[0] > 0, "no upload thread allocates anything")
    place.switch(first)
    numbers = range(0, count[0], max(count[0] // 20, 1))
    yield _each_fails(place, allocator, other, numbers, more=0, by_others=True)
    place.model.close()


def _each_fails(
    place: Place, allocator: Failing, other: SplitMode, numbers: range, *, more: int, by_others: bool
) -> str:
    first = place.mode
    n_false = 0
    for number in numbers:
        at = f"{first.name} to {other.name}, allocation {number} and {more} more"
        say(at=at)
        with allocator.failing(number, more, by_others=by_others):
            done = place.switch(other)
        n_false += not done
        place.check(at)
        if done:
            need(place.switch(first), f"{at}: no way back")
            need(place.next_row() == place.rows[first], f"{at}: another row after the way back")
    need(place.switch(other), "no switch after all failures")
    place.check("after all failures")
    need(place.switch(first), "no way back after all failures")
    who = "of the upload threads " if by_others else ""
    in_a_row = f", {more + 1} in a row" if more else ""
    return f"{first.name} to {other.name}: {len(numbers)} allocations {who}failed{in_a_row}, {n_false} returned false"


def part_limit(library: Library, job: Mapping[str, Any]) -> Iterator[str]:
    """Limit the address space."""
    for first, other in _WAYS:
        place = Place(library, job["model"], first)
        place.learn(other, first)
        room = 0
        n_false = 0
        while True:
            say(at=f"{first.name} to {other.name}, {room // _MIB} MiB above what is used")
            used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
            try:
                done = place.switch(other)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            place.check(f"{first.name} to {other.name}, {room // _MIB} MiB above what is used")
            if done:
                break
            n_false += 1
            room += 16 * _MIB
            need(room < 8192 * _MIB, "8 GiB are not enough for a switch")
        yield f"{first.name} to {other.name}: false {n_false} times, done with {room // _MIB} MiB above what is used"
        place.model.close()


def part_leaks(library: Library, job: Mapping[str, Any]) -> Iterator[str]:
    """Switch often."""
    place = Place(library, job["tiny"], SplitMode.LAYER)
    place.learn(SplitMode.TENSOR, SplitMode.LAYER)

    def times(n: int) -> None:
        for _ in range(n // 2):
            need(place.switch(SplitMode.TENSOR) and place.switch(SplitMode.LAYER), "a switch failed")

    times(20)
    before = _held(job)
    times(job["n_switches"])
    after = _held(job)
    place.check("after all")
    grown = {name: after[name] - before[name] for name in before}
    # a heap breathes; what is lost at every switch adds up
    bounds = {"resident": 16 * _MIB, "heap": 64 * 1024, "descriptors": 0, "threads": 0, "mappings": 16}
    if job["is_sanitized"]:
        bounds |= {"resident": 1 << 40, "heap": 1 << 40, "mappings": 1 << 40}  # what is freed is kept for a while
    worst = {name: grown[name] for name in bounds if grown[name] > bounds[name]}
    need(not worst, f"{job['n_switches']} switches: grew by {worst} (bytes, or how many)")
    yield f"{job['n_switches']} switches: grew by {grown} (bytes, or how many)"


_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def _held(job: Mapping[str, Any]) -> dict[str, int]:
    """What this process holds."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    heap = 0 if job["is_sanitized"] else libc.mallinfo2().uordblks + libc.mallinfo2().hblkhd
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    told = {line.partition(":")[0]: line.split()[1] for line in status if len(line.split()) > 1}
    return {
        "resident": int(told["VmRSS"]) * 1024,
        "heap": int(heap),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(told["Threads"]),
        "mappings": len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines()),
    }


class Raw:
    """The calls as a callback would make them: past the lock of the library."""

    def __init__(self, library: Library) -> None:
        self._native = ctypes.CDLL(str(library.path))
        self._switch = self._native.llama_context_set_split_mode
        self._switch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self._switch.restype = ctypes.c_bool
        self._of_model = self._native.llama_model_set_split_mode
        self._of_model.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self._of_model.restype = ctypes.c_bool
        self._native.llama_set_adapter_cvec.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
        ]  # fmt: skip
        self._library = library

    def address(self, handle: Context | Model) -> int:
        """Give the pointer of a handle."""
        with self._library.calling() as (ffi, _):
            return int(ffi.cast("uintptr_t", handle.pointer))

    def switch(self, address: int | None, mode: int = SplitMode.TENSOR.value) -> bool:
        """Call llama_context_set_split_mode."""
        return bool(self._switch(address, mode, None))

    def switch_model(self, address: int | None, mode: int = SplitMode.TENSOR.value) -> bool:
        """Call llama_model_set_split_mode."""
        return bool(self._of_model(address, mode, None))

    def set_control(self, address: int, n_embd: int, n_layers: int) -> None:
        """Set a control vector on a context."""
        data = (ctypes.c_float * (n_embd * (n_layers - 1)))(*([0.5] * (n_embd * (n_layers - 1))))
        rc = self._native.llama_set_adapter_cvec(address, data, len(data), n_embd, 1, n_layers - 1)
        need(rc == 0, f"llama_set_adapter_cvec gave {rc}")


def part_refusals(library: Library, job: Mapping[str, Any]) -> Iterator[str]:
    """Ask for what cannot be, and look whether anything was touched."""
    raw = Raw(library)
    heard: list[str] = []
    library.log.listen(lambda _, text: heard.append(text))

    def refused(place: Place, why: str, call: Callable[[], bool] | None = None, *, decodes: bool = True) -> str:
        heard.clear()
        address = raw.address(place.context)
        need(not (call or (lambda: raw.switch(address)))(), f"not refused: {why}")
        said = "".join(heard)
        need("refused: " in said and why in said, f"refused for another reason than {why}: {said.strip()[-200:]}")
        need("going back" not in said, f"something was touched: {why}")
        need(place.read_state() == place.state, f"{why}: other bytes of state")
        if decodes:
            need(place.next_row() == place.rows[place.mode], f"{why}: another row")
        return why

    def place(**context: Any) -> Place:
        made = Place(library, job["tiny"], SplitMode.LAYER, **context)
        made.rows[made.mode] = made.next_row()
        return made

    one = place()
    address = raw.address(one.context)
    yield refused(one, "no context", lambda: raw.switch(None))
    yield refused(one, "no model", lambda: raw.switch_model(None))
    yield refused(one, "there is no such split mode", lambda: raw.switch(address, 7))
    yield refused(one, "there is no such split mode", lambda: raw.switch(address, -1))
    yield refused(one, "a context uses the model", lambda: raw.switch_model(raw.address(one.model)))
    second = Context(one.model, one.context.params)
    yield refused(one, "another context uses the model")
    second.close()
    yield from _refused_inside(library, raw, job, refused)
    adapter = Adapter(one.model, _write_adapter(Path(job["folder"]) / "lora.gguf", one.model.n_embd))
    yield refused(one, "adapters are loaded for the model")
    one.context.set_adapters([(adapter, 0.5)])
    one.rows[one.mode] = one.next_row()
    yield refused(one, "adapters are loaded for the model") + " and set"
    one.context.set_adapters([])
    one.rows[one.mode] = one.next_row()
    adapter.close()
    raw.set_control(address, one.model.n_embd, one.model.n_layer)
    one.rows[one.mode] = one.next_row()
    yield refused(one, "a control vector is set")
    one.model.close()
    off = place(flash_attn=FlashAttn.OFF)
    yield refused(off, "flash attention, which is off")
    off.model.close()
    if job["other"]:
        # a recurrent memory cannot be cut, so its next row is not asked for
        mamba = Place(library, job["other"], SplitMode.LAYER)
        yield refused(mamba, "has no tensor mode", decodes=False)
        mamba.model.close()
    yield _refused_without_path(library, raw, job, heard)
    yield _quantized(library, job)


def _refused_inside(library: Library, raw: Raw, job: Mapping[str, Any], refused: Callable[..., str]) -> Iterator[str]:
    """Ask from callbacks, and from another thread while a call is inside."""
    answers: list[bool] = []
    asking = threading.Event()
    address: list[int] = []

    def ask() -> None:
        answers.append(raw.switch(address[0]))

    def abort() -> bool:
        if asking.is_set():
            asking.clear()
            ask()
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        return False

    place = Place(library, job["tiny"], SplitMode.LAYER)
    place.context.close()
    place.context = Context(place.model, place.context.params, abort=abort)
    n = len(_TOKENS)
    place.context.decode([t % place.model.n_vocab for t in _TOKENS], range(n), [0] * n, [False] * (n - 1) + [True])
    place.state = place.read_state()
    address.append(raw.address(place.context))
    place.rows[place.mode] = place.next_row()

    def inside() -> bool:
        asking.set()
        place.next_row()
        need(len(answers) == 2, "the callback was not called")
        return any(answers)

    yield refused(place, "another call is inside this context", inside) + " (a callback, and another thread)"

    def on_log(_level: int, _text: str) -> None:
        if asking.is_set():
            asking.clear()
            ask()

    answers.clear()
    stop = library.log.listen(on_log)
    asking.set()
    need(place.switch(SplitMode.TENSOR), "no switch with a log callback that asks for one")
    stop()
    need(answers == [False], "a log callback switched inside a switch")
    place.rows[place.mode] = place.next_row()
    need(place.read_state() == place.state, "other bytes of state after a log callback asked inside a switch")
    yield "called from a callback of a switch"
    place.model.close()


def _write_adapter(path: Path, n_embd: int) -> Path:
    """Write an adapter of rank 2 for the first query projection."""
    metadata = [
        MetaValue(key, MetaKind.STR, value)
        for key, value in (
            ("general.architecture", "llama"),
            ("general.type", "adapter"),
            ("adapter.type", "lora"),
        )
    ]
    metadata.append(MetaValue("adapter.lora.alpha", MetaKind.F32, 4.0))
    halves = (("lora_a", (n_embd, 2)), ("lora_b", (2, n_embd)))
    slots = [TensorSlot(f"blk.0.attn_q.weight.{name}", dims, 0, 8 * n_embd) for name, dims in halves]
    write_gguf(path, metadata, slots, [struct.pack("<f", 0.25) * (2 * n_embd)] * 2)
    return path


def _refused_without_path(library: Library, raw: Raw, job: Mapping[str, Any], heard: list[str]) -> str:
    """A model of metadata, and one that is a vocabulary alone, have nothing to be placed from."""
    fill = library.callback("void(struct ggml_tensor *, void *)", lambda *_: None)
    with library.calling() as (ffi, lib):
        params = lib.llama_model_default_params()
        path = os.fsencode(job["tiny"])
        gguf = lib.gguf_init_from_file(path, ffi.new("struct gguf_init_params *", [True])[0])
        made = lib.llama_model_init_from_user(gguf, fill, ffi.NULL, params)
        params.vocab_only = True
        words = lib.llama_model_load_from_file(path, params)
        for model, why in ((made, "not loaded from a path"), (words, "a vocabulary alone")):
            heard.clear()
            need(bool(model), f"no model that is {why}")
            need(not raw.switch_model(int(ffi.cast("uintptr_t", model))), f"not refused: {why}")
            need(why in "".join(heard), f"refused for another reason than {why}: {''.join(heard)[-200:]}")
            lib.llama_model_free(model)
        lib.gguf_free(gguf)
    return "a model of metadata, and one that is a vocabulary alone"


def _quantized(library: Library, job: Mapping[str, Any]) -> str:
    """A quantized cache goes there and back, or is refused; either way the session serves."""
    place = Place(library, job["model"], SplitMode.LAYER, type_k=KvType.Q8_0, type_v=KvType.Q8_0)
    place.rows[SplitMode.LAYER] = place.next_row()
    done = place.switch(SplitMode.TENSOR)
    if done:
        need(place.switch(SplitMode.LAYER), "no way back with a quantized cache")
    place.check("a quantized cache")
    place.model.close()
    return f"a quantized cache: {'there and back' if done else 'returned false'}"


def part_kept(library: Library, job: Mapping[str, Any]) -> Iterator[str]:
    """Look whether what a caller points at stays."""
    place = Place(library, job["model"], SplitMode.LAYER)
    native = ctypes.CDLL(str(library.path))
    raw = Raw(library)
    for name in ("llama_model_get_vocab", "llama_vocab_get_text", "llama_model_chat_template"):
        getattr(native, name).restype = ctypes.c_void_p
    native.llama_vocab_get_text.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    native.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    native.llama_model_chat_template.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    model = raw.address(place.model)

    def seen() -> tuple[Any, ...]:
        vocab = native.llama_model_get_vocab(model)
        text = native.llama_vocab_get_text(vocab, 100)
        template = native.llama_model_chat_template(model, None)
        return vocab, text, ctypes.string_at(text), template, template and ctypes.string_at(template)

    before = seen()
    place.learn(SplitMode.LAYER)
    tokens = place.model.tokenize("a new start")
    ended = threading.Event()
    others: list[list[int]] = []

    def tokenize() -> None:
        while not ended.is_set():
            others.append(place.model.tokenize("a new start"))

    thread = threading.Thread(target=tokenize)
    thread.start()
    try:
        for mode in (SplitMode.TENSOR, SplitMode.LAYER):
            need(place.switch(mode), f"no switch to {mode.name}")
            need(seen() == before, f"pointers changed by the switch to {mode.name}")
    finally:
        ended.set()
        thread.join()
    need(bool(others) and all(one == tokens for one in others), "another thread got other tokens meanwhile")
    place.check("there and back")
    yield f"vocabulary, texts and template lie where they lay; another thread tokenized {len(others)} times meanwhile"
    place.model.close()
    yield _without_the_file(library, job)
    yield _with_work_that_waits(library, job)


def _with_work_that_waits(library: Library, job: Mapping[str, Any]) -> str:
    """A shift of positions and a copy between streams are done at the next decode: a switch before it loses neither."""
    rows: list[tuple[bytes, bytes]] = []
    n = len(_TOKENS)
    for modes in ((), (SplitMode.TENSOR, SplitMode.LAYER)):
        place = Place(library, job["tiny"], SplitMode.LAYER)
        place.context.seq_cp(0, 1)
        place.context.seq_add(0, 0, -1, 3)
        for mode in modes:
            need(place.switch(mode), f"no switch to {mode.name} with a shift that waits")
        place.context.decode([_NEXT, _NEXT], [n + 3, n], [0, 1], [True, True])
        rows.append((place.context.logits(0), place.context.logits(1)))
        place.model.close()
    need(rows[0] == rows[1], "a shift or a copy that waited was lost by the switch")
    return "a shift of positions and a copy between streams that waited for the next decode"


def _without_the_file(library: Library, job: Mapping[str, Any]) -> str:
    """Weights go from tensor to tensor where both placements fit: the data of the file may be lost meanwhile."""
    copy = Path(job["folder"]) / "copy.gguf"
    shutil.copyfile(job["model"], copy)
    place = Place(library, str(copy), SplitMode.LAYER, load_mode=LoadMode.READ)
    place.learn(SplitMode.TENSOR, SplitMode.LAYER)
    header = read_header(copy)
    n_bytes = copy.stat().st_size
    os.truncate(copy, header.data_offset)
    os.truncate(copy, n_bytes)
    for mode in (SplitMode.TENSOR, SplitMode.LAYER, SplitMode.TENSOR):
        need(place.switch(mode), f"no switch to {mode.name} without the file's data")
        place.check(f"to {mode.name} without the file's data")
    place.model.close()
    copy.unlink()
    return "there, back and there again with nothing but zeros in the file"


_PARTS: Mapping[str, Callable[[Library, Mapping[str, Any]], Iterator[str]]] = {
    "allocations": part_allocations,
    "uploads": part_uploads,
    "limit": part_limit,
    "leaks": part_leaks,
    "refusals": part_refusals,
    "kept": part_kept,
}


def main(job: Mapping[str, Any]) -> int:
    """Run one part."""
    library = Library.open(job["library"], env=os.environ)
    library.devices()
    started = time.monotonic()
    try:
        for what in _PARTS[job["part"]](library, job):
            say(status="held", what=what, seconds=round(time.monotonic() - started, 1))
            started = time.monotonic()
    except (Broken, CallFailed) as broken:
        say(status="failed", what=str(broken), seconds=round(time.monotonic() - started, 1))
    if job["is_sanitized"]:
        return 0
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[-1])))

"""The one door to libllama: the only dlopen, one library in a process, one lock around its calls.

Laws:
    1. One libllama in a process; a second, different one is refused (its globals would mix with ours).
    2. RTLD_LOCAL: no symbol of it leaks to another library, nor theirs to it.
    3. Nothing is called through a struct before its layout has been established by looking (``abi``).
    4. One lock; a call from inside a callback is refused (Reentered), one from a forked child too (ForkedProcess).
    5. The log callback lives in this module as long as the process does, and is replaced by a C function at exit. No
       other thread is in a call then, or makes one any more: it would run on what is being taken down.
    6. What a callback raises, or a signal's handler while C runs, is held and raised when the call is over.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from contextlib import contextmanager, nullcontext
from importlib import resources
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cffi

from llama_native import abi, behaviour, capabilities, discover, observing, rpc, signals
from llama_native.devices import Device, handles, read_devices, text
from llama_native.errors import (
    CapabilityMissing,
    ForkedProcess,
    LibraryNotFound,
    LibraryUnusable,
    Reentered,
    RpcServerUnusable,
    SecondLibrary,
)
from llama_native.linker import mapped_libraries
from llama_native.logs import LEVEL_CONTINUES, LEVEL_DEBUG, LEVEL_INFO, LogTail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from llama_native.owned import Owned


#: How long the end of the process waits for a call that another thread is in, and that thread for the end [seconds].
_EXIT_S = 10.0


def _read_cdef(name: str) -> str:
    return resources.files("llama_native").joinpath("cdefs", name).read_text(encoding="utf-8")


class Library:
    """An open libllama: what it is, what it can do, its devices and its log.

    Thread: safe; every call into the library holds one lock.
    Lifetime: as long as the process; a library that has been opened is never unloaded.
    """

    def __init__(self, path: Path, ffi: cffi.FFI, lib: Any, profile: abi.Profile, log: LogTail) -> None:
        """Use :meth:`open`."""
        self.path = path
        self.profile = profile
        self.log = log
        self.pid = os.getpid()
        self._ffi = ffi
        self._lib = lib
        self._lock = threading.Lock()
        self._last: int | None = None
        self._owner: int | None = None
        self._calls = threading.local()
        self._graves: deque[Owned] = deque()
        self.capabilities: Mapping[str, tuple[str, ...]] = {}
        self.backend_folders: tuple[str, ...] = ()
        self.draws_on_single = False
        self.origin = ""
        self.version = ""
        self.rpc_servers: tuple[str, ...] = ()
        self.env: Mapping[str, str] = {}
        """The environment that the library reads, as far as it is known."""

    @staticmethod
    def open(path: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None) -> Library:
        """Open libllama, or return the one that is open.

        Args:
            path: the shared library; None: the first usable candidate of ``discover.candidates``.
            env: the environment that discovery reads (LLAMA_NATIVE_LIB, ...), and the library; None: nothing of it.

        Returns:
            The process's library.

        Raises:
            LibraryNotFound: no candidate is usable; lists every one with its reason.
            LibraryUnusable: the named file cannot be loaded.
            UnsupportedAbi: its struct layout is unknown, contradictory or too old.
            CapabilityMissing: it lacks functions that a session needs.
            SecondLibrary: another libllama is open in this process.
            ForkedProcess: the library was opened before a fork.
        """
        library = _open(Path(path) if path is not None else None, env or {})
        library.env = env or library.env
        return library

    @property
    def build(self) -> str:
        """A text that changes whenever the library's file does: version, size in bytes, time of change in ns."""
        stat = self.path.stat()
        return f"{self.version or self.path.name}-{stat.st_size}-{stat.st_mtime_ns}"

    @contextmanager
    def calling(self) -> Iterator[tuple[Any, Any]]:
        """Hold the library's lock for a call.

        Yields:
            (ffi, lib), for modules of this package only.

        Raises:
            Reentered: this thread is inside a call already (a callback must not call the library).
            ForkedProcess: this process is a fork of the one that opened the library.
            SystemExit: the process ends, in another thread.
        """
        if self.forked:
            raise ForkedProcess(self.pid, os.getpid())
        me = threading.get_ident()
        # cffi lets go of the GIL during a call, so other threads wait here for the lock. One that holds it already (a
        # callback that calls back in) would wait for itself.
        if self._owner == me:
            raise Reentered("library", "a call", "another call on this thread")
        try:
            with self._lock, self.holding():
                if self._is_over():
                    raise SystemExit
                try:
                    self._owner = me
                    self._free_buried()
                    self.log.begin_call()
                    yield self._ffi, self._lib
                finally:
                    self._owner = None
        finally:
            if self._is_over():
                self._outlive()

    @contextmanager
    def asking(self) -> Iterator[tuple[Any, Any]]:
        """Ask what the library answers beside any other call (a vocabulary): without the lock.

        Yields:
            (ffi, lib), for modules of this package only.

        Raises:
            ForkedProcess: this process is a fork of the one that opened the library.
        """
        if self.forked:
            raise ForkedProcess(self.pid, os.getpid())
        with self.holding():
            yield self._ffi, self._lib

    @contextmanager
    def holding(self, *, everything: bool = False) -> Iterator[None]:
        """Hold what callbacks and signal handlers raise during calls until the block, or one around it, has ended.

        Args:
            everything: also what handlers raise between two calls, where the block must not be left half done.

        Raises:
            BaseException: the first that was held, in place of what the block itself raised.
        """
        outer: list[BaseException] | None = getattr(self._calls, "held", None)
        held: list[BaseException] = [] if outer is None else outer
        try:
            self._calls.held = held
            with signals.guarded(held) if everything else nullcontext():
                yield
        finally:
            self._calls.held = outer
            if held and outer is None:
                raise held[0]

    @property
    def is_interrupted(self) -> bool:
        """Whether something is held on this thread."""
        return bool(getattr(self._calls, "held", None))

    @property
    def is_unwanted(self) -> bool:
        """Whether a long call of this thread had better end: something is held, or the process ends."""
        return self.is_interrupted or self._is_over()

    def _is_over(self) -> bool:
        return self._last is not None and self._last != threading.get_ident()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call C so that its result is not lost to an exception that a signal's handler raises meanwhile."""
        results: list[Any] = []
        try:
            # Python looks for signals between two of its instructions: here the result is kept before the next one.
            results.extend(starmap(function, (arguments,)))
        except BaseException as error:
            if not results:
                raise
            self._hold(type(error), error)
        return results[0]

    def callback(self, c_type: str, function: Callable[..., Any], *, error: Any = None) -> Any:
        """Return a C callback; if ``function`` raises, C gets ``error``, and the exception comes when the call is over.

        Lifetime: hold it as long as the library may call it.
        """
        return self._ffi.callback(c_type, function, error=error, onerror=self._hold)

    def _hold(self, _kind: object, error: BaseException, _traceback: object = None) -> None:
        held = getattr(self._calls, "held", None)
        if held is None:  # a thread of the library's own: nobody is there to take it, so cffi shows it
            raise error
        held.append(error)

    def bury(self, owned: Owned) -> None:
        """Free a C object whose handle is gone: now, or where a call is under way, before the next one."""
        self._graves.append(owned)
        taken: list[bool] = []
        if self._is_over():
            return
        try:
            taken.extend(starmap(self._lock.acquire, ((False,),)))  # as in `call`
            if taken[0]:
                self._owner = threading.get_ident()
                self._free_buried()
        finally:
            if taken == [True]:
                self._owner = None
                self._lock.release()

    def end(self) -> None:
        """Wait until the call under way has ended, and let no thread but this one make another."""
        self._last = threading.get_ident()
        if self._lock.acquire(timeout=_EXIT_S):
            self._lock.release()

    def _outlive(self) -> None:
        """Wait for the end of the process, which nothing that a thread still does is to disturb; else end the thread.

        It is there for so long only if somebody waits for the thread.
        """
        if not getattr(self._calls, "is_over", False):
            self._calls.is_over = True
            threading.Event().wait(_EXIT_S)
        raise SystemExit

    def _free_buried(self) -> None:
        while self._graves:
            self._graves.popleft().release(self._lib)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the library."""
        return os.getpid() != self.pid

    def has(self, capability: str) -> bool:
        """Tell whether this build has a capability of ``capabilities.CAPABILITIES``."""
        return capability in self.capabilities

    def need(self, capability: str) -> None:
        """Raise CapabilityMissing unless this build has the capability."""
        if capability not in self.capabilities:
            symbols = capabilities.CAPABILITIES[capability][0]
            raise CapabilityMissing(capability, tuple(s for s in symbols if not self.exports(s)))

    def exports(self, symbol: str) -> bool:
        """Tell whether the library, or one that it was linked with, exports a bound symbol."""
        return hasattr(self._lib, symbol)

    @property
    def max_devices(self) -> int:
        """The number of entries of a tensor_split array."""
        with self.calling() as (_, lib):
            return int(lib.llama_max_devices())

    def devices(self, *, memory: bool = True) -> tuple[Device, ...]:
        """List the devices in the library's order; without ``memory`` (slow on some builds) its numbers are 0."""
        with self.calling() as (ffi, lib):
            return read_devices(ffi, lib, memory=memory)

    def add_rpc_servers(self, endpoints: Sequence[str]) -> tuple[str, ...]:
        """Add the devices of RPC servers; one that was added before is left as it is.

        Args:
            endpoints: HOST:PORT of each. A server serves one client at a time.

        Returns:
            The names of the new devices, in the servers' order.

        Raises:
            CapabilityMissing: the build has no RPC.
            RpcServerUnusable: a server cannot be reached, is busy, has no device, or is named wrongly.
        """
        new = [one for one in dict.fromkeys(endpoints) if one not in self.rpc_servers]
        if not new:
            return ()
        self.need("rpc")
        if len(self.rpc_servers) + len(new) > rpc.MAX_SERVERS:
            raise RpcServerUnusable(new[-1], f"a library takes {rpc.MAX_SERVERS} servers at most", "name fewer")
        for endpoint in new:
            rpc.check_endpoint(endpoint)
        names: list[str] = []
        for endpoint in new:
            rpc.greet(endpoint)
            with self.calling() as (ffi, lib):
                names.extend(rpc.add_server(ffi, lib, endpoint))
            self.rpc_servers += (endpoint,)
        return tuple(names)

    def serve_rpc(self, endpoint: str, devices: Sequence[str] = ("CPU",), *, n_threads: int = 1) -> None:
        """Serve devices to RPC clients, one client at a time; returns only where the endpoint is not to be had.

        Args:
            endpoint: HOST:PORT to listen on. Anyone who reaches it can use it, and nothing is encrypted.
            devices: names of the devices.
            n_threads: threads of each processor device.

        Raises:
            CapabilityMissing: the build has no RPC.
            RpcServerUnusable: the endpoint is not HOST:PORT.
            UnknownDevice: a device name that the library does not have.
        """
        rpc.check_endpoint(endpoint)
        with self.calling() as (ffi, lib):
            rpc.serve(ffi, lib, endpoint, handles(ffi, lib, devices), n_threads)

    def system_info(self) -> str:
        """Return the library's own line about its build and the processor."""
        if not self.exports("llama_print_system_info"):
            return ""
        with self.calling() as (ffi, lib):
            return text(ffi, lib.llama_print_system_info()).strip()


_opening = threading.Lock()
_open_library: Library | None = None
_log_callback: Any = None


def _open(path: Path | None, env: Mapping[str, str]) -> Library:
    global _open_library  # noqa: PLW0603 - the library's state is process-wide, so is this
    with _opening:
        if _open_library is not None:
            if _open_library.forked:
                raise ForkedProcess(_open_library.pid, os.getpid())
            if path is not None and not path.is_dir() and path.resolve() != _open_library.path.resolve():
                raise SecondLibrary(str(_open_library.path), str(path))
            return _open_library
        chosen, origin, version = _choose(path, env)
        _open_library = _load(chosen, origin, version)
        return _open_library


def _choose(path: Path | None, env: Mapping[str, str]) -> tuple[Path, str, str]:
    candidates = discover.candidates(env, explicit=path)
    for candidate in candidates:
        if candidate.usable:
            return candidate.path, candidate.origin, candidate.version
    if path is not None and candidates:
        first = candidates[0]
        raise LibraryUnusable(first.path, first.reason, "name another with --lib or LLAMA_NATIVE_LIB")
    raise LibraryNotFound(candidates)


def _load(path: Path, origin: str, version: str) -> Library:
    profile = abi.identify(_observe(path, discover.exported_symbols(path)))
    penalties = "penalties_n_vocab.h" if profile.penalties_take_n_vocab else "penalties_plain.h"
    ffi = cffi.FFI()
    ffi.cdef(_read_cdef("types.h") + profile.cdef + _read_cdef("api.h") + _read_cdef(penalties))
    # RTLD_LOCAL keeps its symbols out of the global scope: other packages of a process bring a ggml of their own, whose
    # functions have the same names and other structs. RTLD_NOW lets a missing symbol fail here, not at its first call.
    lib = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
    log = LogTail()
    library = Library(path, ffi, lib, profile, log)
    library.origin = origin
    found = capabilities.detect(library.exports)
    capabilities.require(found, library.exports)
    library.capabilities = found
    with library.calling():
        _attach_log(library, ffi, lib)
        library.version = version or (text(ffi, lib.llama_version()) if library.exports("llama_version") else "")
        library.backend_folders = _load_backends(ffi, lib, path, library)
        if not library.has("rpc") and rpc.is_there(ffi, lib):
            library.capabilities = {**found, "rpc": ("ggml_backend_register",)}
        lib.llama_backend_init()
        # Only now is every library mapped that this one will use.
        _refuse_foreign_ggml(path)
        library.draws_on_single = behaviour.check(ffi, lib, profile)
    return library


def _observe(path: Path, exported: frozenset[str]) -> abi.Observed:
    """Look at the library's default structs through declarations that presume nothing of them."""
    by_value = not observing.takes_hidden_pointer()
    ffi = cffi.FFI()
    ffi.cdef(_read_cdef(observing.header(by_value=by_value)))
    try:
        lib = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
    except OSError as error:
        why = discover.explain_load_failure(path, str(error))
        raise LibraryUnusable(path, why, "install a build for this system, or its missing parts") from error
    return observing.observe(ffi, lib, exported, by_value=by_value)


def _attach_log(library: Library, ffi: cffi.FFI, lib: Any) -> None:
    global _log_callback  # noqa: PLW0603 - must outlive every thread of the library

    log, is_chatter = library.log, False

    def take(level: int, message: Any, _: object) -> None:
        nonlocal is_chatter
        # A load says a debug line for every token and tensor, and an info line for every key: taken in, they would cost
        # 3 % of a small model's switch, and push out of the tail what an error is to show.
        if level != LEVEL_CONTINUES:
            is_chatter = level == LEVEL_DEBUG or (level == LEVEL_INFO and not log.is_heard)
        if not is_chatter:
            log.feed(level, text(ffi, message))

    # The library keeps the bare pointer and calls it from threads of its own: a callback that Python collected would
    # be freed code. Hence a global, which nothing replaces.
    _log_callback = library.callback("void(int, const char *, void *)", take)
    lib.llama_log_set(_log_callback, ffi.NULL)
    # At exit those threads may still log while the interpreter is taken down. NULL would not silence them: it brings
    # back the library's own output to stderr. So any C function that does nothing takes over.
    silent = cffi.FFI()
    silent.cdef("int abs(int);")
    libc = silent.dlopen(None)
    address = int(silent.cast("uintptr_t", silent.addressof(libc, "abs")))
    pid = os.getpid()

    def detach() -> None:
        # A forked child runs this too, and its copy of the library may have been locked at the moment of the fork.
        if os.getpid() == pid:
            library.end()
            lib.llama_log_set(ffi.cast("ggml_log_callback", address), ffi.NULL)

    atexit.register(detach)


def _load_backends(ffi: cffi.FFI, lib: Any, path: Path, library: Library) -> tuple[str, ...]:
    if lib.ggml_backend_dev_count() > 0:
        return ()
    searched = tuple(str(folder) for folder in discover.backend_folders(path))
    if library.has("load-backends"):
        for folder in searched:
            lib.ggml_backend_load_all_from_path(ffi.new("char[]", os.fsencode(folder)))
    if lib.ggml_backend_dev_count() == 0:
        raise LibraryUnusable(
            path,
            f"it has no device: no backend is linked in and none was found in {', '.join(searched) or 'its folder'}",
            "keep the libggml-*.so backends beside the library",
        )
    return searched


def _refuse_foreign_ggml(path: Path) -> None:
    """Check that a separate libggml that got mapped is the one beside this library."""
    folder = path.resolve().parent
    near = {folder, *(Path(f).resolve() for f in discover.backend_folders(path))}
    wanted = {name for name in discover.needed_libraries(path) if name.startswith("libggml")}
    strange = [m for m in mapped_libraries() if m.name in wanted and m.resolve().parent not in near]
    if strange:
        raise LibraryUnusable(
            path,
            f"another ggml is mapped in its place: {strange[0]}",
            "remove it from LD_LIBRARY_PATH, or use the libllama that belongs to it",
        )

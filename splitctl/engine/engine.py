"""The live native objects of a session: a placed model, its context and its adapters, made and freed as a whole.

Laws:
    1. The context is freed before its adapters, and both before the model.
    2. What a step that failed has made is freed by :meth:`Engine.free_failed`; a half-made engine never serves.
    3. Between free and place no memory question is asked of the library.
    4. Whatever is loaded, and whenever, comes from the bytes that the session was opened from.
    5. At rest at most one placement is kept beside the one that serves: the one before.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import psutil

from llama_native import (
    Adapter,
    CallFailed,
    CapabilityMissing,
    Context,
    ContextParams,
    FlashAttn,
    KvType,
    LoadMode,
    Model,
    ModelParams,
    SplitMode,
    TensorUnknown,
    load_user_model,
)
from splitctl import placement as placing
from splitctl.errors import AdapterInvalid, BadModelFile, ConfigInvalid, FileChanged, Parked
from splitctl.last_words import is_shortage, telling_line
from splitctl.model.header import read_header
from splitctl.model.identity import FileIdentity
from splitctl.outcome import WeightsTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llama_native import Library
    from splitctl.engine.host_copy import HostCopy
    from splitctl.model.header import GgufHeader
    from splitctl.placement import Placement

_Made = TypeVar("_Made")

FLASH_TURNED_OFF = re.compile(r"flash attention\b.*\bset to disabled", re.IGNORECASE)
"""What the library logs when it turns automatic flash attention off. Source: resolve_fused_ops in llama-context.cpp
("Flash Attention not supported, set to disabled"); builds before: "Flash Attention was auto, set to disabled"."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that the session loads again whenever its model is placed."""

    path: str
    scale: float


def check_adapters(adapters: Sequence[LoadedAdapter]) -> tuple[GgufHeader, ...]:
    """Judge adapters by their files' headers, which are returned, before a model is loaded for them.

    Raises:
        AdapterInvalid: a file is missing, no GGUF, damaged, or no LoRA adapter.
        ConfigInvalid: a scale is not a finite number.
    """
    headers = []
    for one in adapters:
        path = Path(one.path)
        if not math.isfinite(one.scale):
            raise ConfigInvalid("adapter scale", one.scale, "a finite number")
        try:
            header = read_header(path)
        except BadModelFile as error:
            raise AdapterInvalid(path, f"it is {error.kind.value}: {error.detail}") from error
        for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
            if header.values.get(key) != wanted:
                raise AdapterInvalid(path, f"its {key} is {header.values.get(key, 'not given')}, not {wanted}")
        headers.append(header)
    return tuple(headers)


def resolve_threads(placement: Placement) -> Placement:
    """Replace a thread count of 0: one thread for each physical core, as llama.cpp's programs do."""
    n = placement.n_threads or psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return dataclasses.replace(placement, n_threads=n, n_threads_batch=placement.n_threads_batch or n)


def model_params(placement: Placement, load_mode: LoadMode = LoadMode.AUTO) -> ModelParams:
    """Say a placement in the native package's words."""
    return ModelParams(
        split_mode=SplitMode[placement.mode.name],
        devices=placement.devices,
        tensor_split=placement.tensor_split,
        main_gpu=placement.main_gpu,
        n_gpu_layers=placement.n_gpu_layers,
        load_mode=load_mode,
    )


def context_params(placement: Placement, *, embeddings: bool) -> ContextParams:
    """Say a placement's context in the native package's words."""
    return ContextParams(
        n_ctx=placement.n_ctx,
        n_batch=placement.n_batch,
        n_ubatch=placement.n_ubatch,
        n_seq_max=placement.n_seq_max,
        n_threads=placement.n_threads,
        n_threads_batch=placement.n_threads_batch,
        flash_attn=FlashAttn[placement.flash_attn.name],
        type_k=KvType[placement.type_k.upper()],
        type_v=KvType[placement.type_v.upper()],
        offload_kqv=placement.offload_kqv,
        kv_unified=placement.kv_unified,
        embeddings=embeddings,
    )


class Engine:
    """One model on its devices with one context.

    Thread: the session's turn guards it. Lifetime: until :meth:`free`; may be placed again after it.
    """

    def __init__(
        self,
        library: Library,
        model_path: str,
        adapters: Sequence[LoadedAdapter] = (),
        *,
        files: Sequence[FileIdentity] = (),
        embeddings: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
        on_tick: Callable[[], None] | None = None,
        weights: WeightsTier = WeightsTier.FILE,
        copy: HostCopy | None = None,
    ) -> None:
        """Hold what every placement of this session has in common; ``files`` are those of the model and the adapters.

        While the library works, ``is_cancelled`` is asked; ``on_tick`` is called as often as the library calls back:
        a sign that it does not hang. ``copy`` is one of the model's files, or will be.
        """
        self.library = library
        self.model_path = model_path
        self.adapters = tuple(adapters)
        self.files = tuple(files)
        self.embeddings = embeddings
        self.is_cancelled = is_cancelled
        self.on_tick = on_tick
        self.weights = weights
        self.copy = copy
        self.came_from = WeightsTier.FILE
        """Where the weights of the last placing came from."""
        self.why = ""
        """Why they did not come from where they were wanted from."""
        self.load_ms: dict[WeightsTier, float] = {}
        """How long the last load from each place took, ms."""
        self.n_to_come: Callable[[], int] = int
        """Tells how many tokens are known to be generated before the next switch."""
        self._stale = ""
        self._placed: _Placed | None = None
        self._kept: list[_Placed] = []

    def confirm_files(self) -> None:
        """Refuse files that are not what they were when the session opened; equal ones may have taken their place.

        A complete copy stands in for the model's.

        Raises:
            FileChanged: of the first that differs.
        """
        found, n_model = list(self.files), len(self.files) - len(self.adapters)
        self._stale = ""
        for index, one in enumerate(self.files):
            try:
                # The new status is kept: the next look reads nothing again.
                found[index] = one.confirmed()
            except FileChanged as error:
                if index >= n_model or self.copy is None or self.copy.why:
                    raise
                told = f"{one.path}: {error.how}; the copy of the weights in host memory stands in"
                self._stale = self._stale or told
        self.files = tuple(found)

    @property
    def is_stale(self) -> bool:
        """Whether the library's own call would read a file that is not what it was."""
        return bool(self._stale) and self.own_call_reads is WeightsTier.FILE

    @property
    def own_call_reads(self) -> WeightsTier | None:
        """Where the library's own call takes the weights of the placed model from; None where it could not move it."""
        return self._placed.reads if self._placed is not None else None

    @property
    def model(self) -> Model | None:
        """The placed model; None where there is none."""
        return self._placed.model if self._placed is not None else None

    @property
    def context(self) -> Context | None:
        """Its context; None where there is none."""
        return self._placed.context if self._placed is not None else None

    def keeps(self, placement: Placement) -> bool:
        """Tell whether the model of a placement is loaded and waits."""
        params = model_params(placement)
        return any(one.params == params for one in self._kept)

    def drop_kept(self, but: Placement | None = None) -> None:
        """Free what is kept and does not serve, but for the model of one placement."""
        params = model_params(but) if but is not None else None
        kept, self._kept = self._kept, []
        self._kept.extend(one for one in kept if one.params == params)
        for one in kept:
            if one.params != params:
                one.free()

    def leave(self, target: Placement, *, keep: bool) -> None:
        """Go out of the placement: free it and all that is kept; with ``keep`` it stays, as does a kept target."""
        self.why = ""
        if not keep:
            self.free()
            return
        self.drop_kept(but=target)
        placed, self._placed = self._placed, None
        if placed is not None:
            self._kept.append(placed)

    def place(
        self,
        placement: Placement,
        progress: Callable[[float], None] | None = None,
        *,
        cancellable: bool = True,
        tier: WeightsTier = WeightsTier.FILE,
    ) -> None:
        """Take the kept model of a placement, or else load one: from the copy where ``tier`` is pinned, else the file.

        What the copy cannot give is loaded from the file, and :attr:`why` says why.

        Raises:
            FileChanged: a file is not what it was, or was written to meanwhile.
            llama_native.CallFailed: the library returned NULL.
            llama_native.LoadCancelled: the session's cancel flag was set, and ``cancellable``.
        """

        def on_progress(share: float) -> bool:
            if self.on_tick is not None:
                self.on_tick()
            if progress is not None:
                progress(share)
            return not (cancellable and self.is_cancelled())

        params = model_params(placement)
        for index, one in enumerate(self._kept):
            if one.params == params:
                self._placed, self.came_from = self._kept.pop(index), WeightsTier.RESIDENT
                return

        def load_file() -> Model:
            path = self.copy.path if self._stale and self.copy is not None else self.model_path
            return Model.load(self.library, path, params, progress=on_progress, endable=cancellable)

        self.confirm_files()
        started, model, came_from = perf_counter(), None, WeightsTier.FILE
        if tier is WeightsTier.PINNED and self.copy is not None:
            model = self._uploaded(self.copy, params, on_progress, endable=cancellable)
        if model is not None:
            came_from = WeightsTier.PINNED
        else:
            model = self._or_alone(load_file)
        reads = came_from if came_from is WeightsTier.FILE or model.refill is not None else None
        self._placed = _Placed(params, model, reads)
        self.load_ms[came_from] = (perf_counter() - started) * 1e3
        # Beside one that stays it is the first half of a tier; alone it is a load like any other.
        self.came_from = WeightsTier.RESIDENT if self._kept else came_from
        self.confirm_files()
        self.why = "; ".join(filter(None, (self.why, self._stale)))

    def _uploaded(
        self, copy: HostCopy, params: ModelParams, progress: Callable[[float], bool], *, endable: bool
    ) -> Model | None:
        """Make the model from the copy; None where that cannot be, and :attr:`why` says why."""
        if copy.why:
            self.why = copy.why
            return None
        try:
            return load_user_model(
                self.library, copy.weights, params, name=self.model_path, progress=progress, endable=endable
            )
        except (CallFailed, CapabilityMissing, TensorUnknown) as error:
            self.why = f"the copy of the weights could not be used: {error}"
            return None

    def build(self, placement: Placement) -> Placement:
        """Make the context and apply the adapters, which are loaded with the first context of a placed model.

        A kept context of the same parameters is emptied and taken.

        Returns:
            The placement with what the library resolved: context size and flash attention. Batch sizes stay as they
            were wished; the library cuts them to each context.

        Raises:
            llama_native.CallFailed: the library returned NULL, or refused the scales.
            AdapterInvalid: an adapter does not fit the model.
            FileChanged: an adapter's file was written to meanwhile.
        """
        placed = self._placed
        if placed is None:
            raise AssertionError("a context is built on a placed model")
        params = context_params(placement, embeddings=self.embeddings)
        if placed.context is not None and placed.built is not None and params in (placed.context.params, placed.built):
            placed.context.clear()
            return dataclasses.replace(
                placement, n_ctx=placed.context.n_ctx, flash_attn=placing.FlashAttn[placed.built.flash_attn.name]
            )
        placed.free_context()
        said: list[str] = []
        is_open = placement.flash_attn is placing.FlashAttn.AUTO
        # Only a choice that is left to the library has to be heard; listening costs a call for every line of its log.
        stop = self.library.log.listen(lambda _level, text: said.append(text)) if is_open else lambda: None
        try:
            poll = _poller(self.on_tick, self.is_cancelled)
            context = placed.context = self._or_alone(lambda: Context(placed.model, params, abort=poll))
        finally:
            stop()
        if self.adapters:
            if not placed.adapters:
                for one in self.adapters:
                    placed.adapters.append(_loaded(placed.model, one))
                self.confirm_files()
            scales = (one.scale for one in self.adapters)
            context.set_adapters(list(zip(placed.adapters, scales, strict=True)))
        resolved = dataclasses.replace(placement, n_ctx=context.n_ctx, flash_attn=_resolved_flash_attn(placement, said))
        placed.built = context_params(resolved, embeddings=self.embeddings)
        return resolved

    def _or_alone(self, make: Callable[[], _Made]) -> _Made:
        """Make something; where memory is short for it beside what is kept, make it alone."""
        try:
            return make()
        except CallFailed as error:
            if not self._kept or self.is_cancelled() or not is_shortage(error.log_tail):
                raise
            self.why = f"both placements did not fit: {telling_line(error.log_tail) or error}"
        self.drop_kept()
        if self.came_from is WeightsTier.RESIDENT:
            self.came_from = WeightsTier.FILE
        return make()

    def rebuild(self, placement: Placement) -> None:
        """Throw the context away and make a new, empty one on the same model, with the same adapters."""
        if self._placed is not None:
            self._placed.free_context()
        self.build(placement)

    def moved(self, placement: Placement) -> None:
        """Note that the library itself has moved the model into a placement."""
        if (placed := self._placed) is not None:
            placed.params, placed.built = model_params(placement), None
            self.came_from = placed.reads or self.came_from
            self.why = self._stale

    @property
    def live_context(self) -> Context:
        """The context.

        Raises:
            Parked: there is none, because one that was lost could not be made again.
        """
        if (context := self.context) is None:
            raise Parked(None, "its context was lost and could not be made again")
        return context

    def free(self) -> None:
        """Free context, adapters and model, whichever there are, and all that is kept."""
        self.free_failed()
        self.drop_kept()

    def close(self) -> None:
        """Free everything, and let the copy go."""
        self.free()
        if self.copy is not None:
            self.copy.close()

    def free_failed(self) -> None:
        """Free what is placed; what is kept stays."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.free()


@dataclass(slots=True)
class _Placed:
    """A loaded model with what stands on it.

    Attributes:
        params: how it was loaded.
        model: it.
        reads: where the library's own call takes its weights from; None where it could not move it.
        context: its context; None where there is none.
        built: the context's parameters, with what the library resolved in place of what was left to it.
        adapters: those that were loaded for it.
    """

    params: ModelParams
    model: Model
    reads: WeightsTier | None
    context: Context | None = None
    built: ContextParams | None = None
    adapters: list[Adapter] = dataclasses.field(default_factory=list)

    def free_context(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            context.close()

    def free(self) -> None:
        self.free_context()
        adapters, self.adapters = self.adapters, []
        for one in (*adapters, self.model):
            one.close()


def _poller(on_tick: Callable[[], None] | None, is_cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """Return what answers the library between two nodes of a graph: whether to stop. It does not hold the engine."""

    def poll() -> bool:
        if on_tick is not None:
            on_tick()
        return is_cancelled()

    return poll


def _loaded(model: Model, adapter: LoadedAdapter) -> Adapter:
    try:
        return Adapter(model, adapter.path)
    except CallFailed as error:
        said = error.log_tail[-1].strip() if error.log_tail else "the library refused it"
        raise AdapterInvalid(Path(adapter.path), said) from error


def _resolved_flash_attn(placement: Placement, said: Sequence[str]) -> placing.FlashAttn:
    if placement.flash_attn is not placing.FlashAttn.AUTO:
        return placement.flash_attn
    return placing.FlashAttn.OFF if any(map(FLASH_TURNED_OFF.search, said)) else placing.FlashAttn.ON

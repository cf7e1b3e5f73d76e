"""One model's part of the codec's sweep: states out of the real library, read, written again and given back.

Runs in a child of `sweep_codec`, which survives its death. Says on stdout, one JSON object a line, which cell it is
in and where, and what came of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import statecodec
from llama_native import (
    Context,
    Library,
    Model,
    NativeError,
    sequence_state_get,
    sequence_state_set,
    sequence_state_size,
    state_get,
    state_set,
    state_size,
)
from splitctl.engine.engine import context_params, model_params
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.placement import FlashAttn, Placement
from splitctl.switching import tables
from splitctl.switching.state_facts import state_facts
from statecodec import AttentionSection, RecurrentSection, StateImage, TensorType
from tools.children import say
from tools.sweep_cells import LAYOUTS, Mismatch, fill, guarded, need, placement_of

#: Types of K and V. Without flash attention a quantized K needs a plain V.
CACHES = {"f16": ("f16", "f16"), "q8_0": ("q8_0", "q8_0"), "q8_0+f16": ("q8_0", "f16")}
FLASH = ("on", "off")
FORMS = ("context", "sequence")

#: A context's setting: layout, cache type, flash attention.
Setting = tuple[str, str, str]
#: How a state was read, comparable.
Reading = list[list[Any]]


def settings() -> list[Setting]:
    """Every kind of context that a model is put into."""
    return [(layout, cache, flash) for layout in LAYOUTS for cache in CACHES for flash in FLASH]


def all_cells() -> list[str]:
    """Name every cell of a model: layout, cache type, flash attention, and the form that is taken."""
    return [":".join((*setting, form)) for setting in settings() for form in FORMS]


def codec_placement(setting: Setting) -> Placement:
    """Give a setting as a placement of one thread on one device."""
    layout, cache, flash = setting
    plain = placement_of("none", layout)
    chosen = FlashAttn.ON if flash == "on" else FlashAttn.OFF
    type_k, type_v = CACHES[cache]
    return dataclasses.replace(plain, devices=("CPU",), type_k=type_k, type_v=type_v, flash_attn=chosen)


class CannotDo(Exception):
    """The library alone does not do what the cell needs; nothing of ours has been asked yet."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken from one context.

    Args:
        setting: the context's.
        n_ctx: its cells.
        whole: the state of all sequences.
        parts: sequence id -> the state of that one.
        lengths: sequence id -> tokens that it holds.
        has_memory: whether the library says that the context keeps anything.
    """

    setting: Setting
    n_ctx: int
    whole: bytes
    parts: dict[int, bytes]
    lengths: dict[int, int]
    has_memory: bool


class CodecSweep:
    """The cells of one model."""

    def __init__(self, model: Model, path: Path) -> None:
        self.model = model
        self.version = model.library.version
        self.facts: ModelFacts = read_facts(path)
        self._taken: Taken | None = None
        self._whole: Judged | None = None

    def try_cell(self, cell: str) -> None:
        """Try one cell; what the library alone cannot do is a refusal."""
        try:
            self.run(cell)
        except CannotDo as cannot:
            say(cell=cell, status="refused", code=cannot.code, text=cannot.text)

    def run(self, cell: str) -> None:
        """Try one cell and say what came of it.

        Raises:
            CannotDo: the library alone does not do it.
            Mismatch: a check that did not hold.
            statecodec.StateFormatError: a state that the codec does not read.
        """
        layout, cache, flash, form = cell.split(":")
        setting = (layout, cache, flash)
        say(cell=cell, stage="taking")
        if self._taken is None or self._taken.setting != setting:
            self._taken = self._whole = None
            self._taken = self._take(setting)
        taken = self._taken
        say(cell=cell, stage="reading")
        if self._whole is None:
            self._whole = self._read(taken, taken.whole, None)
        judged = [self._whole] if form == "context" else self._read_parts(taken, self._whole.image)
        say(cell=cell, stage="restoring")
        try:
            if form == "context":
                self._give_whole(taken, judged[0].image)
            else:
                self._give_parts(taken, [one.image for one in judged])
        except NativeError as error:
            raise CannotDo("restore-refused", str(error)) from error
        reading = judged[0].reading
        need(all(one.reading == reading for one in judged), "two sequences' states read differently")
        ambiguous = sorted({name for one in judged for name in one.ambiguous})
        say(cell=cell, status="passed", reading=reading, ambiguous=ambiguous, n_states=len(judged))

    def _context(self, setting: Setting) -> Context:
        params = context_params(codec_placement(setting), embeddings=self.facts.gives_embeddings)
        return Context(self.model, params)

    def _take(self, setting: Setting) -> Taken:
        """Fill a context and take its state and that of every sequence."""
        try:
            context = self._context(setting)
        except NativeError as error:
            raise CannotDo("no-context", str(error)) from error
        with context:
            try:
                lengths = fill(self.model, context, with_rounds=context.has_memory)
            except NativeError as error:
                raise CannotDo("no-decode", str(error)) from error
            whole = written(state_size(context), lambda buffer: state_get(context, buffer))
            parts = {seq_id: sequence_written(context, seq_id) for seq_id in lengths}
            if context.has_memory:
                held = {seq_id: context.pos_max(seq_id) + 1 for seq_id in lengths}
                need(held == lengths, f"the library holds {held} tokens and was given {lengths}")
            return Taken(setting, context.n_ctx, whole, parts, lengths, context.has_memory)

    def _read_parts(self, taken: Taken, whole: StateImage) -> list[Judged]:
        """Read every sequence's state."""
        return [self._read(taken, state, whole) for state in taken.parts.values()]

    def _read(self, taken: Taken, state: bytes, whole: StateImage | None) -> Judged:
        """Read a state with nothing known and with more and more, write it again, and compare it with what was put in.

        Args:
            taken: where it is from.
            state: its bytes.
            whole: the image of all sequences, where the state is of one.

        Returns:
            How it reads.

        Raises:
            Mismatch: it means different things to different readers, or not what was put in.
            statecodec.StateFormatError: it does not read, though everything is known.
        """
        image: StateImage | None = None
        ambiguous = []
        for name, facts in self._levels(taken, whole):
            try:
                found = statecodec.parse(state, facts=facts)
            except statecodec.Ambiguous:
                ambiguous.append(name)
                continue
            if image is not None:
                need(exactly(found) == exactly(image), f"it reads differently when {name} is known")
            image = found
        if image is None:
            statecodec.parse(state, facts=self._levels(taken, whole)[-1][1])
            raise Mismatch("nothing that is known decides between its readings")
        narrow = dataclasses.replace(self._session_facts(taken), **shape_of(image))
        need(exactly(statecodec.parse(state, facts=narrow)) == exactly(image), "it reads differently the second time")
        need(b"".join(statecodec.emit(image)) == state, "what is written again is not what was read")
        self._need_content(taken, state, image)
        return Judged(image, reading_of(image), tuple(ambiguous))

    def _levels(self, taken: Taken, whole: StateImage | None) -> list[tuple[str, statecodec.ModelFacts | None]]:
        """What may be known: nothing, the model's file, the session's context; and the sections, from a whole state."""
        session = self._session_facts(taken)
        levels = [("nothing", None), ("header", state_facts(self.facts)[0]), ("session", session)]
        if whole is not None:
            levels.append(("whole state", dataclasses.replace(session, **shape_of(whole))))
        return levels

    def _session_facts(self, taken: Taken) -> statecodec.ModelFacts:
        """What the codec knows of a session before a switch."""
        n_seq_max = codec_placement(taken.setting).n_seq_max
        facts = self.facts
        return statecodec.ModelFacts(
            architecture=facts.architecture, n_layer=facts.n_layer, n_seq_max=n_seq_max, n_ctx=taken.n_ctx
        )

    def _need_content(self, taken: Taken, state: bytes, image: StateImage) -> None:
        """Compare an image with what was put into the context: tokens, sequences, types."""
        need(image.n_bytes == len(state), f"{len(state)} bytes were read as {image.n_bytes}")
        need(image.content is statecodec.Content.FULL, f"a whole state reads as {image.content.value}")
        if not taken.has_memory:
            need(not image.sections, "a model without a memory has sections")
            return
        need(bool(image.sections), "a model with a memory has no sections")
        if image.is_opaque:
            need(len(image.sections) == 1, "an opaque state has other sections")
            return
        seq_id = image.source_seq_id
        lengths = taken.lengths if seq_id is None else {seq_id: taken.lengths[seq_id]}
        first = image.sections[0]
        if isinstance(first, AttentionSection):
            kept = {one: (n, 0, n - 1) for one, n in lengths.items()}
            need_types(first, taken.setting[1])
        else:
            kept = {one: (1, n - 1, n - 1) for one, n in lengths.items()}
        found = {one: tuple(span) for one, span in image.sequences().items()}
        need(found == kept, f"(cells, first and last position) are {found}, put in were {kept}")

    def _give_whole(self, taken: Taken, image: StateImage) -> None:
        """Give a fresh context what the codec writes of all sequences, and take it out again.

        Raises:
            CannotDo: it is a build that is known to lose streams.
            NativeError: the library refuses it.
            Mismatch: it gives something else back.
        """
        given = b"".join(statecodec.emit(image))
        with self._context(taken.setting) as context:
            n = state_set(context, given)
            need(n == len(given), f"the library took {n} of {len(given)} bytes")
            back = written(state_size(context), lambda buffer: state_get(context, buffer))
        if back != taken.whole and self._loses_streams(taken.setting):
            text = f"{self.version} restores the last stream alone of a context that has one for each sequence"
            raise CannotDo("streams-lost-on-restore", text)
        need(back == taken.whole, "the library gives something else back")

    def _loses_streams(self, setting: Setting) -> bool:
        """Whether this build is known to lose streams, as a rule of the switch says too."""
        number, placement = tables.build_number(self.version), codec_placement(setting)
        has_streams = placement.n_seq_max > 1 and not placement.kv_unified
        return has_streams and number is not None and number < tables.ALL_STREAMS_RESTORED_SINCE

    def _give_parts(self, taken: Taken, images: list[StateImage]) -> None:
        """Give a fresh context what the codec writes of each sequence, and take them out again.

        Raises:
            NativeError: the library refuses one.
            Mismatch: it gives something else back.
        """
        with self._context(taken.setting) as context:
            for seq_id, image in zip(taken.parts, images, strict=True):
                given = b"".join(statecodec.emit(image))
                n = sequence_state_set(context, given, seq_id)
                need(n == len(given), f"the library took {n} of {len(given)} bytes of sequence {seq_id}")
            for seq_id, part in taken.parts.items():
                back = sequence_written(context, seq_id)
                need(back == part, f"the library gives something else back for sequence {seq_id}")


@dataclass(frozen=True, slots=True)
class Judged:
    """How a state reads.

    Args:
        image: the state.
        reading: its sections, comparable between the cells of a model.
        ambiguous: what was known where it read in several ways.
    """

    image: StateImage
    reading: Reading
    ambiguous: tuple[str, ...]


def written(n_bytes: int, get: Callable[[bytearray], int]) -> bytes:
    """Take bytes of the announced number out of the library."""
    buffer = bytearray(n_bytes)
    n = get(buffer) if n_bytes else 0
    need(n == n_bytes, f"the library announced {n_bytes} bytes and wrote {n}")
    return bytes(buffer)


def sequence_written(context: Context, seq_id: int) -> bytes:
    """Take one sequence's state."""
    size = sequence_state_size(context, seq_id)
    return written(size, lambda buffer: sequence_state_get(context, buffer, seq_id))


def shape_of(image: StateImage) -> dict[str, Any]:
    """Facts that an image shows of every state of its kind."""
    caches = [one for one in image.sections if isinstance(one, AttentionSection)]
    return {
        "versions": image.versions,
        "sections": tuple(section.kind.value for section in image.sections),
        "has_ext": any(one.ext_bytes for one in caches) if caches else None,
        "has_v": tuple(any(stream.values for _, stream in one.filled()) for one in caches if one.n_layers),
    }


def reading_of(image: StateImage) -> Reading:
    """Every section as kind, layers, whether it has V (or a second history), and bytes of the extra record."""
    told: Reading = []
    for section in image.sections:
        if isinstance(section, AttentionSection):
            has_v = any(stream.values for _, stream in section.filled())
            told.append([section.kind.value, section.n_layers, has_v, section.ext_bytes])
        elif isinstance(section, RecurrentSection):
            told.append([section.kind.value, section.n_layers, any(one.history for one in section.layers), 0])
        else:
            told.append([section.kind.value, section.name, False, 0])
    return told


def exactly(image: StateImage) -> list[Any]:
    """Everything that two readings of the same bytes can differ in, but the versions that are possible."""
    places = [(section.offset, section.n_cells) for section in image.sections]
    return [image.form, image.architecture, image.source_seq_id, image.content, places, reading_of(image)]


def need_types(section: AttentionSection, cache: str) -> None:
    """Fail the cell unless the main cache has the types that were asked for."""
    for wanted, which in zip(CACHES[cache], ("keys", "values"), strict=True):
        kinds = {layer.kind for _, stream in section.filled() for layer in getattr(stream, which)}
        found = sorted(kind.name for kind in kinds)
        need(kinds <= {TensorType[wanted.upper()]}, f"asked for {which} of {wanted}, found {found}")


def main(arguments: Sequence[str]) -> int:
    """Run cells.

    Args:
        arguments: one JSON object: library, path, cells.

    Returns:
        Exit code 0, unless the process dies; 1 when the library does not load the model.
    """
    job = json.loads(arguments[0])
    say(stage="loading")
    library = Library.open(job["library"], env=os.environ)
    try:
        model = Model.load(library, os.fspath(job["path"]), model_params(codec_placement(settings()[0])))
    except NativeError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    with model:
        sweep = CodecSweep(model, Path(job["path"]))
        for cell in job["cells"]:
            guarded(sweep.try_cell, cell)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

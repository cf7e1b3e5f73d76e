"""Make the golden states of tests/golden/codec again, with real builds.

    python -m tools.make_goldens [--builds DIR] [--out DIR] [NAME...]     NAME: only goldens whose name contains it

Each golden is what one build wrote for one model, compressed, with a line in the manifest that names the build, the
model, the settings and the hash. Builds that are not there are passed over, and their goldens stay as they are. States
hold floating-point results, so another processor may give other bytes; the manifest's hash is of the kept file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_native import Library
from llama_native.user_model import create_tensors
from tools import make_dummies
from tools.gguf_out import write_gguf
from tools.places import CHECKOUT, builds_folder, default_folder, small_model

_F32, _F16, _Q8_0 = 0, 1, 8
_XLLAMACPP_OLD = "xllamacpp/xllamacpp.cpython-311-x86_64-linux-gnu.so"
_XLLAMACPP = "xllamacpp/xllamacpp.abi3.so"
_GOLDENS = CHECKOUT / "tests" / "golden" / "codec"


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """One build: its folder, the library in it, and its epoch of context parameters (see capture_state)."""

    folder: str
    library: str
    epoch: str


BUILDS = {
    "xllamacpp-0.1.0": BuildInfo("xllamacpp-0.1.0", _XLLAMACPP_OLD, "2025-03"),
    "xllamacpp-0.1.20": BuildInfo("xllamacpp-0.1.20", _XLLAMACPP_OLD, "2025-06"),
    "xllamacpp-0.2.0": BuildInfo("xllamacpp-0.2.0", _XLLAMACPP_OLD, "2025-08"),
    "xllamacpp-0.2.14": BuildInfo("xllamacpp-0.2.14", _XLLAMACPP, "2026-04"),
    "xllamacpp-2026.4.8929": BuildInfo("xllamacpp-2026.4.8929", _XLLAMACPP, "2026-04"),
    "xllamacpp-2026.6.9713": BuildInfo("xllamacpp-2026.6.9713", _XLLAMACPP, "2026-06"),
    "xllamacpp-2026.8.10566": BuildInfo("xllamacpp-2026.8.10566", _XLLAMACPP, "2026-08"),
    "xllamacpp-2026.9.11063": BuildInfo("xllamacpp-2026.9.11063", _XLLAMACPP, "2026-08"),
    "xllamacpp-2026.10.11549": BuildInfo("xllamacpp-2026.10.11549", _XLLAMACPP, "2026-10"),
    "llama-cpp-python-0.3.36": BuildInfo("llama-cpp-python-0.3.36", "lib/libllama.so", "2026-08"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A model that no recipe describes.

    Args:
        recipe: the recipe that it starts from.
        changes: metadata values that differ, without the architecture's prefix.
        drops: tensors left out, as a pattern on their names: builds of 2025 refuse a file with tensors unknown to them.
    """

    recipe: str
    changes: dict[str, object]
    drops: str


_NEWER = r"scale$|rope_freqs|dense_2|^output\.bias"
VARIANTS: dict[str, Variant] = {
    "llama-plain": Variant("llama+mqa", {}, rf"{_NEWER}|bias$"),
    "gemma2-plain": Variant("gemma2+mqa", {}, rf"{_NEWER}|bias$"),
    "qwen2vl-plain": Variant("qwen2vl+mqa", {}, _NEWER),
    "lfm2-plain": Variant("lfm2+mqa", {}, rf"{_NEWER}|bias$|^output\.weight"),
    "mamba-small": Variant(
        "mamba", {"ssm.inner_size": 64, "ssm.state_size": 8, "embedding_length": 32, "block_count": 2}, _NEWER
    ),
    "qwen4exp-small": Variant("qwen4exp", {"ssm.inner_size": 128, "ssm.state_size": 64}, r"^$"),
}


@dataclass(frozen=True, slots=True)
class Golden:
    """One state to take.

    Args:
        name: file name without the ending.
        build: key of `BUILDS`.
        model: recipe or variant name, or smollm2.
        form: context, sequence, session_file or sequence_file.
        n_tokens: tokens of each sequence.
        n_seq_max: sequences of the context.
        unified: one stream for all sequences.
        flash: flash attention on.
        type_k: type of the K rows.
        type_v: type of the V rows.
        n_ctx: cells of the context.
        seq_id: sequence taken, of sequence forms.
        flags: flags of the sequence call; -1: the call without flags.
    """

    name: str
    build: str
    model: str
    form: str = "context"
    n_tokens: tuple[int, ...] = (5,)
    n_seq_max: int = 1
    unified: bool = True
    flash: bool = True
    type_k: int = _F16
    type_v: int = _F16
    n_ctx: int = 256
    seq_id: int = 0
    flags: int = -1


def _four(name: str, build: str, model: str, *, unified: bool, form: str = "context", seq_id: int = 0) -> Golden:
    return Golden(
        name, build, model, form, n_tokens=(2, 1, 3, 1), n_seq_max=4, unified=unified, n_ctx=256, seq_id=seq_id
    )


def goldens() -> tuple[Golden, ...]:
    """The whole list."""
    listed: list[Golden] = []
    for build, short in (
        ("xllamacpp-0.1.20", "x0120"),
        ("xllamacpp-0.2.0", "x020"),
        ("xllamacpp-0.2.14", "x0214"),
        ("xllamacpp-2026.4.8929", "x8929"),
        ("xllamacpp-2026.8.10566", "x10566"),
        ("llama-cpp-python-0.3.36", "l0336"),
        ("xllamacpp-2026.10.11549", "x11549"),
    ):
        dense, window = "llama-plain", "gemma2-plain"
        listed += [
            Golden(f"{short}-dense", build, dense),
            Golden(f"{short}-dense-flash-off", build, dense, flash=False),
            Golden(f"{short}-dense-q8", build, dense, type_k=_Q8_0, type_v=_Q8_0),
            _four(f"{short}-dense-unified4", build, dense, unified=True),
            _four(f"{short}-dense-streams4", build, dense, unified=False),
            Golden(f"{short}-dense-sequence", build, dense, "sequence"),
            Golden(f"{short}-dense-session-file", build, dense, "session_file"),
            Golden(f"{short}-dense-sequence-file", build, dense, "sequence_file"),
            Golden(f"{short}-window", build, window),
            Golden(f"{short}-mrope", build, "qwen2vl-plain"),
            Golden(f"{short}-mrope-sequence", build, "qwen2vl-plain", "sequence"),
        ]
        if short != "x0120":  # that build aborts while it decodes this model
            listed += [
                Golden(f"{short}-recurrent", build, "mamba-small"),
                Golden(f"{short}-recurrent-sequence", build, "mamba-small", "sequence"),
            ]
    for build, short in (("xllamacpp-2026.10.11549", "x11549"), ("llama-cpp-python-0.3.36", "l0336")):
        listed += [
            Golden(f"{short}-hybrid", build, "lfm2moe", n_tokens=(3,)),
            Golden(f"{short}-hybrid-sequence", build, "lfm2moe", "sequence", n_tokens=(2,)),
            Golden(f"{short}-hybrid-window", build, "lfm2+mqa", n_tokens=(4,)),
            Golden(f"{short}-mla", build, "deepseek2", n_tokens=(2,)),
            Golden(f"{short}-mla-indexer", build, "deepseek32", n_tokens=(2,)),
            Golden(f"{short}-three-sections", build, "dots3note", n_tokens=(2,)),
            Golden(f"{short}-encoder", build, "bert"),
            _four(f"{short}-dense-streams4-sequence", build, "llama-plain", unified=False, form="sequence", seq_id=2),
            Golden(f"{short}-window-partial", build, "gemma2-plain", "sequence", flags=1),
            Golden(f"{short}-dense-device", build, "llama-plain", "sequence", flags=2),
        ]
    latest = "xllamacpp-2026.10.11549"
    listed += [
        Golden("x11549-history", latest, "qwen4exp-small", n_tokens=(2,)),
        Golden("x11549-dense-f32", latest, "llama-plain", type_k=_F32, type_v=_F32, n_tokens=(3,)),
        Golden("x11549-dense-q8-f16", latest, "llama-plain", type_k=_Q8_0, n_tokens=(3,)),
        Golden("x11549-smollm2", latest, "smollm2", n_tokens=(3,)),
        Golden("x11549-smollm2-q8", latest, "smollm2", n_tokens=(3,), type_k=_Q8_0, type_v=_Q8_0),
        Golden("x10566-hybrid", "xllamacpp-2026.8.10566", "lfm2-plain", n_tokens=(2,)),
        Golden("x8929-hybrid", "xllamacpp-2026.4.8929", "lfm2-plain", n_tokens=(2,)),
        Golden("x0214-hybrid", "xllamacpp-0.2.14", "lfm2-plain", n_tokens=(2,)),
        Golden("x0214-hybrid-sequence", "xllamacpp-0.2.14", "lfm2-plain", "sequence", n_tokens=(2,)),
        Golden("x020-hybrid", "xllamacpp-0.2.0", "lfm2-plain", n_tokens=(2,)),
        Golden("x010-dense", "xllamacpp-0.1.0", "llama-plain", n_tokens=(2,)),
        Golden("x010-dense-sequence", "xllamacpp-0.1.0", "llama-plain", "sequence", n_tokens=(2,)),
    ]
    return tuple(listed)


def make_variants(folder: Path) -> None:
    """Make the models that no recipe describes; the library that makes them is the first one found."""
    library = Library.open(env=os.environ)
    recipes = make_dummies.recipes()
    for name, variant in VARIANTS.items():
        entries = recipes[variant.recipe]
        arch = next(str(value) for key, _, value in entries if key == "general.architecture")
        changed = {f"{arch}.{key}": value for key, value in variant.changes.items()}
        metadata = make_dummies.to_metadata([(key, kind, changed.get(key, value)) for key, kind, value in entries])
        slots = [slot for slot in create_tensors(library, metadata) if not re.search(variant.drops, slot.name)]
        weights = (make_dummies.random_weights(slot, n_expert=2) for slot in slots)
        write_gguf(folder / f"{name}.gguf", metadata, slots, weights)


def find_model(name: str, variants: Path) -> Path:
    """The file of a model by its name here.

    Raises:
        FileNotFoundError: it was not made or fetched.
    """
    if name in VARIANTS:
        return variants / f"{name}.gguf"
    if name == "smollm2":
        path = small_model()
    else:
        path = make_dummies.model_path(default_folder(), name, make_dummies.recipes()[name])
    if not path.exists():
        raise FileNotFoundError(path)
    return path


def capture(build: BuildInfo, builds: Path, model: Path, wanted: Sequence[Golden]) -> dict[str, bytes]:
    """Take states in a child process; what it wrote before it died is kept.

    Returns:
        Name -> blob of the states that were taken.
    """
    with tempfile.TemporaryDirectory() as scratch:
        jobs = []
        for golden in wanted:
            job = asdict(golden)
            if golden.flags < 0:
                del job["flags"]
            jobs.append(job)
        request = {
            "library": str(builds / build.folder / build.library),
            "epoch": build.epoch,
            "model": str(model),
            "folder": scratch,
            "jobs": jobs,
        }
        child = subprocess.run(
            [sys.executable, "-m", "tools.capture_state"],
            cwd=CHECKOUT,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
        if child.returncode:
            said = child.stderr.strip().splitlines()
            print(f"{build.folder} {model.name}: {said[-1] if said else child.returncode}", file=sys.stderr)
        taken = [json.loads(line)["name"] for line in child.stdout.splitlines()]
        return {name: Path(scratch, name).read_bytes() for name in taken}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the goldens that are asked for and write the manifest.

    Returns:
        Exit code: 0 when every wanted golden was made.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--builds", type=Path, default=builds_folder())
    parser.add_argument("--out", type=Path, default=_GOLDENS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    manifest_path = options.out / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    wanted = [g for g in goldens() if not options.names or any(name in g.name for name in options.names)]
    made = 0
    with tempfile.TemporaryDirectory() as scratch:
        if any(golden.model in VARIANTS for golden in wanted):
            make_variants(Path(scratch))
        groups: dict[tuple[str, str], list[Golden]] = {}
        for golden in wanted:
            groups.setdefault((golden.build, golden.model), []).append(golden)
        for (build, model), group in groups.items():
            if not (options.builds / BUILDS[build].folder).exists():
                print(f"{build} is not there: its goldens stay as they are", file=sys.stderr)
                continue
            blobs = capture(BUILDS[build], options.builds, find_model(model, Path(scratch)), group)
            for golden in group:
                blob = blobs.get(golden.name)
                if blob is None:
                    continue
                (options.out / f"{golden.name}.xz").write_bytes(lzma.compress(blob, preset=9))
                fields = {key: value for key, value in asdict(golden).items() if key != "name"}
                digest = hashlib.sha256(blob).hexdigest()
                manifest[golden.name] = {**fields, "n_bytes": len(blob), "sha256": digest}
                made += 1
    ordered = json.dumps(dict(sorted(manifest.items())), indent=1)
    manifest_path.write_text(ordered + "\n")
    print(f"{made} of {len(wanted)} made")
    return 0 if made == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())

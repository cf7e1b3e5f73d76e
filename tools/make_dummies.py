"""Make small models with random weights of nearly every architecture, from metadata alone, by a real libllama.

    python -m tools.make_dummies [--out DIR] [--json] [--all | NAME...]      NAME: see --list
    python -m tools.make_dummies --big 500                                  one llama model of about 500 MB

Each model is made once and kept under a name that holds its recipe's hash. Making one may abort inside the library, so
a child does it; the parent goes on with the rest and says at the end which could not be made and why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_native import Library, NativeError
from llama_native.user_model import MetaKind, MetaValue, TensorSlot, create_tensors
from tools.children import run_child, say
from tools.gguf_out import write_gguf
from tools.make_large import Shape
from tools.places import default_folder

#: Part of every recipe's hash: raise it when the weights are drawn in another way.
RECIPE_EPOCH = 1
_F32, _I32, _F16 = 0, 26, 1
_STD = 0.1


def recipes() -> dict[str, list[tuple[str, str, object]]]:
    """Read the recipes that the package carries.

    Returns:
        Recipe name -> (key, kind, value) of each metadata entry; a list value is an array.
    """
    text = resources.files("splitctl").joinpath("data", "dummy-recipes.json").read_text(encoding="utf-8")
    return {name: [(key, kind, value) for key, kind, value in items] for name, items in json.loads(text).items()}


def model_path(folder: Path, name: str, recipe: Sequence[tuple[str, str, object]]) -> Path:
    """Name the file of a recipe's model.

    Args:
        folder: the folder of all models.
        name: the recipe's name.
        recipe: its entries, which the name in the file system depends on.

    Returns:
        ``NAME-HASH.gguf`` in the folder.
    """
    told = json.dumps([RECIPE_EPOCH, list(map(list, recipe))], separators=(",", ":"))
    return folder / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:10]}.gguf"


def to_metadata(recipe: Sequence[tuple[str, str, object]]) -> tuple[MetaValue, ...]:
    """Turn a recipe's entries into typed metadata."""
    typed = []
    for key, kind, value in recipe:
        plain = tuple(value) if isinstance(value, list) else value
        typed.append(MetaValue(key, MetaKind.of(kind), plain))  # type: ignore[arg-type]
    return tuple(typed)


def random_weights(slot: TensorSlot, *, n_expert: int = 1) -> memoryview:
    """Draw a tensor's weights, the same ones for the same name and shape everywhere.

    Args:
        slot: the tensor.
        n_expert: experts of the model, for tables that name them.

    Returns:
        Its data: normal(0, 0.1), plus 1 for the weights of norms, negative for ``ssm_a``; float32, C order.

    Raises:
        ValueError: a type that no recipe asks for.
    """
    n_elements = int(np.prod(slot.dims))
    if slot.type_id == _I32:
        rows = np.arange(n_elements, dtype=np.int64) // slot.dims[0] + np.arange(n_elements) % slot.dims[0]
        return _bytes_of((rows % max(n_expert, 1)).astype(np.int32))
    if slot.type_id not in {_F32, _F16}:
        msg = f"tensor {slot.name} has type {slot.type_id}; only f32, f16 and i32 are drawn"
        raise ValueError(msg)
    seed = int.from_bytes(hashlib.sha256(slot.name.encode()).digest()[:8], "little")
    weights: npt.NDArray[np.float32] = np.random.default_rng(seed).standard_normal(n_elements, dtype=np.float32)
    weights *= _STD
    if "norm" in slot.name and slot.name.endswith(".weight"):
        weights += 1
    elif "ssm_a" in slot.name:
        weights = -np.abs(weights)
    if slot.type_id == _F16:
        return _bytes_of(weights.astype(np.float16))
    return _bytes_of(weights)


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """View an array's bytes, C order."""
    return array.reshape(-1).view(np.uint8).data


def make(library: Library, path: Path, recipe: Sequence[tuple[str, str, object]]) -> None:
    """Make one model.

    Args:
        library: the open library, which says what tensors the architecture has.
        path: where it goes.
        recipe: its metadata.

    Raises:
        NativeError: the library made no such model.
        OSError: the file cannot be written.
    """
    metadata = to_metadata(recipe)
    slots = create_tensors(library, metadata)
    experts = [item.value for item in metadata if item.key.endswith(".expert_count")]
    n_expert = experts[0] if experts and isinstance(experts[0], int) else 1
    write_gguf(path, metadata, slots, (random_weights(slot, n_expert=n_expert) for slot in slots))


def make_big(folder: Path, megabytes: int) -> Path:
    """Make a llama model of about a size in f16 without asking a library, drawing random bytes once.

    Args:
        folder: where it goes.
        megabytes: size of the file, 10^6 bytes.

    Returns:
        Its path.
    """
    shape = Shape(1, 1024, 16, 8, 2816, 1024, is_half=True)
    one, two = (sum(slot.n_bytes for slot in replace(shape, n_layer=n).slots()) for n in (1, 2))
    shape = replace(shape, n_layer=max(1, 1 + round((megabytes * 1_000_000 - one) / (two - one))))
    recipe: list[tuple[str, str, object]] = [
        ("general.architecture", "str", "llama"),
        ("general.name", "str", f"big-{megabytes}"),
        ("llama.vocab_size", "u32", shape.n_vocab),
        ("llama.context_length", "u32", 4096),
        ("llama.embedding_length", "u32", shape.n_embd),
        ("llama.block_count", "u32", shape.n_layer),
        ("llama.feed_forward_length", "u32", shape.n_ff),
        ("llama.attention.head_count", "u32", shape.n_head),
        ("llama.attention.head_count_kv", "u32", shape.n_head_kv),
        ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("llama.rope.dimension_count", "u32", shape.n_embd // shape.n_head),
        ("tokenizer.ggml.model", "str", "no_vocab"),
    ]
    path = model_path(folder, f"big-{megabytes}", recipe)
    if not path.exists():
        pool = np.random.default_rng(megabytes).standard_normal(shape.n_embd * shape.n_ff, dtype=np.float32) * 0.02
        slots = shape.slots()
        halves = _bytes_of(pool.astype(np.float16))
        write_gguf(path, to_metadata(recipe), slots, (_from_pool(slot, halves) for slot in slots))
    return path


def _from_pool(slot: TensorSlot, halves: memoryview) -> memoryview:
    """Cut a matrix from the drawn pool; norms are one."""
    if slot.type_id == _F32:
        return _bytes_of(np.ones(slot.dims, dtype=np.float32))
    return halves[: slot.n_bytes]


def make_many(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Path | None, str]]:
    """Make models in children, each of which goes on until it dies.

    Args:
        folder: where they go.
        names: recipe names.

    Yields:
        Name, path or None, and the reason when there is no model.
    """
    known = recipes()
    waiting = []
    for name in names:
        path = model_path(folder, name, known[name])
        if path.exists():
            yield name, path, ""
        else:
            waiting.append(name)
    while waiting:
        job = {"folder": str(folder.absolute()), "names": waiting}
        child = run_child("tools.make_dummies", job, None, words=("--child",))
        for told in child.told:
            waiting.remove(told["name"])
            yield told["name"], Path(told["path"]) if told["path"] else None, told["reason"]
        if waiting and child.end:
            yield waiting.pop(0), None, f"the library died: {child.end}"


def _child(folder: Path, names: Sequence[str]) -> int:
    """Make models here, one JSON line each on stdout."""
    library = Library.open(env=os.environ)
    known = recipes()
    for name in names:
        path, reason = model_path(folder, name, known[name]), ""
        try:
            make(library, path, known[name])
        except NativeError as error:
            reason = str(error)
        status = "failed" if reason else "made"
        say(status=status, name=name, path="" if reason else str(path), reason=reason)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit code is 0 when every model is there, 1 otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=None, help="folder (default: the user's cache)")
    parser.add_argument("--all", action="store_true", help="every recipe")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--big", type=int, metavar="MB", help="a llama model of about MB megabytes, in f16")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder = options.out or default_folder()
    known = recipes()
    if options.list:
        print("\n".join(known))
        return 0
    if options.child:
        return _child(Path(options.child["folder"]), options.child["names"])
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no recipe is called {unknown[0]!r}; --list names them all")
    made: dict[str, str] = {}
    failed: dict[str, str] = {}
    if options.big:
        made[f"big-{options.big}"] = str(make_big(folder, options.big))
    names = list(known) if options.all else options.names
    for name, path, reason in make_many(folder, names):
        if path is None:
            failed[name] = reason
        else:
            made[name] = str(path)
        if not options.json:
            print(f"{name}: {path or reason}")
    if options.json:
        print(json.dumps({"folder": str(folder), "made": made, "failed": failed}))
    return 1 if failed or not made else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run other projects' tests and examples for llama-cpp-python against `splitctl.compat`, and count what passes.

    python -m tools.check_compat [--library FILE] [--keep DIR]

Fetches the source packages of llama-cpp-python, langchain-community and llama-index (nothing of them is built) and what
they need into a temporary folder. Models that their tests download are stood in for by models of this machine. Prints
a line for each group, and the reason of each test that failed. Where the real llama-cpp-python is in the cache
(ci/builds --llama-cpp-python) the same tests run with it, too: some fail there as well. Fails where less than 90 %
pass, of those that pass with the real one where it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf

from tools.make_dummies import make_many
from tools.places import builds_folder, default_folder

_LEAST = 0.9
_SOURCES = ("llama-cpp-python==0.3.36", "langchain-community==0.4.2", "llama-index-llms-llama-cpp==0.7.0")
_NEEDED = (
    "langchain-community==0.4.2",
    "llama-index-core==0.14.25",
    "huggingface-hub",
    "scipy",
    "pytest",
    "pytest-asyncio",
    "blockbuster",
    "diskcache",
)
_REAL = "llama-cpp-python-0.3.36"
#: Why those fail that can be expected to.
_KNOWN = {
    "test_real_model": "uses llama_cpp._internals, the bindings of C functions, not Llama",
    "test_llama_cpp_tokenization": "asks for _ctx.ctx, the address of a C object",
    "test_llamacpp_streaming": "wants objects of a stream that langchain gives as text",
    "test_llamacpp_invalid_model_kwargs": "wants an error that langchain itself raises, or does not",
    "test_real_llama": "wants two different draws of a number, and the stand-in for its model is sure of one",
}
_EXAMPLES = '''\
"""The examples of llama-index-llms-llama-cpp's README, on a model of this machine."""
import json, os

from llama_index.core.llms import ChatMessage
from llama_index.llms.llama_cpp import LlamaCPP

MODEL = json.loads(os.environ["SPLITCTL_COMPAT_MODELS"])["chat"]


def made(**named):
    return LlamaCPP(
        model_path=MODEL, temperature=0.1, max_new_tokens=8, context_window=256, generate_kwargs={},
        model_kwargs={"n_gpu_layers": -1, "n_threads": 1},
        messages_to_prompt=lambda messages: "".join(
            f"<|im_start|>{m.role.value}\\n{m.content}<|im_end|>\\n" for m in messages
        ) + "<|im_start|>assistant\\n",
        completion_to_prompt=lambda text: f"<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n",
        verbose=True, **named,
    )


def test_complete():
    assert made().complete("Hello! Can you tell me a poem about cats and dogs?").text


def test_stream_complete():
    parts = list(made().stream_complete("Can you write me a poem about fast cars?"))
    assert "".join(part.delta for part in parts) == parts[-1].text


def test_chat():
    assert made().chat([ChatMessage(role="user", content="Hi")]).message.content


def test_stream_chat():
    assert list(made().stream_chat([ChatMessage(role="user", content="Hi")]))[-1].message.content


def test_metadata():
    assert made().metadata.context_window == 256
'''


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that run together.

    Args:
        name: what they are of.
        cwd: the folder that they run in.
        tests: files in it.
    """

    name: str
    cwd: Path
    tests: tuple[str, ...]


def _pip(arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed: {done.stderr.strip().splitlines()[-1]}")


def fetch(folder: Path) -> Path:
    """Bring sources and what they need into a folder; returns the one with the packages."""
    site = folder / "site"
    if not site.is_dir():
        _pip(["install", "--target", str(site), *_NEEDED])
    for source in _SOURCES:
        name = source.partition("==")[0]
        if not list(folder.glob(f"{name.replace('-', '_')}-*/")):
            _pip(["download", "--no-deps", f"--no-binary={name}", "-d", str(folder), source])
            (archive,) = folder.glob(f"{name.replace('-', '_')}-*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
    return site


def with_words(model: Path, out: Path) -> Path:
    """Write a small model again with a tokenizer of single characters, for tests that need text."""
    reader = gguf.GGUFReader(model)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(out, arch)
    for name, field in reader.fields.items():
        if name.startswith(("tokenizer.", "GGUF.")) or name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        )
    n_vocab = next(int(t.shape[-1]) for t in reader.tensors if t.name == "token_embd.weight")
    # As byte-level BPE writes them: a space and a line's end have letters of their own.
    tokens = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a", "<end>", "th"]
    tokens = (tokens + [f"<unused{index}>" for index in range(n_vocab)])[:n_vocab]
    kinds = [3 if one.startswith("<") and len(one) > 1 else 1 for one in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(tokens.index("<end>"))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def stand_ins(folder: Path) -> dict[str, str]:
    """Return the models of this machine that stand in for those that the tests download."""
    small = {name: path for name, path, _ in make_many(default_folder(), ["mamba", "falcon-h1"]) if path is not None}
    models = default_folder().parent
    smollm2, gemma = models / "smollm2.gguf", models / "gemma3-270m.gguf"
    for one in (smollm2, gemma):
        if not one.is_file():
            sys.exit(f"{one} is not there: run ci/model {one.stem}")
    return {
        "chat": str(smollm2),
        "lmstudio-community/Qwen3.5-0.8B-GGUF": str(gemma),
        "ggml-org/models": str(smollm2),
        "CompendiumLabs/bge-small-en-v1.5-gguf": str(smollm2),
        "QuantFactory/mamba-130m-hf-GGUF": str(with_words(small["mamba"], folder / "mamba-words.gguf")),
        "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF": str(with_words(small["falcon-h1"], folder / "falcon-words.gguf")),
    }


def groups(folder: Path, models: dict[str, str]) -> list[Group]:
    """Say what runs, with the names that those tests look for in their folders."""

    def source(name: str) -> Path:
        return next(one for one in folder.glob(f"{name}-*") if one.is_dir())

    llama, langchain = source("llama_cpp_python"), source("langchain_community")
    for name in ("ggml-alpaca-7b-q4.bin", "convert-unversioned-ggml-to-ggml.py", "tokenizer.model"):
        (langchain / name).unlink(missing_ok=True)
        (langchain / name).symlink_to(models["chat"])
    chat = langchain / "tests/integration_tests/chat_models/test_llamacpp.py"
    chat.write_text(chat.read_text().replace("/path/to/Meta-Llama-3.1-8B-Instruct.Q4_K_M.gguf", models["chat"]))
    # The size of the embeddings is that of another model.
    embedding = langchain / "tests/integration_tests/embeddings/test_llamacpp.py"
    embedding.write_text(embedding.read_text().replace("== 512", "== 576"))
    examples = folder / "llama_index_examples"
    examples.mkdir(exist_ok=True)
    (examples / "test_readme.py").write_text(_EXAMPLES)
    names = ("llama", "llama_chat_format", "llama_grammar", "llama_speculative")
    kinds = (
        "integration_tests/chat_models",
        "integration_tests/embeddings",
        "integration_tests/llms",
        "unit_tests/embeddings",
    )
    return [
        Group("llama-cpp-python", llama, tuple(f"tests/test_{name}.py" for name in names)),
        Group("langchain-community", langchain, tuple(f"tests/{kind}/test_llamacpp.py" for kind in kinds)),
        Group("llama-index", examples, ("test_readme.py",)),
    ]


def run(group: Group, env: dict[str, str]) -> dict[str, str]:
    """Run a group; returns test -> the last line of why it did not pass, "" where it did."""
    report = group.cwd / "report.xml"
    report.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tools.check_compat_plugin", "-p", "no:cacheprovider",
         "-p", "no:cov", "-p", "no:xdist", "-o", "addopts=", "-W", "ignore", f"--junitxml={report}", *group.tests],
        cwd=group.cwd, env={**os.environ, **env}, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if not report.is_file():
        sys.exit(f"{group.name}: pytest has run nothing: {done.stderr[-2000:] or done.stdout[-2000:]}")
    ends = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        why = next((one for kind in ("failure", "error", "skipped") if (one := case.find(kind)) is not None), None)
        ends[f"{case.get('classname')}::{case.get('name')}"] = (
            "" if why is None else str(why.get("message")).splitlines()[0] or "no reason"
        )
    return ends


def environments(site: Path, models: dict[str, str], library: str | None) -> list[dict[str, str]]:
    """Say what the tests run with: with compat, and with the real package where it is there."""
    root = Path(__file__).parents[1]
    paths = [str(root), str(site), *map(str, site.parent.glob("llama_index_llms_llama_cpp-*/"))]
    env = {"PYTHONPATH": os.pathsep.join(paths), "SPLITCTL_COMPAT_MODELS": json.dumps(models)}
    ours = {**env, "LLAMA_NATIVE_LIB": library} if library else env
    real = builds_folder() / _REAL
    if not (real / "llama_cpp").is_dir():
        return [ours]
    return [
        ours,
        {**env, "PYTHONPATH": os.pathsep.join([str(real), *paths]), "SPLITCTL_COMPAT_REAL": "1", "PYTHONSAFEPATH": "1"},
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 where too little passes."""
    parser = argparse.ArgumentParser(prog="tools.check_compat", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", help="libllama to use; default: as splitctl finds one")
    parser.add_argument("--keep", type=Path, help="folder to keep what is fetched in, for a next time")
    chosen = parser.parse_args(arguments)
    ours: dict[str, str] = {}
    real: dict[str, str] = {}
    with TemporaryDirectory() as temporary:
        folder = (chosen.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        site, models = fetch(folder), stand_ins(folder)
        envs = environments(site, models, chosen.library)
        for group in groups(folder, models):
            for ends, env, who in zip((ours, real), envs, ("", " with the real one"), strict=False):
                found = run(group, env)
                failed = {name.rpartition("::")[2]: why for name, why in found.items() if why}
                print(f"{group.name}{who}: {len(found) - len(failed)} passed, {len(failed)} failed", flush=True)
                for name, why in failed.items():
                    print(f"  {name}: {why if who else _KNOWN.get(name.partition('[')[0], why)}", flush=True)
                ends.update(found)
    counted = [name for name in ours if not real or real.get(name) == ""]
    for of, names in (("all", list(ours)), *([("those that pass with the real one", counted)] if real else [])):
        n_passed = sum(not ours[name] for name in names)
        print(f"of {of}: {n_passed} of {len(names)} passed ({n_passed / max(len(names), 1):.1%})")
    return int(sum(not ours[name] for name in counted) < _LEAST * len(counted))


if __name__ == "__main__":
    sys.exit(main())

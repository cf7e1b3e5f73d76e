"""Time the rules on a model of any size: only its headers are read, so the size costs nothing.

    python -m tools.time_rules [--json] [--gb N] [--parts N] [--keep FOLDER]

Makes a split model whose tensors are holes in sparse files (no disk is used for them), reads its facts, asks the rules
for every mode, and says how long that took, how many bytes were read, and how many of them lie behind a header: none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from llama_native.user_model import MetaKind, MetaValue, TensorSlot
from splitctl.model.facts import read_facts
from splitctl.model.header import read_header
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.switching.rules import BuildFacts, HostFacts, SessionFacts, check, refused
from tools.gguf_out import header_bytes, padded

_N_LAYERS, _WIDTH, _VOCABULARY, _N_EXPERTS = 64, 8192, 131_072, 32
_F16, _F16_BYTES = 1, 2


def make_sparse(folder: Path, *, n_bytes: int, n_parts: int) -> Path:
    """Make a split model whose tensors are holes.

    Args:
        folder: where.
        n_bytes: how large all parts are together, at the least.
        n_parts: how many files.

    Returns:
        The first part.
    """
    rest = n_bytes // (_N_LAYERS * _F16_BYTES) - 4 * _WIDTH * _WIDTH
    n_ff = max(-(-rest // (3 * _WIDTH * _N_EXPERTS) // 256) * 256, 256)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (_WIDTH, _WIDTH), "attn_k.weight": (_WIDTH, 1024), "attn_v.weight": (_WIDTH, 1024),
        "attn_output.weight": (_WIDTH, _WIDTH), "ffn_up_exps.weight": (_WIDTH, n_ff, _N_EXPERTS),
        "ffn_gate_exps.weight": (_WIDTH, n_ff, _N_EXPERTS), "ffn_down_exps.weight": (n_ff, _WIDTH, _N_EXPERTS),
    }  # fmt: skip
    outer = (_WIDTH, _VOCABULARY)
    named: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", outer), ("output.weight", outer)]
    named += [(f"blk.{n}.{tail}", dims) for n in range(_N_LAYERS) for tail, dims in shapes.items()]
    per_part = -(-len(named) // n_parts)
    for part in range(n_parts):
        offset, slots = 0, []
        for name, dims in named[part * per_part : (part + 1) * per_part]:
            size = _F16_BYTES
            for one in dims:
                size *= one
            slots.append(TensorSlot(name, dims, _F16, size))
            offset += padded(size)
        header = header_bytes(_metadata(part, n_parts, len(named), whole=part == 0), slots)
        path = folder / f"sparse-{part + 1:05}-of-{n_parts:05}.gguf"
        path.write_bytes(header)
        os.truncate(path, len(header) + offset)
    return folder / f"sparse-00001-of-{n_parts:05}.gguf"


def _metadata(part: int, n_parts: int, n_tensors: int, *, whole: bool) -> list[MetaValue]:
    """Give a part's metadata: the first has the model's, with a vocabulary."""
    u16, u32, text = MetaKind.U16, MetaKind.U32, MetaKind.STR
    found = [
        MetaValue("split.no", u16, part),
        MetaValue("split.count", u16, n_parts),
        MetaValue("split.tensors.count", MetaKind.I32, n_tensors),
    ]
    if not whole:
        return found
    own = {
        "block_count": _N_LAYERS, "context_length": 131_072, "embedding_length": _WIDTH, "feed_forward_length": 24_576,
        "attention.head_count": 64, "attention.head_count_kv": 8, "expert_count": _N_EXPERTS, "expert_used_count": 4,
    }  # fmt: skip
    tokens = tuple(f"<token {number}>" for number in range(_VOCABULARY))
    return [
        MetaValue("general.architecture", text, "llama"),
        *(MetaValue(f"llama.{key}", u32, value) for key, value in own.items()),
        MetaValue("tokenizer.ggml.model", text, "gpt2"),
        MetaValue("tokenizer.ggml.tokens", text, tokens),
        *found,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model, time the rules, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--gb", type=int, default=400, help="size of the model")
    parser.add_argument("--parts", type=int, default=9, help="files that it is split into")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make it there, and leave it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="splitctl-rules-") as temporary:
        folder = options.keep or Path(temporary)
        first = make_sparse(folder, n_bytes=options.gb * 10**9, n_parts=options.parts)
        started = time.perf_counter()
        facts = read_facts(first)
        read_s = time.perf_counter() - started
        build = BuildFacts("xllamacpp 2026.10.11549")
        host = HostFacts({"CUDA0": "gpu", "CUDA1": "gpu"})
        answers = {}
        started = time.perf_counter()
        for mode in SplitMode:
            place = Placement(mode=mode, devices=("CUDA0", "CUDA1"), n_ctx=8192, flash_attn=FlashAttn.ON)
            found = check(None, place, facts, build, host, SessionFacts({}))
            answers[mode.value] = [reason.code for reason in refused(found)]
        rules_s = time.perf_counter() - started
        headers = sum(read_header(path).header_bytes for path in facts.files)
    body = {
        "file_bytes": facts.file_bytes,
        "files": len(facts.files),
        "tensors": len(facts.tensors),
        "bytes_read": facts.n_bytes_read,
        "body_bytes_read": facts.n_bytes_read - headers,
        "read_s": round(read_s, 4),
        "rules_s": round(rules_s, 4),
        "refused": answers,
    }
    if options.json:
        print(json.dumps(body))
    else:
        print(
            f"{facts.file_bytes / 1e9:.0f} GB in {len(facts.files)} files: {facts.n_bytes_read} bytes read, "
            f"{body['body_bytes_read']} of them behind a header; {read_s:.3f} s to read, {rules_s:.4f} s for the rules"
        )
    return 1 if body["body_bytes_read"] else 0


if __name__ == "__main__":
    sys.exit(main())

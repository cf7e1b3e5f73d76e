"""Feed damaged states to the codec until the time is over: the fuzz law, with bounds on time and memory.

    python -m tests.fuzz.fuzz_codec [--seconds 600] [--cases 1000000] [--seed N] [--corpus DIR] [--json]

Law: an error of the one kind comes out, or an image that writes the very bytes that were read. A case that breaks it,
or takes longer than 50 ms of processor time twice in a row, or more than 64 MiB, is written into the corpus and ends
the run with exit code 1. Cases in the corpus are tried first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from statecodec import ModelFacts, StateFormatError, emit, parse
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden

_CORPUS = Path(__file__).parent / "corpus" / "codec"
_WORDS = (0, 1, 2, 3, 4, 7, 8, 20, 30, 64, 128, 255, 256, 257, 512, 513, 1 << 16, 1 << 26, 2**31 - 1, 2**31, 2**32 - 1)
_MAX_BYTES = 64 << 20
_MAX_SECONDS = 0.05
_FACTS = (None, ModelFacts(sections=("attention",)), ModelFacts(versions=frozenset({11})), ModelFacts(has_ext=True))


def judge(data: bytes, facts: ModelFacts | None) -> str:
    """What is wrong with the codec's answer to these bytes; empty when nothing is."""
    try:
        image = parse(data, facts=facts)
    except StateFormatError as error:
        return "" if str(error) else "an error without a message"
    except BaseException as error:  # noqa: BLE001 - whatever else comes out is the finding
        return f"{type(error).__name__}: {error}"
    if b"".join(emit(image)) != data:
        return "the image is not these bytes"
    image.sequences()
    return ""


def mutated(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A damaged state: words replaced, parts cut, repeated, swapped and spliced."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        if len(data) < 8:
            break
        at = chance.randrange(min(len(data), chance.choice((64, 256, len(data)))))
        size = chance.choice((1, 4, 8, 12, 64, 500))
        kind = chance.randrange(7)
        if kind <= 1:
            at = min(at & ~3 if chance.random() < 0.5 else at, len(data) - 4)
            struct.pack_into("<I", data, at, chance.choice(_WORDS))
        elif kind == 2:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size] * chance.choice((1, 2, 20))
        elif kind == 5:
            other = chance.choice(seeds)
            start = chance.randrange(len(other))
            data[at:at] = other[start : start + size]
        else:
            data[at : at + size] = bytes(min(size, len(data) - at))
    return bytes(data)


def slow(data: bytes, facts: ModelFacts | None) -> bool:
    """Whether a case takes too long, twice, in processor time."""
    for _ in range(2):
        start = time.process_time()
        judge(data, facts)
        if time.process_time() - start <= _MAX_SECONDS:
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the time or the cases are over, or something is found.

    Returns:
        Exit code: 0 when nothing was found.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int, default=1_000_000_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--corpus", type=Path, default=_CORPUS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    seeds = [case.data for case in CASES.values()]
    seeds += [golden(name) for name, told in MANIFEST.items() if told["n_bytes"] < 12_000]
    kept = [path.read_bytes() for path in sorted(options.corpus.glob("*"))] if options.corpus.exists() else []
    end = time.monotonic() + options.seconds
    n_cases, finding, case = 0, "", b""
    peak = 0
    while not finding and n_cases < options.cases and time.monotonic() < end:
        case = kept[n_cases] if n_cases < len(kept) else mutated(chance, seeds)
        facts = chance.choice(_FACTS)
        # Tracing slows everything down, so memory is looked at in samples.
        traced = n_cases % 64 == 0
        if traced:
            tracemalloc.start()
        start = time.process_time()
        finding = judge(case, facts)
        spent = time.process_time() - start
        if traced:
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            if peak > _MAX_BYTES:
                finding = f"{peak} bytes"
        elif not finding and spent > _MAX_SECONDS and slow(case, facts):
            finding = f"more than {_MAX_SECONDS} s"
        n_cases += 1
    told = {"cases": n_cases, "finding": finding, "peak_bytes": peak}
    if finding:
        options.corpus.mkdir(parents=True, exist_ok=True)
        path = options.corpus / hashlib.sha256(case).hexdigest()[:16]
        path.write_bytes(case)
        told["case"] = str(path)
    print(json.dumps(told) if options.json else told)
    return 1 if finding else 0


if __name__ == "__main__":
    sys.exit(main())

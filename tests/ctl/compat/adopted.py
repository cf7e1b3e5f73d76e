"""A child of test_adopting.py: a real ``llama_cpp.Llama`` is adopted, switched and released.

Arguments: how many times, "free" or "keep", the model, and the mode to switch to, or shares of another layer split.
Needs llama_cpp on the path. Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import json
import sys
from types import ModuleType
from typing import Any

import psutil

from splitctl.errors import SplitctlError

PROMPT = b"The quick brown fox jumps over the lazy dog and then"
N_TOKENS = 64
THREADS = {"n_threads": 1, "n_threads_batch": 1}


def begun(llama_cpp: Any, model: str) -> Any:
    """Make one that has read a prompt and drawn four tokens."""
    llm = llama_cpp.Llama(model, n_ctx=256, n_batch=64, verbose=False, **THREADS)
    drawn(llm, llm.tokenize(PROMPT), 4)
    return llm


def drawn(llm: Any, tokens: list[int], n: int) -> list[int]:
    """Let it go on greedily after these tokens."""
    return list(itertools.islice(llm.generate(tokens, temp=0.0), n))


def refusal(llm: Any) -> str:
    """Call it, and return what it says."""
    try:
        llm.tokenize(b"x")
    except SplitctlError as error:
        return str(error)
    return ""


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 gives."""

    _fields_ = tuple((f"field_{index}", ctypes.c_size_t) for index in range(10))


def heap() -> int:
    """Count the bytes that malloc has lent, mapped blocks included; resident memory shows them with much noise."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    lent = libc.mallinfo2()
    return int(lent.field_7 + lent.field_4)


def main(n_times: int, free: bool, model: str, target: str) -> dict[str, Any]:
    """Adopt and release so often, and let it go on."""
    # The cache on disk that it imports at once is not used here.
    sys.modules.setdefault("diskcache", ModuleType("diskcache"))
    llama_cpp = importlib.import_module("llama_cpp")
    from splitctl.compat.llama_cpp import Llama  # noqa: PLC0415 - after it, as in a program that has it

    untouched = begun(llama_cpp, model)
    tokens = untouched._input_ids.tolist()
    expected = drawn(untouched, tokens, N_TOKENS)
    untouched.close()
    llm = begun(llama_cpp, model)
    found: dict[str, Any] = {"same_states": True, "statuses": [], "rss": [], "handles": [], "heap": []}
    shares = target.split(",") if "," in target else None
    there: dict[str, Any] = {"mode": target} if shares is None else {"tensor_split": [float(one) for one in shares]}
    back: dict[str, Any] = {"mode": "layer", "tensor_split": None}
    for _ in range(n_times):
        ours = Llama.adopt(llm, free=free, devices="CPU,CPU", prober=None)
        found["refusal"] = refusal(llm)
        before = ours.session.state_bytes(bare=True)
        found["statuses"] += [ours.switch(**changes).status.value for changes in (there, back)]
        found["same_states"] &= ours.session.state_bytes(bare=True) == before
        found["is_it"] = ours.release() is llm
        process = psutil.Process()
        found["rss"].append(process.memory_info().rss)
        found["heap"].append(heap())
        found["handles"].append([process.num_fds(), process.num_threads()])
    found["first"] = llm.sample(temp=0.0) == expected[0]
    found["same"] = drawn(llm, tokens, N_TOKENS) == expected
    # What has come meanwhile goes back too.
    llm.reset()
    llm.eval(tokens)
    ours = Llama.adopt(llm, free=free, devices="CPU,CPU", prober=None)
    ours_drawn = list(itertools.islice(ours.generate(tokens, temp=0.0), 9))
    ours.release()
    found["goes_on"] = llm._input_ids.tolist() == [*tokens, *ours_drawn[:8]]
    found["next"] = llm.sample(temp=0.0) == ours_drawn[8]
    if free:
        answers = []
        for fails in (False, True):
            llm.reset()
            llm.eval(tokens)
            if fails:
                found["failed"] = not_adopted(Llama, llm)
            answers.append(drawn(llm, tokens, N_TOKENS))
        found["after"] = answers[0] == answers[1]
    return found


def not_adopted(kind: Any, llm: Any) -> str:
    """Let its close fail when it has freed all, and return what the adoption says."""
    close = type(llm).close

    def fails(self: Any) -> None:
        close(self)
        raise OSError("no end")

    type(llm).close = fails
    try:
        kind.adopt(llm, free=True, prober=None)
    except OSError as error:
        return str(error)
    finally:
        type(llm).close = close
    return ""


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2] == "free", *sys.argv[3:5])))

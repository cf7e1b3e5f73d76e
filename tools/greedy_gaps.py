"""Compares greedy texts with a fresh context that reads the same tokens: how far is each from the likeliest one?

Runs in a child (one library a process): takes a job as JSON, and says one line with the gaps. The gap of a token is the
largest logit at its place less its own, in logits: 0 where a fresh context would have drawn it too.

A text that grew one token a step, in batches with other texts, in two split modes and over restores, and a context that
reads it in one go add the same floats in other orders, so a near tie may fall the other way. A token that was lost,
doubled or drawn from another sequence's cache is no near tie: `control` says what its gap is, of the same text with one
token left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_native import Context, Library, Model
from splitctl.engine.engine import context_params, model_params
from splitctl.placement import FlashAttn, Placement, SplitMode
from tools.children import run_child, say

#: Two float orders of SmolLM2 Q4_1 differ by a rounding of activations to 8 bits before each product, and draw another
#: token only at near ties. Measured over 200 switches under four streams: of 5,638 tokens in 85 texts 158 are others,
#: the worst gap is 0.30. With one token left out the gap of nearly every text is 3 to 14.
TOLERANCE = 1.0
_BATCH = 64
_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a text's tokens came to.

    Args:
        worst: the largest gap, logits.
        at: the token that has it, counted from the first generated one.
        n_other: tokens that a fresh context would not have drawn.
        n: tokens looked at.
        control: the largest gap of the same text with one token left out, logits; 0 where it was not read.
    """

    worst: float
    at: int
    n_other: int
    n: int
    control: float

    @property
    def is_right(self) -> bool:
        """Whether every token is the likeliest, up to the order of floats."""
        return self.n > 0 and self.worst <= TOLERANCE

    @property
    def fault(self) -> str:
        """What is wrong with a text that is not right."""
        return f"token {self.at} is {self.worst:.2f} below the likeliest (a lost token makes {self.control:.1f})"

    @property
    def is_blind(self) -> bool:
        """Whether the text would look right with a token lost, as one does that repeats itself."""
        return self.control <= TOLERANCE


def measure(
    library: Path,
    model: Path,
    texts: Sequence[tuple[Sequence[int], int]],
    devices: Sequence[str] = ("CPU", "CPU"),
    *,
    always_control: bool = True,
) -> list[Gaps]:
    """Look at texts in a child.

    Args:
        library: the libllama.
        model: the GGUF.
        texts: the tokens of each, and how many of them are its prompt.
        devices: two devices, for a layer split.
        always_control: read the text with one token left out too where the whole one is right.

    Returns:
        The gaps of each.

    Raises:
        RuntimeError: the child did not come to an end.
    """
    job = {
        "library": str(library),
        "model": str(model),
        "devices": list(devices),
        "texts": [[list(tokens), n] for tokens, n in texts],
        "always_control": always_control,
    }
    child = run_child("tools.greedy_gaps", job, _TIMEOUT_S)
    if child.end or len(child.told) != len(texts):
        raise RuntimeError(f"the texts could not be compared with a fresh context: {child.end or 'it ended early'}")
    return [Gaps(**{name: value for name, value in told.items() if name != "status"}) for told in child.told]


def tokenize(library: Path, model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Turn texts into a model's tokens, in a child.

    Raises:
        RuntimeError: the child did not come to an end.
    """
    job = {"library": str(library), "model": str(model), "devices": ["CPU", "CPU"], "tokenize": list(texts)}
    child = run_child("tools.greedy_gaps", job, _TIMEOUT_S)
    if child.end:
        raise RuntimeError(f"the texts could not be tokenized: {child.end}")
    return [told["tokens"] for told in child.told]


class Reader:
    """Contexts that read a text in one go."""

    def __init__(self, job: dict[str, Any]) -> None:
        longest = max((len(tokens) for tokens, _ in job.get("texts", ())), default=1)
        self.placement = Placement(
            mode=SplitMode.LAYER,
            devices=tuple(job["devices"]),
            n_ctx=-(-longest // 256) * 256,
            n_batch=_BATCH,
            n_ubatch=_BATCH,
            flash_attn=FlashAttn.ON,
            n_threads=1,
            n_threads_batch=1,
        )
        library = Library.open(job["library"], env=os.environ)
        self.model = Model.load(library, job["model"], model_params(self.placement))

    def gaps(self, tokens: Sequence[int], n_prompt: int) -> list[float]:
        """Give the gap of every token after the prompt, logits."""
        found = []
        with Context(self.model, context_params(self.placement, embeddings=False)) as context:
            for start in range(0, len(tokens) - 1, _BATCH):
                chunk = tokens[start : min(start + _BATCH, len(tokens) - 1)]
                wanted = [start + index + 1 >= n_prompt for index in range(len(chunk))]
                context.decode(chunk, range(start, start + len(chunk)), [0] * len(chunk), wanted)
                for index in np.flatnonzero(wanted):
                    row = np.frombuffer(context.logits(int(index)), np.float32)
                    found.append(float(row.max() - row[tokens[start + int(index) + 1]]))
        return found

    def judge(self, tokens: list[int], n_prompt: int, *, always_control: bool) -> Gaps:
        """Compare one text with a fresh context."""
        found = self.gaps(tokens, n_prompt)
        spoilt: list[float] = []
        if always_control or max(found, default=0.0) > TOLERANCE:
            middle = n_prompt + (len(tokens) - n_prompt) // 2
            spoilt = self.gaps(tokens[:middle] + tokens[middle + 1 :], n_prompt)
        at = int(np.argmax(found)) if found else 0
        n_other = sum(gap > 0 for gap in found)
        return Gaps(max(found, default=0.0), at, n_other, len(found), max(spoilt, default=0.0))


def main() -> None:
    """Judge the texts of the job."""
    job = json.loads(sys.argv[1])
    reader = Reader(job)
    for text in job.get("tokenize", ()):
        say(status="tokenized", tokens=reader.model.tokenize(text))
    for tokens, n_prompt in job.get("texts", ()):
        say(status="judged", **asdict(reader.judge(tokens, n_prompt, always_control=job["always_control"])))
    reader.model.close()


if __name__ == "__main__":
    main()

"""Sampler chains on real builds, over candidate arrays of ours, held against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llama_native import CANDIDATE_BYTES, CallFailed, ChainParams, HandleClosed, Library, SamplerChain
from tests.native.real import NEWEST, OLDER, library_of
from tests.stublib import run_child

pytestmark = pytest.mark.build

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
N_VOCAB = 300
N_DRAWS = 4000
BUILDS = pytest.mark.parametrize("folder", [NEWEST, OLDER])
"""Sampling from one candidate takes a random draw in the newest and none in the older one."""


def _logits(seed: int, n: int = N_VOCAB) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32) * np.float32(3.0)


def _choose(chain: SamplerChain, logits: NDArray[np.float32]) -> int:
    candidates = np.zeros(logits.size, CANDIDATE)
    candidates["id"], candidates["logit"] = np.arange(logits.size), logits
    return chain.apply(candidates, logits.size)


def _chain(library: Library, **named: Any) -> SamplerChain:
    fields = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 11, "n_vocab": N_VOCAB, **named}
    return SamplerChain(library, ChainParams(**fields))


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    raised = np.exp(logits.astype(np.float64) - logits.max())
    return raised / raised.sum()


def child_greedy(path: str) -> list[list[int]]:
    chain = _chain(Library.open(path), temp=0.0)
    return [[_choose(chain, _logits(seed)), int(_logits(seed).argmax())] for seed in range(20)] + [[chain.n_draws, 0]]


@BUILDS
def test_greedy_takes_the_largest(folder: str) -> None:
    """Twenty random rows; no random draw is made."""
    assert CANDIDATE.itemsize == CANDIDATE_BYTES
    for chosen, wanted in run_child(child_greedy, library_of(folder)).value():
        assert chosen == wanted


def child_penalties(path: str) -> dict[str, Any]:
    library = Library.open(path)
    penalty, last_n = 1.5, 4
    chain = _chain(library, temp=0.0, repeat_penalty=penalty, repeat_last_n=last_n)
    taken: list[int] = []
    steps = []
    for seed in range(60):
        # Small differences, so that a penalty decides, and negative logits, which are multiplied.
        logits = _logits(seed, 12) / np.float32(3.0) - np.float32(seed % 3)
        wanted = logits.copy()
        for token in set(taken[-last_n:]):
            wanted[token] = wanted[token] / penalty if wanted[token] > 0 else wanted[token] * penalty
        chosen = _choose(chain, logits)
        steps.append([chosen, int(wanted.argmax()), int(logits.argmax())])
        taken.append(chosen)
        chain.accept(chosen)
    return {"steps": steps}


@BUILDS
def test_penalties_look_back_on_what_was_accepted(folder: str) -> None:
    """The last four tokens are divided or multiplied, older ones are free again; often enough to change the choice."""
    steps = run_child(child_penalties, library_of(folder)).value()["steps"]
    assert [chosen for chosen, _, _ in steps] == [wanted for _, wanted, _ in steps]
    assert sum(chosen != plain for chosen, _, plain in steps) > 5


def child_supports(path: str) -> dict[str, list[int]]:
    library = Library.open(path)
    logits = _logits(3, 40)

    def support(**named: Any) -> list[int]:
        chain = _chain(library, temp=4.0, **named)
        found = sorted({_choose(chain, logits) for _ in range(N_DRAWS)})
        chain.close()
        return found

    return {"top_k": support(top_k=5), "top_p": support(top_p=0.7), "min_p": support(min_p=0.2)}


@BUILDS
def test_what_is_cut_is_never_drawn(folder: str) -> None:
    """top-k, top-p and min-p leave exactly the tokens that numpy leaves: thousands of hot draws see all of them."""
    logits = _logits(3, 40)
    order, p = np.argsort(-logits), _softmax(logits)
    wanted = {
        "top_k": order[:5],
        "top_p": order[: int(np.searchsorted(np.cumsum(p[order]), 0.7)) + 1],
        "min_p": np.flatnonzero(p >= 0.2 * p.max()),
    }
    found = run_child(child_supports, library_of(folder)).value()
    assert found == {name: sorted(int(one) for one in kept) for name, kept in wanted.items()}


def child_frequencies(path: str) -> list[int]:
    chain, logits = _chain(Library.open(path), temp=0.5), _logits(5, 8) / np.float32(3.0)
    return [*np.bincount([_choose(chain, logits) for _ in range(N_DRAWS)], minlength=8).tolist(), chain.n_draws]


@BUILDS
def test_draws_follow_the_softmax(folder: str) -> None:
    """At temperature 0.5 each token comes as often as it should, within five standard deviations; draws are counted."""
    *counts, n_draws = run_child(child_frequencies, library_of(folder)).value()
    p = _softmax(_logits(5, 8) / np.float32(3.0) / np.float32(0.5))
    assert n_draws == N_DRAWS
    assert (np.abs(np.array(counts) - N_DRAWS * p) < 5 * np.sqrt(N_DRAWS * p * (1 - p)) + 1).all()


def child_replay(path: str) -> dict[str, Any]:
    library = Library.open(path)
    found: dict[str, Any] = {"draws_on_single": library.draws_on_single, "pairs": []}
    for repeat_penalty in (1.0, 1.3):
        named = {"top_p": 0.9, "min_p": 0.05, "repeat_penalty": repeat_penalty, "repeat_last_n": 16, "seed": 77}
        first = _chain(library, **named)
        accepted, n_single = [], 0
        for step in range(25):
            logits = _logits(step)
            if step % 3 == 0:
                # One token has it all: top-p leaves a single candidate, which some builds draw for and some do not.
                logits[step] = 60.0
                n_single += 1
            accepted.append(_choose(first, logits))
            first.accept(accepted[-1])
        second = _chain(library, **named)
        second.replay(accepted, first.n_draws)
        plain = _chain(library, **named)
        goes_on = [[_choose(chain, _logits(100 + step)) for step in range(20)] for chain in (first, second, plain)]
        found["pairs"].append(
            {
                "n_draws": first.n_draws - 20,
                "counted alike": first.n_draws == second.n_draws,
                "single": n_single,
                "equal": goes_on[0] == goes_on[1],
                "differs from a fresh one": goes_on[0] != goes_on[2],
            }
        )
    return found


@BUILDS
def test_a_replayed_chain_goes_on_as_the_first_one_does(folder: str) -> None:
    """Accepted tokens and counted draws are all that a chain is; counted as this build counts them."""
    found = run_child(child_replay, library_of(folder)).value()
    assert found["draws_on_single"] is (folder == NEWEST)
    for pair in found["pairs"]:
        assert pair["equal"]
        assert pair["counted alike"]
        assert pair["differs from a fresh one"]
        assert pair["n_draws"] == (25 if folder == NEWEST else 25 - pair["single"])


def child_ends(path: str) -> list[str]:
    library = Library.open(path)
    chain = _chain(library)
    found = []
    try:
        chain.apply(np.zeros(0, CANDIDATE), 0)
    except (CallFailed, ValueError) as error:
        found.append(type(error).__name__)
    with pytest.raises(BufferError):
        chain.apply(bytes(12), 1)  # read-only
    found.append(str(_choose(chain, _logits(1)) >= 0))
    chain.close()
    chain.close()
    for use in (lambda: _choose(chain, _logits(1)), lambda: chain.accept(1), lambda: chain.replay([1], 1)):
        with pytest.raises(HandleClosed, match="sampler"):
            use()
    return found


def test_nothing_to_choose_from_is_an_error_and_a_closed_chain_says_so() -> None:
    """An empty array chooses nothing; a read-only one is refused; closing twice is closing once."""
    assert run_child(child_ends, library_of(NEWEST)).value() == ["CallFailed", "True"]

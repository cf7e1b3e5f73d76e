"""What a build does that no struct shows: small calls with known answers, made once when it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_native.errors import UnsupportedAbi

if TYPE_CHECKING:
    import cffi

    from llama_native.abi import Profile


def check(ffi: cffi.FFI, lib: Any, profile: Profile) -> bool:
    """Check with real calls what no struct shows: candidate arrays, the penalties prototype, how draws are counted.

    Nobody else calls the library yet.

    Returns:
        Whether sampling from one candidate consumes a random draw in this build.

    Raises:
        UnsupportedAbi: it does not do what its layout promises.
    """
    if _greedy_choice(ffi, lib) != 1:
        raise UnsupportedAbi(
            "a greedy sampler given the logits (0, 3, 1) did not choose the second",
            "llama_token_data_array of 12-byte entries",
        )
    if _penalised(ffi, lib, n_vocab_first=profile.penalties_take_n_vocab) is False:
        raise UnsupportedAbi(
            "llama_sampler_init_penalties does not take its arguments in the order that this layout has",
            f"layout {profile.name}",
        )
    return _draws_on_single(ffi, lib)


def _candidates(ffi: cffi.FFI, logits: tuple[float, ...]) -> tuple[Any, Any]:
    data = ffi.new("llama_token_data[]", len(logits))
    for index, logit in enumerate(logits):
        data[index].id, data[index].logit, data[index].p = index, logit, 0.0
    array = ffi.new("llama_token_data_array *")
    array.data, array.size, array.selected, array.sorted = data, len(logits), -1, False
    # A pointer that is stored in a C struct does not keep its target alive in cffi: the caller has to hold both.
    return array, data


def _greedy_choice(ffi: cffi.FFI, lib: Any) -> int:
    sampler = lib.llama_sampler_init_greedy()
    array, _keep = _candidates(ffi, (0.0, 3.0, 1.0))
    lib.llama_sampler_apply(sampler, array)
    lib.llama_sampler_free(sampler)
    return int(array.data[array.selected].id) if 0 <= array.selected < array.size else -1


def _penalised(ffi: cffi.FFI, lib: Any, *, n_vocab_first: bool) -> bool | None:
    """Tell whether a window of one token lowers the logit of the last token alone; None where the build has none.

    A build with the shorter prototype takes n_vocab for the window, and then looks back on both tokens.
    """
    if not hasattr(lib, "llama_sampler_init_penalties"):
        return None
    # A C call with an argument too many or too few does not fail, it reads what lies in the registers: the header that
    # fits has to be proved by what the sampler does.
    arguments = (3, 1, 2.0, 0.0, 0.0) if n_vocab_first else (1, 2.0, 0.0, 0.0)
    sampler = lib.llama_sampler_init_penalties(*arguments)
    if not sampler:
        return False
    for token in (2, 0):
        lib.llama_sampler_accept(sampler, token)
    array, _keep = _candidates(ffi, (1.0, 1.0, 1.0))
    lib.llama_sampler_apply(sampler, array)
    lib.llama_sampler_free(sampler)
    seen = {int(array.data[i].id): float(array.data[i].logit) for i in range(array.size)}
    return seen == {0: 0.5, 1: 1.0, 2: 1.0}


def _draws_on_single(ffi: cffi.FFI, lib: Any) -> bool:
    """Tell whether sampling from one candidate consumes a random draw in this build."""

    def chosen(*, first_single: bool) -> list[int]:
        sampler = lib.llama_sampler_init_dist(1234)
        if first_single:
            array, _keep = _candidates(ffi, (1.0,))
            lib.llama_sampler_apply(sampler, array)
        ids = []
        for _ in range(6):
            array, _keep = _candidates(ffi, (0.0,) * 64)
            lib.llama_sampler_apply(sampler, array)
            ids.append(int(array.data[array.selected].id))
        lib.llama_sampler_free(sampler)
        return ids

    return chosen(first_single=True) != chosen(first_single=False)

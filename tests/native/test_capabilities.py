"""What a build can do is a table from names to symbols."""

from __future__ import annotations

from typing import Any

import pytest

from llama_native import CapabilityMissing, Library
from llama_native.capabilities import CAPABILITIES, REQUIRED, detect, require
from tests.native.real import NEWEST, OLDER, WITH_RPC, library_of
from tests.stublib import run_child

ALL = frozenset(symbol for alternatives in CAPABILITIES.values() for symbols in alternatives for symbol in symbols)


def _exported(*without: str) -> Any:
    return (ALL - set(without)).__contains__


def test_a_library_with_everything_has_every_capability() -> None:
    """And of alternatives the first."""
    found = detect(_exported())
    assert found == {name: alternatives[0] for name, alternatives in CAPABILITIES.items()}
    require(found, _exported())


def test_a_library_with_nothing_has_none() -> None:
    """Every required capability and each of its symbols is named at once."""
    assert detect(lambda _: False) == {}
    with pytest.raises(CapabilityMissing) as error:
        require({}, lambda _: False)
    assert error.value.name == ", ".join(REQUIRED)
    for name in REQUIRED:
        for symbol in CAPABILITIES[name][0]:
            assert symbol in str(error.value)


@pytest.mark.parametrize("name", sorted(CAPABILITIES))
def test_one_missing_symbol_takes_its_alternative_away(name: str) -> None:
    """The next alternative counts only where it is there whole."""
    alternatives = CAPABILITIES[name]
    found = detect(_exported(*(symbols[0] for symbols in alternatives)))
    assert name not in found
    for chosen in alternatives:
        others = {symbol for symbols in alternatives if symbols is not chosen for symbol in symbols} - set(chosen)
        assert detect(_exported(*others))[name] == chosen


def test_only_what_is_missing_is_named() -> None:
    """The symbols that are there are not in the message."""
    exported = _exported("llama_decode")
    with pytest.raises(CapabilityMissing, match="llama_decode") as error:
        require(detect(exported), exported)
    assert error.value.name == "decode"
    assert "llama_synchronize" not in str(error.value)


def child_found(path: str) -> dict[str, list[str]]:
    library = Library.open(path)
    for name in set(CAPABILITIES) - set(library.capabilities):
        with pytest.raises(CapabilityMissing, match=name):
            library.need(name)
    for name in library.capabilities:
        assert library.has(name)
        library.need(name)
    return {name: list(symbols) for name, symbols in library.capabilities.items()}


@pytest.mark.build
@pytest.mark.parametrize("folder", [NEWEST, OLDER, WITH_RPC])
def test_real_builds_have_what_was_seen_in_them(folder: str) -> None:
    """All but the calls of tools/native, which no release has, and RPC, which is a matter of how a build was made."""
    found = run_child(child_found, library_of(folder)).value()
    of_ours = {"native-switch", "model-from-file-with"}
    assert set(CAPABILITIES) - set(found) == of_ours | (set() if folder == WITH_RPC else {"rpc"})
    assert found["memory"][0] == "llama_get_memory"

"""The comparison of the planner with the library, where something that it needs is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_plan import main, model_of


def test_a_model_that_is_not_there_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before anything is loaded; a recipe that does not exist is told in the same way."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=r"smollm2.gguf is not there: run ci/model smollm2"):
        main(["--only", "smollm2", "--no-rpc"])
    with pytest.raises(SystemExit, match=r"none.gguf is not there"):
        model_of("none")

"""`splitctl serve --resume` serves a saved session where it was, unless a flag says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ctl.houses import house, served, stub_arguments
from tests.stublib import needs_compiler


@pytest.mark.stub
@needs_compiler
def test_a_resumed_session_serves_where_it_was_saved(tmp_path: Path) -> None:
    """Mode, devices, context and batches are those of the last switch; the one that is named is not."""
    arguments = stub_arguments(tmp_path)
    model_and_library = arguments[:4]
    with house() as home:
        with served(home, *arguments) as host:
            home.json("attach", "-p", "hello", "-n", "2", "--temp", "0")
            home.json("switch", "--to", "tensor", "-b", "64", "-ub", "32", "-ts", "3,1")
            was = home.json("ps")["sessions"][0]
            host.end()
        with served(home, *model_and_library, "--resume", "-ub", "16"):
            now = home.json("ps")["sessions"][0]
    assert (was["placement"]["mode"], was["placement"]["n_ubatch"]) == ("tensor", 32)
    assert now["placement"] == was["placement"] | {"n_ubatch": 16}
    assert now["sequences"] == was["sequences"]

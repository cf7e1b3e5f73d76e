"""Says which hooks of `hooks.patch` fit the sources of a llama.cpp release.

    python -m tools.native.check SOURCES

SOURCES is the folder of the release, with `src/` and `ggml/` in it. Every hook is tried by itself, with the lines
around it; a line of output tells its file, its line and whether it fits. Needs git, and changes nothing.

Exit code: 0 all fit; 1 some do not, and want to be carried over by hand.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PATCH = Path(__file__).parent / "hooks.patch"

_HUNK = re.compile(r"^(?=@@ )", re.MULTILINE)
_FILE = re.compile(r"^(?=diff --git )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Hook:
    """One change.

    Attributes:
        file: the file, from the top of the sources.
        line: where it is in the sources that it was made for.
        adds: the first line that it adds.
        patch: a patch with this change alone.
    """

    file: str
    line: int
    adds: str
    patch: str


def hooks(patch: str) -> Iterator[Hook]:
    """Take a patch apart."""
    for part in filter(None, _FILE.split(patch)):
        head, *hunks = _HUNK.split(part)
        file = head.splitlines()[0].rpartition(" b/")[2]
        for hunk in hunks:
            lines = hunk.splitlines()
            added = next((line[1:].strip() for line in lines[1:] if line.startswith("+") and line[1:].strip()), "")
            yield Hook(file, int(lines[0].split("+")[1].split(",")[0]), added, head + hunk)


def fits(hook: Hook, sources: Path) -> bool:
    """Try a hook on sources; nothing is changed."""
    command = ["git", "apply", "--check", "-"]
    done = subprocess.run(command, cwd=sources, input=hook.patch, text=True, capture_output=True, check=False)
    return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="the folder of a llama.cpp release")
    sources: Path = parser.parse_args(arguments).sources
    if not (sources / "src" / "llama.cpp").is_file():
        parser.error(f"{sources} has no src/llama.cpp; name the top folder of a release")
    all_fit = True
    for hook in hooks(PATCH.read_text(encoding="utf-8")):
        is_fit = fits(hook, sources)
        all_fit = all_fit and is_fit
        print(f"{'fits' if is_fit else 'DOES NOT FIT':12}  {hook.file}:{hook.line}  {hook.adds}")
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())

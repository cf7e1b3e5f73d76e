"""Says which hooks of `hooks.patch` fit the sources of a llama.cpp release, and what is new in its context.

    python -m tools.native.check SOURCES

SOURCES is the folder of the release, with `src/` and `ggml/` in it. Every hook is tried by itself; a line of output
tells its file, its line and whether it fits: as it is, loosely (of the lines around it only the nearest is the same:
look at it), or not at all. Then it names the members of `llama_context` that `llama-split.cpp` neither moves over nor
leaves to a new context: each is a thing that a caller may see, and would lose. Needs git, and changes nothing.

Exit code: 0 all fit and nothing is new; 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PATCH = Path(__file__).parent / "hooks.patch"
OURS = Path(__file__).parent / "llama-split.cpp"
#: Members that a context makes for itself, from the model and its parameters, and that no call shows.
MADE_ANEW = frozenset({
    "backend_buf_exp_size", "backend_buft", "backend_cpu", "backend_ptrs", "backends", "balloc", "gf_res_prev",
    "gf_res_prev_active", "gf_res_reserve", "graph_reuse_disable", "memory", "model", "n_input_tensors", "sched",
    "sched_need_reserve", "set_n_threads_fns",
})  # fmt: skip

_HUNK = re.compile(r"^(?=@@ )", re.MULTILINE)
_FILE = re.compile(r"^(?=diff --git )", re.MULTILINE)
_CONTEXT = re.compile(r"^struct llama_context \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_NESTED = re.compile(r"^    struct \w+ \{\n.*?^    \};", re.MULTILINE | re.DOTALL)
_MEMBER = re.compile(r"^    (?! |friend|static|using|struct)[^()\n]*?[\s&*](\w+)\s*(?:=[^;]*)?;", re.MULTILINE)


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


def fit(hook: Hook, sources: Path) -> str:
    """Try a hook on sources; nothing is changed. "fits", "fits loosely" or "DOES NOT FIT"."""
    # A folder inside a checkout is no part of it.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(sources.resolve().parent)}
    for said, *flags in (("fits",), ("fits loosely", "-C1")):
        command = ["git", "apply", "--check", *flags, "-"]
        done = subprocess.run(
            command, cwd=sources, env=env, input=hook.patch, text=True, capture_output=True, check=False
        )
        if done.returncode == 0:
            return said
    return "DOES NOT FIT"


def unknown_members(header: str, ours: str) -> list[str]:
    """Name the members of a context that our source does not speak of, and that a context does not make for itself.

    Args:
        header: text of `llama-context.h`.
        ours: text of `llama-split.cpp`.
    """
    found = _CONTEXT.search(header)
    body = re.sub(r"//.*", "", _NESTED.sub("", found[1])) if found else ""
    known = MADE_ANEW | set(re.findall(r"\w+", ours))
    return [name for name in _MEMBER.findall(body) if name not in known]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="the folder of a llama.cpp release")
    sources: Path = parser.parse_args(arguments).sources
    if not (sources / "src" / "llama.cpp").is_file():
        parser.error(f"{sources} has no src/llama.cpp; name the top folder of a release")
    is_right = True
    for hook in hooks(PATCH.read_text(encoding="utf-8")):
        said = fit(hook, sources)
        is_right = is_right and said == "fits"
        print(f"{said:12}  {hook.file}:{hook.line}  {hook.adds}")
    header = (sources / "src" / "llama-context.h").read_text(encoding="utf-8")
    for name in unknown_members(header, OURS.read_text(encoding="utf-8")):
        is_right = False
        print(f"{'IS NEW':12}  src/llama-context.h  {name}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

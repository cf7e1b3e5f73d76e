"""Take the picture of the server's page that docs/page.png is: a real model, some answers, some switches.

    python -m tools.page_picture MODEL [-o docs/page.png] [--width 900]

Needs Chromium with its driver (Debian: apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.ctl.browser import browser
from tests.ctl.houses import house
from tests.ctl.web import web

_QUESTIONS = (
    "Name three colours.",
    "What is the capital of France?",
    "Why is the sky blue?",
    f"Sum up this list in a sentence: {', '.join(f'item {n} is made of wood' for n in range(60))}.",
)


def picture(model: Path, width: int) -> bytes:
    """Serve a model, ask it, move it, and look at the page.

    Args:
        model: a chat model.
        width: of the page, CSS pixels.

    Returns:
        A PNG.
    """
    placed: list[str | Path] = ["-m", model, "--device", "CPU,CPU", "-c", "4096", "-np", "2", "-t", "1", "-sm", "layer"]
    with house() as home, web(home, *placed) as server, browser() as page:
        for question, mode in zip(_QUESTIONS, ("tensor", "row", "layer", ""), strict=True):
            messages = [{"role": "user", "content": question}]
            server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 64, "temperature": 0})
            if mode:
                server.post("/split-mode", {"to": mode})
        page.resize(width, 800)
        page.go(server.url)
        page.until("document.querySelectorAll('#modes button').length === 4 && document.querySelector('.bar')")
        page.until("document.getElementById('state').textContent === 'serving'")
        page.resize(width, int(page.run("return document.documentElement.scrollHeight")) + 1)
        return page.picture()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/page.png"))
    parser.add_argument("--width", type=int, default=900)
    asked = parser.parse_args(arguments)
    raw = picture(asked.model, asked.width)
    asked.output.write_bytes(raw)
    print(f"{asked.output}: {len(raw)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

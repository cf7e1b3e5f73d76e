"""What setup.cfg cannot say: the README as a package index shows it, where relative links lead nowhere."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from setuptools import setup

_HERE = Path(__file__).parent
_RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
_WITHOUT_ADDRESS = "\nThe pages that are named here are in `docs/` of the source archive.\n"


def index_page(readme: str, source: str) -> str:
    """Make relative links and pictures absolute.

    Args:
        readme: Markdown.
        source: where the source is published ("https://host/owner/name"); empty: nowhere, so that only the words of a
            link stay, and pictures go.
    """

    def absolute(link: re.Match[str]) -> str:
        is_picture, words, target = link.groups()
        if not source:
            return "" if is_picture else words
        return f"{is_picture}[{words}]({source.rstrip('/')}/{'raw' if is_picture else 'blob'}/HEAD/{target})"

    page = _RELATIVE.sub(absolute, readme)
    return page if source else page + _WITHOUT_ADDRESS


def _source() -> str:
    config = configparser.ConfigParser()
    config.read(_HERE / "setup.cfg", encoding="utf-8")
    return config["metadata"].get("url", "")


if __name__ == "__main__":
    setup(long_description=index_page((_HERE / "README.md").read_text(encoding="utf-8"), _source()))

"""Counts skips, and tells which of them nobody agreed to."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


class SkipLedger:
    """Counts skips and tells which of them no line of the list allows.

    Args:
        lines: Lines of `allowed_skips.txt`: `test id pattern | reason pattern`, blank, or a comment.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        """Read the list.

        Raises:
            ValueError: A line has no `|`.
        """
        self._allowed: list[tuple[str, str]] = []
        self.skips: list[tuple[str, str]] = []
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            node, bar, reason = text.partition("|")
            if not bar or not reason.strip():
                message = f"allowed_skips.txt line {number}: found {text!r}, wanted 'test id pattern | reason pattern'"
                raise ValueError(message)
            self._allowed.append((node.strip(), reason.strip()))

    def add(self, node: str, reason: str) -> None:
        """Count one skip.

        Args:
            node: The id of the test, or the path of a module that skipped as a whole.
            reason: Its words.
        """
        self.skips.append((node, reason.removeprefix("Skipped: ")))

    def unexpected(self) -> list[tuple[str, str]]:
        """The skips that no line allows, in the order they came."""
        return [
            (node, reason)
            for node, reason in self.skips
            if not any(
                fnmatchcase(node, node_glob) and fnmatchcase(reason, reason_glob)
                for node_glob, reason_glob in self._allowed
            )
        ]

"""A headless Chromium, driven over WebDriver's own HTTP by the standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    DRIVER is None or CHROMIUM is None,
    reason="no Chromium with its driver (Debian: apt-get install chromium chromium-driver)",
)

_WAIT_MS = 120_000
"""For anything on a page to come true; no test measures it."""
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
#: Ends as soon as an expression is true, which is looked at before every frame.
_UNTIL = """
const done = arguments[arguments.length - 1], holds = new Function("return " + arguments[0]);
(function look() { holds() ? done(true) : requestAnimationFrame(look); })();
"""


@dataclass(frozen=True, slots=True)
class Browser:
    """A browser with one page.

    Args:
        port: its driver's.
        session: the driver's name for it.
    """

    port: int
    session: str

    def go(self, url: str) -> None:
        """Load a page."""
        self._ask("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page; give what it returns."""
        return self._ask("POST", "execute/sync", {"script": script, "args": arguments})

    def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        self._ask("POST", "execute/async", {"script": _UNTIL, "args": [expression]})

    def text(self, selector: str) -> str:
        """Give the text that is seen of the first element that fits."""
        return str(self._ask("GET", f"element/{self._find(selector)}/text"))

    def click(self, selector: str) -> None:
        """Click on it as a person does: it must be in sight and on top."""
        self._ask("POST", f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into it."""
        self._ask("POST", f"element/{self._find(selector)}/value", {"text": text})

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Be a screen of so many CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._ask("POST", "goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})

    def picture(self) -> bytes:
        """Give what is seen, as a PNG."""
        return base64.b64decode(self._ask("GET", "screenshot"))

    def complaints(self) -> list[str]:
        """Give what the page has written to its console."""
        entries = self._ask("POST", "se/log", {"type": "browser"})
        return [str(one["message"]) for one in entries]

    def _find(self, selector: str) -> str:
        found = self._ask("POST", "element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return _ask(self.port, method, f"/session/{self.session}/{path}", body)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser until the block ends."""
    assert DRIVER is not None
    with tempfile.TemporaryDirectory(prefix="c", ignore_cleanup_errors=True) as folder:
        driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            port = _port_of(driver)
            switches = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
            options = {"binary": CHROMIUM, "args": [*switches, f"--user-data-dir={folder}", "--lang=en-US"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
                "timeouts": {"script": _WAIT_MS, "pageLoad": _WAIT_MS},
            }
            made = _ask(port, "POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            one = Browser(port, made["sessionId"])
            yield one
            _ask(port, "DELETE", f"/session/{one.session}")
        finally:
            driver.terminate()
            driver.communicate()


def _port_of(driver: subprocess.Popen[bytes]) -> int:
    """Read the port that a driver has taken from its first lines."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if found := re.search(rb"started successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError("chromedriver did not start")


def _ask(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2 * _WAIT_MS / 1e3)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = json.loads(connection.getresponse().read())["value"]
    finally:
        connection.close()
    if isinstance(answer, dict) and "error" in answer and "stacktrace" in answer:
        raise AssertionError(f"{path}: {answer['error']}: {answer['message']}")
    return answer

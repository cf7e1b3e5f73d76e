"""The page in a browser: a switch that is clicked happens, and everything that it says is so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ctl.browser import Browser, browser, needs_browser
from tests.ctl.houses import house
from tests.ctl.web import Web, web

pytestmark = [needs_browser, pytest.mark.model, pytest.mark.slow]
KEY = "a-key-of-this-page"


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Web]:
    """A host of a real model, with a key, and a policy that never finds a reason to switch."""
    with house() as home:
        rates = home.folder / "rates.json"
        modes = {name: {"prompt_tps": 50, "generate_tps": 20} for name in ("layer", "tensor")}
        rates.write_text(json.dumps({"switch_s": 9, "modes": modes}), encoding="ascii")
        placed = ["-m", smollm2, "--device", "CPU,CPU", "-c", "512", "-t", "1", "-np", "2", "-sm", "layer"]
        placed += ["--policy", "auto", "--rates", rates]
        with web(home, *placed, key=KEY) as served:
            yield served


@pytest.fixture(scope="module")
def screen() -> Iterator[Browser]:
    """A browser."""
    with browser() as one:
        yield one


@pytest.fixture
def page(server: Web, screen: Browser) -> Browser:
    """The page, with the key typed in once, and everything on it."""
    screen.resize(1000, 900)
    screen.go(server.url)
    if screen.run("return sessionStorage.getItem('splitctl-key')") != KEY:
        screen.run("sessionStorage.clear()")
        screen.go(server.url)
        screen.until("!document.getElementById('keyform').hidden")
        screen.type("#key", KEY + "\n")
    screen.until("document.querySelectorAll('#modes button').length === 4")
    screen.until("document.getElementById('state').textContent === 'serving'")
    return screen


def test_a_switch_that_is_clicked_happens(server: Web, page: Browser) -> None:
    """A click on a mode moves the session, and the page shows the outcome with its stages."""
    server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
    assert page.text("#effective") == "layer"
    page.click("button[data-mode=tensor]")
    page.until("document.getElementById('effective').textContent === 'tensor' && document.querySelector('.bar')")
    status = server.get("/session").body
    assert (status["effective"], status["recent_switches"][-1]["status"]) == ("tensor", "switched")
    timeline = page.text("#timeline")
    assert "switched: to tensor, serving tensor" in timeline
    assert "weights from file" in timeline
    for stage, ms in status["recent_switches"][-1]["stages_ms"].items():
        assert (stage in timeline) == (ms is not None)
    page.until("document.querySelector('button.here').dataset.mode === 'tensor'")
    server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
    page.until("document.getElementById('timeline').textContent.includes('confirmed')")


def test_a_mode_that_is_refused_says_why(server: Web, page: Browser) -> None:
    """What the rules forbid cannot be clicked, and its reason stands below it."""
    modes = server.get("/split-mode").body["modes"]
    assert not modes["row"]["allowed"]
    assert page.run("return document.querySelector('button[data-mode=row]').disabled")
    assert page.run("return document.querySelector('button[data-mode=row]').nextSibling.textContent") == "; ".join(
        modes["row"]["reasons"]
    )


def test_the_page_shows_what_the_session_is(server: Web, page: Browser) -> None:
    """Devices with their memory, sequences with their tokens, rates and the model are those of the status."""
    server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
    status = server.get("/session").body
    held = json.dumps([str(one["n_tokens"]) for one in status["sequences"]])
    shown = "JSON.stringify([...document.querySelectorAll('#sequences td.n')].map(one => one.textContent))"
    page.until(f"{shown} === {json.dumps(held.replace(' ', ''))}")
    assert page.text("#generate_tps") != "-"
    devices = page.run("return [...document.querySelectorAll('#devices tr')].map(one => one.innerText)")
    assert len(devices) == 2
    assert all("CPU" in one and "GiB" in one for one in devices)
    assert status["model"]["name"] in page.text("#model")
    page.until("document.getElementById('policy').textContent.startsWith('policy: stays in ')")
    assert page.text("#policy") == f"policy: {server.get('/session').body['policy']['decision']}"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_the_page_fits_a_phone(page: Browser, width: int) -> None:
    """No width makes a page that has to be moved sideways, and buttons are large enough for a finger."""
    page.resize(width, 844, 2.0)
    assert page.run("return document.documentElement.scrollWidth") <= width
    boxes = page.run("return [...document.querySelectorAll('#modes button')].map(one => one.getBoundingClientRect())")
    assert all(box["height"] >= 44 and box["right"] <= width for box in boxes)


def test_the_page_needs_the_key_and_says_so(server: Web, screen: Browser) -> None:
    """Without a key, and with a wrong one, the page shows nothing of the session and asks again."""
    screen.go(server.url)
    screen.run("sessionStorage.clear()")
    screen.go(server.url)
    screen.until("!document.getElementById('keyform').hidden")
    assert "asks for its API key" in screen.text("#notice")
    screen.type("#key", "wrong\n")
    screen.until("document.getElementById('notice').textContent.includes('wrong')")
    assert screen.run("return document.querySelectorAll('#modes button').length") == 0
    assert screen.text("#model") == ""


def test_the_page_has_no_mistakes(page: Browser) -> None:
    """Nothing in the page breaks its own policy or throws."""
    assert [one for one in page.complaints() if "401" not in one] == []

"""The flags of the HTTP server: what they make of what they are given."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner, Result

from splitctl.cli.http_options import http_options


def _run(*arguments: str, **env: str) -> Result:
    @click.command()
    @http_options
    def show(http: object) -> None:
        click.echo(f"{getattr(http, 'aliases', None)} {getattr(http, 'origins', None)}")

    return CliRunner().invoke(show, ["--port", "0", *arguments], env=env)


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://example.org", "https://example.org"),
        ("HTTPS://Example.org:443/", "https://example.org"),
        ("http://example.org:80", "http://example.org"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("moz-extension://0F-a", "moz-extension://0F-a"),
        ("tauri://localhost", "tauri://localhost"),
        ("app://.", "app://."),
        ("file://", "file://"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_an_origin_is_what_browsers_send(given: str, origin: str) -> None:
    """Any scheme is taken, null and * as well; those of the web lose their default port, their capitals and a slash."""
    assert _run("--cors", given).output == f"() ({origin!r},)\n"


@pytest.mark.parametrize(
    "given",
    ["", "example.org", "https://", "https:///", "https://a/b", "https://a?b", "https://größe.de", "//a", "NULL"],
)
def test_what_no_browser_sends_is_refused(given: str) -> None:
    """A path, a host alone and letters that are not ASCII are refused with what is wanted."""
    result = _run("--cors", given)
    assert result.exit_code == 2
    assert "no origin that browsers send" in result.output


def test_aliases_have_commas_and_a_variable() -> None:
    """The names are taken apart as llama-server does, and the first stays the first."""
    assert _run("--alias", "z/model, größe 1,,b").output == "('z/model', 'größe 1', 'b') ()\n"
    assert _run("-a", "one").output == "('one',) ()\n"
    assert _run(LLAMA_ARG_ALIAS="x,y").output == "('x', 'y') ()\n"


@pytest.mark.parametrize("given", ["x" * 257, "a\nb", "a,b\x1b[0m"])
def test_an_alias_that_clients_could_not_send_is_refused(given: str) -> None:
    """Names that are too long or not printable are refused at the start."""
    result = _run("--alias", given)
    assert result.exit_code == 2
    assert "--alias" in result.output

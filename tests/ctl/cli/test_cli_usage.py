"""What the command line refuses before any child is started, and what its flags come to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from splitctl.carry.sampling import RANDOM_SEED, SamplerSpec
from splitctl.cli import run as cli_run
from splitctl.cli import serve as cli_serve
from splitctl.cli import switch as cli_switch
from splitctl.cli.main import main
from splitctl.cli.options import changes_options, placement_options, sampler_options, serving_placement_options
from splitctl.cli.output import ExitCode, Screen, error_body, one_line, print_json, switch_table
from splitctl.cli.sessions import status_lines
from splitctl.cli.switch import outcome_line, show_switch
from splitctl.outcome import Route
from splitctl.placement import FlashAttn, Placement, SplitMode

_RUN = ["run", "-m", "model.gguf", "-p", "hi", "--device", "CPU,CPU"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLAMA_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "'-m'"),
        (["run", "-m", "x"], "-p TEXT or with -f FILE"),
        (["run", "-m", "x", "-p", "a", "-f", "b"], "one of them"),
        (["run", "-m", "x", "-p", ""], "the prompt is empty"),
        ([*_RUN, "-sm", "sideways"], "none, layer, row, tensor"),
        ([*_RUN, "-psm", "sideways"], "none, layer, row, tensor"),
        ([*_RUN, "-ts", "1,2,3"], "2 shares at most"),
        ([*_RUN, "-ts", "-1,2"], "shares from 0"),
        ([*_RUN, "-ts", "nan,1"], "shares from 0"),
        ([*_RUN, "-ts", "inf,1"], "shares from 0"),
        ([*_RUN, "-ts", "0,0"], "more than zero"),
        ([*_RUN, "-ts", "a,b"], "such as 3,1"),
        ([*_RUN, "-c", "-5"], "from 0"),
        ([*_RUN, "-c", "many"], "not a valid integer"),
        ([*_RUN, "-b", "0"], "from 1"),
        ([*_RUN, "-ngl", "some"], "auto or all"),
        ([*_RUN, "-fa", "maybe"], "on, off or auto"),
        ([*_RUN, "-ctk", "q3_k"], "iq4_nl"),
        ([*_RUN, "-np", "1000"], "256"),
        ([*_RUN, "--device", "CPU,,CPU"], "splitctl devices"),
        ([*_RUN, "--temp", "nan"], "finite"),
        ([*_RUN, "--top-p", "1.5"], "0 to 1"),
        ([*_RUN, "--repeat-penalty", "0"], "above 0"),
        ([*_RUN, "--seed", "99999999999"], "4294967295"),
        ([*_RUN, "--stop", ""], "not empty"),
        ([*_RUN, "--proof", "faith"], "positions"),
        ([*_RUN, "--weights", "cloud"], "auto, file, pinned, resident"),
        (["serve", "-m", "x", "--weights", ""], "auto, file, pinned, resident"),
        (["switch", "--to", "tensor", "--via", "moon"], "'auto', 'beside', 'in-place'"),
        ([*_RUN, "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_a_usage_error_is_one_line(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A flag that cannot be is told in one line on stderr that says what is wanted, with status 2."""
    assert main(arguments) == ExitCode.USAGE
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert "--help" in err


def test_a_usage_error_is_an_object_too(capfd: pytest.CaptureFixture[str]) -> None:
    """With --json a usage error is one object on stdout, beside the line on stderr."""
    assert main(["run", "--json", "-m", "x"]) == ExitCode.USAGE
    out, err = capfd.readouterr()
    body = json.loads(out)
    assert body["exit_code"] == 2
    assert body["error"]["message"] == err.strip()


@pytest.mark.parametrize(
    ("raw", "said"), [(b"ab\xff", "byte 2 is 0xff"), (b"\xe9", "byte 0"), (None, "cannot be read"), (b"\n", "is empty")]
)
def test_a_prompt_file_that_is_no_text(
    raw: bytes | None, said: str, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A prompt file that is missing, empty or not UTF-8 is named with what is wrong and what to do."""
    path = tmp_path / "prompt.txt"
    if raw is not None:
        path.write_bytes(raw)
    code = main(["run", "-m", "model.gguf", "-f", str(path)])
    out, err = capfd.readouterr()
    assert (code, out) == (ExitCode.USAGE if said == "is empty" else ExitCode.FAILED, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_prompt_folder_is_no_prompt(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder in the place of a prompt file is told by name."""
    assert main(["run", "-m", "model.gguf", "-f", str(tmp_path)]) == ExitCode.FAILED
    assert "Is a directory" in capfd.readouterr().err


def test_a_prompt_argument_that_is_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    """Bytes on the command line that are not UTF-8 are refused, not passed on mangled."""
    assert main(["run", "-m", "model.gguf", "-p", "ab\udcff"]) == ExitCode.FAILED
    assert "byte 2 of -p" in capfd.readouterr().err


def test_the_version_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """--version prints the name and the version, and help is no error."""
    assert main(["--version"]) == ExitCode.DONE
    assert capfd.readouterr().out.startswith("splitctl, version ")
    assert main(["run", "--help"]) == ExitCode.DONE
    assert "-psm" in capfd.readouterr().out
    assert main([]) == ExitCode.USAGE


# -- what flags come to ------------------------------------------------------------------------------------------------


def _parsed(arguments: list[str], **env: str) -> tuple[Placement, SamplerSpec]:
    seen: list[tuple[Placement, SamplerSpec]] = []

    @click.command()
    @placement_options
    @sampler_options
    def command(placement: Placement, sampler: SamplerSpec) -> None:
        seen.append((placement, sampler))

    done = CliRunner().invoke(command, arguments, env=env, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return seen[0]


def test_the_defaults_are_llama_cpps() -> None:
    """Without a flag or a variable the placement and the sampler are llama.cpp's own."""
    placement, sampler = _parsed([])
    assert placement == Placement()
    assert sampler == SamplerSpec()
    assert sampler.seed == RANDOM_SEED


def test_every_flag_arrives() -> None:
    """Every placement and sampler flag reaches its field."""
    words = (
        "-sm tensor -ts 3,1 -mg 1 --device CPU,CPU -ngl all -c 4096 -ctk q8_0 -ctv f32 -nkvo -fa off -b 64 -ub 32 "
        "-np 4 -t 3 -tb 5 --temp 0 --top-k 7 --top-p 0.5 --min-p 0.1 --repeat-penalty 1.5 --repeat-last-n 9 --seed 11 "
        "--stop a --stop b"
    )
    placement, sampler = _parsed(words.split())
    assert placement == Placement(
        mode=SplitMode.TENSOR,
        devices=("CPU", "CPU"),
        tensor_split=(3.0, 1.0),
        main_gpu=1,
        n_gpu_layers=-1,
        n_ctx=4096,
        type_k="q8_0",
        type_v="f32",
        offload_kqv=False,
        flash_attn=FlashAttn.OFF,
        n_batch=64,
        n_ubatch=32,
        n_seq_max=4,
        n_threads=3,
        n_threads_batch=5,
    )
    assert sampler == SamplerSpec(0.0, 7, 0.5, 0.1, 1.5, 9, 11, ("a", "b"))


def _changes(arguments: list[str], **env: str) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []

    @click.command()
    @changes_options
    def command(changes: dict[str, Any]) -> None:
        seen.append(changes)

    done = CliRunner().invoke(command, arguments, env=env, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return seen[0]


def test_only_named_flags_are_changes() -> None:
    """What is not on the command line is no change, whatever a variable says; defaults can be named."""
    assert _changes([], LLAMA_ARG_CTX_SIZE="64", LLAMA_ARG_NO_KV_OFFLOAD="1") == {}
    assert _changes(["-sm", "layer", "-ts", ""]) == {"mode": SplitMode.LAYER, "tensor_split": None}
    words = "-ts 3,1 -mg 0 --device CPU,CPU -ngl all -c 0 -ctk f16 -ctv f16 -kvo -fa auto -b 64 -ub 32 -np 4 -kvu"
    assert _changes([*words.split(), "-t", "-1", "-tb", "2"]) == {
        "tensor_split": (3.0, 1.0), "main_gpu": 0, "devices": ("CPU", "CPU"), "n_gpu_layers": -1, "n_ctx": 0,
        "type_k": "f16", "type_v": "f16", "offload_kqv": True, "flash_attn": FlashAttn.AUTO, "n_batch": 64,
        "n_ubatch": 32, "n_seq_max": 4, "kv_unified": True, "n_threads": 0, "n_threads_batch": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "n_seq_max", "unified"),
    [([], 4, True), (["-np", "2"], 2, False), (["-np", "2", "-kvu"], 2, True), (["-no-kvu"], 4, False)],
)
def test_a_server_has_llama_servers_sequences(arguments: list[str], n_seq_max: int, unified: bool) -> None:
    """Four sequences that share one cache, until somebody says how many."""
    seen: list[Placement] = []

    @click.command()
    @serving_placement_options
    def command(placement: Placement) -> None:
        seen.append(placement)

    assert CliRunner().invoke(command, arguments, catch_exceptions=False).exit_code == 0
    assert (seen[0].n_seq_max, seen[0].kv_unified) == (n_seq_max, unified)


def test_variables_stand_in_for_flags() -> None:
    """LLAMA_ARG_* variables are read, and a flag wins over its variable."""
    placement, sampler = _parsed(
        ["-c", "128"],
        LLAMA_ARG_SPLIT_MODE="none",
        LLAMA_ARG_CTX_SIZE="64",
        LLAMA_ARG_DEVICE="CPU",
        LLAMA_ARG_N_GPU_LAYERS="3",
        LLAMA_ARG_FLASH_ATTN="enabled",
        LLAMA_ARG_CACHE_TYPE_K="q4_0",
        LLAMA_ARG_THREADS="2",
        LLAMA_ARG_TEMPERATURE="0.25",
        LLAMA_ARG_TOP_K="3",
    )
    assert placement == Placement(
        mode=SplitMode.NONE,
        n_ctx=128,
        devices=("CPU",),
        n_gpu_layers=3,
        flash_attn=FlashAttn.ON,
        type_k="q4_0",
        n_threads=2,
    )
    assert (sampler.temp, sampler.top_k) == (0.25, 3)


@pytest.mark.parametrize(
    ("arguments", "env", "on_devices"),
    [
        ([], {}, True),
        ([], {"LLAMA_ARG_KV_OFFLOAD": "disabled"}, False),
        ([], {"LLAMA_ARG_KV_OFFLOAD": "1"}, True),
        ([], {"LLAMA_ARG_NO_KV_OFFLOAD": "1", "LLAMA_ARG_KV_OFFLOAD": "1"}, False),
        (["-kvo"], {"LLAMA_ARG_NO_KV_OFFLOAD": "1"}, True),
        (["-nkvo"], {}, False),
    ],
)
def test_where_the_cache_lives(arguments: list[str], env: dict[str, str], on_devices: bool) -> None:
    """-kvo, -nkvo and both of llama.cpp's variables decide it, a flag before a variable."""
    assert _parsed(arguments, **env)[0].offload_kqv is on_devices


# -- output ------------------------------------------------------------------------------------------------------------


def test_json_is_strict(capfd: pytest.CaptureFixture[str]) -> None:
    """Numbers that JSON lacks become null, and the object is one line."""
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": ("x\ny",)})
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"a": None, "b": [None, 1.5], "c": ["x\ny"]}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_show_is_an_escape(encoding: str) -> None:
    """A table and a name in an encoding that lacks their characters are shown with escapes, not as a traceback."""
    program = (
        "import sys; from splitctl.cli import main as cli; from splitctl.cli.main import main\n"
        "from splitctl.cli import library; from splitctl.cli.output import ExitCode\n"
        "from splitctl.cli.child import JobAnswer\n"
        "one = dict(name='\u8a00\u2588', kind='cpu', backend='CPU', description='d', memory_free=1, memory_total=2)\n"
        "library.ask = lambda *_: JobAnswer({'devices': [one]})\n"
        "sys.argv[1:] = ['devices']; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u8a00\\u2588" in done.stdout


def test_messages_are_one_line() -> None:
    """Line feeds and terminal escapes in a message do not reach the terminal."""
    assert one_line("a\n  b\r\n\x1b[31mred\x07") == "a b [31mred"
    assert error_body("K", "a\nb", ExitCode.FAILED, {"text": "t"}) == {
        "text": "t",
        "error": {"kind": "K", "message": "a b"},
        "exit_code": 1,
    }


def test_the_table_shows_every_stage() -> None:
    """Stages that did not run have a dash, and a fallback its own row."""
    table = switch_table(
        {
            "requested": "tensor",
            "status": "fell_back",
            "stages_ms": {"saving": 1.5, "proving": None},
            "total_ms": 2.0,
            "fallback_ms": 0.5,
            "state_bytes": 1024 * 1024,
            "weight_bytes": None,
            "n_tokens": 3,
        }
    )
    assert list(table.columns[0].cells) == [
        "saving", "proving", "total", "of it falling back", "state", "weights", "tokens carried",
    ]  # fmt: skip
    assert list(table.columns[1].cells) == ["1.5 ms", "-", "2.0 ms", "0.5 ms", "1.0 MiB", "-", "3"]


_BESIDE = {
    "requested": "tensor",
    "status": "switched",
    "effective": "tensor",
    "stages_ms": {"saving": 50.0, "placing": 490.0},
    "stages_gb_s": {"saving": 53.0, "placing": None},
    "total_ms": 700.0,
    "pause_ms": 80.0,
    "state_bytes": 1024 * 1024,
    "weight_bytes": 1024 * 1024,
    "weights": "pinned",
    "weights_reason": "resident does not fit\nbeside it",
    "carry_pinned": False,
    "carry_pinned_reason": "there is no libcuda.so.1",
    "via": "beside",
    "n_tokens": 3,
    "n_sequences": 1,
    "confirmed": True,
}


def test_the_table_shows_the_tier_and_how_fast_each_stage_was() -> None:
    """Rates beside times; the pause, and the ways of weights and state."""
    table = switch_table(_BESIDE)
    assert list(table.columns[2].cells)[:2] == ["53.00", ""]
    shown = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    assert (shown["pause"], shown["weights from"]) == ("80.0 ms", "pinned")
    assert shown["state through"] == "unpinned memory"
    assert "of it before the pause" not in shown
    ahead = switch_table({**_BESIDE, "ahead_bytes": 512 * 1024})
    shown = dict(zip(ahead.columns[0].cells, ahead.columns[1].cells, strict=True))
    assert (shown["state"], shown["of it before the pause"]) == ("1.0 MiB", "0.5 MiB")
    assert {"state through", "weights from", "pause"}.isdisjoint(
        switch_table({**_BESIDE, "pause_ms": None, "weights": None, "carry_pinned": None}).columns[0].cells
    )


def test_a_switch_says_why_it_did_not_go_as_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """One line for the weights and one for the state, and none where all went as asked."""
    show_switch(_BESIDE, Screen(as_json=False))
    told = capfd.readouterr().err.splitlines()[-2:]
    assert told == [
        "weights from pinned: resident does not fit beside it",
        "state through unpinned memory: there is no libcuda.so.1",
    ]
    show_switch({**_BESIDE, "via_reason": "the host lacks memory", "weights_reason": ""}, Screen(as_json=False))
    assert "in place: the host lacks memory" in capfd.readouterr().err.splitlines()[-2]
    show_switch({**_BESIDE, "ahead_reason": "one cache"}, Screen(as_json=False))
    assert capfd.readouterr().err.splitlines()[-1] == "state in one piece: one cache"
    show_switch({**_BESIDE, "weights_reason": "", "carry_pinned_reason": ""}, Screen(as_json=False))
    assert "tokens carried" in capfd.readouterr().err.splitlines()[-2]


def test_the_line_of_a_switch_names_what_is_unusual() -> None:
    """Weights of another tier than the file, and how long nothing was generated beside; else it is as it was."""
    assert outcome_line(_BESIDE) == (
        "switched to tensor in 700 ms; weights pinned; paused for 80 ms; 3 tokens of 1 sequence carried; confirmed"
    )
    plain = {**_BESIDE, "weights": "file", "via": "composed"}
    assert outcome_line(plain) == "switched to tensor in 700 ms; 3 tokens of 1 sequence carried; confirmed"
    assert "in 700 ms; by the library's own call; 3 tokens" in outcome_line(plain | {"via": "native"})


def test_a_status_names_the_tier_of_its_weights() -> None:
    """And how much of the copy is there; a host that says nothing of it is shown without."""
    status: dict[str, Any] = {
        "name": "a", "state": "serving", "model": {}, "sequences": [], "streams": 0, "queued": 0,
        "tokens_per_second": {},
    }  # fmt: skip
    assert not [line for line in status_lines(status) if "weights" in line]
    for copy, words in ((None, ""), ("42 %", ", 42 % copied"), ("complete", ", the copy is complete")):
        told = list(status_lines({**status, "weights": {"tier": "pinned", "copy": copy}}))
        assert f"  weights      pinned{words}" in told


def test_a_status_names_a_second_worker_while_there_is_one() -> None:
    """Both processes of a switch beside are shown, and one where nothing is switched."""
    status: dict[str, Any] = {"name": "a", "state": "switching", "pid": 1, "worker_pid": 2, "error": {"message": "x"}}
    assert next(status_lines({**status, "standby_pid": 3})) == "a: switching (pid 1, worker 2, second worker 3)"
    assert next(status_lines({**status, "standby_pid": None})) == "a: switching (pid 1, worker 2)"


class _Taken(Exception):
    """Ends a command where it would begin its work, with what it would work on."""


@pytest.mark.parametrize(("words", "tier"), [([], "file"), (["--weights", "resident"], "resident")])
@pytest.mark.parametrize("command", ["run", "serve"])
def test_the_tier_of_the_weights_arrives(
    command: str, words: list[str], tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run and a host are asked for the tier that is named, else for the file."""

    def taken(what: Any, *_: Any) -> Any:
        raise _Taken(what.weights.value)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(cli_run, "ask", taken)
    monkeypatch.setattr(cli_serve, "_Serving", taken)
    arguments = {"run": _RUN[1:], "serve": ["-m", "model.gguf"]}[command]
    with pytest.raises(_Taken, match=tier):
        {"run": cli_run.run, "serve": cli_serve.serve}[command].main([*arguments, *words], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "route"), [([], Route.AUTO), *((["--via", one.value], one) for one in (Route.IN_PLACE, Route.NATIVE))]
)
@pytest.mark.parametrize("dry", [False, True])
def test_the_route_of_a_switch_arrives(
    words: list[str], route: Route, dry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host is asked to go, or to say whether it would, by the route that is named."""

    def taken(_session: str | None, request: Any, *_: Any, **__: Any) -> Any:
        raise _Taken(request.options.via.value)

    monkeypatch.setattr(cli_switch, "_switch", taken)
    monkeypatch.setattr(cli_switch, "ask_host", taken)
    with pytest.raises(_Taken, match=route.value):
        cli_switch.switch.main(["--to", "tensor", *words, *(["--dry-run"] if dry else [])], standalone_mode=False)

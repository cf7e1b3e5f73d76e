"""What people do with LLM and a model of a file, by the real `llm`; run as a child: MODEL. Prints one JSON object.

A child of its own, since it holds the library, and finds the plugin by its entry point.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llm
from click.testing import CliRunner
from llm.cli import cli

DOG = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
DOGS = [{"size": "small"}, {"size": "large"}]
GREEDY = {"temperature": 0.0, "n_predict": 6}


def main(model: Path) -> dict[str, Any]:
    """Ask for help, then hold a conversation that is switched between its turns, and follow a schema."""
    helped = CliRunner().invoke(cli, ["--help"])
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in {"splitctl", "llama_native"})
    placement = {"devices": "CPU,CPU", "n_ctx": 512, "n_threads": 1}
    settings = {"models": [str(model.parent), str(model), "/no/such.gguf"], "placement": placement}
    (llm.user_dir() / "splitctl.json").write_text(json.dumps(settings), encoding="utf-8")
    asked = llm.get_model(f"splitctl/{model.name}")
    talk = asked.conversation()
    first = talk.prompt("Name a colour.", system="You are brief.", **GREEDY)
    pieces = list(first)
    second = talk.prompt("Another one.", split_mode="tensor", **GREEDY)
    text = second.text()
    third = talk.prompt("And one more.", **GREEDY)
    third.text()
    dog = json.loads(asked.prompt("Invent a dog.", schema=DOG, temperature=0.0).text())
    asking = ["-m", asked.model_id, "hi", "-o", "split_mode", "tensor", "-o", "n_predict", "1"]
    ran = CliRunner().invoke(cli, asking)
    left = iter(asked.prompt("Count to ten.", **GREEDY))
    next(left)
    errors = {}
    for name, ask in {
        "busy": lambda: asked.prompt("hi"),
        "schema": lambda: asked.prompt("hi", schema={"type": "string", "pattern": "a+"}),
        "file": lambda: llm.get_model("splitctl/such.gguf").prompt("hi"),
    }.items():
        try:
            ask().text()
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            errors[name] = f"{type(error).__name__}: {error}"
        if name == "busy":
            left.close()
    return {
        "help": helped.output,
        "loaded": loaded,
        "pieces": pieces,
        "text": first.text(),
        "second": text,
        "usage": [first.usage().input, first.usage().output, third.usage().input, third.usage().details["reused"]],
        "json": first.response_json,
        "dog": dog,
        "status": [ran.exit_code, ran.stderr],
        "errors": errors,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

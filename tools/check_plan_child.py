"""One case of `check_plan`, in a child: load, fill the context, report the library's lines and what is resident."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from llama_native import Context, Library, Model
from splitctl.engine.buffer_lines import buffer_lines
from splitctl.engine.engine import context_params, model_params
from splitctl.placement import Placement
from tools.children import say

_PAGE = os.sysconf("SC_PAGE_SIZE")


def settled(pid: int) -> int:
    """Read the resident memory of a process.

    Args:
        pid: of it.

    Returns:
        Bytes.
    """
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def _server_pid(address: str) -> int:
    """Find the process that listens on an address of this machine."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    inodes = {row.split()[9] for row in rows if row.split()[1].endswith(port) and row.split()[3] == "0A"}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = {str(one.readlink()) for one in folder.iterdir()}
        except OSError:
            continue
        if any(f"socket:[{inode}]" in links for inode in inodes):
            return int(folder.parent.name)
    return 0


def _fill(context: Context, rows: int) -> None:
    """Decode until the context is full; the first tokens ask for logits, and of every later batch the last."""
    n_seq, done = context.n_seq_max, 0
    while done < context.n_ctx:
        size = rows if done == 0 else min(context.n_batch, context.n_ctx - done)
        seq_ids = [index % n_seq for index in range(done, done + size)]
        positions = [index // n_seq for index in range(done, done + size)]
        context.decode([5] * size, positions, seq_ids, [done == 0 or index == size - 1 for index in range(size)])
        done += size
    context.synchronize()


def main(job: dict[str, Any]) -> None:
    """Do one case and print one JSON object."""
    placement = Placement.from_json(job["placement"])
    library = Library.open(job["library"], env=os.environ)
    library.add_rpc_servers(job["rpc"])
    library.devices()
    heard: list[str] = []
    library.log.listen(lambda _, text: heard.append(text))
    before = settled(os.getpid())
    model = Model.load(library, job["model"], model_params(placement))
    context = Context(model, context_params(placement, embeddings=False))
    told = buffer_lines("".join(heard).splitlines())
    _fill(context, job["rows"])
    say(
        status="filled",
        lines=[[line.buffer, line.kind, line.n_bytes] for line in told],
        resident=(settled(os.getpid()) - before) / (1024 * 1024),
        servers=[settled(_server_pid(address)) for address in job["rpc"]],
    )
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

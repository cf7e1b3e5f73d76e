"""Takes state blobs from one build and one model, and gives them back: the child of `make_goldens` and of tests.

One library per process. It declares by itself the little that it calls, so that builds without tensor mode (which the
native package refuses) can be driven too. Reads one JSON request from the first line of stdin, writes blobs into a
folder, and prints one JSON line per blob; each line that follows is one job more. A job that names a blob to `load`
gives it to a fresh context instead of reading a prompt; one that names a `next` token decodes it afterwards and keeps
the logits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cffi import FFI

_CDEF = """
typedef struct { uint8_t bytes[512]; } params_t;
typedef struct {
    int32_t n_tokens; int32_t *token; float *embd; int32_t *pos; int32_t *n_seq_id; int32_t **seq_id; int8_t *logits;
} batch_t;
void llama_backend_init(void);
void llama_log_set(void (*callback)(int, const char *, void *), void *user_data);
params_t llama_model_default_params(void);
params_t llama_context_default_params(void);
void *llama_model_load_from_file(const char *path, params_t params);
void *llama_init_from_model(void *model, params_t params);
void llama_free(void *ctx);
void llama_model_free(void *model);
batch_t llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
int32_t llama_decode(void *ctx, batch_t batch);
int32_t llama_encode(void *ctx, batch_t batch);
bool llama_model_has_encoder(const void *model);
const void *llama_model_get_vocab(const void *model);
int32_t llama_vocab_n_tokens(const void *vocab);
size_t llama_state_get_size(void *ctx);
size_t llama_state_get_data(void *ctx, uint8_t *dst, size_t size);
size_t llama_state_set_data(void *ctx, const uint8_t *src, size_t size);
bool llama_state_save_file(void *ctx, const char *path, const int32_t *tokens, size_t n);
size_t llama_state_seq_get_size(void *ctx, int32_t seq_id);
size_t llama_state_seq_get_data(void *ctx, uint8_t *dst, size_t size, int32_t seq_id);
size_t llama_state_seq_get_size_ext(void *ctx, int32_t seq_id, uint32_t flags);
size_t llama_state_seq_get_data_ext(void *ctx, uint8_t *dst, size_t size, int32_t seq_id, uint32_t flags);
size_t llama_state_seq_set_data(void *ctx, const uint8_t *src, size_t size, int32_t dest);
size_t llama_state_seq_save_file(void *ctx, const char *path, int32_t seq_id, const int32_t *tokens, size_t n);
float *llama_get_logits_ith(void *ctx, int32_t i);
"""


@dataclass(frozen=True, slots=True)
class ContextOffsets:
    """Where the fields that matter here stand in `llama_context_params`, in bytes.

    Source: the header nearest to each build, checked against the default values that the build writes.
    """

    n_threads: int
    flash: int
    flash_is_bool: bool
    type_k: int
    embeddings: int
    swa_full: int | None
    kv_unified: int | None


EPOCHS = {
    "2025-03": ContextOffsets(16, 99, flash_is_bool=True, type_k=88, embeddings=97, swa_full=None, kv_unified=None),
    "2025-06": ContextOffsets(16, 114, flash_is_bool=True, type_k=88, embeddings=112, swa_full=117, kv_unified=None),
    "2025-08": ContextOffsets(16, 114, flash_is_bool=True, type_k=88, embeddings=112, swa_full=117, kv_unified=118),
    "2026-04": ContextOffsets(16, 36, flash_is_bool=False, type_k=88, embeddings=112, swa_full=116, kv_unified=117),
    "2026-06": ContextOffsets(24, 48, flash_is_bool=False, type_k=104, embeddings=128, swa_full=132, kv_unified=133),
    "2026-08": ContextOffsets(28, 52, flash_is_bool=False, type_k=104, embeddings=128, swa_full=132, kv_unified=133),
    "2026-10": ContextOffsets(28, 52, flash_is_bool=False, type_k=104, embeddings=136, swa_full=140, kv_unified=141),
}


class Build:
    """One library, opened by path.

    Args:
        path: the shared library.
        epoch: a key of `EPOCHS`.
    """

    def __init__(self, path: str, epoch: str) -> None:
        """Open the library and silence its log."""
        self.ffi = FFI()
        self.ffi.cdef(_CDEF)
        # RTLD_NOW: a build whose symbols are missing must fail here and not in the middle of a decode.
        self.lib: Any = self.ffi.dlopen(path, self.ffi.RTLD_NOW)
        self.offsets = EPOCHS[epoch]
        self.quiet = self.ffi.callback("void(int, const char *, void *)", lambda _level, _text, _data: None)
        self.lib.llama_log_set(self.quiet, self.ffi.NULL)
        self.lib.llama_backend_init()

    def load(self, path: str) -> Any:
        """Load a model with default parameters.

        Raises:
            SystemExit: the build refuses it.
        """
        model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        if model == self.ffi.NULL:
            message = f"{path}: this build does not load it"
            raise SystemExit(message)
        return model

    def context(self, model: Any, job: dict[str, Any]) -> Any:
        """Make the context that a job asks for.

        Raises:
            SystemExit: the build refuses it.
        """
        params = self.lib.llama_context_default_params()
        raw = self.ffi.buffer(self.ffi.addressof(params))
        words = self.ffi.cast("int32_t *", self.ffi.addressof(params))
        at = self.offsets
        words[0], words[1], words[2], words[3] = job["n_ctx"], 64, 64, job["n_seq_max"]
        words[at.n_threads // 4] = words[at.n_threads // 4 + 1] = 1
        if at.flash_is_bool:
            raw[at.flash] = bytes([job["flash"]])
        else:
            words[at.flash // 4] = job["flash"]
        words[at.type_k // 4], words[at.type_k // 4 + 1] = job["type_k"], job["type_v"]
        if at.kv_unified is not None:
            raw[at.kv_unified] = bytes([job["unified"]])
        if at.swa_full is not None:
            raw[at.swa_full] = b"\0"
        if job.get("embeddings"):
            raw[at.embeddings] = b"\1"
        context = self.lib.llama_init_from_model(model, params)
        if context == self.ffi.NULL:
            message = f"{job['name']}: this build makes no such context"
            raise SystemExit(message)
        return context

    def decode(self, model: Any, context: Any, sequences: list[list[int]], first: int = 0) -> None:
        """Read each sequence's tokens as one batch, sequence by sequence.

        Raises:
            SystemExit: a decode fails.
        """
        for seq_id, tokens in enumerate(sequences):
            batch = self.lib.llama_batch_init(len(tokens), 0, 1)
            batch.n_tokens = len(tokens)
            for index, token in enumerate(tokens):
                batch.token[index] = token
                batch.pos[index] = first + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = seq_id
                batch.logits[index] = index == len(tokens) - 1
            if self.lib.llama_model_has_encoder(model):
                self.lib.llama_encode(context, batch)
            result = self.lib.llama_decode(context, batch)
            if result:
                message = f"decode returned {result}"
                raise SystemExit(message)

    def give(self, context: Any, job: dict[str, Any], blob: bytes) -> None:
        """Give a blob to a context.

        Raises:
            SystemExit: the build does not take all of it.
        """
        buffer = self.ffi.from_buffer("uint8_t[]", blob)
        if job["form"] == "context":
            taken = self.lib.llama_state_set_data(context, buffer, len(blob))
        else:
            taken = self.lib.llama_state_seq_set_data(context, buffer, len(blob), job["seq_id"])
        if taken != len(blob):
            message = f"{job['name']}: this build took {taken} of {len(blob)} bytes"
            raise SystemExit(message)

    def next_logits(self, context: Any, wanted: dict[str, int], n_vocab: int) -> bytes:
        """Decode one token and take its logits.

        Args:
            context: the context.
            wanted: seq_id, token and pos of the token.
            n_vocab: tokens in the vocabulary.

        Returns:
            float32, shape [n_vocab], as bytes.

        Raises:
            SystemExit: the decode fails.
        """
        batch = self.lib.llama_batch_init(1, 0, 1)
        batch.n_tokens = 1
        batch.token[0], batch.pos[0], batch.n_seq_id[0], batch.logits[0] = wanted["token"], wanted["pos"], 1, 1
        batch.seq_id[0][0] = wanted["seq_id"]
        result = self.lib.llama_decode(context, batch)
        if result:
            message = f"decode returned {result}"
            raise SystemExit(message)
        return bytes(self.ffi.buffer(self.lib.llama_get_logits_ith(context, 0), 4 * n_vocab))

    def take(self, context: Any, job: dict[str, Any], sequences: list[list[int]], scratch: Path) -> bytes:
        """The blob that a job asks for."""
        form = job["form"]
        if form in ("session_file", "sequence_file"):
            path = scratch / "state.tmp"
            tokens = self.ffi.new("int32_t[]", sequences[job.get("seq_id", 0)])
            if form == "session_file":
                self.lib.llama_state_save_file(context, str(path).encode(), tokens, len(tokens))
            else:
                seq_id = job.get("seq_id", 0)
                self.lib.llama_state_seq_save_file(context, str(path).encode(), seq_id, tokens, len(tokens))
            blob = path.read_bytes()
            path.unlink()
            return blob
        if form == "context":
            n_bytes = self.lib.llama_state_get_size(context)
            buffer = self.ffi.new("uint8_t[]", max(n_bytes, 1))
            written = self.lib.llama_state_get_data(context, buffer, n_bytes)
        elif "flags" in job:
            n_bytes = self.lib.llama_state_seq_get_size_ext(context, job["seq_id"], job["flags"])
            buffer = self.ffi.new("uint8_t[]", max(n_bytes, 1))
            written = self.lib.llama_state_seq_get_data_ext(context, buffer, n_bytes, job["seq_id"], job["flags"])
        else:
            n_bytes = self.lib.llama_state_seq_get_size(context, job["seq_id"])
            buffer = self.ffi.new("uint8_t[]", max(n_bytes, 1))
            written = self.lib.llama_state_seq_get_data(context, buffer, n_bytes, job["seq_id"])
        return bytes(self.ffi.buffer(buffer, written))


def run(build: Build, model: Any, job: dict[str, Any], folder: Path, n_vocab: int) -> dict[str, Any]:
    """Do one job.

    Returns:
        What came of it, for one line of output.

    Raises:
        SystemExit: the build refuses the context, a decode, or the blob.
    """
    context = build.context(model, job)
    sequences = [
        [(7 + 31 * seq_id + 13 * index) % n_vocab for index in range(n_tokens)]
        for seq_id, n_tokens in enumerate(job["n_tokens"])
    ]
    if "load" in job:
        build.give(context, job, Path(job["load"]).read_bytes())
    else:
        build.decode(model, context, sequences)
    blob = build.take(context, job, sequences, folder)
    (folder / job["name"]).write_bytes(blob)
    if "next" in job:
        (folder / f"{job['name']}.logits").write_bytes(build.next_logits(context, job["next"], n_vocab))
    build.lib.llama_free(context)
    return {"name": job["name"], "n_bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}


def main() -> None:
    """Do every job of the request on stdin, and those behind it as they come."""
    request = json.loads(sys.stdin.readline())
    build = Build(request["library"], request["epoch"])
    model = build.load(request["model"])
    n_vocab = build.lib.llama_vocab_n_tokens(build.lib.llama_model_get_vocab(model))
    for job in itertools.chain(request["jobs"], map(json.loads, sys.stdin)):
        print(json.dumps(run(build, model, job, Path(request["folder"]), n_vocab)), flush=True)
    build.lib.llama_model_free(model)


if __name__ == "__main__":
    main()

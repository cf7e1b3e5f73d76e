"""What a trial decodes, and how: prompts, batches of one token and of several, and the same kinds again later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llama_native import CallFailed, Context, Model
from splitctl.engine.engine import context_params, resolve_threads
from splitctl.placement import Placement
from splitctl.probing.comparing import Logits, is_sound
from splitctl.probing.computing import SMALL_BYTES, numbers_as_tokens, state_of

#: A trial needs no more context than this [tokens].
MAX_CTX = 512

_TEXT = "The quick brown fox jumps over the lazy dog, and 7 wizards count to 1234 while it rains in Paris."
_N_PROMPT = 24
_N_SINGLE = 3
_N_SEVERAL = 5
_MAX_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: which tokens of which sequences at which positions; every one gives logits."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    seq_ids: tuple[int, ...]

    def singly(self) -> Iterator[Step]:
        """Give the same tokens in batches of one."""
        for one in zip(self.tokens, self.positions, self.seq_ids, strict=True):
            yield Step(*((value,) for value in one))


@dataclass(frozen=True, slots=True)
class Script:
    """What is decoded: prompts, one-token batches and a batch of several; and the same kinds again after a restore."""

    encoder: Step | None
    before: tuple[Step, ...]
    after: tuple[Step, ...]


class NoReference(Exception):
    """Layer mode gives nothing to compare with."""


def shrunk(placement: Placement) -> Placement:
    """Make the context as small as the trial allows, and keep what decides: modes, devices, types, streams."""
    n_seq = min(placement.n_seq_max, _MAX_SEQUENCES)
    n_ctx = min(placement.n_ctx or MAX_CTX, MAX_CTX)
    return resolve_threads(
        dataclasses.replace(
            placement,
            n_ctx=max(n_ctx, 2 * n_seq * (_N_PROMPT + 2 * (_N_SINGLE + _N_SEVERAL))),
            n_seq_max=n_seq,
            n_batch=min(placement.n_batch, MAX_CTX),
            n_ubatch=min(placement.n_ubatch, MAX_CTX),
        )
    )


def _tokens(model: Model) -> list[int]:
    """Make a prompt: words where the model has some, else numbers inside its vocabulary."""
    if model.has_tokenizer:
        tokens = model.tokenize(_TEXT)
        if len(tokens) >= _N_PROMPT:
            return tokens[:_N_PROMPT]
    return numbers_as_tokens(model, _N_PROMPT)


def script_of(model: Model, placement: Placement) -> Script:
    """Lay out the batches for a model and a number of sequences."""
    prompt = _tokens(model)
    encoder = None
    if model.has_encoder:
        encoder = Step(tuple(prompt), tuple(range(len(prompt))), (0,) * len(prompt))
        start = model.decoder_start_token
        prompt = [start if start >= 0 else max(model.token_bos, 0), *prompt[:_N_SEVERAL]]
    sequences = range(min(2, placement.n_seq_max))
    most = min(placement.n_batch, placement.n_ubatch)
    before: list[Step] = []
    for seq_id in sequences:
        # Another order of the words for each sequence: mixed-up sequences must not agree by chance.
        words = prompt[seq_id:] + prompt[:seq_id]
        for at in range(0, len(words), most):
            part = tuple(words[at : at + most])
            before.append(Step(part, tuple(range(at, at + len(part))), (seq_id,) * len(part)))
    n_several = max(1, min(_N_SEVERAL, most // len(sequences)))
    n_round = _N_SINGLE + n_several
    before.extend(_follow(prompt, len(prompt), sequences, n_several))
    after = tuple(_follow(prompt, len(prompt) + n_round, sequences, n_several))
    return Script(encoder, tuple(before), after)


def _follow(prompt: Sequence[int], start: int, sequences: Sequence[int], n_several: int) -> Iterator[Step]:
    """Go on from position `start`: batches of one token, then one batch of several of every sequence."""
    for at in range(start, start + _N_SINGLE):
        token = prompt[at % len(prompt)]
        yield Step((token,), (at,), (0,))
        if len(sequences) > 1:
            yield Step((token,), (at,), (1,))
    several = range(start + _N_SINGLE, start + _N_SINGLE + n_several)
    pairs = [(at, seq_id) for seq_id in sequences for at in several]
    yield Step(
        tuple(prompt[(2 * at) % len(prompt)] for at, _ in pairs),
        tuple(at for at, _ in pairs),
        tuple(seq_id for _, seq_id in pairs),
    )


def open_context(model: Model, placement: Placement, *, embeddings: bool) -> Context:
    """Make a context; of a small model with one thread."""
    if model.size_bytes < SMALL_BYTES:
        placement = dataclasses.replace(placement, n_threads=1, n_threads_batch=1)
    return Context(model, context_params(placement, embeddings=embeddings))


def run(context: Context, steps: Sequence[Step], *, embeddings: bool) -> list[Logits]:
    """Decode batches, and copy the logits (or embeddings) of every token."""
    rows: list[Logits] = []
    for step in steps:
        context.decode(step.tokens, step.positions, step.seq_ids, [True] * len(step.tokens))
        rows.append(rows_of(context, step, embeddings=embeddings))
    return rows


def rows_of(context: Context, step: Step, *, embeddings: bool) -> Logits:
    """Copy what the last batch computed: float32[n_tokens, n_vocab or n_embd]."""
    read = context.embeddings if embeddings else context.logits
    raw = [read(index) for index in range(len(step.tokens))]
    return np.stack([np.frombuffer(one, np.float32) for one in raw])


def encode(context: Context, script: Script, *, embeddings: bool) -> list[Logits]:
    """Run the encoder where there is one; an encoder alone also answers."""
    if script.encoder is None:
        return []
    step = script.encoder
    context.encode(step.tokens, step.positions, step.seq_ids, [True] * len(step.tokens))
    return [rows_of(context, step, embeddings=True)] if embeddings and not context.model.has_decoder else []


def reference_run(model: Model, placement: Placement) -> tuple[bool, list[Logits]]:
    """Run layer mode, and find out whether this model answers in logits or in embeddings."""
    script = script_of(model, placement)
    with open_context(model, placement, embeddings=False) as context:
        # What keeps nothing between decodes and is no diffusion model is an encoder: it has no logits to read.
        answers = (False, True) if context.has_memory or model.is_diffusion else (True,)
    for embeddings in answers:
        try:
            rows, _ = first_run(model, placement, script, embeddings=embeddings, stage=None)
        except CallFailed as error:
            if embeddings or error.function != "llama_get_logits_ith":
                raise
            continue
        if not all(map(is_sound, rows)):
            raise NoReference("it gives what is no number")
        if rows and all(np.any(row) for row in rows):
            return embeddings, rows
    raise NoReference("it gives nothing but zeros")


def first_run(
    model: Model, placement: Placement, script: Script, *, embeddings: bool, stage: Callable[[str], None] | None
) -> tuple[list[Logits], bytearray | None]:
    """Decode the first half of the script in a fresh context; with stages to report, also take its state."""
    report = stage or (lambda _: None)
    report("target: context")
    with open_context(model, placement, embeddings=embeddings) as context:
        report("target: first batches")
        rows = encode(context, script, embeddings=embeddings)
        if model.has_decoder:
            steps = script.before if context.has_memory else alone(script)
            rows += run(context, steps, embeddings=embeddings)
        if stage is None or not context.has_memory:
            return rows, None
        report("target: state out")
        return rows, state_of(context)


def alone(script: Script) -> tuple[Step, ...]:
    """Keep the batches that a model without memory can take: those that begin at position 0."""
    whole = tuple(step for step in script.before if step.positions[0] == 0)
    first = whole[0]
    return (*whole, Step(first.tokens[:1], first.positions[:1], first.seq_ids[:1]))

"""The largest counts that a state may name; every count from the bytes passes one of these before it is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, all inclusive.

    The bounds on counts follow the library's own compile-time limits (Source: llama-cparams.h LLAMA_MAX_SEQ,
    llama-hparams.h LLAMA_MAX_LAYERS); the others are far above any real state and keep hostile bytes cheap.

    Args:
        n_streams: streams in an attention section.
        n_seq: sequences that one cell may belong to; sequence ids are below it.
        n_layers: layers of one section.
        n_cells: cells in one stream.
        name_bytes: length of the architecture's name.
        row_bytes: one row of one layer, in bytes.
        n_cell_runs: runs of cells with an equal number of sequences, in one stream.
        n_steps: alternatives that one parse may try.
        n_tokens: entries of a token array kept before a state.
        n_outputs: outputs of the last decode.
        n_media: media entries of a packed token record.
        header_bytes: header of a carry; one of 256 sequences needs about 0.3 MB.
    """

    n_streams: int = 256
    n_seq: int = 256
    n_layers: int = 512
    n_cells: int = 1 << 26
    name_bytes: int = 64
    row_bytes: int = 1 << 31
    n_cell_runs: int = 1 << 18
    n_steps: int = 20_000
    n_tokens: int = 1 << 27
    n_outputs: int = 1 << 20
    n_media: int = 1 << 16
    header_bytes: int = 4 << 20


DEFAULT_LIMITS = Limits()

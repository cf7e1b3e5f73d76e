"""Changes of a state: every function takes an image and gives an image, which says in `changes` what was done to it.

What changes no value is exact and can be taken back byte for byte; what rounds says by how much at most. What a target
cannot hold is `NotRepresentable`, with what to do instead. Nothing is changed in place: parts that stay are shared.
"""

from __future__ import annotations

from statecodec.convert_cells import extract, merge, renumber, to_streams
from statecodec.convert_form import as_blob, as_file, carve_layers, join_layers, to_version
from statecodec.convert_length import cut_at_gap, keep_first
from statecodec.convert_values import Fit, VForm, to_types, to_v_trans, v_fit, v_form

__all__ = [
    "Fit",
    "VForm",
    "as_blob",
    "as_file",
    "carve_layers",
    "cut_at_gap",
    "extract",
    "join_layers",
    "keep_first",
    "merge",
    "renumber",
    "to_streams",
    "to_types",
    "to_v_trans",
    "to_version",
    "v_fit",
    "v_form",
]

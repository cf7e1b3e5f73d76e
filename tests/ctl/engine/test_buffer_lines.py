"""The library's lines about its buffers, taken apart."""

from __future__ import annotations

from splitctl.engine.buffer_lines import buffer_lines, cache_sections

_MIB = 1024 * 1024
_LOG = """\
load_tensors:   CPU_Mapped model buffer size =    28.69 MiB
load_tensors: RPC0[127.0.0.1:33287] model buffer size =    58.28 MiB
llama_context:        CPU  output buffer size =     0.19 MiB
llama_kv_cache:     Meta() KV buffer size =    11.25 MiB
llama_kv_cache: size =   22.50 MiB (  1024 cells,  30 layers,  1/1 seqs), K (f16):   11.25 MiB, V (f16):   11.25 MiB
llama_memory_recurrent:        CPU RS buffer size =     0.30 MiB
llama_memory_recurrent: size =    0.30 MiB (     1 cells,   4 layers,  1 seqs  0 rs_seq), R (f32):    0.02 MiB
dsv4:        CPU DSV4 csa state buffer size =     1.50 MiB
sched_reserve:  CUDA_Host compute buffer size =  1009.68 MiB
nothing of the kind
"""


def test_every_kind_of_buffer_is_found() -> None:
    """Names with brackets and parentheses, and sizes of any width."""
    found = [(one.buffer, one.kind, round(one.n_bytes / _MIB, 2)) for one in buffer_lines(_LOG.splitlines())]
    assert found == [
        ("CPU_Mapped", "model", 28.69),
        ("RPC0[127.0.0.1:33287]", "model", 58.28),
        ("CPU", "output", 0.19),
        ("Meta()", "cache", 11.25),
        ("CPU", "recurrent", 0.30),
        ("CPU", "cache", 1.5),
        ("CUDA_Host", "compute", 1009.68),
    ]


def test_the_whole_cache_is_told_apart_from_its_buffers() -> None:
    """A dry run prints buffers of 0 and the size that they would have."""
    assert [(what, round(n_bytes / _MIB, 2)) for what, n_bytes in cache_sections(_LOG.splitlines())] == [
        ("cache", 22.5),
        ("recurrent", 0.3),
    ]

"""What backends add to the bytes that are asked of them: paddings, and a cost of their own."""

from __future__ import annotations

from dataclasses import dataclass

from splitctl.gguf_header import TensorInfo
from splitctl.gguf_types import TENSOR_TYPES

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Backend:
    """How a backend allocates.

    Args:
        name: for people.
        alignment: every tensor is padded to this, bytes.
        row_values: the last row of a quantized tensor is padded to this many values; 0: it is not.
        fixed_bytes: what the first use of a device costs beside all buffers (context, kernels, pools), bytes.
        maps_files: whether weights are pages of the file when they are loaded by mapping it.
        is_host: whether its memory is the host's.
    """

    name: str
    alignment: int = 32
    row_values: int = 0
    fixed_bytes: int = 0
    maps_files: bool = False
    is_host: bool = False

    def allocated(self, tensor: TensorInfo, n_bytes: int) -> int:
        """Tell what a tensor takes.

        Args:
            tensor: the tensor.
            n_bytes: what a place has of it, bytes.

        Returns:
            With padding, bytes.
        """
        if n_bytes and self.row_values:
            _, per_block, block_bytes = TENSOR_TYPES.get(tensor.type_id, ("", 1, 4))
            if per_block > 1 and tensor.dims[0] % self.row_values:
                n_bytes += (self.row_values - tensor.dims[0] % self.row_values) // per_block * block_bytes
        return -(-n_bytes // self.alignment) * self.alignment


#: What a loaded model costs beside its buffers: the vocabulary's tables, graphs and bookkeeping.  Source: resident
#: memory of SmolLM2 (49k tokens, 21 MiB) and gemma-3-270m (262k tokens, 59 MiB) beyond the library's own lines.
HOST_FIXED_BYTES = 24 * _MIB
HOST_BYTES_PER_TOKEN = 256
#: Tensor mode keeps graphs and tensors of its own for each device.
HOST_BYTES_PER_SLICE = 8 * _MIB

#: The processor.  Source: TENSOR_ALIGNMENT in ggml-impl.h.
CPU = Backend("CPU", alignment=32, maps_files=True, is_host=True)
#: A processor behind RPC: the server allocates, nothing is mapped here, and it keeps graphs of its own.
RPC = Backend("RPC", alignment=32, fixed_bytes=8 * _MIB)
#: Source: MATRIX_ROW_PADDING and get_alignment in ggml-cuda.cu. The fixed cost is the context with its kernels, the
#: pool of the matrix kernels and the workspace of cuBLAS.
CUDA = Backend("CUDA", alignment=128, row_values=512, fixed_bytes=600 * _MIB)
#: A device of a kind that is not known here is taken for one that costs like CUDA.
OTHER = Backend("other", alignment=256, row_values=512, fixed_bytes=600 * _MIB)


def backend_of(device: str, kind: str = "") -> Backend:
    """Tell a device's backend.

    Args:
        device: its name, such as CPU, CUDA0 or RPC0[127.0.0.1:50052].
        kind: the kind that the library says, where it is known.

    Returns:
        How it allocates.
    """
    if device == "CPU" or kind == "cpu":
        return CPU
    if device.startswith("RPC"):
        return RPC
    if device.startswith(("CUDA", "ROCm", "MUSA")):
        return CUDA
    return OTHER

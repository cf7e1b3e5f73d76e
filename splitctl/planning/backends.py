"""What backends add to the bytes that are asked of them: paddings, and a cost of their own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitctl.model.header import TensorInfo
from splitctl.model.tensor_types import TENSOR_TYPES

if TYPE_CHECKING:
    from splitctl.model.facts import ModelFacts

_MIB = 1024 * 1024
_MATRIX = 2
#: Tensors of the input: they stay on the host, and activations are not multiplied with them.
INPUT_TENSORS = frozenset(
    {"token_embd.weight", "position_embd.weight", "token_types.weight", "per_layer_token_embd.weight"}
)
_OUTPUT = "output.weight"
#: Pools grow by pages.  Source: ggml_cuda_pool_vmm, by the granularity that the driver recommends.
_PAGE_BYTES = 2 * _MIB
#: Partial sums of a tile for every multiprocessor: 132 tiles of 128 by 128 floats on the largest GPU known here.
_PARTS_BYTES = 132 * 128 * 128 * 4
#: How the library marks a virtual device.  Source: ggml_cuda_device_description in ggml-cuda.cu.
_VIRTUAL = re.compile(r"\(dev (p\d+)/v\d+\)$")


@dataclass(frozen=True, slots=True)
class Backend:
    """How a backend allocates.

    Args:
        name: for people.
        alignment: every tensor is padded to this, bytes.
        row_values: the last row of a quantized tensor is padded to this many values; 0: it is not.
        fixed_bytes: what the first use of a real device costs beside all buffers (its context, its kernels), bytes.
        device_bytes: what every device costs beside that, a virtual one too (streams, graphs, pools), bytes.
        reduce_bytes: what every device holds to add up partial results in tensor mode, bytes.
        nccl_bytes: the same where NCCL adds them up, bytes.
        blas_bytes: workspace of every device for products that the backend leaves to a BLAS, bytes.
        blas_kernel_bytes: its kernels, once on a real device, bytes.
        has_pool: whether kernels take room for a micro-batch in another form from a pool that is never given back.
        maps_files: whether weights are pages of the file when they are loaded by mapping it.
        is_host: whether its memory is the host's.
    """

    name: str
    alignment: int = 32
    row_values: int = 0
    fixed_bytes: int = 0
    device_bytes: int = 0
    reduce_bytes: int = 0
    nccl_bytes: int = 0
    blas_bytes: int = 0
    blas_kernel_bytes: int = 0
    has_pool: bool = False
    maps_files: bool = False
    is_host: bool = False

    def allocated(self, tensor: TensorInfo, n_bytes: int) -> int:
        """Tell what a tensor takes with padding, of which a place has ``n_bytes``; bytes."""
        if n_bytes and self.row_values:
            _, per_block, block_bytes = TENSOR_TYPES.get(tensor.type_id, ("", 1, 4))
            if per_block > 1 and tensor.dims[0] % self.row_values:
                n_bytes += (self.row_values - tensor.dims[0] % self.row_values) // per_block * block_bytes
        return -(-n_bytes // self.alignment) * self.alignment

    def pool_bytes(self, facts: ModelFacts, n_ubatch: int) -> int:
        """Tell what the pool grows to: the widest rows of a micro-batch in the form that a product wants them in.

        Bytes, never too low.  Source: ggml_cuda_mul_mat_q (blocks of 36 bytes for 32 values, and parts of sums),
        ggml_cuda_op_mul_mat_cublas (half floats, of the product too).
        """
        if not self.has_pool:
            return 0
        n_used = facts.number("expert_used_count")
        widest = 0
        for tensor in _factors(facts):
            rows = n_used if len(tensor.dims) > _MATRIX and n_used else 1
            wide, high = tensor.dims[0], 0 if tensor.name == _OUTPUT else tensor.dims[1]
            each = -(-wide // 512) * 512 * 36 // 32 if _is_quantized(tensor) else 2 * (wide + high)
            widest = max(widest, rows * each)
        return -(-(n_ubatch * widest + _PARTS_BYTES) // _PAGE_BYTES) * _PAGE_BYTES

    def own_bytes(
        self, facts: ModelFacts, n_ubatch: int, *, has_flash_attn: bool, n_sharing: int, is_there: bool = False
    ) -> int:
        """Tell what a device takes beside all buffers, bytes.

        Args:
            facts: the model.
            n_ubatch: most tokens of a computed batch.
            has_flash_attn: without it attention is two products of floats.
            n_sharing: devices that share the real one; each is charged for its part of what is there once.
            is_there: whether the process works with the real one already: what is there once is charged to that.
        """
        leaves_products = not has_flash_attn or not all(_is_quantized(tensor) for tensor in _factors(facts))
        each, once = self.device_bytes + self.pool_bytes(facts, n_ubatch), self.fixed_bytes
        if leaves_products:
            each, once = each + self.blas_bytes, once + self.blas_kernel_bytes
        return each if is_there else each + once // n_sharing


def _factors(facts: ModelFacts) -> Iterator[TensorInfo]:
    """Give the matrices that activations are multiplied with."""
    return (tensor for tensor in facts.tensors if len(tensor.dims) >= _MATRIX and tensor.name not in INPUT_TENSORS)


def _is_quantized(tensor: TensorInfo) -> bool:
    _, per_block, _ = TENSOR_TYPES.get(tensor.type_id, ("", 1, 4))
    return per_block > 1


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
#: Paddings: MATRIX_ROW_PADDING and get_alignment in ggml-cuda.cu. The costs were measured on H200s with CUDA 13 (see
#: docs/measurements.md): a context of 527 MiB and some 70 of kernels and graphs; in tensor mode 32 MiB of staging
#: (GGML_CUDA_AR_COPY_MAX_BYTES in allreduce.cu) and more graphs, or what NCCL takes over NVLink, the most of all links;
#: cuBLAS with a workspace of 32 MiB.
CUDA = Backend(
    "CUDA", alignment=128, row_values=512, fixed_bytes=600 * _MIB, device_bytes=24 * _MIB, reduce_bytes=56 * _MIB,
    nccl_bytes=840 * _MIB, blas_bytes=32 * _MIB, blas_kernel_bytes=140 * _MIB, has_pool=True,
)  # fmt: skip
#: A device of a kind that is not known here is taken for one that costs like CUDA.
OTHER = dataclasses.replace(CUDA, name="other", alignment=256)


def backend_of(device: str, kind: str = "") -> Backend:
    """Tell how a device allocates.

    Args:
        device: its name, such as CPU, CUDA0 or RPC0[127.0.0.1:50052].
        kind: the kind that the library says, where it is known.
    """
    if device == "CPU" or kind == "cpu":
        return CPU
    if device.startswith("RPC"):
        return RPC
    if device.startswith(("CUDA", "ROCm", "MUSA")):
        return CUDA
    return OTHER


def unit_of(description: str) -> str:
    """Tell from the library's description which real device is behind a virtual one.

    Returns:
        The same text for all that share one; empty for a device that is real itself.
    """
    found = _VIRTUAL.search(description)
    return found[1] if found else ""

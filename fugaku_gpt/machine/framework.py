"""Memory of a rank before it has a model (interpreter, PyTorch, MPI and their work space), by build of PyTorch.

Measured on x86-64 with Python 3.11 (2.13) and 3.8 (the others), MPICH 5.0.2 and one thread: the most resident and
shared memory (``/proc/self/statm``) of each of 1, 2 and 4 ranks of ``fugaku-gpt train`` in some steps of a model of 0.1
million parameters, minus 4 MiB of the model. With more ranks it grew by at most 3 MiB.

A version is the key of a measurement here: it says which build was measured, not what a build can do (``compat``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Collection, Dict

_MIB = 2**20


@dataclass(frozen=True)
class Framework:
    """Memory of a rank without its run, in bytes.

    Attributes:
        private_bytes: bytes that each rank has for itself.
        shared_bytes: pages of libraries, which all ranks of a node share.
        sixteen_bit_bytes: additional bytes of a rank that computes in 16 bits, for oneDNN's kernels.
        source: origin of the figures.
        has_native_matmul: whether our compiled kernels may compute layers' products, which needs more memory.
        has_tensor_pool: whether the free memory between tensors was measured with their pool (``ops/tensor_pool.py``).
    """

    private_bytes: int
    shared_bytes: int
    sixteen_bit_bytes: int = 0
    source: str = ""
    has_native_matmul: bool = False
    has_tensor_pool: bool = False


# of a rank on a processor that multiplies bfloat16 itself, where fewer of oneDNN's kernels are made
_OWN_SIXTEEN_BIT_BYTES = 24 * _MIB
_SIXTEEN_BIT_FLAGS = ("avx512_bf16", "amx_bf16")
_BUILDS: Dict[str, Framework] = {
    "2.13": Framework(161 * _MIB, 110 * _MIB, 62 * _MIB, "PyTorch 2.13 on x86-64", True, True),
    "1.10": Framework(110 * _MIB, 165 * _MIB, 62 * _MIB, "PyTorch 1.10 on x86-64", True),
    "1.7": Framework(85 * _MIB, 129 * _MIB, 62 * _MIB, "PyTorch 1.7 on x86-64", True),
}


def framework_of(torch: str = "") -> Framework:
    """The memory for a version of PyTorch such as ``1.10.2+cpu``, or for the newest build if it was not measured."""
    version = ".".join(torch.split("+")[0].split(".")[:2])
    return _BUILDS.get(version, next(iter(_BUILDS.values())))


def framework_on(framework: Framework, vector_flags: Collection[str]) -> Framework:
    """The memory on a processor with these vector extensions (see :func:`fugaku_gpt.machine.local.vector_flags`)."""
    if not any(flag in vector_flags for flag in _SIXTEEN_BIT_FLAGS):
        return framework
    return replace(framework, sixteen_bit_bytes=min(framework.sixteen_bit_bytes, _OWN_SIXTEEN_BIT_BYTES))

"""What a rank takes before it has a model: interpreter, PyTorch, MPI and their work space. By PyTorch's build.

Measured on x86-64 with Python 3.11 (2.13) and 3.8 (the others), MPICH 5.0.2 and one thread: resident and shared memory
(``/proc/self/statm``) of each of 1, 2 and 4 ranks of ``fugaku-gpt train`` after some steps of a model of 0.1 million
parameters, less 4 MiB that the model takes. More ranks did not make it more than 2 MiB larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict

_MIB = 2**20


@dataclass(frozen=True)
class Framework:
    """Memory of a rank without its run, in bytes.

    Attributes:
        own: of each rank.
        shared: pages of libraries, which all ranks of a node use together.
        narrow: more of each rank that computes in 16 bits: oneDNN's kernels.
        source: where the figures come from.
        multiplies: our own compiled kernels may make layers' products, which takes memory besides.
    """

    private_bytes: int
    shared_bytes: int
    sixteen_bit_bytes: int = 0
    source: str = ""
    has_native_matmul: bool = False


_BUILDS: Dict[str, Framework] = {
    "2.13": Framework(187 * _MIB, 113 * _MIB, 62 * _MIB, "PyTorch 2.13 on x86-64", True),
    "1.10": Framework(110 * _MIB, 165 * _MIB, 62 * _MIB, "PyTorch 1.10 on x86-64", True),
    "1.7": Framework(85 * _MIB, 129 * _MIB, 62 * _MIB, "PyTorch 1.7 on x86-64", True),
}


def framework_of(torch: str = "") -> Framework:
    """Of a version of PyTorch such as ``1.10.2+cpu``; of one that was not measured, or "", that of the newest."""
    version = ".".join(torch.split("+")[0].split(".")[:2])
    return _BUILDS.get(version, next(iter(_BUILDS.values())))

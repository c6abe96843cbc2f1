"""How MPI adds up a tensor's elements, 16-bit floating-point types included, which most MPI libraries cannot.

16-bit types travel as int16. Their sum is an operation of our own, whose body adds in PyTorch: at 8 million elements
some ten times faster than a cast to float32, a sum and a cast back. Each addition of two ranks' numbers rounds to 16
bits.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

import numpy as np
import torch

from fugaku_gpt.comm.mpi import MPI

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_sums: Dict[torch.dtype, MPI.Op] = {}  # made when first wanted, kept until the process ends


def operation_for(operation: str, dtype: torch.dtype) -> MPI.Op:
    """MPI's operation for elements of a type.

    Raises:
        ValueError: largest or smallest of a 16-bit type.
    """
    if dtype not in SIXTEEN_BITS:
        return _OPERATIONS[operation]
    if operation != "sum":
        raise ValueError(f"{operation} of {dtype} over ranks: 16-bit types can only be summed; cast to float32")
    if dtype not in _sums:
        _sums[dtype] = MPI.Op.Create(_adder(dtype), commute=True)
    return _sums[dtype]


def array_of(flat: torch.Tensor) -> "np.ndarray[Any, Any]":
    """The memory of a flat tensor as an array that MPI takes: 16-bit floating-point types as int16."""
    if flat.dtype in SIXTEEN_BITS:
        flat = flat.view(torch.int16)
    array: np.ndarray[Any, Any] = flat.numpy()
    return array


def _adder(dtype: torch.dtype) -> Callable[[Any, Any, MPI.Datatype], None]:
    def add(incoming: Any, total: Any, _: MPI.Datatype) -> None:
        theirs, ours = (
            torch.from_numpy(np.frombuffer(memory, dtype=np.int16)).view(dtype) for memory in (incoming, total)
        )
        ours.add_(theirs)

    return add

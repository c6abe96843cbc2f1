"""Loads the native kernels' library and declares its functions."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any, Callable, List, Optional

from fugaku_gpt.kernels.build import library_file, sve_vector_bytes
from fugaku_gpt.machine.system import this_system

FLOAT32, BFLOAT16 = 0, 1  # of a tensor's elements; as in common.h

_OPENMP = re.compile(r"lib(gomp|omp|iomp5|fjomp\w*)\b[^/]*\.so[^/]*$")
# of arguments
_ADDRESS: Any = ctypes.c_void_p
_INT64: Any = ctypes.c_int64
_INT: Any = ctypes.c_int
_FLOAT: Any = ctypes.c_float
_CALLBACK_TYPE: Any = ctypes.CFUNCTYPE(None)


class AttentionShape(ctypes.Structure):
    """The sizes of a call of attention; ``Shape`` in attention.h says what each is."""

    _fields_ = [
        (name, _INT64)
        for name in (
            "samples", "heads", "kv_heads", "width", "queries", "keys", "query_shard", "key_shard", "query_row",
            "key_row", "ranges_row", "type",
        )
    ]  # fmt: skip


class Library:
    """The native kernels. Tensors are addresses of their elements, or None if absent; they are contiguous unless
    strides are passed. Nothing is checked."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._attention_workspace_floats = loaded.attention_workspace_floats
        self._attention_workspace_floats.argtypes, self._attention_workspace_floats.restype = [_INT64, _INT64], _INT64
        inputs = [ctypes.POINTER(AttentionShape), *[_ADDRESS] * 6, _FLOAT]
        self.attention_forward = loaded.attention_forward
        self.attention_forward.argtypes, self.attention_forward.restype = [*inputs, *[_ADDRESS] * 3, _INT], None
        self.attention_backward = loaded.attention_backward
        self.attention_backward.argtypes, self.attention_backward.restype = [*inputs, *[_ADDRESS] * 8, _INT], None

        self._set_progress_callback = loaded.set_progress_callback
        self._set_progress_callback.argtypes, self._set_progress_callback.restype = [_CALLBACK_TYPE, _INT64], None
        self._callback = _CALLBACK_TYPE()
        self.adamw = loaded.adamw
        self.adamw.argtypes, self.adamw.restype = [*[_ADDRESS] * 5, _INT64, *[_FLOAT] * 8, _INT], None
        self._sum_of_squares = loaded.sum_of_squares
        self._sum_of_squares.argtypes, self._sum_of_squares.restype = [_ADDRESS, _INT64, _INT], ctypes.c_double
        self.layer_norm = loaded.layer_norm
        self.layer_norm.argtypes = [*[_ADDRESS] * 6, _INT64, _INT64, _INT, _FLOAT, _ADDRESS, _INT]
        self.layer_norm.restype = None
        self.layer_norm_gradient = loaded.layer_norm_gradient
        self.layer_norm_gradient.argtypes = [*[_ADDRESS] * 8, _INT64, _INT64, _INT, _ADDRESS, _INT]
        self.layer_norm_gradient.restype = None
        spaced = [_ADDRESS, *[_INT64] * 3]
        self.rms_norm = loaded.rms_norm
        self.rms_norm.argtypes = [*spaced, *[_ADDRESS] * 3, _INT64, _INT64, _INT, _FLOAT, _ADDRESS, _INT]
        self.rms_norm.restype = None
        self.rms_norm_gradient = loaded.rms_norm_gradient
        self.rms_norm_gradient.argtypes = [*spaced, *[_ADDRESS] * 5, _INT64, _INT64, _INT, _ADDRESS, _INT]
        self.rms_norm_gradient.restype = None
        self.gelu = loaded.gelu
        self.gelu.argtypes, self.gelu.restype = [*[_ADDRESS] * 2, _INT64, *[_INT] * 3], None
        self.gelu_gradient = loaded.gelu_gradient
        self.gelu_gradient.argtypes, self.gelu_gradient.restype = [*[_ADDRESS] * 3, _INT64, *[_INT] * 3], None
        self.swiglu = loaded.swiglu
        self.swiglu.argtypes, self.swiglu.restype = [*[_ADDRESS] * 2, *[_INT64] * 2, *[_INT] * 2], None
        self.swiglu_gradient = loaded.swiglu_gradient
        self.swiglu_gradient.argtypes = [*[_ADDRESS] * 3, *[_INT64] * 2, *[_INT] * 2]
        self.swiglu_gradient.restype = None
        self.rotate = loaded.rotate
        heads = [_ADDRESS, _INT64, _INT64]
        self.rotate.argtypes = [*heads, *heads, *[_ADDRESS] * 2, *[_INT64] * 5, *[_INT] * 3]
        self.rotate.restype = None
        self.accumulate = loaded.accumulate
        self.accumulate.argtypes, self.accumulate.restype = [_ADDRESS, _ADDRESS, _INT64, _INT], None
        self.sum_of_rows = loaded.sum_of_rows
        self.sum_of_rows.argtypes, self.sum_of_rows.restype = [_ADDRESS, _INT64, _INT64, _ADDRESS, _INT], None
        self._gemm_workspace_floats = loaded.gemm_workspace_floats
        self._gemm_workspace_floats.argtypes, self._gemm_workspace_floats.restype = [*[_INT64] * 3, *[_INT] * 3], _INT64
        self._supports_gemm = loaded.supports_gemm
        self._supports_gemm.argtypes, self._supports_gemm.restype = [_INT], _INT
        self.triad = loaded.triad
        self.triad.argtypes, self.triad.restype = [*[_ADDRESS] * 3, _INT64, _FLOAT, _INT64], None
        self.chained_additions = loaded.chained_additions
        self.chained_additions.argtypes, self.chained_additions.restype = [_INT64], _INT64
        self.multiply_adds = loaded.multiply_adds
        self.multiply_adds.argtypes, self.multiply_adds.restype = [_INT64, _FLOAT, _ADDRESS], _INT64
        self._lanes = loaded.lanes
        self._lanes.argtypes, self._lanes.restype = [], _INT
        self.gemm = loaded.gemm
        side, result = [_ADDRESS, _INT64, _INT64], [_ADDRESS, _INT64, _INT, _INT]
        self.gemm.argtypes = [*side, *side, _INT, _ADDRESS, *result, *[_INT64] * 3, _ADDRESS, _INT]
        self.gemm.restype = None
        self.gemv = loaded.gemv
        self.gemv.argtypes, self.gemv.restype = [*[_ADDRESS] * 4, *[_INT64] * 3, _INT, _ADDRESS, _INT], None
        self._decode_attention_workspace_floats = loaded.decode_attention_workspace_floats
        self._decode_attention_workspace_floats.argtypes = [*[_INT64] * 6, _INT]
        self._decode_attention_workspace_floats.restype = _INT64
        self.decode_attention = loaded.decode_attention
        self.decode_attention.argtypes = [
            _ADDRESS, _INT64, *[_ADDRESS] * 4, *[_INT64] * 7, _INT, _ADDRESS, _INT,
        ]  # fmt: skip
        self.decode_attention.restype = None
        rows = [_ADDRESS, *[_INT64] * 3, _INT]
        self.loss_sums = loaded.loss_sums
        self.loss_sums.argtypes, self.loss_sums.restype = [*rows, _ADDRESS, _ADDRESS, _INT], None
        self.loss_gradient = loaded.loss_gradient
        self.loss_gradient.argtypes, self.loss_gradient.restype = [*rows, _ADDRESS, _FLOAT, _INT], None
        self.loss_full_rows = loaded.loss_full_rows
        self.loss_full_rows.argtypes = [*rows, _ADDRESS, _FLOAT, _INT, _INT]
        self.loss_full_rows.restype = None

    def set_progress_callback(self, function: Optional[Callable[[], None]], seconds: float) -> None:
        """Have long kernels call a function at most every ``seconds``, from the thread that called the kernel; None:
        call nothing. Exceptions of the function are lost."""
        callback_pointer = _CALLBACK_TYPE(function) if function is not None else _CALLBACK_TYPE()
        self._set_progress_callback(callback_pointer, int(seconds * 1e9))
        self._callback = callback_pointer  # must live as long as it may be called

    def sum_of_squares(self, x: int, n: int, threads: int) -> float:
        """The sum of squares of n float32 numbers."""
        return float(self._sum_of_squares(x, n, threads))

    def lanes(self) -> int:
        """float32 numbers of a vector register that the kernels were compiled for."""
        return int(self._lanes())

    def supports_gemm(self, kind: int) -> bool:
        """Whether :attr:`gemm` supports a type (``FLOAT32``, ``BFLOAT16``)."""
        return bool(self._supports_gemm(kind))

    def gemm_workspace_floats(
        self, rows: int, columns: int, inner: int, kind: int, kind_of_result: int, threads: int
    ) -> int:
        """float32 numbers of workspace for a matrix product."""
        return int(self._gemm_workspace_floats(rows, columns, inner, kind, kind_of_result, threads))

    def decode_attention_workspace_floats(
        self, samples: int, tokens: int, heads: int, kv_heads: int, width: int, keys: int, threads: int
    ) -> int:
        """float32 numbers of workspace for attention over a cache, of which ``keys`` keys are in use."""
        return int(self._decode_attention_workspace_floats(samples, tokens, heads, kv_heads, width, keys, threads))

    def attention_workspace_floats(self, length: int, width: int) -> int:
        """float32 numbers of workspace per thread of attention, for this number of queries and of keys."""
        return int(self._attention_workspace_floats(length, width))


class LibraryError(Exception):
    """There are no native kernels that this process can use; the message says why, in one line."""


@functools.lru_cache(maxsize=None)
def load_library(file: Optional[Path] = None) -> Library:
    """Load the kernels that were compiled for this processor, once PyTorch is imported: they share its OpenMP runtime.

    Args:
        file: the library; default: this environment's.

    Raises:
        LibraryError: there is none, it does not load, or it was compiled for SVE vectors of another length.
    """
    file = library_file() if file is None else file
    if not file.exists():
        raise LibraryError("none are compiled for this processor and version")
    try:
        for runtime in _openmp_runtimes():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # it is loaded already: now the kernels find its functions
        loaded = ctypes.CDLL(str(file))
        compiled_bytes = int(loaded.sve_vector_bytes())  # executes no SVE instruction
        if compiled_bytes and compiled_bytes != sve_vector_bytes():
            raise LibraryError(
                f"they are compiled for SVE vectors of {8 * compiled_bytes} bits, and this process has "
                f"{f'{8 * sve_vector_bytes()} bits' if sve_vector_bytes() else 'none'}"
            )
        return Library(loaded)
    except OSError as error:  # the message of the dynamic linker, which begins with the file
        reason = str(error).replace(f"{file}: ", "")
        raise LibraryError(f"they do not load: {reason}") from None
    except AttributeError as error:  # the functions are those of another version
        raise LibraryError(f"they do not load: {str(error).replace(f'{file}: ', '')}") from None


def _openmp_runtimes() -> List[str]:
    """Files of the OpenMP runtimes in this process; where PyTorch has brought one, that alone: threads of another would
    come on top of its own."""
    text = this_system().read("proc/self/maps") or ""
    mapped = {line.split(maxsplit=5)[-1] for line in text.splitlines() if "/" in line}
    runtimes = sorted(file for file in mapped if _OPENMP.search(file))
    return [file for file in runtimes if "/torch/lib/" in file or "/torch.libs/" in file] or runtimes

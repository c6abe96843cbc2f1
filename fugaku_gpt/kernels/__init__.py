"""Native C kernels, compiled once for the machine that they run on; see ``source/``.

PyTorch's builds are compiled for many processors, and do most of a GPT step besides matrix products in many small
operators. These kernels need few passes over memory and use this processor's vectors (on A64FX, stock builds use its
long vectors in matrix products only). They are optional: if they are not compiled, or for another processor, PyTorch's
operators are used (``ops`` decides), which are also the reference in tests.

``build`` compiles them (``fugaku-gpt env kernels``; every environment created by ``env create`` has them if there is a
compiler); ``library`` loads them, and ``trials`` tries each of them. PyTorch is not imported here: tensors are passed
as addresses.
"""

from __future__ import annotations

from fugaku_gpt.kernels.build import compile_kernels, library_file
from fugaku_gpt.kernels.library import Library, LibraryError, load_library

__all__ = ["Library", "LibraryError", "compile_kernels", "library_file", "load_library"]

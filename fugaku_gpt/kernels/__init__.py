"""Kernels of our own, in C, compiled once for the machine they run on; see ``source/``.

PyTorch's builds are compiled for many processors, and what a GPT step does beside its products in many small operators.
These do it in few passes, with the vectors that this processor has (on A64FX, stock builds use its long vectors in
products alone). Nothing needs them: where they are not compiled, or another processor's are, PyTorch's operators are
used (``compat`` decides), which are also what they are compared with.

``build`` compiles them (``fugaku-gpt env kernels``; every environment that is made here has them where there is a
compiler); ``library`` loads them. No PyTorch here: tensors come as addresses.
"""

from __future__ import annotations

from fugaku_gpt.kernels.build import compile_kernels, library_file
from fugaku_gpt.kernels.library import Library, load_library

__all__ = ["Library", "compile_kernels", "library_file", "load_library"]

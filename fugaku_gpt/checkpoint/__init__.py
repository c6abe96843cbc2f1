"""The checkpoint library: a folder of checkpoints, each with a manifest and files that all ranks write at once.

``directory`` commits and lists checkpoints; ``manifest`` describes the content of one; ``data_file`` lays out one of
its files and ``reader`` reads pieces of logical tensors; ``retention`` verifies checkpoints and removes old ones;
``safetensors``, ``hugging_face`` and ``gguf_file`` are the formats, and ``imported`` writes what comes from them; every
call that touches the file system is in ``file_system``. The library needs neither PyTorch nor MPI.
"""

from __future__ import annotations

CHECKPOINTS = "checkpoints"  # the folder of a run directory that holds its checkpoints

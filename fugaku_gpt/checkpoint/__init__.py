"""The checkpoint library: a folder of checkpoints, each a manifest and files that all ranks write at once.

``directory`` commits and lists checkpoints; ``manifest`` says what one holds; ``data_file`` lays out one file of it and
``reader`` reads pieces of logical tensors from it; ``retention`` removes old ones; ``safetensors`` and ``hugging_face``
are the formats; every call that touches the file system is in ``file_system``. No PyTorch and no MPI.
"""

from __future__ import annotations

CHECKPOINTS = "checkpoints"  # the folder of a run directory that holds its checkpoints

"""Determines which rank writes which part of a checkpoint, to which file, and makes the manifest of a save."""

from __future__ import annotations

from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.checkpoint.data_file import Entry, FilePlan, file_name, plan_file
from fugaku_gpt.checkpoint.file_list import DataFile
from fugaku_gpt.checkpoint.manifest import LogicalTensor, Manifest, describe_file
from fugaku_gpt.config import RunConfig, config_values
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.layout.shards import logical_shapes, regions_to_write


class Piece(NamedTuple):
    """An entry of a data file, and where it begins in the flat tensors of the rank that writes it."""

    entry: Entry
    first: int


class FileSummary(NamedTuple):
    """Length of a data file in bytes, CRC-32 of its header, indices of its tensors in the sorted names of all, and the
    number of its entries."""

    bytes: int
    header_crc32: int
    tensors: Tuple[int, ...]
    entries: int


class SavePlan:
    """The assignment of state to ranks and files, the same on every rank and for every save of a run.

    Each rank computes the plan of its own file alone: those of ten thousand ranks take minutes.

    Args:
        kinds: kinds of state to save.
        shards: for each rank, the index of its optimizer shard among the replicas.
    """

    def __init__(self, config: RunConfig, kinds: Sequence[str], shards: Sequence[int]) -> None:
        self._config = config
        self._kinds = tuple(kinds)
        self._shards = list(shards)
        self._dtype = "F64" if config.training.dtype == "float64" else "F32"
        self._shapes = logical_shapes(config.model)
        per_file = config.checkpoint.ranks_per_file
        ranks = range(config.layout.ranks)
        self.groups = [ranks[first : first + per_file] for first in range(0, len(ranks), per_file)]

    def pieces(self, rank: int) -> List[Piece]:
        """Return what a rank writes, in the order in which its file holds it."""
        layout = self._config.layout
        regions = regions_to_write(self._config, coordinates_of(rank, layout, layout.order), self._shards[rank])
        return [
            Piece(Entry(kind, region.name, region.region, self._dtype), region.first)
            for kind in self._kinds
            for region in regions
        ]

    def data_file(self, group: int) -> FilePlan:
        """Return the plan of a data file: the entries of its ranks one after the other."""
        return plan_file([piece.entry for rank in self.groups[group] for piece in self.pieces(rank)])

    def summarize(self, file: FilePlan) -> FileSummary:
        """Return what the manifest says of a data file except the checksums of its pieces."""
        described = describe_file("", file, [0] * len(file.entries), sorted(self._shapes))
        return FileSummary(described.bytes, described.header_crc32, described.tensors, len(file.entries))

    def manifest(
        self,
        state: Mapping[str, Any],
        summaries: Sequence[Optional[FileSummary]],
        checksums: Sequence[Sequence[int]],
        **facts: Any,
    ) -> Manifest:
        """Return the manifest of a save.

        Args:
            state: scalar state of the trainer.
            summaries: for each rank, that of its file if it is the first rank of the file, otherwise None.
            checksums: for each rank, CRC-32 of its pieces.
            facts: further fields of the manifest.
        """
        kinds = dict.fromkeys(self._kinds, self._dtype)
        tensors = {name: LogicalTensor(shape, kinds) for name, shape in self._shapes.items()}
        files = []
        for group, ranks in enumerate(self.groups):
            summary = summaries[ranks[0]]
            file_checksums = tuple(checksum for rank in ranks for checksum in checksums[rank])
            if summary is None or len(file_checksums) != summary.entries:
                raise ValueError(f"{file_name(group)}: {len(file_checksums)} checksums for {summary}")
            if file_checksums:
                files.append(DataFile(file_name(group), *summary[:3], file_checksums))
        return Manifest(
            iteration=state["iteration"],
            consumed_samples=state["consumed_samples"],
            consumed_tokens=state["consumed_tokens"],
            tensors=tensors,
            files=tuple(files),
            state=state,
            config=config_values(self._config),
            **facts,
        )

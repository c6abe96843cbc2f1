"""Reads ``equivalents.yaml``: changes after which the program does the same, each with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Set, Tuple

import yaml

from tests.mutants.source import mutants_of_lines, single_spaced

_FIELDS = {"file", "operator", "line", "mutant", "reason"}
Key = Tuple[str, str, str, str]


class Equivalents:
    """The entries by file, operator, text of the line and text of the mutant; so lines may move.

    Raises:
        ValueError: an entry lacks a field, has another, or gives no reason.
    """

    def __init__(self, path: Path) -> None:
        self._keys: Set[Key] = set()
        for number, entry in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")) or (), start=1):
            texts_given = all(
                isinstance(entry.get(name), str) and (entry[name] or name == "mutant") for name in _FIELDS
            )
            if set(entry) != _FIELDS or not texts_given:
                raise ValueError(f"{path}: entry {number}: expected texts for {', '.join(sorted(_FIELDS))}")
            texts = single_spaced(entry["line"]), single_spaced(entry["mutant"])
            self._keys.add((entry["file"], entry["operator"], *texts))

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def stale(self, root: Path) -> List[Key]:
        """The entries of lines that are not there any more, or that cannot be changed so."""
        lines: Dict[str, List[str]] = {}
        for file, _, line, _ in self._keys:
            lines.setdefault(file, []).append(line)
        present: Set[Key] = set()
        for file, texts in lines.items():
            if (root / file).is_file():
                present |= {mutant.key for mutant in mutants_of_lines(root, file, texts)}
        return sorted(self._keys - present)

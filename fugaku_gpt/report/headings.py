"""Reads the settings above a table: in titles, in lines such as ``NLAYERS=72 / NHIDDEN=14336``, in Megatron's options.

The nearest statement holds. A title starts afresh with what its enclosing titles say of the configuration; models,
vocabulary, sequence length and machine hold until another statement replaces them. A sentence that merely mentions a
setting states nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Tuple

GPUS = ("v100", "a100", "h100")

_OTHER_WORDS = 3  # words that a statement may have besides its settings, and two more for each setting
_SIZE = re.compile(r"(?<![\w.=-])(\d{1,4}(?:\.\d{1,3})?)\s?([MBT])\b(?!i?B)")
_STATED_SIZE = re.compile(r"\b(?:model[ _]?)?size\s*[=:]\s*(\d{1,4}(?:\.\d{1,3})?)\s?([MBT])\b", re.IGNORECASE)
_OF_TOKENS = re.compile(r"\s*(?:tokens|samples|sequences)\b", re.IGNORECASE)
_SEQUENCE = re.compile(
    r"(?:(?:--)?(?:seq(?:uence)?|context|ctx)[ _-]?len(?:gth)?\s*[=:]?|\b(?:seq(?:uence)?|block_size|n_ctx)\s*[=:])"
    r"\s*(\d{1,7})(k)?\b",
    re.IGNORECASE,
)
_RECOMPUTE = re.compile(
    r"(?P<off>(?:\bw\s?[/\\]\s?o\.?|\bwithout|\bno|\bnot?|\bremov\w+|\bdisabl\w+)\s*(?:full\s*)?)?"
    r"[`\"'-]{0,9}(?:activation[ -]?(?:checkpoint(?:ing)?|recompute|recomputation)|full recompute"
    r"|checkpoint[-_ ]activations)",
    re.IGNORECASE,
)
_TORCH = re.compile(r"py ?torch\s*v?(\d{1,2}\.\d{1,3})", re.IGNORECASE)
_MACHINE = re.compile(r"\b(a64fx|fugaku|v100|a100|h100)(?=\b|s\b)", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]{2,}")


def _setting(*names: str) -> "re.Pattern[str]":
    """Pattern of ``NAME=12``, ``name: 12`` and, as an option of a command, ``--name 12``."""
    either = "|".join(name.replace("_", "[_-]") for name in names)
    return re.compile(
        rf"(?:(?<![\w-])(?:--)?(?:{either})\s*[=:]\s*|(?<![\w-])--(?:{either})\s+)(\d{{1,9}})(k)?\b", re.IGNORECASE
    )


_SETTINGS: Mapping[str, "re.Pattern[str]"] = {
    "layers": _setting("nlayers", "n_layers", "n_layer", "num_layers", "layers"),
    "hidden": _setting("nhidden", "hidden_size", "hidden_dim", "hidden", "d_model", "n_embd"),
    "heads": _setting("nheads", "n_heads", "n_head", "num_attention_heads", "num_heads", "heads"),
    "vocab": _setting("vocab_size", "vocab_length", "vocab", "vocabulary", "padded_vocab_size"),
    "global_batch": _setting("gbs", "bs", "global_batch_size", "global batch size", "global batch"),
    "micro_batch": _setting("mbs", "micro_batch_size", "micro batch size", "micro batch"),
    "ranks_per_node": _setting("gpus_per_node", "gpus per node", "ranks per node", "max-proc-per-node"),
}
_OF_MODEL = ("layers", "hidden", "heads")
_OTHER_SETTINGS = re.compile(r"\b(?:TP|PP|DP|MP|NNODES|NODES)(?:_SIZE)?\s*[=:]\s*\d{1,6}\b", re.IGNORECASE)
_LABELS = re.compile(r"\bmodel\b|\bratio\s*=\s*\d+", re.IGNORECASE)


@dataclass(frozen=True)
class StatedModel:
    """The shape of a model as far as a text states it."""

    layers: Optional[int] = None
    hidden: Optional[int] = None
    heads: Optional[int] = None


@dataclass(frozen=True)
class Heading:
    """Settings stated above a table; None or empty if not stated.

    Attributes:
        text: the title, as written.
        models: the shapes stated so far, the nearest first; of a section that has ended, only its last.
        recompute: None if the text says nothing. A title that names the PyTorch build is a whole configuration: there,
            no word of activation checkpointing means none.
    """

    text: str = ""
    size: str = ""
    seq_len: Optional[int] = None
    recompute: Optional[bool] = None
    torch: str = ""
    models: Tuple[StatedModel, ...] = ()
    vocab: Optional[int] = None
    global_batch: Optional[int] = None
    micro_batch: Optional[int] = None
    ranks_per_node: Optional[int] = None
    machine: str = ""


def activation_checkpointing(text: str) -> Optional[bool]:
    """Whether a text says with or without activation checkpointing; None if it says neither."""
    matched = _RECOMPUTE.search(text)
    return matched["off"] is None if matched is not None else None


def sizes_in(text: str) -> List[str]:
    """The different sizes of models in a text, those of corpora left out: 350M tokens."""
    matches = (matched for matched in _SIZE.finditer(text) if not _OF_TOKENS.match(text, matched.end()))
    return list(dict.fromkeys(matched[1] + matched[2].upper() for matched in matches))


class HeadingReader:
    """Keeps what holds at the current line of a text."""

    def __init__(self) -> None:
        self.heading = Heading()
        self._titles: List[Tuple[int, Heading]] = []  # (level, heading) of the enclosing titles
        self._is_model_open = False  # whether the next line may complete the last stated model

    def add_title(self, line: str) -> None:
        """Read a title: ``#`` marks and a text."""
        title = line.strip()
        level = len(title) - len(title.lstrip("#"))
        is_inside = not self._titles or self._titles[-1][0] < level
        while self._titles and self._titles[-1][0] >= level:
            self._titles.pop()
        outer = self._titles[-1][1] if self._titles else Heading()
        self.heading = replace(
            self.heading,
            text=title,
            size=outer.size,
            recompute=outer.recompute,
            torch=outer.torch,
            models=self.heading.models if is_inside else self.heading.models[:1],
            global_batch=None,
            micro_batch=None,
            ranks_per_node=outer.ranks_per_node,
        )
        self._is_model_open = False
        self._state(title, is_title=True)
        self._titles.append((level, self.heading))

    def add_line(self, line: str) -> None:
        """Read a line of prose; it states something only if it is little more than its settings."""
        if line.strip() and not line.strip().startswith("```") and _is_statement(line):
            self._state(line, is_title=False)

    def end_table(self) -> None:
        """A table ends: the next statement is of another model."""
        self._is_model_open = False

    def _state(self, text: str, is_title: bool) -> None:
        settings: Dict[str, object] = {**_numbers(text)}
        models = models_in(text)
        if any("layers" in model and "hidden" in model for model in models) and not is_title:
            settings.setdefault("global_batch", None)  # of the model before
        stated_size, sizes = _STATED_SIZE.search(text), sizes_in(text)
        sequence, torch, machine = _SEQUENCE.search(text), _TORCH.search(text), _MACHINE.search(text)
        recompute = activation_checkpointing(text)
        if stated_size or sizes:
            settings["size"] = stated_size[1] + stated_size[2].upper() if stated_size else sizes[0]
        if sequence and int(sequence[1]) > 0:
            settings["seq_len"] = int(sequence[1]) * (1024 if sequence[2] else 1)
        if torch:
            settings["torch"] = torch[1]
        if recompute is not None or torch:
            settings["recompute"] = bool(recompute)
        if machine:
            settings["machine"] = machine[1].lower().replace("fugaku", "a64fx")
        self.heading = replace(self.heading, **settings)  # type: ignore[arg-type]  # names and types of the fields
        for model in models:
            self._state_model(model)

    def _state_model(self, values: Mapping[str, int]) -> None:
        models = self.heading.models
        is_same = self._is_model_open and all(
            getattr(models[0], name) in (None, value) for name, value in values.items()
        )
        nearest = replace(models[0], **values) if is_same else StatedModel(**values)
        self.heading = replace(self.heading, models=(nearest, *(models[1:] if is_same else models)))
        self._is_model_open = True


def _numbers(text: str) -> Dict[str, int]:
    """The settings of a text that are not of a model, those that are 0 left out."""
    matches = ((name, _SETTINGS[name].search(text)) for name in _SETTINGS if name not in _OF_MODEL)
    return {name: _number(matched) for name, matched in matches if matched is not None and _number(matched)}


def models_in(text: str) -> List[Dict[str, int]]:
    """The models of a text, in order: another one begins where a setting comes again."""
    matches = ((matched.start(), name, matched) for name in _OF_MODEL for matched in _SETTINGS[name].finditer(text))
    models: List[Dict[str, int]] = []
    for _, name, matched in sorted(matches, key=lambda match: match[0]):
        if not models or name in models[-1]:
            models.append({})
        if _number(matched):
            models[-1][name] = _number(matched)
    return [model for model in models if model]


def _number(matched: "re.Match[str]") -> int:
    return int(matched[1]) * (1000 if matched[2] else 1)


def _is_statement(text: str) -> bool:
    """True if a line has hardly more words than it needs for its settings."""
    rest, count = text, 0
    for pattern in (*_SETTINGS.values(), _OTHER_SETTINGS, _STATED_SIZE, _SEQUENCE, _RECOMPUTE, _TORCH, _MACHINE):
        rest, replaced = pattern.subn(" ", rest)
        count += replaced
    rest, sizes = _SIZE.subn(" ", rest)
    words = len(_WORD.findall(_LABELS.sub(" ", rest)))
    return bool(count + sizes) and words <= _OTHER_WORDS + 2 * count

"""Parses the iteration lines of training logs: ours, Megatron-DeepSpeed's, Megatron-LM's, GPT-NeoX's and NeMo's.

All have the form ``iteration 2/ 95367 | consumed samples: 2048 | elapsed time per iteration (s): 36.10 | ... |``;
Megatron-LM counts milliseconds, GPT-NeoX puts ``samples/sec: 51.2 |`` before it, NeMo counts steps from 0, and our
short lines have names of their own (``s/it: 36.10``). Logs come with a prefix on each line (``[default7]:`` of
torchrun, `` 0: `` of srun, a time), with colours, with lines that another rank's output has torn apart, and with
several lines glued together. Reading never fails: lines that cannot be parsed are left out and counted, and no missing
value is filled in.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import lines_of_file
from fugaku_gpt.limits import LOG_LINE

OURS = "fugaku_gpt"
MEGATRON = "megatron"
NEOX = "gpt-neox"
NEMO = "nemo"

_PATIENCE = 40  # number of lines within which the rest of a torn line must follow
_MOST_ARGUMENTS = 5000
_MOST_UNKNOWN, _LONGEST_NAME = 20, 60  # names of unknown fields that are kept, and characters of one

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-_])")
_RANK = re.compile(r"\[(?:default|rank|local_rank)[ _]?\d{1,7}\]:?|^\s{0,8}\d{1,7}:(?=\s)", re.IGNORECASE)
_EMBEDDED_RANK = re.compile(r"(?=\[default\d{1,7}\]:)")
_PREFIX = re.compile(
    r"\s*(?:(?:\[[^\]|]{1,80}\]:?|\d{1,7}:(?=\s)|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,12}"
    r"|(?:INFO|DEBUG|WARNING)\b:?)\s*)*"
)
_NUMBER = r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,4})?"
_HEADER = re.compile(r"\biteration\s+(\d{1,15})\s*/\s*(\d{1,15}|inf|infinity)\s*\|")
_SPEED_BEFORE = re.compile(rf"\bsamples/sec:\s*({_NUMBER})\s*\|\s*$")
_GROUPED = r"[-+]?\d{1,3}(?:,\d{3}){1,6}(?:\.\d{0,30})?"  # 1,234.5
_FIRST_NUMBER = re.compile(rf"\s*({_GROUPED}|{_NUMBER})(?:\s*([KMGTP]?)FLOPS?)?(?![\w.]|,\d)", re.IGNORECASE)
_TERAFLOPS = {"": 1e-12, "K": 1e-9, "M": 1e-6, "G": 1e-3, "T": 1.0, "P": 1e3}
_EXACT = re.compile(rf"\(exact\s+({_NUMBER})\)")
_OUR_VALIDATION = re.compile(
    rf"\bvalidation at iteration\s+(\d{{1,15}})\s*\|\s*lm loss:\s*({_NUMBER}|nan|inf)\s*\|"
    r"\s*tokens:\s*(\d{1,18})\s*\|"
)
_MEGATRON_VALIDATION = re.compile(
    rf"\bvalidation (?:loss|results) at iteration\s+(\d{{1,15}})\b[^|]{{0,80}}\|\s*lm[ _]loss value:"
    rf"\s*({_NUMBER}|nan|inf)\s*\|"
)
# what no other line of a log looks like: an iteration or a validation with figures between bars
_WITH_FIGURES = re.compile(
    r"\b(?:iteration|validation (?:loss|results?))\b[^|]{0,80}\|[^|]{0,80}:[^|]{0,80}\d[^|]{0,80}\|"
)
_BLOCK_BEGINS = re.compile(r"^-{4,} (?:\w+ )?arguments -{4,}$")
_BLOCK_ENDS = re.compile(r"^-{4,} end of (?:\w+ )?arguments -{4,}$")
_ARGUMENT = re.compile(r"([A-Za-z_]\w{0,100}) ?\.{2,} ?(.{0,500})")
_NEOX_ORIGIN = re.compile(r"\.*(?:updated|default)$")  # GPT-NeoX says after each value where it comes from
_PRINTS_SIZES = re.compile(r"using world size: |> initialized \w+ model parallel with size ")
_WORLD: Mapping[str, "re.Pattern[str]"] = {
    name: re.compile(rf"(?<![-\w])(?:{words}) (\d{{1,9}})")
    for name, words in (
        ("world_size", "using world size:"),
        ("data_parallel_size", "data-parallel[- ]size:"),
        ("tensor_model_parallel_size", "tensor-model-parallel[- ]size:|tensor model parallel with size"),
        ("pipeline_model_parallel_size", "pipeline-model-parallel[- ]size:|pipeline model parallel with size"),
    )
}
_ERROR = re.compile(
    r"(?:[A-Za-z_]\w{0,60}\.){0,8}\w{0,60}(?:Error|Exception)\b|.{0,80}\bout of memory\b", re.IGNORECASE
)
_LONGEST_ERROR = 300
_PADDED = re.compile(r"padded vocab \(size: (\d{1,12})\) with \d{1,12} dummy tokens \(new size: (\d{1,12})\)")

# before the keys of values under the names of our short lines, until a line is complete: other trainers have some of
# these names beside a long one, with another meaning or unit
_SHORT = "short "
_SHORT_SECONDS, _SHORT_MEMORY = f"{_SHORT}seconds", f"{_SHORT}rss_max_bytes"
# names of fields that are not read: the first no record has, the second has times of two ranks in one
_NOT_MEASURED = frozenset(["eta", "computing per iteration (s)"])

# name in the log → (key of the record, unit of the log in units of the record)
_FIELDS: Mapping[str, Tuple[str, float]] = {
    "consumed samples": ("consumed_samples", 0),
    "consumed tokens": ("consumed_tokens", 0),
    "elapsed time per iteration (s)": ("seconds", 1.0),
    "elapsed time per iteration (ms)": ("seconds", 1e-3),
    "train step timing in s": ("seconds", 1.0),
    "global step": ("step", 0),
    "learning rate": ("lr", 1.0),
    "lr": (f"{_SHORT}lr", 1.0),
    "global batch size": ("global_batch", 0),
    "lm loss": ("loss", 1.0),
    "reduced train loss": ("loss", 1.0),
    "loss": (f"{_SHORT}loss", 1.0),
    "s/it": (_SHORT_SECONDS, 1.0),
    "tok/s": ("tokens_per_second", 1.0),
    "rss": (_SHORT_MEMORY, 2.0**30),
    "loss scale": ("loss_scale", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "total grad norm": ("grad_norm", 1.0),
    "num zeros": ("zeros", 1.0),
    "params norm": ("params_norm", 1.0),
    "actual seqlen": ("actual_seq_len", 0),
    "number of skipped iterations": ("skipped_iterations", 0),
    "number of nan iterations": ("nan_iterations", 0),
    "samples per second": ("samples_per_second", 1.0),
    "tokens per second": ("tokens_per_second", 1.0),
    "images per second": ("images_per_second", 1.0),
    "images/s": ("images_per_second", 1.0),
    "tflops": ("tflops_logged", 1.0),
    "tflops per gpu": ("tflops_logged", 1.0),
    "throughput per gpu (tflop/s/gpu)": ("tflops_logged", 1.0),
    "approx flops per gpu": ("tflops_logged", 1.0),
    "pipeline bubble": ("bubble", 1.0),
    "hidden communication": ("hidden_communication", 1.0),
    "rank rss": ("rss_max_bytes", 2.0**20),
    "node used": ("node_used_bytes", 2.0**20),
}
NORMS: Mapping[str, str] = {"loss": "loss", "grad_norm": "grad norm", "params_norm": "params norm"}
_COUNTS = frozenset(name for name, (_, unit) in _FIELDS.items() if unit == 0)


@dataclass(frozen=True)
class Log:
    """The content of a log.

    Attributes:
        trainer: ``OURS``, ``MEGATRON``, ``NEOX``, ``NEMO``, or empty if the log has no iteration line.
        iterations: as the lines of ``metrics.jsonl`` (see :mod:`fugaku_gpt.records.run`), ascending; only the last line
            of an iteration that was done twice. Values that a line does not state are absent, and those that were
            not finite are None. ``tflops_logged`` is the speed that another trainer claims, per rank.
        validations: likewise, for validations.
        arguments: names and values of Megatron's block of arguments, as text.
        total: number of iterations that the run was to do; None if no line states it, or it has no end.
        torn: number of iteration lines of which neither time nor loss could be read.
        unread: number of other lines on an iteration or a validation that are of no known form.
        unknown_fields: name of a field → number of iteration lines that have it, for fields of no known name, or whose
            value is no number.
        error: the last error that was printed after the last iteration; empty if there is none.
        repeated: number of iteration lines that a later line of the same iteration replaces, as after a restart.
    """

    trainer: str = ""
    iterations: Tuple[Dict[str, Any], ...] = ()
    validations: Tuple[Dict[str, Any], ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    total: Optional[int] = None
    torn: int = 0
    unread: int = 0
    unknown_fields: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    repeated: int = 0


def read_log_files(paths: Iterable[Path]) -> Log:
    """Read several files as one log, earlier files first.

    Raises:
        UsageError: a file cannot be read.
    """
    reader = LogReader()
    for path in paths:
        try:
            for line in lines_of_file(path, LOG_LINE):
                reader.add(line)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        reader.end_of_file()
    return reader.log()


def read_log(text: str) -> Log:
    """Parse the text of a log; never raises."""
    reader = LogReader()
    for line in text.split("\n"):
        reader.add(line)
    reader.end_of_file()
    return reader.log()


@dataclass
class _OpenLine:
    """An iteration line that may continue in a later line of its rank."""

    values: Dict[str, Any]
    tail: str  # after the last bar
    lines_to_wait: int = _PATIENCE


class LogReader:
    """Parses a log line by line."""

    def __init__(self) -> None:
        self._iterations: Dict[int, Dict[str, Any]] = {}
        self._validations: Dict[int, Dict[str, Any]] = {}
        self._arguments: Dict[str, str] = {}
        self._in_block = False
        self._ours = 0
        self._neox = self._nemo = 0
        self._unread = 0
        self._unknown_fields: Dict[str, int] = {}
        self._total: Optional[int] = None
        self._torn = self._repeated = 0
        self._error = ""
        self._open_lines: Dict[str, _OpenLine] = {}  # rank prefix → its last iteration line

    def add(self, line: str) -> None:
        """Parse one more line, with or without its newline."""
        for piece in _EMBEDDED_RANK.split(_ANSI.sub("", line[: LOG_LINE.value]).rstrip("\r\n")):
            self._read_line(piece)

    def end_of_file(self) -> None:
        """End the file: no line of the next file continues a line of this one."""
        for rank in list(self._open_lines):
            self._close(rank)
        self._in_block = False

    def log(self) -> Log:
        """Return the log; call :meth:`end_of_file` first."""
        other = NEOX if self._neox else NEMO if self._nemo else MEGATRON
        trainer = "" if not self._iterations else OURS if self._ours else other
        total = self._total
        if trainer == NEMO and total is not None:  # the number of an epoch's last iteration
            total = total + 1 if max(self._iterations) <= total + 1 else None
        return Log(
            trainer,
            tuple(self._iterations[number] for number in sorted(self._iterations)),
            tuple(self._validations[number] for number in sorted(self._validations)),
            dict(self._arguments),
            total,
            self._torn,
            self._unread,
            dict(self._unknown_fields),
            self._error,
            self._repeated,
        )

    def _read_line(self, text: str) -> None:
        """Parse a line, or the section of a glued line that one rank has printed."""
        marked = _RANK.search(text[:200])
        rank = marked[0].strip().rstrip(":").lower() if marked else ""
        headers = list(_HEADER.finditer(text))
        speed = _SPEED_BEFORE.search(text[: headers[0].start()]) if headers else None
        text_before = text[: speed.start()] if speed else text[: headers[0].start()] if headers else text
        is_rest = self._continue_torn_line(rank, text_before)
        for header, following in zip(headers, [*headers[1:], None]):
            self._close(rank)
            end = following.start() if following is not None else len(text)
            *fields, tail = text[header.end() : end].split("|")
            open_line = _OpenLine({"iteration": int(header[1])}, tail)
            if speed is not None and header is headers[0]:
                open_line.values["samples_per_second"] = _finite(speed[1])
                self._neox += 1
            self._count_unknown(fields)
            self._read_fields(open_line.values, fields)
            if following is not None or open_line.tail.strip():
                self._read_fields(
                    open_line.values, [open_line.tail]
                )  # a last field without its bar; a torn one is read again
            self._total = int(header[2]) if header[2].isdecimal() else None
            self._open_lines[rank] = open_line
        is_validation = self._read_validation(text)
        if headers:
            self._error = ""
            return
        if not is_validation and not is_rest and _WITH_FIGURES.search(text):
            self._unread += 1
        self._read_argument(text)
        bare = text[_PREFIX.match(text).end() :].strip()  # type: ignore[union-attr]  # matches the empty text
        if _ERROR.match(bare):
            self._error = bare[:_LONGEST_ERROR]

    def _continue_torn_line(self, rank: str, text: str) -> bool:
        """Append a text to the torn line of its rank, if it is the rest of it; returns whether it is."""
        open_line = self._open_lines.get(rank)
        for other in list(self._open_lines):
            self._open_lines[other].lines_to_wait -= 1
            if self._open_lines[other].lines_to_wait < 0:
                self._close(other)
        if open_line is None or open_line.lines_to_wait < 0 or "|" not in text:
            return False
        rest = text[_PREFIX.match(text).end() :]  # type: ignore[union-attr]  # matches the empty text
        joined = [(open_line.tail + gap + rest).split("|") for gap in ("", " ")]  # torn amid a word, or between words
        fields = max(joined, key=lambda pieces: len(self._recognised(pieces[:-1])))
        if self._recognised(fields[:1]) or (not open_line.tail.strip() and self._recognised(rest.split("|")[:1])):
            self._count_unknown(fields[:-1])
            self._read_fields(open_line.values, fields[:-1])
            open_line.tail = fields[-1]
            return True
        return False

    def _count_unknown(self, fields: Iterable[str]) -> None:
        """Count the fields of an iteration line whose names or values mean nothing to us, up to a number of names."""
        for text in fields:
            name, colon, value = _name_and_value(text)
            is_read = name in _NOT_MEASURED or (
                name in _FIELDS and (_FIRST_NUMBER.match(value) or _is_not_finite(value))
            )
            if not (colon and name[:1].isalpha()) or is_read or len(name) > _LONGEST_NAME:
                continue
            if name in self._unknown_fields or len(self._unknown_fields) < _MOST_UNKNOWN:
                self._unknown_fields[name] = self._unknown_fields.get(name, 0) + 1

    def _recognised(self, fields: List[str]) -> Dict[str, Any]:
        values: Dict[str, Any] = {}
        self._read_fields(values, fields)
        values.pop("", None)
        return values

    def _read_fields(self, values: Dict[str, Any], fields: Iterable[str]) -> None:
        for text in fields:
            name, colon, value = _name_and_value(text)
            if not colon or name not in _FIELDS:
                continue
            key, unit = _FIELDS[name]
            exact = _EXACT.search(value) if key == "tflops_logged" else None
            number = _FIRST_NUMBER.match(value)
            if exact is not None and number is not None:
                values["tflops_notes"], values["tflops_exact"] = _finite(number[1]), _finite(exact[1])
                continue
            read = _finite(number[1]) if number is not None else None
            if read is None and not _is_not_finite(value):
                continue
            if read is not None and number is not None and number[2] is not None:
                read *= _TERAFLOPS[number[2].upper()]
            if name in _COUNTS:
                values[key] = int(read) if read is not None and read == int(read) else None
            else:
                values[key] = read * unit if read is not None else None

    def _close(self, rank: str) -> None:
        open_line = self._open_lines.pop(rank, None)
        if open_line is None:
            return
        values = open_line.values
        self._count_unknown([open_line.tail])
        step = values.pop("step", None)
        if step is not None:  # NeMo's, which counts from 0 over all epochs; its iterations are those of an epoch
            values["iteration"] = step + 1
            self._nemo += 1
        is_short = _SHORT_SECONDS in values
        for key in [key for key in values if key.startswith(_SHORT)]:
            value = values.pop(key)
            if is_short:
                values[key[len(_SHORT) :]] = value
            elif key != _SHORT_MEMORY:  # in an unknown unit
                values.setdefault(key[len(_SHORT) :], value)
        if is_short:
            if "tflops_logged" in values:
                values["tflops_notes"] = values.pop("tflops_logged")
            self._ours += 1
        if values.get("seconds") is not None and values["seconds"] <= 0:
            del values["seconds"]
        if values.get("seconds") is None and "loss" not in values:
            self._torn += 1
            return
        self._ours += "tflops_exact" in values
        self._repeated += values["iteration"] in self._iterations
        self._iterations[values["iteration"]] = values

    def _read_validation(self, text: str) -> bool:
        ours, others = list(_OUR_VALIDATION.finditer(text)), list(_MEGATRON_VALIDATION.finditer(text))
        for matched in ours:
            number = int(matched[1])
            self._validations[number] = {"iteration": number, "loss": _finite(matched[2]), "tokens": int(matched[3])}
        for matched in others:
            self._validations[int(matched[1])] = {"iteration": int(matched[1]), "loss": _finite(matched[2])}
        return bool(ours or others)

    def _read_argument(self, text: str) -> None:
        bare = text[_PREFIX.match(text).end() :].strip()  # type: ignore[union-attr]  # matches the empty text
        if _BLOCK_BEGINS.match(bare):
            self._in_block = True
            return
        if _BLOCK_ENDS.match(bare):
            self._in_block = False
            return
        matched = _ARGUMENT.fullmatch(bare) if self._in_block else None
        if matched and (matched[1] in self._arguments or len(self._arguments) < _MOST_ARGUMENTS):
            self._arguments[matched[1]] = _NEOX_ORIGIN.sub("", matched[2].strip())
        if _PRINTS_SIZES.search(text):
            for name, pattern in _WORLD.items():
                size = pattern.search(text)
                if size is not None:
                    self._arguments.setdefault(name, size[1])
        padded = _PADDED.search(text)
        if padded:
            self._arguments.setdefault("vocab_size", padded[1])
            self._arguments["padded_vocab_size"] = padded[2]


def _name_and_value(text: str) -> Tuple[str, str, str]:
    """The name of a field, the colon behind it, and its value; a colon also for a field of Megatron-LM before 2021,
    which has none between a name and a number, as in ``lm loss 6.7E+00``."""
    name, colon, value = text.partition(":")
    if not colon:
        without_number, _, number = text.strip().rpartition(" ")
        if _field_name(without_number) in _FIELDS:
            return _field_name(without_number), ":", number
    return _field_name(name), colon, value


def _field_name(text: str) -> str:
    """The name of a field in lower case, with one blank, not ``_``, between words and before a parenthesis."""
    return " ".join(text.lower().replace("(", " (").replace("_", " ").split())


def _is_not_finite(text: str) -> bool:
    return text.strip().lower() in ("nan", "inf", "-inf")


def _finite(text: str) -> Optional[float]:
    value = float(text.replace(",", ""))
    return value if math.isfinite(value) else None

"""The limits on what is read and on what can be asked for, in one table, of which the reference has a page.

A message about something beyond a limit states the limit. The tokens of a corpus and the tensors of a checkpoint are
mapped, or read in place, and have none; neither have logs: `report import` reads them line by line, and `job logs`
prints what is there.
"""

from __future__ import annotations

import re
from typing import Dict, NamedTuple

_MIB, _KIB = 2**20, 2**10


class Limit(NamedTuple):
    """A limit.

    Attributes:
        value: the largest allowed number.
        unit: unit of the number, in the plural.
        of: what has at most so much.
    """

    value: int
    unit: str
    of: str

    def __str__(self) -> str:
        if self.unit == "bytes" and self.value % _MIB == 0:
            return f"{self.value // _MIB} MiB"
        if self.unit == "bytes" and self.value % _KIB == 0:
            return f"{self.value // _KIB} KiB"
        return f"{self.value:,} {self.unit}".rstrip()


# texts
YAML_TEXT = Limit(4 * _MIB, "bytes", "a run, sweep, profile, site or machine file")
YAML_VALUES = Limit(100_000, "values", "such a file, with aliases written out")
YAML_KEY = Limit(200, "characters", "a key of such a file")
YAML_LEVELS = Limit(50, "levels", "lists and mappings in one another, in such a file")
NUMBER = Limit(100, "characters", "a number, size or duration in such a file")
EXPRESSION = Limit(2000, "characters", "an expression of a sweep")
EXPRESSION_LEVELS = Limit(50, "levels", "brackets, and signs and operators, of an expression")
EXPONENT = Limit(64, "", "an exponent in an expression, and its opposite the least")
# a script that lists the files of 100,000 nodes has 3 MiB
SCRIPT_TEXT = Limit(4 * _MIB, "bytes", "a job script, written by hand or rendered")
SCRIPT_IN_FOLDER = Limit(_MIB, "bytes", "a file of a folder that `job lint` takes for a script")
TEMPLATE_TEXT = Limit(_MIB, "bytes", "a template of the user")
TEMPLATE_SECONDS = Limit(5, "s", "processor time of rendering a template of the user")
TEMPLATE_MEMORY = Limit(256 * _MIB, "bytes", "memory of rendering a template of the user")
CHAT_TEXT = Limit(4 * _MIB, "characters", "a conversation, in the form of a model's chat template")
PROMPTS_TEXT = Limit(64 * _MIB, "bytes", "a file of prompts, or of questions with choices")
TABLE_TEXT = Limit(2 * _MIB, "bytes", "a file of tables in Markdown")
CSV_TEXT = Limit(4 * _MIB, "bytes", "a table in CSV")
TABLE_LINE = Limit(20_000, "characters", "a line of a Markdown table; the rest is left out")
SLIP_ROWS = Limit(100, "rows", "a file of tables in which the slip behind a finding is searched for")
LOG_LINE = Limit(64 * _KIB, "characters", "a line of a training log; the rest is left out")
STATISTICS = Limit(64 * _MIB, "bytes", "the scheduler's statistics of a job")
DOCUMENT = Limit(1024 * _MIB, "bytes", "a text file, which is one document, or a file that is one array of JSON")
GRIDS_TEXT = Limit(256 * _MIB, "bytes", "a file of the tasks of an ARC set")
TOKENIZER_TEXT = Limit(256 * _MIB, "bytes", "a tokenizer.json")
MESSAGE_VALUE = Limit(200, "characters", "a value that a message quotes; the rest is left out")
MESSAGE_LINE = Limit(4000, "characters", "a line of an error's message; the rest is left out")
MESSAGE_LINES = Limit(100, "lines", "an error's message; how many more there are is stated")
# records
RECORD = Limit(64 * _MIB, "bytes", "a record in JSON, such as result.json, environment.json or manifest.json")
INDEX = Limit(256 * _MIB, "bytes", "the index of a store of runs, which is made anew if it is longer")
PATH = Limit(4096, "characters", "a path in a record, as everywhere on Linux")
EVENTS = Limit(64 * _MIB, "bytes", "job.jsonl, the history of a run's jobs")
METRICS_LINE = Limit(_MIB, "bytes", "a line of metrics.jsonl")
SAFETENSORS_HEADER = Limit(100_000_000, "bytes", "the header of a safetensors file, as in its library")
GGUF_HEADER = Limit(64 * _MIB, "bytes", "the header of a GGUF file, with its vocabulary")
GGUF_KEYS = Limit(10_000, "values", "the metadata of a GGUF file")
GGUF_VALUES = Limit(4_000_000, "elements", "all lists in the metadata of a GGUF file")
GGUF_TENSORS = Limit(2**16, "tensors", "a GGUF file")
GGUF_PIECE = Limit(512, "characters", "a token of a GGUF file's vocabulary from whose scores merges are made")
FLIGHT = Limit(64 * _MIB, "bytes", "the file of a flight recorder")
TRACE = Limit(256 * _MIB, "bytes", "the trace of a rank")
TRACED_ITERATIONS = Limit(100, "iterations", "a trace")
TRACED_CALLS = Limit(2**19, "calls", "the trace of a rank, which ends early beyond")
TRACE_EVENTS = Limit(2_000_000, "events", "a file of trace events")
GANTT_BYTES = Limit(96 * _KIB, "bytes", "the picture of a run's trace in a page of runs")
PAGE_BYTES = Limit(2 * _MIB, "bytes", "a page of up to 20 runs; each run more adds a hundredth")
GANTT_ROWS = Limit(512, "rows", "a picture of ranks over time")
# counts
SWEEP_RUNS = Limit(10_000, "runs", "a sweep, repeats counted")
LAYERS = Limit(2**12, "layers", "a model")
RANKS = Limit(2**20, "ranks", "a run")
RANKS_OF_NODE = Limit(2**10, "ranks", "a node")
MICRO_BATCHES = Limit(2**16, "micro-batches", "an iteration of one replica")
RAMP_ITERATIONS = Limit(10**6, "iterations", "the growth of the batch, at its first size")
SUB_JOBS = Limit(1_000_000, "sub-jobs", "a bulk job")
WAIT_FOR_PIPE = Limit(10, "s", "time for which a pipe that is given as a file may be silent")


def all_limits() -> Dict[str, Limit]:
    """All limits by name, in the order of this file."""
    return {name: value for name, value in globals().items() if isinstance(value, Limit)}


def cut(text: str, limit: Limit = MESSAGE_VALUE) -> str:
    """A value as a message quotes it: on one line, the rest beyond the limit as an ellipsis."""
    line = re.sub(r"\s+", " ", text[: 4 * limit.value]).strip()
    is_cut = len(line) > limit.value or len(text) > 4 * limit.value
    return f"{line[: limit.value - 1]}…" if is_cut else line

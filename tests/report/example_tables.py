"""Hand-written tables: the notes' measured rows, and made-up rows whose figures follow from one another."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, List, Tuple

from hypothesis import assume
from hypothesis import strategies as st

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.formulas.flops import notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import parameter_count
from fugaku_gpt.report.catalogue import shapes_of
from fugaku_gpt.report.notes_table import COLUMNS, notes_tables
from fugaku_gpt.report.rows import ResultRow
from tests.report.test_notes_table import by_hand, measurements

# status in the notes → the remark that a row of a report carries for it
_ENDED = {"fail": "failed: exit code 1", "hang": "stuck after the first iteration", "not run": "not run"}


def measured_tables() -> Dict[str, List[Tuple[str, ResultRow]]]:
    """Maps each table of the notes on Fugaku to its rows, as (id, row)."""
    tables: Dict[str, List[Tuple[str, ResultRow]]] = {}
    for name, line in measurements().items():
        if line["tflops_formula"] != "megatron_72_or_96":
            continue
        status = line["status"]
        remarks = () if status in ("ok", "estimated") else (_ENDED.get(status, status.replace("_", " ")),)
        row = replace(by_hand(line), torch=line["torch"], date="02-15", remarks=remarks)
        tables.setdefault(name.rpartition(".")[0], []).append((name, row))
    return tables


def row_lines(text: str) -> List[int]:
    """Numbers of the lines that hold rows."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith("| ") and not line.startswith(("| Nodes", "| --"))
    ]


def cells_of(row: ResultRow) -> List[str]:
    """Cells of a row as they are written in a table."""
    return notes_tables([row]).splitlines()[3][2:-2].split(" | ")


def table_of(row: ResultRow, cells: List[str]) -> str:
    """A table of one row whose cells are replaced by these."""
    lines = notes_tables([row]).splitlines()
    return "\n".join([*lines[:3], "| " + " | ".join(cells) + " |"]) + "\n"


def column(title: str) -> int:
    """Index of a column."""
    return COLUMNS.index(title)


def _divisors(number: int) -> List[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def rows(draw: st.DrawFn, failed: bool = False) -> ResultRow:
    """A configuration that can be run on Fugaku, with figures that follow from one another."""
    size = draw(st.sampled_from(["124M", "350M", "1.3B", "13B", "30B"]))
    model: ModelConfig = draw(st.sampled_from(shapes_of(size)))
    recompute = draw(st.booleans())
    seq_len = draw(st.sampled_from([1024, 2048]))
    tp = draw(st.sampled_from([t for t in _divisors(model.heads) if t <= 8]))
    pp = draw(st.sampled_from(_divisors(model.layers)))
    ranks_per_node = draw(st.sampled_from([1, 2, 4]))
    step = ranks_per_node // math.gcd(ranks_per_node, tp * pp)
    dp = step * draw(st.integers(1, 64))
    nodes = dp * tp * pp // ranks_per_node
    micro_batch = draw(st.sampled_from([1, 2, 4]))
    global_batch = dp * micro_batch * draw(st.integers(2, 64))
    speed = draw(st.floats(0.05, 2.2))  # TFLOP/s per node
    vocab = replace(model, vocab_size=50257).padded_vocab(tp)
    flops = notes_flops(replace(model, seq_len=seq_len), global_batch, vocab, recompute)
    seconds = tflops_per_node(flops, speed, nodes)
    least = max(256 * 2.0**20, 4.0 * parameter_count(model) / (tp * pp))
    assume(least < 28 * 2.0**30)
    memory = draw(st.floats(least, 31 * 2.0**30))
    return ResultRow(
        size=size,
        seq_len=seq_len,
        nodes=nodes,
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        global_batch=global_batch,
        ranks_per_node=ranks_per_node,
        recompute=recompute,
        torch=draw(st.sampled_from(["1.7", "1.10", "2.13"])),
        freq_mhz=draw(st.sampled_from([None, 2000, 2200])),
        tcmalloc=draw(st.booleans()),
        retention_state=draw(st.sampled_from([None, 0, 1])),
        knobs=draw(st.sampled_from([(), (("eco_state", 0),), (("throttling_state", 3), ("issue_state", 1))])),
        node_used_bytes=None if failed else memory,
        seconds_per_iteration=None if failed else seconds,
        tflops_notes=None if failed else speed,
        date=draw(st.sampled_from(["", "02-15"])),
        job_id=draw(st.sampled_from(["", "21103755", "239[1]", "64856_0", "local-1", "local-7[2]"])),
        remarks=draw(st.sampled_from([(), ("n=3",), ("forward and backward reduce are slow",)])),
        status="oom" if failed else "ok",
    )

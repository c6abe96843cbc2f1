"""Faults of each kind in real runs under ``mpirun``: each ends by itself, and the doctor names the rank and the call.

The long form, all kinds in all layouts, is ``python -m tests.mpi.hangs``, a part of ``make soak``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mpi.faults import KINDS, Fault
from tests.mpi.hangs import CHECKED, LAYOUTS, STEP, Case, Outcome, strike
from tests.support.corpus import write_byte_corpus

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]

AT_A_TIME = 2  # most of a case is waiting: for Python to start, and for the timeout
FAULTS = (
    ("tp2", Fault("skip", 1, "tp", STEP, 36)),
    ("dp2", Fault("extra", 1, "dp", STEP, 0)),
    ("pp2-gpipe", Fault("shape", 1, "pp", STEP, 3, "start_send")),
    ("tp2", Fault("shape", 1, "world", STEP, 0)),  # passes in silence but for checks
    ("pp2", Fault("order", 1, "world", STEP, 0)),
    ("dp2-zero", Fault("swallow", 0, "dp", STEP, 1)),
    ("dp2", Fault("loop", 0, "dp", STEP, 1)),
    ("pp2", Fault("native", 0, "pp", STEP, 0)),
    ("pp2-gpipe", Fault("stop", 1, "world", STEP, 0)),
    ("tp2-pp2", Fault("die", 3, "world", STEP, 0)),
)


def test_faults_of_every_kind_end_and_the_doctor_names_rank_and_call(tmp_path: Path) -> None:
    assert {fault.kind for _, fault in FAULTS} == set(KINDS)
    layouts = {layout.name: layout for layout in LAYOUTS}
    corpus = write_byte_corpus(tmp_path / "bytes")

    def run_fault(number: int) -> Outcome:
        name, fault = FAULTS[number]
        silent = name == "tp2" and fault.kind == "shape"
        return strike(Case(layouts[name], fault), corpus, tmp_path / str(number), CHECKED if silent else ())

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        outcomes = list(pool.map(run_fault, range(len(FAULTS))))
    wrong = [f"{outcome.case.name}: {outcome.wrong}; {outcome.verdict}" for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join(wrong)

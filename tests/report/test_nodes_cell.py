"""Tests of the toggles in the cells of nodes, alone and together."""

from __future__ import annotations

from typing import Optional, Tuple

import pytest

from fugaku_gpt.report.nodes_cell import NodesCell, read_clock, read_nodes_cell
from fugaku_gpt.report.rows import MORE_KNOBS


@pytest.mark.parametrize(
    "toggle, expected",
    [
        ("", NodesCell(8)),
        ("max-proc-per-node=4", NodesCell(8, ranks_per_node=4)),
        ("ppn = 4", NodesCell(8, ranks_per_node=4)),
        ("mppn=4", NodesCell(8, ranks_per_node=4)),
        ("procs-per-node=4", NodesCell(8, ranks_per_node=4)),
        ("2.0GHz", NodesCell(8, clock=("2.0", "G"))),
        ("LD_PRELOAD=libTCMalloc.so", NodesCell(8, tcmalloc=True)),
        ("eco_state=2", NodesCell(8, states=(("eco_state", 2),))),
        ("“spread”", NodesCell(8, other_toggles=("spread",))),
        ("eco_state=two", NodesCell(8, other_toggles=("eco_state=two",))),
    ],
)
def test_a_single_toggle_changes_a_single_value(toggle: str, expected: NodesCell) -> None:
    assert read_nodes_cell(f"8 ({toggle})") == expected == read_nodes_cell(f" 8({toggle}, ) ^†")


def test_toggles_that_come_again_are_all_read() -> None:
    names = [f"{knob.name}=1" for knob in MORE_KNOBS]
    cell = read_nodes_cell(f"8 (eco_state=0, {', '.join(names)}, one, two)")
    assert cell.states == (("eco_state", 0), *((knob.name, 1) for knob in MORE_KNOBS))
    assert cell.other_toggles == ("one", "two")


@pytest.mark.parametrize("text", ["", "-", "x", "many (2.0GHz)", "8 9", "1234567890"])
def test_another_text_has_no_nodes(text: str) -> None:
    assert read_nodes_cell(text) == NodesCell()


@pytest.mark.parametrize(
    "text, clock, mhz",
    [
        ("2.2GHz", ("2.2", "G"), 2200),
        ("2200 MHz", ("2200", "M"), 2200),
        ("1.9995ghz", ("1.9995", "g"), 2000),
        ("2.2THz", ("2.2", "T"), None),
        ("2.2Hz", ("2.2", ""), None),
        ("fast", (), None),
    ],
)
def test_a_clock_is_in_gigahertz_or_megahertz(text: str, clock: Tuple[str, ...], mhz: Optional[int]) -> None:
    assert read_clock(text) == clock and NodesCell(1, clock=clock).freq_mhz == mhz

"""Rules for the power knobs of a Fugaku node (PJM050 to PJM055)."""

from __future__ import annotations

from typing import Dict, Iterator, List, Sequence, Tuple

from fugaku_gpt.machine.fugaku import RETENTION_LIMIT
from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.registry import DATED, ERROR, INFO, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FUGAKU
from fugaku_gpt.pjm.options import KNOB_VALUES

_SOURCE = "Fugaku user guide 1.52, PowerControlFunction"


def _range_text(values: Sequence[int]) -> str:
    """Format the values of a knob for messages: 0 or 1, 0 to 9."""
    return f"{values[0]} to {values[-1]}" if len(values) > 2 else " or ".join(str(value) for value in values)


def _all_states() -> str:
    """List the values of all power knobs except the clock; knobs with the same values are listed together."""
    by_values: Dict[Tuple[int, ...], List[str]] = {}
    for knob, values in KNOB_VALUES.items():
        if knob != "freq":
            by_values.setdefault(values, []).append(knob)
    groups = []
    for values, knobs in by_values.items():
        names = " and ".join(filter(None, [", ".join(knobs[:-1]), knobs[-1]]))
        groups.append(f"{names} {_range_text(values)}")
    return ", ".join(groups)


@rule(
    "PJM050",
    ERROR,
    "boost mode without eco mode, or no such frequency",
    why="The clock is 2000 or 2200 MHz, and 2200 without eco mode (eco_state 0 or 1) is refused at present: the pairs "
    "that run are 2000 with 0 or 2, and 2200 with 2. Until 2024 boost without eco did run.",
    fix="freq=2200,eco_state=2 (boost eco), freq=2000,eco_state=2 (eco) or freq=2000,eco_state=0 (normal)",
    source=_SOURCE + "; user briefings of April and September 2025",
    site=FUGAKU,
)
def frequency(facts: Facts) -> Iterator[Hit]:
    text = facts.resources.get("freq")
    if text is None:
        return
    line, column = facts.position("resources.freq", "freq")
    freq = facts.knob("freq")
    if freq not in KNOB_VALUES["freq"]:
        if freq is not None or not is_unfilled(text):
            yield Hit(line, f"freq={printable(text)} is neither 2000 nor 2200", column)
    elif freq == 2200 and facts.knob("eco_state") in (0, 1):
        message = f"freq=2200 with eco_state={facts.knob('eco_state')} is refused (as of {facts.limits.date})"
        yield Hit(line, message, column, downgrade=DATED)


@rule(
    "PJM051",
    WARNING,
    "only one of freq and eco_state",
    why="The other takes the default, which has changed: since 2025 it is freq=2200,eco_state=2, before it was 2000 "
    "and 0. So the same script runs in another mode than it did, at about half the peak where eco mode has come in.",
    fix="write both",
    source=_SOURCE + "; user briefings of April and September 2025",
    site=FUGAKU,
)
def half_a_mode(facts: Facts) -> Iterator[Hit]:
    for given, missing, default in (("freq", "eco_state", 2), ("eco_state", "freq", 2200)):
        if given in facts.resources and missing not in facts.resources:
            line, column = facts.position(f"resources.{given}", given)
            value = printable(facts.resources[given])
            message = f"{given}={value} without {missing}, which is {default} by default since 2025"
            yield Hit(line, message, column)


@rule(
    "PJM052",
    INFO,
    "no power knob",
    why="The clock and the number of floating-point pipes come from the site's default, which has changed: since 2025 "
    "it is 2200 MHz with one pipe, 3.38 TFLOP/s a node in float32; before, 2000 MHz with both, 6.14 TFLOP/s. So matrix "
    "products take almost twice as long as they could, and results cannot be compared over the years.",
    fix='add #PJM -L "freq=2000,eco_state=0,retention_state=0", or the mode that is meant',
    source=_SOURCE + "; user briefings of April and September 2025",
    site=FUGAKU,
)
def no_knob(facts: Facts) -> Iterator[Hit]:
    if not any(knob in facts.resources for knob in KNOB_VALUES):
        yield Hit(
            facts.top, "no power knob is set: clock and pipes are the site's defaults of the day", is_absence=True
        )


@rule(
    "PJM053",
    WARNING,
    "retention_state=1 on more than 9,216 nodes",
    why="Above 9,216 nodes cores are kept awake whatever is asked for; pjsub only warns: specification of core "
    "retention is invalid because job size is too large.",
    fix="remove retention_state=1",
    source="Fugaku user guide 1.52, JobExecution/NormalJob",
    site=FUGAKU,
)
def retention_ignored(facts: Facts) -> Iterator[Hit]:
    if facts.knob("retention_state") == 1 and facts.nodes and facts.nodes > RETENTION_LIMIT:
        line, column = facts.position("resources.retention_state")
        yield Hit(line, f"retention_state=1 with {facts.nodes} nodes is ignored", column)


@rule(
    "PJM054",
    ERROR,
    "power knob with a value that it has not",
    why="pjsub refuses values outside the table of a custom resource: [ERR.] PJM 0076.",
    fix=_all_states(),
    source=_SOURCE + "; Command Reference J2UL-2549, message 0076",
    site=FUGAKU,
)
def knob_value(facts: Facts) -> Iterator[Hit]:
    allowed = {knob: values for knob, values in KNOB_VALUES.items() if knob != "freq"}
    allowed["retention_state_acores"] = (0,)
    for knob, values in allowed.items():
        text = facts.resources.get(knob)
        if knob not in facts.resources or (text is not None and is_unfilled(text)) or facts.knob(knob) in values:
            continue
        line, column = facts.position(f"resources.{knob}", knob)
        valid = _range_text(values)
        yield Hit(line, f"{knob}={printable(text or '')}: the knob takes {valid}", column, f"write {valid}")


@rule(
    "PJM055",
    INFO,
    "sleeping cores and threads that wait",
    why="With retention_state=1 an idle core falls asleep and takes about 3 ms to wake. Threads that wait passively "
    "at each parallel region, and ranks that sleep, pay that each time.",
    fix="set retention_state=0, or export OMP_WAIT_POLICY=active",
    source=_SOURCE,
    site=FUGAKU,
)
def sleeping_cores(facts: Facts) -> Iterator[Hit]:
    if facts.knob("retention_state") != 1 or (facts.nodes and facts.nodes > RETENTION_LIMIT):
        return
    threads = facts.sole_number("OMP_NUM_THREADS")
    policies = {assignment.value.lower() for assignment in facts.assignments_to("OMP_WAIT_POLICY")}
    if threads and threads[0] > 1 and "active" not in policies:
        line, column = facts.position("resources.retention_state")
        message = f"retention_state=1 with {threads[0]} threads that may sleep (OMP_WAIT_POLICY is not active)"
        yield Hit(line, message, column)

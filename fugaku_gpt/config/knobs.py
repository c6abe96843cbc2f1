"""The description of a knob of a node: one record, in the metadata of its field of ``NodeConfig``.

The fields of :class:`fugaku_gpt.config.schema.NodeConfig` that carry a :class:`NodeKnob` are the one table of knobs; a
knob that a run asks for is a toggle, whose effect ranks read back (``machine.local.Toggle``). Adding a power knob is
one edit, such as

    prefetch_state: Optional[int] = power_knob("power knob: ...", (0, 1), default=0, statistics_order=7)

among them. Run files accept it, job scripts write it (or note that their scheduler has no equivalent), ranks read it
back, tables show whether it was applied, ``compare`` knows that it is set for a job, lint checks its values and the
simulator grants it and lists it in its statistics file. No code lists the knobs a second time. Code that names one does
so for one of these reasons, and a new knob needs none of them:

* a rule of the machine or of a scheduler about this knob: clocks that require certain states of the pipes, threads that
  must not sleep where retention lets cores sleep, Slurm's ``--cpu-freq`` (``machine/fugaku.py``, ``pjm/lint/rules``,
  ``jobs/render.py``, ``simulator/site.py``);
* the way it is applied or read back, if that is not PJM's grant (``machine/local.py``, ``launch/launcher.py``);
* its effect on speed, memory or power (``planner``, ``report/check_figures.py``, ``simulator/stats.py``);
* a name, column or level that tables, logs or users have for it (``report``, ``planner/tables``, ``compare``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Callable, Optional, Tuple


@dataclass(frozen=True)
class NodeKnob:
    """A setting of each node that a machine may or may not apply; its field has the meaning and the unit.

    Attributes:
        name: name of the field, in a run file, in ``environment.json`` and in tables.
        values: values that PJM accepts; only power knobs have them.
        default: the value that Fugaku uses if a job script does not set a power knob, as of April 2025.
        pjm_name: name of PJM's custom resource; empty: the same as ``name``.
        statistics_order: position of a power knob among the others in PJM's statistics file, from 1.
        historical_value: the value that all machines had when the first tables were written. Tables show any other
            value that a job has used, whether or not it was requested. None: only a requested value is shown.
        unsupported_by: schedulers that have no equivalent; their scripts note that the knob is not applied.
        per_job: True if a scheduler sets it for all ranks of a job, so that two sides of one job cannot differ in it.
        variable: environment variable that passes the value to the ranks.
        alias: short name on the command line of ``compare``.
        row_name: format of the value in the name of a sweep's row.
        short_form: format of a value in tables; None: ``name=value``, in quotes.
    """

    name: str = ""
    values: Tuple[int, ...] = ()
    default: int = 0
    pjm_name: str = ""
    statistics_order: int = 0
    historical_value: Optional[int] = None
    unsupported_by: Tuple[str, ...] = ()
    per_job: bool = False
    variable: str = ""
    alias: str = ""
    row_name: str = "{name}{value}"
    short_form: Optional[Callable[[Any], str]] = None

    @property
    def key(self) -> str:
        """The dotted key of a run file."""
        return f"node.{self.name}"

    @property
    def is_power_knob(self) -> bool:
        """Whether PJM sets the knob, as a custom resource of the job."""
        return bool(self.values)

    @property
    def resource(self) -> str:
        """The name of PJM's custom resource."""
        return self.pjm_name or self.name

    @property
    def is_in_tables(self) -> bool:
        """Whether tables show the knob: in the Nodes cell if it was applied, else in the notes."""
        return self.is_power_knob or self.short_form is not None

    def format_for_tables(self, value: object) -> str:
        """A value as tables write it: 2.2GHz, LD_PRELOAD=libtcmalloc.so, retention_state=0."""
        return self.short_form(value) if self.short_form is not None else f"{self.name}={value}"

    def format_for_row_name(self, value: str) -> str:
        """A value as the name of a sweep's row writes it: 2200MHz, ret0."""
        return self.row_name.format(name=self.name, value=value)


def knobs_of(section: type) -> Tuple[NodeKnob, ...]:
    """The knobs among the fields of a section of the configuration, in the order of the fields."""
    return tuple(
        replace(field.metadata["knob"], name=field.name)
        for field in fields(section)
        if field.metadata.get("knob") is not None
    )


def is_requested(value: object) -> bool:
    """Whether a field's value requests a setting: 0 does; None, False and an empty tuple do not."""
    return value is not None and value is not False and value != ()


def gigahertz(megahertz: int) -> str:
    """A clock as tables write it: 2.2GHz for 2200 MHz, 2.0GHz for 2000 MHz."""
    digits = f"{megahertz / 1000:.3f}".rstrip("0")
    return (digits + "0" if digits.endswith(".") else digits) + "GHz"

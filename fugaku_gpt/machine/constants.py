"""Data files of machines: facts about the hardware, and constants that were fitted to measured rows.

A file has the machine's facts, and for each of the planner's two models its constants with their priors, their fitted
values and widths, the rows that they come from and the ranges of inputs that those rows cover. ``fugaku-gpt plan fit``
rewrites the fitted half; the rest is written by hand.

``fugaku-gpt plan probe`` writes the file of the machine that it runs on. That file has an additional section
``probed``, on which its time model is based (``planner/trainer/seconds.py``); its constants are factors.

A file with a section ``counted`` has the cycles of our own kernels (``planner/trainer/counted.py``), and names with
``base`` the machine whose file has the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import yaml

from fugaku_gpt.config.tree import check_structure
from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.limits import YAML_TEXT, cut
from fugaku_gpt.machine import fugaku
from fugaku_gpt.machine.counted import CountedCycles, counted_from_data, counted_to_data
from fugaku_gpt.machine.probed import ProbeResults, probe_from_data, probe_to_data, round_digits

LOCAL = "local"
LOCAL_FILE = Path("machine-local.yaml")  # in the current folder, like any other file of the user
# tables write GB for values that tools count in GiB
UNIT_BYTES = {"KiB": 2.0**10, "MiB": 2.0**20, "MB": 2.0**20, "GiB": 2.0**30, "GB": 2.0**30}
FUGAKU_HARDWARE = "A64FX"  # begins the kinds of hardware whose nodes are Fugaku's
_DATA = Path(__file__).parent / "data"
_FORMAT = 1
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # both are safe; libyaml's is ten times as fast


@dataclass(frozen=True)
class Constant:
    """A positive number of a model.

    Args:
        prior: value before the fit.
        prior_width: standard deviation of the logarithm before the fit; 0 for a constant that is not fitted.
        value: fitted value.
        width: standard deviation of the logarithm after the fit.
    """

    name: str
    meaning: str
    prior: float
    prior_width: float
    value: float
    width: float


@dataclass(frozen=True)
class FittedModel:
    """One model's constants, and the uncertainty of the fit.

    Args:
        spread: expected residual of a row (a logarithm), for the robust fit.
        covariance: covariance of the logarithms of the free constants, in their order; empty before a fit.
        interval_spread: spread with which, in addition to the constants' widths, 80 % intervals cover 80 % of the
            left-out rows.
        beyond_spread: additional spread for each factor of e by which a row lies outside of the fitted ranges.
        rows: names of the fitted rows.
        input_ranges: the values that these rows have of each input: (least, most) of a number, all of a category.
    """

    constants: Tuple[Constant, ...]
    spread: float
    covariance: Tuple[Tuple[float, ...], ...] = ()
    interval_spread: float = 0.1
    beyond_spread: float = 0.1
    rows: Tuple[str, ...] = ()
    input_ranges: Mapping[str, Tuple[Any, ...]] = field(default_factory=dict)

    @property
    def values(self) -> Dict[str, float]:
        """Values of all constants, by name."""
        return {constant.name: constant.value for constant in self.constants}

    @property
    def free_constants(self) -> Tuple[Constant, ...]:
        """The constants that are fitted."""
        return tuple(constant for constant in self.constants if constant.prior_width > 0)


@dataclass(frozen=True)
class Machine:
    """A kind of machine.

    Args:
        hardware: memory in ``memory_unit`` by the prefix of a row's ``hardware`` column.
        facts: numbers from the vendor: peak_flops (of a device at base_clock_ghz, in the type trained in),
            base_clock_ghz, devices_per_node, item_bytes, tile_units (multiprocessors that share a product's tiles, 0
            if products are not scheduled in waves), memory_groups (NUMA domains of a device; default 1),
            watts_per_node (if it is known).
        memory_unit: ``MiB`` or ``GB``.
        memory_of: ``node`` or ``rank``: whose memory the rows have.
        probed: results of ``plan probe``, for the time of our own trainer; None for other machines.
        counted: counted cycles of our own kernels; None for other machines.
        base: name of the machine that all but name, title and counted is of; empty for other machines.
    """

    name: str
    title: str
    hardware: Mapping[str, float]
    facts: Mapping[str, float]
    memory_unit: str
    memory_of: str
    time: FittedModel
    memory: FittedModel
    probed: Optional[ProbeResults] = None
    counted: Optional[CountedCycles] = None
    base: str = ""

    def has_hardware(self, hardware: str) -> bool:
        """True if a row's ``hardware`` is a kind of this machine."""
        return any(hardware.startswith(prefix) for prefix in self.hardware)

    def capacity(self, hardware: str) -> float:
        """Memory that a device or node of this hardware has, in ``memory_unit``; the limit of a job is
        :meth:`job_capacity`."""
        return next(size for prefix, size in self.hardware.items() if hardware.startswith(prefix))

    def job_capacity(self, hardware: str) -> float:
        """Memory of this hardware that a job may ask for, in ``memory_unit``: that of Fugaku's nodes is less than they
        have."""
        capacity = self.capacity(hardware)
        if not hardware.startswith(FUGAKU_HARDWARE):
            return capacity
        return min(capacity, fugaku.JOB_BYTES / UNIT_BYTES[self.memory_unit])


def machine_names() -> List[str]:
    """Names of the machines that have a data file in this package."""
    return sorted(path.stem for path in _DATA.glob("*.yaml"))


def machine_path(name: str) -> Path:
    """Path of the data file of a machine.

    Raises:
        UsageError: there is no such machine.
    """
    if name not in machine_names():
        raise UsageError(
            f"machine {name}: unknown; valid: {', '.join([*machine_names(), LOCAL])}, or the path of a machine file"
        )
    return _DATA / f"{name}.yaml"


def load_machine(name: str) -> Machine:
    """Loads a machine by name, or from a file whose name ends in ``.yaml``; ``local`` is the file of ``plan probe``.

    Raises:
        UsageError: there is no such machine, or its file is not valid.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else LOCAL_FILE if name == LOCAL else machine_path(name)
    if name == LOCAL and not path.exists():
        raise UsageError(
            f"machine {LOCAL}: no {path} in the current folder; make it with `fugaku-gpt plan probe --out {path}` "
            "(30 seconds, on an idle machine), or name the file: --machine FILE.yaml"
        )
    data = _read_file(path)
    try:
        if data["format"] != _FORMAT:
            raise UsageError(f"{path}: format {data['format']}: this version reads {_FORMAT}")
        if "base" in data:
            data = {**_read_file(machine_path(str(data["base"]))), **data}
        if data["memory_unit"] not in UNIT_BYTES or data["memory_of"] not in ("node", "rank"):
            raise ValueError(f"memory_unit must be one of {', '.join(UNIT_BYTES)}, memory_of node or rank")
        return Machine(
            name=str(data["name"]),
            title=str(data["title"]),
            hardware={str(key): float(size) for key, size in data["hardware"].items()},
            facts={str(key): float(number) for key, number in data["facts"].items()},
            memory_unit=str(data["memory_unit"]),
            memory_of=str(data["memory_of"]),
            time=_parse_fitted_model(data["time"]),
            memory=_parse_fitted_model(data["memory"]),
            probed=probe_from_data(data["probed"]) if "probed" in data else None,
            counted=counted_from_data(data["counted"]) if "counted" in data else None,
            base=str(data.get("base", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path}: not a machine file: {type(error).__name__}: {cut(str(error))}") from None


def _read_file(path: Path) -> Dict[str, Any]:
    """The content of a machine file, which is a mapping."""
    try:
        text = read_text(path, YAML_TEXT)
        check_structure(text, str(path))
        data = _LOADER(text).get_single_data()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise UsageError(f"{path}{line}: cannot be read as a machine file: {problem}") from None
    except (ValueError, OverflowError, TypeError) as error:  # by a constructor of YAML, such as that of a date
        raise UsageError(f"{path}: not a machine file: {cut(str(error))}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: not a machine file: expected `key: value` lines at the top")
    return data


def _parse_fitted_model(data: Mapping[str, Any]) -> FittedModel:
    constants = []
    for name, entry in data["constants"].items():
        prior, width = (float(number) for number in entry["prior"])
        value, fitted_width = (float(number) for number in entry.get("fitted", (prior, width)))
        if not prior > 0 or not value > 0 or width < 0 or not math.isfinite(prior * value * width * fitted_width):
            raise ValueError(f"{name}: constants must be above 0, their widths not below")
        constants.append(Constant(str(name), str(entry["meaning"]), prior, width, value, fitted_width))
    fitted = FittedModel(
        constants=tuple(constants),
        spread=float(data["spread"]),
        covariance=tuple(tuple(float(number) for number in line) for line in data.get("covariance", ())),
        interval_spread=float(data.get("interval_spread", 0.1)),
        beyond_spread=float(data.get("beyond_spread", 0.1)),
        rows=tuple(str(row) for row in data.get("rows", ())),
        input_ranges={str(key): tuple(values) for key, values in data.get("seen", {}).items()},
    )
    if fitted.covariance and [len(line) for line in fitted.covariance] != [len(fitted.free_constants)] * len(
        fitted.free_constants
    ):
        raise ValueError(f"covariance must have {len(fitted.free_constants)} lines of as many numbers")
    return fitted


def machine_yaml(machine: Machine) -> str:
    """A machine as the text of its data file."""
    data: Dict[str, Any] = {"format": _FORMAT, "name": machine.name, "title": machine.title}
    if machine.base:
        data["base"] = machine.base
    else:
        data["hardware"] = dict(machine.hardware)
        data["facts"] = dict(machine.facts)
        data["memory_unit"] = machine.memory_unit
        data["memory_of"] = machine.memory_of
        data["time"] = _fitted_model_data(machine.time)
        data["memory"] = _fitted_model_data(machine.memory)
    if machine.probed is not None:
        data["probed"] = _with_inline_rows(probe_to_data(machine.probed))
    if machine.counted is not None:
        data["counted"] = _with_inline_rows(counted_to_data(machine.counted))
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=116, default_flow_style=False, allow_unicode=True)


class _InlineList(list):  # type: ignore[type-arg]
    """A list that is written on one line of the file."""


class _Dumper(yaml.SafeDumper):
    pass


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    """Writes 1.2e+12 rather than 1200000000000.0; YAML needs the point to read it as a number."""
    text = f"{number:g}"
    if "e+" not in text or float(text) != number:
        return dumper.represent_float(number)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(
    _InlineList, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True)
)


def _with_inline_rows(data: Dict[str, Any]) -> Dict[str, Any]:
    """The section with each row of its tables on one line."""
    formatted = dict(data)
    for key, table in data.items():
        if isinstance(table, dict) and "rows" in table:
            formatted[key] = {
                "columns": _InlineList(table["columns"]),
                "rows": [_InlineList(row) for row in table["rows"]],
            }
    return formatted


def _fitted_model_data(fitted: FittedModel) -> Dict[str, Any]:
    constants = {
        constant.name: {
            "meaning": constant.meaning,
            "prior": _InlineList([round_digits(constant.prior), round_digits(constant.prior_width, 3)]),
            "fitted": _InlineList([round_digits(constant.value), round_digits(constant.width, 3)]),
        }
        for constant in fitted.constants
    }
    return {
        "spread": round_digits(fitted.spread, 3),
        "interval_spread": round_digits(fitted.interval_spread, 3),
        "beyond_spread": round_digits(fitted.beyond_spread, 3),
        "constants": constants,
        "seen": {key: _InlineList(values) for key, values in fitted.input_ranges.items()},
        "rows": _InlineList(fitted.rows),
        "covariance": [_InlineList([round_digits(number, 3) for number in line]) for line in fitted.covariance],
    }

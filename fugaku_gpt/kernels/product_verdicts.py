"""Measured verdicts on how layers' products are computed fastest, in files beside the library of kernels.

There are up to three ways: PyTorch's product, oneDNN's where this build can call it directly, and our own. ``ops``
measures them with :mod:`fugaku_gpt.ops.product_timing`, in the process of ``env kernels`` or at the start of a run.
A verdict counts only for the stamp that it was measured with: processor, library, build of PyTorch and settings of its
libraries. Each stamp has a file, so that runs with one setting and runs with another do not measure in turns. A verdict
follows from the recorded ratios alone, so that all who read one file decide alike.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.kernels.build import library_file
from fugaku_gpt.records.files import create_json_atomically, locked, write_json_atomically
from fugaku_gpt.versioned_json import read_versioned_json

PYTORCH, ONEDNN, COMPILED = "pytorch", "onednn", "compiled"  # ways to compute a product
MEASURED_DTYPES = ("float32", "bfloat16")  # number types of training whose products are measured
# The verdicts in a file follow from these two: other values are another version of it.
# A way other than the build's own must be as many times as fast: less is within what repeats of a measurement differ by
MIN_SPEEDUP = 1.03
MIN_TURNS = 5  # fewer are no measurement
# Share of their time that measuring threads may wait for a core: alone they wait for less than 0.01 of it; beside other
# work on every core for 0.4, and ratios of products are then wrong by a third.
MAX_WAIT_SHARE = 0.05
_VERSION = 1
_DIGEST_DIGITS = 12
_MAX_BYTES = 2**20
_SUFFIX = "-products-"  # of files' names, between the library's and the stamp's hash
_MEND = "remove it; products are then measured again"


@dataclass(frozen=True)
class Stamp:
    """The conditions of a measurement, besides number type and threads.

    Attributes:
        processor: name of the processor.
        library: name of the kernels' library and a hash of its content.
        torch: version of PyTorch and a hash of its commit, libraries and compiler options.
        settings: environment variables that choose the code of PyTorch's libraries, as NAME=value.
    """

    processor: str
    library: str
    torch: str
    settings: str

    def digest(self) -> str:
        """A short hash of all of them, by which files of other stamps have other names."""
        return hashlib.sha256(repr(asdict(self)).encode()).hexdigest()[:_DIGEST_DIGITS]

    def differences_from(self, other: "Stamp") -> str:
        """Return the differences in one line, this stamp's values first; empty if there are none."""
        pairs = ((name, value, getattr(other, name)) for name, value in asdict(self).items())
        return "; ".join(
            f"{name} {value or 'none'}, not {present or 'none'}" for name, value, present in pairs if value != present
        )


@dataclass(frozen=True)
class ProductTimes:
    """The times of one product [rows, inner] x [inner, columns].

    Attributes:
        kind: ``forward``, ``gradient of inputs`` or ``gradient of weights``.
        rows, inner, columns: its size.
        seconds: PyTorch's median over the turns.
        speedups: other way → PyTorch's time divided by this way's: the median over the turns of that ratio in a turn,
            or the ratio of the fastest times, whichever is smaller. Where other work disturbs, a win must show in both.
    """

    kind: str
    rows: int
    inner: int
    columns: int
    seconds: float
    speedups: Mapping[str, float]


@dataclass(frozen=True)
class ProductVerdict:
    """The times of a layer's products, and which way follows from them.

    Attributes:
        dtype: number type of training.
        threads: threads of each product.
        turns: turns in which every product was computed in every way; with fewer than ``MIN_TURNS`` PyTorch's is used.
        products: the products; empty without turns.
        wait_share: share of the time that the threads waited for a core, because other work had it; None if unknown.
    """

    dtype: str
    threads: int
    turns: int
    products: Tuple[ProductTimes, ...] = ()
    wait_share: Optional[float] = None

    @property
    def is_disturbed(self) -> bool:
        """Whether other work had the cores in the measurement: it counts until there is one that was disturbed less."""
        return self.wait_share is not None and self.wait_share > MAX_WAIT_SHARE

    def speedup(self, way: str) -> Optional[float]:
        """PyTorch's time for all products divided by a way's; None if that way was not measured."""
        if self.turns < MIN_TURNS or not self.products or any(way not in p.speedups for p in self.products):
            return None
        seconds = sum(product.seconds for product in self.products)
        return seconds / sum(product.seconds / product.speedups[way] for product in self.products)

    @property
    def uses_onednn(self) -> bool:
        """Whether oneDNN computes the products that ours do not."""
        speedup = self.speedup(ONEDNN)
        return speedup is not None and speedup >= MIN_SPEEDUP

    @property
    def compiled_speedup(self) -> Optional[float]:
        """The time of the better way of the build divided by ours; None if ours were not measured."""
        speedup = self.speedup(COMPILED)
        if speedup is None:
            return None
        return speedup / ((self.speedup(ONEDNN) or 1.0) if self.uses_onednn else 1.0)

    @property
    def uses_compiled(self) -> bool:
        """Whether ours compute the products."""
        speedup = self.compiled_speedup
        return speedup is not None and speedup >= MIN_SPEEDUP

    def name_ways(self) -> str:
        """The ways that are used, such as ``our own kernels``: those for large products first."""
        names = {PYTORCH: "PyTorch", ONEDNN: "oneDNN", COMPILED: "our own kernels"}
        return names[_used(self)[0]]

    def describe(self) -> str:
        """The measured figures in one line, such as ``ours 1.12 times as fast as PyTorch's, 2 threads``."""
        conditions = f"{self.dtype}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.turns < MIN_TURNS:
            return f"too slow, or too busy, to be measured in the time for it ({conditions})"
        rival = "oneDNN's" if self.uses_onednn else "PyTorch's"
        figures = []
        if self.compiled_speedup is not None:
            figures.append(f"ours {self.compiled_speedup:.2f} times as fast as {rival}")
        onednn = self.speedup(ONEDNN)
        if onednn is not None:
            figures.append(f"oneDNN's {onednn:.2f} times as fast as PyTorch's")
        text = f"measured: {', '.join(figures) or 'there is no other way'} ({conditions})"
        if self.is_disturbed:
            text += f", but other work had the cores for {self.wait_share:.0%} of the time: `fugaku-gpt env kernels` "
            text += "measures again"
        return text


Verdicts = Dict[Tuple[str, int], ProductVerdict]  # (number type, threads) → verdict


def verdict_file(stamp: Stamp, prefix: Optional[Path] = None) -> Path:
    """The file of a stamp's verdicts, beside the library of :func:`fugaku_gpt.kernels.build.library_file`."""
    library = library_file(prefix)
    return library.with_name(f"{library.stem}{_SUFFIX}{stamp.digest()}.json")


def read_verdicts(file: Path, stamp: Stamp) -> Tuple[Verdicts, str]:
    """Read the verdicts of a file that count for a stamp; returns them and, if there are none, why not, in one line.

    A file that is damaged, of another version or too long is refused with that reason, as if there were none: products
    are then measured again. Where there is no file, the reason is how the nearest stamp with a file beside it differs.
    """
    content, problem = _read(file)
    if problem:
        return {}, problem
    if content is None:
        return {}, _reason_without_file(file, stamp)
    measured_with, verdicts = content
    differences = measured_with.differences_from(stamp)
    if differences:
        return {}, f"products were measured with {differences}"
    return verdicts, ""


def add_verdicts(file: Path, stamp: Stamp, measured: Sequence[ProductVerdict], replace: bool) -> Tuple[Verdicts, str]:
    """Add verdicts to the file of a stamp; returns all that are in force then, and why they could not be written, or
    an empty text.

    Where another process has written a verdict meanwhile, that one stays in force, so that processes that start
    together decide alike, unless other work disturbed it more; with ``replace`` it is replaced. What others have added
    stays. What is returned was read from the file after writing. A folder that cannot be written is no error: the
    verdicts are in force for the caller alone.
    """
    added = {(verdict.dtype, verdict.threads): verdict for verdict in measured}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if create_json_atomically(file, _content(stamp, added)):  # of those that start together, the first
            return added, ""
        with locked(file):
            in_file, _ = read_verdicts(file, stamp)
            verdicts = _merged(in_file, added, replace)
            if verdicts != in_file:
                write_json_atomically(file, _content(stamp, verdicts))
                in_file, _ = read_verdicts(file, stamp)
        return {**verdicts, **in_file}, ""
    except OSError as error:
        in_file, _ = read_verdicts(file, stamp)
        return _merged(in_file, added, replace), f"{file}: cannot be written: {error.strerror or error}"


def _merged(in_file: Verdicts, added: Verdicts, replace: bool) -> Verdicts:
    if replace:
        return {**in_file, **added}
    stay = {
        key: verdict
        for key, verdict in in_file.items()
        if key not in added or not verdict.is_disturbed or _is_disturbed_more(added[key], verdict)
    }
    return {**added, **stay}


def _is_disturbed_more(verdict: ProductVerdict, than: ProductVerdict) -> bool:
    return verdict.turns < MIN_TURNS or (verdict.wait_share or 0.0) >= (than.wait_share or 0.0)


def _content(stamp: Stamp, verdicts: Verdicts) -> Dict[str, Any]:
    rows = [_row(verdict) for _, verdict in sorted(verdicts.items())]
    return {"version": _VERSION, "stamp": asdict(stamp), "verdicts": rows}


def _read(file: Path) -> Tuple[Optional[Tuple[Stamp, Verdicts]], str]:
    """The stamp and verdicts of a file, None if there is none; and why it cannot be used, or an empty text."""
    try:
        if file.exists() and file.stat().st_size > _MAX_BYTES:
            return None, f"{file}: not the verdicts on products: longer than {_MAX_BYTES} bytes; {_MEND}"
        return read_versioned_json(file, "the verdicts on products", (_VERSION,), _parse, mend=_MEND), ""
    except UsageError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{file}: cannot be read: {error.strerror}"


def _reason_without_file(file: Path, stamp: Stamp) -> str:
    """How the stamp with the fewest differences differs among the files beside a missing one, if there are any."""
    pattern = f"{file.name.partition(_SUFFIX)[0]}{_SUFFIX}*.json"
    others = [content[0] for content, _ in map(_read, sorted(file.parent.glob(pattern))) if content is not None]
    if not others:
        return "products have not been measured for this processor"
    differences = min((other.differences_from(stamp) for other in others), key=lambda text: text.count("; "))
    return f"products were measured with {differences}"


def parse_verdict(values: Mapping[str, Any]) -> ProductVerdict:
    """The verdict of JSON values, as ``dataclasses.asdict`` makes them.

    Raises:
        ValueError: a number is not one that a measurement can have.
        KeyError, TypeError: a field is missing, or of another type.
    """
    dtype, threads, turns = values["dtype"], values["threads"], values["turns"]
    if dtype not in MEASURED_DTYPES:
        raise ValueError(f"dtype {dtype!r}")
    if not _is_count(threads) or threads < 1 or not _is_count(turns):
        raise ValueError(f"threads {threads!r}, turns {turns!r}")
    wait_share = values.get("wait_share")  # None in files that were written before it was recorded
    if wait_share is not None and not (isinstance(wait_share, float) and 0.0 <= wait_share <= 1.0):
        raise ValueError(f"wait_share {wait_share!r}")
    products = tuple(_parse_product(product) for product in values["products"])
    return ProductVerdict(dtype, threads, turns, products, wait_share)


def read_settings() -> str:
    """The environment variables that choose the code of PyTorch's libraries, sorted, as one line; those that set a
    number of threads are left out, since the threads in use are known."""
    names = sorted(
        name for name in os.environ if name.startswith(_SETTING_PREFIXES) and not name.endswith("_NUM_THREADS")
    )
    return " ".join(f"{name}={os.environ[name]}" for name in names)


_SETTING_PREFIXES = ("ATEN_CPU_", "DNNL_", "ONEDNN_", "MKL_", "OPENBLAS_", "TORCH_MKLDNN_")


def _parse(values: Dict[str, Any]) -> Tuple[Stamp, Verdicts]:
    stamp = Stamp(**{name: str(value) for name, value in values["stamp"].items()})
    verdicts: Verdicts = {}
    for row in values["verdicts"]:
        verdict = parse_verdict(row)
        if row["used"] != _used(verdict):
            raise ValueError(f"used: {row['used']}, but the ratios say {_used(verdict)}")
        verdicts[verdict.dtype, verdict.threads] = verdict
    return stamp, verdicts


def _parse_product(values: Mapping[str, Any]) -> ProductTimes:
    rows, inner, columns = values["rows"], values["inner"], values["columns"]
    if not all(map(_is_count, (rows, inner, columns))):
        raise ValueError(f"the size {rows!r}, {inner!r}, {columns!r}")
    speedups = {str(way): _positive(ratio) for way, ratio in values["speedups"].items()}
    return ProductTimes(str(values["kind"]), rows, inner, columns, _positive(values["seconds"]), speedups)


def _row(verdict: ProductVerdict) -> Dict[str, Any]:
    """A verdict in the file: its ratio and what follows from it come first, for those who read the file."""
    ratios = {"compiled": verdict.compiled_speedup, "onednn": verdict.speedup(ONEDNN)}
    return {"used": _used(verdict), "ratios": ratios, **asdict(verdict)}


def _used(verdict: ProductVerdict) -> List[str]:
    """The ways that follow from the ratios, by the products that they compute: ours, and those that ours leave."""
    return [*([COMPILED] if verdict.uses_compiled else []), ONEDNN if verdict.uses_onednn else PYTORCH]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _positive(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return float(value)
    raise ValueError(f"{value!r} is not a time, nor a ratio of times")

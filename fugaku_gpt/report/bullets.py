"""Reads and writes rates as a list of bullets, the form of people who push a batch until memory ends.

::

    ## vision1 on 4x L4                                                  model and machine of the bullets below
    - global batch size 64, recompute=full, fp32: ~ 50 images/s
    - global batch size 96, recompute=full, float32, tp=2: ~ 9.5 samples/s, ~ 9730 tokens/s (largest, fastest)
    - global batch size 128, remat=True, bf16, seq_len=1024: OOM

Before the colon are settings: the batch, ``recompute`` (or ``remat``), a dtype, ``seq_len`` and counts of the layout
as ``name=N``, and any other word or ``name=value``, which stays as it is. A value with other characters than those of
a word is in double quotes, as a string of JSON. After the colon is a rate in samples, sequences or images per second,
with tokens per second or without, or how the run failed; a remark in parentheses may follow. A comma may stand between
thousands.

A title of the form ``MODEL on MACHINE`` names both. Any title may state a dtype and settings of the form ``name=value``
after a comma. All of it holds for the titles below, up to one of the same level or a higher one; a bullet's own
settings take their place. Other lines are prose.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import DTYPES, RECOMPUTE, SHORT_DTYPES
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import TABLE_LINE, cut
from fugaku_gpt.records.bullet_form import PAIR, pair_of, rate_text, rounding_of
from fugaku_gpt.records.run import FAILED, HUNG, INTERRUPTED, LOST, OK, OUT_OF_MEMORY, REFUSED, TIMEOUT

_LARGEST_COUNT = 2**24
_RATES = (1e-9, 1e12)  # samples per second

_TITLE = re.compile(r"(#{1,6}) (.+)")
_MACHINE = re.compile(r"(.+?) on ((?:\d{1,6} ?x ?)?[A-Z0-9].*)")
_BULLET = re.compile(r"(?:[-*+]|\d{1,3}[.)]) (.*)")
_BATCH_TITLE = r"(?:global[ _])?batch(?:[ _]size)?"
_BATCH = re.compile(rf"{_BATCH_TITLE}\s*[=:]?\s*(\d{{1,12}}(?:,\d{{1,12}}){{0,4}})(?!\w)(.*)", re.IGNORECASE)
_UNREAD_BATCH = re.compile(rf"[\W_]{{0,8}}{_BATCH_TITLE}[\W_]{{0,8}}(?:of )?\d", re.IGNORECASE)
_RATE = re.compile(
    r"[~≈]?\s*([\d.,]{1,24}(?:e[+-]?\d{1,3})?)\s*(image|sample|sequence|seq|token)s?\s*(?:/|per)\s*s(?:ec(?:onds?)?)?",
    re.IGNORECASE,
)
_REMARK = re.compile(r"(.*?) ?\(([^()]{1,200})\)")
_PHRASE = re.compile(r"(?=[^A-Za-z]*[A-Za-z])[\w.+-]{1,40}(?: [\w.+-]{1,40}){0,3}")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")

_NAMES = {
    **dict.fromkeys(("remat", "recompute", "checkpointing"), "recompute"),
    **dict.fromkeys(("seq_len", "seq", "sequence_length"), "seq_len"),
    **dict.fromkeys(("micro_batch", "mbs"), "micro_batch"),
    **{name: name for name in ("dtype", "nodes", "ranks_per_node", "dp", "tp", "pp")},
}
_COUNTS = ("seq_len", "micro_batch", "nodes", "ranks_per_node", "dp", "tp", "pp")
_RECOMPUTE = {"true": "full", "false": "none", **{name: name for name in RECOMPUTE}}
_DTYPES = {**{name: name for name in DTYPES}, **{short: name for name, short in SHORT_DTYPES.items()}}
_ENDS = {
    "oom": OUT_OF_MEMORY, "out of memory": OUT_OF_MEMORY, "refused": REFUSED, "hang": HUNG, "timeout": TIMEOUT,
    "failed": FAILED, "x": FAILED, "interrupted": INTERRUPTED, "lost": LOST, "ok": OK,
}  # fmt: skip
_ENDINGS = {OUT_OF_MEMORY: "OOM", REFUSED: "refused", HUNG: "hang", TIMEOUT: "timeout", FAILED: "failed",
             INTERRUPTED: "interrupted", LOST: "lost"}  # fmt: skip


@dataclass(frozen=True)
class Bullet:
    """One configuration with its rate, or with how it failed; None and empty where a sheet does not say.

    Attributes:
        model: name of the model, as the title above has it.
        hardware: machine, such as ``4x L4``.
        recompute: one of ``RECOMPUTE``.
        more: further settings, as they are written.
        rate: samples per second of the whole run.
        rounding: half a unit of the last digit of the rate that is surely not rounded away; see :func:`rounding_of`.
        tokens: tokens per second, where the sheet has them besides.
        sample: noun of a sample, in the plural: samples, sequences or images.
        status: one of ``records.run.STATUSES``.
        remark: what stands in parentheses behind the rate.
        line: number of the line in its sheet, from 1.
    """

    global_batch: int
    model: str = ""
    hardware: str = ""
    recompute: Optional[str] = None
    dtype: Optional[str] = None
    seq_len: Optional[int] = None
    micro_batch: Optional[int] = None
    nodes: Optional[int] = None
    ranks_per_node: Optional[int] = None
    dp: Optional[int] = None
    tp: Optional[int] = None
    pp: Optional[int] = None
    more: Tuple[str, ...] = ()
    rate: Optional[float] = None
    rounding: float = field(default=0.0, compare=False)
    tokens: Optional[float] = None
    sample: str = "samples"
    status: str = OK
    remark: str = ""
    line: int = 0


class _Settings(NamedTuple):
    """Settings that hold for the bullets below a title."""

    values: Dict[str, Any]
    more: Tuple[str, ...] = ()

    def with_inner(self, values: Mapping[str, Any], more: Sequence[str]) -> "_Settings":
        """These settings with those of a title or a bullet below, which take the place of those of the same name."""
        replaced = {pair[0] for pair in map(pair_of, more) if pair is not None}
        outer = (text for text in self.more if (pair_of(text) or ("",))[0] not in replaced)
        return _Settings({**self.values, **values}, (*outer, *more))


def read_bullets(text: str, origin: str, given: Sequence[str] = ()) -> List[Bullet]:
    """Read the bullets of a sheet.

    Args:
        origin: the sheet's file, for messages.
        given: ``key=value`` settings that hold where the sheet says nothing; ``model`` and ``hardware`` among them.

    Raises:
        UsageError: a bullet of a batch cannot be read, a setting is not of its form, or there is no bullet of a batch.
    """
    titles: List[Tuple[int, _Settings]] = [(0, given_settings(given))]  # (level, settings), the outermost first
    bullets: List[Bullet] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line, location = " ".join(line[: TABLE_LINE.value].split()), f"{origin}:{number}"
        title, bullet = _TITLE.fullmatch(line), _BULLET.fullmatch(line)
        if title is not None:
            while titles[-1][0] >= len(title[1]):
                titles.pop()
            titles.append((len(title[1]), _settings_of_title(title[2].rstrip("# "), titles[-1][1], location)))
        elif bullet is not None:
            batch = _BATCH.match(bullet[1])
            if batch is not None:
                bullets.append(_bullet(batch, titles[-1][1], location, number))
            else:
                _refuse_unread_batch(bullet[1], location)
    if not bullets:
        raise UsageError(
            f"{origin}: no bullet of a batch in it, such as '- global batch size 64, recompute=full: ~ 50 images/s'"
        )
    return bullets


def given_settings(given: Sequence[str]) -> _Settings:
    """The settings of a command line, ``model`` and ``hardware`` among them.

    Raises:
        UsageError: one is no ``KEY=VALUE``, or its value is not of its form.
    """
    named: Dict[str, Any] = {}
    settings: List[str] = []
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise UsageError(f"--set {text}: not KEY=VALUE; valid keys: model, hardware, {', '.join(sorted(_NAMES))}")
        if key in ("model", "hardware"):
            named[key] = value.strip()
        elif key.lower() in _NAMES:
            settings.append(text)
        else:
            raise UsageError(f"--set {text}: unknown key; valid: model, hardware, {', '.join(sorted(_NAMES))}")
    values, _ = _settings_of(settings, "--set")
    return _Settings({**named, **values})


def marks_of(bullets: Sequence[Bullet]) -> List[Tuple[str, ...]]:
    """For each bullet: ``fastest`` for the best rate of its setting, and ``largest before OOM at N`` for the largest
    batch below the smallest one that ran out of memory. Bullets of one setting differ in their batch alone."""
    settings: Dict[Bullet, List[int]] = {}
    for number, bullet in enumerate(bullets):
        setting = replace(
            bullet, global_batch=1, micro_batch=None, rate=None, tokens=None, sample="", status=OK, remark="", line=0
        )
        settings.setdefault(setting, []).append(number)
    marks: List[List[str]] = [[] for _ in bullets]
    for numbers in settings.values():
        rated = [number for number in numbers if bullets[number].rate is not None]
        edge = min((bullets[n].global_batch for n in numbers if bullets[n].status == OUT_OF_MEMORY), default=0)
        below = [number for number in rated if bullets[number].global_batch < edge]
        if len(rated) > 1:
            fastest = max(rated, key=lambda number: bullets[number].rate or 0.0)
            marks[fastest] += ["fastest"] if "fastest" not in bullets[fastest].remark else []
        if below:
            marks[max(below, key=lambda number: bullets[number].global_batch)].append(f"largest before OOM at {edge}")
    return [tuple(of_bullet) for of_bullet in marks]


def bullet_text(bullet: Bullet) -> str:
    """A bullet as a line, without its mark: ``global batch size 64, recompute=full, fp32: ~ 50 images/s``."""
    settings = [f"global batch size {bullet.global_batch}"]
    settings += [f"recompute={bullet.recompute}"] if bullet.recompute is not None else []
    settings += [SHORT_DTYPES[bullet.dtype]] if bullet.dtype is not None else []
    settings += [f"{name}={getattr(bullet, name)}" for name in _COUNTS if getattr(bullet, name) is not None]
    settings += bullet.more
    outcome = _ENDINGS.get(bullet.status, bullet.status)
    if bullet.rate is not None:
        outcome = f"~ {rate_text(bullet.rate)} {bullet.sample}/s"
        outcome += f", ~ {rate_text(bullet.tokens)} tokens/s" if bullet.tokens is not None else ""
    return f"{', '.join(settings)}: {outcome}" + (f" ({bullet.remark})" if bullet.remark else "")


def _settings_of_title(title: str, outer: _Settings, location: str) -> _Settings:
    name, *items = _pieces(title, ",")
    machine = _MACHINE.fullmatch(name.strip())
    named = {"model": machine[1], "hardware": machine[2].strip()} if machine else {}
    stated = [item for item in items if item.strip().lower() in _DTYPES or PAIR.fullmatch(item.strip())]
    values, more = _settings_of(stated, location)
    return outer.with_inner({**named, **values}, more)


def _bullet(batch: "re.Match[str]", settings: _Settings, location: str, line: int) -> Bullet:
    text, *outcome = _pieces(batch[2], ":")
    if not outcome:
        raise UsageError(f"{location}: no colon with a rate or OOM after the settings; such as ': ~ 50 samples/s'")
    text = text.strip()
    if text and not text.startswith(","):
        raise UsageError(f"{location}: {cut(text)!r}: a comma must follow the batch")
    size = _count("global batch size", batch[1], location)
    inner = settings.with_inner(*_settings_of(_pieces(text[1:], ",") if text else [], location))
    return _with_outcome(Bullet(size, **inner.values, more=inner.more, line=line), ":".join(outcome).strip(), location)


def _refuse_unread_batch(text: str, location: str) -> None:
    """Refuses a bullet that is of a batch by its first words, or by a batch before its colon and a result after it.

    Raises:
        UsageError: the bullet is of a batch, which cannot be read.
    """
    head, _, outcome = text.partition(":")
    is_result = outcome.strip().lower() in _ENDS or _RATE.match(outcome.strip()) is not None
    if _UNREAD_BATCH.match(text) or (is_result and "batch" in head.lower()):
        raise UsageError(
            f"{location}: {cut(text)!r}: a bullet of a batch begins with it, a whole number without marks or units, "
            "such as 'global batch size 64, fp32: ~ 50 samples/s'"
        )


def _pieces(text: str, separator: str) -> List[str]:
    """The pieces of a text between separators that are not in double quotes; a comma between thousands is none."""
    pieces, start, is_quoted, is_escaped = [], 0, False, False
    for index, character in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = is_quoted
        elif character == '"':
            is_quoted = not is_quoted
        elif character == separator and not is_quoted and not _is_between_thousands(text, index):
            pieces.append(text[start:index])
            start = index + 1
    return [*pieces, text[start:]]


def _is_between_thousands(text: str, index: int) -> bool:
    """Whether the comma there is between a digit and three digits."""
    after = text[index + 1 : index + 5]
    is_after_digit = index > 0 and text[index - 1].isdecimal()
    return (
        text[index] == "," and is_after_digit and after[:3].isdecimal() and len(after) > 2 and not after[3:].isalnum()
    )


def _settings_of(items: Iterable[str], location: str) -> Tuple[Dict[str, Any], Tuple[str, ...]]:
    """Return (known settings, other ones as they are written).

    Raises:
        UsageError: an item is no setting, or has a value that is not of its form.
    """
    values: Dict[str, Any] = {}
    more: List[str] = []
    for item in (item.strip() for item in items):
        pair = pair_of(item)
        name = _NAMES.get(pair[0].lower()) if pair is not None else None
        if item.lower() in _DTYPES:
            name, value = "dtype", item
        elif pair is not None:
            value = pair[1]
        elif not _PHRASE.fullmatch(item):
            raise UsageError(f"{location}: {cut(item)!r} is no setting; valid: a word such as bf16, or name=value")
        if name is None or (item.endswith('"') and not _is_of_form(name, value)):
            more.append(item)
        elif name in values:
            raise UsageError(f"{location}: {cut(item)}: {name} is stated twice")
        else:
            values[name] = _value(name, value, location)
    return values, tuple(more)


def _value(name: str, text: str, location: str) -> Any:
    if name in _COUNTS:
        return _count(name, text, location)
    choices: Mapping[str, str] = _DTYPES if name == "dtype" else _RECOMPUTE
    if text.lower() not in choices:
        raise UsageError(f"{location}: {name}={cut(text)}: valid: {', '.join(choices)}")
    return choices[text.lower()]


def _is_of_form(name: str, text: str) -> bool:
    try:
        _value(name, text, "")
    except UsageError:
        return False
    return True


def _count(name: str, text: str, location: str) -> int:
    digits = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    if not digits.isdecimal() or not 1 <= int(digits) <= _LARGEST_COUNT:
        raise UsageError(f"{location}: {name} {cut(text)}: must be a whole number from 1 to {_LARGEST_COUNT}")
    return int(digits)


def _with_outcome(bullet: Bullet, outcome: str, location: str) -> Bullet:
    remark = _REMARK.fullmatch(outcome)
    if remark is not None:
        outcome, bullet = remark[1], replace(bullet, remark=remark[2].strip())
    if outcome.lower() in _ENDS:
        return replace(bullet, status=_ENDS[outcome.lower()])
    rates = [_RATE.fullmatch(text.strip()) for text in re.split(r",(?!\d)", outcome)]
    for rate in rates:
        if rate is None:
            raise UsageError(
                f"{location}: {cut(outcome)!r}: neither a rate such as '~ 50 samples/s' or '~ 50 images/s' nor one of "
                f"{', '.join(_ENDINGS.values())}"
            )
        if rate[2].lower() == "token":
            bullet = replace(bullet, tokens=_rate(rate[1], location))
        elif bullet.rate is not None:
            raise UsageError(f"{location}: {cut(outcome)!r}: two rates; state one, and tokens/s besides if you like")
        else:
            sample = "sequences" if rate[2].lower() == "seq" else f"{rate[2].lower()}s"
            bullet = replace(bullet, rate=_rate(rate[1], location), rounding=rounding_of(rate[1]), sample=sample)
    if bullet.rate is None:
        raise UsageError(f"{location}: {cut(outcome)!r}: tokens/s alone; state the samples/s, too")
    return bullet


def _rate(text: str, location: str) -> float:
    rate = _number(text)
    if rate is None or not is_rate(rate):
        raise UsageError(f"{location}: rate {text}: must be a number from {_RATES[0]:g} to {_RATES[1]:g}")
    return rate


def is_rate(rate: float) -> bool:
    """Whether a number of samples per second is one that a run may have."""
    return _RATES[0] <= rate <= _RATES[1]


def _number(text: str) -> Optional[float]:
    """The number of a text; a comma stands between thousands."""
    if "," in text and not re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d*)?", text):
        return None
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None

"""Factorial designs of two-level toggles: which combinations are run, in which order, and what that can tell.

``freq,tcmalloc,ranks=1|4,node.arena_lock=0|1`` names the toggles. A full design runs every combination; a fraction
2^(k-p) runs one in 2^p of them, in which the last p toggles are set by products of others, the generators. What is
then not told apart is the alias structure. Of all generators those are taken that alias the lower interactions least
(minimum aberration: Fries and Hunter 1980; for the sizes here a search finds them). Each repeat is a block: all
combinations once, in an order of its own that is drawn, so that a drift of the machine falls on no toggle.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.compare.sides import RANKS, full_key
from fugaku_gpt.config import RunConfig, changed_settings, load_run_config
from fugaku_gpt.config.schema import POWER_KNOBS
from fugaku_gpt.errors import ConfigError, UsageError

LOW, HIGH = -1, 1
MOST_FACTORS = 9  # a search through all generators of more would take long
TIMES = "\u00d7"
_DESIGN = "# design: "
_LONGEST_LABEL = 90
_LETTERS = "ABCDEFGHJ"  # I is the identity
# toggles whose key does not say its two levels; and short names of others
_LEVELS: Dict[str, Tuple[str, str]] = {
    **{knob.key: (str(min(knob.values)), str(max(knob.values))) for knob in POWER_KNOBS},
    "training.dtype": ("float32", "bfloat16"),
    "node.large_pages": ("none", "hugetlbfs"),
    "node.bind": ("none", "cores"),
    "training.recompute": ("none", "full"),
}
_NAMES = {"precision": "training.dtype"}
# Fugaku refuses 2.2 GHz with both floating-point pipes, so both clocks are compared with one
_WITH: Dict[str, Tuple[Tuple[str, str], ...]] = {"node.freq_mhz": (("node.eco_state", "2"),)}

Row = Tuple[int, ...]  # of each factor LOW or HIGH
Term = FrozenSet[int]  # factors by number: one is a main effect, two are an interaction


@dataclass(frozen=True)
class Level:
    """One setting of a factor: as it is told, and the keys that it sets."""

    text: str
    settings: Tuple[Tuple[str, str], ...]


@dataclass(frozen=True)
class Factor:
    """A toggle of two levels; effects are those of ``high`` over ``low``."""

    name: str
    low: Level
    high: Level

    @property
    def keys(self) -> List[str]:
        """What it sets."""
        return [key for key, _ in self.low.settings]


@dataclass(frozen=True)
class Design:
    """Which combinations are run.

    Attributes:
        generators: of each of the last factors, the factors (of the first ones) whose product it is.
        rows: the combinations, in standard order.
        blocks: of each repeat, the places in ``rows`` in the order in which they are run.
    """

    factors: Tuple[Factor, ...]
    generators: Tuple[Tuple[int, ...], ...]
    rows: Tuple[Row, ...]
    blocks: Tuple[Tuple[int, ...], ...]
    seed: int

    @property
    def names(self) -> List[str]:
        """Of the factors."""
        return [factor.name for factor in self.factors]

    @property
    def words(self) -> List[Term]:
        """The defining relation: the products of factors that are the same in all rows, shortest first."""
        base = len(self.factors) - len(self.generators)
        masks = [_mask(generator) | 1 << (base + number) for number, generator in enumerate(self.generators)]
        return [_term(word) for word in sorted(_group(masks), key=lambda word: (bin(word).count("1"), word))]

    @property
    def resolution(self) -> Optional[int]:
        """Length of the shortest word; None of a full design."""
        return min((len(word) for word in self.words), default=None)

    def aliases(self, term: Term, longest: int = 2) -> List[Term]:
        """What of at most so many factors cannot be told from an effect."""
        found = (term ^ word for word in self.words)
        return sorted((other for other in found if len(other) <= longest), key=lambda one: (len(one), sorted(one)))

    def labels(self) -> Dict[str, Tuple[int, Row]]:
        """Label of each run, in the order of running → block from 1, and its combination."""
        longest = len("+".join(self.names))
        names = self.names if longest <= _LONGEST_LABEL else list(_LETTERS)
        found = {}
        for number, order in enumerate(self.blocks, start=1):
            for place in order:
                row = self.rows[place]
                high = "+".join(name for name, level in zip(names, row) if level == HIGH)
                found[f"b{number}-{high or 'base'}"] = (number, row)
        return found


@dataclass(frozen=True)
class Timed:
    """How the runs of a design are judged.

    Attributes:
        warm_up: iterations at each run's beginning that do not count.
        tolerance: within which an effect is none, as a share.
    """

    warm_up: int
    tolerance: float


def parse(text: str, base: RunConfig) -> Tuple[Factor, ...]:
    """The factors of ``freq,tcmalloc,ranks=1|4``.

    Args:
        base: the run that they change; what ``ranks`` sets follows from it.

    Raises:
        UsageError: a name means no setting, has no two levels, or sets what another one sets too.
    """
    factors = [_factor(name, levels, base, text) for name, levels in split_names(text)]
    if not 1 <= len(factors) <= MOST_FACTORS:
        raise UsageError(f"--factorial {text}: {len(factors)} toggles; valid: 1 to {MOST_FACTORS}")
    owners: Dict[str, str] = {}
    for factor in factors:
        for key in (factor.name, *factor.keys):
            other = owners.setdefault(key, factor.name)
            if other != factor.name or factors.count(factor) > 1:
                raise UsageError(
                    f"--factorial {text}: {other} and {factor.name} both set {key}; one would hide the other: leave "
                    "one out"
                )
    return tuple(factors)


def split_names(text: str) -> List[Tuple[str, Optional[List[str]]]]:
    """The names of ``freq,ranks=1|4``, each with what is written of its levels; None: nothing.

    Raises:
        UsageError: a name is empty.
    """
    found: List[Tuple[str, Optional[List[str]]]] = []
    for word in text.split(","):
        name, equals, levels = word.strip().partition("=")
        if not name.strip():
            raise UsageError(
                f"--factorial {text}: an empty name; expected toggles joined by commas, such as freq,tcmalloc,ranks=1|4"
            )
        found.append((name.strip(), [one.strip() for one in levels.split("|")] if equals else None))
    return found


def _factor(name: str, levels: Optional[Sequence[str]], base: RunConfig, text: str) -> Factor:
    at = f"--factorial {text}"
    key = _NAMES.get(name) or full_key(name, at)
    found = list(_usual_levels(key, base) if levels is None else levels)
    if len(found) != 2 or not all(found) or found[0] == found[1]:
        said = name if levels is None else f"{name}={'|'.join(levels)}"
        raise UsageError(f"{at}: {said}: two levels are needed, such as {name}=LOW|HIGH")
    more = _WITH.get(key, ())
    low, high = (Level(one, _ranks(one, base, at) if key == RANKS else ((key, one), *more)) for one in found)
    return Factor(name.rpartition(".")[2], low, high)


def _usual_levels(key: str, base: RunConfig) -> Tuple[str, ...]:
    if key == RANKS:  # one on each node, or one on each core memory group
        return str(base.job.nodes), str(4 * base.job.nodes)
    if key in _LEVELS:
        return _LEVELS[key]
    section, _, leaf = key.partition(".")
    (spec,) = (spec for spec in fields(getattr(base, section)) if spec.name == leaf)
    if isinstance(spec.default, bool):
        return ("false", "true")
    return tuple(str(choice) for choice in spec.metadata["choices"] or ())


def _ranks(text: str, base: RunConfig, at: str) -> Tuple[Tuple[str, str], ...]:
    """The settings of so many ranks of the whole run: more or fewer replicas, on the same cores."""
    share, nodes = base.layout.tp * base.layout.pp, base.job.nodes
    ranks = int(text) if text.isdecimal() else 0
    if ranks < 1 or ranks % share or ranks % nodes:
        raise UsageError(
            f"{at}: {RANKS}={text}: must be a multiple of layout.tp {base.layout.tp} * layout.pp {base.layout.pp} and "
            f"of job.nodes {nodes}"
        )
    settings = [("layout.dp", str(ranks // share))]
    if base.node.ranks_per_node is not None:
        settings.append(("node.ranks_per_node", str(ranks // nodes)))
    if base.node.threads_per_rank is not None:
        cores = base.node.threads_per_rank * base.layout.ranks
        if cores % ranks:
            raise UsageError(
                f"{at}: {RANKS}={text}: the {cores} cores of {base.layout.ranks} ranks * node.threads_per_rank "
                f"{base.node.threads_per_rank} cannot be shared out to {ranks} ranks"
            )
        settings.append(("node.threads_per_rank", str(cores // ranks)))
    return tuple(settings)


def plan_design(factors: Sequence[Factor], fraction: int = 0, repeats: int = 3, seed: int = 0) -> Design:
    """A design of these factors.

    Args:
        fraction: p: one in 2^p of all combinations is run.
        repeats: blocks, each of all the combinations that are run.
        seed: of their order.

    Raises:
        UsageError: so small a fraction cannot hold that many factors.
    """
    k, base = len(factors), len(factors) - fraction
    most = max(p for p in range(k) if p == 0 or (k - p >= 2 and 2 ** (k - p) - 1 - (k - p) >= p))
    if not 0 <= fraction <= most:
        raise UsageError(f"a fraction 2^({k}-{fraction}) of {k} toggles: valid are 0 (all combinations) to {most}")
    if repeats < 1:
        raise UsageError(f"{repeats} repeats: valid: 1 or more")
    generators = _best_generators(k, fraction)
    rows = []
    for number in range(2**base):
        row = [HIGH if number >> place & 1 else LOW for place in range(base)]
        row += [int(np.prod([row[place] for place in generator])) for generator in generators]
        rows.append(tuple(row))
    blocks = [np.random.default_rng([seed, block]).permutation(len(rows)).tolist() for block in range(repeats)]
    return Design(tuple(factors), generators, tuple(rows), tuple(tuple(order) for order in blocks), seed)


def describe(design: Design) -> List[str]:
    """The design in words: factors, generators, alias structure."""
    k, p, n = len(design.factors), len(design.generators), len(design.rows)
    power = f"2^({k}-{p}), resolution {_roman(design.resolution)}" if p else f"2^{k}, every combination"
    repeats = len(design.blocks)
    lines = [f"{power}: {n} combinations in {repeats} {'block' if repeats == 1 else 'blocks'}, {n * repeats} runs; "
             f"order within each block drawn with seed {design.seed}"]  # fmt: skip
    for factor in design.factors:
        keys = ", ".join(
            f"{key} {low}" if low == high else f"{key} {low} | {high}"
            for (key, low), (_, high) in zip(factor.low.settings, factor.high.settings)
        )
        lines.append(f"{factor.name}: {factor.low.text} | {factor.high.text} ({keys})")
    for number, generator in enumerate(design.generators, start=k - p):
        lines.append(f"generator: {design.names[number]} = {term_name(generator, design.names)}")
    if p:
        lines.append("defining relation: I = " + " = ".join(term_name(word, design.names) for word in design.words))
        lines += _alias_lines(design)
    return lines


def _alias_lines(design: Design) -> List[str]:
    """Effects of one and two factors that are not told apart; each set once."""
    terms = [frozenset(one) for size in (1, 2) for one in itertools.combinations(range(len(design.factors)), size)]
    told = set()
    lines = []
    for term in terms:
        others = design.aliases(term)
        if others and term not in told:
            told.update(others)
            lines.append("not told apart: " + " = ".join(term_name(one, design.names) for one in (term, *others)))
    return lines or ["all main effects and interactions of two are told apart, if no three or more interact"]


def sweep_text(design: Design, base: RunConfig, name: str, timed: Optional[Timed] = None) -> str:
    """The design as a sweep file.

    Args:
        base: the run that the factors change.
        timed: how its runs are judged, to be kept with it.

    Raises:
        UsageError: a combination is no valid run.
    """
    taken = {key for factor in design.factors for key in factor.keys}
    defaults = {key: value for key, value in changed_settings(base).items() if key not in taken}
    lines = [f"# {line}" for line in describe(design)]
    lines += [
        _DESIGN + json.dumps({**_as_tree(design), **(asdict(timed) if timed else {})}),
        f"name: {_scalar(name)}",
        "defaults:",
    ]
    lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in defaults.items()] or ["  {}"]
    lines.append("include:")
    words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in defaults.items()]
    for row in design.rows:
        _check(design, row, words)
    for label, (_, row) in design.labels().items():
        cells = ", ".join(f"{key}: {_scalar(value)}" for key, value in settings_of(design, row).items())
        lines.append(f"  - {{label: {label}, {cells}}}")
    return "\n".join(lines) + "\n"


def settings_of(design: Design, row: Row) -> Dict[str, str]:
    """What a combination sets."""
    found: Dict[str, str] = {}
    for factor, level in zip(design.factors, row):
        found.update((factor.high if level == HIGH else factor.low).settings)
    return found


def _check(design: Design, row: Row, words: Sequence[str]) -> None:
    settings = settings_of(design, row)
    try:
        load_run_config(overrides=[*words, *(f"{key}={value}" for key, value in settings.items())])
    except ConfigError as error:
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        raise UsageError(f"the combination {said} is no valid run:\n{error}") from None


def read_design(text: str, at: str) -> Tuple[Design, Optional[Timed]]:
    """The design that a sweep file was written from, by :func:`sweep_text`, and how its runs are judged.

    Raises:
        UsageError: there is none in it.
    """
    line = next((line for line in text.splitlines() if line.startswith(_DESIGN)), None)
    try:
        tree = json.loads(line[len(_DESIGN) :] if line is not None else "")
        factors = [Factor(one["name"], _level(one["low"]), _level(one["high"])) for one in tree["factors"]]
        design = plan_design(factors, int(tree["fraction"]), int(tree["repeats"]), int(tree["seed"]))
        return design, Timed(int(tree["warm_up"]), float(tree["tolerance"])) if "warm_up" in tree else None
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{at}: no factorial design is written in it (a line that begins with {_DESIGN.strip()!r}); name a sweep "
            "that `compare --factorial` has made"
        ) from None


def term_name(term: Iterable[int], names: Sequence[str]) -> str:
    """A product of factors, such as freq\u00d7tcmalloc."""
    return TIMES.join(names[place] for place in sorted(term))


def _as_tree(design: Design) -> Dict[str, Any]:
    return {
        "factors": [asdict(factor) for factor in design.factors],
        "fraction": len(design.generators),
        "repeats": len(design.blocks),
        "seed": design.seed,
    }


def _level(tree: Mapping[str, Any]) -> Level:
    return Level(str(tree["text"]), tuple((str(key), str(value)) for key, value in tree["settings"]))


def _best_generators(k: int, p: int) -> Tuple[Tuple[int, ...], ...]:
    """Of each of the last p of k factors, the others whose product it is, so that few short words come of it."""
    base = k - p
    candidates = [mask for mask in range(2**base) if bin(mask).count("1") >= 2]
    candidates.sort(key=lambda mask: (-bin(mask).count("1"), mask))

    def pattern(chosen: Sequence[int]) -> List[int]:
        lengths = [bin(word).count("1") for word in _group([one | 1 << (base + at) for at, one in enumerate(chosen)])]
        return [lengths.count(length) for length in range(3, k + 1)]

    best = min(itertools.combinations(candidates, p), key=pattern)
    return tuple(tuple(sorted(_term(mask))) for mask in best)


def _group(masks: Sequence[int]) -> List[int]:
    """All products of the words."""
    words = {0}
    for mask in masks:
        words |= {word ^ mask for word in words}
    return sorted(words - {0})


def _mask(places: Sequence[int]) -> int:
    return sum(1 << place for place in places)


def _term(mask: int) -> Term:
    return frozenset(place for place in range(mask.bit_length()) if mask >> place & 1)


def _roman(number: Optional[int]) -> str:
    return ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"][number or 0]


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[\w.+/-]+(:[\w.+/-]+)*", text) else json.dumps(text, ensure_ascii=False)

"""Factorial designs of two-level toggles: which combinations are run, in which order, and what they can identify.

``freq,tcmalloc,ranks=1|4,node.arena_lock=0|1`` names the toggles. A full design runs every combination; a fraction
2^(k-p) runs one in 2^p of them, in which the last p toggles are set by products of others, the generators. The effects
that then cannot be distinguished form the alias structure. The generators are chosen so that they alias as few
low-order interactions as possible (minimum aberration: Fries and Hunter 1980; an exhaustive search finds them for these
sizes). Each repeat is a block of a randomised block design: all combinations once, in a random order of its own, so
that a drift of the machine does not coincide with a toggle.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.compare.sides import RANKS, full_key
from fugaku_gpt.compare.statistics import check_tolerance
from fugaku_gpt.config import RunConfig, changed_settings, load_run_config
from fugaku_gpt.config.schema import POWER_KNOBS
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.json_text import parse_json

LOW, HIGH = -1, 1
MAX_FACTORS = 9  # the search through all generators takes long for more
TIMES = "\u00d7"
_DESIGN = "# design: "
_MAX_LABEL_LENGTH = 90
_LETTERS = "ABCDEFGHJ"  # I is the identity
# levels of toggles whose key does not determine them
_USUAL_LEVELS: Dict[str, Tuple[str, str]] = {
    **{knob.key: (str(min(knob.values)), str(max(knob.values))) for knob in POWER_KNOBS},
    "training.dtype": ("float32", "bfloat16"),
    "node.large_pages": ("none", "hugetlbfs"),
    "node.bind": ("none", "cores"),
    "training.recompute": ("none", "full"),
}
_KEYS_OF_NAMES = {"precision": "training.dtype"}
# Fugaku refuses 2.2 GHz with both floating-point pipes, so both clocks are compared with one
_ACCOMPANYING_SETTINGS: Dict[str, Tuple[Tuple[str, str], ...]] = {"node.freq_mhz": (("node.eco_state", "2"),)}

FactorLevels = Tuple[int, ...]  # LOW or HIGH for each factor
Term = FrozenSet[int]  # indices of factors: one index is a main effect, two are an interaction


@dataclass(frozen=True)
class Level:
    """One level of a factor: its text, and the settings (key, value) that it makes."""

    text: str
    settings: Tuple[Tuple[str, str], ...]


@dataclass(frozen=True)
class Factor:
    """A toggle of two levels; its effect is the ratio of ``high`` over ``low``."""

    name: str
    low: Level
    high: Level

    @property
    def keys(self) -> List[str]:
        """Keys of the settings that the factor changes."""
        return [key for key, _ in self.low.settings]


@dataclass(frozen=True)
class Design:
    """The combinations that are run, and their order.

    Attributes:
        generators: for each of the last factors, the base factors whose product it is.
        combinations: levels of all factors in each combination, in standard order.
        blocks: for each repeat (a block of a randomised block design), the indices into ``combinations`` in the order
            of running.
        seed: seed of the random order.
    """

    factors: Tuple[Factor, ...]
    generators: Tuple[Tuple[int, ...], ...]
    combinations: Tuple[FactorLevels, ...]
    blocks: Tuple[Tuple[int, ...], ...]
    seed: int

    @property
    def names(self) -> List[str]:
        """Names of the factors."""
        return [factor.name for factor in self.factors]

    @property
    def defining_relation(self) -> List[Term]:
        """The defining words: products of factors that are constant over all combinations, shortest first."""
        base = len(self.factors) - len(self.generators)
        masks = [_mask(generator) | 1 << (base + number) for number, generator in enumerate(self.generators)]
        return [_term(word) for word in sorted(_subgroup(masks), key=lambda word: (bin(word).count("1"), word))]

    @property
    def resolution(self) -> Optional[int]:
        """Length of the shortest defining word; None for a full design."""
        return min((len(word) for word in self.defining_relation), default=None)

    def aliases(self, term: Term, max_factors: int = 2) -> List[Term]:
        """Effects of at most ``max_factors`` factors that are aliased with an effect."""
        aliased_terms = (term ^ word for word in self.defining_relation)
        return sorted(
            (alias for alias in aliased_terms if len(alias) <= max_factors),
            key=lambda alias: (len(alias), sorted(alias)),
        )

    def labels(self) -> Dict[str, Tuple[int, FactorLevels]]:
        """Label of each run, in the order of running → number of its block (from 1) and its combination."""
        joined_length = len("+".join(self.names))
        names = self.names if joined_length <= _MAX_LABEL_LENGTH else list(_LETTERS)
        runs_by_label = {}
        for number, order in enumerate(self.blocks, start=1):
            for index in order:
                combination = self.combinations[index]
                high = "+".join(name for name, level in zip(names, combination) if level == HIGH)
                runs_by_label[f"b{number}-{high or 'base'}"] = (number, combination)
        return runs_by_label


@dataclass(frozen=True)
class AnalysisSettings:
    """How the runs of a design are analysed.

    Attributes:
        warm_up: number of iterations at the beginning of each run that do not count.
        tolerance: share within which an effect counts as none.
    """

    warm_up: int
    tolerance: float

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)
        if self.warm_up < 0:
            raise ValueError(f"warm_up {self.warm_up}: valid: at least 0")


def parse_factors(text: str, base: RunConfig) -> Tuple[Factor, ...]:
    """Parses the factors of ``freq,tcmalloc,ranks=1|4``.

    Args:
        base: the run that they change; the settings of ``ranks`` follow from it.

    Raises:
        UsageError: a name is no setting, does not have two levels, or sets a key that another toggle sets too.
    """
    factors = [_parse_factor(name, levels, base, text) for name, levels in split_toggles(text)]
    if not 1 <= len(factors) <= MAX_FACTORS:
        raise UsageError(f"--factorial {text}: {len(factors)} toggles; valid: 1 to {MAX_FACTORS}")
    owner_of_key: Dict[str, str] = {}
    for factor in factors:
        for key in (factor.name, *factor.keys):
            owner = owner_of_key.setdefault(key, factor.name)
            if owner != factor.name or factors.count(factor) > 1:
                raise UsageError(
                    f"--factorial {text}: {owner} and {factor.name} both set {key}; one would hide the other: leave "
                    "one out"
                )
    return tuple(factors)


def split_toggles(text: str) -> List[Tuple[str, Optional[List[str]]]]:
    """Splits ``freq,ranks=1|4`` into names, each with its levels; None where no levels are given.

    Raises:
        UsageError: a name is empty.
    """
    toggles: List[Tuple[str, Optional[List[str]]]] = []
    for toggle in text.split(","):
        name, equals, levels = toggle.strip().partition("=")
        if not name.strip():
            raise UsageError(
                f"--factorial {text}: an empty name; expected toggles joined by commas, such as freq,tcmalloc,ranks=1|4"
            )
        toggles.append((name.strip(), [level.strip() for level in levels.split("|")] if equals else None))
    return toggles


def _parse_factor(name: str, levels: Optional[Sequence[str]], base: RunConfig, text: str) -> Factor:
    location = f"--factorial {text}"
    key = _KEYS_OF_NAMES.get(name) or full_key(name, location)
    level_texts = list(_usual_levels_of(key, base) if levels is None else levels)
    if len(level_texts) != 2 or not all(level_texts) or level_texts[0] == level_texts[1]:
        toggle = name if levels is None else f"{name}={'|'.join(levels)}"
        raise UsageError(f"{location}: {toggle}: two levels are needed, such as {name}=LOW|HIGH")
    accompanying = _ACCOMPANYING_SETTINGS.get(key, ())
    low, high = (
        Level(level, _rank_settings(level, base, location) if key == RANKS else ((key, level), *accompanying))
        for level in level_texts
    )
    return Factor(name.rpartition(".")[2], low, high)


def _usual_levels_of(key: str, base: RunConfig) -> Tuple[str, ...]:
    if key == RANKS:  # one on each node, or one on each core memory group
        return str(base.job.nodes), str(4 * base.job.nodes)
    if key in _USUAL_LEVELS:
        return _USUAL_LEVELS[key]
    section, _, leaf = key.partition(".")
    (spec,) = (spec for spec in fields(getattr(base, section)) if spec.name == leaf)
    if isinstance(spec.default, bool):
        return ("false", "true")
    return tuple(str(choice) for choice in spec.metadata["choices"] or ())


def _rank_settings(text: str, base: RunConfig, location: str) -> Tuple[Tuple[str, str], ...]:
    """Settings that give the run a number of ranks: more or fewer replicas, on the same cores."""
    ranks_per_replica, nodes = base.layout.tp * base.layout.pp, base.job.nodes
    ranks = int(text) if text.isdecimal() else 0
    if ranks < 1 or ranks % ranks_per_replica or ranks % nodes:
        raise UsageError(
            f"{location}: {RANKS}={text}: must be a multiple of layout.tp {base.layout.tp} * layout.pp "
            f"{base.layout.pp} and of job.nodes {nodes}"
        )
    settings = [("layout.dp", str(ranks // ranks_per_replica))]
    if base.node.ranks_per_node is not None:
        settings.append(("node.ranks_per_node", str(ranks // nodes)))
    if base.node.threads_per_rank is not None:
        cores = base.node.threads_per_rank * base.layout.ranks
        if cores % ranks:
            raise UsageError(
                f"{location}: {RANKS}={text}: the {cores} cores of {base.layout.ranks} ranks * node.threads_per_rank "
                f"{base.node.threads_per_rank} cannot be shared out to {ranks} ranks"
            )
        settings.append(("node.threads_per_rank", str(cores // ranks)))
    return tuple(settings)


def plan_design(factors: Sequence[Factor], fraction: int = 0, repeats: int = 3, seed: int = 0) -> Design:
    """Plans a design of these factors.

    Args:
        fraction: p; one in 2^p of all combinations is run.
        repeats: number of blocks, each with all the combinations that are run.
        seed: seed of the random order in each block.

    Raises:
        UsageError: the fraction is too small for this number of factors, or ``repeats`` is below 1.
    """
    k, base_factors = len(factors), len(factors) - fraction
    max_fraction = max(p for p in range(k) if p == 0 or (k - p >= 2 and 2 ** (k - p) - 1 - (k - p) >= p))
    if not 0 <= fraction <= max_fraction:
        raise UsageError(
            f"a fraction 2^({k}-{fraction}) of {k} toggles: valid are 0 (all combinations) to {max_fraction}"
        )
    if repeats < 1:
        raise UsageError(f"{repeats} repeats: valid: 1 or more")
    generators = _minimum_aberration_generators(k, fraction)
    combinations = []
    for number in range(2**base_factors):
        combination = [HIGH if number >> factor & 1 else LOW for factor in range(base_factors)]
        combination += [int(np.prod([combination[factor] for factor in generator])) for generator in generators]
        combinations.append(tuple(combination))
    blocks = [np.random.default_rng([seed, block]).permutation(len(combinations)).tolist() for block in range(repeats)]
    return Design(tuple(factors), generators, tuple(combinations), tuple(tuple(order) for order in blocks), seed)


def describe(design: Design) -> List[str]:
    """Lines that describe the design: size, factors, generators and alias structure."""
    k, p, n = len(design.factors), len(design.generators), len(design.combinations)
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
        lines.append(
            "defining relation: I = " + " = ".join(term_name(word, design.names) for word in design.defining_relation)
        )
        lines += _alias_lines(design)
    return lines


def _alias_lines(design: Design) -> List[str]:
    """Lines about main effects and two-factor interactions that are aliased; each set once."""
    terms = [
        frozenset(factors) for size in (1, 2) for factors in itertools.combinations(range(len(design.factors)), size)
    ]
    listed = set()
    lines = []
    for term in terms:
        aliases = design.aliases(term)
        if aliases and term not in listed:
            listed.update(aliases)
            lines.append("aliased: " + " = ".join(term_name(alias, design.names) for alias in (term, *aliases)))
    return lines or ["all main effects and two-factor interactions are distinct, if no three or more factors interact"]


def sweep_text(design: Design, base: RunConfig, name: str, analysis: Optional[AnalysisSettings] = None) -> str:
    """Writes the design as the text of a sweep file.

    Args:
        base: the run that the factors change.
        name: name of the sweep.
        analysis: how its runs are analysed; stored in the text.

    Raises:
        UsageError: a combination is not a valid run.
    """
    factor_keys = {key for factor in design.factors for key in factor.keys}
    defaults = {key: value for key, value in changed_settings(base).items() if key not in factor_keys}
    lines = [f"# {line}" for line in describe(design)]
    lines += [
        _DESIGN + json.dumps({**_as_tree(design), **(asdict(analysis) if analysis else {})}),
        f"name: {_scalar(name)}",
        "defaults:",
    ]
    lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in defaults.items()] or ["  {}"]
    lines.append("include:")
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in defaults.items()]
    for combination in design.combinations:
        _require_valid_run(design, combination, overrides)
    for label, (_, combination) in design.labels().items():
        cells = ", ".join(f"{key}: {_scalar(value)}" for key, value in settings_of(design, combination).items())
        lines.append(f"  - {{label: {label}, {cells}}}")
    return "\n".join(lines) + "\n"


def settings_of(design: Design, combination: FactorLevels) -> Dict[str, str]:
    """Settings of a combination, key → value."""
    settings: Dict[str, str] = {}
    for factor, level in zip(design.factors, combination):
        settings.update((factor.high if level == HIGH else factor.low).settings)
    return settings


def _require_valid_run(design: Design, combination: FactorLevels, overrides: Sequence[str]) -> None:
    settings = settings_of(design, combination)
    try:
        load_run_config(overrides=[*overrides, *(f"{key}={value}" for key, value in settings.items())])
    except ConfigError as error:
        settings_text = ", ".join(f"{key}={value}" for key, value in settings.items())
        raise UsageError(f"the combination {settings_text} is no valid run:\n{error}") from None


def read_design(text: str, location: str) -> Tuple[Design, Optional[AnalysisSettings]]:
    """Reads the design back from a text of :func:`sweep_text`, and how its runs are analysed.

    Raises:
        UsageError: the text holds no design.
    """
    line = next((line for line in text.splitlines() if line.startswith(_DESIGN)), None)
    try:
        values = parse_json(line[len(_DESIGN) :] if line is not None else "")
        factors = [
            Factor(factor["name"], _level(factor["low"]), _level(factor["high"])) for factor in values["factors"]
        ]
        design = plan_design(factors, int(values["fraction"]), int(values["repeats"]), int(values["seed"]))
        if "warm_up" not in values:
            return design, None
        return design, AnalysisSettings(int(values["warm_up"]), float(values["tolerance"]))
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{location}: no factorial design is written in it (a line that begins with {_DESIGN.strip()!r}); name a "
            "sweep that `compare --factorial` has made"
        ) from None


def term_name(term: Iterable[int], names: Sequence[str]) -> str:
    """Name of a product of factors, such as freq\u00d7tcmalloc."""
    return TIMES.join(names[factor] for factor in sorted(term))


def _as_tree(design: Design) -> Dict[str, Any]:
    return {
        "factors": [asdict(factor) for factor in design.factors],
        "fraction": len(design.generators),
        "repeats": len(design.blocks),
        "seed": design.seed,
    }


def _level(values: Mapping[str, Any]) -> Level:
    return Level(str(values["text"]), tuple((str(key), str(value)) for key, value in values["settings"]))


def _minimum_aberration_generators(k: int, p: int) -> Tuple[Tuple[int, ...], ...]:
    """Generators of the last p of k factors that give the fewest short defining words (minimum aberration)."""
    base = k - p
    candidates = [mask for mask in range(2**base) if bin(mask).count("1") >= 2]
    candidates.sort(key=lambda mask: (-bin(mask).count("1"), mask))

    def word_length_pattern(masks: Sequence[int]) -> List[int]:
        lengths = [
            bin(word).count("1")
            for word in _subgroup([mask | 1 << (base + number) for number, mask in enumerate(masks)])
        ]
        return [lengths.count(length) for length in range(3, k + 1)]

    best = min(itertools.combinations(candidates, p), key=word_length_pattern)
    return tuple(tuple(sorted(_term(mask))) for mask in best)


def _subgroup(masks: Sequence[int]) -> List[int]:
    """The defining contrast subgroup: all products of the generators' words, as bit masks."""
    members = {0}
    for mask in masks:
        members |= {word ^ mask for word in members}
    return sorted(members - {0})


def _mask(factors: Sequence[int]) -> int:
    return sum(1 << factor for factor in factors)


def _term(mask: int) -> Term:
    return frozenset(factor for factor in range(mask.bit_length()) if mask >> factor & 1)


def _roman(number: Optional[int]) -> str:
    return ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"][number or 0]


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[\w.+/-]+(:[\w.+/-]+)*", text) else json.dumps(text, ensure_ascii=False)

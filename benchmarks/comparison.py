"""Simulates the statistics of ``fugaku-gpt compare``: coverage, false alarms, and how often a slowdown is found.

    .venv/bin/python benchmarks/comparison.py                      # about five minutes on one core
    .venv/bin/python benchmarks/comparison.py --trials 200 --noise "log-normal 3 %"

Each trial draws jobs in pairs, A and B equal except for noise between jobs of the stated standard deviation (of the
logarithm of seconds), and passes them to :func:`compare_pairs` as they come in, from 3 pairs to 10. ``heavy tails`` is
Student's t with 3 degrees of freedom; ``slow spells`` is exponential: most jobs are nearly alike, some much slower.
Then B is made 5 % slower in the same jobs. Coverage is how often the 95 % interval contains the true ratio; a false
alarm is the verdict faster or slower although the sides are equal. In the table "looking after each pair",
:func:`stop_reason` decides when the pairs end; a further column has the alarms of stopping at the first verdict
instead. The same ``--seed`` prints the same bytes.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.compare.statistics import (
    FASTER,
    SAME,
    SLOWER,
    UNDECIDED,
    Comparison,
    compare_groups,
    compare_pairs,
    stop_reason,
)

PAIRS = range(3, 11)
SLOWDOWN = 1.05
GROUPS = ((3, 3), (5, 5), (3, 6), (3, 10))
AT_LEAST = 4  # pairs, where there is a look after each

Draw = Callable[["np.random.Generator", Tuple[int, ...]], "np.ndarray"]
_KINDS: Dict[str, Draw] = {
    "log-normal": lambda random, shape: random.standard_normal(shape),
    "heavy tails": lambda random, shape: random.standard_t(3, size=shape) / math.sqrt(3),
    "slow spells": lambda random, shape: random.standard_exponential(shape) - 1,
}
# name → kind and standard deviation of log seconds
NOISES: Dict[str, Tuple[str, float]] = {
    f"{kind} {100 * sd:g} %": (kind, sd)
    for kind, sd in (
        ("log-normal", 0.005), ("log-normal", 0.01), ("log-normal", 0.03), ("log-normal", 0.13),
        ("heavy tails", 0.03), ("heavy tails", 0.13), ("slow spells", 0.03), ("slow spells", 0.13),
    )
}  # fmt: skip


@dataclass
class Tally:
    """Shares of the trials with one noise and one number of pairs."""

    covered: float
    alarms: float
    same: float
    detected: float


@dataclass
class Looks:
    """Mean numbers of pairs, and shares of the trials, if :func:`stop_reason` ends the pairs."""

    pairs: float
    covered: float
    alarms: float
    same: float
    first_verdict_alarms: float
    slow_pairs: float
    detected: float
    missed: float  # 5 % slower, and called the same or faster


def jobs_of(noise: str, random: "np.random.Generator", shape: Tuple[int, ...]) -> "np.ndarray":
    """Seconds of jobs that take one second apart from the noise."""
    kind, sd = NOISES[noise]
    seconds: "np.ndarray" = np.exp(sd * _KINDS[kind](random, shape))
    return seconds


def simulate_pairs(
    noise: str, trials: int, seed: int, pairs: Sequence[int] = PAIRS
) -> Tuple[Dict[int, Tally], Optional[Looks]]:
    """Tallies by number of pairs, and the results of looking after each pair, or None if ``pairs`` are not all."""
    random = np.random.default_rng([seed, list(NOISES).index(noise)])
    equal: List[Dict[int, Comparison]] = []
    slow: List[Dict[int, Comparison]] = []
    for _ in range(trials):
        a, b = jobs_of(noise, random, (2, max(pairs))).tolist()
        slower = [SLOWDOWN * seconds for seconds in b]
        equal.append({n: compare_pairs(a[:n], b[:n]) for n in pairs})
        slow.append({n: compare_pairs(a[:n], slower[:n]) for n in pairs})
    tallies = {n: _tally([trial[n] for trial in equal], [trial[n] for trial in slow]) for n in pairs}
    return tallies, _looks(equal, slow) if list(pairs) == list(PAIRS) else None


def simulate_groups(noise_a: str, noise_b: str, sizes: Tuple[int, int], trials: int, seed: int) -> Tally:
    """A tally as in :func:`simulate_pairs`, for jobs that are not paired."""
    names = list(NOISES)
    random = np.random.default_rng([seed, names.index(noise_a), names.index(noise_b), *sizes])
    equal, slow = [], []
    for _ in range(trials):
        a = jobs_of(noise_a, random, (sizes[0],)).tolist()
        b = jobs_of(noise_b, random, (sizes[1],)).tolist()
        equal.append(compare_groups(a, b))
        slow.append(compare_groups(a, [SLOWDOWN * seconds for seconds in b]))
    return _tally(equal, slow)


def _tally(equal: Sequence[Comparison], slow: Sequence[Comparison]) -> Tally:
    return Tally(
        _share(comparison.low <= 1 <= comparison.high for comparison in equal),
        _share(comparison.verdict in (FASTER, SLOWER) for comparison in equal),
        _share(comparison.verdict == SAME for comparison in equal),
        _share(comparison.verdict == SLOWER for comparison in slow),
    )


def _looks(equal: Sequence[Dict[int, Comparison]], slow: Sequence[Dict[int, Comparison]]) -> Looks:
    ends, slow_ends = [_last(trial) for trial in equal], [_last(trial) for trial in slow]
    first = [next((trial[n] for n in PAIRS if trial[n].verdict != UNDECIDED), trial[PAIRS[-1]]) for trial in equal]
    return Looks(
        float(np.mean([comparison.a for comparison in ends])),
        _share(comparison.low <= 1 <= comparison.high for comparison in ends),
        _share(comparison.verdict in (FASTER, SLOWER) for comparison in ends),
        _share(comparison.verdict == SAME for comparison in ends),
        _share(comparison.verdict in (FASTER, SLOWER) for comparison in first),
        float(np.mean([comparison.a for comparison in slow_ends])),
        _share(comparison.verdict == SLOWER for comparison in slow_ends),
        _share(comparison.verdict in (SAME, FASTER) for comparison in slow_ends),
    )


def _last(looks: Dict[int, Comparison]) -> Comparison:
    return next(looks[n] for n in PAIRS if stop_reason(looks[n], min_pairs=AT_LEAST, max_pairs=PAIRS[-1]))


def _share(hits: Iterable[bool]) -> float:
    return float(np.mean(list(hits)))


def tables(noises: Sequence[str], trials: int, seed: int) -> List[str]:
    """The lines of all tables, in Markdown."""
    simulated = {noise: simulate_pairs(noise, trials, seed) for noise in noises}
    head = [f"{n} pairs" for n in PAIRS]
    lines: List[str] = []
    for title, field in (
        ("95 % interval holds the true ratio", "covered"),
        ("false alarms: faster or slower, where A and B are equal", "alarms"),
        ("same, where A and B are equal", "same"),
        ("slower, where B is 5 % slower", "detected"),
    ):
        cells = {
            noise: [_percent(getattr(by_pairs[n], field)) for n in PAIRS] for noise, (by_pairs, _) in simulated.items()
        }
        lines += _table(f"{title}, {trials} trials", head, cells)
    ends = {noise: looks for noise, (_, looks) in simulated.items() if looks is not None}
    lines += _table(
        f"looking after each pair, from {AT_LEAST} to {PAIRS[-1]}, {trials} trials",
        ["pairs", "covered", "false alarms", "same", "alarms, had the first verdict ended it",
         "5 % slower: pairs", "found", "called same or faster"],
        {
            noise: [f"{looks.pairs:.1f}",
                    *map(_percent, (looks.covered, looks.alarms, looks.same, looks.first_verdict_alarms)),
                    f"{looks.slow_pairs:.1f}", _percent(looks.detected), _percent(looks.missed)]
            for noise, looks in ends.items()
        },
    )  # fmt: skip
    sides = [(noise, noise) for noise in noises]
    if {"log-normal 3 %", "log-normal 13 %"} <= set(noises):
        sides += [("log-normal 3 %", "log-normal 13 %"), ("log-normal 13 %", "log-normal 3 %")]
    cells = {}
    for a, b in sides:
        tallies = [simulate_groups(a, b, sizes, trials, seed) for sizes in GROUPS]
        cells[a if a == b else f"{a}, B {b}"] = [
            f"{_percent(tally.covered)}, {_percent(tally.alarms)}" for tally in tallies
        ]
    head = [f"{a} and {b} jobs" for a, b in GROUPS]
    lines += _table(f"not pairs: holds the true ratio, false alarms, {trials} trials", head, cells)
    return lines


def _table(title: str, head: Sequence[str], cells: Dict[str, List[str]]) -> List[str]:
    rows = [f"| {' | '.join([noise, *row])} |" for noise, row in cells.items()]
    return [title, "", f"| noise between jobs | {' | '.join(head)} |", "|---" + "|---:" * len(head) + "|", *rows, ""]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main(arguments: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise", action="append", choices=list(NOISES), help="Simulate only this noise; repeatable.")
    options = parser.parse_args(arguments)
    if options.trials < 1:
        parser.error(f"--trials {options.trials}: valid: 1 or more")
    print("\n".join(tables(options.noise or list(NOISES), options.trials, options.seed)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

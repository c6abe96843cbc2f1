"""Measures our trainer's efficiency on a machine with many cores: ever more replicas, and every mix of DP, TP and PP.

    .venv/bin/python benchmarks/scaling.py                           # 16 cores: 1 to 16 ranks x 1 thread, 4 x 4 threads
    .venv/bin/python benchmarks/scaling.py --ranks 4 --mix-ranks 2 --mix-threads 2 --preset 124m --shape 256x1

The rows ``replicas`` are 1, 2, 4, ... to ``--ranks`` ranks of ``--threads`` threads, each a replica that does the same
work, so a step of all of them would ideally take as long as a step of one. The rows ``mixes`` are ``--mix-ranks`` ranks
of ``--mix-threads`` threads in every combination of DP, TP and PP, with 1F1B, and also with two chunks per stage if the
number of layers allows it. Efficiency is the tokens per second divided by the number of ranks times the tokens per
second of one rank with the same number of threads; that of a pipeline includes its bubble. Each row's ranks take turns
with that one rank (see ``turns.py``), so a slow moment of the machine slows both; ratios are taken within a turn. A
rank that has the machine's memory to itself is faster than one of many: efficiency includes this effect.
"""

from __future__ import annotations

import argparse
import sys
from typing import List, Optional, Tuple

from peers import add_options, config_of, speed, start, title, worker_arguments
from turns import Several, middle, take_turns

from fugaku_gpt.errors import UsageError

HEAD = f"{'layout':36}{'ranks x threads':>16}{'sec/step':>24}{'tokens/s':>28}{'RSS of a rank':>15}{'efficiency':>24}"


def replicas(most: int) -> List[str]:
    """Layouts of 1, 2, 4, ... ranks, and of ``most``."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return [f"dp={count}" for count in counts]


def mixes(ranks: int, layers: int) -> List[str]:
    """Every layout of ``ranks`` ranks."""
    layouts = []
    for dp in range(ranks, 0, -1):
        for tp in range(ranks // dp, 0, -1):
            pp = ranks // dp // tp
            if dp * tp * pp != ranks:
                continue
            axes = [f"{key}={size}" for key, size in (("dp", dp), ("tp", tp), ("pp", pp)) if size > 1]
            layouts.append(",".join(axes) or "dp=1")
            if pp > 1 and layers >= 2 * pp:
                layouts.append(",".join([*axes, "schedule=interleaved", "chunks=2"]))
    return layouts


def row(name: str, options: argparse.Namespace) -> str:
    """Measures a layout beside one rank with the same number of threads."""
    reference = f"dp=1,threads={name.rsplit('threads=', 1)[1]}"
    with Several() as several:
        configs = {
            contestant: start(several, contestant, options, worker_arguments(options))
            for contestant in dict.fromkeys((reference, name))
        }
        if several.lacking:
            raise SystemExit(
                "\n".join(f"{contestant}: not on this build: {why}" for contestant, why in several.lacking.items())
            )
        turns = take_turns(several.workers, options.turns)
    config, units = configs[name], [turn[name] for turn in turns]
    ranks = config.layout.ranks
    shares = [speed(config, turn[name]) / speed(configs[reference], turn[reference]) / ranks for turn in turns]
    return (
        f"{name.rsplit(',', 1)[0]:36}{f'{ranks} x {config.node.threads_per_rank}':>16}"
        f"{middle([unit.seconds for unit in units]):>24}{middle([speed(config, unit) for unit in units], 1):>28}"
        f"{max(units[-1].peak_bytes) / 2**20:11.0f} MiB{middle(shares):>24}"
    )


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--turns", type=int, default=5, help="Number of counted turns, after one warm-up turn.")
    parser.add_argument("--ranks", type=int, default=16, help="Largest number of replicas; 0: no such rows.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of each replica.")
    parser.add_argument("--mix-ranks", type=int, default=4, help="Ranks of every mix; 0: no such rows.")
    parser.add_argument("--mix-threads", type=int, default=4, help="Threads of each rank of a mix.")
    options = parser.parse_args(arguments)
    names: List[Tuple[str, str]] = []
    try:
        shape = config_of("dp=1", options).model
        if options.ranks:
            names += [("replicas", f"{name},threads={options.threads}") for name in replicas(options.ranks)]
        if options.mix_ranks:
            layouts = mixes(options.mix_ranks, shape.layers)
            names += [("mixes", f"{name},threads={options.mix_threads}") for name in layouts]
        for _, name in names:
            config_of(name, options)
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    print(title(config_of("dp=1", options), options) + f", {options.turns} turns")
    print(HEAD, flush=True)
    section = ""
    for part, name in names:
        if part != section:
            section = part
            print(part, flush=True)
        print(row(name, options), flush=True)


if __name__ == "__main__":
    sys.exit(main())

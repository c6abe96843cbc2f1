"""Times one step of our trainer, of a textbook PyTorch GPT and of Hugging Face's GPT-2, beside the GEMM floor.

    .venv/bin/python benchmarks/step.py                      # 124M, sequence 1024 x micro-batch 1
    .venv/bin/python benchmarks/step.py ours ours-bf16 floor floor-bf16 textbook-bf16 --shape 256x4
    .venv/bin/python benchmarks/step.py ours textbook --python .venv-torch17/bin/python
    .venv/bin/python benchmarks/step.py --preset tiny --turns 9

Contestants take turns, each in a process of its own (see ``turns.py``); a step is ``--micro-batches`` forward and
backward passes and one AdamW step. ``gemm_floor.py`` describes the products of the floor, ``contestants.py`` the
contestants. Every figure is a median over the turns, with the smallest and the largest; ratios are taken within a
turn. ``x floor`` is a contestant's time divided by that of the floor of the same type, each of whose products is
computed in the way with the smallest median over the turns (below the table: in whichever way was fastest in the turn).
``ours is`` is its time divided by that of ``ours`` of the same type, and ``ours / its`` is the peak memory of ``ours``
divided by its own. A line names each contestant that the build cannot run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from contestants import BASES, MODIFIERS, environment_of, parse, settings_of, setup
from other_trainers import NANOGPT
from turns import Several, Turn, first_steps, middle, ratios_of, seconds_of, serve, take_turns, write_samples

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.machine.local import processor_name, usable_cores


def table(config: RunConfig, turns: List[Turn]) -> List[str]:
    """A line for each contestant, and further lines for pairs of them."""
    names, as_measured, turns = list(turns[0]), turns, settle(turns)
    tokens = config.training.global_batch * config.model.seq_len
    head = f"{'':20}{'sec/step':>22}{'tokens/s':>10}{'x floor':>24}{'ours is':>24}{'peak RSS':>11}"
    lines = [f"{head}{'ours / its':>11}{'loss':>9}"]
    for name in names:
        floor, our = _same_kind(name, "floor", names), _same_kind(name, "ours", names)
        seconds = seconds_of(turns, name)
        line = f"{name:20}{middle(seconds):>22}{tokens / statistics.median(seconds):10.1f}"
        if parse(name)[0] == "floor":
            lines.append(line)
            continue
        line += f"{middle(ratios_of(turns, name, floor)) if floor else '-':>24}"
        line += f"{middle(ratios_of(turns, name, our)) + ' x' if our and our != name else '-':>24}"
        peak = turns[-1][name].peak_bytes[0]
        share = f"{turns[-1][our].peak_bytes[0] / peak:.3f}" if our else "-"
        lines.append(f"{line}{peak / 2**20:7.0f} MiB{share:>11}{turns[-1][name].value:9.3f}")
    for name in names:
        base, modifiers = parse(name)
        wide = "-".join([base, *(modifier for modifier in modifiers if modifier != "bf16")])
        if wide != name and wide in names:
            lines.append(f"{name} is {middle(ratios_of(turns, wide, name))} x as fast as {wide}")
        if base == "floor":
            peak = max(turn[name].value["peak"] for turn in turns)
            best = _best_of_all(as_measured, name)
            lines.append(f"{name}: fastest product {peak / 1e9:.1f} GFLOP/s; best of every product: {best:.3f} s")
            by_turn = f"{name}, each product by the turn's fastest way: {middle(seconds_of(as_measured, name))}"
            ours = [our for our in names if parse(our)[0] == "ours" and _same_kind(our, "floor", names) == name]
            lines.append(by_turn + "".join(f"; {our} {middle(ratios_of(as_measured, our, name))}" for our in ours))
    return lines


def products_by_best_way(values: Sequence[Mapping[str, Any]]) -> List[Dict[str, List[Any]]]:
    """The floor's products in each of several turns (:meth:`gemm_floor.Floor.measure`), each computed in the same way
    in all turns: the way with the smallest median."""
    settled: List[Dict[str, List[Any]]] = [{} for _ in values]
    for product in values[0]["products"]:
        ways = [value["ways"][product] for value in values]
        best = min(ways[0], key=lambda way: statistics.median(times[way] for times in ways))
        for turn_products, value, times in zip(settled, values, ways):
            count, seconds, rate, _ = value["products"][product]
            turn_products[product] = [count, times[best], rate * seconds / times[best], best]
    return settled


def settle(turns: List[Turn]) -> List[Turn]:
    """The turns with floors whose products are each computed in a single way."""
    turns = [dict(turn) for turn in turns]
    for name in [name for name in turns[0] if parse(name)[0] == "floor"]:
        for turn, turn_products in zip(turns, products_by_best_way([turn[name].value for turn in turns])):
            seconds = sum(count * product_seconds for count, product_seconds, _, _ in turn_products.values())
            turn[name] = turn[name]._replace(seconds=seconds, value={**turn[name].value, "products": turn_products})
    return turns


def products(turns: List[Turn], name: str) -> List[str]:
    """A table of a floor's products: count in a step, milliseconds of one, seconds of all, GFLOP/s, and the way."""
    lines = [f"{name:28}{'count':>6}{'ms':>10}{'s/step':>9}{'GFLOP/s':>9}  way"]
    for product, (count, _, _, way) in turns[-1][name].value["products"].items():
        rows = [turn[name].value["products"][product] for turn in turns]
        seconds, rate = (statistics.median(row[column] for row in rows) for column in (1, 2))
        lines.append(f"{product:28}{count:6}{seconds * 1e3:10.3f}{count * seconds:9.3f}{rate / 1e9:9.1f}  {way}")
    return lines


def _best_of_all(turns: List[Turn], name: str) -> float:
    """Seconds of a step's products, each as in its fastest turn."""
    products_by_turn = [turn[name].value["products"] for turn in turns]
    return sum(
        row[0] * min(turn_products[product][1] for turn_products in products_by_turn)
        for product, row in products_by_turn[0].items()
    )


def _same_kind(name: str, base: str, names: List[str]) -> str:
    """The contestant of another base with the same type, with the same GELU if there is one; "" if there is none."""
    modifiers = [modifier for modifier in parse(name)[1] if modifier != "spin"]
    for candidate_modifiers in (modifiers, [modifier for modifier in modifiers if modifier != "tanh"]):
        candidate = "-".join([base, *candidate_modifiers])
        if candidate in names:
            return candidate
    return ""


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "; ".join(f"-{modifier}: {meaning}" for modifier, meaning in MODIFIERS.items())
    parser.add_argument("contestants", nargs="*", help=f"{', '.join(BASES)}; {about}. Default: floor ours textbook.")
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--shape", default="1024x1", metavar="SxB", help="Sequence length x micro-batch.")
    parser.add_argument("--turns", type=int, default=5, help="Number of counted turns, after one warm-up turn.")
    parser.add_argument("--micro-batches", type=int, default=4, help="Forward and backward passes per step.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--python", default=sys.executable, help="Interpreter of another build.")
    parser.add_argument("--peers-python", default=sys.executable, help="Interpreter of `make peers`, for trainer.")
    parser.add_argument("--nanogpt", metavar="FOLDER", help="Folder with nanoGPT's model.py, for nanogpt.")
    parser.add_argument("--products", action="store_true", help="Print the products of the floor too.")
    parser.add_argument("--samples", type=Path, help="File for the figures of every turn, as JSON.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(options.contestants)) or ["floor", "ours", "textbook"]
    try:
        seq_len, micro_batch = (int(part) for part in options.shape.split("x"))
        for name in names:
            parse(name)
    except ValueError as error:
        parser.error(str(error))
    shape = [f"model.seq_len={seq_len}", f"training.micro_batch={micro_batch}"]
    shape.append(f"training.global_batch={micro_batch * options.micro_batches}")
    if any(setting.startswith("training.dtype=") for setting in options.settings):
        parser.error("--set training.dtype would change ours alone: a contestant's name says its type, as in ours-bf16")
    settings = [*shape, *options.settings]
    if options.worker:
        name, path = options.worker
        serve(path, lambda: setup(name, load_run_config(preset=options.preset, overrides=settings + settings_of(name))))
        return
    config = load_run_config(preset=options.preset, overrides=settings)
    threads = config.node.threads_per_rank or len(usable_cores())
    passed_on = list(arguments if arguments is not None else sys.argv[1:])
    with Several() as several:
        for name in names:
            python = options.peers_python if parse(name)[0] == "trainer" else options.python
            argv = [python, os.path.abspath(__file__), *passed_on, "--worker", name]
            folder = {NANOGPT: options.nanogpt} if options.nanogpt else {}
            several.start(name, argv, {**environment_of(name, threads), **folder})
        turns = take_turns(several.workers, options.turns) if several.workers else []
        started = first_steps(several.workers)
        build = next((worker.torch for worker in several.workers), "none")
    model, training = config.model, config.training
    head: Dict[str, object] = {
        "model": size_name(model),
        "shape": f"sequence {model.seq_len} x micro-batch {training.micro_batch}, {config.micro_batches} per step",
        "vocabulary": config.padded_vocab,
        "threads": threads,
        "processor": processor_name(),
        "torch": build,
        "turns": len(turns),
    }
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    for name, why in several.lacking.items():
        print(f"{name}: not on this build: {why}")
    if turns:
        print("\n".join(table(config, turns)))
        print(started)
        for name in turns[0] if options.products else []:
            if parse(name)[0] == "floor":
                print("\n".join(products(settle(turns), name)))
    write_samples(options.samples, head, turns)


if __name__ == "__main__":
    main()

"""Tests of the rules on figures, one by one, on a row whose figures follow from the notes' formula."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Optional, Tuple

import pytest

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops
from fugaku_gpt.formulas.parameters import parameter_count
from fugaku_gpt.report.catalogue import named_shape, shapes_of, size_label
from fugaku_gpt.report.check import check_text
from fugaku_gpt.report.findings import RowFinding

SIZE = "124M"
MODEL = shapes_of(SIZE)[0]
VOCAB = MODEL.padded_vocab(4)
COLUMNS = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Est. Aggr. PetaFLOPs", "Notes")
NODES, BATCH, SPEED = 8, 512, 0.6  # TFLOP/s per node
BOTH = "8 (max-proc-per-node=4)"


def seconds_at(speed: float, seq_len: int = 1024, recompute: bool = True) -> float:
    """Seconds of an iteration at a speed in TFLOP/s per node, by the notes' formula."""
    return notes_flops(replace(MODEL, seq_len=seq_len), BATCH, VOCAB, recompute) / (speed * 1e12 * NODES)


def table(
    tflops: str = "-",
    seq_len: int = 1024,
    recompute: bool = True,
    nodes: str = BOTH,
    more: str = "",
    mem: str = "20000.0 MiB",
    aggregate: str = "-",
    size: str = SIZE,
    layout: Tuple[str, str, str] = ("4", "4", "2"),
) -> str:
    """A table of one row, 32 ranks on 8 nodes, whose seconds give 0.5989 to 0.6000 TFLOP/s; ``more``: of the title."""
    checkpointing = ", Activation Checkpointing" if recompute else ""
    seconds = f"{seconds_at(SPEED, seq_len, recompute):.4f}"
    row = (nodes, size, *layout, "1", str(BATCH), mem, seconds, tflops, aggregate, "02-15")
    lines = [COLUMNS, tuple("--:" for _ in COLUMNS), row]
    heading = f"### {size} model, Sequence Length={seq_len}{checkpointing}, PyTorch 1.10{more}\n"
    return heading + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def findings(text: str, rule: str, **options: object) -> List[RowFinding]:
    return [finding for finding in check_text(text, **options)[1] if finding.rule == rule]  # type: ignore[arg-type]


def cause(text: str, rule: str = "tflops", **options: object) -> str:
    (finding,) = findings(text, rule, **options)
    return finding.cause


@pytest.mark.parametrize(
    "tflops", ["0.6000", "0.5989", "0.5995", "0.600", "0.60", "0.6", "0.5", "~0.56"]  # 0.5: the last digit was cut
)  # fmt: skip
def test_speeds_that_follow_are_no_findings(tflops: str) -> None:
    assert check_text(table(tflops)) == (1, [])


@pytest.mark.parametrize("tflops", ["0.6002", "0.5987", "0.601", "0.598", "0.59", "0.61", "0.4", "0.7", "~0.50"])
def test_speeds_beyond_their_rounding_are_findings(tflops: str) -> None:
    (finding,) = findings(table(tflops), "tflops")
    low_high = "0.5989 to 0.6000" if len(tflops) > 5 else "0.599 to 0.600" if len(tflops) == 5 else "0.60"
    if not tflops.startswith("~"):
        assert finding.what.endswith(f", which gives {low_high}"), finding.what


@pytest.mark.parametrize(
    ("tflops", "expected"),
    [
        ("600.0", "gigaFLOP/s, not teraFLOP/s"),
        ("0.0006", "petaFLOP/s, not teraFLOP/s, or Sec/it is a thousandth of what it was"),
        ("0.1500", "TFLOPs of one rank: times 4 ranks per node it fits"),
        ("2.4000", "multiplied by 4 ranks once too often"),
        ("4.8000", "TFLOPs of all 8 nodes: divided by 8 it fits"),
        ("0.4500", "reckoned without activation checkpointing, against the heading"),
        ("0.598", "the last digit was cut, not rounded, or the two were averaged over different iterations"),
        ("0.597", "one of the two has a slip, or they were averaged over different iterations"),
        ("0.655", "one of the two has a slip, or they were averaged over different iterations"),
        ("0.545", "one of the two has a slip, or they were averaged over different iterations"),
        ("0.665", "one of the two, GBS or the number of nodes is wrong (off by a factor of 1.11)"),
        ("0.6750", "one of the two, GBS or the number of nodes is wrong (off by a factor of 1.13)"),  # 576 / 512
        ("0.5250", "one of the two, GBS or the number of nodes is wrong (off by a factor of 0.876)"),  # 448 / 512
        ("0.7800", "one of the two, GBS or the number of nodes is wrong (off by a factor of 1.3)"),
        ("1.2000", "GBS 512 for 1024: with 1024 it fits"),
        ("0.3000", "GBS 512 for 256: with 256 it fits"),
    ],
)
def test_the_likely_cause_of_a_speed(tflops: str, expected: str) -> None:
    assert cause(table(tflops)) == expected


def test_causes_that_depend_on_the_row() -> None:
    assert cause(table("0.8000", recompute=False)) == "reckoned with activation checkpointing, against the heading"
    milliseconds = table("0.6000").replace(f"{seconds_at(SPEED):.4f}", f"{seconds_at(SPEED) * 1000:.1f}")
    assert cause(milliseconds) == "Sec/it is in milliseconds"
    assert cause(table("600.0"), machine="other") == "Sec/it is in milliseconds"  # which may reach any speed
    stated = table("0.3000", more=", GBS=256")
    assert cause(stated) == "GBS 512 for the 256 that the text above the table states: with 256 it fits"
    alone = table("0.1500", nodes="8")  # one rank on each node
    assert "of one rank" not in cause(alone) and "0.1500" in findings(alone, "tflops")[0].what
    single = seconds_at(SPEED) * NODES
    single_node = table("0.6000", nodes="1").replace(f"{seconds_at(SPEED):.4f}", f"{single:.4f}")
    assert findings(single_node, "tflops") == []
    exact = exact_flops(MODEL, BATCH, MODEL.vocab_size) / (seconds_at(SPEED) * 1e12 * NODES)
    assert cause(table(f"{exact:.4f}")) == "by the exact formula, not the notes'"


@pytest.mark.parametrize("length", [512, 2048, 4096])
def test_another_sequence_length_is_a_likely_cause(length: int) -> None:
    flops = notes_flops(replace(MODEL, seq_len=length), BATCH, VOCAB, True)
    tflops = f"{flops / (seconds_at(SPEED) * 1e12 * NODES):.2f}"  # more digits fit a single global batch as well
    assert cause(table(tflops)) == f"with a sequence length of {length} it fits"
    back = f"{SPEED * seconds_at(SPEED, 1024) / seconds_at(SPEED, length):.4f}"
    assert cause(table(back, seq_len=length)) == "with a sequence length of 1024 it fits"


def at_nodes(nodes: int, aggregate: str, tflops: str = "0.6000") -> str:
    """A row of 32 ranks on a number of nodes; only its aggregate is looked at."""
    return table(tflops, nodes=str(nodes), aggregate=aggregate)


@pytest.mark.parametrize(
    ("nodes", "aggregate"),
    [(512, "0.300"), (512, "0.3"), (512, "0.299"), (512, "0.2"), (1, "0.001"), (1, "0.0006"), (512, "-"),
     (512, "0.30002")],
)  # fmt: skip
def test_an_aggregate_that_follows_is_no_finding(nodes: int, aggregate: str) -> None:
    """0.299 and 0.2: the last digit was cut, not rounded."""
    assert findings(at_nodes(nodes, aggregate), "aggregate") == []


@pytest.mark.parametrize(
    ("aggregate", "si", "expected"),
    [
        ("0.307", False, "it is / 1000; the notes divide by 1024 (--si where a table is / 1000)"),
        ("0.300", True, "it is / 1024"),
        ("307.200", False, "these are teraFLOP/s: not divided by 1024"),
        ("307.200", True, "these are teraFLOP/s: not divided by 1024"),
        ("0.000586", False, "not multiplied by the number of nodes"),
        ("0.000600", True, "not multiplied by the number of nodes"),
        ("0.01875", False, "multiplied by 32 ranks, not by 512 nodes"),
        ("0.01920", True, "multiplied by 32 ranks, not by 512 nodes"),
        ("0.298", False, "a figure of another row, or another number of nodes"),
        ("0.400", True, "a figure of another row, or another number of nodes"),
    ],
)
def test_the_likely_cause_of_an_aggregate(aggregate: str, si: bool, expected: str) -> None:
    (finding,) = findings(at_nodes(512, aggregate), "aggregate", si=si)
    assert finding.cause == expected
    divisor = 1000 if si else 1024
    assert f"aggregate {aggregate} is not TFLOPs 0.6000 * 512 nodes / {divisor} = " in finding.what


def test_an_aggregate_of_nothing_is_not_a_digit_that_was_cut() -> None:
    assert findings(at_nodes(1, "0.000", "0.8000"), "aggregate")
    assert findings(at_nodes(1, "0.001", "0.8000"), "aggregate") == []


@pytest.mark.parametrize(
    ("toggles", "peak", "label"),
    [
        ("", 6.7584, "A64FX, FP32, 2.2 GHz"),
        (", 2.2GHz", 6.7584, "A64FX, FP32, 2.2 GHz"),
        (", 2.0GHz", 6.144, "A64FX, FP32, 2 GHz"),
        (", eco_state=1", 3.3792, "A64FX, FP32, 2.2 GHz, one pipe"),
        (", 2.0GHz, eco_state=2", 3.072, "A64FX, FP32, 2 GHz, one pipe"),
        (", eco_state=0", 6.7584, "A64FX, FP32, 2.2 GHz"),
    ],
)
def test_the_peak_of_a_node_follows_from_clock_and_pipes(toggles: str, peak: float, label: str) -> None:
    nodes = f"8 (max-proc-per-node=4{toggles})"
    assert findings(table(f"{peak - 0.002:.3f}", nodes=nodes), "peak") == []
    (finding,) = findings(table(f"{peak + 0.002:.3f}", nodes=nodes), "peak")
    assert finding.what.endswith(f"are over the peak of one node, {peak:.3f} ({label})")


@pytest.mark.parametrize(
    ("mem", "problem", "expected"),
    [
        ("32769.0 MiB", "more than the 32 GiB of one node", "of all nodes, or a figure of another column"),
        ("20000.0 GiB", "more than the 32 GiB of one node", "GiB for MiB"),
        ("20000.0 GB", "more than the 32 GiB of one node", "GB for MB"),
        ("20.0 TiB", "more than the 32 GiB of one node", "TiB for GiB"),
        ("20.0 TB", "more than the 32 GiB of one node", "TB for GB"),
        ("20000.0 G", "more than the 32 GiB of one node", "G for M"),
        ("40000.0 GiB", "more than the 32 GiB of one node", "of all nodes"),
        ("127.9 MiB", "cannot hold PyTorch (at least 128 MiB)", "the unit is too small, or another column's figure"),
    ],
)
def test_memory_that_a_node_cannot_use(mem: str, problem: str, expected: str) -> None:
    (finding,) = findings(table("0.6000", mem=mem), "memory")
    assert finding.what.endswith(problem) and finding.cause == expected


@pytest.mark.parametrize("mem", ["32768.0 MiB", "32.0 GiB", "128.0 MiB", "8192.0 MiB", "-"])
def test_memory_that_a_node_can_use(mem: str) -> None:
    assert findings(table("0.6000", mem=mem), "memory") == []


def test_memory_holds_a_ranks_share_of_the_weights() -> None:
    share = min(parameter_count(model) for model in shapes_of("13B")) * 2 / (4 * 8) / 2**20
    layout = ("1", "4", "8")
    assert findings(table(size="13B", layout=layout, mem=f"{share + 1:.1f} MiB"), "memory") == []
    (finding,) = findings(table(size="13B", layout=layout, mem=f"{share - 1:.1f} MiB"), "memory")
    assert f"cannot hold the weights of 13B (at least {share:.0f} MiB)" in finding.what


GPU_COLUMNS = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Sec/it", "TFLOPs", "Notes")


def gpu_table(tflops: float, more: str = "") -> str:
    """A table on 32 V100 whose iteration takes 10 s."""
    row = ("4", SIZE, "4", "4", "2", "1", str(BATCH), "10.000", f"{tflops:.4f}", "02-15")
    lines = [GPU_COLUMNS, tuple("--:" for _ in GPU_COLUMNS), row]
    heading = f"### {SIZE} model on V100, Sequence Length=1024, Activation Checkpointing{more}\n"
    return heading + "".join("| " + " | ".join(line) + " |\n" for line in lines)


@pytest.mark.parametrize("factor", [3, 4])
@pytest.mark.parametrize("formula", ["matrices", "layers", "all", "label"])
def test_speeds_of_gpus_may_follow_from_the_number_of_parameters(factor: int, formula: str) -> None:
    """Parameters * {4, 3} * 2 * s * B / (t * GPUs), as older notes on GPUs have it."""
    matrices = 12 * MODEL.layers * MODEL.hidden**2
    parameters = {
        "matrices": matrices,
        "layers": matrices + 13 * MODEL.layers * MODEL.hidden,
        "all": parameter_count(MODEL),
        "label": 124e6,
    }[formula]
    tflops = parameters * factor * 2 * 1024 * BATCH / (10 * 32 * 1e12)
    assert findings(gpu_table(tflops), "tflops") == []


@pytest.mark.parametrize("slack", [-0.0009, 0.0009])
def test_speeds_of_gpus_may_differ_by_a_thousandth(slack: float) -> None:
    low = notes_flops(MODEL, BATCH, MODEL.vocab_size, True) / (10.0005 * 32 * 1e12)
    high = notes_flops(MODEL, BATCH, VOCAB, True) / (9.9995 * 32 * 1e12)
    end = low if slack < 0 else high
    assert findings(gpu_table(end * (1 + slack)), "tflops") == []
    assert findings(gpu_table(end * (1 + 4 * slack)), "tflops")


def test_a_speed_of_gpus_that_follows_from_nothing_is_a_finding() -> None:
    expected: Optional[float] = notes_flops(MODEL, BATCH, VOCAB, True) / (10 * 32 * 1e12)
    (finding,) = findings(gpu_table(1.7 * (expected or 0)), "tflops")
    assert "off by a factor of 1.7" in finding.cause or "GBS" in finding.cause


@pytest.mark.parametrize("text", [table("0.6000"), gpu_table(0.6)])
def test_an_iteration_of_no_time_has_no_speed(text: str) -> None:
    for seconds in (f"{seconds_at(SPEED):.4f}", "10.000"):
        text = text.replace(seconds, "0.0")
    assert check_text(text)[0] == 1 and findings(text, "tflops") == []


def test_a_size_of_tables_is_a_gpt2_whatever_presets_there_are() -> None:
    assert size_label(ModelConfig(layers=32, hidden=4096, heads=32)) == "" and shapes_of("8B") == ()
    assert named_shape(32, 4096) is None and size_label(ModelConfig(layers=12, hidden=768, heads=12)) == "124M"

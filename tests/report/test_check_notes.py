"""Tests that the ways in which notes on GPUs and on Fugaku are written are understood, and their rows no findings."""

from __future__ import annotations

from typing import Dict, List, Tuple

import pytest

from fugaku_gpt.report.check import check_tables, check_text
from tests.report.test_notes_table import measurements

GPU_COLUMNS = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "NHEADS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")


def table(titles: Tuple[str, ...], *rows: Tuple[object, ...]) -> str:
    """A Markdown table."""
    lines = [titles, tuple("--:" for _ in titles), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def rules(text: str, **options: object) -> List[str]:
    return [finding.rule for finding in check_text(text, **options)[1]]  # type: ignore[arg-type]


def gpu_row(line: Dict[str, str]) -> Tuple[str, ...]:
    """A row of measurements.csv in the form of the notes on A100."""
    memory = f"{float(line['mem_value']):.0f}GB" if line["mem_value"] else "GB"
    names = ("nodes", "model", "dp", "tp", "pp", "micro_batch")
    figures = (line["sec_per_it"], line["tflops"]) if line["sec_per_it"] else ("x", "x")
    return (*(line[name] for name in names), line["heads"], line["global_batch"], memory, *figures, line["status"])


# Rows that are worth a finding: a configuration measured twice, in which something differs that no cell says, and a
# row that says no more than "fail".
WRONG_ON_A100 = {"a100.t15.L330": "duplicate", "a100.t27.L483": "no-cause"}


def a100_tables() -> Dict[str, List[str]]:
    """Heading and table → ids of its rows, one text for each table of the notes and each model in it."""
    texts: Dict[Tuple[str, ...], List[str]] = {}
    lines = measurements()
    for name, line in lines.items():
        is_of_form = name.startswith("a100.t") and not name.startswith("a100.t03")  # those differ in a column of theirs
        if is_of_form and line["dp"] and (line["sec_per_it"] or line["status"] != "ok"):
            key = (name.rpartition(".")[0], line["layers"], line["hidden"], line["vocab"], line["zero_stage"])
            texts.setdefault(key, []).append(name)
    return {
        f"## A100, SEQ_LEN=2048 / VOCAB_SIZE={vocab}\n\nNHIDDEN={hidden} / NLAYERS={layers}\n\n"
        + table(GPU_COLUMNS, *(gpu_row(lines[name]) for name in names)): names
        for (_, layers, hidden, vocab, _), names in texts.items()
    }


def test_the_measured_rows_of_the_notes_on_a100_are_no_findings() -> None:
    rule_of_row: Dict[str, str] = {}
    for text, names in a100_tables().items():
        for finding in check_text(text)[1]:
            rule_of_row[names[finding.line - 7]] = finding.rule
    assert rule_of_row == WRONG_ON_A100


@pytest.mark.slow
def test_a_mistake_in_a_row_of_a100_is_a_finding() -> None:
    """Each row with another global batch, and with TFLOPs of all GPUs of a node."""
    for text, names in a100_tables().items():
        for name in names:
            line = measurements()[name]
            if not line["sec_per_it"]:
                continue
            row = "| " + " | ".join(gpu_row(line)) + " |"
            per_node = row.replace(f" {line['tflops']} ", f" {float(line['tflops']) * 8:.2f} ")
            other_batch = row.replace(f" {line['global_batch']} ", f" {int(line['global_batch']) // 2} ")
            for changed in (per_node, other_batch):
                assert changed != row
                assert set(rules(text.replace(row, changed))) & {"tflops", "peak", "batch", "swapped", "shifted"}, name


@pytest.mark.parametrize("prefix", ["v100.t1", "v100.t4"])
def test_the_measured_rows_of_the_notes_on_v100_are_no_findings(prefix: str) -> None:
    lines = [line for name, line in measurements().items() if name.startswith(prefix + ".")]
    names = ("nodes", "tp", "pp", "dp", "micro_batch", "sec_per_it", "tflops")
    rows = []
    for line in lines:
        note = f"{float(line['mem_value']):.0f}GB" if line["mem_value"] else line["status"]
        rows.append((*(line[name] or "x" for name in names), note))
    text = table(("NNODES", "TP", "PP", "DP", "MBS", "Speed", "TFlops", "Notes"), *rows)
    assert rules(f"# 1.3B on V100, GBS=512, SEQ_LEN=2048, GPUS_PER_NODE=4\n\n{text}") == []
    assert rules(f"# A model\n\n{text}") == []


A100_ROW = (48, "181B", 4, 8, 12, 1, 2048, "29GB", 143.31, 112.49, "02-21")
TITLES = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")


@pytest.mark.parametrize("machine", ["on A100", ""])
def test_an_unstated_setting_is_no_1(machine: str) -> None:
    """Heads, GPUs per node, sequence length and vocabulary: their rules are left out, and counted."""
    text = f"## A table {machine}\n\nNHIDDEN=14336 / NLAYERS=72\n\n{table(TITLES, A100_ROW)}"
    checked = check_tables(text)
    assert checked.findings == ()
    assert checked.skipped == {
        "TP divides the heads: number of heads not said": 1,
        "TFLOPs follow from Sec/it: vocabulary, sequence length not said": 1,
    }
    assert check_tables(text, machine="a100") == checked
    stated = text.replace("NLAYERS=72", "NLAYERS=72 / NHEADS=112 / SEQ_LEN=2048 / VOCAB_LENGTH=250k")
    assert check_tables(stated).skipped == {} and rules(stated) == []
    assert rules(stated.replace("112.49", "108.10")) == ["tflops"]
    findings = check_text(stated.replace("NHEADS=112", "NHEADS=108"))[1]
    assert "TP 8 does not divide the 108 heads" in findings[0].what


def test_gpus_per_node_are_those_of_most_rows_of_the_text() -> None:
    rows = [A100_ROW, (48, "181B", 8, 8, 6, 1, 2048, "38GB", 139.82, 115.31, "02-21")]
    wrong = (40, "187B", 8, 8, 10, 4, 2048, "GB", 147.04, 135.92, "02-21")
    text = f"# A100\n\n{table(TITLES, *rows)}\n## More\n\n{table(TITLES, wrong)}"
    findings = check_text(text)[1]
    assert len(findings) == 1 and findings[0].line == 12 and "GPUs per node 8" in findings[0].what + findings[0].cause


def test_two_models_in_a_text() -> None:
    text = (
        "# A100\n\n20B model: TP=8, NLAYERS=8, NHIDDEN=14400, NHEADS=32, SEQ_LEN=2048, VOCAB_LENGTH=250k, GBS=2048\n"
        "\n200B model: TP=8, PP=10, NLAYERS=80, NHIDDEN=14400, NHEADS=96, SEQ_LEN=2048, VOCAB_LENGTH=250k, GBS=2048\n\n"
    )
    titles = ("GPUs", "Size", "DP", "TP", "PP", "MBS", "Speed", "TFLOPs")
    rows = [(8, "20B", 1, 8, 1, 1, 769.99, 108.47), (80, "200B", 1, 8, 10, 1, 844.81, 98.87)]
    assert rules(text + table(titles, *rows)) == []
    assert rules(text + table(titles, rows[0], (80, "200B", 1, 8, 10, 1, 844.81, 88.87))) == ["tflops"]
    assert rules(text + table(titles, (128, "20B", 1, 8, 16, 1, 769.99, 108.47)))[0] == "layout"


def test_two_models_in_a_line() -> None:
    text = (
        "350M (NLAYERS=24, NHIDDEN=1024, NHEADS=16) and 2.7B (NLAYERS=32, NHIDDEN=2560, NHEADS=32), SEQ_LEN=2048, "
        "VOCAB=50k, V100, GPUS_PER_NODE=4\n\n"
    )
    titles = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Speed", "TFlops")
    rows = [(4, "350M", 16, 1, 1, 2, 512, "12GB", 11.0, 15.77), (4, "2.7B", 4, 4, 1, 1, 512, "28GB", 90.1, 12.87)]
    assert rules(text + table(titles, *rows)) == []
    assert rules(text + table(titles, rows[0], (*rows[1][:-1], 20.0))) == ["tflops"]
    assert "layout" in rules(text + table(titles, (18, "2.7B", 24, 3, 1, 1, 480, "28GB", 90.1, "x")))


def test_undoing_a_slip_hides_no_sequence_length() -> None:
    titles = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "SEQ_LEN", "Mem", "Sec/it", "TFLOPs")
    row = (160, "13B", 2, 4, 20, 1, 512, 2048, "20.1 GB", "1000 s", "1.10")
    assert rules("### 13B, PyTorch 1.13, NLAYERS=40 / NHIDDEN=5184\n\n" + table(titles, row)) == ["tflops"]


@pytest.mark.parametrize(
    "settings",
    [
        "n_layer: 24, n_embd: 1024, n_head: 16, block_size: 2048, vocab_size: 50257",
        "NLAYERS=24 / d_model=1024 / NHEADS=16 / seq=2K / VOCAB=50257",
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257",
        "layers: 24 / hidden_dim: 1024 / heads: 16 / context length 2048 / vocab: 50257",
    ],
)
def test_names_that_other_trainers_have_for_settings(settings: str) -> None:
    titles = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "AC", "Sec/it", "TFLOPs", "Est. Aggr. PetaFLOPs")
    row = (16, "350m", 16, 1, 1, 1, 512, "without", 60.0, 2.90, 0.045)
    text = f"# On Fugaku\n\n{settings}\n\n{table(titles, row)}"
    assert check_tables(text).skipped == {} and rules(text) == []
    assert rules(text.replace("| 2.9 | 0.045", "| 2.6 | 0.041")) == rules(text.replace("without", "with")) == ["tflops"]
    assert "layout" in rules(text.replace("| 16 | 350m | 16 | 1 |", "| 48 | 350m | 16 | 3 |"))


def test_a_sentence_that_mentions_a_setting_states_nothing() -> None:
    text = "# A100, NHIDDEN=13312 / NLAYERS=84\n\nNHEADS=108 is what the fused kernel of the softmax cannot do well\n\n"
    row = (48, "182B", 8, 8, 6, 4, 2048, "50GB", 122.93, 132.00, "02-23")
    assert rules(text + table(TITLES, row)) == []
    assert rules(text.replace("is what the fused kernel of the softmax cannot do well", "") + table(TITLES, row)) == [
        "layout"
    ]


def test_a_column_of_heads_goes_before_the_text() -> None:
    row = (48, "182B", 8, 8, 6, 4, 64, 2048, "50GB", 122.93, 132.00, "02-23")
    text = f"# A100, NHIDDEN=13312 / NLAYERS=84 / NHEADS=108\n\n{table(GPU_COLUMNS, row)}"
    assert rules(text) == []
    assert rules(text.replace("| 64 |", "| 60 |")) == ["layout"]


def test_stages_may_hold_different_numbers_of_layers() -> None:
    row = (5, "350M", 1, 1, 5, 1, 8, "10000 MiB", 30.0, 0.29, "11-21")
    text = f"### 350M model, Sequence Length=2048, PyTorch 1.10\n{table(TITLES, row)}"
    assert rules(text) == []
    deep = (40, "350M", 1, 1, 40, 1, 8, "10000 MiB", 30.0, 0.04, "11-21")
    assert "layout" in rules(f"### 350M model, Sequence Length=2048, PyTorch 1.10\n{table(TITLES, deep)}")


FUGAKU = ("Nodes", "Freq", "Size", "DP", "MP", "PP", "MBS", "GBS", "AC", "Mem", "Sec/it", "TFLOPs", "Notes")
OPTIONS = "- --num-layers 48\n- --hidden-size 7168\n- --num-attention-heads 56\n\n"


def test_a_column_of_activation_checkpointing_and_of_the_clock() -> None:
    memory = "29138.6 MiB (OOM after the first iteration)"
    row = (48, "2.0GHz", "30B", 1, 1, 48, 1, 1536, "Yes", memory, 17212.8, 0.95, "02-10")
    text = f"# 30B model\n\n{OPTIONS}### Sequence Length=2048\n\n{table(FUGAKU, row)}"
    assert rules(text) == []
    assert rules(text.replace("| Yes |", "| No |")) == ["tflops"]
    assert rules(text.replace("2.0GHz", "2.0Hz")) == ["unit"]
    failed = (48, "2.0GHz", "30B", 1, 1, 48, 1, 1536, "No", "29087.7 MiB (OOM)", "-", "-", "02-10")
    assert rules(f"# 30B model\n\n### Sequence Length=2048\n\n{table(FUGAKU, failed)}") == []


@pytest.mark.parametrize(
    "phrase", ["w\\o Activation Checkpointing", "w/o activation checkpointing", "no full recompute"]
)
def test_without_activation_checkpointing(phrase: str) -> None:
    row = (64, "350M", 64, 1, 1, 1, 512, "4000.0 MiB", 10.0, 1.92, "02-15")
    text = f"### 350M model, Sequence Length=1024, {phrase}, PyTorch 1.10\n{table(TITLES, row)}"
    assert rules(text) == []
    assert rules(text.replace(phrase, "\\w Activation Checkpointing")) == ["tflops"]
    noted = (
        text.replace(f", {phrase}", "").replace("1.92", "2.56").replace("02-15", "02-15 with Activation Checkpointing")
    )
    assert rules(noted) == []


@pytest.mark.parametrize("mark", ["OOM", "fail", "x", "X" * 3, "xxxx"])
def test_a_failed_cell_is_no_lost_number(mark: str) -> None:
    row = (48, "181B", 32, 2, 6, 2, 2048, "GB", mark, mark, "see below")
    assert rules(f"# A100\n\n{table(TITLES, row)}") == []


@pytest.mark.parametrize("memory", ["- MiB", "-MiB", "GB", "-"])
def test_a_unit_alone_is_an_empty_cell(memory: str) -> None:
    row = (1, "124M", 1, 1, 1, 1, 1024, memory, 976.2, 0.86, "02-15")
    assert rules(f"### 124M model, Sequence Length=1024, PyTorch 1.7\n{table(TITLES, row)}") == []


def test_estimated_and_unsure_figures() -> None:
    rows = [
        ("1 (max-proc-per-node=4)", "124M", 4, 1, 1, 1, 1024, "28827.7 MiB", 613.2, "1.36^/^^", "02-15"),
        (1024, "124M", 1024, 1, 1, 1, 1024, "- MiB", 2.3, "0.35?", "02-15"),
    ]
    assert rules(f"### 124M model, Sequence Length=1024, PyTorch 1.10\n{table(TITLES, *rows)}") == []


def test_milliseconds_where_the_title_does_not_say_seconds() -> None:
    titles = ("GPUs", "Size", "DP", "PP", "PP Chunks", "Mic-BS", "Glob-BS", "Speed", "TFlops")
    row = (16, "7.5B", 1, 4, 4, 1, 4, "1826ms", 23.2)
    assert rules(f"### 7.5B on V100\n\n{table(titles, row)}") == []
    text = table((*titles[:-2], "Time (ms)", "TFlops"), (*row[:-2], 1826, 23.2))
    assert rules(f"### 7.5B on V100\n\n{text}") == []
    milliseconds = (1, "124M", 1, 1, 1, 1, 1024, "-", "976200 ms", 0.86, "02-15")
    assert rules(f"### 124M model, Sequence Length=1024, PyTorch 1.7\n{table(TITLES, milliseconds)}") == ["unit"]


def test_means_of_two_figures_have_a_third_decimal() -> None:
    rows = [
        (192, 1, 4, 48, 1, 1536, "3534.8833 (one iteration)", 1.16, 7168, 56, "6/27"),
        (384, 2, 4, 48, 1, 1536, 1841.59885, 1.115, 7168, 56, "6/27"),
        (6144, 32, 4, 48, 1, 1536, 252.05295, 0.505, 7168, 56, "6/27"),
        (576, 2, 6, 48, 1, 1536, 1516.9546, 0.905, 7176, 78, "6/27"),
        (1536, 8, 4, 48, 1, 1536, 558.6969, 0.92, 7168, 56, "6/27"),
    ]
    columns = (
        "Nodes",
        "DP",
        "MP",
        "PP",
        "MBS",
        "GBS",
        "Sec/it",
        "TFLOPs",
        "hidden-size",
        "num-attention-heads",
        "Notes",
    )
    text = f"# 30B model on Fugaku\n\n{OPTIONS}### Sequence Length=2048\n\n{table(columns, *rows)}"
    assert rules(text) == []
    assert rules(text.replace("0.505", "0.525")) == ["tflops"]


def test_an_aggregate_whose_last_digit_was_cut() -> None:
    row = (4, "124M", 4, 1, 1, 1, 1024, "4089.5 MiB", 259.9, 1.07, "0.0041", "-")
    titles = (*TITLES[:-1], "Est. Aggr. PetaFLOPs", "Notes")
    text = f"### 124M model, Sequence Length=1024 \\w Activation Checkpointing, PyTorch 1.10\n{table(titles, row)}"
    assert rules(text) == []
    assert rules(text.replace("0.0041", "0.0040")) == rules(text.replace("0.0041", "0.0043")) == ["aggregate"]


def test_a_batch_that_the_text_states_otherwise() -> None:
    row = (1, "18B", 1, 8, 1, 2, 2048, "54GB", 130.43, 143.48, "02-21")
    text = "# A100, SEQ_LEN=2048 / VOCAB_SIZE=250k\n\nNHIDDEN=14336 / NLAYERS=6 / GBS=512\n\n"
    findings = check_text(text + table(TITLES, row))[1]
    assert [finding.rule for finding in findings] == ["tflops"]
    assert findings[0].cause.startswith("GBS 2048 for the 512 that the text above the table states")


def test_another_table_may_repeat_a_row_and_another_day_a_configuration() -> None:
    row = (48, "194B", 8, 8, 6, 1, 2048, "39GB", 183.64, 92.38, "02-20")
    again = (48, "194B", 8, 8, 6, 1, 2048, "39GB", 183.64, 92.38, "02-21")
    later = (48, "194B", 8, 8, 6, 1, 2048, "39GB", 173.92, 97.55, "02-21")
    assert rules(f"# A100\n\n{table(TITLES, row)}\nof these, one fits:\n\n{table(TITLES, row)}") == []
    assert rules(f"# A100\n\n{table(TITLES, row, later)}") == []
    assert (
        rules(f"# A100\n\n{table(TITLES, row, row)}")
        == rules(f"# A100\n\n{table(TITLES, row, again)}")
        == ["duplicate"]
    )


def test_options_that_contradict_the_size_are_not_believed() -> None:
    options = "- --num-layers 12\n- --hidden-size 768\n- --num-attention-heads 12\n\n"
    row = (1024, "350M", 512, 2, 1, 1, 512, "- MiB", 3.2, 0.37, "03-07")
    text = f"# 350M model\n\n{options}### Sequence Length=1024, PyTorch 1.10\n\n{table(TITLES, row)}"
    assert rules(text) == []
    assert rules(text.replace("0.37", "0.13")) == ["tflops"]


FUGAKU_TITLES = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")


@pytest.mark.parametrize(
    ("seconds", "tflops"),
    [
        ("613.2", "1.36"),
        ("613.2^^", "1.36^"),
        ("613.2", "1.36[^1]"),
        ("613.2[^slow]", "1.36 [2]"),
        ("613.2", "(1.36)"),
        ("613.2 s¹", "1.36²"),
        ("*613.2*", "_1.36_"),
        ("[613.2](logs/21103755.out)", "~~1.36~~"),
        ("613.2 ± 0.4", "1.36 +/- 0.01"),
        ("613.2<br>", "$1.36$"),
        ("612.9-613.4", "1.36"),
        ("612.9 – 613.4 s", "1.36"),
    ],
)
def test_a_row_of_the_notes_with_footnotes_and_markup_is_no_finding(seconds: str, tflops: str) -> None:
    line = measurements()["fsweep.t1.L6"]
    row = ("1 (max-proc-per-node=4)", "124M", 4, 1, 1, 1, 1024, f"{line['mem_value']} MiB", seconds, tflops, "10-13")
    heading = "### 124M model, Sequence Length=1024, PyTorch 1.10\n\n"
    assert rules(heading + table(FUGAKU_TITLES, row)) == []
    assert rules(heading + table(FUGAKU_TITLES, (*row[:8], "613.4-612.9", *row[9:]))) == ["cells"], "a slip"
    wrong = tuple(str(cell).replace("1.36", "1.16") for cell in row)
    assert rules(heading + table(FUGAKU_TITLES, wrong)) == ["tflops"]


MEASURED = (48, "30B", 1, 1, 48, 1, 1536, "29138.6 MiB", 17212.8, 0.95, "02-10")
TEXT_30B = (
    "## 30B model, Sequence Length=2048\n\n- --num-layers 48\n- --hidden-size 7168\n- --num-attention-heads 56\n\n"
)


def of_30b(**cells: object) -> str:
    """The notes of a 30B model with one row, whose cells are replaced by title."""
    row = [cells.get(title.replace("/", "_"), value) for title, value in zip(TITLES, MEASURED)]
    return TEXT_30B + table(TITLES, tuple(row))


def test_figures_that_no_run_can_have_are_named() -> None:
    assert rules(of_30b()) == []
    assert rules(of_30b(Sec_it=0)) == ["cells"]
    assert rules(of_30b(Sec_it="nan", TFLOPs="inf")) == ["no-cause"]
    assert rules(of_30b(Sec_it="nan", TFLOPs="inf", Notes="diverged")) == []
    (finding,) = check_text(of_30b().replace("heads 56", "heads 57"))[1]
    assert finding.what == "57 heads do not divide the hidden size 7168 of 30B"


def test_a_bound_of_memory_stands_for_none() -> None:
    for bound in (">32GiB", "> 32 GiB", ">= 32GiB", "≥32GiB"):
        assert rules(of_30b(Mem=bound, Sec_it="x", TFLOPs="x", Notes="Out of memory")) == [], bound

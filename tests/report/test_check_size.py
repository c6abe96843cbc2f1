"""Tests of the check that layers and hidden size are of the size that a table names."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from fugaku_gpt.report.check import check_text
from tests.report.test_check_notes import table
from tests.report.test_notes_table import measurements

TITLES = ("Nodes", "Layers", "Hidden size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "Notes")
REST = (64, 1, 1, 1, 512, "4000.0 MiB", "10.0", "02-15")


def sizes(text: str) -> List[Tuple[int, str, str]]:
    """(line, problem, cause) of the findings of the rule."""
    return [(finding.line, finding.what, finding.cause) for finding in check_text(text)[1] if finding.rule == "size"]


def rows_of(*shapes: Tuple[object, object]) -> str:
    return table(TITLES, *((64, *shape, *REST[:4], 512 * number, *REST[5:]) for number, shape in enumerate(shapes, 1)))


def test_a_heading_of_another_model_is_a_single_finding_in_a_table() -> None:
    text = "### 350M model, Sequence Length=1024\n" + rows_of((12, 768), (12, 768), (24, 1024))
    assert sizes(text) == [
        (4, "the title says 350M, but 12 layers of hidden size 768 in 2 rows", "these are those of 124M")
    ]


def test_figures_that_do_not_follow_are_findings_besides() -> None:
    titles = (*TITLES[:10], "TFLOPs", "Notes")
    row = (64, 12, 768, *REST[:7], "9.99", "02-15")
    findings = check_text("### 350M model, Sequence Length=1024, PyTorch 1.10\n" + table(titles, row))[1]
    assert [finding.rule for finding in findings] == ["peak", "size", "tflops"]


@pytest.mark.parametrize(
    ("title", "shape", "problem", "cause"),
    [
        ("350M model", (12, "-"), "the title says 350M, but 12 layers", "350M has 24 layers of hidden size 1024"),
        ("350M model", ("-", 768), "the title says 350M, but hidden size 768", "350M has 24 layers of hidden"),
        ("A64FX\n\nsize: 350M", (12, "-"), "the text says 350M, but 12 layers", "350M has 24 layers of hidden"),
        ("Size: 13B", (24, 2048), "the title says 13B, but 24 layers of hidden size 2048", "these are those of 1.3B"),
        ("7B model", (12, 1024), "the title says 7B, but 12 layers of hidden size 1024", "another size was meant, or"),
        ("350M model, NLAYERS=12 / NHIDDEN=768", ("-", "-"), "the title says 350M, but 12 layers of hidden size 768",
         "these are those of 124M"),
    ],
)  # fmt: skip
def test_names_and_numbers_are_compared(title: str, shape: Tuple[object, object], problem: str, cause: str) -> None:
    ((_, reported_problem, reported_cause),) = sizes(f"### {title}\n" + rows_of(shape))
    assert reported_problem == problem and reported_cause.startswith(cause)


def test_the_size_of_a_row_is_compared_with_title_and_shape() -> None:
    titles = ("Nodes", "Size", *TITLES[1:])
    text = "### 350M model\n" + table(titles, (64, "124M", 12, 768, *REST), (64, "124M", 24, 1024, *REST))
    assert sizes(text) == [
        (4, "the title says 350M, but 12 layers of hidden size 768", "these are those of 124M"),
        (5, "Size 124M, but 24 layers of hidden size 1024", "these are those of 350M"),
    ]
    assert sizes(text.replace("350M model", "124M and 350M models")) == [sizes(text)[1]]


@pytest.mark.parametrize(
    ("title", "shape"),
    [
        ("124M model", (12, 768)),
        ("162M model", (12, 768)),  # with output weights of its own
        ("70B model", (80, 8192)),  # gated MLP, few heads of keys
        ("30B model, experts", (48, 2048)),
        ("Our model", (12, 768)),
        ("A table of 350M tokens against 124M", (12, 768)),
        ("350M model", ("-", "-")),
        ("350M tokens", (12, 768)),
    ],
)
def test_a_size_that_may_be_right_is_no_finding(title: str, shape: Tuple[object, object]) -> None:
    assert sizes(f"### {title}\n" + rows_of(shape)) == []


def test_the_measured_rows_are_of_their_sizes() -> None:
    """Each row of the notes with its own layers and hidden size, below a title of its model."""
    for name, line in measurements().items():
        title = f"### {line['model']} model, Sequence Length={line['seq_len']}\n"
        assert sizes(title + rows_of((line["layers"] or "-", line["hidden"] or "-"))) == [], name

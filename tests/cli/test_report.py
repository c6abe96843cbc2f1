"""Tests of ``fugaku-gpt report``: table, check and import."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from tests.report.test_imported import ARGUMENTS, log_of
from tests.sweep.fake import leave_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, pace in (("a", 0.25), ("b", 0.75)):
        leave_run(tmp_path / name, load_run_config(preset="tiny", overrides=["layout.dp=2"]), pace=pace)
    leave_run(tmp_path / "c", load_run_config(preset="tiny"), "oom", "MemoryError")
    return tmp_path


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["report", "table", *arguments]) == 0
    return capsys.readouterr().out


def test_markdown_has_the_format_of_the_notes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table(capsys, str(runs), "--format", "md")
    assert text.splitlines()[0] == "### 1.1M model, Sequence Length=128, PyTorch 2.13"
    assert text.splitlines()[3].startswith("| 1 | 1.1M | 1 | 1 | 1 | 4 | 16 | 1028.0 MiB | 0.500 | ")
    assert text.splitlines()[3].endswith(" | 11-14, OOM |")
    assert text.splitlines()[4].endswith(" | 11-14, n=2 |")
    assert table(capsys, str(runs), "--format", "md") == text


def test_csv_and_json_carry_raw_values_with_units(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(table(capsys, str(runs), "--format", "json"))
    merged = rows[1]
    assert merged["seconds_per_iteration"] == 0.5 and merged["torch_build"] == "2.13.0+cpu"
    assert [repeat["seconds_per_iteration"] for repeat in merged["repeats"]] == [0.25, 0.75]
    assert merged["tflops_per_node_exact"] > merged["tflops_per_node_notes"] > 0
    assert merged["runs"] == [str(runs / "a"), str(runs / "b")] and merged["git_commit"] == "0123abc"
    assert rows[0]["status"] == "oom" and rows[0]["reason"] == "MemoryError"
    (_, line) = csv.DictReader(io.StringIO(table(capsys, str(runs), "--format", "csv")))
    assert float(line["seconds_per_iteration"]) == 0.5 and line["rss_max_bytes_per_rank"] == str(2**28)
    assert line["freq_mhz_applied"] == "" and line["first_validation_loss"] == "8.0"


def test_the_terminal_format_shows_the_validation_loss(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(capsys, str(runs)).splitlines()
    assert lines[0] == "1.1M model, Sequence Length=128, PyTorch 2.13"
    assert "8.000 to 4.500" in lines[3] and max(len(line) for line in lines) <= 140


@pytest.mark.parametrize("form", ["table", "md", "csv", "json", "html"])
def test_a_damaged_run_is_named_and_other_runs_are_shown(
    runs: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    (runs / "c" / "result.json").write_text("[")
    assert run(["report", "table", str(runs), "--format", form]) == 0
    text, warnings = capsys.readouterr()
    assert "unreadable" in text and ("n=2" in text or form == "json")
    assert warnings.startswith("warning: ") and "c/result.json" in warnings and warnings.count("\n") == 1


def test_si_divides_by_a_thousand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(tmp_path / "big", load_run_config(preset="tiny", overrides=["model.name=big"]), pace=1e-8)

    def petaflops(*options: str) -> float:
        return float(table(capsys, str(tmp_path), "--format", "md", *options).splitlines()[-1].split(" | ")[10])

    assert petaflops("--si") / petaflops() == pytest.approx(1.024, rel=1e-3)


def test_no_runs_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "table", str(tmp_path)]) == 2
    assert "holds no run directory" in capsys.readouterr().err
    assert run(["report", "table"]) == 2


def test_html_is_a_single_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table(capsys, str(runs), "--format", "html")
    assert text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n") and "11-14, OOM" in text


def test_energy_columns_are_optional(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_energy = table(capsys, str(runs), "--format", "md", "--energy")
    assert "| W/node | J/it | J/token | Notes |" in with_energy
    header, dashes, first = with_energy.splitlines()[1:4]
    assert header.count("|") == dashes.count("|") == first.count("|") == 17
    assert "W/node" not in table(capsys, str(runs), "--format", "md")
    assert "J/token" in table(capsys, str(runs), "--energy")


ROWS = """\
id,hardware,model,layers,hidden,heads,vocab,seq_len,nodes,ranks_per_node,dp,tp,pp,micro_batch,global_batch,torch,sec_per_it,status
t.1,A64FX Fugaku,tiny,4,128,4,2048,128,1,2,2,1,1,4,16,,0.50,ok
t.2,A64FX Fugaku,tiny,4,128,4,2048,128,1,1,1,1,1,4,16,1.7,0.50,fail
t.3,V100,tiny,4,128,4,2048,128,1,4,4,1,1,4,16,,0.50,ok
"""


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "rows.csv").write_text(ROWS, encoding="utf-8")
    return tmp_path / "reference" / "rows.csv"


def test_runs_are_printed_beside_reference_rows_in_every_format(
    runs: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(runs), "--beside", f"{reference}:hardware=A64FX Fugaku"]
    text = table(capsys, *arguments, "--format", "md")
    assert text.count("###") == 3 and text == table(capsys, *arguments, "--format", "md")
    assert "| 0.500 | 0.500 | 1.000 | inside 0.250 to 0.750 | - | 0.03 | t.1; 11-14, n=2 |" in text
    first, second, third = json.loads(table(capsys, *arguments, "--format", "json"))
    assert (first["ratio"], first["is_outside_of_spread"], first["repeats"]) == (1.0, False, 2)
    assert (second["reference"], second["status"]) == ("t.2", None) and third["reference"] is None
    lines = list(csv.DictReader(io.StringIO(table(capsys, *arguments, "--format", "csv"))))
    assert [line["ratio"] for line in lines] == ["1.0", "", ""] and set(lines[0]) == set(first)
    assert table(capsys, *arguments, "--format", "html").startswith("<!DOCTYPE html>")
    assert "Ref. Sec/it" in table(capsys, *arguments).splitlines()[1]


def test_a_damaged_run_beside_reference_rows_is_named(
    runs: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "c" / "result.json").write_text("[")
    assert run(["report", "table", str(runs), "--beside", str(reference), "--format", "md"]) == 0
    text, warnings = capsys.readouterr()
    assert "t.1" in text and warnings.startswith("warning: ") and "c/result.json" in warnings


def test_nothing_was_run_yet(tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    folders = [str(tmp_path / name) for name in ("empty", "none")]
    assert run(["report", "table", *folders, "--beside", str(reference), "--format", "csv"]) == 0
    captured = capsys.readouterr()
    lines = list(csv.DictReader(io.StringIO(captured.out)))
    assert [line["reference"] for line in lines] == ["t.1", "t.2", "t.3"]
    assert not any(line["seconds_per_iteration"] or line["ratio"] or line["runs"] for line in lines)
    assert captured.err.splitlines() == [
        f"note: {folders[0]}: no run is in it: nothing was run",
        f"note: {folders[1]}: no such folder: nothing was run",
    ]


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ("rows.txt", "--beside rows.txt: neither a CSV nor a folder; valid: ROWS.csv, "),
        ("none.csv", "none.csv: no such file"),
        ("reference", "reference: no imported sheet in it"),
        ("reference/rows.csv:nods=1", "nods"),
        ("reference/rows.csv:nodes=2", "rows.csv: no row of it is left"),
    ],
)
def test_a_reference_that_cannot_be_read_is_a_usage_error(
    runs: Path, reference: Path, beside: str, message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(runs)
    assert run(["report", "table", "a", "--beside", beside]) == 2
    assert message in capsys.readouterr().err


def test_beside_has_no_aggregates_and_no_energy(
    runs: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--si", "--energy"):
        assert run(["report", "table", str(runs), "--beside", str(reference), option]) == 2
        assert "has neither aggregates nor energy" in capsys.readouterr().err


def test_a_sheet_of_bullets_is_imported_and_shown(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.md"
    sheet.write_text("- global batch size 16, recompute=none, fp32, seq_len=128: ~ 64 samples/s\n", encoding="utf-8")
    arguments = ["report", "import", "--form", "bullets", str(sheet), "--out", str(runs / "sheet")]
    assert run([*arguments, "--set", "model=1.1M", "--set", "hardware=TPU v5e-8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("1.1M model on TPU v5e-8 (reference), Sequence Length=128\n")
    assert captured.err == "rows of reference: 1\n"
    text = table(capsys, str(runs), "--format", "md")
    assert text.count("| Samples/s |") == 2 and "| 0.250 | - | - | 64 | - | fp32, 64 samples/s |" in text
    lines = table(capsys, str(runs), "--beside", str(runs / "sheet"), "--format", "md").splitlines()
    (merged,) = [line for line in lines if "n=2" in line]
    assert "| 0.250 | 0.500 | 2.000 | inside 0.250 to 0.750 | - |" in merged
    assert merged.endswith(" | sheet.md:1; reference: fp32, 64 samples/s; 11-14, n=2 |")
    sheet.write_text("text\n- global batch size 16: fast\n", encoding="utf-8")
    assert run(arguments) == 2 and f"{sheet}:2: 'fast': neither a rate" in capsys.readouterr().err


CLEAN = """\
### 124M model, Sequence Length=1024, PyTorch 1.10
| Nodes | Size | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs | Est. Aggr. PetaFLOPs | Notes |
| ----: | ---: | -: | -: | -: | --: | --: | --: | -----: | -----: | -------------------: | ----: |
| 1 (max-proc-per-node=4) | 124M | 4 | 1 | 1 | 1 | 1024 | 28827.7 MiB | 613.2 | 1.36 | 0.001 | 02-15, 21103755 |
| 512 (2.2GHz) | 124M | 512 | 1 | 1 | 1 | 1024 | 8347.0 MiB | 3.2 | 0.50 | 0.250 | 02-15 |
"""


def test_check_is_silent_about_a_correct_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").write_text(CLEAN)
    assert run(["report", "check", str(tmp_path / "notes.md")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "2 rows, 0 findings\n"


def test_check_reports_line_rule_and_cause_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").write_text(CLEAN.replace("2.2GHz", "2.2Hz"))
    (tmp_path / "clean.md").write_text(CLEAN)
    arguments = ["report", "check", str(tmp_path / "clean.md"), str(tmp_path / "notes.md")]
    assert run(arguments) == 3
    line = capsys.readouterr().out
    assert line == f"{tmp_path}/notes.md:5: [unit] clock '2.2Hz' is not in GHz (2.2 GHz was meant)\n"
    assert run([*arguments, "--format", "json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 4
    (finding,) = report["findings"]
    assert (finding["file"], finding["line"], finding["rule"]) == (f"{tmp_path}/notes.md", 5, "unit")
    assert run([*arguments, "--format", "md"]) == 3
    assert capsys.readouterr().out.splitlines()[0] == "| file | line | rule | what | cause |"


def test_check_names_columns_that_no_rule_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "| GPUs | TP | PP | DP | MFU | TFLOPs/GPU |\n|--|--|--|--|--|--|\n| 8 | 8 | 1 | 1 | 31% | 97 |\n"
    (tmp_path / "notes.md").write_text(text)
    assert run(["report", "check", str(tmp_path / "notes.md")]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "columns that no rule reads: MFU"
    assert run(["report", "check", str(tmp_path / "notes.md"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["unread"] == {"MFU": 1}


def test_check_changes_nothing_and_takes_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.md"
    file.write_text(CLEAN.replace("0.250", "0.256"))
    assert run(["report", "check", str(file)]) == 3 and run(["report", "check", "--si", str(file)]) == 0
    assert file.read_text() == CLEAN.replace("0.250", "0.256")
    file.write_text(CLEAN.replace("28827.7 MiB", "68827.7 MiB"))
    assert run(["report", "check", str(file)]) == 3
    assert run(["report", "check", "--machine", "other", str(file)]) == 0
    capsys.readouterr()


def test_check_refuses_unreadable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "check", str(tmp_path / "none.md")]) == 2
    assert "none.md: cannot be read" in capsys.readouterr().err
    (tmp_path / "other.md").write_bytes(b"\xff\xfe| a | b |\n")
    assert run(["report", "check", str(tmp_path / "other.md")]) == 2
    assert "no table of configurations" in capsys.readouterr().err


def test_our_own_tables_pass_the_check(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.md").write_text(table(capsys, str(runs), "--format", "md"))
    assert run(["report", "check", str(tmp_path / "own.md")]) == 0, capsys.readouterr().out


def test_a_log_is_imported_to_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.out").write_text(log_of(ARGUMENTS))
    arguments = ["report", "import", str(tmp_path / "run.out"), "--out", str(tmp_path / "row")]
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert "not in the log: nodes; give them with --set" in captured.err
    assert run([*arguments, "--set", "nodes=4"]) == 0
    assert "0.90" in capsys.readouterr().out
    assert "| 4 | 1.3B | 1 | 4 | 1 | 2 | 1024 | - | 3231.4 | 0.90 | 0.004 |" in table(
        capsys, str(tmp_path / "row"), "--format", "md"
    )
    assert run([*arguments, "--set", "nods=4"]) == 2 and "did you mean nodes" in capsys.readouterr().err

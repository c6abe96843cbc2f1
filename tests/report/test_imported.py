"""Tests of logs of other trainers as rows, with what the user adds, and of this trainer's logs read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.report.check import check_text
from fugaku_gpt.report.collect import collect_rows, read_run
from fugaku_gpt.report.imported import (
    import_logs,
    imported_row,
    is_imported,
    understood,
    unknown_settings,
)
from fugaku_gpt.report.logged_run import LoggedRun, parse_settings
from fugaku_gpt.report.notes_table import notes_cell, notes_tables, row_cells
from fugaku_gpt.report.reparse import DAMAGED, logs_of, reparse
from fugaku_gpt.report.rows import ResultRow
from tests.support.job_records import record_submission
from tests.sweep.fake import leave_run

ARGUMENTS = {
    "bf16": "False",
    "checkpoint_activations": "True",
    "fp16": "False",
    "global_batch_size": "1024",
    "hidden_size": "2048",
    "micro_batch_size": "2",
    "num_attention_heads": "32",
    "num_layers": "24",
    "padded_vocab_size": "50304",
    "params_dtype": "torch.float32",
    "pipeline_model_parallel_size": "1",
    "seq_length": "1024",
    "tensor_model_parallel_size": "4",
    "vocab_size": "50257",
    "world_size": "4",
}


def log_of(
    arguments: Dict[str, str], seconds: float = 3231.4, tflops: float = 0.90, lines: int = 3, planned: int = 3
) -> str:
    """A log as Megatron-DeepSpeed prints it; by default the notes' 1.3B on four nodes, TP=4."""
    text = "------------------------ arguments ------------------------\n"
    text += "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in arguments.items())
    text += "-------------------- end of arguments ---------------------\n"
    for number in range(1, lines + 1):
        text += (
            f" iteration {number:8d}/{planned:8d} | consumed samples: {number * 1024:12d} | "
            f"elapsed time per iteration (s): {seconds:.1f} | learning rate: 1.000E-05 | global batch size:  1024 | "
            f"lm loss: {11.0 - number:.6E} | loss scale: 1.0 | grad norm: 1.000 | "
            f"number of skipped iterations:   0 | samples per second: 0.317 | TFLOPs: {tflops:.2f} |\n"
        )
    return text


def imported(tmp_path: Path, text: str, *settings: str) -> ResultRow:
    (tmp_path / "run.out").write_text(text)
    return import_logs([tmp_path / "run.out"], tmp_path / "imported", parse_settings(settings))


def test_a_log_becomes_the_row_that_the_notes_have(tmp_path: Path) -> None:
    row = imported(tmp_path, log_of(ARGUMENTS), "nodes=4", "torch=1.7", "date=02-15")
    assert row_cells(row)[:-1] == ["4", "1.3B", "1", "4", "1", "2", "1024", "-", "3231.4", "0.90", "0.004"]
    assert notes_cell(row) == "02-15, from a log of megatron"
    assert notes_tables([row]).startswith(
        "### 1.3B model, Sequence Length=1024, Activation Checkpointing, PyTorch 1.7\n"
    )
    assert (row.first_loss, row.last_loss, row.iterations, row.dtype, row.status) == (10.0, 8.0, 3, "float32", "ok")
    assert row.tflops_exact is not None and row.tokens_per_second == pytest.approx(1024 * 1024 / 3231.4)
    assert read_run(tmp_path / "imported") == row and collect_rows([tmp_path])[0] == [row]


def test_values_that_nobody_gives_stay_unknown(tmp_path: Path) -> None:
    row = imported(tmp_path, log_of(ARGUMENTS))
    assert row.nodes is None and row_cells(row)[0] == "-" and row_cells(row)[9:11] == ["-", "-"]
    assert "the log claims 0.9 TFLOPs per rank" in row.remarks
    bare = imported(tmp_path, log_of({}), "nodes=4")
    assert (bare.dp, bare.tp, bare.pp, bare.micro_batch, bare.seq_len, bare.size) == (None, None, None, None, None, "-")
    assert bare.global_batch == 1024 and bare.tflops_notes is None and row_cells(bare)[2:6] == ["-"] * 4


def test_missing_values_are_derived_from_given_values(tmp_path: Path) -> None:
    row = imported(tmp_path, log_of({**ARGUMENTS, "world_size": "16"}), "ranks_per_node=4")
    assert (row.nodes, row.dp, row.ranks_per_node) == (4, 4, 4)
    without = {name: value for name, value in ARGUMENTS.items() if name not in ("padded_vocab_size", "world_size")}
    row = imported(tmp_path, log_of({**without, "make_vocab_size_divisible_by": "128"}), "nodes=4", "dp=1")
    assert row.tflops_notes == pytest.approx(0.90, abs=0.005) and row.ranks_per_node == 1


def test_recompute_decides_the_formula_and_is_not_guessed(tmp_path: Path) -> None:
    full = imported(tmp_path, log_of(ARGUMENTS), "nodes=4").tflops_notes
    without = imported(tmp_path, log_of({**ARGUMENTS, "checkpoint_activations": "False"}), "nodes=4").tflops_notes
    assert full is not None and without is not None and without == pytest.approx(full * 3 / 4)
    lm = {name: value for name, value in ARGUMENTS.items() if name != "checkpoint_activations"}
    assert imported(tmp_path, log_of({**lm, "recompute_granularity": "full"}), "nodes=4").tflops_notes == full
    assert imported(tmp_path, log_of({**lm, "recompute_granularity": "None"}), "nodes=4").tflops_notes == without
    unknown = imported(tmp_path, log_of(lm), "nodes=4")
    assert unknown.tflops_notes is None and unknown.tflops_exact is not None
    assert imported(tmp_path, log_of(lm), "nodes=4", "recompute=true").tflops_notes == full


def test_a_claim_that_differs_from_the_formula_is_a_remark(tmp_path: Path) -> None:
    assert not any("claims" in remark for remark in imported(tmp_path, log_of(ARGUMENTS), "nodes=4").remarks)
    row = imported(tmp_path, log_of(ARGUMENTS, tflops=0.68), "nodes=4")
    assert "the log claims 0.68 TFLOPs per rank: 0.76 times the formula" in row.remarks
    per_rank = imported(tmp_path, log_of({**ARGUMENTS, "world_size": "16"}, tflops=0.2246), "nodes=4")
    assert per_rank.tflops_notes == pytest.approx(0.90, abs=0.005)
    assert not any("claims" in remark for remark in per_rank.remarks)  # 0.2246 is printed as 0.22
    other = imported(tmp_path, log_of({**ARGUMENTS, "swiglu": "True"}), "nodes=4")
    assert "TFLOPs as of a plain GPT, but swiglu" in other.remarks


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("", "unfinished", ""),
        ("ValueError: no\n", "failed", "ValueError: no"),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate\n",
            "oom",
            "RuntimeError: CUDA out of memory. Tried to allocate",
        ),
    ],
)
def test_how_an_unfinished_log_ended(tmp_path: Path, text: str, status: str, reason: str) -> None:
    row = imported(tmp_path, log_of(ARGUMENTS, planned=100) + text)
    assert (row.status, row.reason) == (status, reason)
    assert imported(tmp_path, log_of(ARGUMENTS, planned=100) + text, "status=ok").status == "ok"


@pytest.mark.parametrize("planned, status", [(2, "ok"), (3, "ok"), (4, "unfinished")])
def test_a_log_of_as_many_iterations_as_planned_or_more_ended_well(tmp_path: Path, planned: int, status: str) -> None:
    assert imported(tmp_path, log_of(ARGUMENTS, planned=planned)).status == status


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nods=4", "did you mean nodes"),
        ("nodes", "not KEY=VALUE"),
        ("nodes=four", "expected a number"),
        ("nodes=0", "at least 1"),
    ],
)
def test_settings_are_checked(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_settings([setting])


def test_texts_without_iterations_and_occupied_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no iteration line"):
        imported(tmp_path, "hello\n")
    with pytest.raises(UsageError, match="cannot be read"):
        import_logs([tmp_path / "none"], tmp_path / "x", parse_settings([]))
    leave_run(tmp_path / "run", load_run_config(preset="tiny"))
    (tmp_path / "run.out").write_text(log_of(ARGUMENTS))
    with pytest.raises(UsageError, match="already holds a run"):
        import_logs([tmp_path / "run.out"], tmp_path / "run", parse_settings([]))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 1}', '{"version": 9, "given": {}, "arguments": {}, "logs": []}']
)
def test_a_damaged_import_is_named(tmp_path: Path, text: str) -> None:
    imported(tmp_path, log_of(ARGUMENTS))
    (tmp_path / "imported" / "imported.json").write_text(text)
    with pytest.raises(UsageError, match="imported.json"):
        imported_row(tmp_path / "imported")


# reparse


def our_line(number: int, seconds: float = 0.25) -> str:
    return (
        f"iteration {number}/4 | consumed samples: {number * 16} | elapsed time per iteration (s): {seconds:.3f} | "
        f"global batch size: 16 | lm loss: {8 - number:.6f} | TFLOPs: 0.039 (exact 0.042) | rank RSS: 366 MiB | "
        "node used: 1712 MiB |\n"
    )


def run_with_log(tmp_path: Path, log: str, metrics: Optional[List[Dict[str, Any]]] = None) -> Path:
    """Makes the directory of a run of this trainer whose metrics are lost except for ``metrics``."""
    leave_run(tmp_path / "run", load_run_config(preset="tiny"))
    (tmp_path / "run" / "log.txt").write_text(log)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in metrics or []))
    return tmp_path / "run"


def test_lost_metrics_are_restored_from_the_log(tmp_path: Path) -> None:
    recorded_line = {"kind": "iteration", "iteration": 1, "seconds": 0.2504, "loss": 7.0}
    directory = run_with_log(tmp_path, "".join(our_line(number) for number in (1, 2, 3, 4)), [recorded_line])
    done = reparse(directory)
    assert (done.trainer, done.lines, done.added) == ("fugaku_gpt", 4, 3)
    lines = RunDirectory(directory).metrics("iteration")
    assert lines[0]["seconds"] == 0.2504 and [line["iteration"] for line in lines] == [1, 2, 3, 4]
    result = RunDirectory(directory).result()
    assert result is not None and result.summary["seconds_per_iteration"] == 0.25
    assert read_run(directory).seconds_per_iteration == 0.25
    assert reparse(directory).added == 0 and RunDirectory(directory).metrics("iteration") == lines


def test_the_batch_that_a_short_line_does_not_state_is_the_runs(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    ramp = ["training.ramp_start=8", "training.ramp_increment=8", "training.ramp_samples=16", "training.iterations=5"]
    leave_run(directory, load_run_config(preset="tiny", overrides=[*ramp, "training.global_batch=24"]))
    line = "iteration {}/5 | loss: 7.5 | s/it: 0.2500 | tok/s: 4096 | TFLOPs: 0.039 | RSS: 0.5 GiB | ETA: 0:01:00\n"
    (directory / "log.txt").write_text("".join(line.format(number) for number in (1, 2, 3, 5)))
    (directory / "metrics.jsonl").write_text("")
    assert reparse(directory).added == 4
    lines = RunDirectory(directory).metrics("iteration")
    assert [line["global_batch"] for line in lines] == [8, 16, 24, 24]
    assert lines[0]["tflops_notes"] == 0.039 and lines[0]["rss_max_bytes"] == 2**29


def test_a_damaged_metrics_file_is_repaired_and_backed_up(tmp_path: Path) -> None:
    directory = run_with_log(tmp_path, our_line(1) + our_line(2))
    (directory / "metrics.jsonl").write_text(
        '{"kind": "iter\n' + json.dumps({"kind": "validation", "iteration": 0, "loss": 8.0})
    )
    with pytest.raises(UsageError, match="not JSON lines"):
        read_run(directory)
    done = reparse(directory)
    assert done.added == 2 and any(DAMAGED in note for note in done.notes)
    assert read_run(directory).seconds_per_iteration == 0.25 and (directory / DAMAGED).exists()


def test_the_ranks_output_of_a_job_is_a_log(tmp_path: Path) -> None:
    directory = run_with_log(tmp_path, "")
    ranks = directory / "output.123" / "0" / "1"
    ranks.mkdir(parents=True)
    (ranks / "stdout.1.10").write_text("nothing\n")
    (ranks / "stdout.1.2").write_text(our_line(1))
    record_submission(directory, "123")
    names = [path.name for path in logs_of(directory)]
    assert names.index("stdout.1.2") < names.index("stdout.1.10")
    assert reparse(directory).added == 1


def test_logs_of_ranks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"output.123/0/{rank}/stdout.{attempt}.{rank}" for rank in (2, 10) for attempt in (1, 9, 10, 100)]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    assert [str(path.relative_to(tmp_path)) for path in logs_of(tmp_path)] == names


def test_a_job_that_ran_another_trainer_becomes_a_row(tmp_path: Path) -> None:
    directory = run_with_log(tmp_path, "")
    (directory / "run.123.out").write_text(log_of({**ARGUMENTS, "world_size": "4"}))
    record_submission(directory, "123")
    done = reparse(directory)
    assert done.trainer == "megatron" and is_imported(directory)
    row = read_run(directory)
    assert (row.job_id, row.nodes, row.size, row.ranks_per_node) == ("123", 1, "1.3B", 4)


def test_a_folder_of_nothing_but_a_log_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "other.log").write_text(log_of(ARGUMENTS))
    reparse(tmp_path, parse_settings(["nodes=4"]))
    assert read_run(tmp_path).nodes == 4
    again = reparse(tmp_path)
    assert again.lines == 3 and again.added == 0 and read_run(tmp_path).nodes == 4


def test_missing_logs_and_logs_without_iterations_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no log"):
        reparse(tmp_path)
    (tmp_path / "a.log").write_text("nothing\n")
    assert reparse(tmp_path).notes == ("no iteration line in a.log",)


NEOX = """\
-------------------- arguments --------------------
  hidden_size ..................... 2048........................updated
  num_layers ...................... 24..........................updated
  pipe_parallel_size .............. 0...........................default
  model_parallel_size ............. 2...........................updated
  global_num_gpus ................. 8...........................updated
  train_micro_batch_size_per_gpu .. 4...........................updated
---------------- end of arguments ----------------
"""
NEOX_LINE = (
    " samples/sec: {rate:.3f} | iteration {number:8d}/      50 | elapsed time per iteration (ms): {time:.1f} |"
    " learning rate: 1.234E-04 | approx flops per GPU: 150.3TFLOPS | lm_loss: {loss:.6E} | loss scale: 1.0 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def test_a_log_of_gpt_neox(tmp_path: Path) -> None:
    text = NEOX + "".join(
        NEOX_LINE.format(rate=50 + number, number=10 * number, time=9900.0 - 100 * number, loss=8.0 - number)
        for number in (1, 2, 3)
    )
    text += " validation results at iteration 30 | lm_loss value: 6.9E+00 | lm_loss_ppl value: 990 |\n"
    row = imported(tmp_path, text)
    assert (row.first_loss, row.last_loss, row.last_validation_loss, row.iterations) == (7.0, 5.0, 6.9, 30)
    assert row.seconds_per_iteration == pytest.approx(9.65)  # the line of iterations 1 to 10 has the warm-up in it
    assert (row.tp, row.pp, row.dp, row.micro_batch, row.trainer) == (2, 1, 4, 4, "gpt-neox")
    assert "the log claims 150.3 TFLOPs per rank" in row.remarks
    lines = RunDirectory(tmp_path / "imported").metrics("iteration")
    assert [line["samples_per_second"] for line in lines] == [51.0, 52.0, 53.0]
    counts = "iteration lines: 3, validations: 1, lines with figures not understood: 0"
    assert understood(tmp_path / "imported") == counts


def test_milliseconds_without_a_blank_and_a_total_norm(tmp_path: Path) -> None:
    line = "[2024-02-27 15:45:08] iteration 13 / 118 | elapsed time per iteration(ms): 17658.3 | lm loss: 6.2E-01 |"
    row = imported(tmp_path, f"{line}total grad norm: 2.773 | global batch size: 2880 |\n")
    assert (row.seconds_per_iteration, row.global_batch) == (pytest.approx(17.6583), 2880)
    assert RunDirectory(tmp_path / "imported").metrics("iteration")[0]["grad_norm"] == 2.773


def test_warm_up_is_a_matter_of_iterations_and_not_of_lines(tmp_path: Path) -> None:
    def seconds(first: int, times: List[float]) -> Optional[float]:
        lines = (
            f" iteration {first + n}/ 250000 | elapsed time per iteration (s): {t} |\n" for n, t in enumerate(times)
        )
        return imported(tmp_path, "".join(lines)).seconds_per_iteration

    assert seconds(5426, [4.0, 6.0, 9.0]) == 6.0  # a piece of a log
    assert seconds(1, [4.0, 6.0, 9.0, 11.0]) == 10.0
    assert seconds(2, [4.0, 6.0, 9.0, 11.0]) == 9.0  # Megatron's second iteration is still warm-up
    assert seconds(1, [4.0]) == 4.0


def test_norms_that_are_not_finite_are_a_remark(tmp_path: Path) -> None:
    line = " iteration {}/ 10 | elapsed time per iteration (ms): 4247.9 | lm loss: {} | grad norm: {} |\n"
    row = imported(tmp_path, line.format(1, "2.0", "nan") + line.format(2, "inf", "nan") + line.format(3, "1.0", "1.0"))
    assert "grad norm not finite in 2 of 3 lines" in row.remarks and "loss not finite in 1 of 3 lines" in row.remarks


def test_lines_and_fields_not_understood_are_counted(tmp_path: Path) -> None:
    text = " iteration 1/ 2 | elapsed time per iteration (s): 1.0 | weather: 3 | lm loss: 2.0 |\n"
    text += " at iteration two | loss so far: 2.5 |\n validation loss at the end | lm loss value: 2.0 |\nan iteration\n"
    row = imported(tmp_path, text)
    assert "2 lines not understood" in row.remarks
    assert understood(tmp_path / "imported") == (
        "iteration lines: 1, validations: 0, lines with figures not understood: 2, field 'weather' not understood: 1"
    )


def test_replicas_are_derived_from_nodes_and_from_the_world(tmp_path: Path) -> None:
    line = " iteration 1/ 1 | elapsed time per iteration (s): 1.0 |\n"
    assert imported(tmp_path, line, "nodes=4", "ranks_per_node=4", "tp=2", "pp=2").dp == 4
    world = (
        "using world size: 64, data-parallel size: 4, context-parallel size: 2, hierarchical context-parallel sizes: "
        "None, tensor-model-parallel size: 4, pipeline-model-parallel size: 2\n"
    )
    row = imported(tmp_path, world + line)
    assert (row.dp, row.tp, row.pp) == (4, 4, 2)


def test_settings_that_speeds_need_and_nobody_states_are_listed(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        " iteration 3/ 9 | elapsed time per iteration (ms): 900.0 | global batch size: 8 | lm loss: 1.0 |\n"
        " iteration 4/ 9 | elapsed time per iteration (ms): 900.0 | global batch size: 8 | lm loss: 1.0 |\n"
    )
    given = [
        "nodes=2",
        "dp=2",
        "tp=1",
        "pp=1",
        "micro_batch=1",
        "layers=2",
        "hidden=64",
        "seq_len=32",
        "vocab_size=512",
    ]
    row = import_logs([log], tmp_path / "row", parse_settings(given))
    assert row.tflops_notes is None and unknown_settings(tmp_path / "row") == ["padded_vocab", "recompute"]
    row = import_logs([log], tmp_path / "row", parse_settings([*given, "padded_vocab=512", "recompute=no"]))
    assert row.tflops_notes is not None and unknown_settings(tmp_path / "row") == []


def test_the_table_of_an_imported_log_is_no_finding(tmp_path: Path) -> None:
    """A dash stands for a setting that the log does not state; it is no lost cell."""
    log = tmp_path / "a.log"
    log.write_text(" iteration 3/ 9 | elapsed time per iteration (ms): 900.0 | lm loss: 1.0 |\n")
    text = notes_tables([import_logs([log], tmp_path / "row", LoggedRun())])
    assert text.splitlines()[-1].startswith("| - | - | - |") and check_text(text) == (1, [])
    assert [finding.rule for finding in check_text(text.replace("from a log of", "by"))[1]].count("missing") == 5


@pytest.mark.parametrize("digits", ["²", "①", "1²"])
def test_an_argument_of_digits_that_are_no_number_is_left_out(tmp_path: Path, digits: str) -> None:
    arguments = {**ARGUMENTS, "num_layers": digits, "make_vocab_size_divisible_by": digits, "global_num_gpus": digits}
    del arguments["padded_vocab_size"]
    row = imported(tmp_path, log_of(arguments))
    assert row.tflops_notes is None and row.tp == 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("retention_state=-1", "must be 0 or 1"),
        ("retention_state=2", "must be 0 or 1"),
        ("nodes=0", "must be at least 1"),
    ],
)
def test_settings_with_few_values_are_checked(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"--set {setting}: {message}$"):
        parse_settings([setting])
    assert parse_settings(["retention_state=0"]).retention_state == 0

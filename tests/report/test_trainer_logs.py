"""Tests of iteration lines in logs of this trainer, Megatron-DeepSpeed, Megatron-LM, NeoX and NeMo, intact and torn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Dict, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.report.trainer_logs import MEGATRON, NEMO, NEOX, OURS, read_log, read_log_files
from fugaku_gpt.training.log import IntervalMeasurements, TrainingLog
from fugaku_gpt.training.trainer import Step

quick = settings(max_examples=80, deadline=None)

DEEPSPEED = (
    " iteration        2/   95367 | consumed samples:         2048 | consumed tokens:      2097152 | "
    "elapsed time per iteration (s): 36.10 | learning rate: 7.610E-06 | global batch size:  1024 | "
    "lm loss: 1.943883E+00 | loss scale: 4096.0 | grad norm: 0.128 | num zeros: 0.0 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 28.366 | TFLOPs: 0.48 |"
)
READ = {
    "iteration": 2,
    "consumed_samples": 2048,
    "consumed_tokens": 2097152,
    "seconds": 36.1,
    "lr": 7.61e-6,
    "global_batch": 1024,
    "loss": 1.943883,
    "loss_scale": 4096.0,
    "grad_norm": 0.128,
    "zeros": 0.0,
    "skipped_iterations": 0,
    "nan_iterations": 0,
    "samples_per_second": 28.366,
    "tflops_logged": 0.48,
}
ARGUMENTS = """\
------------------------ arguments ------------------------
  checkpoint_activations .......................... True
  data_path ....................................... ['a', 'b c']
  num_layers ...................................... 24
  num_layers_per_virtual_pipeline_stage_and_longer_names .. None
-------------------- end of arguments ---------------------
  num_layers ...................................... 99
"""


def test_fields_without_colons_as_megatron_lm_had_in_2019() -> None:
    line = (
        " iteration      100/  320000 | elapsed time per iteration (ms): 523.1 | learning rate 1.500E-04 | "
        "lm loss 6.733333E+00 | loss scale 65536.0 |"
    )
    log = read_log(line)
    assert log.iterations == (
        {"iteration": 100, "seconds": 0.5231, "lr": 1.5e-4, "loss": 6.733333, "loss_scale": 65536.0},
    )
    assert log.unknown_fields == {} and log.total == 320000


@pytest.mark.parametrize("total", ["infinity", "inf"])
def test_a_run_without_end_has_no_total(total: str) -> None:
    log = read_log(DEEPSPEED.replace("95367", total))
    assert log.iterations == (READ,) and log.total is None


def test_megatron_deepspeed() -> None:
    log = read_log(DEEPSPEED)
    assert log.trainer == MEGATRON and log.total == 95367 and log.torn == 0
    assert log.iterations == (READ,)


@pytest.mark.parametrize(
    "prefix",
    [
        "[default7]:",
        " 0: ",
        "[2024-05-27 15:23:07] ",
        "[default0]: [2025-05-27 15:23:07]",
        "12: \x1b[32m",
        "2024-05-27T15:23:07 ",
    ],
)
def test_prefixes_and_colours(prefix: str) -> None:
    assert read_log(prefix + DEEPSPEED + "\x1b[0m\r\n").iterations == (READ,)


def test_megatron_lm_counts_milliseconds() -> None:
    line = (
        " [2025-05-27 15:23:07] iteration        1/    24000 | consumed samples:          1024 | "
        "elapsed time per iteration (ms): 271607.0 | throughput per GPU (TFLOP/s/GPU): 40.4 | "
        "learning rate: 1.500000E-06 | global batch size:  1024 | lm loss: 1.192634E+01 | load_balancing_loss: 1.0 |"
    )
    (read,) = read_log(line).iterations
    assert (
        read["seconds"] == pytest.approx(271.607)
        and read["tflops_logged"] == 40.4
        and "load_balancing_loss" not in read
    )


NEMO_LINE = (
    "[2025-11-20T14:55:23+08:00] retraining/0 Training epoch 0, iteration {0}/99 | lr: 1.469e-05 | "
    "global_batch_size: 128 | global_step: {0} | reduced_train_loss: 6.265 | train_step_timing in s: 12.22 | "
    "TFLOPS_per_GPU: 1.249e+03 | tokens_per_sec_per_gpu: 1.073e+04 | consumed_samples: 12544"
)


def test_nemo_counts_steps_from_0_and_puts_no_bar_at_the_end() -> None:
    log = read_log("\n".join(NEMO_LINE.format(step) for step in (0, 99)))
    assert log.trainer == NEMO and log.total == 100 and [line["iteration"] for line in log.iterations] == [1, 100]
    (read, _) = log.iterations
    assert (
        read["seconds"] == 12.22 and read["loss"] == 6.265 and read["tflops_logged"] == 1249 and read["lr"] == 1.469e-5
    )
    assert read["global_batch"] == 128 and read["consumed_samples"] == 12544
    assert log.unknown_fields == {"tokens per sec per gpu": 2}


def test_steps_of_nemo_go_through_all_epochs() -> None:
    second_epoch = NEMO_LINE.format(10).replace("epoch 0", "epoch 1").replace("global_step: 10", "global_step: 110")
    log = read_log(NEMO_LINE.format(10) + "\n" + second_epoch)
    assert [line["iteration"] for line in log.iterations] == [11, 111] and log.total is None


@pytest.mark.parametrize(
    ("claim", "teraflops"), [("150.3TFLOPS", 150.3), ("850.3GFLOPS", 0.8503), ("1.2PFLOPS", 1200.0)]
)
def test_the_speed_that_gpt_neox_claims_has_a_prefix(claim: str, teraflops: float) -> None:
    fields = f"elapsed time per iteration (ms): 9876.5 | approx flops per GPU: {claim} |"
    log = read_log(f" samples/sec: 51.2 | iteration 10/ 50 | {fields}")
    assert log.trainer == NEOX and log.iterations[0]["tflops_logged"] == pytest.approx(teraflops)


def test_a_last_field_without_a_bar_and_a_value_that_is_no_number_are_counted() -> None:
    line = " iteration 1/ 9 | elapsed time per iteration (ms): 8.9 | lm loss: none | throughput: 7.340"
    log = read_log("\n".join((line, line.replace(" 1/", " 2/"))))
    assert len(log.iterations) == 2 and log.unknown_fields == {"lm loss": 2, "throughput": 2}


@pytest.mark.parametrize("order", [1, -1])
def test_short_names_of_other_trainers_do_not_replace_values_under_long_ones(order: int) -> None:
    fields = [
        "lm loss: 2.5",
        "loss: 9.9",
        "learning rate: 1e-4",
        "lr: 7",
        "rss: 5",
        "elapsed time per iteration (s): 3",
    ]
    log = read_log(f" iteration 2/ 9 | {' | '.join(fields[::order])} |")
    assert log.iterations == ({"iteration": 2, "loss": 2.5, "lr": 1e-4, "seconds": 3.0},) and log.trainer == MEGATRON


def test_a_short_name_alone_is_read_but_a_memory_without_our_time_has_no_unit() -> None:
    log = read_log(" iteration 2/ 9 | loss: 9.9 | lr: 7e-5 | rss: 5 |")
    assert log.iterations == ({"iteration": 2, "loss": 9.9, "lr": 7e-5},)
    (short,) = read_log(" iteration 2/ 9 | loss: 9.9 | s/it: 2 | rss: 5 |").iterations
    assert short == {"iteration": 2, "loss": 9.9, "seconds": 2.0, "rss_max_bytes": 5 * 2.0**30}


def test_sizes_that_older_megatron_prints() -> None:
    text = "> initialized tensor model parallel with size 8\n> initialized pipeline model parallel with size 4\n"
    log = read_log(text + DEEPSPEED)
    assert log.arguments == {"tensor_model_parallel_size": "8", "pipeline_model_parallel_size": "4"}


def test_a_line_that_is_wrapped_or_torn_is_put_together() -> None:
    halves = DEEPSPEED.split("| learning rate")
    assert read_log(halves[0] + "|\n learning rate" + halves[1]).iterations == (READ,)
    assert read_log(DEEPSPEED.replace("skipped iterations", "skipped\niterations")).iterations == (READ,)
    at = DEEPSPEED.index("per iteration (s)") + 7
    noise = "[default3]: time (ms) | forward: 3.1\n[default3]:hello\n"
    torn = f"[default7]:{DEEPSPEED[:at]}{noise}[default7]:{DEEPSPEED[at:]}"
    assert read_log(torn).iterations == (READ,)


def test_lines_of_two_ranks_glued_together() -> None:
    other = DEEPSPEED.replace(" 2/", " 3/")
    assert [line["iteration"] for line in read_log(DEEPSPEED + other).iterations] == [2, 3]
    both = f"[default0]:{DEEPSPEED}[default1]:{other}\n"
    assert read_log(both).iterations == (READ, {**READ, "iteration": 3})


def test_a_line_cut_short_is_counted_and_no_value_is_filled_in() -> None:
    log = read_log(DEEPSPEED[:60] + "\nnothing more\n")
    assert log.iterations == () and log.torn == 1 and log.trainer == ""
    (read,) = read_log(DEEPSPEED[: DEEPSPEED.index("| learning rate")]).iterations
    assert read == {name: READ[name] for name in ("iteration", "consumed_samples", "consumed_tokens", "seconds")}


def test_an_iteration_that_was_done_again_counts_once() -> None:
    log = read_log(DEEPSPEED + "\n" + DEEPSPEED.replace("36.10", "40.00"))
    assert [line["seconds"] for line in log.iterations] == [40.0]


def test_losses_that_are_no_numbers() -> None:
    (read,) = read_log(DEEPSPEED.replace("1.943883E+00", "nan").replace("0.128", "inf")).iterations
    assert read["loss"] is None and read["grad_norm"] is None


def test_validations() -> None:
    log = read_log(
        "-----\n validation loss at iteration 1000 | lm loss value: 3.912345E+00 | lm loss PPL: 5.001609E+01 |\n-----\n"
        "validation at iteration 80 | lm loss: 5.682169 | tokens: 4096 | change: -0.130515 |\n"
    )
    assert log.validations == (
        {"iteration": 80, "loss": 5.682169, "tokens": 4096},
        {"iteration": 1000, "loss": 3.912345},
    )


def test_arguments_are_read_in_their_block_alone() -> None:
    log = read_log(ARGUMENTS)
    assert log.arguments == {
        "checkpoint_activations": "True",
        "data_path": "['a', 'b c']",
        "num_layers": "24",
        "num_layers_per_virtual_pipeline_stage_and_longer_names": "None",
    }
    prefixed = "".join(f"[default0]:{line}\n" for line in ARGUMENTS.splitlines())
    assert read_log(prefixed).arguments == log.arguments
    startup_log = read_log(
        "using world size: 8, data-parallel-size: 2, tensor-model-parallel size: 2, pipeline-model-parallel size: 2 \n"
        " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)\n"
    )
    assert startup_log.arguments["world_size"] == "8" and startup_log.arguments["padded_vocab_size"] == "50304"


def test_the_last_error_counts_where_no_iteration_follows() -> None:
    assert read_log(DEEPSPEED + "\nRuntimeError: no\nValueError: last\n").error == "ValueError: last"
    assert read_log("ValueError: early\n" + DEEPSPEED).error == ""
    assert "out of memory" in read_log(DEEPSPEED + "\n[default0]:torch.cuda: CUDA out of memory. Tried\n").error


def test_files_are_read_in_order_and_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.out").write_bytes(DEEPSPEED[:60].encode() + b"\n\xff\xfe\n")
    (tmp_path / "b.out").write_text(DEEPSPEED + "\n")
    log = read_log_files([tmp_path / "a.out", tmp_path / "b.out"])
    assert log.iterations == (READ,) and log.torn == 1
    with pytest.raises(UsageError, match="c.out: cannot be read"):
        read_log_files([tmp_path / "c.out"])


def printed_and_recorded(
    tmp_path: Path, values: Dict[str, Any], previous: Optional[float], log_format: str
) -> "tuple[str, list[Dict[str, Any]]]":
    """The text that the trainer prints of one iteration and one validation, and the lines that it records of them."""
    batch = values["batch"] * 4 * 2
    layout = ["layout.dp=2", "layout.pp=2", "training.non_finite=skip", f"training.log_format={log_format}"]
    config = load_run_config(preset="tiny", overrides=[f"training.global_batch={batch}", *layout])
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    if file.exists():
        file.unlink()
    metrics = MetricsWriter(file)
    log = TrainingLog(config, metrics, stream)
    step = Step(values["loss"], values["grad_norm"], values["lr"], batch, config.model.seq_len)
    consumed = values["iteration"] * batch, values["iteration"] * batch * config.model.seq_len
    memory = values["rss"] * 2**20, values["node"] * 2**20
    measured = IntervalMeasurements(
        values["seconds"], *memory, (values["bubble"], 2 * values["bubble"]), values["hidden"]
    )
    log.iteration(values["iteration"], [step], consumed, values["iteration"] // 2, measured)
    log.validation(values["iteration"], values["loss"], 4096, previous, consumed_tokens=0)
    metrics.close()
    return stream.getvalue(), [json.loads(line) for line in file.read_text().splitlines()]


NUMBERS = st.fixed_dictionaries(
    {
        "iteration": st.integers(1, 10**6),
        "batch": st.one_of(st.integers(1, 64), st.integers(1, 300)),  # large ones take long: each is scheduled
        "loss": st.floats(0.001, 100),
        "grad_norm": st.floats(0.001, 1000),
        "lr": st.floats(1e-7, 1),
        "seconds": st.floats(0.001, 1e5),
        "bubble": st.floats(0, 100),
        "hidden": st.floats(0, 1),
        "rss": st.integers(1, 40_000),
        "node": st.integers(1, 40_000),
    }
)


@quick
@given(NUMBERS, st.one_of(st.none(), st.floats(0.1, 10)))
def test_our_own_lines_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: Dict[str, Any], previous: Optional[float]
) -> None:
    text, (recorded, validated) = printed_and_recorded(tmp_path_factory.getbasetemp(), values, previous, "megatron")
    log = read_log(text)
    assert log.trainer == OURS and log.total == 100
    (read,) = log.iterations
    for name in (
        "iteration",
        "consumed_samples",
        "consumed_tokens",
        "global_batch",
        "skipped_iterations",
        "rss_max_bytes",
        "node_used_bytes",
    ):
        assert read[name] == recorded[name]
    for name, error in (("seconds", 0.0006), ("loss", 6e-7), ("grad_norm", 0.0006), ("bubble", 6e-4)):
        assert read[name] == pytest.approx(recorded[name], abs=error)
    for name, error in (("tflops_notes", 6e-4), ("hidden_communication", 6e-3)):
        assert read[name] == pytest.approx(recorded[name], abs=error)
    assert read["lr"] == pytest.approx(recorded["lr"], rel=1e-3)
    (validation,) = log.validations
    assert validation["iteration"] == validated["iteration"] and validation["tokens"] == 4096
    assert validation["loss"] == pytest.approx(validated["loss"], abs=6e-7)


@quick
@given(NUMBERS)
def test_our_short_lines_are_read_back(tmp_path_factory: pytest.TempPathFactory, values: Dict[str, Any]) -> None:
    text, (recorded, _) = printed_and_recorded(tmp_path_factory.getbasetemp(), values, None, "short")
    log = read_log(text)
    assert (log.trainer, log.total, log.unknown_fields, len(log.validations)) == (OURS, 100, {}, 1)
    (read,) = log.iterations
    assert set(read) <= set(recorded)
    assert read["iteration"] == recorded["iteration"]
    assert read["loss"] == pytest.approx(recorded["loss"], rel=6e-6)
    for name in ("seconds", "grad_norm", "tflops_notes", "tokens_per_second"):
        assert read[name] == pytest.approx(recorded[name], rel=6e-4)
    for name in ("lr", "rss_max_bytes"):
        assert read[name] == pytest.approx(recorded[name], rel=6e-3)


@quick
@given(st.text())
def test_any_text_is_a_log(text: str) -> None:
    read_log(text)


PIECES = st.sampled_from(
    [
        *DEEPSPEED.split("|"),
        "|",
        "\n",
        "\r",
        " ",
        "[default1]:",
        "\x1b[3",
        ":",
        "nan",
        "iteration 1/ 2 |",
        "global_step: 7 |",
        "1e999",
        *ARGUMENTS.splitlines(),
    ]
)


@quick
@given(st.lists(PIECES, max_size=60))
def test_any_pieces_of_log_lines_are_a_log(pieces: "list[str]") -> None:
    text = "".join(pieces)
    log = read_log(text)
    for line in log.iterations:
        assert line.get("seconds") is None or line["seconds"] > 0
        json.dumps(line, allow_nan=False)


@quick
@given(st.lists(st.integers(1, 150), min_size=1, max_size=3), st.integers(0, 3))
def test_a_line_torn_anywhere_between_fields_loses_nothing(positions: "list[int]", noise: int) -> None:
    bars = [index + 1 for index, letter in enumerate(DEEPSPEED) if letter == "|"]
    cuts = sorted({bars[position % (len(bars) - 1)] for position in positions})
    pieces = [DEEPSPEED[a:b] for a, b in zip([0, *cuts], [*cuts, len(DEEPSPEED)])]
    between = "\n" + "".join(f"[default{n}]: noise {n}\n" for n in range(noise))
    assert read_log(between.join(f"[default7]:{piece}" for piece in pieces)).iterations == (READ,)


def test_grouped_digits_are_one_number_and_other_commas_none() -> None:
    line = " iteration {}/ 100 | elapsed time per iteration (ms): {} | lm loss: 3.5E+00 |"
    log = read_log("\n".join(line.format(*values) for values in ((1, "1,234.5"), (2, "12,345,678"), (3, "1,5"))))
    assert [line.get("seconds") for line in log.iterations] == [1.2345, 12345.678, None]
    assert log.unknown_fields == {"elapsed time per iteration (ms)": 1}


def test_lines_of_an_iteration_that_is_done_again_are_counted() -> None:
    line = " iteration {}/ 100 | elapsed time per iteration (ms): {} | lm loss: 3.5E+00 |"
    log = read_log("\n".join(line.format(*values) for values in ((1, 100), (2, 100), (2, 200), (3, 100))))
    assert log.repeated == 1 and [line["seconds"] for line in log.iterations] == [0.1, 0.2, 0.1]


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("rank rss: 1024 MiB", "rss_max_bytes", 2**30),
        ("node used: 1712 MiB", "node_used_bytes", 1712 * 2**20),
        ("elapsed time per iteration (ms): 250.0", "seconds", 0.25),
        ("train step timing in s: 2.5", "seconds", 2.5),
        ("tokens per second: 12.5", "tokens_per_second", 12.5),
        ("throughput per GPU (TFLOP/s/GPU): 3.5", "tflops_logged", 3.5),
        ("approx flops per GPU: 3.5", "tflops_logged", 3.5),
        ("total grad norm: 0.5", "grad_norm", 0.5),
        ("params norm: 0.5", "params_norm", 0.5),
        ("actual seqlen: 1024", "actual_seq_len", 1024),
        ("number of nan iterations: 3", "nan_iterations", 3),
        ("pipeline bubble: 0.25", "bubble", 0.25),
        ("hidden communication: 0.75", "hidden_communication", 0.75),
    ],
)
def test_a_figure_has_the_unit_of_the_record(written: str, key: str, value: float) -> None:
    line = f" iteration        2/   10 | {written} | lm loss: 1.5 |\n"
    assert read_log(line).iterations[0][key] == value

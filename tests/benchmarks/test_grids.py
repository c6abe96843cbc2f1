"""Tests of the comparison of training on grids with a plain PyTorch version of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

import pytest
import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.grid_samples import open_grid_samples
from fugaku_gpt.model import build_model
from fugaku_gpt.model.cells import Cells
from tests.benchmarks.programs import printed_lines, refusal
from tests.support.grids import LIKE_LLAMA, TASKS, grid_config, write_tasks

SMALL = [f"model.classes={TASKS}", "data.buckets=[7]", "model.seq_len=49", "data.split=[60,40,0]", "model.layers=1"]
SMALL += ["training.global_batch=4", "training.micro_batch=2", "node.threads_per_rank=1"]
pytestmark = [pytest.mark.slow, pytest.mark.torch]


needs_fused_attention = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "scaled_dot_product_attention"), reason="the plain model needs fused attention"
)


@needs_fused_attention
@pytest.mark.parametrize("settings", [(), LIKE_LLAMA], ids=["as arc-nano", "as arc-small"])
def test_the_plain_model_is_the_same_model(settings: List[str], tmp_path: Path) -> None:
    """With our weights it has our loss."""
    from textbook_grids import TextbookClassifier

    none = ("model.dropout=0", "model.attention_dropout=0")
    config = grid_config(write_tasks(tmp_path / "tasks.json"), *none, *settings)
    shape, model = config.model, build_model(config, Communicator.alone())
    heads = (shape.heads, shape.kv_head_count, shape.head_size)
    plain = TextbookClassifier(
        shape.layers, shape.hidden, heads, shape.ffn_size, shape.grid_side, shape.classes, bool(settings)
    )
    ours = dict(model.named_parameters())
    theirs = {
        "colors.weight": ours["token_embedding.weight"][:10],
        "classes.weight": ours["output.weight"][: shape.classes],
        **{f"norm.{name}": ours[f"final_norm.{name}"] for name in ("weight", "bias") if f"final_norm.{name}" in ours},
    }
    for name in ("row", "column") if not settings else ():
        theirs[f"{name}s.weight"] = ours[f"{name}_embedding.weight"]
    names = {
        "norm1": "attention_norm",
        "norm2": "mlp_norm",
        "proj": "attention.out",
        "up": "mlp.up",
        "down": "mlp.down",
    }
    for layer in range(shape.layers):
        for kind in ("weight", "bias"):
            for their_name, our_name in names.items():
                tensor = ours.get(f"blocks.{layer}.{our_name}.{kind}")
                if tensor is not None:
                    theirs[f"blocks.{layer}.{their_name}.{kind}"] = _flat(tensor, kind)
            parts = [ours.get(f"blocks.{layer}.attention.{name}.{kind}") for name in ("qkv", "q", "kv")]
            rows = [_flat(part, kind) for part in parts if part is not None]
            if rows:
                theirs[f"blocks.{layer}.qkv.{kind}"] = torch.cat(rows)
    plain.load_state_dict(theirs)
    grids = open_grid_samples(config, "train").batch(0, 8)
    cells = Cells.of(shape, grids.heights, grids.widths, grids.cells, torch.float32)
    is_cell = cells.is_cell.squeeze(1).bool()
    colors, labels = torch.from_numpy(grids.colors), torch.from_numpy(grids.labels)
    expected = plain(colors, cells.rows, cells.columns, is_cell, labels)
    assert float(model(colors, labels.unsqueeze(1), 0, cells)) / 8 == pytest.approx(float(expected), rel=1e-5)


def _flat(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    is_matrix = kind == "weight" and tensor.dim() > 1
    return tensor.detach().reshape(-1, tensor.shape[-1]) if is_matrix else tensor.detach().reshape(-1)


@needs_fused_attention
@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_the_table_has_both_contestants(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_tasks(tmp_path / "tasks.json")
    options = [word for text in SMALL for word in ("--set", text)]
    lines = printed_lines(capfd, "grids", "--data", str(file), "--steps", "1", "--turns", "1", *options)
    assert [line.split()[0] for line in lines] == ["model", "seconds", "ours", "plain"]
    assert "buckets 7, batch 4 of 2" in lines[0] and " x " in lines[3]


@needs_fused_attention
@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_accuracies_after_as_much_processor_time_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_tasks(tmp_path / "tasks.json")
    options = [word for text in (*SMALL, "training.eval_batches=2") for word in ("--set", text)]
    head, titles, *rows = printed_lines(
        capfd, "grids", "--data", str(file), "--seconds", "0.2", "--turns", "2", *options
    )
    assert titles.split().count("accuracy") == len(rows) == 2
    (_, _, *first), (_, _, *second) = (row.split() for row in rows)
    for column in (0, 3):
        assert 0 < int(first[column]) < int(second[column])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("layout.dp=2",), "layout: 2 ranks; valid: layout.dp, tp and pp of 1"),
        (("training.dtype=bfloat16",), "training.dtype: bfloat16; valid: float32"),
        (("training.clip_grad=0",), "training.clip_grad: 0; valid: above 0"),
        (("model.qk_norm=true",), "model.qk_norm: True; valid: False"),
        (("model.dropout=0.1", "model.attention_dropout=0.1"), "model.dropout: 0.1; valid: 0.0\nmodel.attention_drop"),
        (("model.norm=rmsnorm",), "model.norm: rmsnorm; valid: layernorm"),
        (("model.positions=rope",), "model.positions: rope; valid: learned"),
        (("model.biases=none",), "model.biases: none; valid: all"),
        (("model.gelu=tanh",), "model.gelu: tanh; valid: "),
        (("model.layers=x",), "model.layers: 'x'"),
    ],
)
def test_settings_that_the_plain_model_does_not_follow_are_refused(
    settings: Sequence[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capfd, "grids", *(word for text in settings for word in ("--set", text)))
    assert reason in message


@pytest.mark.parametrize("preset", ["arc-nano", "arc-small"])
def test_models_of_either_kind_and_of_any_size_are_compared(preset: str) -> None:
    from grids import differences

    sizes = ["model.layers=2", "model.heads=4", "model.kv_heads=2", "data.buckets=[7]", "model.seq_len=49"]
    assert differences(load_run_config(preset=preset, overrides=[*sizes, "training.lr=1e-2"])) == []

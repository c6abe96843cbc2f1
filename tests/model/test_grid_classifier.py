"""Tests of the classifier of grids against a plain one, which takes each grid by itself at its own size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Dict, List, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.data.grid_samples import GridBatch, open_grid_samples
from fugaku_gpt.model import build_model
from fugaku_gpt.model.cells import Cells
from fugaku_gpt.model.gpt import GPT
from tests.support.grids import LIKE_LLAMA, grid_config, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.torch]
WITHOUT_DROPOUT = ("model.dropout=0", "model.attention_dropout=0")


def plain_logits(w: Dict[str, torch.Tensor], model: ModelConfig, colors: torch.Tensor) -> torch.Tensor:
    """Returns the logits [classes] of one grid [height, width], by the definition of each layer, without padding."""
    height, width = colors.shape
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    x = w["token_embedding.weight"][colors.reshape(-1)]
    if model.positions == "learned":
        x = x + w["row_embedding.weight"][rows] + w["column_embedding.weight"][columns]
    for layer in range(model.layers):
        part = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"blocks.{layer}.")}
        x = x + _attention(part, model, _norm(part, "attention_norm", model, x), rows, columns)
        x = x + _mlp(part, model, _norm(part, "mlp_norm", model, x))
    return w["output.weight"][: model.classes] @ _norm(w, "final_norm", model, x).mean(0)


def _norm(w: Dict[str, torch.Tensor], name: str, model: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    if model.norm == "layernorm":
        return F.layer_norm(x, (model.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], model.layernorm_eps)
    return x / (x * x).mean(-1, keepdim=True).add(model.layernorm_eps).sqrt() * w[f"{name}.weight"]


def _linear(w: Dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    return F.linear(x, weight.reshape(-1, weight.shape[-1]), bias.reshape(-1) if bias is not None else None)


def _attention(
    w: Dict[str, torch.Tensor], model: ModelConfig, x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    heads, kv_heads, d = model.heads, model.kv_head_count, model.head_size
    if kv_heads == heads:
        q, k, v = _linear(w, "attention.qkv", x).view(len(x), 3, heads, d).unbind(1)
    else:
        q = _linear(w, "attention.q", x).view(len(x), heads, d)
        k, v = _linear(w, "attention.kv", x).view(len(x), 2, kv_heads, d).unbind(1)
    if model.positions == "rope":
        q, k = (_turned(part, rows, columns, model.rope_theta) for part in (q, k))
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
    return _linear(w, "attention.out", torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(x), -1))


def _turned(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, theta: float) -> torch.Tensor:
    """Returns heads [cells, heads, d] whose pairs (i, i + d / 2) are turned: the first half of them by the row of the
    cell, the others by its column."""
    quarter = x.shape[-1] // 4
    frequencies = [theta ** -(i / quarter) for i in range(quarter)]
    result = x.clone()
    for i in range(2 * quarter):
        angles = (rows if i < quarter else columns).to(x.dtype) * frequencies[i % quarter]
        left, right = x[..., i], x[..., i + 2 * quarter]
        cosine, sine = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        result[..., i], result[..., i + 2 * quarter] = left * cosine - right * sine, right * cosine + left * sine
    return result


def _mlp(w: Dict[str, torch.Tensor], model: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    up = _linear(w, "mlp.up", x)
    if model.mlp == "swiglu":
        gate, gated = up.chunk(2, -1)
        return _linear(w, "mlp.down", F.silu(gate) * gated)
    return _linear(w, "mlp.down", F.gelu(up))


def scaled_model(config_model: GPT) -> GPT:
    """Returns the model with weights so large that every part of it shows in the logits."""
    with torch.no_grad():
        for name, parameter in config_model.named_parameters():
            if "norm" not in name:
                parameter.mul_(10.0)
                if name.endswith("bias"):
                    parameter.add_(
                        torch.linspace(-0.3, 0.3, parameter.numel(), dtype=parameter.dtype).view_as(parameter)
                    )
    return config_model


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (("training.dtype=float64",), 1e-12),
        (("training.dtype=float64", *LIKE_LLAMA), 1e-12),
        (LIKE_LLAMA, 2e-5),
        ((*LIKE_LLAMA, "model.kv_heads=null", "data.buckets=[7]"), 2e-5),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_a_plain_model_without_padding(
    settings: Sequence[str], tolerance: float, tmp_path: Path
) -> None:
    config = grid_config(write_tasks(tmp_path / "tasks.json"), *WITHOUT_DROPOUT, *settings)
    model = scaled_model(build_model(config, Communicator.alone())).train()
    source, dtype = open_grid_samples(config, "train"), getattr(torch, config.training.dtype)
    sizes = set()
    for first in range(0, 32, 8):
        grids = source.batch(first, 8)
        sizes.add(grids.cells)
        model.zero_grad()
        loss = forward(model, grids, dtype)
        loss.backward()
        weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        logits = torch.stack([plain_logits(weights, config.model, colors) for colors in unpadded(grids)])
        labels = torch.from_numpy(grids.labels)
        expected = F.cross_entropy(logits, labels, reduction="sum")
        expected.backward()
        assert float(loss.detach()) == pytest.approx(float(expected), rel=tolerance)
        assert model.correct is not None and model.correct.take() == int((logits.argmax(1) == labels).sum())
        for name, parameter in model.named_parameters():
            theirs = weights[name].grad
            assert parameter.grad is not None and theirs is not None
            assert float((parameter.grad - theirs).abs().max()) <= 10 * tolerance * float(theirs.abs().max()), name
    assert len(sizes) == len(config.data.buckets)


def forward(model: GPT, grids: GridBatch, dtype: torch.dtype) -> torch.Tensor:
    """Returns the loss of a batch."""
    cells = Cells.of(model.config, grids.heights, grids.widths, grids.cells, dtype)
    loss: torch.Tensor = nn.Module.__call__(
        model, torch.from_numpy(grids.colors), torch.from_numpy(grids.labels).unsqueeze(1), 0, cells
    )
    return loss


def unpadded(grids: GridBatch) -> List[torch.Tensor]:
    """Returns the colors [height, width] of each grid of a batch."""
    return [
        torch.from_numpy(colors[: height * width]).view(height, width)
        for colors, height, width in zip(grids.colors, grids.heights.tolist(), grids.widths.tolist())
    ]


def test_the_colors_of_padding_change_nothing(tmp_path: Path) -> None:
    config = grid_config(write_tasks(tmp_path / "tasks.json"), *LIKE_LLAMA)
    model = build_model(config, Communicator.alone())
    grids = open_grid_samples(config, "train").batch(0, 8)
    spoilt = grids.colors.copy()
    for row, cells in zip(spoilt, (grids.heights * grids.widths).tolist()):
        row[cells:] = 9
    assert (spoilt != grids.colors).any()
    losses = [
        float(forward(model, GridBatch(colors, grids.labels, grids.heights, grids.widths), torch.float32))
        for colors in (grids.colors, spoilt)
    ]
    assert losses[0] == losses[1]

"""Tests of the bytes beside a chunk's layers, counted by hand; ``test_memory.py`` compares them with PyTorch's."""

from __future__ import annotations

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.memory import embedding_and_head_bytes, recompute_of_layers
from fugaku_gpt.layout.stages import split_layers

B, S, H = 3, 8, 20  # micro-batch, sequence, hidden size
SHAPE = ("model.hidden=20", "model.heads=4", "model.layers=4", "model.seq_len=8", "training.micro_batch=3")


def bytes_of_ends(*settings: str) -> "tuple[int, int, int]":
    """Bytes of the first, the second and the last chunk of a pipeline of three stages."""
    usual = ("layout.pp=3", "training.global_batch=12", "model.dropout=0", "model.attention_dropout=0")
    config = load_run_config(overrides=[*SHAPE, *usual, *settings])
    chunks = split_layers(config.model.layers, 3)
    first, second, last = (embedding_and_head_bytes(config, chunk) for chunk in chunks)
    return first, second, last


STATISTICS = 2 * 4 * B * S  # mean and deviation of each token


@pytest.mark.parametrize(
    ("settings", "first", "second", "last"),
    [
        ((), 4 * B * S * H + 8 * B * S, 4 * B * S * H, 2 * 4 * B * S * H + STATISTICS),
        (("model.dropout=0.1",), 2 * 4 * B * S * H + 8 * B * S, 4 * B * S * H, 2 * 4 * B * S * H + STATISTICS),
        (
            ("model.embedding_layernorm=true",),
            2 * 4 * B * S * H + 8 * B * S + STATISTICS,
            4 * B * S * H,
            2 * 4 * B * S * H + STATISTICS,
        ),
        (("layout.tp=2",), 4 * B * S * H + 9 * B * S, 4 * B * S * H, 2 * 4 * B * S * H + STATISTICS),
        (
            ("layout.tp=2", "layout.sequence_parallel=true"),
            4 * B * S * H // 2 + 9 * B * S,
            4 * B * S * H // 2,
            2 * 4 * B * S * H // 2 + STATISTICS // 2,
        ),
        (
            ("training.dtype=bfloat16", "node.compiled_kernels=false"),
            2 * B * S * H + 8 * B * S,
            2 * B * S * H,
            2 * 2 * B * S * H + 2 * 4 * H,
        ),
        (
            ("training.dtype=float64",),
            8 * B * S * H + 8 * B * S,
            8 * B * S * H,
            2 * 8 * B * S * H + 2 * STATISTICS,
        ),
    ],
)
def test_the_ends_of_a_pipeline(settings: "tuple[str, ...]", first: int, second: int, last: int) -> None:
    assert bytes_of_ends(*settings) == (first, second, last)


def test_a_budget_recomputes_no_more_than_it_must_and_names_the_smallest() -> None:
    def choice(budget: float, kind: str = "full") -> "list[str]":
        settings = (f"training.recompute={kind}", f"training.recompute_budget_mib={budget:.10g}")
        size = (
            "model.hidden=512",
            "model.heads=8",
            "model.layers=4",
            "model.seq_len=256",
            "training.global_batch=12",
            "model.attention_dropout=0.1",
        )
        config = load_run_config(overrides=[*size, *settings])
        return list(recompute_of_layers(config, split_layers(config.model.layers, 1)))

    assert choice(1000) == ["none"] * 4
    smallest = {}
    for kind in ("selective", "full"):
        with pytest.raises(UsageError, match=r"recompute_budget_mib: 0.01: stage 0 keeps .* MiB") as refused:
            choice(0.01, kind)
        assert (", or recompute full" in str(refused.value)) == (kind == "selective")
        smallest[kind] = float(str(refused.value).partition("valid: ")[2].split()[0])
        chosen = choice(smallest[kind], kind)
        assert kind in chosen and (kind == "full" or "full" not in chosen)
        with pytest.raises(UsageError, match="valid: "):
            choice(smallest[kind] - 0.1, kind)
    assert smallest["full"] < smallest["selective"]

"""A classifier of grids in plain PyTorch on one process, with which a step of ours is compared.

It is written in the usual way: the grids of a batch are padded to its bucket, PyTorch's fused attention gets a mask of
the padding, and ``cross_entropy`` and ``torch.optim.AdamW`` are as they come. It shares no code with the package.
"""

from __future__ import annotations

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    """Layer on [b, s, h] with bidirectional attention: of GPT-2's kind, or of Llama's with shared heads of keys."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_size: int, inner: int, llama: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.llama = heads, kv_heads, llama
        self.norm1, self.norm2 = (RMSNorm(hidden) if llama else nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * head_size, bias=not llama)
        self.proj = nn.Linear(heads * head_size, hidden, bias=not llama)
        self.up = nn.Linear(hidden, inner * (2 if llama else 1), bias=not llama)
        self.down = nn.Linear(inner, hidden, bias=not llama)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, turns: Tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        b, s, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.llama:
            q, k = turned(q, turns), turned(k, turns)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, -1))
        inner = self.up(self.norm2(x))
        if self.llama:
            gate, gated = inner.chunk(2, -1)
            return x + self.down(F.silu(gate) * gated)
        return x + self.down(F.gelu(inner))


def turned(x: torch.Tensor, turns: Tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates heads [b, heads, s, d] by cosines and sines [b, 1, s, d / 2]."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * turns[0] - right * turns[1], right * turns[0] + left * turns[1]], -1)


class TextbookClassifier(nn.Module):
    """Maps colors [b, s], rows and columns [b, s], which cells are no padding [b, s], and classes [b] to the mean
    cross-entropy."""

    def __init__(
        self, layers: int, hidden: int, heads: Tuple[int, int, int], inner: int, side: int, classes: int, llama: bool
    ) -> None:
        """
        Args:
            heads: number of heads, of heads of keys, and width of one.
            inner: width of the MLP.
            llama: RMSNorm, rotary positions, SwiGLU, no biases.
        """
        super().__init__()
        self.llama, self.head_size = llama, heads[2]
        self.colors = nn.Embedding(10, hidden)
        if not llama:
            self.rows, self.columns = nn.Embedding(side, hidden), nn.Embedding(side, hidden)
        self.blocks = nn.ModuleList([Block(hidden, *heads, inner, llama) for _ in range(layers)])
        self.norm = RMSNorm(hidden) if llama else nn.LayerNorm(hidden)
        self.classes = nn.Linear(hidden, classes, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        colors: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
        is_cell: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        return F.cross_entropy(self.logits(colors, rows, columns, is_cell), labels)

    def logits(
        self, colors: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, is_cell: torch.Tensor
    ) -> torch.Tensor:
        """Logits [b, classes]."""
        x = self.colors(colors)
        x = x if self.llama else x + self.rows(rows) + self.columns(columns)
        turns = self.rotation(rows, columns)
        mask = is_cell[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask, turns)
        weights = is_cell.unsqueeze(-1).to(x.dtype)
        mean = (self.norm(x) * weights).sum(1) / weights.sum(1)
        return self.classes(mean)

    def rotation(self, rows: torch.Tensor, columns: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [b, 1, s, d / 2]: half of the pairs turn by the row, half by the column."""
        quarter = self.head_size // 4
        frequencies = 10000.0 ** -(torch.arange(quarter) / quarter)
        angles = torch.cat([x.unsqueeze(-1) * frequencies for x in (rows, columns)], -1).unsqueeze(1)
        return angles.cos(), angles.sin()

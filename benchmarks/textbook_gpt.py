"""A textbook GPT in plain PyTorch on one process, with which our step is compared.

It has query, key and value in one linear layer, PyTorch's fused attention where there is one, all logits at once,
``cross_entropy`` and ``torch.optim.AdamW`` as they come (nanoGPT's structure). It shares no code with the package.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn


class TextbookBlock(nn.Module):
    """Pre-LayerNorm transformer layer on [b, s, h]."""

    def __init__(self, hidden: int, heads: int, gelu: nn.Module) -> None:
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(h, dim=2)
        )
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
            y = torch.softmax(scores, dim=-1) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class TextbookGPT(nn.Module):
    """Maps token ids [b, s] and targets [b, s] to the mean cross-entropy."""

    def __init__(
        self, layers: int, hidden: int, heads: int, seq_len: int, vocabulary: int, gelu: Optional[nn.Module] = None
    ) -> None:
        """
        Args:
            gelu: the activation; default: the exact GELU.
        """
        super().__init__()
        gelu = gelu if gelu is not None else nn.GELU()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(seq_len, hidden)
        self.blocks = nn.ModuleList([TextbookBlock(hidden, heads, gelu) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

"""A GPT-2 in plain NumPy, float64, forward and hand-written backward: an independent reference for the PyTorch model.

Written from the mathematics alone. Names of parameters and gradients are those of ``layout.tensors``. Symbols: b
sequences, s tokens, h hidden, n heads, d = h / n, f MLP width, V rows of the embedding of which ``vocab`` take part in
the softmax.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Tuple

import numpy as np

from fugaku_gpt.config import ModelConfig

Array = Any  # np.ndarray of float64
Backward = Callable[[Array], Array]
_ERF = np.vectorize(math.erf)


class NumpyGPT:
    """The model of float64 ``parameters`` by name; ``loss_and_gradients`` runs it."""

    def __init__(self, model: ModelConfig, parameters: Dict[str, Array]) -> None:
        self.model = model
        self.p = parameters
        self.g: Dict[str, Array] = {}

    def loss_and_gradients(self, tokens: Array, targets: Array) -> Tuple[float, Dict[str, Array]]:
        """Sum of cross-entropies of [b, s] ``targets``, and its gradient by every parameter."""
        self.g = {name: np.zeros_like(value) for name, value in self.p.items()}
        b, s = tokens.shape
        table = self.p["token_embedding.weight"]
        x = table[tokens] + self.p["position_embedding.weight"][:s]
        backwards = []
        if self.model.embedding_layernorm:
            x, back = self._norm("embedding_norm", x)
            backwards.append(back)
        for layer in range(self.model.layers):
            x, back = self._block(f"blocks.{layer}", x)
            backwards.append(back)
        x, back = self._norm("final_norm", x)
        backwards.append(back)
        logits = x @ table[: self.model.vocab_size].T
        logits -= logits.max(-1, keepdims=True)
        probabilities = np.exp(logits)
        probabilities /= probabilities.sum(-1, keepdims=True)
        rows, columns = np.arange(b)[:, None], np.arange(s)[None, :]
        loss = float(-np.log(probabilities[rows, columns, targets]).sum())
        dlogits = probabilities
        dlogits[rows, columns, targets] -= 1.0
        self.g["token_embedding.weight"][: self.model.vocab_size] += np.einsum("bsv,bsh->vh", dlogits, x)
        dx = dlogits @ table[: self.model.vocab_size]
        for back in reversed(backwards):
            dx = back(dx)
        np.add.at(self.g["token_embedding.weight"], tokens, dx)
        self.g["position_embedding.weight"][:s] += dx.sum(0)
        return loss, self.g

    def _block(self, at: str, x: Array) -> Tuple[Array, Backward]:
        normed, back_norm1 = self._norm(f"{at}.attention_norm", x)
        attended, back_attention = self._attention(f"{at}.attention", normed)
        middle = x + attended
        normed2, back_norm2 = self._norm(f"{at}.mlp_norm", middle)
        out, back_mlp = self._mlp(f"{at}.mlp", normed2)

        def backward(dy: Array) -> Array:
            dmiddle = dy + back_norm2(back_mlp(dy))
            return dmiddle + back_norm1(back_attention(dmiddle))

        return middle + out, backward

    def _norm(self, at: str, x: Array) -> Tuple[Array, Backward]:
        gain, shift = self.p[f"{at}.weight"], self.p[f"{at}.bias"]
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + self.model.layernorm_eps)
        unit = centred / deviation

        def backward(dy: Array) -> Array:
            self.g[f"{at}.weight"] += (dy * unit).reshape(-1, len(gain)).sum(0)
            self.g[f"{at}.bias"] += dy.reshape(-1, len(gain)).sum(0)
            dunit = dy * gain
            mean, along = dunit.mean(-1, keepdims=True), (dunit * unit).mean(-1, keepdims=True)
            return (dunit - mean - unit * along) / deviation

        return unit * gain + shift, backward

    def _linear(self, at: str, x: Array) -> Tuple[Array, Backward]:
        inputs = x.shape[-1]
        weight = self.p[f"{at}.weight"].reshape(-1, inputs)

        def backward(dy: Array) -> Array:
            flat, rows = dy.reshape(-1, len(weight)), x.reshape(-1, inputs)
            self.g[f"{at}.weight"] += (flat.T @ rows).reshape(self.p[f"{at}.weight"].shape)
            self.g[f"{at}.bias"] += flat.sum(0).reshape(self.p[f"{at}.bias"].shape)
            return dy @ weight

        return x @ weight.T + self.p[f"{at}.bias"].reshape(-1), backward

    def _attention(self, at: str, x: Array) -> Tuple[Array, Backward]:
        b, s, h = x.shape
        n, d = self.model.heads, h // self.model.heads
        qkv, back_qkv = self._linear(f"{at}.qkv", x)
        q, k, v = np.moveaxis(qkv.reshape(b, s, 3, n, d), (2, 3), (0, 2))  # [b, n, s, d] each
        scores = np.einsum("bnid,bnjd->bnij", q, k) / math.sqrt(d)
        scores[..., np.triu(np.ones((s, s), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("bnij,bnjd->bind", weights, v).reshape(b, s, h)
        out, back_out = self._linear(f"{at}.out", mixed)

        def backward(dy: Array) -> Array:
            dmixed = back_out(dy).reshape(b, s, n, d).transpose(0, 2, 1, 3)
            dweights = np.einsum("bnid,bnjd->bnij", dmixed, v)
            dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) / math.sqrt(d)
            dq = np.einsum("bnij,bnjd->bnid", dscores, k)
            dk = np.einsum("bnij,bnid->bnjd", dscores, q)
            dv = np.einsum("bnij,bnid->bnjd", weights, dmixed)
            stacked = np.stack([dq, dk, dv])  # [3, b, n, s, d]
            return back_qkv(stacked.transpose(1, 3, 0, 2, 4).reshape(b, s, 3 * h))

        return out, backward

    def _mlp(self, at: str, x: Array) -> Tuple[Array, Backward]:
        inner, back_up = self._linear(f"{at}.up", x)
        active, slope = _gelu_tanh(inner) if self.model.gelu == "tanh" else _gelu_erf(inner)
        out, back_down = self._linear(f"{at}.down", active)
        return out, lambda dy: back_up(back_down(dy) * slope)


def _gelu_erf(x: Array) -> Tuple[Array, Array]:
    """(GELU, its derivative): x times the normal distribution function."""
    below = 0.5 * (1.0 + _ERF(x / math.sqrt(2.0)))
    return x * below, below + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gelu_tanh(x: Array) -> Tuple[Array, Array]:
    scale = math.sqrt(2.0 / math.pi)
    t = np.tanh(scale * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)

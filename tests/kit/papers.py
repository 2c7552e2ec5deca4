"""LAMB, LARS and PowerSGD line by line as their papers print them, with numpy: what peerd's own are compared with.

LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020), algorithm 2.
LARS: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017), algorithm 1 and equation 6.
Each tensor is one layer of the paper, whatever its shape. Where a norm is zero, the trust ratio is 1.
PowerSGD: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(NeurIPS 2019), algorithm 1 and lines 7 to 11 of algorithm 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from peerd.run.runfile import OptimizerSection

Layers = list[npt.NDArray[np.floating[Any]]]


class PaperLamb:
    """With phi(z) = z."""

    def __init__(self, section: OptimizerSection, x: Layers) -> None:
        self.s, self.t = section, 0
        self.m = [np.zeros_like(layer) for layer in x]
        self.v = [np.zeros_like(layer) for layer in x]

    def step(self, x: Layers, g: Layers, lr: float) -> None:
        """Moves `x` in place."""
        s, self.t = self.s, self.t + 1
        for i in range(len(x)):
            self.m[i] = s.beta1 * self.m[i] + (1 - s.beta1) * g[i]
            self.v[i] = s.beta2 * self.v[i] + (1 - s.beta2) * g[i] ** 2
            m_hat = self.m[i] / (1 - s.beta1**self.t)
            v_hat = self.v[i] / (1 - s.beta2**self.t)
            r = m_hat / (np.sqrt(v_hat) + s.eps)
            u = r + s.weight_decay * x[i]
            ratio = length(x[i]) / length(u) if length(x[i]) and length(u) else 1.0
            x[i] -= lr * ratio * u


class PaperLars:
    """lambda is equation 6, with eta and weight decay beta."""

    def __init__(self, section: OptimizerSection, x: Layers) -> None:
        self.s = section
        self.v = [np.zeros_like(layer) for layer in x]

    def step(self, x: Layers, g: Layers, lr: float) -> None:
        """Moves `x` in place."""
        s = self.s
        for i in range(len(x)):
            below = length(g[i]) + s.weight_decay * length(x[i])
            rate = s.trust * length(x[i]) / below if length(x[i]) and below else 1.0
            self.v[i] = s.momentum * self.v[i] + lr * rate * (g[i] + s.weight_decay * x[i])
            x[i] -= self.v[i]


class PaperPowerSgd:
    """One matrix, some workers, in double precision; with sums in place of means."""

    def __init__(self, q: npt.NDArray[np.floating[Any]], workers: int, shape: tuple[int, int]) -> None:
        self.q = q.astype(np.float64)
        self.e = np.zeros((workers, *shape))

    def sum(self, g: Layers) -> npt.NDArray[np.floating[Any]]:
        """The gradient that everyone steps with, of the workers' gradients."""
        delta = np.stack(g).astype(np.float64) + self.e
        p, _ = np.linalg.qr(np.sum([m @ self.q for m in delta], axis=0))
        own = [m.T @ p for m in delta]
        self.q = np.sum(own, axis=0)
        self.e = delta - np.stack([p @ q.T for q in own])
        decompressed: npt.NDArray[np.floating[Any]] = p @ self.q.T
        return decompressed


def length(values: npt.NDArray[np.floating[Any]]) -> float:
    """The 2-norm."""
    return float(np.linalg.norm(values.ravel()))

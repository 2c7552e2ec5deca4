"""Users' models: a small network, each optimizer that a user may bring, and sums of gradients as they travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import peerd
from peerd.model.stage.user_model import UserModel

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lamb": lambda p: peerd.Lamb(p, lr=0.01),
    "lars": lambda p: peerd.Lars(p, lr=0.1),
}


def module(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def user(make: Callable[[Any], torch.optim.Optimizer], seed: int = 0, **more: Any) -> tuple[nn.Module, UserModel]:
    m = module(seed)
    return m, UserModel(make(m.parameters()), m.named_parameters(), **more)


def mean(model: UserModel, number: int) -> np.ndarray[Any, Any]:
    generator = torch.Generator().manual_seed(number)
    return total(model, torch.randn(model.layout.count, dtype=model.dtype, generator=generator))


def total(model: UserModel, gradients: Tensor, present: float = 1.0) -> np.ndarray[Any, Any]:
    """A sum as it travels, with a gradient for every parameter, of microbatches of full size."""
    tail = torch.tensor([present] * len(model.layout.names) + [0.0], dtype=model.dtype)
    return torch.cat([gradients, tail]).numpy()


def fill(m: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in m.parameters():
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)

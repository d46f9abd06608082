"""AdamW's parameter groups, and the warm-up, stable, decay schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from qed.train.config import TrainConfig

DECAY_GROUP, PLAIN_GROUP, THETA_GROUP = "decay", "plain", "theta"


def group_of(name: str, parameter: nn.Parameter) -> str:
    """Which group a parameter belongs to: matrices decay; ``theta`` has its own rate; all else does not decay.

    Vectors and scalars (norm weights, biases, ``A_log``, ``dt_bias``) take no weight decay whatever their name, and
    these names take none whatever their shape.
    """
    last = name.rpartition(".")[2]
    if last == "theta":
        return THETA_GROUP
    if parameter.ndim < 2 or last in ("bias", "A_log", "dt_bias") or "norm" in name.lower():
        return PLAIN_GROUP
    return DECAY_GROUP


def named_trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters by name; tied ones once."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW over the groups of ``group_of``; each group carries its ``name``."""
    groups: dict[str, list[nn.Parameter]] = {DECAY_GROUP: [], PLAIN_GROUP: [], THETA_GROUP: []}
    for name, parameter in named_trainable(model):
        groups[group_of(name, parameter)].append(parameter)
    settings = {
        DECAY_GROUP: (config.learning_rate, config.weight_decay),
        PLAIN_GROUP: (config.learning_rate, 0.0),
        THETA_GROUP: (config.learning_rate * config.theta_lr_multiplier, 0.0),
    }
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": settings[name][0], "weight_decay": settings[name][1], "name": name}
            for name, parameters in groups.items()
            if parameters
        ],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def rate_factor(config: TrainConfig, step: int) -> float:
    """Rate of update number ``step`` (from 0), in multiples of the peak.

    Warm-up reaches the peak at the last of its steps; the decay reaches ``final_lr_ratio`` at the last step of the run.
    """
    warmup = round(config.warmup_tokens / config.batch_tokens)
    if step < warmup:
        return (step + 1) / warmup
    if config.decay_start_tokens is None:
        return 1.0
    start = round(config.decay_start_tokens / config.batch_tokens)
    if step < start:
        return 1.0
    passed = min(1.0, (step + 1 - start) / max(1, config.num_steps - start))
    fall = {
        "linear": 1 - passed,
        "cosine": (1 + math.cos(math.pi * passed)) / 2,
        "sqrt": 1 - math.sqrt(passed),
    }[config.decay_shape]
    return config.final_lr_ratio + (1 - config.final_lr_ratio) * fall

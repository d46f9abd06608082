"""What must agree before a run may start or go on: identity, rows, weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from qed.config import to_dict
from qed.train.config import RUNTIME_FIELDS, TrainConfig


def make_identity(
    model_config: PreTrainedConfig, config: TrainConfig, dataset: Any, data: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that resumes it."""
    # What Transformers notes down on the way, or sets while training.
    notes = ("transformers_version", "dtype", "architectures", "use_cache", "_name_or_path")
    model = {key: value for key, value in model_config.to_diff_dict().items() if key not in notes}
    identity = {
        "train": {key: value for key, value in to_dict(config).items() if key not in RUNTIME_FIELDS},
        "model": model,
        "data": {"num_rows": len(dataset), **(data or {})},
    }
    # As it will be read back: no tuples.
    return json.loads(json.dumps(identity))


def check_identity(saved: Mapping[str, Any], asked: Mapping[str, Any], where: Path) -> None:
    """``ValueError`` that names the first key in which two identities differ."""
    for part in ("train", "model", "data"):
        for key in sorted({*saved[part], *asked[part]}):
            old, new = saved[part].get(key), asked[part].get(key)
            if old != new:
                raise ValueError(
                    f"{where} was made with {part}.{key} = {old!r}, this run has {new!r}; "
                    "use the same value or another folder"
                )


def check_row(dataset: Any, model_config: PreTrainedConfig, config: TrainConfig, index: int = 0) -> None:
    """``ValueError`` when a row does not fit the model or the config."""
    if not len(dataset):
        raise ValueError("the data set has no rows")
    row = dataset[index]
    missing = {"input_ids", "labels"} - set(row)
    if missing:
        raise ValueError(f"rows must hold input_ids and labels; got {', '.join(sorted(row))}")
    tokens = torch.as_tensor(row["input_ids"])
    if tokens.shape != (config.sequence_length,):
        raise ValueError(f"rows must hold sequence_length={config.sequence_length} tokens; got {tuple(tokens.shape)}")
    if int(tokens.max()) >= model_config.vocab_size or int(tokens.min()) < 0:
        raise ValueError(f"token {int(tokens.max())} is outside the model's vocabulary of {model_config.vocab_size}")


def check_weights(model: PreTrainedModel) -> None:
    """``ValueError`` unless all weights are float32: 16-bit weights lose small updates, and the decay its range."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"training keeps float32 weights and computes in bf16 by itself; {name} is {parameter.dtype}. "
                "Load with dtype=torch.float32"
            )

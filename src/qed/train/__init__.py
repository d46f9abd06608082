"""One training run from one config to one checkpoint and one record.

Names are imported on first use: a config can be read without the training stack.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qed.train.checkpoint import CheckpointError
    from qed.train.config import TrainConfig
    from qed.train.plan import dry_run
    from qed.train.run import TrainingInterrupted, build_model, train
    from qed.train.trainer import NonFiniteError

__all__ = ["CheckpointError", "NonFiniteError", "TrainConfig", "TrainingInterrupted", "build_model", "dry_run", "train"]

_ROOMS = {"CheckpointError": "checkpoint", "TrainConfig": "config", "dry_run": "plan", "NonFiniteError": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS.get(name, 'run')}"), name)

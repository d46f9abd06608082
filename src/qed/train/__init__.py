"""One training run from one config to one checkpoint and one record."""

from qed.train.checkpoint import CheckpointError
from qed.train.config import TrainConfig
from qed.train.plan import dry_run
from qed.train.run import TrainingInterrupted, build_model, train
from qed.train.trainer import NonFiniteError

__all__ = ["CheckpointError", "NonFiniteError", "TrainConfig", "TrainingInterrupted", "build_model", "dry_run", "train"]

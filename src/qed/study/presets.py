"""Presets: functions that return a whole frozen study. Change one field with ``qed.config.override``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from qed.config import nearest
from qed.data.corpus import DocumentConfig
from qed.data.tokenizer import TokenizerConfig
from qed.evals.config import NiahConfig
from qed.ops import get_arm
from qed.train.config import TrainConfig


@dataclass(frozen=True)
class ModelSize:
    """The fields of ``QEDConfig`` that a study chooses; the tokenizer decides the vocabulary, the run the arm.

    ``backend``: the operator's form; ``None`` chooses by device.
    """

    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 6
    head_dim: int = 128
    intermediate_size: int = 2496
    dt_range: tuple[float, ...] = (0.001, 0.1)
    lambda_max: float = 0.25
    backend: str | None = None


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides one run."""

    arm: str
    seed: int
    model: ModelSize
    tokenizer: TokenizerConfig
    documents: DocumentConfig
    train: TrainConfig
    niah: NiahConfig
    data: str | None = None

    def __post_init__(self) -> None:
        get_arm(self.arm)

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True)
class StudyConfig:
    """A grid of runs that differ in arm and seed only.

    ``title`` heads the report and ``label`` stands beside it, so that no reader takes one scale for another. ``data``:
    a path to prose that takes the place of the embedded one.
    """

    preset: str
    title: str
    label: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    model: ModelSize
    tokenizer: TokenizerConfig
    documents: DocumentConfig
    train: TrainConfig
    niah: NiahConfig
    data: str | None = None

    def __post_init__(self) -> None:
        for arm in self.arms:
            get_arm(arm)
        for name in ("arms", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must name one or more, each once; got {values}")

    def runs(self) -> list[RunConfig]:
        """All runs, arms of one seed together, so that a study cut short still holds pairs."""
        return [
            RunConfig(
                arm=arm,
                seed=seed,
                model=self.model,
                tokenizer=self.tokenizer,
                documents=self.documents,
                train=replace(self.train, seed=seed),
                niah=self.niah,
                data=self.data,
            )
            for seed in self.seeds
            for arm in self.arms
        ]


def laptop() -> StudyConfig:
    """GDN-2 and QED on two CPU cores in minutes: trained at 256 tokens, asked at 256 to 4096.

    What makes it learn, in ten of ten seeds of each arm: loss on the answers (and a little of the prose), documents
    that are mostly of evaluation's own shape and grow from 140 to 256 tokens, small batches, and a slower initial
    decay than the paper's (``dt_range``), at which most channels forget a needle before its question. Trials and seeds:
    ``docs/laptop.md``.
    """
    length, batch_rows, num_steps = 256, 16, 800
    batch_tokens = batch_rows * length
    return StudyConfig(
        preset="laptop",
        title="QED and Gated DeltaNet-2 on needle retrieval",
        label="laptop scale",
        arms=("gdn2", "qed"),
        seeds=(0,),
        model=ModelSize(
            hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=64, intermediate_size=160, dt_range=(1e-4, 1e-2)
        ),
        tokenizer=TokenizerConfig(vocab_size=2048),
        documents=DocumentConfig(
            length=length,
            num_needles=(1, 3),
            num_questions=(1, 3),
            single_share=0.9,
            prose_share=0.02,
            prose_targets=0.05,
            supervise="answers",
            curriculum=0.6,
            first_length=140,
        ),
        train=TrainConfig(
            num_tokens=num_steps * batch_tokens,
            batch_tokens=batch_tokens,
            sequence_length=length,
            micro_batch_rows=batch_rows,
            order="sequential",
            learning_rate=4e-3,
            loss="targets",
            warmup_tokens=30 * batch_tokens,
            decay_start_tokens=num_steps * batch_tokens * 4 // 5,
            log_every_steps=20,
            save_every_seconds=60.0,
            tensorboard=False,
        ),
        niah=NiahConfig(
            lengths=(256, 512, 1024, 2048, 4096), num_examples=200, max_new_tokens=16, fill="unit", split="eval", seed=2
        ),
    )


def smoke() -> StudyConfig:
    """The laptop study cut to seconds: nothing is learned; it shows that everything runs."""
    base = laptop()
    return replace(
        base,
        preset="smoke",
        label="smoke test: too short to learn anything",
        train=replace(
            base.train,
            num_tokens=12 * 1024,
            batch_tokens=1024,
            micro_batch_rows=4,
            log_every_steps=2,
            warmup_tokens=0,
            decay_start_tokens=None,
        ),
        niah=replace(base.niah, lengths=(256, 512), num_examples=4),
    )


PRESETS: dict[str, Callable[[], StudyConfig]] = {"laptop": laptop, "smoke": smoke}


def get_preset(name: str) -> StudyConfig:
    """The study of a preset; a wrong name is a ``ValueError`` that names the nearest right one."""
    if name not in PRESETS:
        raise ValueError(nearest("preset", name, PRESETS))
    return PRESETS[name]()

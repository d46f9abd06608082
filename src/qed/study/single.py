"""``qed train``: one model on prepared token shards, from a preset; under ``torchrun`` or ``accelerate launch`` too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qed.config import nearest, to_dict
from qed.data.shards import open_rows, read_manifest
from qed.data.tokenizer import load_tokenizer
from qed.model.config import QEDConfig
from qed.ops import get_arm
from qed.study.presets import ModelSize
from qed.train import TrainConfig, dry_run, train


@dataclass(frozen=True)
class SingleConfig:
    """One run on prepared shards. ``boundaries``: "concatenate" lets state pass between documents, "reset" does not."""

    arm: str
    model: ModelSize
    train: TrainConfig
    boundaries: Literal["concatenate", "reset"] = "concatenate"


def paper_340m(arm: str, seed: int) -> SingleConfig:
    """The paper's run: 340M parameters, 15B tokens, decay from 13.5B (facts the paper states).

    Its unstated choices are the public GDN-2 recipe's: 1B tokens of warm-up, linear decay to 0, weight decay 0.1, betas
    0.9 and 0.95, gradient norm 1, documents concatenated; an MLP of 2496 gives 341M parameters.
    """
    return SingleConfig(
        arm=arm,
        model=ModelSize(),
        train=TrainConfig(
            num_tokens=15_000_000_000,
            batch_tokens=524_288,
            sequence_length=2048,
            micro_batch_rows=16,
            learning_rate=3e-4,
            theta_lr_multiplier=10.0,
            weight_decay=0.1,
            max_grad_norm=1.0,
            warmup_tokens=1_000_000_000,
            decay_start_tokens=13_500_000_000,
            loss="liger",
            compile=True,
            num_workers=2,
            seed=seed,
        ),
    )


def tiny(arm: str, seed: int) -> SingleConfig:
    """A run of seconds on a CPU, to try data and machine: two layers, 64 steps of 1024 tokens."""
    base = paper_340m(arm, seed)
    return replace(
        base,
        model=ModelSize(hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=32, intermediate_size=160),
        train=replace(
            base.train,
            num_tokens=65_536,
            batch_tokens=1024,
            sequence_length=256,
            micro_batch_rows=2,
            learning_rate=3e-3,
            warmup_tokens=4096,
            decay_start_tokens=49_152,
            loss="logits",
            compile=False,
            num_workers=0,
        ),
    )


PRESETS: dict[str, Callable[[str, int], SingleConfig]] = {"paper-340m": paper_340m, "tiny": tiny}


def get_single(preset: str, arm: str, seed: int) -> SingleConfig:
    """The run of a preset; a wrong preset or arm is a ``ValueError`` that names the nearest right one."""
    if preset not in PRESETS:
        raise ValueError(nearest("training preset", preset, PRESETS))
    get_arm(arm)
    return PRESETS[preset](arm, seed)


def train_single(config: SingleConfig, data: Path, folder: Path, *, only_check: bool = False) -> int:
    """Train to the end (or go on from where the folder's run stopped) and print where it is; the exit status.

    ``only_check`` prints sizes, steps, estimated time and memory, and what stands in the way, without training.
    """
    length = config.train.sequence_length
    manifest = read_manifest(data)
    rows = open_rows(data, row_length=length, boundaries=config.boundaries, check="size" if only_check else "all")
    tokenizer = load_tokenizer(manifest["config"]["tokenizer"])
    model = QEDConfig(
        vocab_size=len(tokenizer),
        arm=config.arm,
        random_direction_seed=config.train.seed,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **to_dict(config.model),
    )
    if only_check:
        plan = dry_run(model, rows, config.train, folder)
        print(json.dumps(plan, indent=1))
        return 2 if plan["problems"] else 0
    description = {"boundaries": config.boundaries, "manifest": manifest}
    record = train(model, tokenizer, rows, config.train, folder, data=description, record_extra={"arm": config.arm})
    print(f"{record['num_tokens']:,} tokens, loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s")
    print(f"checkpoint: {folder / 'checkpoint'}")
    return 0

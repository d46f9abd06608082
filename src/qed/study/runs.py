"""One run: tokenizer, model, data, training and evaluation of one arm and seed, from one config."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from qed.config import to_dict
from qed.data.corpus import Documents, needle_texts
from qed.data.packing import GeneratedRows
from qed.data.prose import load_prose, text_hash
from qed.data.sources import read_texts
from qed.data.tokenizer import TokenizerConfig, train_tokenizer
from qed.evals.niah import evaluate, needle_tasks
from qed.model.config import QEDConfig
from qed.study.presets import RunConfig
from qed.train import train

NUM_TOKENIZER_NEEDLES = 2000


def make_tokenizer(config: TokenizerConfig, prose: list[str]) -> PreTrainedTokenizerBase:
    """A tokenizer trained on the prose and on needle documents of the training half; the same for the same prose."""
    return train_tokenizer([*prose, *needle_texts(NUM_TOKENIZER_NEEDLES, seed=0)], config)


def model_config(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> QEDConfig:
    return QEDConfig(
        vocab_size=len(tokenizer),
        arm=config.arm,
        random_direction_seed=config.seed,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **to_dict(config.model),
    )


def execute(config: RunConfig, folder: Path, *, progress: bool = False) -> None:
    """Bring one run folder to done: what it holds already is not done again, what it holds in part goes on."""
    prose = load_prose() if config.data is None else list(read_texts(config.data))
    tokenizer = make_tokenizer(config.tokenizer, prose)
    documents = Documents(config.documents, tokenizer, prose)
    needle_tasks(config.niah, tokenizer)  # an impossible length is refused before training
    num_rows = config.train.num_steps * config.train.batch_rows
    rows = GeneratedRows(documents, row_length=config.train.sequence_length, num_rows=num_rows, seed=config.seed)
    train(
        model_config(config, tokenizer),
        tokenizer,
        rows,
        config.train,
        folder,
        data={
            "documents": to_dict(config.documents),
            "tokenizer": to_dict(config.tokenizer),
            "prose": text_hash(prose),
        },
        progress=progress,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", device_map=device)
    evaluate(model, tokenizer, config.niah, folder, progress=progress)

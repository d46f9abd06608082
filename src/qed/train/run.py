"""``train``: one run from one config to one checkpoint and one record."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from qed.config import config_hash, to_dict
from qed.records import provenance, read_json, read_rows, write_json, write_rows
from qed.train import checkpoint
from qed.train.checks import check_identity, check_row, check_weights, make_identity
from qed.train.config import TrainConfig
from qed.train.loss import liger_cross_entropy, target_cross_entropy, use_linear_cross_entropy
from qed.train.measure import peak_bytes, strengths
from qed.train.start import block_compilation, compile_kernels
from qed.train.trainer import RunTrainer

RECORD, ROWS, FINAL, RESUME = "train.json", "train.jsonl", "checkpoint", "resume"


class TrainingInterrupted(Exception):
    """SIGTERM or Ctrl-C: the state was saved; calling ``train`` again goes on from ``step``."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(f"stopped after step {step}; run again to go on from there ({folder})")
        self.step, self.folder = step, folder


def build_model(model_config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Fresh float32 weights from a seed; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)


def train(
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Any,
    config: TrainConfig,
    folder: Path | str,
    *,
    data: Mapping[str, Any] | None = None,
    record_extra: Mapping[str, Any] | None = None,
    use_cpu: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Train to the end of ``config`` and return the record, which is also ``folder/train.json``.

    ``model`` is a model, or a config from which one is built with ``config.seed``. ``dataset`` is a map-style data set
    of rows ``{"input_ids", "labels"}`` of ``config.sequence_length`` tokens, labels not shifted and -100 where there is
    no target; rows may hold ``cu_seqlens`` (document offsets from 0 to the row's length). ``data`` describes it in JSON
    values (its config or manifest) and is part of the run's identity. ``record_extra`` is copied into the record.

    Writes ``train.jsonl`` (a row every ``log_every_steps``), ``resume/`` while it runs, then ``checkpoint/`` (weights,
    config, tokenizer), and the record last. A finished folder is not trained again; an unfinished one goes on from its
    last checkpoint.

    Raises ``ValueError`` when the folder holds a run with another config, naming the key, or when the data do not fit;
    ``TrainingInterrupted`` after SIGTERM or Ctrl-C; ``CheckpointError`` when the disk is full; ``NonFiniteError`` after
    ``max_nonfinite_steps``.
    """
    folder = Path(folder)
    model_config = model if isinstance(model, PreTrainedConfig) else model.config
    identity = make_identity(model_config, config, dataset, data)
    if (folder / RECORD).exists():
        record = read_json(folder / RECORD)
        check_identity(record["identity"], identity, folder / RECORD)
        return record
    check_row(dataset, model_config, config)
    root = folder / RESUME
    checkpoints = checkpoint.list_checkpoints(root)
    if checkpoints:
        check_identity(read_json(checkpoints[-1] / checkpoint.STATE)["identity"], identity, checkpoints[-1])
    if isinstance(model, PreTrainedConfig):
        model = build_model(model, config.seed)
    check_weights(model)
    use_cache = model.config.use_cache

    args = training_arguments(config, folder, use_cpu=use_cpu)
    accumulation = config.accumulation_steps(args.world_size)
    args.gradient_accumulation_steps = accumulation
    writer = args.process_index == 0
    packed = "cu_seqlens" in dataset[0]
    threads = [] if packed else compile_kernels(model, config, args.device, bf16=args.bf16)
    prepare_model(model, config)
    trainer = RunTrainer(
        model,
        args,
        config,
        dataset,
        root=root,
        rows_path=folder / ROWS,
        identity=identity,
        callbacks=[Bar(config)] if progress and writer else [],
    )
    trainer.remove_callback(PrinterCallback)
    if checkpoints:
        trainer.resume_from(checkpoints[-1])
    if writer:
        if config.tensorboard is not False and find_spec("tensorboard"):
            trainer.add_callback(tensorboard_callback(folder, first_step=trainer.first_step))
        checkpoint.sweep(root)
        rows = read_rows(folder / ROWS) if (folder / ROWS).exists() else []
        write_rows(folder / ROWS, [row for row in rows if row["step"] <= trainer.first_step])
    try:
        with stop_on_signals(trainer), block_compilation() if config.compile else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    finally:
        model.config.use_cache = use_cache
        for thread in threads:
            thread.join()
    if trainer.state.global_step < config.num_steps:
        raise TrainingInterrupted(trainer.state.global_step, folder)

    final_strengths = strengths(trainer.model)
    save_final(trainer, tokenizer, folder / FINAL)
    meter = trainer.meter
    speed = config.num_steps * config.batch_tokens / meter.seconds
    record = {
        "status": "done",
        "num_steps": config.num_steps,
        "num_tokens": config.num_steps * config.batch_tokens,
        "loss": trainer.last_row["loss"],
        "num_parameters": meter.num_parameters,
        "lambda": final_strengths,
        "seconds": meter.seconds,
        "tokens_per_second": speed,
        "mfu": meter.mfu(speed),
        "peak_tflops": meter.peak_tflops,
        "peak_bytes": peak_bytes(),
        "data_share": meter.data_seconds / meter.seconds,
        "skipped_steps": meter.skipped,
        "resumed_at": trainer.resumed_at,
        "num_processes": args.world_size,
        "accumulation_steps": accumulation,
        "precision": "bf16" if args.bf16 else "fp32",
        "config": to_dict(config),
        "config_hash": config_hash(config),
        "identity": identity,
        "extra": dict(record_extra or {}),
        "provenance": provenance(seed=config.seed, device=str(args.device)),
    }
    if writer:
        write_json(folder / RECORD, record)
        shutil.rmtree(root, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return record


def computes_in_bf16(config: TrainConfig, *, use_cpu: bool = False) -> bool:
    """What ``precision`` means on this machine."""
    able = torch.cuda.is_available() and not use_cpu and torch.cuda.is_bf16_supported()
    return config.precision == "bf16" or (config.precision == "auto" and able)


def training_arguments(config: TrainConfig, folder: Path, *, use_cpu: bool = False) -> TrainingArguments:
    """``Trainer``'s arguments; what this room does itself is switched off in it."""
    on_gpu = torch.cuda.is_available() and not use_cpu
    if config.loss == "liger" and not (on_gpu and find_spec("liger_kernel")):
        raise ValueError("loss='liger' needs a CUDA device and liger-kernel (pip install 'qed-attention[gpu]')")
    if config.wandb and not find_spec("wandb"):
        raise ValueError("wandb=True needs Weights & Biases: pip install wandb")
    if config.tensorboard and not find_spec("tensorboard"):
        raise ValueError("tensorboard=True needs TensorBoard: pip install tensorboard")
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.num_steps,
        per_device_train_batch_size=config.micro_batch_rows,
        learning_rate=config.learning_rate,
        max_grad_norm=config.max_grad_norm or float("inf"),
        bf16=computes_in_bf16(config, use_cpu=use_cpu),
        use_cpu=use_cpu,
        seed=config.seed,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to=["wandb"] if config.wandb else [],
        run_name=folder.name,
        disable_tqdm=True,
        # The sampler starts at the checkpoint's position itself.
        ignore_data_skip=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
    if args.n_gpu > 1:
        # One process has one GPU, here as under a launcher; Trainer would split its batch over all that it sees.
        args._n_gpu = 1
    return args


def tensorboard_callback(folder: Path, *, first_step: int) -> TrainerCallback:
    """Events under ``tensorboard/``; those after the step that a run goes on from are dropped."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1))


def prepare_model(model: PreTrainedModel, config: TrainConfig) -> None:
    """Switch on what the config asks for: recomputation, compiled blocks, the fused loss."""
    if config.activation_checkpointing:
        enable_activation_checkpointing(model)
    if config.loss == "liger":
        use_linear_cross_entropy(model, liger_cross_entropy())
    elif config.loss == "targets":
        use_linear_cross_entropy(model, target_cross_entropy)
    if config.compile:
        names = set(model._no_split_modules or ())
        blocks = [module for module in model.modules() if type(module).__name__ in names]
        if not blocks:
            raise ValueError(f"compile=True: {type(model).__name__}._no_split_modules names no repeated block")
        for block in blocks:
            block.compile()


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each block in the backward pass; Transformers renamed the method on the way to version 6."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def save_final(trainer: RunTrainer, tokenizer: PreTrainedTokenizerBase | None, target: Path) -> None:
    """``checkpoint/``: full weights, config and tokenizer, written beside and renamed."""
    model, writer = trainer.model, trainer.state.is_world_process_zero
    state = checkpoint.gather(checkpoint.model_tensors(model), keep=writer) if trainer.is_fsdp_enabled else None
    if writer:
        part = target.with_name(f".{target.name}.part")
        for path in (part, target):
            shutil.rmtree(path, ignore_errors=True)
        with quiet_transformers():
            trainer.accelerator.unwrap_model(model, keep_torch_compile=False).save_pretrained(part, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        os.replace(part, target)
    trainer.accelerator.wait_for_everyone()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without Transformers' own progress bars, which would break this project's line."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def stop_on_signals(trainer: RunTrainer) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask for a save and a stop after the step; a second Ctrl-C stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and trainer.stop_requested:
            raise KeyboardInterrupt
        trainer.stop_requested = True

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Bar(TrainerCallback):
    """One line: steps, time left, loss, tokens a second, MFU and memory."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar = tqdm(total=self.config.num_steps, initial=state.global_step, unit="step", desc="train")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar.update()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.bar is None or not logs:
            return
        shown = {"loss": f"{logs.get('loss', float('nan')):.3f}", "tok/s": f"{logs['tokens_per_second']:,.0f}"}
        if "mfu" in logs:
            shown["mfu"] = f"{logs['mfu']:.1%}"
        shown["GiB"] = f"{peak_bytes() / 2**30:.1f}"
        self.bar.set_postfix(shown, refresh=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()

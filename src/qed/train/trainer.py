"""Hugging Face ``Trainer`` with this project's data order, optimizer, checkpoints and log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from qed.records import read_json, write_json
from qed.train import checkpoint
from qed.train.config import TrainConfig
from qed.train.measure import Meter, strengths
from qed.train.optimizer import make_optimizer, rate_factor
from qed.train.rows import MicroBatches, count_targets, make_loader


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


class RunTrainer(Trainer):
    """One run. ``identity`` is what must agree for a checkpoint to be resumed; ``root`` holds the checkpoints.

    Per update step the host reads the device once: whether loss and gradient are finite and, with several processes,
    whether any was asked to stop or to save.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        config: TrainConfig,
        dataset: Any,
        *,
        root: Path,
        rows_path: Path,
        identity: dict[str, Any],
        callbacks: list[TrainerCallback],
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=dataset, callbacks=[*callbacks, Flow(self)])
        if self.is_fsdp_enabled:
            # Shards are gathered in float32 and autocast chooses the compute type, as without sharding: a policy that
            # casts parameters would round the decay's, which must stay float32.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        self.config, self.root, self.rows_path, self.identity = config, root, rows_path, identity
        self.meter = Meter(config, model, num_processes=args.world_size)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.first_step = 0
        self.resumed_at: list[int] = []
        self.stop_requested = False
        self.stopping = False
        self.save_due = False
        self.last_save_time = time.monotonic()
        self.last_row: dict[str, Any] = {}
        self._step_loss = torch.zeros((), dtype=torch.float64, device=args.device)

    # Data: the sampler shares rows out itself, so that a step's rows do not depend on the number of processes.

    def get_train_dataloader(self) -> Any:
        sampler = MicroBatches(
            len(self.train_dataset),
            self.config,
            rank=self.args.process_index,
            num_processes=self.args.world_size,
            first_step=self.first_step,
        )
        return make_loader(self.train_dataset, sampler, pin_memory=self.args.device.type == "cuda")

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor]:
        start = time.perf_counter()
        batches = [batch for _ in range(num_batches) if (batch := next(epoch_iterator, None)) is not None]
        targets = torch.stack([count_targets(batch["labels"]) for batch in batches]).sum()
        batches = [{name: value.to(device, non_blocking=True) for name, value in batch.items()} for batch in batches]
        targets = targets.to(device, non_blocking=True)
        if self.args.world_size > 1:
            dist.all_reduce(targets)
        self.meter.data_seconds += time.perf_counter() - start
        return batches, targets.clamp(min=1)

    # One micro-batch: the loss is the sum over its targets, divided by the targets of the whole step.

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        self._step_loss += loss.detach()
        return loss.detach().nan_to_num(0.0, 0.0, 0.0)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        # Gradients are averaged over processes, the loss is divided by the targets of all.
        loss = outputs.loss * self.args.world_size if self.args.world_size > 1 else outputs.loss
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0

    # The update.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model if model is None else model, self.config)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.lr_scheduler is None:
            # Accelerate's wrapper only guards the fp16 scaler, which no precision here uses, at a cost every step.
            if isinstance(self.optimizer, AcceleratedOptimizer):
                self.optimizer = self.optimizer.optimizer
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: rate_factor(self.config, step)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        if self.is_fsdp_enabled:
            norm = super()._clip_grad_norm(model)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        finite = torch.isfinite(self._step_loss) & torch.isfinite(norm)
        if self.args.world_size > 1:
            flags = torch.stack([~finite, *(finite.new_tensor(flag) for flag in (self.stop_requested, self._due()))])
            flags = flags.to(torch.int32)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            bad, self.stopping, self.save_due = map(bool, flags.tolist())
        else:
            bad, self.save_due = not bool(finite), self._due()
        if bad:
            # Without gradients the optimizer leaves weights and statistics as they are.
            self.optimizer.zero_grad(set_to_none=True)
            self.meter.skip()
            if self.meter.skipped_in_a_row >= self.config.max_nonfinite_steps:
                raise NonFiniteError(
                    f"step {self.state.global_step + 1}: loss or gradient not finite for "
                    f"{self.meter.skipped_in_a_row} steps in a row (max_nonfinite_steps); stopped"
                )
        else:
            self.meter.add(self._step_loss)
        self._step_loss.zero_()
        return norm

    def _due(self) -> bool:
        step, config = self.state.global_step + 1, self.config
        by_steps = config.save_every_steps > 0 and step % config.save_every_steps == 0
        by_time = 0 < config.save_every_seconds <= time.monotonic() - self.last_save_time
        return (by_steps or by_time) and step < config.num_steps

    # Seeing.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" not in logs:
            return
        row = self.meter.row(
            step=self.state.global_step,
            learning_rate=logs["learning_rate"],
            grad_norm=logs["grad_norm"],
            strength=strengths(self.model),
        )
        self.last_row = row
        if self.state.is_world_process_zero:
            with open(self.rows_path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        for layer, heads in enumerate(row.get("lambda", ())):
            numbers |= {f"lambda/layer{layer:02d}/head{head:02d}": value for head, value in enumerate(heads)}
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, numbers)

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, keep = self.state.global_step, self.state.is_world_process_zero
        weights = checkpoint.gather(checkpoint.model_tensors(self.model), keep=keep)
        statistics = checkpoint.gather(checkpoint.optimizer_tensors(self.model, self.optimizer), keep=keep)
        random_states = gather_object([checkpoint.random_state()])
        state = {
            "step": step,
            "next_row": step * self.config.batch_rows,
            "schedule": {key: value for key, value in self.lr_scheduler.state_dict().items() if key != "lr_lambdas"},
            "meter": self.meter.state(),
            "resumed_at": self.resumed_at,
            "random": random_states,
            "identity": self.identity,
        }

        def write(part: Path) -> None:
            checkpoint.write_tensors(part / checkpoint.MODEL, weights)
            checkpoint.write_tensors(part / checkpoint.OPTIMIZER, statistics)
            self.state.save_to_json(str(part / TRAINER_STATE_NAME))
            write_json(part / checkpoint.STATE, state)

        if keep:
            size = checkpoint.num_bytes(self.model)
            checkpoint.save(self.root, step, write, num_bytes=size, keep=self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()
        self.last_save_time = time.monotonic()

    def resume_from(self, path: Path) -> None:
        """Take up position and counters of a checkpoint; weights and statistics follow inside ``train``."""
        state = read_json(path / checkpoint.STATE)
        self.first_step = state["step"]
        self.resumed_at = [*state["resumed_at"], state["step"]]
        self.meter.restore(state["meter"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint.load_model(Path(resume_from_checkpoint), self.model if model is None else model)

    def _load_optimizer_and_scheduler(self, checkpoint_path: str | None) -> None:
        if checkpoint_path is None:
            return
        checkpoint.load_optimizer(Path(checkpoint_path), self.model, self.optimizer)
        schedule = read_json(Path(checkpoint_path) / checkpoint.STATE)["schedule"]
        self.lr_scheduler.load_state_dict({**schedule, "lr_lambdas": [None] * len(self.optimizer.param_groups)})
        for group, rate in zip(self.optimizer.param_groups, schedule["_last_lr"], strict=True):
            group["lr"] = rate

    def _load_scaler(self, checkpoint_path: str | None) -> None:
        return

    def _load_rng_state(self, checkpoint_path: str | None) -> None:
        if checkpoint_path is not None:
            states = read_json(Path(checkpoint_path) / checkpoint.STATE)["random"]
            # With more processes than before, the additional ones keep the state their seed gave.
            if self.args.process_index < len(states):
                checkpoint.restore_random_state(states[self.args.process_index])


class Flow(TrainerCallback):
    """When to log, save and stop."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.model_wrapped.train()
        self.trainer.meter.start()
        self.trainer.last_save_time = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self.trainer
        if args.world_size == 1:
            trainer.stopping = trainer.stop_requested
        control.should_log = (
            state.global_step == 1
            or state.global_step % trainer.config.log_every_steps == 0
            or state.global_step == state.max_steps
        )
        control.should_save = trainer.save_due or (trainer.stopping and state.global_step < state.max_steps)
        control.should_training_stop = control.should_training_stop or trainer.stopping

"""What one training run needs to know; every field states its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Fields that change how a run is carried out or watched, not what it computes: a run may be resumed with others.
RUNTIME_FIELDS = frozenset(
    {
        "num_workers",
        "prefetch_factor",
        "log_every_steps",
        "save_every_steps",
        "save_every_seconds",
        "keep_checkpoints",
        "max_nonfinite_steps",
        "tensorboard",
        "wandb",
        "peak_tflops",
    }
)

_POSITIVE = (
    "num_tokens",
    "batch_tokens",
    "sequence_length",
    "micro_batch_rows",
    "learning_rate",
    "epsilon",
    "prefetch_factor",
    "log_every_steps",
    "keep_checkpoints",
    "max_nonfinite_steps",
)
_ZERO_OR_MORE = (
    "theta_lr_multiplier",
    "weight_decay",
    "max_grad_norm",
    "warmup_tokens",
    "num_workers",
    "save_every_steps",
    "save_every_seconds",
    "seed",
)


@dataclass(frozen=True)
class TrainConfig:
    """One run: AdamW under a warm-up, stable, decay schedule, a fixed number of tokens a step.

    The number of gradient accumulation steps is derived: ``batch_tokens / (sequence_length * micro_batch_rows *
    processes)``, and must be whole. Row order depends on ``seed`` alone, so the same rows make the same step whatever
    the micro-batch and the number of processes.
    """

    num_tokens: int
    """Length of the run, in tokens; rounded up to whole steps."""
    batch_tokens: int = 524_288
    """Tokens an optimizer step, over all processes and micro-batches."""
    sequence_length: int = 2048
    """Tokens a row."""
    micro_batch_rows: int = 16
    """Rows a process sends through the model at once."""
    seed: int = 0
    """Seed of the weights, the row order and every other draw."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Row order: a new permutation each pass, or the data set's own order (a curriculum)."""

    learning_rate: float = 3e-4
    """Peak rate of AdamW."""
    theta_lr_multiplier: float = 10.0
    """Rate of the strength parameters (``theta``), in multiples of ``learning_rate``."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's decay of the mean of squares."""
    epsilon: float = 1e-8
    """AdamW's addition to the denominator."""
    weight_decay: float = 0.1
    """Decoupled decay a step, in multiples of the rate; none on norms, ``A_log``, ``dt_bias``, biases and ``theta``."""
    max_grad_norm: float = 1.0
    """Global gradient norm to which larger gradients are scaled; 0 leaves them as they are."""

    warmup_tokens: int = 0
    """Tokens over which the rate rises linearly from 0 to its peak."""
    decay_start_tokens: int | None = None
    """Tokens after which the rate falls; None: never (warm-up, then constant)."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the fall: straight, half a cosine, or ``1 - sqrt`` of the part of the decay that has passed."""
    final_lr_ratio: float = 0.0
    """Rate at the last step, in multiples of the peak."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type, weights always float32; auto: bf16 under autocast on a GPU that has it, else fp32."""
    loss: Literal["logits", "targets", "liger"] = "logits"
    """Cross-entropy from all logits; from those of trained positions only; or liger-kernel's fused form, which never
    stores them (CUDA)."""
    compile: bool = False
    """Compile the repeated block (one compilation serves every layer)."""
    activation_checkpointing: bool = False
    """Keep only each block's input for the backward pass and compute the rest again."""

    num_workers: int = 0
    """Processes that read rows ahead; 0 reads in the training process."""
    prefetch_factor: int = 4
    """Micro-batches each worker holds ready."""
    log_every_steps: int = 10
    """Steps between two rows of ``train.jsonl``."""
    save_every_steps: int = 0
    """Steps between two resumable checkpoints; 0: by time only."""
    save_every_seconds: float = 900.0
    """Seconds between two resumable checkpoints; 0: by steps only."""
    keep_checkpoints: int = 2
    """Resumable checkpoints kept while the run goes on."""
    max_nonfinite_steps: int = 10
    """Steps in a row with a non-finite loss or gradient after which training stops."""
    tensorboard: bool | None = None
    """Write TensorBoard events; None: when tensorboard is installed."""
    wandb: bool = False
    """Log to Weights & Biases (must be installed)."""
    peak_tflops: float | None = None
    """Stated peak of one device, in TFLOP/s, for the MFU; None: by device name where known, else no MFU."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")
        for name in _ZERO_OR_MORE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1); got {getattr(self, name)}")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ValueError(f"final_lr_ratio must be in [0, 1]; got {self.final_lr_ratio}")
        if self.batch_tokens % self.sequence_length:
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of sequence_length ({self.sequence_length})"
            )
        if self.batch_rows % self.micro_batch_rows:
            raise ValueError(
                f"a step holds batch_tokens / sequence_length = {self.batch_rows} rows, which must be a multiple of "
                f"micro_batch_rows ({self.micro_batch_rows})"
            )
        if self.decay_start_tokens is not None and not self.warmup_tokens <= self.decay_start_tokens <= self.num_tokens:
            raise ValueError(
                f"decay_start_tokens must lie between warmup_tokens ({self.warmup_tokens}) and num_tokens "
                f"({self.num_tokens}); got {self.decay_start_tokens}"
            )

    @property
    def batch_rows(self) -> int:
        """Rows an optimizer step, over all processes."""
        return self.batch_tokens // self.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return -(-self.num_tokens // self.batch_tokens)

    def accumulation_steps(self, num_processes: int) -> int:
        """Micro-batches a process adds up in one step; ``ValueError`` when they do not divide the batch."""
        steps, rest = divmod(self.batch_rows, self.micro_batch_rows * num_processes)
        if rest or not steps:
            raise ValueError(
                f"{self.batch_rows} rows a step cannot be split evenly over {num_processes} processes of "
                f"micro_batch_rows={self.micro_batch_rows}; change micro_batch_rows or batch_tokens"
            )
        return steps

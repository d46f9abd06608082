"""Frozen tile choices of the Triton kernels: nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Tokens of one chunk (one inverse), and of one block (one stored state in the backward).
CHUNK = 16
BLOCK = 64
# Longer than any sequence.
UNSPLIT = 1 << 30
# A split sequence's shortest segment, and the programs that one split aims at.
MIN_SEGMENT = 1024
PROGRAMS = 192


@dataclass(frozen=True)
class Plan:
    """How one call is cut up. ``operand`` is the dtype of products' operands; ``precision`` and ``exact`` are Triton's
    ``input_precision`` for them and for joined states; rows are of V, channels of K."""

    operand: torch.dtype
    precision: str
    exact: str
    prepare_channels: int = 64
    prepare_warps: int = 1
    walk_rows: int = 64
    walk_warps: int = 4
    walk_stages: int = 3
    reverse_rows: int = 64
    reverse_warps: int = 4
    reverse_stages: int = 2
    gradient_channels: int = 64
    gradient_rows: int = 64
    gradient_stages: int = 2
    gradient_warps: int = 4
    join_rows: int = 16
    join_channels: int = 64
    join_warps: int = 4


# For a card that was never measured.
CONSERVATIVE: dict[str, int] = {
    "walk_rows": 32, "walk_warps": 2, "walk_stages": 1, "reverse_rows": 32, "reverse_warps": 2, "reverse_stages": 1,
    "gradient_stages": 1, "join_channels": 16,
}  # fmt: skip

# What `qed bench tune` may choose from and the tests check, gradients included: changes to the defaults.
SELECTABLE: tuple[dict[str, int], ...] = (
    {},
    {"prepare_channels": 32, "walk_stages": 5, "reverse_stages": 3, "gradient_stages": 1},
    {"prepare_channels": 128, "walk_stages": 4, "gradient_rows": 128, "gradient_stages": 1},
    {"prepare_warps": 2, "walk_stages": 2, "reverse_stages": 4, "gradient_stages": 3, "gradient_warps": 8},
    {
        "walk_rows": 128,
        "walk_warps": 8,
        "reverse_rows": 128,
        "reverse_warps": 8,
        "gradient_channels": 128,
        "gradient_warps": 8,
    },
    {"walk_rows": 32, "walk_warps": 2, "reverse_rows": 32, "reverse_warps": 2, "reverse_stages": 3},
)

# By card, K and V: fields of the bf16 plan that `qed bench tune` found to differ from the defaults.
# sm90, H200, B16 T2048 H6, ms by stages: walk 3 0.110, 4 0.099, 5 0.096, 6 0.099 (states 0.121, 0.112, 0.107, 0.109);
# reverse 2 0.185, 3 0.135, 4 0.124, 5 0.125; gradient passes together 1 0.783, 2 0.756, 3 0.746, 4 0.765.
TABLE: dict[tuple[str, int, int], dict[str, int]] = {
    ("sm90", 128, 128): {"walk_stages": 5, "reverse_stages": 4, "gradient_stages": 3},
}


def card(device: torch.device) -> str:
    """The architecture that a row of ``TABLE`` is for, such as "sm90"; "" without CUDA."""
    return "sm{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""


def plan_for(dtype: torch.dtype, K: int, V: int, card: str = "sm90") -> Plan:
    """The frozen choice for a card; one that was never measured gets tiles that fit 99 KiB of shared memory."""
    known = any(row[0] == card for row in TABLE) or card == "sm90"
    changes = dict({} if known else CONSERVATIVE)
    if dtype is torch.bfloat16:
        return Plan(torch.bfloat16, "tf32", "tf32x3", **{**changes, **TABLE.get((card, K, V), {})})
    # float32 operands, not pipelined: float16 keeps its precision and gains float32's range
    changes.update(walk_stages=1, reverse_stages=1, gradient_rows=32, gradient_stages=1)
    if not known and dtype is torch.float32:
        # 72 KiB of shared memory in place of 112
        changes.update(gradient_channels=32)
    return Plan(torch.float32, "tf32" if dtype is torch.float16 else "tf32x3", "tf32x3", **changes)


def segment_length(num_docs: int, length: int, num_heads: int, V: int, *, packed: bool) -> int:
    """Tokens that one program walks: ``UNSPLIT``, or a power of two where batch x heads would leave the chip idle.

    A pure function of the call's sizes, so that shapes are known without a device. Packed, documents' lengths are not
    known here: one long document is assumed, and shorter ones than a segment cost nothing.
    """
    streams = (1 if packed else num_docs) * num_heads * -(-V // 64)
    if streams >= 64 or length < 2 * MIN_SEGMENT:
        return UNSPLIT
    segment = MIN_SEGMENT
    while 2 * segment * PROGRAMS <= length * streams:
        segment *= 2
    return segment

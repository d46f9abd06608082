"""The cross-entropy of the output head without its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from qed.train.rows import IGNORED

# (hidden [N, D], weight [vocab, D], targets [N]) -> sum of the cross-entropy over targets that are not ignored.
LinearCrossEntropy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def liger_cross_entropy() -> LinearCrossEntropy:
    """liger-kernel's fused form: logits a few hundred tokens at a time, the weight's gradient summed in float32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cuda"):
            # Once here instead of once a chunk inside.
            dtype = torch.get_autocast_dtype("cuda")
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        return liger_fused_linear_cross_entropy(
            hidden, weight, targets, ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32
        )

    return cross_entropy


def target_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logits at the targets alone: far fewer where only answers are trained on. Waits for the device to count them."""
    is_target = targets != IGNORED
    return F.cross_entropy(F.linear(hidden[is_target], weight).float(), targets[is_target], reduction="sum")


def shifted_targets(labels: torch.Tensor) -> torch.Tensor:
    """Labels moved so that position t holds what it predicts."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def use_linear_cross_entropy(model: PreTrainedModel, cross_entropy: LinearCrossEntropy) -> None:
    """Make ``model`` compute its loss from hidden states when it gets labels; its logits are then None."""
    original = model.forward

    def forward(input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        if labels is None:
            return original(input_ids=input_ids, **inputs)
        hidden = model.base_model(input_ids=input_ids, **inputs).last_hidden_state
        if inputs.get("cu_seqlens") is not None:
            labels = labels.index_fill(1, inputs["cu_seqlens"][:-1].long(), IGNORED)
        targets = shifted_targets(labels)
        total = cross_entropy(hidden.flatten(0, 1), model.get_output_embeddings().weight, targets.flatten())
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORED).sum().clamp(min=1)
        return CausalLMOutputWithPast(loss=total / num_items_in_batch)

    model.forward = forward  # type: ignore[method-assign]

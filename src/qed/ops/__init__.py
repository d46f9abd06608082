"""The operator, the erase vectors and what stands around them; needs torch only."""

from qed.ops.api import BACKENDS, check_cu_seqlens, gated_delta_rule
from qed.ops.arms import ARMS, Arm, erase_vector, get_arm
from qed.ops.convolution import short_convolution
from qed.ops.decode import decode_inputs_step_, decode_step_
from qed.ops.gates import gated_norm, silu_product
from qed.ops.inputs import l2_normalize, recurrence_inputs
from qed.ops.prefill import gated_delta_rule_from_projections

__all__ = [
    "ARMS",
    "BACKENDS",
    "Arm",
    "check_cu_seqlens",
    "decode_inputs_step_",
    "decode_step_",
    "erase_vector",
    "gated_delta_rule",
    "gated_delta_rule_from_projections",
    "gated_norm",
    "get_arm",
    "l2_normalize",
    "recurrence_inputs",
    "short_convolution",
    "silu_product",
]

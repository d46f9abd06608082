"""The operator and the erase vectors; needs torch only."""

from qed.ops.api import BACKENDS, check_cu_seqlens, gated_delta_rule
from qed.ops.arms import ARMS, Arm, erase_vector, get_arm
from qed.ops.inputs import l2_normalize, recurrence_inputs

__all__ = [
    "ARMS",
    "BACKENDS",
    "Arm",
    "check_cu_seqlens",
    "erase_vector",
    "gated_delta_rule",
    "get_arm",
    "l2_normalize",
    "recurrence_inputs",
]

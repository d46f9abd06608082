"""Everything that is timed, behind one call shape: named tensors in, ``(o, final state or None)`` out.

A peer's library is imported at its first call. ``system`` names what it computes and from which tensors
(:data:`qed.bench.work.LEAVES`), so that peers of one system are held to one definition.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qed.bench.work import LEAVES
from qed.ops import decode_inputs_step_, decode_step_, gated_delta_rule, gated_delta_rule_from_projections

Call = Callable[[dict[str, Tensor]], tuple[Tensor, "Tensor | None"]]
Step = Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Peer:
    """``call`` runs a sequence and can be differentiated; ``step`` runs one token from a state and returns the new one.

    ``library`` is the package it needs, ``note`` what differs from its neighbours in the table.
    """

    system: str
    library: str
    call: Call | None = None
    step: Step | None = None
    state_dtype: torch.dtype = torch.float32
    devices: tuple[str, ...] = ("cuda", "cpu")
    note: str = ""

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


def _ours(arm: str, backend: str | None) -> Call:
    def call(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        # strength too: an arm without a direction takes it and does not read it
        return gated_delta_rule_from_projections(*(x[name] for name in LEAVES["qed"]), arm=arm, backend=backend)

    return call


def _core(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return gated_delta_rule(*(x[name] for name in LEAVES["core"]))


def _our_step(arm: str) -> Step:
    def step(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        raw = [x[name] for name in LEAVES["qed"]]
        return decode_inputs_step_(*raw, state, arm=arm), state  # type: ignore[misc, arg-type]

    return step


def _core_step(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, a, g = (x[name] for name in LEAVES["core"])
    return decode_step_(q, k, v, a, g, state), state


def _fla_gdn2(*, disable_recompute: bool) -> Call:
    def call(x: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        from fla.ops.gdn2 import chunk_gdn2

        leaves = {name: x[name] for name in LEAVES["gdn2-prepared"]}
        return chunk_gdn2(**leaves, scale=1.0, disable_recompute=disable_recompute)

    return call


def _fla_gdn2_projections(x: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    from fla.ops.gdn2 import chunk_gdn2

    b, w = x["erase"].sigmoid(), x["write"].sigmoid()
    return chunk_gdn2(
        x["raw_q"], x["raw_k"], x["v"], x["decay"], b, w, scale=1.0, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, A_log=x["A_log"], dt_bias=x["dt_bias"].view(-1),
    )  # fmt: skip


def _fla_kda(x: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    from fla.ops.kda import chunk_kda

    return chunk_kda(**{name: x[name] for name in LEAVES["kda-prepared"]}, scale=1.0)


def _fla_dplr(x: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    from fla.ops.generalized_delta_rule.dplr import chunk_dplr_delta_rule

    return chunk_dplr_delta_rule(x["q"], x["k"], x["gated_v"], x["alpha"], x["k"], x["g"], scale=1.0)


def _fla_step(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    from fla.ops.gdn2 import fused_recurrent_gdn2

    leaves = {name: x[name] for name in LEAVES["gdn2-prepared"]}
    return fused_recurrent_gdn2(**leaves, scale=1.0, initial_state=state, output_final_state=True)


def _fla_step_projections(x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    from fla.ops.gdn2 import fused_recurrent_gdn2

    b, w = x["erase"].sigmoid(), x["write"].sigmoid()
    return fused_recurrent_gdn2(
        x["raw_q"], x["raw_k"], x["v"], x["decay"], b, w, x["A_log"], x["dt_bias"].view(-1), scale=1.0,
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
    )  # fmt: skip


GPU = ("cuda",)
PEERS: dict[str, Peer] = {
    "qed": Peer(
        "qed", "qed", _ours("qed", None), _our_step("qed"), note="norms, gates, decay and erase vector included"
    ),
    "gdn2": Peer("gdn2", "qed", _ours("gdn2", None), _our_step("gdn2"), note="the same kernels, no added direction"),
    "core": Peer("core", "qed", _core, _core_step, note="erase vector given"),
    "qed (bf16 state)": Peer(
        "qed", "qed", None, _our_step("qed"), torch.bfloat16, GPU, note="state rounded once a token"
    ),
    "reference": Peer("qed", "qed", _ours("qed", "reference"), devices=("cpu",), note="token loop"),
    "fla chunk_gdn2": Peer(
        "gdn2-prepared", "fla", _fla_gdn2(disable_recompute=False), _fla_step, devices=GPU, note="gates given"
    ),
    "fla chunk_gdn2 (no recompute)": Peer(
        "gdn2-prepared", "fla", _fla_gdn2(disable_recompute=True), devices=GPU, note="gates given"
    ),
    "fla chunk_gdn2 (projections)": Peer(
        "gdn2",
        "fla",
        _fla_gdn2_projections,
        _fla_step_projections,
        devices=GPU,
        note="norm and decay in its kernels, sigmoids outside",
    ),
    "fla chunk_kda": Peer(
        "kda-prepared", "fla", _fla_kda, devices=GPU, note="one erase gate a head: an easier problem"
    ),
    "fla dplr": Peer("dplr", "fla", _fla_dplr, devices=GPU, note="erase vector given, already multiplied by the decay"),
}

"""The public operator: argument checks and the choice of backend."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from qed.ops import chunked, library, reference
from qed.ops.arms import unknown

BACKENDS = ("reference", "chunked", "triton")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule with a general erase vector (paper section 2).

    For each token, with ``S`` the state of one head::

        Sbar = Diag(exp g) S          # decay first
        S    = Sbar + k (v - Sbar^T a)^T
        o    = S^T q                  # the read sees the edit; no hidden scale

    Args:
        q, k, a: ``[B, T, H, K]`` query, key and erase vector, used as given (nothing is normalised here).
        v: ``[B, T, H, V]`` value, write gate already applied. All four in one dtype.
        g: log-decay, natural log, ``<= 0``, ``-inf`` allowed: ``[B, T, H, K]``, or ``[B, T, H]`` for one
            decay a head, or ``None`` for no decay.
        initial_state: ``[B, H, K, V]`` (``[N, H, K, V]`` with ``cu_seqlens``), zeros when ``None``.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets that pack N documents into a batch of one, from 0 to T.
            Values are checked when they lie on the CPU; on a GPU that would stall it, so
            :func:`check_cu_seqlens` is there to be called once a batch.
        backend: ``"reference"`` (token loop), ``"chunked"`` (PyTorch), ``"triton"`` (CUDA) or ``None``: triton on
            CUDA, chunked elsewhere.

    Returns:
        ``o`` ``[B, T, H, V]`` in v's dtype (float16 overflows where a read-out passes 65,504) and ``final_state``
        ``[B or N, H, K, V]`` in float32 (float64 for float64 inputs). Both are differentiable.

    Raises:
        ValueError: an argument's shape, dtype or device does not fit the others; the message names the layout.
    """
    num_states = check_arguments(q, k, v, a, g, initial_state, cu_seqlens)
    wide = torch.promote_types(q.dtype, torch.float32)
    if g is None:
        g = q.new_zeros((), dtype=wide).expand(q.shape)
    elif g.ndim == 3:
        g = g.unsqueeze(-1).expand(q.shape)
    if initial_state is None:
        initial_state = q.new_zeros((num_states, *q.shape[2:], v.shape[-1]), dtype=wide)
    state = initial_state.to(wide)
    backend = backend or ("triton" if q.is_cuda else "chunked")
    if backend == "triton":
        return library.gated_delta_rule(q, k, v, a, g, state, cu_seqlens)
    with torch.autocast(q.device.type, enabled=False):
        if backend == "reference":
            return _by_document(q, k, v, a, g.to(wide), state, cu_seqlens)
        if backend == "chunked":
            return chunked.recurrence(q, k, v, a, g, state, cu_seqlens)
    raise ValueError(unknown("backend", backend, BACKENDS))


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ``ValueError`` unless offsets rise strictly from 0 to ``num_tokens``. Reads values: waits for a GPU."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != num_tokens or any(x >= y for x, y in pairwise(offsets)):
        shown = offsets if len(offsets) <= 8 else [*offsets[:4], "...", *offsets[-3:]]
        raise ValueError(f"cu_seqlens must rise strictly from 0 to T = {num_tokens}; got {shown}")


def _by_document(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    if cu_seqlens is None:
        return reference.recurrence(q, k, v, a, g, state)
    parts = []
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        q_n, k_n, v_n, a_n, g_n = (x[:, start:end] for x in (q, k, v, a, g))
        parts.append(reference.recurrence(q_n, k_n, v_n, a_n, g_n, state[n : n + 1]))
    return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts], 0)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> int:
    """Check every argument against the others; return the number of states."""
    if q.ndim != 4 or q.numel() == 0:
        raise ValueError(f"q must be [B, T, H, K] with no empty axis; got {list(q.shape)}")
    B, T, H, K = q.shape
    for name, x in (("k", k), ("a", a)):
        if x.shape != q.shape:
            raise ValueError(f"{name} must be [B, T, H, K] = {list(q.shape)} like q; got {list(x.shape)}")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3] or v.shape[3] == 0:
        raise ValueError(f"v must be [B, T, H, V] = [{B}, {T}, {H}, V]; got {list(v.shape)}")
    if g is not None and g.shape not in (q.shape, q.shape[:3]):
        wanted = f"[B, T, H, K] = {list(q.shape)}, [B, T, H] = {[B, T, H]} or None"
        raise ValueError(f"g must be {wanted}; got {list(g.shape)}")
    tensors = {"q": q, "k": k, "v": v, "a": a, "g": g, "initial_state": initial_state}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point; got {tensor.dtype}")
        if name in ("k", "v", "a") and tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must lie on q's device {q.device}; got {tensor.device}")
    num_states = B
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            given = f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}"
            raise ValueError(f"cu_seqlens must be [N + 1] int32 or int64, N >= 1; got {given}")
        if B != 1:
            raise ValueError(f"cu_seqlens packs documents into a batch of one; got B = {B}")
        num_states = cu_seqlens.numel() - 1
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            check_cu_seqlens(cu_seqlens, T)
    expected = [num_states, H, K, v.shape[-1]]
    if initial_state is not None and list(initial_state.shape) != expected:
        states = "B" if cu_seqlens is None else "N"
        raise ValueError(f"initial_state must be [{states}, H, K, V] = {expected}; got {list(initial_state.shape)}")
    return num_states

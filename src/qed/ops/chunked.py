"""The recurrence a chunk at a time: batched matrix products and a short scan over chunks.

Inside a chunk, neighbouring blocks merge pairwise, from single tokens to the whole. Rows (query and erase vector) carry
the decay since their block began, columns (key) the decay until their block ends, so the score of a row with a column
of the block before is a plain product of the two. Each factor is a product of decays: in [0, 1], formed without
differences of logarithms, exact for every decay from 1 to 0, and free of anything that comes after the row.

With P the decayed scores q.k, A those of a.k (strictly lower), S the state before the chunk, and ~ a row or column
scaled over the whole chunk:

    R  = (I + A)^-1 (V - A~ S)            residuals
    O  = Q~ S + P R                       reads
    S' = Diag(decay of the chunk) S + K~^T R

Shapes: B batch, T time, H heads, K key dimension, V value dimension; C tokens of a chunk; X chunks times heads, ordered
by (step of the scan, document, head). Rows are kept as pairs ``[X, C, 2, K]``: the query and MINUS the erase vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qed.ops import reference

# Measured on two cores: larger chunks cost arithmetic, smaller ones calls; a slab keeps its intermediates in cache.
CHUNK = 32
SLAB = 4096


def recurrence(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    g_BTHK: Tensor,
    state_BHKV: Tensor,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function as :func:`qed.ops.reference.recurrence`, for any decay in [-inf, 0] and packed documents.

    Computes in the state's dtype. Differentiable once; a second derivative raises ``RuntimeError`` (T > 1).
    """
    if q_BTHK.shape[1] == 1:
        # A chunk of one token is one step of the loop, which needs a quarter of the calls.
        return reference.recurrence(q_BTHK, k_BTHK, v_BTHV, a_BTHK, g_BTHK.to(state_BHKV.dtype), state_BHKV)
    inputs = (q_BTHK, k_BTHK, v_BTHV, a_BTHK, g_BTHK)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state_BHKV)):
        return _Chunked.apply(*inputs, state_BHKV, cu_seqlens)
    return _forward(inputs, state_BHKV, _plan(v_BTHV, cu_seqlens), None)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, a, g, state, cu_seqlens):  # type: ignore[no-untyped-def,override]
        ctx.plan = _plan(v, cu_seqlens)
        kept: list[_Kept] = []
        o, final_state = _forward((q, k, v, a, g), state, ctx.plan, kept)
        ctx.save_for_backward(q, k, v, a, g, *(x for part in kept for x in part))
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o, d_state):  # type: ignore[no-untyped-def,override]
        # Read once: activation checkpointing refuses a second look.
        saved = ctx.saved_tensors
        inputs, rest = saved[:5], saved[5:]
        kept = [_Kept(*rest[i : i + 4]) for i in range(0, len(rest), 4)]
        with torch.autocast(d_o.device.type, enabled=False):
            gradients, d_state = _backward(inputs, d_o, d_state, ctx.plan, kept, decay_too=ctx.needs_input_grad[4])
        return (*gradients, d_state, None)


class _Kept(NamedTuple):
    """What the backward pass does not compute a second time."""

    state_XKV: Tensor
    residual_XCV: Tensor
    reads_XCC: Tensor
    inverse_XCC: Tensor


class _Part(NamedTuple):
    """Chunks of one size. Step s of the scan works on rows ``offsets[s]`` to ``offsets[s + 1]`` of its grids."""

    chunk: int
    offsets: list[int]
    start: int
    stop: int


class _Packing(NamedTuple):
    """Documents by falling length, so that those still running at a step come first; T stands for padding."""

    order: Tensor
    token_of_slot: Tensor
    slot_of_token: Tensor


class _Plan(NamedTuple):
    parts: list[_Part]
    packing: _Packing | None

    def grids(self, x_BTHD: Tensor) -> list[Tensor]:
        """Views ``[rows, width, tokens, H, D]``, one a part, copies when packed; the last may lack tokens."""
        if self.packing is None:
            return [
                x_BTHD[:, part.start : part.stop].unflatten(1, (len(part.offsets) - 1, -1)).transpose(0, 1)
                for part in self.parts
            ]
        padded = torch.cat([x_BTHD[0], torch.zeros_like(x_BTHD[0, :1])])
        return [padded.index_select(0, self.packing.token_of_slot).unflatten(0, (-1, 1, self.parts[0].chunk))]

    def empty(self, x_BTHD: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A tensor to be written through its grids and then given to :meth:`finish`."""
        if self.packing is None:
            out = torch.empty_like(x_BTHD, memory_format=torch.contiguous_format)
            return out, self.grids(out)
        out = x_BTHD.new_empty(len(self.packing.token_of_slot), *x_BTHD.shape[2:])
        return out, [out.unflatten(0, (-1, 1, self.parts[0].chunk))]

    def finish(self, out: Tensor) -> Tensor:
        return out if self.packing is None else out.index_select(0, self.packing.slot_of_token).unsqueeze(0)


def _plan(v_BTHV: Tensor, cu_seqlens: Tensor | None) -> _Plan:
    T = v_BTHV.shape[1]
    if cu_seqlens is None:
        whole = T // CHUNK
        parts = [_Part(CHUNK, list(range(whole + 1)), 0, whole * CHUNK)] if whole else []
        if T % CHUNK:
            parts.append(_Part(_power_of_two(T % CHUNK), [0, 1], whole * CHUNK, T))
        return _Plan(parts, None)
    starts = cu_seqlens[:-1].long().cpu()
    lengths, order = (cu_seqlens[1:].long().cpu() - starts).sort(descending=True, stable=True)
    starts = starts[order]
    C = min((1 << i for i in range(CHUNK.bit_length())), key=lambda size: _cost(lengths, size))
    num_chunks = -(-lengths // C)
    steps = torch.arange(int(num_chunks[0]))
    active = (num_chunks > steps.unsqueeze(1)).sum(1)
    offsets = torch.cat([active.new_zeros(1), active.cumsum(0)])
    step = steps.repeat_interleave(active)
    document = torch.arange(len(step)) - offsets[step]
    place = (step * C).unsqueeze(1) + torch.arange(C)
    real = place < lengths[document].unsqueeze(1)
    token_of_slot = torch.where(real, place + starts[document].unsqueeze(1), T).flatten()
    slots = (token_of_slot < T).nonzero().squeeze(1)
    slot_of_token = torch.empty(T, dtype=torch.long).index_copy_(0, token_of_slot[slots], slots)
    packing = _Packing(*(x.to(v_BTHV.device) for x in (order, token_of_slot, slot_of_token)))
    return _Plan([_Part(C, offsets.tolist(), 0, T)], packing)


def _cost(lengths: Tensor, chunk: int) -> int:
    """Of packed documents, in tokens: padding, the states of the chunks, and what each step of the scan costs."""
    num_chunks = -(-lengths // chunk)
    return int(num_chunks.sum()) * (chunk + 8) + 32 * int(num_chunks[0])


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Slab(NamedTuple):
    """Neighbouring steps worked on together: rows of the grids, entries of X, and how many of X each step has."""

    grid: slice
    x: slice
    sizes: list[int]


def _slabs(part: _Part, heads: int) -> Iterator[_Slab]:
    """``heads``: X entries a row of the grid."""
    first = 0
    num_steps = len(part.offsets) - 1
    while first < num_steps:
        begin = part.offsets[first]
        last = first + 1
        while last < num_steps and (part.offsets[last + 1] - begin) * heads * part.chunk <= SLAB:
            last += 1
        rows = part.offsets[first : last + 1]
        yield _Slab(
            slice(rows[0], rows[-1]),
            slice(rows[0] * heads, rows[-1] * heads),
            [(end - start) * heads for start, end in itertools.pairwise(rows)],
        )
        first = last


def _load(grids: list[Tensor], chunk: int, dtype: torch.dtype) -> Tensor:
    """``[X, C, len(grids), D]``; tokens that a last chunk lacks are zero and change nothing."""
    rows, width, tokens, H, D = grids[0].shape
    make = torch.empty if tokens == chunk else torch.zeros
    out = make((rows, width, H, chunk, len(grids), D), dtype=dtype, device=grids[0].device)
    for i, x in enumerate(grids):
        out[:, :, :, :tokens, i].copy_(x.transpose(2, 3))
    return out.flatten(0, 2)


def _store(x_XCD: Tensor, grid: Tensor) -> None:
    rows, width, tokens, H, _ = grid.shape
    grid.copy_(x_XCD.unflatten(0, (rows, width, H))[:, :, :, :tokens].transpose(2, 3))


def _load_scores(grids: tuple[Tensor, ...], chunk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``[X, C, 2, K]``, columns and decays ``[X, C, K]``, none scaled yet."""
    q, k, a, g = grids
    rows = _load([q, a], chunk, dtype)
    rows[:, :, 1].neg_()
    return rows, _load([k], chunk, dtype).squeeze(2), _load([g], chunk, dtype).squeeze(2).exp_()


class _Level(NamedTuple):
    """Pairs of neighbouring blocks of n tokens, about to merge; Y = X * C / 2n pairs."""

    later_YRK: Tensor  # 2n rows of the second block
    earlier_YnK: Tensor  # n columns of the first block
    first_Y1K: Tensor  # decay over the first block
    second_Y1K: Tensor


def _pairs(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """First and second blocks of n entries along all but the last axis."""
    pairs = x.view(-1, 2, n, x.shape[-1])
    return pairs[:, 0], pairs[:, 1]


def _scale(x_YRK: Tensor, by_Y1K: Tensor) -> None:
    """In place; row by row where rows are few, as broadcasting over them would be slow."""
    if x_YRK.shape[1] > 2:
        x_YRK.mul_(by_Y1K)
    else:
        for row in x_YRK.unbind(1):
            row.mul_(by_Y1K.squeeze(1))


def _mix(weights_YRN: Tensor, x_YNK: Tensor) -> Tensor:
    """Matrix product; by elements where it is an outer product or a sum of two rows, as those would be slow."""
    if min(weights_YRN.shape[1:]) > 1:
        return torch.bmm(weights_YRN, x_YNK)
    return (weights_YRN.unsqueeze(3) * x_YNK.unsqueeze(1)).sum(2) if weights_YRN.shape[2] > 1 else weights_YRN * x_YNK


def _levels(rows_XCRK: Tensor, cols_XCK: Tensor, decay_XCK: Tensor) -> Iterator[_Level]:
    """Merge blocks in place, yielding each level before it merges; afterwards rows and columns span the chunk."""
    total = decay_XCK
    n = 1
    while n < rows_XCRK.shape[1]:
        first, second = _pairs(total, 1)
        later, earlier = _pairs(rows_XCRK, 2 * n)[1], _pairs(cols_XCK, n)[0]
        yield _Level(later, earlier, first, second)
        _scale(later, first)
        _scale(earlier, second)
        total = first * second
        n *= 2


def _forward(
    inputs: tuple[Tensor, ...], state_BHKV: Tensor, plan: _Plan, kept: list[_Kept] | None
) -> tuple[Tensor, Tensor]:
    dtype = state_BHKV.dtype
    packing = plan.packing
    state = state_BHKV.clone() if packing is None else state_BHKV.index_select(0, packing.order)
    S_all = state.flatten(0, 1)
    H, K, V = state.shape[1:]
    o, o_grids = plan.empty(inputs[2])
    for part, o_grid, *grids in zip(plan.parts, o_grids, *(plan.grids(x) for x in inputs), strict=True):
        C = part.chunk
        heads = o_grid.shape[1] * H
        if kept is not None:
            X = part.offsets[-1] * heads
            keep = _Kept(*(state.new_empty(X, *shape) for shape in ((K, V), (C, V), (C, C), (C, C))))
            kept.append(keep)
        for slab in _slabs(part, heads):
            q, k, v, a, g = (x[slab.grid] for x in grids)
            rows, cols, decay = _load_scores((q, k, a, g), C, dtype)
            reads, inverse, total = _scores(rows, cols, decay)
            values = _load([v], C, dtype).squeeze(2)
            query, erase = rows.unbind(2)
            if kept is None:
                states, residual = values.new_empty(len(values), K, V), torch.empty_like(values)
            else:
                states, residual = keep.state_XKV[slab.x], keep.residual_XCV[slab.x]
            by_step = (x.split(slab.sizes) for x in (states, erase, values, inverse, residual, total, cols.mT))
            for before, erase_s, target, inverse_s, residual_s, total_s, cols_s in zip(*by_step, strict=True):
                S = S_all[: len(before)]
                before.copy_(S)
                torch.bmm(inverse_s, target.baddbmm_(erase_s, S), out=residual_s)
                S.mul_(total_s).baddbmm_(cols_s, residual_s)
            _store(torch.bmm(query, states).baddbmm_(reads, residual), o_grid[slab.grid])
            if kept is not None:
                keep.reads_XCC[slab.x].copy_(reads)
                keep.inverse_XCC[slab.x].copy_(inverse)
    if packing is not None:
        state = torch.empty_like(state).index_copy_(0, packing.order, state)
    return plan.finish(o), state


def _scores(rows: Tensor, cols: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P, (I + A)^-1 and the decay of the chunk ``[X, K, 1]``; rows and columns are scaled in place."""
    X, C, _, K = rows.shape
    reads = rows.new_zeros(X, C, C)
    reads.diagonal(dim1=1, dim2=2).copy_((rows[:, :, 0] * cols).sum(-1))
    rows.mul_(decay.unsqueeze(2))
    inverse = rows.new_ones(X * C, 1, 1)
    total = decay
    for later, earlier, first, second in _levels(rows, cols, decay):
        n = earlier.shape[1]
        cross = torch.bmm(later, earlier.mT).unflatten(1, (n, 2))
        blocks = reads.view(X, -1, 2, n, C // (2 * n), 2, n).diagonal(dim1=1, dim2=4)
        blocks[:, 1, :, 0].permute(0, 3, 1, 2).copy_(cross[:, :, 0].unflatten(0, (X, -1)))
        before, after = inverse.view(-1, 2, n, n).unbind(1)
        inverse = rows.new_zeros(len(cross), 2, n, 2, n)
        inverse[:, 0, :, 0] = before
        inverse[:, 1, :, 1] = after
        inverse[:, 1, :, 0] = torch.bmm(after, torch.bmm(cross[:, :, 1], before))
        inverse = inverse.view(-1, 2 * n, 2 * n)
        total = first * second
    return reads, inverse, total.view(X, K, 1)


def _backward(
    inputs: tuple[Tensor, ...],
    d_o: Tensor,
    d_state_BHKV: Tensor,
    plan: _Plan,
    kept: list[_Kept],
    *,
    decay_too: bool,
) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of ``q k v a g`` and of the initial state, from those of the output and of the final state.

    With dX the gradient of X, and S' the state after the chunk::

        dR = P^T dO + K~ dS'                dV  = (I + A)^-T dR
        dP = dO R^T                         dA  = -dV R^T
        dQ~ = dO S^T    dA~ = -dV S^T       dK~ = R dS'^T
        dS = Diag(decay of the chunk) dS' + Q~^T dO - A~^T dV

    Then blocks come apart as they merged. What a block's decay scaled (rows of the next block, columns of the one
    before, the state) gives the gradient of its logarithm, and both halves inherit it: sums only, no differences, so
    the gradient of a decay is as exact as the decay, down to zero.
    """
    dtype = d_state_BHKV.dtype
    packing = plan.packing
    d_state = d_state_BHKV.clone() if packing is None else d_state_BHKV.index_select(0, packing.order)
    dS_all = d_state.flatten(0, 1)
    H = d_state.shape[1]
    q, k, _, a, g = inputs
    sources = [plan.grids(x) for x in (q, k, a, g, d_o)]
    d_inputs, d_grids = zip(*(plan.empty(x) for x in inputs[: 4 + decay_too]), strict=True)
    for i, part in reversed(list(enumerate(plan.parts))):
        C = part.chunk
        heads = d_grids[0][i].shape[1] * H
        for slab in reversed(list(_slabs(part, heads))):
            state, residual, reads, inverse = (x[slab.x] for x in kept[i])
            *scores, d_out = (x[i][slab.grid] for x in sources)
            rows, cols, decay = _load_scores(tuple(scores), C, dtype)
            query, erase, key = *rows.unbind(2), cols
            rows, cols = rows * decay.unsqueeze(2), cols.clone()
            levels = []
            total = decay
            for level in _levels(rows, cols, decay):
                levels.append(level._replace(later_YRK=level.later_YRK.clone(), earlier_YnK=level.earlier_YnK.clone()))
                total = level.first_Y1K * level.second_Y1K
            total = total.view(-1, total.shape[-1], 1)
            # Reads and responses to the erase vector, side by side as in the rows.
            d_response = state.new_empty(len(state), C, 2, state.shape[-1])
            d_response[:, :, 0] = d_out = _load([d_out], C, dtype).squeeze(2)
            d_residual = torch.bmm(reads.mT, d_out)
            d_states = torch.empty_like(state)
            paired = rows.flatten(1, 2).mT, d_response.flatten(1, 2)
            scanned = (d_states, d_residual, cols, inverse.mT, d_response[:, :, 1], total, *paired)
            by_step = (reversed(x.split(slab.sizes)) for x in scanned)
            for after, d_residual_s, cols_s, inverse_s, d_value, total_s, rows_s, d_response_s in zip(
                *by_step, strict=True
            ):
                dS = dS_all[: len(after)]
                after.copy_(dS)
                d_value.copy_(torch.bmm(inverse_s, d_residual_s.baddbmm_(cols_s, dS)))
                dS.mul_(total_s).baddbmm_(rows_s, d_response_s)
            d_rows = torch.bmm(d_response.flatten(1, 2), state.mT)
            d_cols = torch.bmm(residual, d_states.mT)
            # Gradient of the logarithm of each block's decay, handed down from the chunk to its tokens.
            d_log = (d_states.mul_(state).sum(-1, keepdim=True) * total).mT if decay_too else None
            for later, earlier, first, second in reversed(levels):
                n = earlier.shape[1]
                d_later, d_earlier = _pairs(d_rows, 2 * n)[1], _pairs(d_cols, n)[0]
                _scale(d_later, first)
                _scale(d_earlier, second)
                if d_log is not None:
                    grown = [(later * d_later).sum(1, keepdim=True), (earlier * d_earlier).sum(1, keepdim=True)]
                    d_log = (torch.cat(grown, 1) + d_log.reshape(-1, 1, d_log.shape[-1])).view(-1, 1, d_log.shape[-1])
                d_cross = torch.bmm(_pairs(d_response, 2 * n)[1], _pairs(residual, n)[0].mT)
                d_later.add_(_mix(d_cross, earlier))
                d_earlier.add_(_mix(d_cross.mT, later))
            d_query, d_erase = d_rows.view_as(rows).mul_(decay.unsqueeze(2)).unbind(2)
            if d_log is not None:
                d_decay = d_log.view_as(decay).addcmul_(query, d_query).addcmul_(erase, d_erase)
                _store(d_decay, d_grids[4][i][slab.grid])
            d_self = (d_out * residual).sum(-1, keepdim=True)
            _store(d_query.addcmul_(d_self, key), d_grids[0][i][slab.grid])
            _store(d_cols.addcmul_(d_self, query), d_grids[1][i][slab.grid])
            _store(d_response[:, :, 1], d_grids[2][i][slab.grid])
            _store(d_erase.neg_(), d_grids[3][i][slab.grid])
    if packing is not None:
        d_state = torch.empty_like(d_state).index_copy_(0, packing.order, d_state)
    return [plan.finish(x) for x in d_inputs] + [None] * (not decay_too), d_state

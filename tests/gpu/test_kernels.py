"""The Triton kernels on a CUDA device, held against the float64 token loop by the error rule of ``qed.testing``."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from qed.ops import gated_delta_rule
from qed.testing import NAMES, error_rule, make_inputs, rms, rounded_recurrence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Three TF32 passes keep 22 bits, four ulps of float32; float16 runs in TF32, which cuts off where float16 rounds.
ULPS = {torch.bfloat16: 1.0, torch.float16: 2.0, torch.float32: 8.0}
DECAYS = ("usual", "none", "strong", "mixed", "resets")


def _case(dtype, B, T, H, K, V, *, decay="usual", num_docs=None, seed=0):
    """Inputs with a state, and cotangents for both outputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = make_inputs(B, T, H, K, V, dtype, "cuda", generator=generator, decay=decay)
    state = torch.randn(num_docs or B, H, K, V, generator=generator).cuda()
    cotangents = torch.randn(B, T, H, V, generator=generator).to(dtype).cuda(), torch.randn_like(state)
    return (*inputs, state), cotangents


def _by_document(form, offsets):
    def run(q, k, v, a, g, state):
        parts = [
            form(*(x[:, start:end] for x in (q, k, v, a, g)), state[n : n + 1])
            for n, (start, end) in enumerate(pairwise(offsets))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts], 0)

    return run if offsets else form


def _run(form, inputs, cotangents, dtype=None):
    """Outputs and gradients by name."""
    inputs = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in inputs]
    outputs = form(*inputs)
    loss = sum((x * c.to(x.dtype)).sum() for x, c in zip(outputs, cotangents, strict=True))
    gradients = torch.autograd.grad(loss, inputs)
    return dict(zip(("o", "final_state", *NAMES), (*outputs, *gradients), strict=True))


def _kernel(cu_seqlens=None):
    def run(q, k, v, a, g, state):
        return gated_delta_rule(q, k, v, a, g, initial_state=state, cu_seqlens=cu_seqlens, backend="triton")

    return run


def _backend(name):
    def run(q, k, v, a, g, state):
        return gated_delta_rule(q, k, v, a, g, initial_state=state, backend=name)

    return run


def _compare(got, inputs, cotangents, dtype, offsets=None):
    exact = _run(_by_document(_backend("reference"), offsets), inputs, cotangents, torch.float64)
    if dtype is torch.float32:
        twin = _run(_by_document(_backend("chunked"), offsets), inputs, cotangents)
    else:
        twin = _run(_by_document(lambda *x: rounded_recurrence(*x, dtype), offsets), inputs, cotangents, torch.float64)
    # The decay's gradient is a difference of such products: its floor counts in their size, not in its own
    terms = {"q": inputs[0], "k": inputs[1], "a": inputs[3]}
    scale = max(rms(exact[name].double() * x.double()) for name, x in terms.items())
    for name, out in got.items():
        ulps = ULPS[dtype] * (max(1.0, scale / (rms(exact[name]) + 1e-30)) if name == "g" else 1.0)
        error_rule(name, out, exact[name], twin[name], dtype=dtype, ulps=ulps)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients(dtype, decay):
    inputs, cotangents = _case(DTYPES[dtype], 2, 150, 2, 128, 128, decay=decay)
    _compare(_run(_kernel(), inputs, cotangents), inputs, cotangents, DTYPES[dtype])


@pytest.mark.parametrize(("K", "V"), [(16, 16), (8, 24), (100, 40), (64, 128), (256, 256)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_widths(dtype, K, V):
    inputs, cotangents = _case(DTYPES[dtype], 1, 70, 2, K, V, decay="mixed")
    _compare(_run(_kernel(), inputs, cotangents), inputs, cotangents, DTYPES[dtype])


@pytest.mark.parametrize("T", [1, 2, 3, 15, 16, 17, 63, 64, 65])
def test_lengths(T):
    inputs, cotangents = _case(torch.bfloat16, 2, T, 3, 64, 64)
    _compare(_run(_kernel(), inputs, cotangents), inputs, cotangents, torch.bfloat16)


@pytest.mark.parametrize("T", [64, 128, 256])
@pytest.mark.parametrize("K", [64, 100, 128])
def test_gradients_where_hopper_compilers_have_failed(T, K):
    inputs, cotangents = _case(torch.bfloat16, 1, T, 2, K, 128, seed=T)
    _compare(_run(_kernel(), inputs, cotangents), inputs, cotangents, torch.bfloat16)


def _plans():
    from qed.ops.tiles import SELECTABLE

    return SELECTABLE


@pytest.mark.parametrize("changes", _plans(), ids=str)
def test_every_tile_configuration(changes):
    """Outputs and gradients of each configuration that can be selected, not only of this card's."""
    from qed.ops import triton_backward, triton_chunks, triton_forward

    inputs, cotangents = _case(torch.bfloat16, 2, 150, 2, 128, 128, decay="mixed")
    problem, plan = triton_chunks.describe(*inputs[:4], None)
    plan = replace(plan, **changes)
    o, final, starts, transition = triton_forward.forward(*inputs, None, problem, plan)
    gradients = triton_backward.backward(*inputs, None, starts, transition, *cotangents, problem, plan)
    got = dict(zip(("o", "final_state", *NAMES), (o, final, *gradients), strict=True))
    _compare(got, inputs, cotangents, torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_packed_equals_one_by_one(dtype):
    offsets = [0, 1, 18, 50, 64, 130, 300]
    inputs, cotangents = _case(DTYPES[dtype], 1, 300, 2, 64, 64, num_docs=6, decay="resets")
    for index in (torch.int32, torch.int64):
        got = _run(_kernel(torch.tensor(offsets, dtype=index, device="cuda")), inputs, cotangents)
        _compare(got, inputs, cotangents, DTYPES[dtype], offsets)


def test_split_over_segments():
    """Few heads and a long sequence: segments at once, states joined; dense, and packed with each kind of document."""
    from qed.ops.tiles import segment_length

    assert segment_length(1, 4096, 1, 64, packed=False) < 4096
    inputs, cotangents = _case(torch.float32, 1, 4096, 1, 32, 64)
    whole = _run(_backend("chunked"), inputs, cotangents)
    split = _run(_kernel(), inputs, cotangents)
    for name in whole:
        assert rms(split[name] - whole[name]) <= 1e-5 * rms(whole[name]), name
    offsets = [0, 30, 2500, 4096]
    inputs, cotangents = _case(torch.float32, 1, 4096, 1, 32, 64, num_docs=3)
    whole = _run(_by_document(_backend("chunked"), offsets), inputs, cotangents)
    split = _run(_kernel(torch.tensor(offsets, device="cuda")), inputs, cotangents)
    for name in whole:
        assert rms(split[name] - whole[name]) <= 1e-5 * rms(whole[name]), name


def test_state_handed_over_equals_the_whole():
    (q, k, v, a, g, state), _ = _case(torch.float32, 2, 100, 2, 64, 64)
    o, final = gated_delta_rule(q, k, v, a, g, initial_state=state, backend="triton")
    cut = 37
    first, middle = gated_delta_rule(*(x[:, :cut] for x in (q, k, v, a, g)), initial_state=state, backend="triton")
    second, last = gated_delta_rule(*(x[:, cut:] for x in (q, k, v, a, g)), initial_state=middle, backend="triton")
    assert rms(torch.cat([first, second], 1) - o) <= 1e-5 * rms(o)
    assert rms(last - final) <= 1e-5 * rms(final)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_later_token_moves_an_earlier_bit(dtype, decay):
    (q, k, v, a, g, state), _ = _case(DTYPES[dtype], 1, 80, 2, 64, 64, decay=decay)
    o, _ = gated_delta_rule(q, k, v, a, g, initial_state=state, backend="triton")
    for cut in (1, 5, 16, 23, 40, 79):
        later = [x.clone() for x in (q, k, v, a, g)]
        for x in later[:4]:
            x[:, cut:] = 3 * x[:, cut:].flip(1) + 1
        later[4][:, cut:] = float("-inf") if cut % 2 else -100.0
        changed, _ = gated_delta_rule(*later, initial_state=state, backend="triton")
        assert torch.equal(changed[:, :cut], o[:, :cut]), cut


def test_same_bits_twenty_times_and_under_permutation():
    inputs, cotangents = _case(torch.bfloat16, 2, 512, 4, 128, 128)
    first = _run(_kernel(), inputs, cotangents)
    for _ in range(19):
        again = _run(_kernel(), inputs, cotangents)
        assert all(torch.equal(again[name], first[name]) for name in first)
    swapped = _run(_kernel(), [x.flip(0) for x in inputs], [x.flip(0) for x in cotangents])
    assert all(torch.equal(swapped[name].flip(0), first[name]) for name in first)


def test_views_and_expanded_inputs():
    B, T, H, K = 2, 33, 2, 64
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(B, T, 3 * H * K, generator=generator).cuda().to(torch.bfloat16)
    q, k, v = (x.unflatten(-1, (H, K)) for x in fused.split(H * K, -1))
    q, k = q / 8, k / 8
    a = (0.5 * k).transpose(1, 2).contiguous().transpose(1, 2)
    g = -torch.rand(B, T, H, generator=generator).cuda()
    loose = gated_delta_rule(q, k, v, a, g, backend="triton")
    dense = [x.contiguous() for x in (q, k, v, a)]
    assert all(torch.equal(x, y) for x, y in zip(loose, gated_delta_rule(*dense, g, backend="triton"), strict=True))
    # One decay a head adds up in another order than the same decay in every channel
    wide = gated_delta_rule(*dense, g[..., None].expand(B, T, H, K).contiguous(), backend="triton")
    assert all(rms(x.double() - y.double()) <= 2e-3 * rms(y.double()) for x, y in zip(loose, wide, strict=True))
    x = v.clone().requires_grad_()
    o, _ = gated_delta_rule(q, k, x, a, None, backend="triton")
    o.sum().backward()  # a gradient of stride 0
    assert torch.isfinite(x.grad).all()


def test_memory_around_the_inputs_is_never_read():
    B, T, H, K = 1, 37, 2, 40
    inputs, cotangents = _case(torch.bfloat16, B, T, H, K, K)
    clean = _run(_kernel(), inputs, cotangents)
    poisoned = []
    for x in inputs[:5]:
        pool = torch.full((x.numel() + 4096,), float("nan"), dtype=x.dtype, device="cuda")
        pool[2048 : 2048 + x.numel()] = x.flatten()
        poisoned.append(pool[2048 : 2048 + x.numel()].view(x.shape))
    blocks = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
    del blocks
    again = _run(_kernel(), [*poisoned, inputs[5]], cotangents)
    assert all(torch.equal(again[name], clean[name]) for name in clean)


@pytest.mark.parametrize("num_docs", [2048, 4096])
def test_many_one_token_documents(num_docs):
    (q, k, v, a, g, _), _ = _case(torch.bfloat16, 1, num_docs, 32, 16, 16, num_docs=1)
    offsets = torch.arange(num_docs + 1, device="cuda")
    state = torch.randn(num_docs, 32, 16, 16, device="cuda")
    o, final = gated_delta_rule(q, k, v, a, g, initial_state=state, cu_seqlens=offsets, backend="triton")
    one = [x.transpose(0, 1)[::97] for x in (q, k, v, a, g)]
    want, last = gated_delta_rule(*(x.double() for x in one), initial_state=state[::97].double(), backend="reference")
    assert rms(o.transpose(0, 1)[::97].double() - want) <= 1e-2 * rms(want)
    assert rms(final[::97].double() - last) <= 1e-2 * rms(last)


def test_registration():
    from qed.ops.library import forward_op

    inputs, _ = _case(torch.float32, 1, 40, 2, 16, 16)
    inputs = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(forward_op, (*inputs, None), rtol=1e-4, atol=1e-4)
    offsets = torch.tensor([0, 7, 40], device="cuda")
    state = torch.zeros(2, 2, 16, 16, device="cuda", requires_grad=True)
    torch.library.opcheck(forward_op, (*inputs[:5], state, offsets), rtol=1e-4, atol=1e-4)


def test_compiles_whole():
    inputs, cotangents = _case(torch.bfloat16, 1, 96, 2, 32, 32)
    compiled = torch.compile(_kernel(), fullgraph=True, dynamic=True)
    for T in (96, 70, 33):
        part = [x[:, :T] for x in inputs[:5]] + [inputs[5]]
        cut = (cotangents[0][:, :T], cotangents[1])
        eager, fast = _run(_kernel(), part, cut), _run(compiled, part, cut)
        assert all(torch.equal(eager[name], fast[name]) for name in eager)


def test_autocast_runs_in_its_dtype():
    (q, k, v, a, g, state), _ = _case(torch.float32, 1, 40, 2, 32, 32)
    with torch.autocast("cuda", torch.bfloat16):
        o, final = gated_delta_rule(q, k, v, a, g, initial_state=state, backend="triton")
    assert o.dtype is torch.bfloat16
    assert final.dtype is torch.float32


def test_packed_forward_never_waits_for_the_device():
    inputs, _ = _case(torch.bfloat16, 1, 300, 2, 64, 64, num_docs=3)
    offsets = torch.tensor([0, 10, 200, 300], device="cuda")
    _kernel(offsets)(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _kernel(offsets)(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_repeated_keys_stay_accurate():
    """Unit keys all alike, a = beta k, no decay: the chunk's matrix is beta below the diagonal, its powers large."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, _, g = make_inputs(1, 256, 1, 64, 64, torch.float32, "cuda", generator=generator, decay="none")
    k = k[:, :1].expand_as(k).contiguous()
    for beta in (1.0, 1.9):
        state = torch.zeros(1, 1, 64, 64, device="cuda")
        inputs = (q, k, v, beta * k, g)
        o, _ = gated_delta_rule(*inputs, initial_state=state, backend="triton")
        twin, _ = gated_delta_rule(*inputs, initial_state=state, backend="chunked")
        want, _ = gated_delta_rule(*(x.double() for x in inputs), initial_state=state.double(), backend="reference")
        # Float32 loses a digit here, the kernels' 22-bit products four times as much
        assert rms(o.double() - want) <= 8 * rms(twin.double() - want) + 1e-5 * rms(want), beta

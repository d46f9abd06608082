"""Run by tests beside it with TRITON_INTERPRET=1: the fused kernels against float64, as JSON rows.

Not a test file: the interpreter has to be chosen before triton is imported.
"""

import json
import sys

import torch

from qed.ops import (
    ARMS,
    decode_inputs_step_,
    decode_step_,
    gated_norm,
    recurrence_inputs,
    short_convolution,
    silu_product,
)
from qed.ops.fused import (
    decode_in_place_op,
    decode_inputs_in_place_op,
    decode_op,
    gated_norm_op,
    recurrence_inputs_op,
    short_convolution_op,
    silu_product_op,
)
from qed.ops.reference import recurrence

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def make(B, T, H, K, V, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "decay": 3 * normal(B, T, H, K),
        "erase": normal(B, T, H, K), "write": normal(B, T, H, V),
        "A_log": normal(H), "dt_bias": normal(H, K), "strength": 0.25 * normal(H),
    }  # fmt: skip
    cotangents = [normal(B, T, H, n) for n in (K, K, V, K, K)]
    return inputs, torch.nn.functional.normalize(normal(H, K), dim=-1), cotangents


def error(exact, got):
    return ((exact - got).norm() / exact.norm().clamp(min=1e-30)).item()


def compare(shape, arm, change=None):
    """Relative RMS error of outputs and of every gradient; ``change`` lays the same float32 values out anew."""
    inputs, z, cotangents = make(*shape)
    exact = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    fast = {name: x.float().requires_grad_() for name, x in inputs.items()}
    laid_out = fast if change is None else change(fast)
    want = recurrence_inputs(*exact.values(), arm=arm, random_direction=z, backend="torch")
    got = recurrence_inputs(*laid_out.values(), arm=arm, random_direction=z.float(), backend="triton")
    torch.autograd.backward(want, cotangents)
    torch.autograd.backward(got, [x.float() for x in cotangents])
    rows = {name: error(x, y) for name, x, y in zip(("q", "k", "v", "a", "g"), want, got, strict=True)}
    for name, x in exact.items():
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        rows["d" + name] = error(grad, fast[name].grad) if grad.any() else fast[name].grad.abs().max().item()
    return {"shape": shape, "arm": arm, "errors": rows}


def views(tensors):
    """q, k and erase as slices of one projection, decay with time and heads exchanged in memory, write expanded."""
    fused = torch.cat([tensors["q"], tensors["k"], tensors["erase"]], -1)
    parts = dict(zip(("q", "k", "erase"), fused.split(tensors["q"].shape[-1], -1), strict=True))
    decay = tensors["decay"].transpose(1, 2).contiguous().transpose(1, 2)
    return {**tensors, **parts, "decay": decay, "v": tensors["v"].transpose(-1, -2).contiguous().transpose(-1, -2)}


def inputs_rows():
    rows = [compare((2, 5, 3, 16, 32), arm) for arm in ARMS]
    rows += [
        compare((1, 70, 2, 100, 24), "qed"),
        compare((1, 3, 1, 256, 16), "qed-rand"),
        compare((1, 1, 2, 20, 20), "qed"),
    ]
    rows.append(compare((2, 7, 2, 24, 16), "qed", views))
    return rows


def decode_rows():
    rows = []
    for shape in ((3, 1, 2, 16, 64), (1, 1, 3, 100, 40)):
        for arm in ARMS:
            inputs, z, _ = make(*shape)
            B, _, H, K, V = shape
            state = torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            parts = recurrence_inputs(*inputs.values(), arm=arm, random_direction=z)
            o, new = recurrence(*parts, state)
            core, fused = state.float(), state.float()
            o_core = decode_step_(*(x.float() for x in parts), core, backend="triton")
            o_fused = decode_inputs_step_(
                *(x.float() for x in inputs.values()), fused, arm=arm, random_direction=z.float(), backend="triton"
            )
            o_new, functional = decode_op(*(x.float() for x in parts), state.float())
            errors = {"o": error(o, o_core), "state": error(new, core), "o fused": error(o, o_fused)}
            errors |= {
                "state fused": error(new, fused),
                "functional": error(core, functional),
                "same": error(o_core, o_new),
            }
            rows.append({"shape": shape, "arm": arm, "errors": errors})
    return rows


def convolution_rows():
    rows = []
    for B, T, C, width, kind in (
        (2, 5, 8, 4, "plain"), (1, 130, 40, 4, "plain"), (2, 3, 16, 3, "state"), (2, 70, 16, 4, "state"),
        (1, 100, 20, 4, "packed"), (1, 1, 20, 4, "state"), (1, 2, 20, 2, "plain"),
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        shapes = [(B, T, C), (C, width), (B, width - 1, C), (B, T, C)]
        x, weight, state, cotangent = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        positions = torch.cat([torch.arange(n) for n in (3, 40, 1, 56)]) if kind == "packed" else None
        results = []
        for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
            leaves = [y.to(dtype).requires_grad_() for y in ((x, weight, state) if kind == "state" else (x, weight))]
            before = leaves[2] if kind == "state" else None
            y = short_convolution(*leaves[:2], state=before, positions=positions, backend=backend)
            with torch.no_grad():
                alone = short_convolution(*leaves[:2], state=before, positions=positions, backend=backend)
            results.append([y.detach(), alone, *torch.autograd.grad(y, leaves, cotangent.to(dtype))])
        errors = dict(zip(("y", "without gradients", "dx", "dweight", "dstate"), map(error, *results), strict=False))
        rows.append({"shape": (B, T, C, width), "arm": kind, "errors": errors})
    return rows


def gates_rows():
    rows = []
    for shape in ((2, 5, 3, 16), (1, 1, 2, 48), (3, 70, 2, 128)):
        generator = torch.Generator().manual_seed(0)
        x, gate = (3 * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
        weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64)
        narrow = [y.float() for y in (x, gate, weight)]
        # A row of zeros stays zeros, and a gate far out closes or opens.
        x[0, 0], narrow[0][0, 0] = 0, 0
        gate[0, 0, 0, :2] = narrow[1][0, 0, 0, :2] = torch.tensor([-1e3, 1e3])
        errors = {
            "norm": error(gated_norm(x, gate, weight, 1e-6), gated_norm(*narrow, 1e-6, backend="triton")),
            "product": error(silu_product(gate, x), silu_product(narrow[1], narrow[0], backend="triton")),
            "transposed": error(
                gated_norm(x.transpose(1, 2), gate.transpose(1, 2), weight, 1e-6),
                gated_norm(narrow[0].transpose(1, 2), narrow[1].transpose(1, 2), narrow[2], 1e-6, backend="triton"),
            ),
        }
        rows.append({"shape": shape, "errors": errors})
    return rows


def registration_rows():
    """torch.library's own checks of schema, fake kernels and autograd; they raise on a fault."""
    inputs, z, _ = make(1, 3, 2, 16, 16)
    plain = [x.float() for x in inputs.values()]
    trained = [x.clone().requires_grad_() for x in plain]
    torch.library.opcheck(recurrence_inputs_op, (*trained, z.float(), "random", True, True), test_utils=CHECKS)
    torch.library.opcheck(recurrence_inputs_op, (*trained, None, "query", True, False), test_utils=CHECKS)
    inputs, z, _ = make(2, 1, 2, 16, 16)
    plain, state = [x.float() for x in inputs.values()], torch.randn(2, 2, 16, 16)
    parts = recurrence_inputs(*plain, backend="torch")
    torch.library.opcheck(decode_op, (*parts, state), test_utils=CHECKS)
    torch.library.opcheck(decode_in_place_op, (*parts, state.clone()), test_utils=CHECKS)
    torch.library.opcheck(
        decode_inputs_in_place_op, (*plain, None, state.clone(), "query", True, True), test_utils=CHECKS
    )
    x, weight = torch.randn(1, 9, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    torch.library.opcheck(short_convolution_op, (x, weight, torch.arange(9), 0), test_utils=CHECKS)
    torch.library.opcheck(short_convolution_op, (x, weight, None, 3), test_utils=CHECKS)
    torch.library.opcheck(gated_norm_op, (torch.randn(2, 3, 16), torch.randn(2, 3, 16), torch.ones(16), 1e-6))
    torch.library.opcheck(silu_product_op, (torch.randn(2, 3, 16), torch.randn(2, 3, 16)))
    return [{"checked": 9}]


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {
        "inputs": inputs_rows,
        "decode": decode_rows,
        "convolution": convolution_rows,
        "gates": gates_rows,
        "registration": registration_rows,
    }
    print(json.dumps([row for name in sys.argv[1:] for row in parts[name]()]))

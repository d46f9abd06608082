"""Run by test_triton_interpreter.py with TRITON_INTERPRET=1: the core's kernels against float64, as JSON rows.

Not a test file: the interpreter has to be chosen before triton is imported. float32 only: the interpreter multiplies
bfloat16 wrongly.
"""

import json
from dataclasses import replace
from itertools import pairwise

import torch

from qed.ops import (
    ARMS,
    gated_delta_rule,
    recurrence_inputs,
    reference,
    triton_backward,
    triton_chunks,
    triton_forward,
)
from qed.ops.fused import prefill_op
from qed.ops.library import forward_op
from qed.testing import NAMES, make_inputs

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FIELDS = ("o", "final_state", *NAMES)


def exact(inputs, cotangents, offsets):
    inputs = [x.double().requires_grad_() for x in inputs]
    *tokens, state = inputs
    if offsets is None:
        o, final = reference.recurrence(*inputs)
    else:
        parts = [
            reference.recurrence(*(x[:, start:end] for x in tokens), state[n : n + 1])
            for n, (start, end) in enumerate(pairwise(offsets))
        ]
        o, final = torch.cat([x for x, _ in parts], 1), torch.cat([x for _, x in parts])
    loss = (o * cotangents[0]).sum() + (final * cotangents[1]).sum()
    return o, final, *torch.autograd.grad(loss, inputs)


def kernels(inputs, cotangents, offsets, segment):
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    problem, plan = triton_chunks.describe(*inputs[:4], cu_seqlens)
    if segment:
        problem = replace(problem, segment=segment)
    o, final, starts, transition = triton_forward.forward(*inputs, cu_seqlens, problem, plan)
    gradients = triton_backward.backward(*inputs, cu_seqlens, starts, transition, *cotangents, problem, plan)
    return o, final, *gradients


def compare(name, B, T, H, K, V, decay="usual", offsets=None, segment=0):
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(B, T, H, K, V, generator=generator, decay=decay)
    state = torch.randn(len(offsets) - 1 if offsets else B, H, K, V, generator=generator)
    cotangents = torch.randn(B, T, H, V, generator=generator), torch.randn(state.shape, generator=generator)
    want = exact((*inputs, state), cotangents, offsets)
    got = kernels((*inputs, state), cotangents, offsets, segment)
    errors = {n: ((x - y).norm() / y.norm()).item() for n, x, y in zip(FIELDS, got, want, strict=True)}
    return {"case": name, "errors": errors}


def causality():
    inputs = make_inputs(1, 33, 1, 16, 16, generator=torch.Generator().manual_seed(0), decay="mixed")
    state = torch.zeros(1, 1, 16, 16)
    o = forward_op(*inputs, state, None)[0]
    equal = []
    for cut in (1, 7, 16, 20):
        later = [x.clone() for x in inputs]
        for x in later[:4]:
            x[:, cut:] += 1
        later[4][:, cut:] = float("-inf")
        equal.append(torch.equal(forward_op(*later, state, None)[0][:, :cut], o[:, :cut]))
    return {"case": "causality", "equal": all(equal)}


def projections(B, T, H, K, V, scale):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    streams = [normal(B, T, H, n) for n in (K, K, V, K, K, V)]
    streams[3] *= scale
    return streams, [normal(H), normal(H, K), 0.25 * normal(H).sigmoid()], normal(H, K)


def prefill(name, shape, arm, scale, offsets=None, *, state=True):
    streams, parameters, z = projections(*shape, scale)
    B, _, H, K, V = shape
    cu = None if offsets is None else torch.tensor(offsets)
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(len(offsets) - 1 if offsets else B, H, K, V, generator=generator) if state else None
    wide = [x.double() for x in (*streams, *parameters)]
    inputs = recurrence_inputs(*wide, arm=arm, random_direction=z.double())
    start = None if state is None else state.double()
    want = gated_delta_rule(*inputs, initial_state=start, cu_seqlens=cu, backend="reference")
    a = ARMS[arm]
    got = prefill_op(*streams, *parameters, z, state, cu, a.direction, a.gate, a.project)
    errors = {n: ((x - y).norm() / y.norm()).item() for n, x, y in zip(FIELDS, got, want, strict=False)}
    return {"case": name, "errors": errors}


def prefill_causality():
    streams, parameters, _ = projections(1, 33, 1, 16, 16, 30)
    o = prefill_op(*streams, *parameters, None, None, None, "query", True, True)[0]
    equal = []
    for cut in (1, 7, 16, 20):
        later = [x.clone() for x in streams]
        for x in later:
            x[:, cut:] += 1
        later[3][:, cut:] = 1e4
        changed = prefill_op(*later, *parameters, None, None, None, "query", True, True)[0]
        equal.append(torch.equal(changed[:, :cut], o[:, :cut]))
    return {"case": "prefill causality", "equal": all(equal)}


def registration():
    inputs = make_inputs(1, 17, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    inputs = [x.requires_grad_() for x in (*inputs, torch.zeros(1, 1, 16, 16))]
    results = torch.library.opcheck(forward_op, (*inputs, None), test_utils=CHECKS)
    streams, parameters, z = projections(1, 17, 1, 16, 16, 1)
    arguments = (*streams, *parameters, z, None, torch.tensor([0, 5, 17]), "random", True, True)
    results |= {f"prefill {k}": v for k, v in torch.library.opcheck(prefill_op, arguments, test_utils=CHECKS).items()}
    return {"case": "registration", "equal": set(results.values()) == {"SUCCESS"}}


if __name__ == "__main__":
    offsets = [0, 1, 18, 90]
    for row in (
        lambda: compare("plain", 1, 37, 2, 16, 16),
        lambda: compare("odd widths, one strong channel", 2, 35, 1, 20, 8, "mixed"),
        lambda: compare("several tiles of K and V, one strong channel", 1, 20, 1, 80, 40, "mixed"),
        lambda: compare("no decay", 1, 20, 1, 16, 16, "none"),
        lambda: compare("resets", 1, 40, 1, 16, 16, "resets"),
        lambda: compare("split", 1, 150, 1, 16, 16, segment=64),
        lambda: compare("packed", 1, 90, 1, 16, 16, "resets", offsets),
        lambda: compare("packed and split", 1, 90, 1, 16, 16, "usual", offsets, segment=64),
        causality,
        lambda: prefill("prefill", (2, 37, 1, 20, 8), "qed", 3),
        lambda: prefill("prefill, far decays", (1, 20, 2, 80, 16), "qed", 60, state=False),
        lambda: prefill("prefill, packed, a random direction", (1, 90, 1, 16, 24), "qed-rand", 30, offsets),
        prefill_causality,
        registration,
    ):
        print(json.dumps(row()), flush=True)

"""Run by test_triton_interpreter.py with TRITON_INTERPRET=1: the core's kernels against float64, as JSON rows.

Not a test file: the interpreter has to be chosen before triton is imported. float32 only: the interpreter multiplies
bfloat16 wrongly.
"""

import json
from dataclasses import replace
from itertools import pairwise

import torch

from qed.ops import reference, triton_backward, triton_forward
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
    problem, plan = triton_forward.describe(*inputs[:4], cu_seqlens)
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


def registration():
    inputs = make_inputs(1, 17, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    inputs = [x.requires_grad_() for x in (*inputs, torch.zeros(1, 1, 16, 16))]
    results = torch.library.opcheck(forward_op, (*inputs, None), test_utils=CHECKS)
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
        registration,
    ):
        print(json.dumps(row()), flush=True)

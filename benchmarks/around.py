"""Tile choices of the kernels around the recurrence, on one CUDA card: prologue, short convolution, decode step.

``python benchmarks/around.py [--out FILE]``. Every row is checked against float64 on a small problem first. The tables
in ``triton_inputs.py``, ``triton_convolution.py`` and ``triton_decode.py`` come from here.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qed.bench.measure import ceilings, time_call, time_graph
from qed.bench.work import LEAVES, Shape, decode_bytes, definition, make_tensors
from qed.ops import ARMS, recurrence_inputs, short_convolution, triton_convolution, triton_decode, triton_inputs
from qed.ops.reference import recurrence
from qed.records import provenance, write_json

SHAPE = Shape(16, 2048)
CHANNELS = 2304
LIMIT = 1e-2


def error(exact: Tensor, got: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


class Table:
    """Rows as they are made, printed and kept."""

    def __init__(self, device: str) -> None:
        self.device, self.top, self.rows = device, ceilings(device), []

    def add(
        self, kernel: str, tile: dict[str, int], moved: int, call: Callable[[], Any], check: Callable[[], float]
    ) -> None:
        row: dict[str, Any] = {"kernel": kernel, **tile, "bytes": moved}
        try:
            row["error"] = check()
            if not row["error"] <= LIMIT:
                row["status"] = "failed the error rule"
            else:
                row |= asdict(call()) | {"status": "ok"}
                row["copy_share"] = moved / self.top["copy_bytes_per_s"] * 1e3 / row["median_ms"]
        except Exception as problem:
            row |= {"status": "failed", "message": f"{type(problem).__name__}: {problem}"[:300]}
        self.rows.append(row)
        shown = (
            f"{row['median_ms']:.4f} ms, {row['copy_share']:.0%} of copy" if row["status"] == "ok" else row["status"]
        )
        print(kernel, tile, shown, flush=True)


def prologue(table: Table) -> None:
    x = make_tensors(SHAPE, table.device)
    small = make_tensors(Shape(1, 70), table.device)
    K, V, device = SHAPE.K, SHAPE.V, table.device
    sizes = [(SHAPE.batch, SHAPE.length, SHAPE.heads, n) for n in (K, K, V, K, K)]
    gradients = [torch.randn(size, device=device).bfloat16() for size in sizes]
    gradients[4] = gradients[4].float()
    cotangents = [g[:1, :70] for g in gradients]
    wanted, wanted_grads = {}, {}
    for arm in ("qed", "gdn2"):
        leaves = [small[name].double().requires_grad_() for name in LEAVES["qed"]]
        wanted[arm] = recurrence_inputs(*leaves, arm=arm, backend="torch")
        used = leaves if arm == "qed" else leaves[:-1]
        wanted_grads[arm] = torch.autograd.grad(wanted[arm], used, [g.double() for g in cotangents])
    raw, raw_small = ([t[name] for name in LEAVES["qed"]] for t in (x, small))
    for arm, tile, warps in itertools.product(("qed", "gdn2"), (512, 1024, 2048), (2, 4, 8)):
        triton_inputs.FORWARD_TILE, triton_inputs.FORWARD_WARPS = tile, warps

        def forward(tensors: list[Tensor] = raw, arm: str = arm) -> tuple[Tensor, ...]:
            return triton_inputs.forward(*tensors, None, ARMS[arm])

        def check(arm: str = arm, forward: Any = forward) -> float:
            got = forward(raw_small)
            return max(error(w.detach(), y) for w, y in zip(wanted[arm], got, strict=True))

        moved = SHAPE.token_heads * (18 * K + 6 * V)
        table.add(
            f"prologue forward, {arm}",
            {"tile": tile, "warps": warps},
            moved,
            lambda f=forward: time_call(f, device),
            check,
        )
    for arm, tile, warps, tokens in itertools.product(("qed", "gdn2"), (512, 1024, 2048), (2, 4, 8), (64, 128)):
        triton_inputs.BACKWARD_TILE, triton_inputs.BACKWARD_WARPS, triton_inputs.BACKWARD_TOKENS = tile, warps, tokens

        def backward(arm: str = arm) -> tuple[Tensor, ...]:
            return triton_inputs.backward(*raw, None, tuple(gradients), ARMS[arm])

        def check(arm: str = arm) -> float:
            got = triton_inputs.backward(*raw_small, None, tuple(cotangents), ARMS[arm])
            return max(error(w, y) for w, y in zip(wanted_grads[arm], got, strict=False))

        moved = SHAPE.token_heads * (26 * K + 10 * V)
        tiles = {"tile": tile, "warps": warps, "tokens": tokens}
        table.add(f"prologue backward, {arm}", tiles, moved, lambda f=backward: time_call(f, device), check)


def convolution(table: Table) -> None:
    device = table.device
    x, grad = (torch.randn(SHAPE.batch, SHAPE.length, CHANNELS, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(CHANNELS, 4, device=device)
    leaves = [x[:1, :300].double().requires_grad_(), weight.double().requires_grad_()]
    wanted = short_convolution(*leaves, backend="torch")
    wanted_grads = torch.autograd.grad(wanted, leaves, grad[:1, :300].double())
    for tokens, channels, warps in itertools.product((8, 16, 32), (64, 128, 256), (2, 4, 8)):
        module = triton_convolution
        module.FORWARD_TOKENS, module.FORWARD_CHANNELS, module.FORWARD_WARPS = tokens, channels, warps
        table.add(
            "convolution forward", {"tokens": tokens, "channels": channels, "warps": warps}, 4 * x.numel(),
            lambda: time_call(lambda: triton_convolution.forward(x, weight, None, 0), device),
            lambda: error(wanted.detach(), triton_convolution.forward(x[:1, :300], weight, None, 0)),
        )  # fmt: skip
    for channels, warps, strip in itertools.product((64, 128, 256, 512), (1, 2, 4), (61, 125)):
        module.BACKWARD_CHANNELS, module.BACKWARD_WARPS, module.STRIP = channels, warps, strip

        def check() -> float:
            got = triton_convolution.backward(x[:1, :300], weight, None, grad[:1, :300], 0)
            return max(error(w, y) for w, y in zip(wanted_grads, got, strict=True))

        table.add(
            "convolution backward", {"channels": channels, "warps": warps, "strip": strip}, 6 * x.numel(),
            lambda: time_call(lambda: triton_convolution.backward(x, weight, None, grad, 0), device), check,
        )  # fmt: skip


def decode(table: Table) -> None:
    for batch, kind, columns, warps, stream in itertools.product(
        (1, 64, 256), ("core", "with prologue"), (16, 32, 64, 128), (1, 2, 4, 8), (False, True)
    ):
        if columns * SHAPE.K // (32 * warps) > 160 or (batch == 1 and stream):
            continue
        shape = Shape(batch, 1)
        x = make_tensors(shape, table.device)
        raw, given = ([x[name] for name in LEAVES[system]] for system in ("qed", "core"))
        count = max(4, min(64, 2**28 // (shape.token_heads * 4 * shape.K * shape.V)))
        states = [torch.randn(batch, shape.heads, shape.K, shape.V, device=table.device) for _ in range(count)]
        triton_decode.tile = triton_decode.inputs_tile = lambda *_, c=columns, w=warps: (c, w)
        triton_decode.STREAM_BYTES = 0 if stream else 2**62

        def step(state: Tensor, kind: str = kind, raw: Any = raw, given: Any = given) -> Tensor:
            if kind == "core":
                return triton_decode.decode(*given, state, state)
            return triton_decode.decode_inputs(*raw, None, state, ARMS["qed"])

        def check(x: Any = x, kind: str = kind, state: Tensor = states[0], step: Any = step) -> float:
            inputs = definition("core" if kind == "core" else "qed", {name: y.double() for name, y in x.items()})
            o, new = recurrence(*inputs, state.double())
            copy = state.clone()
            return max(error(o, step(copy)), error(new, copy))

        calls = [lambda s=s, step=step: step(s) for s in states]
        tiles = {"batch": batch, "columns": columns, "warps": warps, "stream": int(stream)}
        table.add(f"decode, {kind}", tiles, decode_bytes(shape), lambda c=calls: time_graph(c, table.device), check)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", nargs="+", default=["prologue", "convolution", "decode"])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    table = Table(args.device)
    for name in args.kernels:
        {"prologue": prologue, "convolution": convolution, "decode": decode}[name](table)
        if args.out:
            result = {"provenance": provenance(device=args.device), "ceilings": table.top, "rows": table.rows}
            write_json(args.out, result)


if __name__ == "__main__":
    main()

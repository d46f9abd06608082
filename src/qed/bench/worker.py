"""One process that times some peers: gate, clock, one JSON line a row, so that a cut run keeps what it has."""

from __future__ import annotations

import importlib
import json
import math
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qed.bench import work
from qed.bench.measure import peak_extra_bytes, time_call, time_graph
from qed.bench.peers import PEERS, Peer
from qed.bench.work import LEAVES, Shape
from qed.ops.chunked import recurrence as chunked
from qed.ops.reference import recurrence as reference

# Largest relative RMS error against float64 with which a peer is timed.
FORWARD_LIMIT = 5e-3
GRADIENT_LIMIT = 2e-2
# Decode states in one CUDA graph together exceed the cache.
STATES_BYTES = 256 * 2**20
MAX_STATES = 256


def rows_of(
    name: str, shape: Shape, device: str, ceilings: dict[str, float], *, warm_only: bool
) -> Iterator[dict[str, Any]]:
    """Rows of one peer at one shape: decode for a length of one, else forward and forward + backward."""
    peer = PEERS[name]
    works = ["decode"] if shape.length == 1 else ["forward", "forward+backward"]
    if (peer.step if shape.length == 1 else peer.call) is None or device.split(":")[0] not in peer.devices:
        return
    for kind in works:
        row: dict[str, Any] = {
            "peer": name, "library": peer.library, "system": peer.system, "work": kind, **asdict(shape),
            "dtype": _name(work.dtype_on(device)), "state_dtype": _name(peer.state_dtype), "note": peer.note,
        }  # fmt: skip
        if not peer.is_installed:
            yield {**row, "status": "not installed"}
            continue
        try:
            yield {**row, **_measure(peer, kind, shape, device, ceilings, warm_only)}
        except torch.OutOfMemoryError:
            yield {**row, "status": "out of memory"}
        except Exception:
            yield {**row, "status": "failed", "traceback": traceback.format_exc()[-2000:]}


def _measure(
    peer: Peer, kind: str, shape: Shape, device: str, ceilings: dict[str, float], warm_only: bool
) -> dict[str, Any]:
    tensors = work.make_tensors(shape, device)
    if kind == "decode":
        return _measure_decode(peer, shape, device, ceilings, tensors, warm_only)
    backward = kind == "forward+backward"
    call = peer.call
    assert call is not None
    leaves = [tensors[name].requires_grad_(backward) for name in LEAVES[peer.system]]
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.length, shape.heads, shape.V)
    cotangent = torch.randn(size, generator=generator, device=device).to(work.dtype_on(device))

    def run() -> list[Tensor]:
        if not backward:
            with torch.no_grad():
                return [call(tensors)[0]]
        o = call(tensors)[0]
        return [o, *torch.autograd.grad(o, leaves, cotangent)]

    errors = _errors(peer, shape, tensors, cotangent, run())
    result = {"errors": errors, **_floor(peer, shape, backward, ceilings, work.dtype_on(device).itemsize)}
    if not _passes(errors):
        return {**result, "status": "failed the error rule"}
    if warm_only:
        return {**result, "status": "warmed"}
    timing = time_call(run, device)
    result |= asdict(timing) | {"peak_extra_bytes": peak_extra_bytes(run, device)}
    return {**result, "roofline_share": result["floor_ms"] / timing.median_ms, "status": "ok"}


def _measure_decode(
    peer: Peer, shape: Shape, device: str, ceilings: dict[str, float], tensors: dict[str, Tensor], warm_only: bool
) -> dict[str, Any]:
    step = peer.step
    assert step is not None
    generator = torch.Generator(device).manual_seed(2)
    state = torch.randn(shape.batch, shape.heads, shape.K, shape.V, generator=generator, device=device)
    state = state.to(peer.state_dtype)
    with torch.no_grad():
        exact = reference(*work.definition(peer.system, {n: x.double() for n, x in tensors.items()}), state.double())
        got = step(tensors, state.clone())
        errors = {name: _error(x, y) for name, x, y in zip(("o", "state"), exact, got, strict=True)}
        moved = work.decode_bytes(shape, state.element_size())
        floor = 1e3 * moved / ceilings["copy_bytes_per_s"]
        result: dict[str, Any] = {"errors": errors, "bytes": moved, "floor_ms": floor}
        if not _passes(errors):
            return {**result, "status": "failed the error rule"}
        if warm_only:
            return {**result, "status": "warmed"}
        count = max(4, min(MAX_STATES, math.ceil(STATES_BYTES / state.nbytes)))
        states = [state.clone() for _ in range(count)]
        timing = time_graph([lambda s=s: step(tensors, s) for s in states], device)  # type: ignore[misc]
    return {**result, **asdict(timing), "roofline_share": floor / timing.median_ms, "status": "ok"}


def _errors(
    peer: Peer, shape: Shape, tensors: dict[str, Tensor], cotangent: Tensor, got: list[Tensor]
) -> dict[str, float]:
    """Relative RMS errors of the first sequence against float64: the output, and each leaf's gradient where taken."""
    names = LEAVES[peer.system]
    exact = {
        name: (tensors[name] if name in work.PARAMETERS else tensors[name][:1])
        .detach()
        .double()
        .requires_grad_(len(got) > 1)
        for name in names
    }
    state = torch.zeros(1, shape.heads, shape.K, shape.V, dtype=torch.float64, device=cotangent.device)
    o, _ = chunked(*work.definition(peer.system, exact), state)
    errors = {"o": _error(o.detach(), got[0][:1])}
    if len(got) > 1:
        grads = torch.autograd.grad(o, list(exact.values()), cotangent[:1].double())
        for name, want, grad in zip(names, grads, got[1:], strict=True):
            if name not in work.PARAMETERS:
                errors["d" + name] = _error(want, grad[:1])
            elif shape.batch == 1:
                errors["d" + name] = _error(want, grad)
    return errors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error(exact: Tensor, got: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def _passes(errors: dict[str, float]) -> bool:
    # not (x > limit): a NaN must not pass
    return all(x <= (GRADIENT_LIMIT if name[0] == "d" else FORWARD_LIMIT) for name, x in errors.items())


def _floor(peer: Peer, shape: Shape, backward: bool, ceilings: dict[str, float], element: int) -> dict[str, Any]:
    moved, flops = work.forward_bytes(shape, peer.system, element), work.forward_flops(shape)
    if backward:
        # the backward recomputes the forward and forms two products for each of its own
        moved, flops = moved + work.backward_bytes(shape, peer.system, element), 3 * flops
    seconds = max(moved / ceilings["copy_bytes_per_s"], flops / ceilings["matmul_flop_per_s"])
    return {"bytes": moved, "flops": flops, "floor_ms": 1e3 * seconds}


def main(task: dict[str, Any]) -> None:
    """Append rows to ``task["out"]``; other keys: ``peers``, ``shapes``, ``device``, ``ceilings``, ``warm_only``."""
    with Path(task["out"]).open("a", encoding="utf-8") as file:
        for values in task["shapes"]:
            for name in task["peers"]:
                for row in rows_of(
                    name, Shape(**values), task["device"], task["ceilings"], warm_only=task["warm_only"]
                ):
                    file.write(json.dumps(_finite(row)) + "\n")
                    file.flush()


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Errors that are not numbers as text: the row says them, and JSON stays readable."""
    errors = {name: x if math.isfinite(x) else str(x) for name, x in row.get("errors", {}).items()}
    return {**row, "errors": errors} if errors else row


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    for library in {PEERS[name].library for name in task["peers"] if PEERS[name].is_installed}:
        importlib.import_module(library)
    # slow imports are behind us; measure only when told to
    if sys.stdin.readline():
        main(task)

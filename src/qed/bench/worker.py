"""One process that times some peers: gate, clock, one JSON line a row, so that a cut run keeps what it has."""

from __future__ import annotations

import importlib
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qed.bench import work
from qed.bench.measure import Timing, matmul_flop_per_s, peak_extra_bytes, time_call, time_graph
from qed.bench.peers import PEERS, Peer
from qed.bench.work import LEAVES, Shape
from qed.ops.chunked import recurrence as chunked
from qed.ops.reference import recurrence as reference

# A peer is timed if its relative RMS error against float64 is at most twice that of plain PyTorch, which rounds only
# where the operators' borders do, plus this much for what is rounded within: the output, each gradient.
FORWARD_FLOOR = 3e-3
GRADIENT_FLOOR = 1e-2
# A parameter's gradient is a sum over all tokens in which most of it cancels and their rounding does not.
PARAMETER_FLOOR = 3e-2
# Tokens of the first sequence that the check covers; causality makes them a problem of their own.
CHECKED_TOKENS = 4096
# Decode states in one CUDA graph together exceed the cache.
STATES_BYTES = 256 * 2**20
MAX_STATES = 256
# Below this share of the matrix rate measured at the start, the card has slowed down and its times are not comparable.
STEADY = 0.9


def rows_of(name: str, shape: Shape, device: str, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Rows of one peer at one shape: decode for a length of one, else forward and forward + backward."""
    peer = PEERS[name]
    if (peer.step if shape.length == 1 else peer.call) is None or device.split(":")[0] not in peer.devices:
        return
    works: list[tuple[str, Any]] = [("decode", _decode)]
    if shape.length > 1:
        works = [("forward", _sequence), ("forward+backward", _sequence)]
    tensors: dict[str, Tensor] = {}
    exact: dict[str, tuple[Tensor, float]] = {}
    for kind, measure in works:
        row: dict[str, Any] = {
            "peer": name, "library": peer.library, "system": peer.system, "work": kind, **asdict(shape),
            "dtype": _name(work.dtype_on(device)), "state_dtype": _name(peer.state_dtype), "note": peer.note,
        }  # fmt: skip
        if not peer.is_installed:
            yield {**row, "status": "not installed"}
            continue
        try:
            if not tensors:
                tensors = work.make_tensors(shape, device)
                exact = _exact(peer, shape, tensors) if shape.length > 1 else {}
            job = Job(peer, shape, device, ceilings, tensors, exact, kind == "forward+backward")
            yield {**row, **measure(job)}
        except torch.OutOfMemoryError:
            yield {**row, "status": "out of memory"}
        except Exception:
            yield {**row, "status": "failed", "traceback": traceback.format_exc()[-2000:]}


@dataclass(frozen=True)
class Job:
    """One row's work: ``exact`` holds the float64 result and the largest error allowed, by name."""

    peer: Peer
    shape: Shape
    device: str
    ceilings: dict[str, float]
    tensors: dict[str, Tensor]
    exact: dict[str, tuple[Tensor, float]]
    backward: bool


def _sequence(job: Job) -> dict[str, Any]:
    call, names = job.peer.call, LEAVES[job.peer.system]
    assert call is not None
    leaves = [job.tensors[name].requires_grad_(job.backward) for name in names]

    def run(cotangent: Tensor) -> list[Tensor]:
        if not job.backward:
            with torch.no_grad():
                return [call(job.tensors)[0]]
        o = call(job.tensors)[0]
        return [o, *torch.autograd.grad(o, leaves, cotangent)]

    got = run(_cotangent(job.shape, job.device, checked_only=True))
    errors = {"o": _error(job.exact["o"][0], _checked(got[0]))}
    for name, grad in zip(names, got[1:], strict=False):
        errors["d" + name] = _error(job.exact["d" + name][0], grad if name in work.PARAMETERS else _checked(grad))
    limits = {name: job.exact[name][1] for name in errors}
    floor = _floor(job.peer, job.shape, job.backward, job.ceilings, work.dtype_on(job.device).itemsize)
    result = {"errors": errors, "limits": limits, **floor}
    if not all(errors[name] <= limit for name, limit in limits.items()):
        return {**result, "status": "failed the error rule"}
    cotangent = _cotangent(job.shape, job.device, checked_only=False)
    timing, steady = _steadily(job, lambda: time_call(lambda: run(cotangent), job.device))
    result |= asdict(timing) | steady | {"peak_extra_bytes": peak_extra_bytes(lambda: run(cotangent), job.device)}
    return {**result, "roofline_share": result["floor_ms"] / timing.median_ms}


def _steadily(job: Job, measure: Callable[[], Timing]) -> tuple[Timing, dict[str, Any]]:
    """Measure between two looks at the card's matrix rate; a status instead of "ok" where it has fallen."""
    before = matmul_flop_per_s(job.device)
    timing = measure()
    share = min(before, matmul_flop_per_s(job.device)) / job.ceilings["matmul_flop_per_s"]
    slowed = job.device.startswith("cuda") and share < STEADY
    return timing, {"matmul_share": share, "status": f"card slowed to {share:.0%}" if slowed else "ok"}


def _decode(job: Job) -> dict[str, Any]:
    step, shape = job.peer.step, job.shape
    assert step is not None
    generator = torch.Generator(job.device).manual_seed(2)
    state = torch.randn(shape.batch, shape.heads, shape.K, shape.V, generator=generator, device=job.device)
    state = state.to(job.peer.state_dtype)
    with torch.no_grad():
        wide = {name: x.double() for name, x in job.tensors.items()}
        exact = reference(*work.definition(job.peer.system, wide), state.double())
        got = step(job.tensors, state.clone())
        errors = {name: _error(x, y) for name, x, y in zip(("o", "state"), exact, got, strict=True)}
        moved = work.decode_bytes(shape, state.element_size())
        floor = 1e3 * moved / job.ceilings["copy_bytes_per_s"]
        # one rounding to 16 bits of the output or the state
        result: dict[str, Any] = {"errors": errors, "limits": dict.fromkeys(errors, FORWARD_FLOOR)}
        result |= {"bytes": moved, "floor_ms": floor}
        if not all(error <= FORWARD_FLOOR for error in errors.values()):
            return {**result, "status": "failed the error rule"}
        count = max(4, min(MAX_STATES, math.ceil(STATES_BYTES / state.nbytes)))
        states = [state.clone() for _ in range(count)]
        calls = [lambda s=s: step(job.tensors, s) for s in states]  # type: ignore[misc]
        timing, steady = _steadily(job, lambda: time_graph(calls, job.device))
    return {**result, **asdict(timing), **steady, "roofline_share": floor / timing.median_ms}


def _exact(peer: Peer, shape: Shape, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
    """The output and each leaf's gradient in float64, over the checked tokens, with the error that is allowed."""
    names = LEAVES[peer.system]
    cotangent = _checked(_cotangent(shape, str(tensors[names[0]].device), checked_only=True))
    results = []
    for dtype in (torch.float64, None):
        leaves = {}
        for name in names:
            x = tensors[name] if name in work.PARAMETERS else _checked(tensors[name])
            leaves[name] = x.detach().to(dtype or x.dtype).requires_grad_()
        state = torch.zeros(1, shape.heads, shape.K, shape.V, dtype=dtype or torch.float32, device=cotangent.device)
        o, _ = chunked(*work.definition(peer.system, leaves), state)
        grads = torch.autograd.grad(o, list(leaves.values()), cotangent.to(o.dtype))
        results.append({"o": o.detach(), **{"d" + name: grad for name, grad in zip(names, grads, strict=True)}})
    exact, plain = results
    floors = dict.fromkeys(exact, GRADIENT_FLOOR) | {"o": FORWARD_FLOOR}
    floors |= {"d" + name: PARAMETER_FLOOR for name in work.PARAMETERS if "d" + name in floors}
    return {name: (x, 2 * _error(x, plain[name]) + floors[name]) for name, x in exact.items()}


def _cotangent(shape: Shape, device: str, *, checked_only: bool) -> Tensor:
    """The output's gradient; on request zero outside the checked tokens, so that parameters can be checked too."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.length, shape.heads, shape.V)
    x = torch.randn(size, generator=generator, device=device).to(work.dtype_on(device))
    if checked_only:
        x[1:] = 0
        x[:, CHECKED_TOKENS:] = 0
    return x


def _checked(x: Tensor) -> Tensor:
    return x[:1, :CHECKED_TOKENS]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error(exact: Tensor, got: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def _floor(peer: Peer, shape: Shape, backward: bool, ceilings: dict[str, float], element: int) -> dict[str, Any]:
    moved, flops = work.forward_bytes(shape, peer.system, element), work.forward_flops(shape)
    if backward:
        # the backward recomputes the forward and forms two products for each of its own
        moved, flops = moved + work.backward_bytes(shape, peer.system, element), 3 * flops
    seconds = max(moved / ceilings["copy_bytes_per_s"], flops / ceilings["matmul_flop_per_s"])
    return {"bytes": moved, "flops": flops, "floor_ms": 1e3 * seconds}


def main(task: dict[str, Any]) -> None:
    """Append rows to ``task["out"]``; other keys: ``peers``, ``shapes``, ``device``, ``ceilings``."""
    with Path(task["out"]).open("a", encoding="utf-8") as file:
        for values in task["shapes"]:
            for name in task["peers"]:
                for row in rows_of(name, Shape(**values), task["device"], task["ceilings"]):
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

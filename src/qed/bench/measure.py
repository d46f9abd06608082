"""Clocks: medians with quantiles, peak memory, and the two ceilings a roofline share refers to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Written between two timed calls, so that no call finds its inputs in the cache: several times any L2.
FLUSH_BYTES = 256 * 2**20
MAX_REPEATS = 100
# Above the clock of any card: a busy wait of this many cycles lasts a millisecond or more.
CYCLES_PER_MS = 2_000_000
MIN_REPEATS = 10


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over ``count`` repeats; on CUDA ``host_ms`` is what issuing it costs the processor."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    count: int
    host_ms: float | None = None


def summarize(times_ms: Sequence[float], host_ms: float | None = None) -> Timing:
    """Median with the 20 % and 80 % quantiles."""
    fifths = statistics.quantiles(times_ms, n=5, method="inclusive")
    return Timing(statistics.median(times_ms), fifths[0], fifths[-1], len(times_ms), host_ms)


def time_call(call: Callable[[], Any], device: str, *, budget_ms: float = 300.0) -> Timing:
    """Time ``call`` from a cold cache: as many repeats as the budget holds, between 10 and 100 after three warm-ups.

    On CUDA the time is the device's: each repeat starts behind a busy wait as long as the call takes to issue, so that
    the kernels run back to back, as they do in a training step that the processor runs ahead of.
    """
    for _ in range(3):
        call()
    if not device.startswith("cuda"):
        start = time.perf_counter()
        call()
        repeats = _repeats(1e3 * (time.perf_counter() - start), budget_ms)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return summarize(times)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    host_ms = _host_ms(call)
    probe = max(_events(call, flush, host_ms, 2))
    return summarize(_events(call, flush, host_ms, _repeats(probe, budget_ms)), host_ms)


def time_graph(calls: Sequence[Callable[[], Any]], device: str, *, budget_ms: float = 100.0) -> Timing:
    """Time one of ``calls`` inside a CUDA graph that replays all of them; they should touch different memory."""
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    (probe,) = _events(graph.replay, None, 0.0, 1)
    times = _events(graph.replay, None, 0.0, _repeats(probe, budget_ms))
    return summarize([t / len(calls) for t in times])


def peak_extra_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Highest allocation during ``call`` above what was held before it; ``None`` where nothing counts it."""
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def ceilings(device: str) -> dict[str, float]:
    """Copy bandwidth (bytes read plus written a second) and bf16 matrix rate (operations a second), measured here."""
    size = 2**31 if device.startswith("cuda") else 2**26
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = time_call(lambda: target.copy_(source), device)
    rate = matmul_flop_per_s(device, budget_ms=300)
    return {"copy_bytes_per_s": 2 * size / copy.median_ms * 1e3, "matmul_flop_per_s": rate}


def matmul_flop_per_s(device: str, *, budget_ms: float = 20) -> float:
    """Rate of one large product: bf16, 8192 cubed; on a CPU float32, 1024 cubed."""
    cuda = device.startswith("cuda")
    size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    x, y = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    product = time_call(lambda: x @ y, device, budget_ms=budget_ms)
    return 2 * size**3 / product.median_ms * 1e3


def _repeats(estimate_ms: float, budget_ms: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, int(budget_ms / max(estimate_ms, 1e-3))))


def _host_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def _events(call: Callable[[], Any], flush: torch.Tensor | None, wait_ms: float, repeats: int) -> list[float]:
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in pairs:
        if flush is not None:
            flush.zero_()
        if wait_ms:
            torch.cuda._sleep(int(1.5 * wait_ms * CYCLES_PER_MS))
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]

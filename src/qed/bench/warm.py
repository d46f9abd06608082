"""One process that compiles a share of a peer's tuner configurations into Triton's disk cache, without timing any.

A peer that tunes itself compiles hundreds of kernels one after the other, which takes minutes on the device. Several of
these processes at once take a fraction of that, and the peer's own tuner then finds everything compiled and measures
as it always does.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch

from qed.bench.peers import PEERS
from qed.bench.work import LEAVES, Shape, make_tensors

# A configuration that another process compiles, or that does not build, is never the fastest.
NEVER_MS = [1e9] * 3


def compile_share(index: int, count: int) -> None:
    """From here on Triton's tuners compile and run every ``count``-th configuration once, and choose among those."""
    from triton.runtime import autotuner

    numbers = itertools.count()

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if next(numbers) % count != index:
            return NEVER_MS
        try:
            self.fn.run(*args, **{**meta, **config.all_kwargs()})
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            return NEVER_MS
        return [1.0] * 3

    def without_disk(self: Any, tuning_key: Any, configs: Any, measure: Any) -> bool:
        measure()
        return False

    autotuner.Autotuner._bench = bench
    # A tuner that keeps its timings on disk would keep these, and choose by them ever after.
    autotuner.Autotuner.check_disk_cache = without_disk


def main(task: dict[str, Any]) -> None:
    """Run one peer forward, backward and, where it has one, a step; ``task``: peer, index, count, device, shape."""
    compile_share(task["index"], task["count"])
    peer, shape = PEERS[task["peer"]], Shape(**task["shape"])
    tensors = make_tensors(shape, task["device"])
    if peer.call is not None:
        with torch.no_grad():
            peer.call(tensors)
        leaves = [tensors[name].requires_grad_() for name in LEAVES[peer.system]]
        o = peer.call(tensors)[0]
        torch.autograd.grad(o, leaves, torch.randn_like(o))
    if peer.step is not None:
        one = Shape(1, 1, shape.heads, shape.K, shape.V)
        state = torch.zeros(1, one.heads, one.K, one.V, device=task["device"])
        with torch.no_grad():
            peer.step(make_tensors(one, task["device"]), state)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

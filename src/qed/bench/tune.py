"""``qed bench tune``: measure the kernels' tile choices on this card and rewrite the table in ``qed/ops/tiles.py``.

A search one field at a time: a candidate is first held to float64 (outputs and every gradient), then timed, and kept
where it is faster by more than the noise. All are compiled first, in as many processes as there are processors. Run it
on another card, or after a change of compiler, and commit the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from qed.bench.measure import time_call
from qed.bench.work import LEAVES, Shape, make_tensors
from qed.ops import tiles
from qed.ops.chunked import recurrence as chunked
from qed.ops.tiles import Plan
from qed.records import write_text

SIZES = ((64, 64), (128, 128), (256, 256))
DEFAULTS = tiles.plan_for(torch.bfloat16, 0, 0)
# Largest relative RMS error of an output or a gradient against float64 in bf16.
LIMIT = 2e-2
# A candidate has to be this much faster to be kept.
GAIN = 0.01
# Tokens of the accuracy check: a chunk's multiple, like the timed shape, so that both run the same compiled kernels.
CHECK = 208

Score = Callable[[Plan], "float | None"]


def candidates() -> dict[str, tuple[int, ...]]:
    """By field, the values that ``tiles.SELECTABLE`` and the conservative choice name: what the GPU tests check."""
    rows = (asdict(DEFAULTS), tiles.CONSERVATIVE, *tiles.SELECTABLE)
    fields = {field for row in rows[1:] for field in row}
    return {field: tuple(sorted({row[field] for row in rows if field in row})) for field in sorted(fields)}


def neighbours(plan: Plan) -> list[Plan]:
    """``plan``, then every plan that a candidate's value for one field makes of it."""
    changed = (replace(plan, **{field: value}) for field, values in candidates().items() for value in values)  # type: ignore[arg-type]
    return [plan, *(other for other in changed if other != plan)]


def search(start: Plan, score: Score) -> tuple[Plan, float]:
    """The best plan that changing one field at a time finds; ``score`` is milliseconds, ``None`` for what must not be.

    Raises:
        RuntimeError: the plan to start from does not pass itself.
    """
    best, best_ms = start, score(start)
    if best_ms is None:
        raise RuntimeError(f"the current plan fails on this card: {start}")
    for field, values in tqdm(candidates().items(), desc="tiles", unit="field"):
        for value in values:
            plan = replace(best, **{field: value})  # type: ignore[arg-type]
            if plan == best:
                continue
            ms = score(plan)
            if ms is not None and ms < (1 - GAIN) * best_ms:
                best, best_ms = plan, ms
    return best, best_ms


def tune(args: argparse.Namespace) -> int:
    """Search every size of ``SIZES`` in bf16 and rewrite the table; prints what was found."""
    if not args.device.startswith("cuda"):
        raise ValueError(f"tuning needs a CUDA device; got {args.device!r}")
    device = torch.device(args.device)
    card = tiles.card(device)
    path = Path(tiles.__file__)
    for K, V in args.sizes or SIZES:
        start = tiles.plan_for(torch.bfloat16, K, V, card)
        compile_all(K, V, card, args.device)
        plan, ms = search(start, scorer(Shape(16, 2048, K=K, V=V), args.device))
        fields = {name: value for name, value in asdict(plan).items() if value != getattr(DEFAULTS, name)}
        comment = f"{torch.cuda.get_device_name(device)}, B16 T2048 H6, forward and backward {ms:.3f} ms"
        write_text(path, rewrite(path.read_text(encoding="utf-8"), (card, K, V), fields, comment))
        print(f"{card} K{K} V{V}: {ms:.3f} ms with {fields or 'the defaults'}")
    print(f"wrote {path}; run tests/gpu before committing it")
    return 0


def compile_all(K: int, V: int, card: str, device: str) -> None:
    """Compile what :func:`search` will try into Triton's disk cache; what fails here fails there, and says why."""
    count = os.cpu_count() or 1
    tasks = [{"K": K, "V": V, "card": card, "device": device, "index": i, "count": count} for i in range(count)]
    command = [sys.executable, "-m", "qed.bench.tune"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen([*command, json.dumps(task)], **quiet) for task in tasks]  # type: ignore[call-overload]
    try:
        for process in tqdm(processes, desc="compiling", unit="process"):
            process.wait()
    finally:
        for process in processes:
            process.kill()


def main(task: dict[str, Any]) -> None:
    """Compile one process's share of the plans; ``task``: K, V, card, device, index, count."""
    K, V = task["K"], task["V"]
    score = scorer(Shape(1, CHECK, K=K, V=V), task["device"])
    for plan in neighbours(tiles.plan_for(torch.bfloat16, K, V, task["card"]))[task["index"] :: task["count"]]:
        score(plan)


def scorer(shape: Shape, device: str) -> Score:
    """Milliseconds of both passes under a plan; ``None`` where it does not build, fit or agree with float64."""
    from qed.ops import triton_backward, triton_chunks, triton_forward

    def run(x: dict[str, Any], cotangent: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
        q, k, v, a, g = (x[name] for name in LEAVES["core"])
        problem, _ = triton_chunks.describe(q, k, v, a, None)
        state = torch.zeros(q.shape[0], *q.shape[2:], v.shape[3], device=device)
        last = torch.zeros_like(state)
        o, _, starts, transition = triton_forward.forward(q, k, v, a, g, state, None, problem, plan)
        gradients = triton_backward.backward(
            q, k, v, a, g, state, None, starts, transition, cotangent, last, problem, plan
        )
        return [o, *gradients[:5]]

    small, large = replace(shape, batch=1, length=CHECK), shape
    exact_x, x = make_tensors(small, device), make_tensors(large, device)
    leaves = [exact_x[name].double().requires_grad_() for name in LEAVES["core"]]
    zero = torch.zeros(1, shape.heads, shape.K, shape.V, dtype=torch.float64, device=device)
    q, k, v, a, g = leaves
    o, _ = chunked(q, k, v, a, g, zero)
    cotangents = [torch.randn(s.batch, s.length, s.heads, s.V, device=device).bfloat16() for s in (small, large)]
    exact = [o, *torch.autograd.grad(o, leaves, cotangents[0].double())]

    def score(plan: Plan) -> float | None:
        try:
            got = run(exact_x, cotangents[0], plan)
            errors = [((y.double() - z).norm() / z.norm()).item() for y, z in zip(got, exact, strict=True)]
            if not all(error <= LIMIT for error in errors):
                return None
            return time_call(lambda: run(x, cotangents[1], plan), device, budget_ms=100).median_ms
        except Exception as error:
            # what a card or compiler cannot do is an outcome here; only running out of kernels to try would be a fault
            print(f"{type(error).__name__}: {str(error)[:200]}")
            return None

    return score


def rewrite(text: str, key: tuple[str, int, int], fields: dict[str, Any], comment: str) -> str:
    """The source of ``tiles.py`` with one row of ``TABLE`` added or replaced.

    Raises:
        ValueError: the text holds no table.
    """
    table = re.search(r"^TABLE: [^\n]*= \{(?P<rows>\n(?:    [^\n]*\n)*)?\}\n", text, flags=re.MULTILINE)
    if table is None:
        raise ValueError("tiles.py holds no TABLE to rewrite")
    rows = re.findall(r"((?:    # [^\n]*\n)*)    (\(.*?\},)\n", table["rows"] or "", flags=re.DOTALL)
    name = f'("{key[0]}", {key[1]}, {key[2]}): '
    rows = [(note, row) for note, row in rows if not row.startswith(name)]
    items = "".join(f'\n        "{field}": {value},' for field, value in fields.items())
    rows.append((f"    # {comment}\n", f"{name}{{{items}" + ("\n    }," if items else "},")))
    body = "".join(f"{note}    {row}\n" for note, row in sorted(rows, key=lambda item: item[1]))
    head = text[table.start() : table.end()].split("{")[0]
    return f"{text[: table.start()]}{head}{{\n{body}}}\n{text[table.end() :]}"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

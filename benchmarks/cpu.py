"""The chunked form against the token loop on the CPU: ``python benchmarks/cpu.py [--threads 2] [--repeats 5]``.

The error rule passes first: chunked in float32 is at most twice as far from the float64 loop as the float32 loop is,
plus a few units in the last place. Then both sides take turns, so that a busy machine slows both; the ratio is that of
medians. Writes ``benchmarks/results/cpu.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from qed.ops import erase_vector, gated_delta_rule
from qed.records import provenance, write_json

RESULT = Path(__file__).parent / "results" / "cpu.json"
SEED = 0
# name: (B, T, H, K, V). The first is the one the project's target is set for.
SHAPES = {
    "target": (2, 2048, 4, 64, 64),
    "laptop training": (32, 256, 2, 64, 64),
    "laptop prefill": (8, 4096, 2, 64, 64),
}
FORMS = ("reference", "chunked")


def make(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """``q k v a g`` and the initial state, all requiring gradients."""
    B, T, H, K, V = shape
    generator = torch.Generator().manual_seed(SEED)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q, k = F.normalize(normal(B, T, H, K), dim=-1), F.normalize(normal(B, T, H, K), dim=-1)
    a = erase_vector(q, k, normal(B, T, H, K).sigmoid(), 0.1)
    inputs = (q, k, normal(B, T, H, V), a, -0.2 * F.softplus(normal(B, T, H, K)), normal(B, H, K, V))
    return [x.to(dtype).requires_grad_() for x in inputs]


def run(inputs: list[Tensor], form: str, what: str) -> tuple[Tensor, ...]:
    *tokens, state = inputs
    with torch.set_grad_enabled(what != "inference"):
        outputs = gated_delta_rule(*tokens, initial_state=state, backend=form)
    if what != "forward + backward":
        return outputs
    cotangents = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
    return outputs + torch.autograd.grad(outputs, inputs, cotangents)


def gate() -> dict[str, float]:
    """Largest error of each result in units of the largest value; raises when the error rule fails."""
    shape = (2, 200, 2, 64, 64)
    what = "forward + backward"
    exact = run(make(shape, torch.float64), "reference", what)
    single = make(shape, torch.float32)
    errors = {}
    for name, x, loop, ours in zip(
        ("o", "state", "dq", "dk", "dv", "da", "dg", "dinitial_state"),
        exact,
        run(single, "reference", what),
        run(single, "chunked", what),
        strict=True,
    ):
        scale = x.abs().max().item()
        error, allowed = ((y.double() - x).abs().max().item() / scale for y in (ours, loop))
        if not error <= 2 * allowed + 4 * torch.finfo(torch.float32).eps:
            raise SystemExit(f"{name}: error {error:.1e} of the chunked form, {allowed:.1e} of the loop")
        errors[name] = error
    return errors


def measure(shape: tuple[int, ...], what: str, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and process time in milliseconds of each form, in turns; a turn of the fast form is its best of five."""
    inputs = make(shape, torch.float32)
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    run(inputs, "chunked", what)
    for _ in range(repeats):
        for form in FORMS:
            turns = []
            for _ in range(1 if form == "reference" else 5):
                wall, cpu = time.perf_counter(), time.process_time()
                run(inputs, form, what)
                turns.append(((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3))
            times[form].append(statistics.median_low(turns))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which shapes (default: all)")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"where the JSON goes (default: {RESULT.name})")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    errors = gate()
    rows = []
    print(
        f"{'shape':<16} {'B T H K V':<18} {'what':<19} {'loop ms':>9} {'chunked ms':>10} {'ratio':>6} {'tokens/s':>9}"
    )
    for name in arguments.shapes:
        shape = SHAPES[name]
        for what in ("inference",) if name == "laptop prefill" else ("inference", "forward", "forward + backward"):
            times = measure(shape, what, arguments.repeats)
            wall, cpu = ({form: statistics.median(t[i] for t in times[form]) for form in FORMS} for i in (0, 1))
            rows.append(
                {
                    "shape": name,
                    **dict(zip(("B", "T", "H", "K", "V"), shape, strict=True)),
                    "what": what,
                    "reference_time_ms": wall["reference"],
                    "chunked_time_ms": wall["chunked"],
                    "ratio": wall["reference"] / wall["chunked"],
                    "reference_process_time_ms": cpu["reference"],
                    "chunked_process_time_ms": cpu["chunked"],
                    "chunked_tokens_per_second": 1e3 * shape[0] * shape[1] / wall["chunked"],
                }
            )
            row = rows[-1]
            print(
                f"{name:<16} {' '.join(map(str, shape)):<18} {what:<19} {row['reference_time_ms']:>9.1f} "
                f"{row['chunked_time_ms']:>10.1f} {row['ratio']:>6.1f} {row['chunked_tokens_per_second']:>9.0f}"
            )
    record = {"dtype": "float32", "threads": arguments.threads, "repeats": arguments.repeats, "errors": errors}
    write_json(arguments.out, record | {"rows": rows, "provenance": provenance(seed=SEED)})
    print(f"errors within the rule; written to {arguments.out}")


if __name__ == "__main__":
    main()

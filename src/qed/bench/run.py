"""``qed bench``: runs the workers, keeps their rows with provenance, prints the table and draws it."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from qed.bench import draw
from qed.bench.measure import ceilings
from qed.bench.peers import PEERS
from qed.bench.work import Shape
from qed.config import nearest
from qed.records import provenance, read_json, read_rows, write_json

TOKENS = 32_768
SHAPES = {
    "cuda": [Shape(16, 2048), Shape(1, TOKENS), Shape(1, 1), Shape(64, 1), Shape(256, 1)],
    "cpu": [Shape(2, 2048, 4, 64, 64)],
}
# One amount of tokens at several lengths, for the figures.
LENGTHS = [Shape(TOKENS // length, length) for length in (512, 1024, 4096, 8192, 16_384)]


def bench(args: argparse.Namespace) -> int:
    """See :func:`qed.bench.bench`."""
    args = argparse.Namespace(**vars(args))
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.action == "tune":
        from qed.bench.tune import tune

        return tune(args)
    # results of a card that is not here can be shown by their own name
    named = args.action == "show" and (args.out / f"{args.device}.json").exists()
    slug = args.device if named else _slug(args.device)
    path = args.out / f"{slug}.json"
    if args.action == "run":
        _run(args, path)
    elif not path.exists():
        raise ValueError(f"no results at {path}; make them with `qed bench run --device {args.device}`")
    result = read_json(path)
    print(table(result))
    for figure in draw.draw(result, args.out / slug):
        print(figure)
    return int(any(row["library"] == "qed" and row["status"] != "ok" for row in result["rows"]))


def _run(args: argparse.Namespace, path: Path) -> None:
    kind = args.device.split(":")[0]
    if kind not in SHAPES:
        raise ValueError(nearest("device", kind, SHAPES))
    for name in args.peers or ():
        if name not in PEERS:
            raise ValueError(nearest("peer", name, PEERS))
    names = [name for name, peer in PEERS.items() if kind in peer.devices and name in (args.peers or PEERS)]
    shapes = SHAPES[kind] + ([] if args.quick or kind == "cpu" else LENGTHS)
    result: dict[str, Any] = {"provenance": provenance(device=args.device), "ceilings": ceilings(args.device)}
    result |= {"peer_versions": _peer_versions(), "rows": []}
    torch.cuda.empty_cache()
    # ours share a process, each other peer has its own: its failure and its time are its own
    ours = [name for name in names if PEERS[name].library == "qed"]
    groups = [group for group in (ours, *([name] for name in names if name not in ours)) if group]
    if args.warm:
        _warm([name for name in names if PEERS[name].library != "qed" and PEERS[name].is_installed], args, shapes[0])
    with tempfile.TemporaryDirectory() as folder:
        # all import their libraries now, while the first is at work; one at a time measures
        workers = [_start(group, shapes, args, result, Path(folder)) for group in groups]
        try:
            for worker in tqdm(workers, desc="peers", unit="process"):
                worker.go()
                result["rows"] += worker.finish(args.timeout)
                write_json(path, result)
        finally:
            for worker in workers:
                worker.process.kill()


def _warm(names: list[str], args: argparse.Namespace, shape: Shape) -> None:
    """Compile what the peers' tuners will try, in as many processes as there are processors; none of it is timed."""
    count = max(1, (os.cpu_count() or 1) // max(1, len(names)))
    small = asdict(replace(shape, batch=1))
    tasks = [
        {"peer": name, "index": i, "count": count, "device": args.device, "shape": small}
        for name in names
        for i in range(count)
    ]
    command = [sys.executable, "-m", "qed.bench.warm"]
    processes = [subprocess.Popen([*command, json.dumps(task)], stderr=subprocess.DEVNULL) for task in tasks]
    end = time.monotonic() + args.timeout
    try:
        for process in tqdm(processes, desc="compiling peers", unit="process"):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                break  # what is missing is compiled when it is timed
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass
class Worker:
    """A process that waits for the word to start, and the rows it leaves behind."""

    peers: list[str]
    out: Path
    process: subprocess.Popen[str]

    def go(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has failed already, which finish() reports

    def finish(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for the end; the rows it wrote, and one status row more where it was cut or failed."""
        status = ""
        try:
            _, errors = self.process.communicate(timeout=seconds)
            status = "failed" if self.process.returncode else ""
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
            status = f"timed out after {seconds:.0f} s"
        rows = read_rows(self.out)
        if status:
            row = {"peer": ", ".join(self.peers), "library": PEERS[self.peers[0]].library, "work": "process"}
            rows.append({**row, "status": status, "traceback": errors[-2000:]})
        return rows


def _start(
    peers: list[str],
    shapes: list[Shape],
    args: argparse.Namespace,
    result: dict[str, Any],
    folder: Path,
) -> Worker:
    out = folder / f"{peers[0].replace(' ', '-')}.jsonl"
    out.touch()
    task = {
        "peers": peers, "shapes": [asdict(s) for s in shapes], "device": args.device, "out": str(out),
        "ceilings": result["ceilings"],
    }  # fmt: skip
    command = [sys.executable, "-m", "qed.bench.worker", json.dumps(task)]
    return Worker(peers, out, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


def table(result: dict[str, Any]) -> str:
    """Rows by work and shape; ``x fla`` is the time of fla's chunk_gdn2 (or its decode step) over the row's."""
    lines = []
    top = result["ceilings"]
    lines.append(
        f"{result['provenance']['device']}: copy {top['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
        f"matrix products {top['matmul_flop_per_s'] / 1e12:.3g} TFLOP/s; medians with 20 and 80 % quantiles"
    )
    heads = f"{'peer':34} {'ms':>9} {'20 %':>9} {'80 %':>9} {'x fla':>6} {'roofline':>8} {'peak GiB':>8}  status"
    shapes = sorted({_key(row) for row in result["rows"] if "batch" in row})
    for key in shapes:
        rows = [row for row in result["rows"] if "batch" in row and _key(row) == key]
        work, length, batch, heads_, K, V = key
        lines += ["", f"{work}, B{batch} T{length} H{heads_} K{K} V{V}", heads]
        fla = next((r["median_ms"] for r in rows if r["peer"] == "fla chunk_gdn2" and r["status"] == "ok"), None)
        for row in rows:
            lines.append(_line(row, fla))
        overhead = overhead_of(rows)
        if overhead is not None:
            lines.append(f"QED over GDN-2 in our kernels: {100 * overhead:+.1f} %")
    for row in result["rows"]:
        if "batch" not in row:
            lines.append(f"{row['peer']}: {row['status']}")
    return "\n".join(lines)


def overhead_of(rows: list[dict[str, Any]]) -> float | None:
    """Extra time of ``qed`` over ``gdn2`` among rows of one work and shape, as a share."""
    times = {row["peer"]: row["median_ms"] for row in rows if row["status"] == "ok"}
    return times["qed"] / times["gdn2"] - 1 if "qed" in times and "gdn2" in times else None


def _line(row: dict[str, Any], fla: float | None) -> str:
    if row["status"] != "ok":
        return f"{row['peer']:34} {'':>9} {'':>9} {'':>9} {'':>6} {'':>8} {'':>8}  {row['status']}"
    ratio = f"{fla / row['median_ms']:.2f}" if fla else ""
    peak = f"{row['peak_extra_bytes'] / 2**30:.2f}" if row.get("peak_extra_bytes") else ""
    times = " ".join(f"{row[name]:9.4f}" for name in ("median_ms", "p20_ms", "p80_ms"))
    return f"{row['peer']:34} {times} {ratio:>6} {100 * row['roofline_share']:7.0f}% {peak:>8}  ok; {row['note']}"


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["work"], row["length"], row["batch"], row["heads"], row["K"], row["V"]


def _peer_versions() -> dict[str, str | None]:
    from importlib import metadata

    versions: dict[str, str | None] = {}
    for name in ("fla-core",):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _slug(device: str) -> str:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

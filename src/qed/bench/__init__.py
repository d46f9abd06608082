"""Fair timings of the operator beside its peers: ``qed bench``.

Every peer gets the same tensors, passes the same error rule before it is timed, and runs in a process of its own with
a time limit. Rows are written as they are made. A failure, a time-out or a lack of memory is a status, never a number.

Importing this module is cheap, so that a command line can be built from it; torch is imported by :func:`bench`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

__all__ = ["add_arguments", "bench", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that :func:`bench` reads."""
    parser.add_argument(
        "action", nargs="?", default="run", choices=["run", "show", "tune"],
        help="measure; print and draw the last result; search the kernels' tiles on this card and rewrite their table",
    )  # fmt: skip
    parser.add_argument("--device", help="cuda:1, cpu; to show, also a file's name (default: cuda if there is one)")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="some peers only; a wrong name lists them all")
    parser.add_argument("--quick", action="store_true", help="leave out the lengths that only the figures need")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one peer's process may take")
    parser.add_argument(
        "--warm", action="store_true", help="first compile what peers that tune themselves will try, in parallel"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_size,
        metavar="KxV",
        help="widths to tune, such as 128x128 (default: three square ones)",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of results and figures")


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or not all(1 <= int(width) <= 256 for width in match.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is not KxV with widths from 1 to 256, such as 128x128")
    return int(match[1]), int(match[2])


def bench(args: argparse.Namespace) -> int:
    """Run, show or tune; 0, or 1 where a peer of ours has no time."""
    from qed.bench.run import bench

    return bench(args)


def main(arguments: list[str]) -> int:
    """``qed bench`` with the words that follow it; see :func:`bench`."""
    parser = argparse.ArgumentParser(prog="qed bench", description="Time the operator beside its peers.")
    add_arguments(parser)
    return bench(parser.parse_args(arguments))

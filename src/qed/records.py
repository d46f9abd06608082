"""What the rooms write and read: atomic JSON files, tidy rows, and where a number came from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any


def write_text(path: Path | str, text: str) -> None:
    """Write beside ``path`` and rename into place: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path | str, value: Any) -> None:
    """Write one JSON document atomically; ``nan`` and infinities are refused (``ValueError``)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_rows(path: Path | str, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines atomically, one row a line."""
    write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """Read JSON lines; a last line cut short by a kill is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def provenance(*, seed: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Commit, versions, device, seed and time: what a number needs to be trusted later."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("qed-attention", "torch", "triton", "transformers", "numpy")},
        "device": _device_name(device),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seed": seed,
    }


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None:
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

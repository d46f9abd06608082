"""Tokenised text on disk: raw little-endian shards, and a manifest that says what they are and vouches for them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..config import nearest
from ..records import read_json
from .packing import Boundaries, StreamRows

MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


class ShardedTokens:
    """The shards of one split as one stream, memory-mapped; pickled (for data workers) it carries paths, not tokens."""

    def __init__(self, files: list[Path], lengths: list[int], dtype: str) -> None:
        self.files, self.dtype = files, dtype
        self._ends = np.cumsum(lengths)
        self._maps: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        if self._maps is None:
            self._maps = [np.memmap(file, dtype=self.dtype, mode="r") for file in self.files]
        parts = []
        for shard in range(int(np.searchsorted(self._ends, start, side="right")), len(self.files)):
            begin = int(self._ends[shard]) - len(self._maps[shard])
            if begin >= stop:
                break
            parts.append(self._maps[shard][max(0, start - begin) : stop - begin])
        return np.concatenate(parts) if parts else np.zeros(0, dtype=self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}


def open_rows(
    folder: Path | str,
    *,
    split: Literal["train", "validation"] = "train",
    row_length: int = 2048,
    boundaries: Boundaries = "concatenate",
    check: Literal["all", "size"] = "all",
) -> StreamRows:
    """Rows of exactly ``row_length`` tokens from a folder that ``prepare`` made; row i is the same for ever.

    ``boundaries``: "concatenate" lets documents follow each other, each behind its BOS; "reset" separates them.
    ``check``: "all" reads every shard of the split against its checksum first, "size" its size alone.

    Raises ``ValueError`` for a folder without a manifest and for a shard that is missing, truncated or altered.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if split not in SPLITS:
        raise ValueError(nearest("split", split, SPLITS))
    if check not in ("all", "size"):
        raise ValueError(nearest("check", check, ("all", "size")))
    shards = manifest["splits"][split]["shards"]
    if not shards:
        raise ValueError(f"{folder} has no {split} tokens; prepare it with a larger validation_share")
    for shard in shards:
        check_shard(folder, shard, manifest["dtype"], contents=check == "all")
    tokens = ShardedTokens(
        [folder / shard["file"] for shard in shards], [shard["num_tokens"] for shard in shards], manifest["dtype"]
    )
    return StreamRows(tokens, separator=manifest["separator"], row_length=row_length, boundaries=boundaries)


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """What ``prepare`` wrote last: its presence means that the data are whole."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise ValueError(f"{folder} holds no prepared data, or not all ({MANIFEST} is missing): run `qed data prepare`")
    return read_json(path)


def check_shard(folder: Path, shard: dict[str, Any], dtype: str, *, contents: bool) -> None:
    """Raise ``ValueError``, naming the file, if it is missing, has another size or, asked for, other contents."""
    path = folder / shard["file"]
    expected = shard["num_tokens"] * np.dtype(dtype).itemsize
    if not path.exists():
        raise ValueError(f"shard {path} is missing")
    if path.stat().st_size != expected:
        raise ValueError(f"shard {path} has {path.stat().st_size} bytes instead of {expected}: truncated or replaced")
    if contents and file_hash(path) != shard["sha256"]:
        raise ValueError(f"shard {path} has been altered: its SHA-256 is not the manifest's")


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()

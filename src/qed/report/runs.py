"""Reads run folders. A missing or unreadable part becomes a named gap, never a default value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qed.records import read_json, read_rows

PARTS = {
    "config.json": "its configuration",
    "train.json": "the training record",
    "train.jsonl": "the training log",
    "niah.json": "the needle evaluation's record",
    "niah.jsonl": "the needle outcomes",
}
EXTRA_PARTS = {
    "strength.json": "the strength sweep",
    "recall.json": "the recall tasks",
    "recall.jsonl": "the recall outcomes",
    "loss.json": "the validation loss",
    "probe.json": "the diagnostics",
}


@dataclass(frozen=True)
class Run:
    """One run folder. A part that could not be read is ``None`` or empty, and ``gaps`` says so in words."""

    folder: Path
    arm: str
    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    niah: dict[str, Any] | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    strength: dict[str, Any] | None = None
    recall: dict[str, Any] | None = None
    recall_rows: list[dict[str, Any]] = field(default_factory=list)
    loss: dict[str, Any] | None = None
    probe: dict[str, Any] | None = None
    gaps: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"

    def lookup(self, *names: str) -> Any:
        """The first of ``names`` found in the training record or the configuration, at any depth; else ``None``."""
        for name in names:
            for tree in (self.train, self.config):
                found = _search(tree, name)
                if found is not None:
                    return found
        return None

    @property
    def train_length(self) -> int | None:
        return self.lookup("train_length", "sequence_length")


def load_runs(folders: Iterable[Path | str]) -> list[Run]:
    """Read run folders, in order of arm and seed.

    Raises:
        ValueError: no folder given, a path that is no folder, or two folders of one arm and seed.
    """
    runs = [load_run(Path(folder)) for folder in folders]
    if not runs:
        raise ValueError("no run folders given; wanted one or more, each holding config.json and the records of a run")
    seen: dict[str, Path] = {}
    for run in runs:
        if run.name in seen:
            raise ValueError(f"two folders hold the run {run.name}: {seen[run.name]} and {run.folder}")
        seen[run.name] = run.folder
    return sorted(runs, key=lambda run: (run.arm, run.seed))


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """Run folders among ``paths``: each is a run folder itself or holds run folders.

    Raises:
        ValueError: a path that is not there, or that holds no run.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise ValueError(f"no such folder: {path}")
        if (path / "config.json").exists():
            folders.append(path)
            continue
        inside = sorted(child.parent for child in path.glob("*/config.json"))
        if not inside:
            raise ValueError(f"{path} holds no run: wanted config.json in it or in a folder below it")
        folders += inside
    return folders


def load_run(folder: Path) -> Run:
    """Read one run folder; what is missing or damaged is named in ``gaps``."""
    if not folder.is_dir():
        raise ValueError(f"no such run folder: {folder}")
    gaps: list[str] = []

    def part(name: str, wanted: bool = True) -> Any:
        path = folder / name
        if not path.exists():
            if wanted:
                gaps.append(f"{PARTS[name]} ({name}) is missing")
            return None
        try:
            return read_rows(path) if name.endswith(".jsonl") else read_json(path)
        except (ValueError, OSError) as error:
            gaps.append(f"{(PARTS | EXTRA_PARTS)[name]} ({name}) cannot be read: {error}")
            return None

    config = part("config.json") or {}
    named = re.fullmatch(r"(.+)-seed(\d+)", folder.name)
    arm = _search(config, "arm") or (named and named[1])
    seed = _search(config, "seed")
    seed = seed if isinstance(seed, int) else (int(named[2]) if named else None)
    if arm is None or seed is None:
        raise ValueError(f"{folder} does not say its arm and seed: wanted them in config.json or a name like qed-seed0")
    train, niah = part("train.json"), part("niah.json")
    for name, what in EXTRA_PARTS.items():
        if name.endswith(".json") and (folder / f"{name}l").exists() and not (folder / name).exists():
            gaps.append(f"{what} is not finished: {name}l without {name}")
    failure = folder / "failure.json"
    if failure.exists():
        gaps.append(f"the run failed: {read_json(failure).get('error', 'no reason recorded')}")
    return Run(
        folder=folder,
        arm=arm,
        seed=seed,
        config=config,
        train=train,
        log=part("train.jsonl") or [],
        niah=niah,
        outcomes=part("niah.jsonl") or [],
        strength=part("strength.json", wanted=False),
        recall=part("recall.json", wanted=False),
        recall_rows=part("recall.jsonl", wanted=False) or [],
        loss=part("loss.json", wanted=False),
        probe=part("probe.json", wanted=False),
        gaps=tuple(gaps),
    )


def _search(tree: Any, name: str) -> Any:
    """The value of ``name`` nearest to the root of a JSON tree of objects."""
    level = [tree] if isinstance(tree, dict) else []
    while level:
        for node in level:
            if node.get(name) is not None:
                return node[name]
        level = [child for node in level for child in node.values() if isinstance(child, dict)]
    return None

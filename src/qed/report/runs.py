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
        if is_run(path):
            folders.append(path)
            continue
        inside = sorted(child for child in path.iterdir() if child.is_dir() and is_run(child))
        if not inside:
            raise ValueError(
                f"{path} holds no run: wanted config.json or a record such as train.json in it or one below"
            )
        folders += inside
    return folders


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run's records or its configuration; a checkpoint's config.json alone is neither."""
    if any((folder / name).exists() for name in (PARTS.keys() | EXTRA_PARTS.keys()) - {"config.json"}):
        return True
    return (folder / "config.json").exists() and not any(folder.glob("*.safetensors"))


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

    config, train, niah = part("config.json") or {}, part("train.json"), part("niah.json")
    arm = _search(config, "arm") or _search(train, "arm")
    seed = next((value for value in (_search(config, "seed"), _search(train, "seed")) if isinstance(value, int)), None)
    named = re.fullmatch(r"(.+)-seed(\d+)", folder.name)
    if arm is None:
        arm = named[1] if named else folder.name
        gaps.append(f"no arm is recorded: shown as {arm}, by the folder's name")
    if seed is None:
        seed = int(named[2]) if named else 0
        gaps.append(f"no seed is recorded: shown as seed {seed}{', by the name of the folder' if named else ''}")
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

"""Imports go one way: cli -> study -> {train, evals, probes} -> model -> ops; data and report stand beside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "qed"
SHARED = {"records", "config", "statistics"}
ALLOWED = {
    "ops": set(),
    "bench": SHARED | {"ops"},
    "model": {"config", "ops"},
    "data": SHARED,
    "train": SHARED | {"data", "model", "ops"},
    "evals": SHARED | {"data", "model", "ops"},
    "probes": SHARED | {"data", "model", "ops"},
    "report": SHARED,
    "study": SHARED | {"data", "model", "ops", "train", "evals", "probes", "report"},
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ("qed", *path.relative_to(SOURCE).parts[:-1])
            base = ".".join([*above[: len(above) + 1 - node.level], *filter(None, [node.module])])
            module = base if node.level else str(node.module)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "qed" else [module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("qed.")}
    return rooms


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room):
    for path in (SOURCE / room).rglob("*.py"):
        extra = imported_rooms(path) - ALLOWED[room] - {room}
        assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}"


def test_relative_imports_are_seen():
    assert {"config", "data", "model", "records", "statistics"} <= imported_rooms(SOURCE / "evals" / "niah.py")


def test_operators_import_without_the_model_stack_or_triton():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import qed.ops\n"
        "assert 'transformers' not in sys.modules, 'qed.ops pulled in transformers'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_report_never_imports_torch():
    code = "import sys\nimport qed.report\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

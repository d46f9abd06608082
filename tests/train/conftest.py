import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def runs() -> Iterator[ModuleType]:
    """The module of tiny runs, importable by the processes that tests start."""
    sys.path.insert(0, str(Path(__file__).parent))
    import tiny_runs

    torch.set_num_threads(1)
    yield tiny_runs
    sys.path.remove(str(Path(__file__).parent))

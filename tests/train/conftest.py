import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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


@pytest.fixture(scope="session")
def context(runs: ModuleType) -> Any:
    """Processes forked from a server that has imported everything: quick to start, independent of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qed.train.run", "transformers.models.llama.modeling_llama", "qed.model.modeling"])
    return context

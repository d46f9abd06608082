"""The core's kernels in float32 under Triton's interpreter, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def rows():
    script = Path(__file__).with_name("interpreted_core.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_outputs_and_every_gradient_against_float64(rows):
    compared = {name: row["errors"] for name, row in rows.items() if "errors" in row}
    assert len(compared) == 11
    for name, errors in compared.items():
        gradients = () if name.startswith("prefill") else ("q", "k", "v", "a", "g", "initial_state")
        assert set(errors) == {"o", "final_state", *gradients}
        for field, error in errors.items():
            assert error <= 5e-6, (name, field, error)


@pytest.mark.parametrize("case", ["causality", "prefill causality"])
def test_no_later_token_moves_an_earlier_bit(rows, case):
    assert rows[case]["equal"]


def test_operators_are_registered_completely(rows):
    assert rows["registration"]["equal"]

"""One run in a process of its own: ``python -m qed.study.worker FOLDER`` trains, evaluates and records it."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from qed.records import read_json, write_json

INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves the choice to torch")
    arguments = parser.parse_args()
    failure = arguments.folder / "failure.json"
    failure.unlink(missing_ok=True)
    try:
        import torch

        from qed.config import from_dict
        from qed.study.presets import RunConfig
        from qed.study.runs import execute
        from qed.train import TrainingInterrupted
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        execute(from_dict(RunConfig, read_json(arguments.folder / "config.json")), arguments.folder)
    except (KeyboardInterrupt, TrainingInterrupted):
        return INTERRUPTED
    except Exception as error:
        write_json(failure, {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

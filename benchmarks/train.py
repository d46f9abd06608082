"""Throughput of training the 340M model through ``qed.train``: one configuration a process, results as they come.

    python benchmarks/train.py                        # every part, at most 230 s
    python benchmarks/train.py --parts qed fla --seconds 600 --part-seconds 400     # fla tunes itself for minutes
    python benchmarks/train.py --smoke                # a tiny model on the CPU, to see that it runs

Each part trains on random tokens (16 rows of 2048 a GPU and step) and is one row of the result file: tokens a second
after the tenth step (median of five-step windows), MFU, peak memory, and the seconds from the start of the process to
the end of the fifth step. The first part starts from empty compiler caches, the others find what it left; the peer uses
the machine's own cache. liger-kernel and flash-linear-attention are used when they can be imported; a part that lacks
one says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
STEPS, FIRST, WARM = 25, 5, 10
PARTS: dict[str, dict[str, Any]] = {
    "qed": {"arm": "qed"},
    "fla": {"arm": "gdn2", "mixer": "fla", "compile": False},
    "gdn2": {"arm": "gdn2"},
    "qed-eager": {"arm": "qed", "compile": False},
    "qed-logits": {"arm": "qed", "loss": "logits"},
    "qed-recompute": {"arm": "qed", "activation_checkpointing": True},
    "qed-2gpu": {"arm": "qed", "num_processes": 2},
}
DEFAULTS = {"mixer": "qed", "compile": True, "loss": "liger", "activation_checkpointing": False, "num_processes": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=230.0, help="for all parts together")
    parser.add_argument("--part-seconds", type=float, default=90.0, help="for one part at most")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "train.json")
    parser.add_argument("--caches", type=Path, help="keep the compilers' caches in this folder (default: a new one)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return

    import torch

    from qed.records import provenance, write_json

    deadline = time.monotonic() + arguments.seconds
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    if not on_gpu and not arguments.smoke:
        parser.error("no CUDA device; --smoke runs a tiny model on the CPU")
    result = {
        "what": "training throughput, random tokens",
        "rows_a_gpu": 2 if arguments.smoke else 16,
        "sequence_length": 64 if arguments.smoke else 2048,
        "num_gpus": torch.cuda.device_count() if on_gpu else 0,
        "provenance": provenance(seed=0, device="cuda" if on_gpu else "cpu"),
        "parts": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        caches = arguments.caches or Path(scratch) / "caches"
        for name in arguments.parts:
            options = DEFAULTS | PARTS[name] | {"smoke": arguments.smoke}
            if arguments.smoke:
                options |= {"compile": False, "loss": "logits"}
            left = min(arguments.part_seconds, deadline - time.monotonic())
            row = {"part": name, **options, "caches": "kept" if caches.exists() else "empty"}
            row |= measure(options, Path(scratch), caches.resolve(), name, left)
            result["parts"].append(row)
            add_ratios(result["parts"])
            write_json(arguments.out, result)
            print(json.dumps({key: row.get(key) for key in ("part", "status", "tokens_per_second", "peak_gib")}))
    print(f"results: {arguments.out}")


def measure(options: dict[str, Any], scratch: Path, caches: Path, name: str, seconds: float) -> dict[str, Any]:
    """Run one part in a process of its own; whatever it had measured counts, even when it is cut short."""
    import torch

    missing = [
        package
        for package, wanted in (("liger_kernel", options["loss"] == "liger"), ("fla", options["mixer"] == "fla"))
        if wanted and find_spec(package) is None
    ]
    if missing:
        return {"status": f"skipped: {', '.join(missing)} not installed"}
    if not options["smoke"] and torch.cuda.device_count() < options["num_processes"]:
        return {"status": f"skipped: needs {options['num_processes']} GPUs"}
    if options["smoke"] and options["num_processes"] > 1:
        return {"status": "skipped: one process in a smoke run"}
    if seconds < 15:
        return {"status": "skipped: no time left"}

    folder = scratch / name
    environment = dict(os.environ)
    if options["mixer"] == "qed":
        environment |= {
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        }
    launcher = [sys.executable]
    if options["num_processes"] > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options['num_processes']}"]
    payload = json.dumps({**options, "folder": str(folder), "started": time.time()})
    output = scratch / f"{name}.log"
    with open(output, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*launcher, str(HERE), "--child", payload],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            if options["num_processes"] > 1:
                # The launcher's processes have sessions of their own: it must end them itself.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    row: dict[str, Any] = {"status": "done" if code == 0 else "timeout" if code is None else f"failed ({code})"}
    if code:
        row["message"] = output.read_text(encoding="utf-8", errors="replace")[-1500:]
    return row | read_measurements(folder)


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Speed of each finished part in multiples of the first, which is the one with the defaults."""
    first = rows[0].get("tokens_per_second")
    for row in rows:
        if first and "tokens_per_second" in row:
            row["ratio_to_first"] = row["tokens_per_second"] / first


def read_measurements(folder: Path) -> dict[str, Any]:
    from qed.records import read_json, read_rows

    rows = read_rows(folder / "train.jsonl") if (folder / "train.jsonl").exists() else []
    first = read_json(folder / "first.json") if (folder / "first.json").exists() else {}
    speeds = [row["tokens_per_second"] for row in rows if row["step"] > WARM]
    measured: dict[str, Any] = {**first, "steps": rows[-1]["step"] if rows else 0}
    if speeds:
        measured |= {
            "tokens_per_second": statistics.median(speeds),
            "tokens_per_second_range": [min(speeds), max(speeds)],
            "mfu": rows[-1]["mfu"],
            "peak_gib": rows[-1]["peak_bytes"] / 2**30,
            "data_share": rows[-1]["data_share"],
            "last_loss": rows[-1]["loss"],
        }
    return measured


def child(options: dict[str, Any]) -> None:
    """Train; note when the fifth step was logged."""
    import torch

    from qed.model import QEDConfig
    from qed.records import write_json
    from qed.train import TrainConfig, build_model, train

    smoke, folder = options["smoke"], Path(options["folder"])
    rows, length, vocab = (2, 64, 256) if smoke else (16, 2048, 32000)
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 32}
    model_config = QEDConfig(vocab_size=vocab, arm=options["arm"], **(tiny if smoke else {}))
    batch_tokens = rows * length * options["num_processes"]
    config = TrainConfig(
        num_tokens=STEPS * batch_tokens,
        batch_tokens=batch_tokens,
        sequence_length=length,
        micro_batch_rows=rows,
        loss=options["loss"],
        compile=options["compile"],
        activation_checkpointing=options["activation_checkpointing"],
        log_every_steps=5,
        save_every_seconds=0.0,
        tensorboard=False,
    )

    class RandomRows(torch.utils.data.Dataset):
        tokens = torch.randint(0, vocab, (256, length), generator=torch.Generator().manual_seed(0))

        def __len__(self) -> int:
            return len(self.tokens)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": self.tokens[index], "labels": self.tokens[index]}

    def watch() -> None:
        path = folder / "train.jsonl"
        while not path.exists() or f'"step": {FIRST},' not in path.read_text():
            time.sleep(0.05)
        write_json(folder / "first.json", {"first_five_steps_s": time.time() - options["started"]})

    if int(os.environ.get("RANK", "0")) == 0:
        threading.Thread(target=watch, daemon=True).start()
    model = with_fla_mixers(build_model(model_config, 0)) if options["mixer"] == "fla" else model_config
    train(model, None, RandomRows(), config, folder, use_cpu=smoke, progress=False)


def with_fla_mixers(model: Any) -> Any:
    """The same model with fla's GDN-2 layer as the mixer of every block."""
    import torch
    from fla.layers.gdn2 import GatedDeltaNet2

    class Mixer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = model.config
            self.inner = GatedDeltaNet2(
                hidden_size=config.hidden_size, head_dim=config.head_dim, num_heads=config.num_heads
            )

        def forward(self, hidden_states: Any, cache: Any = None, padding: Any = None, cu_seqlens: Any = None) -> Any:
            return self.inner(hidden_states)[0]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in model.model.layers:
            layer.mixer = Mixer()
    return model


if __name__ == "__main__":
    main()

"""Speed and memory of the needle evaluation, with lm-eval on slices of the same work in the same process.

    python benchmarks/evaluation.py --out benchmarks/results/evaluation.json

The model is randomly initialised (by default the paper's 340M size), so accuracies mean nothing here. The whole command
is timed as a user meets it: measuring the model's calls and the device, compiling kernels, making the prompts, answers,
scores and files. Results are written as they come.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qed.data.corpus import needle_texts
from qed.data.prose import load_prose
from qed.data.tokenizer import TokenizerConfig, load_tokenizer, train_tokenizer
from qed.evals.decode import evaluating, forward
from qed.evals.engine import Engine
from qed.evals.niah import NiahConfig, evaluate, needle_tasks
from qed.model import QEDConfig, QEDForCausalLM
from qed.records import provenance, write_json

# Length, examples and lm-eval's batch size of each comparison.
SLICES = ("1024:64:64", "8192:32:32", "32768:16:16", "4096:4:1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--examples", type=int, default=500, help="examples a length")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokenizer", help="folder, hub name or 'mistral-v1'; without it one is trained on the spot")
    parser.add_argument("--slices", nargs="*", default=SLICES, help="LENGTH:EXAMPLES:BATCH, the batch size lm-eval's")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--profile", action="store_true", help="kernels of one chunk's forward pass")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        tokenizer = train_tokenizer([*load_prose(), *needle_texts(500, seed=0)], TokenizerConfig(vocab_size=32000))
    torch.manual_seed(0)
    config = QEDConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        num_heads=options.heads,
        head_dim=options.head_dim,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.device(device):
        model = QEDForCausalLM(config).to(dtype).eval()
    result: dict[str, Any] = {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "dtype": f"{dtype} weights, no autocast; decay, theta and states in float32".removeprefix("torch."),
        "tokenizer": {"name": options.tokenizer or "trained on the embedded prose", "num_tokens": len(tokenizer)},
        "provenance": provenance(seed=0, device=device),
    }
    niah = NiahConfig(
        lengths=tuple(options.lengths),
        num_examples=options.examples,
        max_new_tokens=options.new_tokens,
        rows=options.rows,
        chunk_tokens=options.chunk_tokens,
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record = evaluate(model, tokenizer, niah, folder)
    result["needle"] = {
        "wall_s": time.perf_counter() - started,
        # Without the fingerprint of the weights and the making of tasks, which come before.
        "evaluate_s": record["seconds"],
        "num_examples": options.examples,
        "num_new_tokens": options.new_tokens,
        "num_tokens": sum(row["num_tokens"] for row in record["timings"]),
        "engine": record["engine"],
        "lengths": record["timings"],
    }
    if device == "cuda":
        peaks = [row["peak_bytes"] for row in record["timings"]]
        result["needle"]["last_peak_over_first"] = peaks[-1] / peaks[0]
    print(result["needle"], flush=True)
    write_json(options.out, result)
    result["making"] = [making(niah, tokenizer, length) for length in options.lengths]
    write_json(options.out, result)
    with evaluating(model):
        engine = Engine(
            model,
            tokenizer,
            rows=record["engine"]["rows"],
            chunk_tokens=options.chunk_tokens,
            length=max(options.lengths),
        )
    if options.profile and device == "cuda":
        result["profile"] = profile(model, engine)
        write_json(options.out, result)
    result["lm_eval"] = []
    for given in options.slices:
        length, num_examples, batch_size = map(int, given.split(":"))
        try:
            row = compare(model, tokenizer, engine, length, num_examples, batch_size, options.new_tokens)
        except (ImportError, torch.OutOfMemoryError) as error:
            row = {"length": length, "num_examples": num_examples, "batch_size": batch_size, "problem": str(error)}
        result["lm_eval"].append(row)
        print(row, flush=True)
        write_json(options.out, result)


def seconds(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall time of ``run`` to the end of its work, and what it returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    before = time.perf_counter()
    value = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - before, value


def making(niah: NiahConfig, tokenizer: Any, length: int, num_examples: int = 50) -> dict[str, Any]:
    """Seconds to make one prompt, after those that its task takes once."""
    started = time.perf_counter()
    task = needle_tasks(replace(niah, lengths=(length,)), tokenizer)["niah_single_1", length]
    ready = time.perf_counter()
    for index in range(num_examples):
        task[index]
    return {
        "length": length,
        "task_s": ready - started,
        "example_s": (time.perf_counter() - ready) / num_examples,
    }


@torch.inference_mode()
def profile(model: Any, engine: Engine) -> dict[str, Any]:
    """One chunk read with a cache: its time, its rate and the kernels that the time is spent in."""
    device = next(model.parameters()).device
    ids = torch.zeros(engine.rows, engine.chunk_tokens, dtype=torch.long, device=device)
    _, cache = forward(model, engine.calls, ids, None)
    forward(model, engine.calls, ids, cache)
    chunk_s, _ = seconds(lambda: forward(model, engine.calls, ids, cache), device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        seconds(lambda: forward(model, engine.calls, ids, cache), device)
    kernels = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)[:30]
    return {
        "num_tokens": ids.numel(),
        "chunk_s": chunk_s,
        "tokens_per_s": ids.numel() / chunk_s,
        "kernels": [
            {"name": event.key[:100], "calls": event.count, "ms": round(event.self_device_time_total / 1e3, 3)}
            for event in kernels
        ],
    }


def compare(
    model: Any, tokenizer: Any, engine: Engine, length: int, num_examples: int, batch_size: int, num_new_tokens: int
) -> dict[str, Any]:
    """The same prompts through our engine and lm-eval's model class on the same model in memory, both warm."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    niah = NiahConfig(lengths=(length,), max_new_tokens=num_new_tokens)
    task = needle_tasks(niah, tokenizer)["niah_single_1", length]
    examples = [task[i] for i in range(num_examples)]
    prompts, device = [example.prompt_ids for example in examples], next(model.parameters()).device
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=length + 64 + num_new_tokens
    )

    def ours() -> list[str]:
        found = {}
        for batch, generated in engine.generate(prompts, num_new_tokens):
            found.update(zip(batch, tokenizer.batch_decode(generated, skip_special_tokens=True), strict=True))
        return [found[i] for i in range(len(prompts))]

    def theirs(count: int, num_tokens: int) -> list[str]:
        settings = {"until": [], "max_gen_toks": num_tokens, "do_sample": False}
        requests = [
            Instance(request_type="generate_until", doc={}, arguments=(example.prompt, settings), idx=0)
            for example in examples[:count]
        ]
        return harness.generate_until(requests, disable_tqdm=True)

    ours()
    theirs(batch_size, 2)
    ours_s, our_answers = seconds(ours, device)
    theirs_s, their_answers = seconds(lambda: theirs(num_examples, num_new_tokens), device)
    return {
        "length": length,
        "num_examples": num_examples,
        "batch_size": batch_size,
        "same_prompt_ids": [harness.tok_encode(example.prompt) for example in examples] == prompts,
        "ours_s": ours_s,
        "lm_eval_s": theirs_s,
        "ratio": theirs_s / ours_s,
        "num_equal_answers": sum(a == b for a, b in zip(our_answers, their_answers, strict=True)),
    }


if __name__ == "__main__":
    main()

"""Speed and memory of the needle evaluation, and of Transformers' ``generate`` called as lm-eval calls it.

    python benchmarks/evaluation.py --out benchmarks/results/evaluation.json

The model is randomly initialised, so accuracies mean nothing here. Every length runs under one number of rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from qed.data.corpus import needle_texts
from qed.data.tokenizer import train_tokenizer
from qed.evals.decode import cut, evaluating, stop_tokens
from qed.evals.engine import Engine
from qed.evals.niah import NiahConfig, evaluate, needle_tasks
from qed.model import QEDConfig, QEDForCausalLM
from qed.records import provenance, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--examples", type=int, default=500, help="examples a length")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--slice-length", type=int, default=4096, help="of the comparison with generate; 0 leaves it out"
    )
    parser.add_argument("--slice-examples", type=int, default=32)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = train_tokenizer(needle_texts(500, seed=0))
    torch.manual_seed(0)
    config = QEDConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        num_heads=options.heads,
        head_dim=options.head_dim,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = QEDForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    with evaluating(model):
        engine = Engine(
            model, tokenizer, rows=options.rows, chunk_tokens=options.chunk_tokens, length=max(options.lengths)
        )
    result = {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_examples": options.examples,
        "num_new_tokens": options.new_tokens,
        "engine": engine.describe(),
        "provenance": provenance(seed=0, device=device),
        "lengths": [],
    }
    started = time.perf_counter()
    for length in options.lengths:
        niah = NiahConfig(
            lengths=(length,),
            num_examples=options.examples,
            max_new_tokens=options.new_tokens,
            rows=engine.rows,
            chunk_tokens=options.chunk_tokens,
        )
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            record = evaluate(model, tokenizer, niah, folder)
        row = {"length": length, "wall_s": time.perf_counter() - before, "evaluate_s": record["seconds"]}
        row["num_tokens"] = round(record["scores"][0]["num_tokens"]["mean"] * options.examples)
        row["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
        result["lengths"].append(row)
        print(row, flush=True)
        result["total_wall_s"] = time.perf_counter() - started
        write_json(options.out, result)
    if options.slice_length:
        result["generate"] = compare_with_generate(model, tokenizer, engine, options)
        print(result["generate"], flush=True)
    write_json(options.out, result)


def compare_with_generate(model: QEDForCausalLM, tokenizer, engine: Engine, options: argparse.Namespace) -> dict:
    """The same prompts through our engine and through ``generate``: left padding, a mask, greedy, full batches."""
    niah = NiahConfig(lengths=(options.slice_length,), max_new_tokens=options.new_tokens)
    task = needle_tasks(niah, tokenizer)["niah_single_1", options.slice_length]
    prompts = [task[i].prompt_ids for i in range(options.slice_examples)]
    longest, device = max(map(len, prompts)), next(model.parameters()).device
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    stop_ids = stop_tokens(model, tokenizer)

    def ours() -> list[list[int]]:
        found = {}
        for batch, generated in engine.generate(prompts, options.new_tokens):
            found.update(zip(batch, generated, strict=True))
        return [found[i] for i in range(len(prompts))]

    def generate() -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=options.new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
        return cut(out[:, longest:], stop_ids)

    times, answers = {}, {}
    for name, run in (("ours", ours), ("generate", generate)):
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        answers[name] = run()
        times[name] = time.perf_counter() - before
    same = sum(a == b for a, b in zip(answers["ours"], answers["generate"], strict=True))
    return {
        "length": options.slice_length,
        "num_examples": len(prompts),
        "ours_s": times["ours"],
        "generate_s": times["generate"],
        "ratio": times["generate"] / times["ours"],
        "num_equal_answers": same,
    }


if __name__ == "__main__":
    main()

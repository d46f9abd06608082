"""A checkpoint's needle answers by our runner, at several batch sizes, and by lm-eval's model class: are they the same?

    python benchmarks/agreement.py runs/laptop/qed-seed0 --lengths 256 1024 --fill unit --split eval --out out.json

Both are given the same prompts, in float32. Differing examples are written out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from qed.data.needle import NeedleExample, score
from qed.evals.engine import Engine
from qed.evals.niah import NiahConfig, needle_tasks
from qed.model.load import find_checkpoints, fingerprint, load_model, load_tokenizer
from qed.records import provenance, write_json

BATCH_SIZES = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--examples", type=int, default=50, help="examples a length")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--fill", default="ruler")
    parser.add_argument("--split", default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = NiahConfig(
        lengths=tuple(options.lengths),
        num_examples=options.examples,
        max_new_tokens=options.new_tokens,
        fill=options.fill,
        split=options.split,
        seed=options.seed,
    )
    rows = []
    for checkpoint in find_checkpoints(options.checkpoints):
        tokenizer = load_tokenizer(checkpoint)
        model = load_model(checkpoint, device=options.device, dtype="float32")
        identity = fingerprint(model, tokenizer)
        for (task, length), source in needle_tasks(config, tokenizer).items():
            examples = [source[i] for i in range(options.examples)]
            row = {"checkpoint": checkpoint.name, "identity": identity, "task": task, "length": length}
            rows.append({**row, **agreement(model, tokenizer, examples, length, options.new_tokens)})
            print({key: value for key, value in rows[-1].items() if key != "differing"}, flush=True)
            write_json(options.out, {"rows": rows, "provenance": provenance(seed=options.seed, device=options.device)})


def agreement(
    model: Any, tokenizer: Any, examples: list[NeedleExample], length: int, num_new_tokens: int
) -> dict[str, Any]:
    """How many examples have one string, and one outcome, in every way of running them."""
    answers: dict[str, list[str]] = {}
    for batch_size in BATCH_SIZES:
        engine = Engine(model, tokenizer, rows=batch_size, chunk_tokens=512, length=length)
        found = {}
        for batch, generated in engine.generate([example.prompt_ids for example in examples], num_new_tokens):
            found.update(zip(batch, tokenizer.batch_decode(generated, skip_special_tokens=True), strict=True))
        answers[f"ours, batch {batch_size}"] = [found[i] for i in range(len(examples))]
    settings = {"until": [], "max_gen_toks": num_new_tokens, "do_sample": False}
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(example.prompt, settings), idx=0)
        for example in examples
    ]
    for batch_size in (1, 4):
        # Room for the prompt: lm-eval cuts what is longer, from the left.
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=length + 64)
        answers[f"lm-eval, batch {batch_size}"] = harness.generate_until(requests, disable_tqdm=True)
    same_text, same_outcome, num_correct, differing = 0, 0, 0, []
    for i, example in enumerate(examples):
        texts = {name: given[i] for name, given in answers.items()}
        outcomes = {score(text, example.answer) for text in texts.values()}
        same_text += len(set(texts.values())) == 1
        same_outcome += len(outcomes) == 1
        num_correct += outcomes == {1.0}
        if len(set(texts.values())) > 1:
            differing.append({"index": example.index, "answer": example.answer, **texts})
    return {
        "num_examples": len(examples),
        "ways": list(answers),
        "num_same_text": same_text,
        "num_same_outcome": same_outcome,
        "num_correct_in_all": num_correct,
        "differing": differing,
    }


if __name__ == "__main__":
    main()

"""Needle retrieval (RULER's S-NIAH): greedy answers, every outcome kept, scored as RULER does.

Examples are a pure function of (task, length, index, tokenizer, seed), so every model and every strength sees the same
ones. ``niah.jsonl`` grows by one row an example; ``niah.json`` is written last and means done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from .. import statistics
from ..config import to_dict
from ..data.needle import NeedleExample, NeedleTask, score
from ..model.load import fingerprint
from ..records import provenance, write_json
from .config import NiahConfig
from .decode import evaluating
from .engine import Engine
from .outcomes import Outcomes, finished, run_name, scores

KEY = ("task", "length", "index")
# Settings of speed: they change no outcome, so rows survive a change of them.
SPEED = ("rows", "chunk_tokens")
# Settings that decide an example's outcome; the others decide which examples there are.
LASTING = ("max_new_tokens", "seed", "fill", "split", "longest_word", "essay")

Item = TypeVar("Item")
Made = TypeVar("Made")


def needle_tasks(config: NiahConfig, tokenizer: Any) -> dict[tuple[str, int], NeedleTask]:
    """The examples of every task and length; ``ValueError`` at once for a length that cannot hold its examples."""
    return {
        (task, length): NeedleTask(config.needle(task, length), tokenizer, config.seed)
        for task in config.tasks
        for length in config.lengths
    }


def evaluate(
    model: nn.Module, tokenizer: Any, config: NiahConfig, folder: Path | str, *, progress: bool = True
) -> dict[str, Any]:
    """Evaluate ``model`` (on its own device, in its own dtype) and return the record of ``folder/niah.json``.

    What ``folder`` holds already is not done again: a finished evaluation returns at once, an interrupted one goes on,
    more lengths or examples add to it.

    Raises:
        ValueError: a length too short for its examples; a folder with outcomes of another model or other settings.
    """
    folder = Path(folder)
    tasks = needle_tasks(config, tokenizer)
    settings = {key: value for key, value in to_dict(config).items() if key not in SPEED}
    identity = {**fingerprint(model, tokenizer), "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    lasting = {key: settings[key] for key in LASTING}
    run = run_name(kind="niah", **identity, **lasting)
    done = finished(folder / "niah.json", run=run, config=settings)
    if done is not None:
        return done
    outcomes = Outcomes(folder / "niah.jsonl", run=run, key=KEY)
    device = next(model.parameters()).device
    timings = []
    missing = [
        (source, [i for i in range(config.num_examples) if (*key, i) not in outcomes]) for key, source in tasks.items()
    ]
    started = time.perf_counter()
    with evaluating(model):
        engine = Engine(
            model, tokenizer, rows=config.rows, chunk_tokens=config.chunk_tokens, length=max(config.lengths)
        )
        with Progress(config, outcomes, progress) as bar:
            before = time.perf_counter()
            made = one_ahead(lambda group: [group[0][i] for i in group[1]], missing)
            for (task, length), examples in zip(tasks, made, strict=True):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                answers(engine, tokenizer, config.max_new_tokens, examples, outcomes, bar)
                now = time.perf_counter()
                timings.append(
                    {
                        "task": task,
                        "length": length,
                        "num_examples": len(examples),
                        "num_tokens": sum(example.num_tokens for example in examples),
                        "seconds": round(now - before, 3),
                        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
                    }
                )
                before = now
    order = [(task, length, i) for task, length in tasks for i in range(config.num_examples)]
    rows_in_order = outcomes.finish(order)
    record = {
        "kind": "niah",
        "run": run,
        "config": settings,
        "identity": identity,
        "scores": scores(rows_in_order, ("task", "length")),
        "usable_context": usable(rows_in_order, seed=config.seed),
        "engine": engine.describe(),
        # Of the examples that this process answered; a finished evaluation that was resumed holds its last part.
        "timings": timings,
        "seconds": round(time.perf_counter() - started, 3),
        "provenance": provenance(seed=config.seed, device=str(device)),
    }
    write_json(folder / "niah.json", record)
    return record


def one_ahead(function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """``function`` of each item, in order; the next one is made in the background while this one is used."""
    waiting: Future[Made] | None = None
    with ThreadPoolExecutor(1) as pool:
        for item in items:
            following = pool.submit(function, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()


def answers(
    engine: Engine,
    tokenizer: Any,
    max_new_tokens: int,
    examples: Sequence[NeedleExample],
    outcomes: Outcomes,
    bar: Progress,
    extra: dict[str, Any] | None = None,
) -> None:
    """Generate and score answers; each batch's rows, with ``extra`` columns, are kept as it ends."""
    prompts = [example.prompt_ids for example in examples]
    for batch, generated in engine.generate(prompts, max_new_tokens):
        finished_rows = []
        for example, ids in zip([examples[i] for i in batch], generated, strict=True):
            prediction = tokenizer.decode(ids, skip_special_tokens=True)
            finished_rows.append(
                {
                    "task": example.task,
                    "length": example.length,
                    "index": example.index,
                    **(extra or {}),
                    "num_tokens": example.num_tokens,
                    "depth": example.depth,
                    "key": example.key,
                    "answer": example.answer,
                    "prediction": prediction,
                    "num_generated": len(ids),
                    "correct": bool(score(prediction, example.answer)),
                }
            )
        outcomes.append(finished_rows)
        bar.update(finished_rows)


def usable(rows: Sequence[dict[str, Any]], *, seed: int) -> list[dict[str, Any]]:
    """Usable context of each task at 50 and 80 % (``qed.statistics.usable_context``)."""
    result = []
    for task in dict.fromkeys(row["task"] for row in rows):
        outcomes: dict[int, list[int]] = {}
        for row in rows:
            if row["task"] == task:
                outcomes.setdefault(row["length"], []).append(int(row["correct"]))
        for threshold in (0.5, 0.8):
            context = statistics.usable_context(outcomes, threshold=threshold, seed=seed)
            result.append({"task": task, **context._asdict()})
    return result


class Progress:
    """A bar in prompt tokens, which time is proportional to, that also shows examples and their rate."""

    def __init__(self, config: NiahConfig, outcomes: Outcomes, shown: bool, repeats: int = 1):
        count = len(config.tasks) * config.num_examples * repeats
        self.total_examples = count * len(config.lengths)
        self.examples = len(outcomes.rows)
        tokens = sum(row["length"] for row in outcomes.rows.values())
        total = count * sum(config.lengths)
        self.bar = tqdm(total=total, initial=min(tokens, total), unit="tok", unit_scale=True, disable=not shown)
        self.started, self.new = time.perf_counter(), 0

    def update(self, rows: Sequence[dict[str, Any]]) -> None:
        self.new += len(rows)
        rate = self.new / (time.perf_counter() - self.started)
        self.bar.set_postfix_str(
            f"{rows[-1]['length']} tokens, {self.examples + self.new}/{self.total_examples} examples, {rate:.1f}/s",
            refresh=False,
        )
        self.bar.update(sum(row["length"] for row in rows))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

"""Made-up rows in the fields of FDA, SWDE and SQuAD completion, for trying the recall evaluation without the hub.

    python -m qed.evals.synthetic recall/ --num-rows 100

Their text is Python's own documentation with two sentences of the needle tasks in it, keys and numbers from the
evaluation half of the vocabulary. They show that everything runs and tell models of one small scale apart; their scores
say nothing about the real data sets, and every row's ``source`` says what it is.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.needle import answer_prefix, needle_sentence
from ..data.prose import load_prose
from ..data.vocabulary import load_vocabulary, seeded
from ..records import write_rows
from .recall import TASKS

SOURCE = "synthetic, from Python's documentation"
# Facts of one document, one of which is asked for, and sentences between two of them.
NUM_FACTS, SPACING = 2, (1, 4)

Row = dict[str, Any]


def make_rows(task: str, num_rows: int, seed: int) -> list[Row]:
    """``num_rows`` rows of ``task``, a pure function of the arguments and of the Python version's documentation.

    "fda": prose with the facts in it, then the key and a colon. "swde": the facts together, prose after them, then
    "Summary of information above:" and the key with its colon. "squad_completion": as "fda", with a last sentence to
    complete instead of a key.
    """
    sentences = [
        sentence for text in load_prose() for sentence in re.split(r"(?<=[.!?])\s+", text) if len(sentence.split()) >= 8
    ]
    vocabulary = load_vocabulary("eval")
    rows = []
    for index in range(num_rows):
        generator = seeded("synthetic recall", task, seed, index)
        prose = [" ".join(group) for group in _passage(generator, sentences)]
        facts = [(vocabulary.key(generator), vocabulary.value(generator)) for _ in prose]
        lines = [needle_sentence(*fact) for fact in facts]
        name, value = generator.choice(facts)
        row: Row = {"doc_id": str(index), "source": SOURCE, "value": value}
        if task == "swde":
            text = "\n".join([*lines, *prose, "Summary of information above:"])
        else:
            text = "\n".join(part for pair in zip(prose, lines, strict=True) for part in pair)
        if task == "squad_completion":
            asked = answer_prefix(name)
            row.update(title=f"passage {index}", context=text, question=asked, text=f"{text}\n{asked}")
        else:
            key = needle_sentence(name, value).removesuffix(f": {value}.")
            row.update(file_name=f"{index}.txt", key=key, text=f"{text}\n{key}:")
        rows.append(row)
    return rows


def _passage(generator: random.Random, sentences: Sequence[str]) -> list[list[str]]:
    """Consecutive sentences in ``NUM_FACTS`` groups."""
    counts = [generator.randint(*SPACING) for _ in range(NUM_FACTS)]
    start = generator.randrange(len(sentences) - sum(counts))
    groups = []
    for count in counts:
        groups.append(list(sentences[start : start + count]))
        start += count
    return groups


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one file a task."""
    parser = argparse.ArgumentParser(prog="python -m qed.evals.synthetic", description="Made-up recall rows.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-rows", type=int, default=100, help="rows a task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for task in TASKS:
        write_rows(options.folder / f"{task}.jsonl", make_rows(task, options.num_rows, options.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

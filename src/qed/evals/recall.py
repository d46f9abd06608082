"""FDA, SWDE and SQuAD completion: does the answer that a document holds come back when it is asked for?

Rows come from local JSONL in the data sets' own fields, or through lm-eval's tasks (version 1 or later; version 0 left
white space at the end of prompts, which alone makes the three scores collapse). Two protocols are in use and never
comparable; every result names its own:

- "whole": the whole document as lm-eval gives it, stripped, nothing cut.
- "window": a window of the document centred on the gold answer, then the question; rows whose answer has one character
  or none are dropped. It uses the label, as published tables for linear-attention models do.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from tqdm.auto import tqdm

from ..config import nearest, to_dict
from ..model.load import fingerprint
from ..records import provenance, write_json
from .decode import evaluating
from .engine import Engine
from .outcomes import Outcomes, finished, run_name, scores

TASKS = ("fda", "swde", "squad_completion")
PROTOCOLS = ("whole", "window")
FIELDS = {"fda": ("text", "value", "key"), "swde": ("text", "value", "key"), "squad_completion": ("text", "value")}
HARNESS = {
    "fda": ("lm_eval.tasks.fda.task", "FDA"),
    "swde": ("lm_eval.tasks.swde.task", "SWDE"),
    "squad_completion": ("lm_eval.tasks.squad_completion.task", "SQUADCompletion"),
}
KEY = ("task", "protocol", "index")
SPEED = ("rows", "chunk_tokens")
# Version of the prompts made here: lm-eval's numbering, in which 1 strips prompt and answer.
TASK_VERSION = 1
ANSWER_TOKENS = 50
STOP = "\n"

Row = dict[str, Any]


@dataclass(frozen=True)
class RecallConfig:
    """``tasks``: any of "fda", "swde", "squad_completion".

    ``protocols``: "whole", "window" or both. ``context_tokens``: of the "window" protocol, of which 50 are left for
    the answer. ``max_length``: of the "whole" protocol, the longest prompt and answer together; a longer prompt loses
    its beginning, as under lm-eval (``None``: nothing is cut). ``num_examples``: the first so many rows (``None``:
    all). ``max_new_tokens``: generated, up to the first line end. ``rows`` and ``chunk_tokens`` as in ``NiahConfig``.
    """

    tasks: tuple[str, ...] = TASKS
    protocols: tuple[Literal["whole", "window"], ...] = PROTOCOLS  # type: ignore[assignment]
    context_tokens: int = 2000
    max_length: int | None = None
    num_examples: int | None = None
    max_new_tokens: int = 48
    rows: int | None = None
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        for what, given, allowed in (("task", self.tasks, TASKS), ("protocol", self.protocols, PROTOCOLS)):
            for name in given:
                if name not in allowed:
                    raise ValueError(nearest(f"recall {what}", name, allowed))
        if self.context_tokens <= ANSWER_TOKENS:
            raise ValueError(
                f"context_tokens must be above the {ANSWER_TOKENS} of the answer; got {self.context_tokens}"
            )
        if self.max_length is not None and self.max_length <= self.max_new_tokens:
            raise ValueError(
                f"max_length {self.max_length} leaves no prompt beside {self.max_new_tokens} new tokens; give more"
            )


def read_local(folder: Path | str, tasks: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of ``folder/<task>.jsonl``, in the data sets' fields (text, value, and key for FDA and SWDE).

    Raises:
        ValueError: a missing file or field; the message names it.
    """
    result = {}
    for task in tasks:
        path = Path(folder) / f"{task}.jsonl"
        if not path.is_file():
            raise ValueError(f"recall task {task} needs {path}; it is not there")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for number, row in enumerate(rows, start=1):
            missing = [name for name in FIELDS[task] if not isinstance(row.get(name), str)]
            if missing:
                raise ValueError(f"{path}, row {number}: needs text in {', '.join(missing)}; got {', '.join(row)}")
        if not rows:
            raise ValueError(f"{path} holds no rows")
        result[task] = rows
    return result


def read_harness(tasks: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of lm-eval's tasks, which it fetches from the Hugging Face hub.

    Raises:
        ValueError: lm-eval is missing, its task is older than version 1, or the data cannot be fetched.
    """
    try:
        classes = {name: getattr(importlib.import_module(module), cls) for name, (module, cls) in HARNESS.items()}
    except ImportError as error:
        raise ValueError(
            f"recall tasks without local files need lm-eval ({error}): pip install 'qed-attention[eval]', "
            "or give a folder with " + ", ".join(f"{task}.jsonl" for task in tasks)
        ) from None
    result = {}
    for name in tasks:
        if int(classes[name].VERSION) < TASK_VERSION:
            raise ValueError(
                f"lm-eval's {name} has version {classes[name].VERSION}, which does not strip its prompts; 0.4.13 does"
            )
        try:
            rows = classes[name]().validation_docs()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"cannot fetch the data of {name} ({error}); give a folder with {name}.jsonl") from error
        result[name] = [dict(row) for row in rows]
    return result


def prompt(task: str, protocol: str, row: Row, tokenizer: Any, config: RecallConfig) -> list[int]:
    """Token ids of the prompt, with the special tokens that the tokenizer itself puts in front."""
    if protocol == "whole":
        ids = encode(tokenizer, row["text"].strip())
        if config.max_length is not None:
            ids = ids[-(config.max_length - config.max_new_tokens) :]
        return ids
    document, question = split_question(task, row)
    names = ("value",) if task == "squad_completion" else ("key", "value")
    window = centred_window(tokenizer, document, [row[name] for name in names], config.context_tokens - ANSWER_TOKENS)
    return encode(tokenizer, f"{window} {question}".strip())


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids as the tokenizer gives them, without an end-of-text token that some append."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def split_question(task: str, row: Row) -> tuple[str, str]:
    """The document without its question, and the question, of the "window" protocol.

    FDA and SWDE: trailing repeats of "key:" go, SWDE also loses everything from its "Summary of information above";
    the document ends with a full stop and the question is the key, its first letter upper case, and a colon. SQuAD:
    the text's last sentence, which is the one to complete (field ``question`` where it is that).
    """
    text = row["text"].strip()
    if task == "squad_completion":
        question = str(row.get("question") or "").strip()
        if not question or not text.endswith(question):
            question = re.split(r"\n+|(?<=[.!?])\s+", text)[-1]
        return text[: len(text) - len(question)].rstrip(), question
    key = row["key"].strip()
    if task == "swde":
        text = text.split("Summary of information above", 1)[0]
    text = re.sub(rf"(?:\s*{re.escape(key)}\s*:)+\s*$", "", text, flags=re.IGNORECASE).strip().rstrip(".")
    return f"{text}.", f"{key[:1].upper()}{key[1:]}:"


def centred_window(tokenizer: Any, document: str, wanted: Sequence[str], size: int) -> str:
    """At most ``size`` tokens of ``document``: half before the earliest of ``wanted`` (case ignored), the rest after.

    A document that fits is returned whole; without a match the window is its beginning.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("the window protocol needs a fast tokenizer, which tells where in the text each token stands")
    offsets = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    if len(offsets) <= size:
        return document
    found = [document.lower().find(text.strip().lower()) for text in wanted if text.strip()]
    position = min((place for place in found if place >= 0), default=0)
    at = next(i for i, (_, end) in enumerate(offsets) if end > position)
    start = min(max(0, at - size // 2), len(offsets) - size)
    return document[offsets[start][0] : offsets[start + size - 1][1]]


def contains(prediction: str, value: str) -> bool:
    """Whether the stripped answer stands in the prediction up to its first line end, case ignored."""
    return value.strip().lower() in prediction.split(STOP, 1)[0].lower()


def kept(protocol: str, rows: Iterable[Row], limit: int | None) -> list[int]:
    """Indices of the rows that the protocol asks."""
    indices = [i for i, row in enumerate(rows) if protocol == "whole" or len(row["value"].strip()) > 1]
    return indices[:limit]


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    data: dict[str, list[Row]],
    config: RecallConfig,
    folder: Path | str,
    *,
    source: str,
    progress: bool = True,
) -> dict[str, Any]:
    """Ask every row of ``data`` (from :func:`read_local` or :func:`read_harness`, named by ``source``).

    Returns the record of ``folder/recall.json``; one row a question in ``recall.jsonl``. Resumes and skips as the
    needle evaluation does.
    """
    folder = Path(folder)
    settings = {key: value for key, value in to_dict(config).items() if key not in SPEED}
    content = {
        task: run_name(rows=[[row[name] for name in FIELDS[task]] for row in data[task]]) for task in config.tasks
    }
    identity = {**fingerprint(model, tokenizer), "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    settings = {key: value for key, value in to_dict(config).items() if key not in SPEED} | {"data": content}
    lasting = {key: settings[key] for key in ("context_tokens", "max_length", "max_new_tokens")}
    run = run_name(kind="recall", version=TASK_VERSION, **identity, **lasting)
    done = finished(folder / "recall.json", run=run, config=settings)
    if done is not None:
        return done
    outcomes = Outcomes(folder / "recall.jsonl", run=run, key=KEY)
    for row in outcomes.rows.values():
        if row["data"] != content.get(row["task"], row["data"]):
            raise ValueError(f"{outcomes.path} holds answers to other rows of {row['task']}; give another folder")
    order = [
        (task, protocol, index)
        for task in config.tasks
        for protocol in config.protocols
        for index in kept(protocol, data[task], config.num_examples)
    ]
    started = time.perf_counter()
    missing = [key for key in order if key not in outcomes]
    prompts = [prompt(task, protocol, data[task][i], tokenizer, config) for task, protocol, i in missing]
    with evaluating(model), tqdm(total=len(order), initial=len(order) - len(missing), disable=not progress) as bar:
        longest = max(map(len, prompts), default=1)
        engine = Engine(model, tokenizer, rows=config.rows, chunk_tokens=config.chunk_tokens, length=longest)
        for batch, generated in engine.generate(prompts, config.max_new_tokens):
            outcomes.append(
                {
                    **_outcome(missing[i], data[missing[i][0]][missing[i][2]], prompts[i], ids, tokenizer),
                    "data": content[missing[i][0]],
                }
                for i, ids in zip(batch, generated, strict=True)
            )
            bar.update(len(batch))
    record = {
        "kind": "recall",
        "run": run,
        "task_version": TASK_VERSION,
        "source": source,
        "config": settings,
        "identity": identity,
        "stop": STOP,
        "scores": summarise(outcomes.finish(order), {task: len(data[task]) for task in config.tasks}),
        "engine": engine.describe(),
        "seconds": round(time.perf_counter() - started, 3),
        "provenance": provenance(device=str(next(model.parameters()).device)),
    }
    write_json(folder / "recall.json", record)
    return record


def _outcome(key: tuple[str, str, int], row: Row, ids: list[int], generated: list[int], tokenizer: Any) -> Row:
    prediction = tokenizer.decode(generated, skip_special_tokens=True)
    value = row["value"].strip()
    return {
        "task": key[0],
        "protocol": key[1],
        "index": key[2],
        "num_tokens": len(ids),
        # Whether a window or a cut prompt still holds what is asked for.
        "answer_in_prompt": value.lower() in tokenizer.decode(ids, skip_special_tokens=True).lower(),
        "answer": value,
        "prediction": prediction.split(STOP, 1)[0],
        "correct": contains(prediction, value),
    }


def summarise(rows: Sequence[Row], num_rows: dict[str, int]) -> list[Row]:
    """Scores of each task and protocol that was run, with the rows that a protocol dropped and the answers it cut."""
    uncut = Counter((row["task"], row["protocol"]) for row in rows if row["answer_in_prompt"])
    return [
        {
            **score,
            "num_rows": num_rows[score["task"]],
            "num_answer_in_prompt": uncut[score["task"], score["protocol"]],
        }
        for score in scores(rows, ("task", "protocol"))
    ]

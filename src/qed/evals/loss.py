"""Validation loss in nats a token, in all and by position in the window."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..config import nearest, to_dict
from ..model.load import fingerprint
from ..records import provenance, write_json
from .decode import CACHE_NAMES, Calls, evaluating, measure_calls
from .outcomes import Outcomes, finished, run_name

KEY = ("window",)
IGNORED = -100
# Logits made at once: 256 MB in float32 on a CPU, 1 GB on a GPU.
CPU_LOGITS, GPU_LOGITS = 1 << 26, 1 << 28


@dataclass(frozen=True)
class LossConfig:
    """Which windows are read.

    ``length``: most tokens of a window, each read from an empty state; ``windows``: "packed" cuts the documents'
    concatenation (an end-of-text token after each) into full windows, as training rows are made, "documents" cuts each
    document by itself; ``num_tokens``: most tokens taken from the texts (``None``: all); ``chunk_tokens``: tokens of
    each window in one forward pass, so that logits of a whole window are never held.
    """

    length: int = 2048
    windows: Literal["packed", "documents"] = "packed"
    num_tokens: int | None = None
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        if self.windows not in ("packed", "documents"):
            raise ValueError(nearest("windows", self.windows, ("packed", "documents")))
        if self.length < 2 or self.chunk_tokens < 1 or (self.num_tokens is not None and self.num_tokens < 2):
            raise ValueError(f"length and num_tokens must be at least 2 and chunk_tokens 1; got {self}")

    @property
    def edges(self) -> list[int]:
        """Bucket i holds the targets with ``edges[i] <= tokens before them < edges[i + 1]``: 1, 64, 128, 256, ..."""
        edges = [1]
        while 32 << len(edges) < self.length:
            edges.append(32 << len(edges))
        return [*edges, self.length]


def make_windows(texts: Iterable[str], tokenizer: Any, config: LossConfig) -> list[list[int]]:
    """Token windows of ``texts``; one of a single token, which holds no target, is left out."""
    ending = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    documents, total = [], 0
    for text in texts:
        room = None if config.num_tokens is None else config.num_tokens - total
        ids = [*tokenizer(text, verbose=False)["input_ids"], *ending][:room]
        documents.append(ids)
        total += len(ids)
        if config.num_tokens is not None and total >= config.num_tokens:
            break
    n = config.length
    if config.windows == "packed":
        stream = [token for document in documents for token in document]
        windows = [stream[i : i + n] for i in range(0, len(stream) - n + 1, n)]
    else:
        windows = [d[i : i + n] for d in documents for i in range(0, len(d), n) if len(d) - i > 1]
    if not windows:
        raise ValueError(f"the texts hold {total} tokens, no window of {n} ({config.windows})")
    return windows


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[str],
    config: LossConfig,
    folder: Path | str,
    *,
    source: str,
    progress: bool = True,
) -> dict[str, Any]:
    """Loss over ``texts`` (from ``source``, a name for the record); returns the record of ``folder/loss.json``.

    ``loss.jsonl`` holds one row a window. Every token counts the same, whatever window it is in. Resumes and skips as
    the needle evaluation does.
    """
    folder = Path(folder)
    windows = make_windows(texts, tokenizer, config)
    content = hashlib.sha256(repr(windows).encode()).hexdigest()[:12]
    settings = {key: value for key, value in to_dict(config).items() if key != "chunk_tokens"}
    identity = {**fingerprint(model, tokenizer), "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    run = run_name(kind="loss", content=content, **identity, **settings)
    done = finished(folder / "loss.json", run=run, config=settings)
    if done is not None:
        return done
    outcomes = Outcomes(folder / "loss.jsonl", run=run, key=KEY)
    edges, started = config.edges, time.perf_counter()
    device = next(model.parameters()).device
    with evaluating(model):
        calls = measure_calls(model)
        missing = [i for i in range(len(windows)) if (i,) not in outcomes]
        # Right padding: no causal model reads it before the tokens that count.
        missing.sort(key=lambda i: (len(windows[i]), i))
        rows = _rows(model, calls, config, device)
        bar = tqdm(total=sum(map(len, windows)), unit="tok", unit_scale=True, disable=not progress)
        with bar:
            bar.update(sum(map(len, windows)) - sum(len(windows[i]) for i in missing))
            for start in range(0, len(missing), rows):
                chosen = missing[start : start + rows]
                nats, counts = bucket_nats(model, calls, [windows[i] for i in chosen], edges, config.chunk_tokens)
                outcomes.append(
                    {"window": i, "num_tokens": len(windows[i]), "nats": n, "counts": c}
                    for i, n, c in zip(chosen, nats.tolist(), counts.tolist(), strict=True)
                )
                bar.update(sum(len(windows[i]) for i in chosen))
    record = {
        "kind": "loss",
        "run": run,
        "config": settings,
        "identity": identity,
        "source": source,
        "content": content,
        **summarise(outcomes.finish((i,) for i in range(len(windows))), edges),
        "seconds": round(time.perf_counter() - started, 3),
        "provenance": provenance(device=str(device)),
    }
    write_json(folder / "loss.json", record)
    return record


def summarise(rows: Sequence[dict[str, Any]], edges: Sequence[int]) -> dict[str, Any]:
    """Token-weighted loss in all and by bucket; a bucket without targets has no loss."""
    nats = [sum(values) for values in zip(*(row["nats"] for row in rows), strict=True)]
    counts = [sum(values) for values in zip(*(row["counts"] for row in rows), strict=True)]
    buckets = [
        {"start": start, "end": end, "num_targets": count, "loss": total / count if count else None}
        for start, end, total, count in zip(edges, edges[1:], nats, counts, strict=False)
    ]
    return {"loss": sum(nats) / sum(counts), "num_targets": sum(counts), "num_windows": len(rows), "buckets": buckets}


@torch.inference_mode()
def bucket_nats(
    model: nn.Module, calls: Calls, windows: Sequence[Sequence[int]], edges: Sequence[int], chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Sums of ``-log p(target)`` and numbers of targets ``[windows, buckets]``, float64 and int64."""
    device = next(model.parameters()).device
    longest = max(map(len, windows))
    ids = torch.tensor([[*window, *[0] * (longest - len(window))] for window in windows], device=device)
    targets = torch.tensor(
        [[*window[1:], *[IGNORED] * (longest - len(window) + 1)] for window in windows], device=device
    )
    inner = torch.tensor(edges[1:-1], device=device)
    bucket = torch.bucketize(torch.arange(1, longest + 1, device=device), inner, right=True)
    nats = torch.zeros(len(windows), len(edges) - 1, dtype=torch.float64, device=device)
    counts = torch.zeros_like(nats, dtype=torch.long)
    chunk = chunk_tokens if calls.cache is not None and calls.chunks else longest
    cache: Any = None
    for start in range(0, longest, chunk):
        part = slice(start, min(start + chunk, longest))
        arguments = {} if cache is None else {str(calls.cache): cache}
        out = model(input_ids=ids[:, part], use_cache=chunk < longest, **arguments)
        if chunk < longest:
            cache = next(c for c in (getattr(out, name, None) for name in CACHE_NAMES) if c is not None)
        wanted = targets[:, part]
        losses = F.cross_entropy(
            out.logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(wanted)
        index = bucket[None, part].expand_as(losses)
        nats.scatter_add_(1, index, losses.double())
        counts.scatter_add_(1, index, (wanted != IGNORED).long())
    return nats.cpu(), counts.cpu()


def _rows(model: Any, calls: Calls, config: LossConfig, device: torch.device) -> int:
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    chunk = min(config.chunk_tokens, config.length) if calls.chunks else config.length
    return max(1, (GPU_LOGITS if device.type == "cuda" else CPU_LOGITS) // (chunk * vocabulary))

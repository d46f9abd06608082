"""Checkpoints by path or hub name: where they are, where their results go, and how they are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from qed.config import nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Checkpoint:
    """``model``: what Transformers loads; ``folder``: where outcomes and records of it go; ``name``: for tables."""

    model: str
    folder: Path
    name: str


def find_checkpoints(given: Sequence[str], out: Path | str | None = None) -> list[Checkpoint]:
    """Run folders (with a checkpoint/ inside), checkpoint folders and hub names, in the given order.

    Without ``out`` results go to the run folder, or to evals/<name> for a checkpoint outside of one; with it, to
    <out>/<name>.

    Raises:
        ValueError: a path that is not there or holds no checkpoint, or two checkpoints of one name.
    """
    found = [_find(item, None if out is None else Path(out)) for item in given]
    if not found:
        raise ValueError("no checkpoint given; wanted run folders, checkpoint folders or names on the hub")
    for i, checkpoint in enumerate(found):
        for other in found[:i]:
            if other.folder == checkpoint.folder:
                raise ValueError(f"{other.model} and {checkpoint.model} would both write to {checkpoint.folder}")
    return found


def _find(given: str, out: Path | None) -> Checkpoint:
    path = Path(given)
    if path.is_dir():
        inner = path / "checkpoint"
        if (inner / "config.json").is_file():
            name = path.resolve().name
            return Checkpoint(str(inner), path if out is None else out / name, name)
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no checkpoint: wanted config.json in it or in {inner}")
        if path.resolve().name == "checkpoint":
            name = path.resolve().parent.name
            return Checkpoint(given, path.parent if out is None else out / name, name)
        name = path.resolve().name
        return Checkpoint(given, (out or Path("evals")) / name, name)
    if given.count("/") > 1 or given.startswith((".", "/", "~")) or path.parent.is_dir():
        beside = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest("folder", path.name, beside) if beside else "the folder above it is not there either"
        raise ValueError(f"no checkpoint at {path}: {hint}")
    name = given.replace("/", "--")
    return Checkpoint(given, (out or Path("evals")) / name, name)


def choose_device(device: str | None) -> str:
    """``device``, or CUDA where there is one."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer saved beside the model; no code from a checkpoint is run."""
    return AutoTokenizer.from_pretrained(checkpoint.model, trust_remote_code=False)


def load_model(checkpoint: Checkpoint, *, device: str | None = None, dtype: str | None = None) -> Any:
    """A causal language model, from safetensors only, in evaluation mode.

    ``dtype``: "float32", "bfloat16" or "float64"; by default bfloat16 on CUDA, float32 elsewhere.
    """
    device = choose_device(device)
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if dtype not in DTYPES:
        raise ValueError(nearest("dtype", dtype, DTYPES))
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.model, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False
    )
    return model.to(device).eval()


def fingerprint(model: nn.Module, tokenizer: Any) -> dict[str, str]:
    """Twelve hex digits each for the weights and the tokenizer: outcomes belong to exactly these."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return {"weights": digest.hexdigest()[:12], "tokenizer": hashlib.sha256(text.encode()).hexdigest()[:12]}

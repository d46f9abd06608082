"""Text to token shards: streamed, tokenised on every core, resumable at each shard."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import to_dict
from ..records import provenance, read_json, write_json
from .shards import MANIFEST, SPLITS, check_shard
from .sources import find_files, hub_texts, read_texts
from .tokenizer import MISTRAL_V1, load_tokenizer, tokenizer_hash

PROGRESS = "progress.json"
# documents tokenised at once; changes nothing in the result
_BATCH = 512


@dataclass(frozen=True)
class PrepareConfig:
    """What is tokenised, how, and into what."""

    source: str = "HuggingFaceFW/fineweb-edu"
    """A local .txt, .jsonl or .parquet file, a folder of them, or a hub data set ("owner/name")."""
    sample: str | None = None
    """The hub data set's configuration, as "sample-100BT"; ``None`` for its default."""
    revision: str | None = None
    """The hub data set's branch, tag or commit."""
    text_field: str = "text"
    """The field that holds a document's text in .jsonl, .parquet and hub rows."""
    tokenizer: str = "meta-llama/Llama-2-7b-hf"
    """Hub id or folder; "mistral-v1" is 32,000 tokens from the package mistral-common, for want of the hub."""
    num_tokens: int | None = None
    """Stop after the document that brings the training split to this many tokens; ``None`` takes the whole source."""
    validation_share: float = 0.0005
    """Share of documents, by the hash of their text, that are held out."""
    shard_tokens: int = 2**26
    """A shard ends after the document that brings it to this many tokens; what an interruption can cost."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must be a share from 0 to below 1; got {self.validation_share}")
        for name in ("num_tokens", "shard_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


def prepare(config: PrepareConfig, folder: Path | str, *, progress: bool = True) -> dict[str, Any]:
    """Write the token shards of ``config`` to ``folder`` and return the manifest, which is written last.

    Every document is one BOS (EOS for a tokenizer without BOS) and its tokens. A finished folder is left as it is; an
    interrupted one goes on after its last whole shard, and ends with the same bytes as without the interruption.

    Raises ``ValueError`` for a folder made with another config, tokenizer or source, a source or tokenizer that can't
    be read, a damaged shard and a full disk known beforehand.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        manifest = read_json(folder / MANIFEST)
        _check_same(manifest["config"], to_dict(config), folder)
        return manifest
    source = _describe(config)
    tokenizer = load_tokenizer(config.tokenizer)
    identity = {"config": to_dict(config), "source": source, "tokenizer": _identify(tokenizer, config.tokenizer)}
    writer = _Writer(folder, identity, "<u2" if len(tokenizer) <= 1 << 16 else "<u4", config)
    separator = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if separator is None:
        raise ValueError(f"documents begin with a BOS or EOS token; the tokenizer {config.tokenizer!r} has neither")
    texts = _texts(config, source, writer.num_read)
    with _bar(config, writer.counts["train"]["num_tokens"], progress) as bar:
        for text, ids in _tokenise(texts, tokenizer):
            if writer.full:
                break
            bar.update(writer.add(text, np.array([separator, *ids], dtype=writer.dtype) if ids else None))
    return writer.finish({**identity, "dtype": writer.dtype, "separator": separator})


class _Writer:
    """Collects documents by split and commits both splits' shards together, with how far the source has been read."""

    def __init__(self, folder: Path, identity: dict[str, Any], dtype: str, config: PrepareConfig) -> None:
        self.folder, self.identity, self.dtype, self.config = folder, identity, dtype, config
        self.num_read = 0
        self.counts: dict[str, Any] = {split: {"num_tokens": 0, "num_documents": 0, "shards": []} for split in SPLITS}
        self._parts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        self._waiting = 0
        if (folder / PROGRESS).exists():
            self._resume(read_json(folder / PROGRESS))
        self._check_space()

    @property
    def full(self) -> bool:
        return self.config.num_tokens is not None and self.counts["train"]["num_tokens"] >= self.config.num_tokens

    def add(self, text: str, tokens: np.ndarray | None) -> int:
        """Take one document (``None``: an empty one, passed over) and return the training tokens it brought."""
        self.num_read += 1
        if tokens is None:
            return 0
        split = "validation" if held_out(text, self.config.validation_share) else "train"
        self._parts[split].append(tokens)
        self.counts[split]["num_tokens"] += len(tokens)
        self.counts[split]["num_documents"] += 1
        if split == "validation":
            return 0
        self._waiting += len(tokens)
        if self._waiting >= self.config.shard_tokens:
            self._commit()
        return len(tokens)

    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._commit()
        if not self.counts["train"]["num_tokens"]:
            raise ValueError(f"{self.config.source} gave no training tokens")
        manifest = {"format": 1, **manifest, "num_read": self.num_read, "splits": self.counts, "made": provenance()}
        write_json(self.folder / MANIFEST, manifest)
        (self.folder / PROGRESS).unlink()
        return manifest

    def _commit(self) -> None:
        for split in SPLITS:
            if self._parts[split]:
                shards = self.counts[split]["shards"]
                shards.append(self._write(f"{split}-{len(shards):05d}.bin", self._parts[split]))
                self._parts[split] = []
        self._waiting = 0
        write_json(self.folder / PROGRESS, {**self.identity, "num_read": self.num_read, "splits": self.counts})

    def _write(self, name: str, parts: list[np.ndarray]) -> dict[str, Any]:
        data = np.concatenate(parts)
        path = self.folder / name
        beside = path.with_name(f".{name}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(beside, "wb") as file:
                file.write(data.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise OSError(
                error.errno, f"can't write {path} ({error.strerror}); earlier shards are whole, run again to go on"
            ) from error
        digest = hashlib.sha256(data.data).hexdigest()
        return {"file": name, "num_tokens": len(data), "num_documents": len(parts), "sha256": digest}

    def _resume(self, saved: dict[str, Any]) -> None:
        for part in self.identity:
            _check_same(saved[part], self.identity[part], self.folder)
        self.num_read, self.counts = saved["num_read"], saved["splits"]
        for split in SPLITS:
            for shard in self.counts[split]["shards"]:
                check_shard(self.folder, shard, self.dtype, contents=True)

    def _check_space(self) -> None:
        if self.config.num_tokens is None:
            return
        missing = self.config.num_tokens - self.counts["train"]["num_tokens"]
        needed = int(missing * np.dtype(self.dtype).itemsize * (1 + self.config.validation_share))
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(f"{self.folder} needs {needed / 1e9:.1f} GB more for shards; {free / 1e9:.1f} GB are free")


def held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split: a fixed property of its text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < share * 2**64


def _describe(config: PrepareConfig) -> dict[str, Any]:
    """Where the text comes from, closely enough to notice that it has changed."""
    path = Path(config.source)
    if path.exists() or path.is_absolute() or config.source.startswith(".") or config.source.count("/") != 1:
        files = find_files(path)
        return {"kind": "files", "files": [{"name": str(file), "bytes": file.stat().st_size} for file in files]}
    return {"kind": "hub", "dataset": config.source, "sample": config.sample, "revision": config.revision}


def _identify(tokenizer: Any, name: str) -> dict[str, Any]:
    stands_in_for = "meta-llama/Llama-2-7b-hf" if name == MISTRAL_V1 else None
    facts = {"name": name, "sha256": tokenizer_hash(tokenizer), "vocab_size": len(tokenizer)}
    return {**facts, "stands_in_for": stands_in_for}


def _texts(config: PrepareConfig, source: dict[str, Any], skip: int) -> Iterator[str]:
    if source["kind"] == "files":
        return itertools.islice(read_texts(config.source, text_field=config.text_field), skip, None)
    return hub_texts(
        config.source, sample=config.sample, revision=config.revision, text_field=config.text_field, skip=skip
    )


def _tokenise(texts: Iterator[str], tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Pairs of text and ids; the library tokenises a batch on all cores while a thread reads the next one."""
    import tokenizers

    # a copy, in which "<s>" inside a text is text and not a BOS
    inner = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True

    def read() -> list[str]:
        return list(itertools.islice(texts, _BATCH))

    with ThreadPoolExecutor(max_workers=1) as reader:
        batch = read()
        while batch:
            following = reader.submit(read)
            encoded = inner.encode_batch_fast(batch, add_special_tokens=False)
            yield from zip(batch, (one.ids for one in encoded), strict=True)
            batch = following.result()


def _bar(config: PrepareConfig, done: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=config.num_tokens, initial=done, unit="tok", unit_scale=True, desc="tokenising", disable=not shown
    )


def _check_same(saved: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    for key in asked:
        if saved.get(key) != asked[key]:
            raise ValueError(
                f"{folder} was begun with {key} = {saved.get(key)!r}, now it is {asked[key]!r}; use another folder"
            )

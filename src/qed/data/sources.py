"""Texts from where the user has them: local .txt, .jsonl and .parquet files, or a data set of the Hugging Face hub.

Files are read, never executed or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import nearest

SUFFIXES = (".txt", ".jsonl", ".parquet")


def find_files(path: Path | str) -> list[Path]:
    """The text files that ``path`` names: itself, or, of a folder, all below it in the order of their names.

    Raises ``ValueError`` for a path that does not exist, a file of another kind and a folder without any.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not found:
            raise ValueError(f"the folder {path} holds no {', '.join(SUFFIXES)} file")
        return found
    if not path.exists():
        raise ValueError(f"no such file or folder: {path}")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} must be a {', '.join(SUFFIXES)} file or a folder that holds some")
    return [path]


def read_texts(path: Path | str, *, text_field: str = "text") -> Iterator[str]:
    """The documents below ``path``, in an order that depends on the names alone; blank ones are left out.

    A .txt file is one document; .jsonl and .parquet hold one a row, in the field ``text_field``. Wrong paths are
    refused at the call, wrong contents (``ValueError`` that names the file and line) where they are reached.
    """
    files = find_files(path)
    return (text for file in files for text in _read_file(file, text_field) if text.strip())


def hub_texts(
    dataset: str, *, sample: str | None = None, revision: str | None = None, text_field: str = "text", skip: int = 0
) -> Iterator[str]:
    """The documents of the "train" split of a hub data set, streamed; the first ``skip`` rows are passed over.

    ``sample`` is the data set's configuration ("sample-10BT"), ``revision`` a branch, tag or commit. Unlike
    ``read_texts`` it keeps blank documents, so that rows can be counted.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("streaming from the hub needs datasets: pip install 'qed-attention[data]'") from None
    try:
        stream = load_dataset(dataset, name=sample, split="train", streaming=True, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"can't open the hub data set {dataset!r} (sample {sample!r}): {error}") from error
    if skip:
        stream = stream.skip(skip)
    for row in stream:
        yield _field(row, text_field, f"data set {dataset}")


def _read_file(file: Path, text_field: str) -> Iterator[str]:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        yield from _read_parquet(file, text_field)
        return
    try:
        if suffix == ".txt":
            yield file.read_text(encoding="utf-8-sig")
            return
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _field(_parse(line, f"{file}, line {number}"), text_field, f"{file}, line {number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} (byte {error.start} of what was read)") from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def _field(row: Any, name: str, where: str) -> str:
    """The text of a row; null is an empty document."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be a JSON object with a field {name!r}; got {type(row).__name__}")
    if name not in row:
        raise ValueError(f"{where}: {nearest('text field', name, row)}")
    if row[name] is None:
        return ""
    if not isinstance(row[name], str):
        raise ValueError(f"{where}: field {name!r} must be text; got {type(row[name]).__name__}")
    # JSON can spell half a surrogate pair, which is no text in UTF-8
    return row[name].encode("utf-8", "replace").decode()


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"reading {file} needs pyarrow: pip install 'qed-attention[data]'") from None
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise ValueError(f"{file}: {nearest('text field', text_field, names)}")
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    yield _field({text_field: text}, text_field, str(file))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} can't be read as parquet: {error}") from error

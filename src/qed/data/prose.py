"""English prose that every Python installation carries: the language reference behind ``help()``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable


def load_prose() -> list[str]:
    """Cleaned documents, one a topic of ``pydoc_data.topics``, one paragraph a line: about 200,000 characters.

    The topics differ between Python versions; ``text_hash`` of the result says which text a run has seen.
    """
    from pydoc_data.topics import topics

    documents = ("\n".join(_paragraphs(topics[name])) for name in sorted(topics))
    return [document for document in documents if document]


def text_hash(texts: Iterable[str]) -> str:
    """SHA-256 of the texts in their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _paragraphs(text: str) -> list[str]:
    kept = []
    for block in re.split(r"\n\s*\n", text):
        # code, grammar and tables are indented
        if re.match(r" {3,}\S", block):
            continue
        line = " ".join(re.sub(r"^(\* +|\d+\. +)", "", block.strip()).split())
        line = re.sub(r"[*`]{1,2}(?=\S)([^*`]*\S)[*`]{1,2}", r"\1", line)
        line = re.sub(r'"([^"]{1,80})"', r"\1", line)
        letters = sum(character.isalpha() or character == " " for character in line)
        if len(line.split()) >= 8 and line[-1] in ".:?!)" and letters >= 0.92 * len(line):
            kept.append(line)
    return kept

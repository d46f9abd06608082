"""Keys and values of the needle tasks, divided so that training never shows what evaluation asks for."""

from __future__ import annotations

import hashlib
import random
import uuid
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Split = Literal["all", "train", "eval"]
ValueKind = Literal["number", "uuid"]


def in_training(text: str) -> bool:
    """Whether a word or value belongs to the training half; by SHA-256, so nothing visible in it tells the half."""
    return bool(hashlib.sha256(text.encode()).digest()[0] & 1)


def seeded(*parts: object) -> random.Random:
    """A generator of its own for exactly these parts (of which ``repr`` must be stable)."""
    return random.Random(int.from_bytes(hashlib.sha256(repr(parts).encode()).digest(), "big"))


@dataclass(frozen=True)
class Vocabulary:
    """Words that make keys, and the half of the values that goes with them."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    split: Split

    def key(self, generator: random.Random) -> str:
        """``adjective-noun``, each drawn uniformly: RULER's draw from the set of all pairs, without building it."""
        adjective = self.adjectives[generator.randrange(len(self.adjectives))]
        return f"{adjective}-{self.nouns[generator.randrange(len(self.nouns))]}"

    def value(self, generator: random.Random, kind: ValueKind = "number") -> str:
        """A number from 1000000 to 9999999, or a version 4 UUID, of this vocabulary's half."""
        for _ in range(1000):
            if kind == "number":
                value = str(generator.randrange(1_000_000, 10_000_000))
            else:
                value = str(uuid.UUID(int=generator.getrandbits(128), version=4))
            if self.split == "all" or in_training(value) == (self.split == "train"):
                return value
        raise RuntimeError(f"no {kind} of split {self.split!r} in 1000 draws")


def load_vocabulary(split: Split, *, longest_word: int | None = None) -> Vocabulary:
    """The word lists of ``wonderwords``, whole ("all", as RULER has it) or the words of one half.

    "train" and "eval" share no adjective, no noun and no value. ``longest_word`` leaves out words of more characters,
    which small tokenizers cut in many pieces; RULER has no such limit.
    """
    adjectives, nouns = (
        tuple(word for word in _words(name, split) if longest_word is None or len(word) <= longest_word)
        for name in ("adjectivelist.txt", "nounlist.txt")
    )
    if not adjectives or not nouns:
        raise ValueError(f"longest_word = {longest_word} leaves no words")
    return Vocabulary(adjectives, nouns, split)


def _words(name: str, split: Split) -> tuple[str, ...]:
    # the package's own import builds every word category, which takes longer than reading the two lists
    text = (resources.files("wonderwords") / "assets" / name).read_text(encoding="utf-8")
    words = sorted({line.rstrip() for line in text.splitlines()} - {""})
    return tuple(word for word in words if split == "all" or in_training(word) == (split == "train"))

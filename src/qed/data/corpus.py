"""Training documents for the small runs: prose, and needle documents in exactly the words of the evaluation.

A needle document has one or more needles in noise and asks for some of them, one question after the other. Its words
and values come from the training half of the vocabulary, which evaluation (``split="eval"``) never draws from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..config import nearest
from .needle import NOISE, answer_prefix, introduction, needle_sentence, question
from .prose import load_prose
from .vocabulary import load_vocabulary, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Range = tuple[int, int]
_KEY, _VALUE = "quick-fox", "1234567"


@dataclass(frozen=True)
class DocumentConfig:
    """What documents are drawn. Ranges are inclusive and drawn from uniformly.

    ``length``: most tokens of a document, BOS and EOS included; a needle document may come out shorter.
    ``num_needles``, ``num_questions``: of a needle document; what does not fit ``length`` is left out, questions are
    never more than needles, and no needle is asked for twice.
    ``single_share``: share of needle documents in evaluation's own shape: one needle, one question, noise to the end.
    ``prose_share``: share of documents that are prose.
    ``filler``: share of the room left over that noise takes, drawn uniformly between the two.
    ``longest_word``: most characters of an adjective or noun in a key (``NeedleConfig``'s field of this name).
    ``supervise``: "all" tokens are trained on, or, in needle documents, the "answers" only.
    ``prose_targets``: share of a prose document's tokens that are trained on, drawn at random; below 1 it keeps prose
    from outweighing the few answers.
    ``curriculum``: share of training in which ``first_length``, ``first_num_needles`` and ``first_num_questions``
    (``None``: as the final ones) turn linearly into the final ones; 0 for none.
    """

    length: int = 256
    num_needles: Range = (1, 4)
    num_questions: Range = (1, 4)
    single_share: float = 0.25
    prose_share: float = 0.1
    filler: tuple[float, float] = (0.0, 1.0)
    longest_word: int | None = None
    supervise: Literal["all", "answers"] = "all"
    prose_targets: float = 1.0
    curriculum: float = 0.0
    first_length: int | None = None
    first_num_needles: Range | None = None
    first_num_questions: Range | None = None

    def __post_init__(self) -> None:
        for name in ("num_needles", "num_questions", "first_num_needles", "first_num_questions"):
            given = getattr(self, name)
            if given is not None and not (len(given) == 2 and 1 <= given[0] <= given[1]):
                raise ValueError(f"{name} must be a range (low, high) with 1 <= low <= high; got {given}")
        for name in ("single_share", "prose_share", "prose_targets", "curriculum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1; got {getattr(self, name)}")
        if self.supervise not in ("all", "answers"):
            raise ValueError(nearest("value of supervise", self.supervise, ("all", "answers")))
        if not (len(self.filler) == 2 and 0 <= self.filler[0] <= self.filler[1] <= 1):
            raise ValueError(f"filler must be two shares (low, high) from 0 to 1; got {self.filler}")

    def at(self, progress: float) -> tuple[int, Range, Range]:
        """Length, needles and questions at ``progress``, 0 to 1 of the training."""
        done = 1.0 if self.curriculum == 0 else min(1.0, progress / self.curriculum)

        def between(first: Range | None, final: Range) -> Range:
            low, high = (round(a + done * (b - a)) for a, b in zip(first or final, final, strict=True))
            return low, high

        first_length = self.length if self.first_length is None else self.first_length
        length = round(first_length + done * (self.length - first_length))
        needles = between(self.first_num_needles, self.num_needles)
        return length, needles, between(self.first_num_questions, self.num_questions)


@dataclass
class Document:
    """Token ids, the spans ``[start, end)`` of the answers among them, and the spans trained on (``None``: all)."""

    tokens: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)
    supervised: list[tuple[int, int]] | None = None


class Documents:
    """Draws documents as token ids, from parts that were tokenised once.

    ``prose``: texts for the prose documents; ``None`` takes the embedded ones. The tokenizer must split at words and
    digit groups as ``qed.data.tokenizer`` does (``ValueError`` otherwise).
    """

    def __init__(
        self, config: DocumentConfig, tokenizer: PreTrainedTokenizerBase, prose: Sequence[str] | None = None
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._bos, self._eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
        self._prose, self._starts = self._encode_prose(load_prose() if prose is None else prose)
        vocabulary = load_vocabulary("train", longest_word=config.longest_word)
        self._vocabulary = vocabulary
        self._adjectives = self._encode([f" {word}" for word in vocabulary.adjectives])
        self._nouns = self._encode([f"-{word}" for word in vocabulary.nouns])
        groups = self._encode([f"{number:03d}" for number in range(1000)])
        first = self._encode([f" {number}" for number in range(100, 1000)])
        nothing: list[list[int]] = [[]] * 100
        self._first, self._second = nothing + first, groups
        self._last = self._encode([str(digit) for digit in range(10)])
        # the fixed parts of the needle documents, cut where key and value stand
        needle = f"{needle_sentence(_KEY, _VALUE)}\n"
        ask = f"{question(_KEY)} {answer_prefix(_KEY)} {_VALUE}.\n"
        self._unit, self._introduction, self._period = self._encode([f"{NOISE}\n", f"{introduction()}\n", "."])
        self._needle, self._question = self._encode(_cut(needle)), self._encode(_cut(ask))
        #: tokens that always suffice for a needle document with one needle and one question
        self.smallest = self._smallest()
        self._check_parts()

    def draw(self, generator: random.Random, room: int, progress: float = 1.0) -> Document:
        """One document of at most ``room`` tokens; when no needle document fits, prose of exactly ``room``.

        That filling is not trained on where ``supervise`` is "answers".
        """
        length, needles, questions = self.config.at(progress)
        length = min(max(length, self.smallest), room)
        if room < self.smallest:
            filling = self._draw_prose(generator, room)
            filling.supervised = None if self.config.supervise == "all" else []
            return filling
        if generator.random() < self.config.prose_share:
            prose = self._draw_prose(generator, length)
            if self.config.prose_targets < 1:
                chosen = (at for at in range(length) if generator.random() < self.config.prose_targets)
                prose.supervised = [(at, at + 1) for at in chosen]
            return prose
        if generator.random() < self.config.single_share:
            return self._draw_needles(generator, length, 1, 1, 1.0)
        share = self.config.filler[0] + generator.random() * (self.config.filler[1] - self.config.filler[0])
        return self._draw_needles(
            generator, length, _uniform(generator, needles), _uniform(generator, questions), share
        )

    def _draw_prose(self, generator: random.Random, length: int) -> Document:
        start = self._starts[generator.randrange(len(self._starts))]
        words = self._prose[start : start + length - 1].tolist()
        while len(words) < length - 1:
            words += self._prose[: length - 1 - len(words)].tolist()
        return Document(self._bos + words)

    def _draw_needles(
        self, generator: random.Random, length: int, num_needles: int, num_questions: int, share: float
    ) -> Document:
        # BOS; the EOS at the end stands in place of the last line end
        room = length - 1 - len(self._introduction)
        needles: list[list[int]] = []
        asked: list[tuple[list[int], list[int]]] = []
        names = set()
        for _ in range(num_needles):
            key = self._key(generator)
            value = self._value(generator)
            if key[0] in names:
                continue
            line = self._needle[0] + key[1] + self._needle[1] + value + self._needle[2]
            ask = self._question[0] + key[1] + self._question[1] + key[1] + self._question[2]
            cost = len(line)
            if len(asked) < num_questions:
                cost += len(ask) + len(value) + len(self._question[3])
            if cost > room:
                break
            if len(asked) < num_questions:
                asked.append((ask, value))
            names.add(key[0])
            needles.append(line)
            room -= cost
        units = int(share * (room // len(self._unit)) + 0.5)
        if len(needles) == 1 and units:
            # as in evaluation, the needle is never the last line
            place = generator.randrange(units)
            lines = [self._unit] * place + needles + [self._unit] * (units - place)
        else:
            lines = needles + [self._unit] * units
            generator.shuffle(lines)
        generator.shuffle(asked)
        tokens = self._bos + self._introduction
        for line in lines:
            tokens += line
        answers = []
        for ask, value in asked:
            tokens += ask
            answers.append((len(tokens), len(tokens) + len(value)))
            tokens += value
            tokens += self._question[3]
        tokens[len(tokens) - len(self._question[3]) :] = self._period + self._eos
        return Document(tokens, answers, None if self.config.supervise == "all" else answers)

    def _key(self, generator: random.Random) -> tuple[tuple[int, int], list[int]]:
        adjective, noun = generator.randrange(len(self._adjectives)), generator.randrange(len(self._nouns))
        return (adjective, noun), self._adjectives[adjective] + self._nouns[noun]

    def _value(self, generator: random.Random) -> list[int]:
        number = int(self._vocabulary.value(generator))
        return self._first[number // 10_000] + self._second[number // 10 % 1000] + self._last[number % 10]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _smallest(self) -> int:
        key = max(map(len, self._adjectives)) + max(map(len, self._nouns))
        value = len(self._first[100]) + len(self._second[0]) + len(self._last[0])
        return 1 + len(self._introduction) + sum(map(len, self._needle + self._question)) + 3 * key + 2 * value

    def _check_parts(self) -> None:
        generator = seeded("check of parts")
        for _ in range(20):
            document = self._draw_needles(generator, 4096, 3, 3, 0.05)
            text = str(self._tokenizer.decode(document.tokens[1:-1]))
            if self._encode([text])[0] != document.tokens[1:-1]:
                raise ValueError(
                    "this tokenizer does not split at words, line ends and groups of three digits, so needle documents "
                    "cannot be put together from parts; train one with qed.data.tokenizer.train_tokenizer"
                )

    def _encode_prose(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        paragraphs = [f"{line}\n" for text in texts for line in text.splitlines() if line.strip()]
        if not paragraphs:
            raise ValueError("the prose holds no text")
        ids = self._encode(paragraphs)
        starts = np.cumsum([0] + [len(one) for one in ids])
        return np.concatenate([np.asarray(one, dtype=np.int32) for one in ids]), starts[:-1].tolist()


def needle_texts(count: int, seed: int, *, longest_word: int | None = None) -> Iterator[str]:
    """Needle documents as text, with training words and values: what a tokenizer is trained on beside the prose."""
    vocabulary = load_vocabulary("train", longest_word=longest_word)
    for index in range(count):
        generator = seeded("needle text", seed, index)
        key, value = vocabulary.key(generator), vocabulary.value(generator)
        lines = [introduction(), NOISE, needle_sentence(key, value)]
        yield "\n".join([*lines, f"{question(key)} {answer_prefix(key)} {value}."])


def _cut(line: str) -> list[str]:
    """The parts of a line around its keys and values, each of which takes the space before it."""
    line = line.replace(f" {_KEY}", "\0").replace(f" {_VALUE}", "\0")
    return line.split("\0")


def _uniform(generator: random.Random, span: Range) -> int:
    return span[0] + generator.randrange(span[1] - span[0] + 1)

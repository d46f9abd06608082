"""A small byte-level BPE tokenizer, trained on the embedded corpus; and public ones by name."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
MISTRAL_V1 = "mistral-v1"
# words and marks take the space before them; digits come in groups of up to three, as in several public tokenizers
_SPLIT = r"{digits}\p{{N}}{{1,3}}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class TokenizerConfig:
    """Size of the tokenizer and its way with numbers.

    ``vocab_size``: all tokens, among them 3 special ones, 256 bytes and every group of 2 or 3 digits (1,100); fewer
    come out if the texts have no more pairs to merge.
    ``space_joins_digits``: a number takes the space before it into its first group (another 1,110 tokens), so that a
    value after " is" has one token less.
    """

    vocab_size: int = 2048
    space_joins_digits: bool = False

    def __post_init__(self) -> None:
        smallest = 3 + 256 + len(_digit_groups(self.space_joins_digits))
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size must be at least {smallest}, bytes and digit groups; got {self.vocab_size}")


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig | None = None) -> PreTrainedTokenizerFast:
    """Train on ``texts``; the same texts and config give the same tokenizer, which puts one BOS in front of every text.

    Every number from 0 to 999 is one token, with leading zeros too ("007"), so a seven-digit number is three.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    config = config or TokenizerConfig()
    groups = _digit_groups(config.space_joins_digits)
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    pattern = _SPLIT.format(digits=" ?" if config.space_joins_digits else "")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - len(groups),
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # digits are left out of training: their groups are added whole, and found whole because merges are ignored for them
    inner.train_from_iterator((re.sub(r" ?\d+", "", text) for text in texts), trainer)
    state = json.loads(inner.to_str())
    vocabulary = state["model"]["vocab"]
    for group in groups:
        vocabulary[group] = len(vocabulary)
    return _wrap(tokenizers.Tokenizer.from_str(json.dumps(state)))


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer by hub id or local folder, or ``MISTRAL_V1``: 32,000 tokens, read from the installed mistral-common.

    Raises ``ValueError`` when it can't be loaded or is not of the ``tokenizers`` library; runs no code from the hub.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        try:
            path = _unpack_mistral(Path(folder)) if name == MISTRAL_V1 else name
            tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"can't load the tokenizer {name!r}: {error}\nGive a hub id or a folder; without the hub, "
                f"{MISTRAL_V1!r} after `pip install mistral-common sentencepiece protobuf`"
            ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"the tokenizer {name!r} must be a fast one, of the tokenizers library")
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of everything that decides how text becomes tokens."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _unpack_mistral(folder: Path) -> str:
    model = resources.files("mistral_common") / "data" / "tokenizer.model.v1"
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    # as Llama-2's: one BOS in front, no EOS
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True, "legacy": False}))
    return str(folder)


def _digit_groups(space: bool) -> list[str]:
    groups = [f"{number:0{width}d}" for width in (2, 3) for number in range(10**width)]
    # byte-level BPE writes a space as U+0120
    return groups + [f"\u0120{group}" for group in [*map(str, range(10)), *groups]] if space else groups


def _wrap(inner) -> PreTrainedTokenizerFast:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    bos_id = inner.token_to_id(BOS)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )

import re

import numpy as np
import pytest

from qed.config import from_dict, to_dict
from qed.data.corpus import Document, DocumentConfig, Documents, needle_texts
from qed.data.needle import NOISE, NeedleConfig, answer_prefix, introduction, needle_sentence, question
from qed.data.prepare import PrepareConfig
from qed.data.prose import load_prose, text_hash
from qed.data.vocabulary import in_training, load_vocabulary, seeded

NEEDLE = re.compile(r"One of the special magic numbers for (.+) is: (\d{7})\.")
ASKED = re.compile(r"What is the special magic number for (.+) mentioned in the provided text\? (.*)")


@pytest.fixture(scope="module")
def documents(tokenizer):
    return Documents(DocumentConfig(prose_share=0.0), tokenizer, prose=["A short text.\nIts second paragraph."])


def draw(documents, index, room=256, progress=1.0) -> Document:
    return documents.draw(seeded("test", index), room, progress)


def test_needle_documents_speak_as_the_evaluation(documents, tokenizer):
    for index in range(60):
        document = draw(documents, index)
        text = tokenizer.decode(document.tokens[1:-1])
        assert document.tokens[0] == tokenizer.bos_token_id
        assert document.tokens[-1] == tokenizer.eos_token_id
        lines = text.split("\n")
        assert lines[0] == introduction()
        hidden = {match[1]: match[2] for match in map(NEEDLE.fullmatch, lines) if match}
        asked = [match[1] for match in map(ASKED.fullmatch, lines) if match]
        assert hidden
        assert len(asked) == len(set(asked)) >= 1
        for line in lines[1:]:
            key = next((key for key in hidden if f" {key} " in line), None)
            allowed = [NOISE]
            if key:
                allowed = [needle_sentence(key, hidden[key]), f"{question(key)} {answer_prefix(key)} {hidden[key]}."]
            assert line in allowed


def test_tokens_are_those_of_the_text(documents, tokenizer):
    for index in range(60):
        tokens = draw(documents, index).tokens[1:-1]
        assert tokenizer(tokenizer.decode(tokens), add_special_tokens=False)["input_ids"] == tokens


def test_every_training_word_is_cut_alike_alone_and_in_a_sentence(documents, tokenizer):
    vocabulary = load_vocabulary("train")
    nouns = iter(vocabulary.nouns)
    pairs = [(vocabulary.adjectives[i % len(vocabulary.adjectives)], noun) for i, noun in enumerate(nouns)]
    sentences = tokenizer([f"numbers for {one}-{other} is" for one, other in pairs], add_special_tokens=False)[
        "input_ids"
    ]
    edge = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("numbers for", " is")]
    parts = zip((documents._adjectives * 9)[: len(pairs)], documents._nouns, strict=True)
    assert sentences == [edge[0] + adjective + noun + edge[1] for adjective, noun in parts]


def test_words_and_values_never_coincide_with_evaluation(documents, tokenizer):
    evaluation = load_vocabulary("eval")
    for index in range(100):
        for key, value in NEEDLE.findall(tokenizer.decode(draw(documents, index).tokens)):
            assert in_training(value)
            words = {key[:at] for at in range(len(key)) if key[at] == "-"} & set(evaluation.adjectives)
            assert not words
    for text in needle_texts(50, 0):
        assert in_training(NEEDLE.search(text)[2])


def test_answers_are_marked(documents, tokenizer):
    for index in range(30):
        document = draw(documents, index)
        found = [tokenizer.decode(document.tokens[first:last]) for first, last in document.answers]
        assert found == [
            f" {value}" for value in re.findall(r"provided text is (\d+)", tokenizer.decode(document.tokens))
        ]


def test_single_documents_have_the_evaluations_shape(tokenizer):
    single = Documents(DocumentConfig(prose_share=0, single_share=1), tokenizer, prose=["x"])
    places = set()
    for index in range(100):
        document = draw(single, index)
        lines = tokenizer.decode(document.tokens[1:-1]).split("\n")
        assert len(document.answers) == 1
        assert sum(line.startswith("One of") for line in lines) == 1
        assert lines[-2] == NOISE
        places.add(next(at for at, line in enumerate(lines) if line.startswith("One of")))
        assert 256 - len(document.tokens) < len(single._unit)
    assert min(places) == 1
    assert len(places) >= 4


def test_ranges_and_room_are_kept(tokenizer):
    config = DocumentConfig(length=600, num_needles=(3, 5), num_questions=(2, 2), single_share=0, prose_share=0)
    some = Documents(config, tokenizer, prose=["x"])
    counts = set()
    for index in range(60):
        document = draw(some, index, room=10_000)
        assert len(document.tokens) <= 600
        assert len(document.answers) == 2
        counts.add(tokenizer.decode(document.tokens).count("One of the special"))
    assert counts == {3, 4, 5}
    for room in range(some.smallest, some.smallest + 60, 7):
        assert all(len(draw(some, index, room).tokens) <= room for index in range(10))
        assert all(draw(some, index, room).answers for index in range(10))


def test_curriculum_moves_linearly(tokenizer):
    config = DocumentConfig(
        length=512, first_length=128, num_needles=(1, 8), first_num_needles=(1, 2), curriculum=0.5, num_questions=(1, 3)
    )
    assert config.at(0.0) == (128, (1, 2), (1, 3))
    assert config.at(0.25) == (320, (1, 5), (1, 3))
    assert config.at(0.5) == config.at(0.9) == config.at(1.0) == (512, (1, 8), (1, 3))
    growing = Documents(config, tokenizer, prose=["x"])
    early, late = (
        np.mean([len(draw(growing, index, 512, progress).tokens) for index in range(60)]) for progress in (0.0, 1.0)
    )
    assert early <= max(128, growing.smallest) < late


def test_prose_documents_and_filling(tokenizer):
    prose = Documents(
        DocumentConfig(prose_share=1.0), tokenizer, prose=["Some words of prose. " * 40, "And others. " * 9]
    )
    document = draw(prose, 0)
    assert len(document.tokens) == 256
    assert not document.answers
    filling = draw(
        Documents(DocumentConfig(prose_share=0.0, supervise="answers"), tokenizer, prose=["Words."]), 0, room=20
    )
    assert len(filling.tokens) == 20
    assert filling.supervised == []


def test_foreign_tokenizer_is_refused():
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(needle_texts(30, 0), trainer)
    foreign = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    with pytest.raises(ValueError, match="train_tokenizer"):
        Documents(DocumentConfig(), foreign, prose=["x"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_needles": (0, 2)}, "num_needles must be a range"),
        ({"first_num_questions": (3, 2)}, "first_num_questions must be a range"),
        ({"prose_share": 1.5}, "prose_share must be a share"),
        ({"filler": (0.5, 0.2)}, "filler must be"),
        ({"supervise": "answer"}, "did you mean 'answers'"),
    ],
)
def test_wrong_document_configs(change, message):
    with pytest.raises(ValueError, match=message):
        DocumentConfig(**change)


def test_embedded_prose_is_prose():
    texts = load_prose()
    assert texts == load_prose()
    assert 100_000 < sum(map(len, texts)) < 1_000_000
    lines = [line for text in texts for line in text.splitlines()]
    assert all(len(line.split()) >= 8 for line in lines)
    assert not any("::=" in line or line.startswith(">>>") for line in lines)
    assert text_hash(texts) == text_hash(list(texts))
    assert text_hash(texts) != text_hash(texts[1:])
    assert text_hash(["ab", "c"]) != text_hash(["a", "bc"])


def test_configs_survive_json():
    config = DocumentConfig(first_num_needles=(1, 2), curriculum=0.3, filler=(0.2, 0.9), longest_word=6)
    assert from_dict(DocumentConfig, to_dict(config)) == config
    assert from_dict(NeedleConfig, to_dict(NeedleConfig(task="niah_single_3"))) == NeedleConfig(task="niah_single_3")
    assert from_dict(PrepareConfig, to_dict(PrepareConfig(num_tokens=5))) == PrepareConfig(num_tokens=5)

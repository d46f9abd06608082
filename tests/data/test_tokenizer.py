import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qed.data.corpus import needle_texts
from qed.data.needle import NeedleConfig, NeedleTask
from qed.data.tokenizer import TokenizerConfig, train_tokenizer
from qed.data.vocabulary import load_vocabulary, seeded


@pytest.fixture(scope="module", params=[False, True], ids=["space-alone", "space-joined"])
def any_tokenizer(request):
    config = TokenizerConfig(vocab_size=2500, space_joins_digits=request.param)
    return train_tokenizer(needle_texts(200, 0), config)


def test_every_number_below_a_thousand_is_one_token(any_tokenizer):
    for text in [*map(str, range(1000)), "007", "00", "012"]:
        assert len(any_tokenizer.tokenize(text)) == 1


def test_a_value_is_three_tokens_after_its_space(any_tokenizer):
    tokens = any_tokenizer.tokenize(" 1234567.")
    assert [token.strip("Ġ") for token in tokens if token != "Ġ"] == ["123", "456", "7", "."]
    assert len(tokens) == (4 if "Ġ123" in tokens else 5)


def test_size_special_tokens_and_defaults(any_tokenizer):
    assert len(any_tokenizer) == 2500
    assert isinstance(any_tokenizer, PreTrainedTokenizerFast)
    assert [any_tokenizer.pad_token_id, any_tokenizer.bos_token_id, any_tokenizer.eos_token_id] == [0, 1, 2]
    assert any_tokenizer.padding_side == "left"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "plain words",
        "  two  spaces \n\n and\ttabs ",
        "naïve 漢字 🙂",
        "x1y22z333w4444",
        "</s",
        "don't -- stop!",
    ],
)
def test_round_trip(any_tokenizer, text):
    ids = any_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any_tokenizer.decode(ids) == text
    assert any_tokenizer.decode(any_tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_one_bos_and_no_other_special_token(any_tokenizer):
    ids = any_tokenizer("some text")["input_ids"]
    assert ids.count(any_tokenizer.bos_token_id) == 1
    assert ids[0] == any_tokenizer.bos_token_id
    assert any_tokenizer.eos_token_id not in ids
    task = NeedleTask(NeedleConfig(length=400, num_answer_tokens=16, fill="unit"), any_tokenizer, 0)
    assert task[0].prompt_ids == any_tokenizer(task[0].prompt)["input_ids"]


def test_saved_and_loaded_it_is_the_same(any_tokenizer, tmp_path):
    any_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*needle_texts(5, 3), "1234567 x  y\n"]
    assert loaded(texts)["input_ids"] == any_tokenizer(texts)["input_ids"]
    assert loaded.decode(loaded(texts[0])["input_ids"]) == any_tokenizer.decode(any_tokenizer(texts[0])["input_ids"])
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token, loaded.padding_side) == (
        "<s>",
        "</s>",
        "<pad>",
        "left",
    )
    assert loaded.backend_tokenizer.to_str() == any_tokenizer.backend_tokenizer.to_str()


def test_training_is_deterministic():
    texts = list(needle_texts(200, 1))
    one, other = (train_tokenizer(texts, TokenizerConfig(1600)).backend_tokenizer.to_str() for _ in range(2))
    assert one == other
    assert len(json.loads(one)["model"]["merges"]) > 200


def test_answers_cut_alike_alone_and_in_the_text(any_tokenizer):
    # evaluation generates after the prefix, training saw prefix and answer as one text
    vocabulary = load_vocabulary("eval")
    for index in range(50):
        generator = seeded("boundary", index)
        prefix = f"The special magic number for {vocabulary.key(generator)} mentioned in the provided text is"
        answer = f" {vocabulary.value(generator)}."
        whole, first, second = (
            any_tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prefix + answer, prefix, answer)
        )
        assert whole == first + second


def test_vocabulary_too_small_for_bytes_and_digits():
    with pytest.raises(ValueError, match="at least 1359"):
        TokenizerConfig(vocab_size=1000)
    assert len(train_tokenizer(["a b"], TokenizerConfig(vocab_size=1359))) == 1359

import random
import re

import pytest

from qed.data.vocabulary import in_training, load_vocabulary, seeded


def test_halves_share_no_word_and_make_up_the_whole():
    whole, train, evaluation = (load_vocabulary(split) for split in ("all", "train", "eval"))
    for words in ("adjectives", "nouns"):
        one, other = set(getattr(train, words)), set(getattr(evaluation, words))
        assert not one & other
        assert one | other == set(getattr(whole, words))
        assert 0.45 < len(one) / len(one | other) < 0.55


@pytest.mark.parametrize("kind", ["number", "uuid"])
def test_values_of_the_halves_never_coincide(kind):
    halves = {split: load_vocabulary(split) for split in ("train", "eval")}
    drawn = {split: [half.value(seeded(i), kind) for i in range(500)] for split, half in halves.items()}
    assert all(map(in_training, drawn["train"]))
    assert not any(map(in_training, drawn["eval"]))


def test_the_half_of_a_number_shows_in_none_of_its_digits():
    vocabulary, generator = load_vocabulary("train"), random.Random(0)
    values = [vocabulary.value(generator) for _ in range(4000)]
    for place in range(7):
        digits = [value[place] for value in values]
        expected = 4000 / (9 if place == 0 else 10)
        counts = [digits.count(str(digit)) for digit in range(place == 0, 10)]
        # chi-square with at most 9 degrees of freedom: 27.9 is its 0.999 quantile
        assert sum((count - expected) ** 2 / expected for count in counts) < 27.9


def test_forms_of_values_and_keys():
    vocabulary, generator = load_vocabulary("all"), seeded("forms")
    for _ in range(100):
        assert 1_000_000 <= int(vocabulary.value(generator)) <= 9_999_999
        assert re.fullmatch(
            r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", vocabulary.value(generator, "uuid")
        )
        adjective, _, noun = vocabulary.key(generator).partition("-")
        assert adjective
        assert noun


def test_no_two_pairs_of_words_spell_the_same_key():
    # so a uniform draw of two words is RULER's uniform draw from the set of all pairs
    vocabulary = load_vocabulary("all")
    hyphenated = [word for word in vocabulary.adjectives if "-" in word]
    for word in hyphenated:
        head, _, tail = word.partition("-")
        clash = head in vocabulary.adjectives and any(noun.startswith(f"{tail}-") for noun in vocabulary.nouns)
        assert not clash


def test_generators_depend_on_their_parts_alone():
    assert seeded("a", 1).random() == seeded("a", 1).random()
    assert seeded("a", 1).random() != seeded("a", 2).random()
    assert seeded("a", 11).random() != seeded("a1", 1).random()


def test_longest_word_limits_both_lists():
    vocabulary = load_vocabulary("eval", longest_word=5)
    assert set(vocabulary.nouns) < set(load_vocabulary("eval").nouns)
    assert max(map(len, vocabulary.adjectives + vocabulary.nouns)) == 5
    with pytest.raises(ValueError, match="leaves no words"):
        load_vocabulary("eval", longest_word=1)

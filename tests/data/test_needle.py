import dataclasses
import hashlib
import json
import random
from pathlib import Path

import pytest

from qed.data import needle
from qed.data.corpus import needle_texts
from qed.data.needle import NOISE, NeedleConfig, NeedleTask, make_example, score
from qed.data.prose import load_prose
from qed.data.tokenizer import TokenizerConfig, train_tokenizer

SHORT = NeedleConfig(length=512, num_answer_tokens=16, fill="unit", split="eval")


@pytest.fixture(scope="module")
def essay(tmp_path_factory):
    generator = random.Random(0)
    words = ["work", "people", "idea", "start", "good", "thing", "make", "company"]
    sentences = [" ".join(generator.choices(words, k=9)).capitalize() for _ in range(400)]
    path = tmp_path_factory.mktemp("essay") / "essay.txt"
    path.write_text('. "Quoted (so)." And '.join(sentences) + ".")
    return str(path)


def test_prompt_is_word_for_word_rulers(tokenizer):
    example = make_example(SHORT, tokenizer, 0, 0)
    lines = example.prompt.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert f"One of the special magic numbers for {example.key} is: {example.value}." in lines
    assert set(lines[1:-1]) - {f"One of the special magic numbers for {example.key} is: {example.value}."} == {
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    }
    assert lines[-1] == (
        f"What is the special magic number for {example.key} mentioned in the provided text? "
        f"The special magic number for {example.key} mentioned in the provided text is"
    )
    assert example.answer == example.value


def test_uuid_task_asks_for_a_uuid(tokenizer, essay):
    example = make_example(NeedleConfig(task="niah_single_3", length=2048, essay=essay), tokenizer, 0, 0)
    assert f"One of the special magic uuids for {example.key} is: {example.value}." in example.prompt
    assert example.prompt.startswith("A special magic uuid is hidden")
    assert "quiz you about the uuid" in example.prompt
    assert len(example.value) == 36
    assert "number" not in example.prompt


def test_golden():
    # words of wonderwords 3.0; the tokenizer, here one that no prose of this Python version has entered, sets the
    # number of noise units
    tokenizer = train_tokenizer(needle_texts(50, 0), TokenizerConfig(vocab_size=1500))
    config = NeedleConfig(length=1024)
    examples = [make_example(config, tokenizer, 7, index) for index in (0, 1, 499)]
    assert [(example.key, example.value) for example in examples] == [
        ("powerful-pajamas", "1121751"),
        ("didactic-update", "2620665"),
        ("erect-patrolling", "8682536"),
    ]
    digest = hashlib.sha256(json.dumps([example.prompt for example in examples]).encode()).hexdigest()
    assert digest[:16] == "3ec6be36449ab712"


def test_an_example_depends_on_its_arguments_alone(tokenizer):
    task = NeedleTask(SHORT, tokenizer, 3)
    alone = make_example(SHORT, tokenizer, 3, 9)
    random.seed(1)
    state = random.getstate()
    assert [task[index] for index in (0, 9)][1] == alone
    assert random.getstate() == state
    others = [
        make_example(SHORT, tokenizer, 4, 9),
        task[10],
        make_example(dataclasses.replace(SHORT, length=600), tokenizer, 3, 9),
    ]
    assert len({alone.value, *(other.value for other in others)}) == 4


@pytest.mark.parametrize("fill", ["ruler", "unit"])
@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_ids_are_those_of_the_whole_prompt(tokenizer, fill, length):
    task = NeedleTask(NeedleConfig(length=length, fill=fill), tokenizer, 0)
    assert task._pieces is not None
    for index in range(40):
        example = task[index]
        assert example.prompt_ids == [
            tokenizer.bos_token_id,
            *tokenizer(example.prompt, add_special_tokens=False)["input_ids"],
        ]
        assert example.num_tokens == len(example.prompt_ids)


@pytest.mark.parametrize("fill", ["ruler", "unit"])
def test_line_by_line_equals_the_search(tokenizer, fill, monkeypatch):
    config = NeedleConfig(length=900, fill=fill)
    quick = NeedleTask(config, tokenizer, 0)
    monkeypatch.setattr(needle._Pieces, "find", classmethod(lambda cls, task: None))
    slow = NeedleTask(config, tokenizer, 0)
    assert [slow[index] for index in range(15)] == [quick[index] for index in range(15)]


@pytest.mark.parametrize("name", ["niah_single_2", "niah_single_3"])
@pytest.mark.parametrize(("fill", "length"), [("unit", 700), ("ruler", 2500)])
def test_word_by_word_equals_the_search(tokenizer, name, fill, length, monkeypatch):
    config = NeedleConfig(task=name, length=length, fill=fill, essay="embedded")
    task = NeedleTask(config, tokenizer, 5)
    assert task._essay is not None
    fast = [task[i] for i in range(30)]
    places = [0.0 < example.depth < 1.0 for example in fast]
    assert any(places)
    monkeypatch.setattr(needle._EssayPieces, "find", classmethod(lambda cls, task: None))
    slow = NeedleTask(config, tokenizer, 5)
    assert [slow[i] for i in range(30)] == fast


def test_unit_fill_is_full_and_never_over(tokenizer):
    unit = len(tokenizer(f"{NOISE}\n", add_special_tokens=False)["input_ids"])
    task = NeedleTask(SHORT, tokenizer, 0)
    for index in range(100):
        assert 0 <= SHORT.length - SHORT.num_answer_tokens - task[index].num_tokens < unit


@pytest.mark.parametrize(("length", "step"), [(1024, 5), (4096, 25)])
def test_ruler_fill_counts_as_lm_eval_does(tokenizer, length, step):
    task = NeedleTask(NeedleConfig(length=length), tokenizer, 0)
    for index in range(10):
        example = task[index]
        lines = example.prompt.split("\n")
        assert lines.count(NOISE) % step == 0
        question = example.prompt.removesuffix(
            f" The special magic number for {example.key} mentioned in the provided text is"
        )

        def counted(text, answer=example.answer):
            return len(tokenizer(text + answer)["input_ids"]) + 128

        assert counted(question) <= length
        assert counted(question.replace(NOISE, "\n".join([NOISE] * (step + 1)), 1)) > length


def test_the_needle_is_anywhere_but_last(tokenizer):
    task = NeedleTask(SHORT, tokenizer, 0)
    depths = [task[index].depth for index in range(300)]
    units = task[0].prompt.count(NOISE)
    seen = {round(depth * units) for depth in depths if (depth * units) % 1 < 1e-9}
    assert min(depths) == 0
    assert max(depths) < 1
    assert len(seen) >= units - 1
    for index in range(30):
        before, _, after = task[index].prompt.partition("One of the special")
        assert before.count(NOISE) / (before + after).count(NOISE) == pytest.approx(task[index].depth)
        assert after.count(NOISE) >= 1


@pytest.mark.parametrize("fill", ["ruler", "unit"])
def test_essay_fill(tokenizer, essay, fill):
    task = NeedleTask(NeedleConfig(task="niah_single_2", length=2600, fill=fill, essay=essay), tokenizer, 0)
    background = Path(essay).read_text().split()
    for index in range(4):
        example = task[index]
        needle_text = needle.needle_sentence(example.key, example.value)
        context = example.prompt.split("\n")[1]
        words = context.replace(needle_text, "").split()
        assert words == background[: len(words)]
        assert len(words) % (500 if fill == "ruler" else 1) == 0
        assert example.prompt_ids == tokenizer(example.prompt)["input_ids"]
        if fill == "unit":
            assert 2600 - 128 - 8 <= example.num_tokens <= 2600 - 128
    assert len({round(task[index].depth, 3) for index in range(12)}) > 6


def test_essay_ends_where_its_words_end(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("Few words here. That is all.")
    example = make_example(NeedleConfig(task="niah_single_2", length=1024, essay=str(tmp_path)), tokenizer, 0, 0)
    assert example.num_tokens < 250
    assert "That is all." in example.prompt


def test_embedded_essay_is_the_embedded_prose(tokenizer):
    config = NeedleConfig(task="niah_single_2", length=2048, fill="unit", essay="embedded")
    example = make_example(config, tokenizer, 0, 3)
    before = example.prompt.split("\n")[1].split(" One of the special magic numbers")[0]
    assert " ".join(" ".join(load_prose()).split()).startswith(before)
    assert len(before.split()) > 20


def test_impossible_length_names_the_smallest(tokenizer):
    config = dataclasses.replace(SHORT, length=64)
    with pytest.raises(ValueError, match=r"the smallest is (\d+)") as error:
        NeedleTask(config, tokenizer, 0)
    smallest = int(str(error.value).split("the smallest is ")[1].split()[0])
    task = NeedleTask(dataclasses.replace(config, length=smallest), tokenizer, 0)
    assert all(task[index].num_tokens <= smallest - 16 for index in range(50))
    with pytest.raises(ValueError, match=f"the smallest is {smallest}"):
        NeedleTask(dataclasses.replace(config, length=smallest - 1), tokenizer, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "niah_singel_1"}, "did you mean 'niah_single_1'"),
        ({"fill": "units"}, "did you mean 'unit'"),
        ({"split": "test"}, "unknown split"),
        ({"num_answer_tokens": 0}, "at least 1"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ValueError, match=message):
        NeedleConfig(**change)


def test_wrong_essay(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="essay must be"):
        NeedleTask(NeedleConfig(task="niah_single_2", essay=str(tmp_path)), tokenizer, 0)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        (" 1234567.", "1234567", 1.0),
        ("The number is\x00 1234567", "1234567", 1.0),
        ("123 4567", "1234567", 0.0),
        ("", "1234567", 0.0),
        ("ABCD-EF", "abcd-ef", 1.0),
        ("12\x0134", "1234", 0.0),
    ],
)
def test_score(prediction, answer, expected):
    assert score(prediction, answer) == expected

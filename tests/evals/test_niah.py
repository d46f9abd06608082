import json

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from qed.evals.niah import NiahConfig, evaluate, one_ahead
from qed.records import read_json, read_rows

CONFIG = NiahConfig(
    lengths=(256, 320), num_examples=5, max_new_tokens=16, fill="unit", longest_word=6, rows=4, chunk_tokens=64
)


class Copier(nn.Module):
    """Knows the task: finds the needle's value in all it has read and says it, then stops. Its cache is the text."""

    def __init__(self, tokenizer, fail_at=None, reach=None):
        super().__init__()
        self.config = LlamaConfig(vocab_size=len(tokenizer))
        self.embedding = nn.Embedding(len(tokenizer), 2)
        self.tokenizer, self.fail_at, self.reach, self.calls = tokenizer, fail_at, reach, 0

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        ids = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], dim=1)
        logits = torch.zeros(len(ids), 1, len(self.tokenizer))
        for row, logit in zip(ids.tolist(), logits[:, 0], strict=True):
            text = self.tokenizer.decode(row)
            seen = text if self.reach is None else self.tokenizer.decode(row[-self.reach :])
            value = seen.split("is: ")[1].split(".")[0] if "is: " in seen else "unknown"
            wanted = [*self.tokenizer.encode(" " + value), self.tokenizer.eos_token_id]
            said = len(self.tokenizer.encode(text.split("provided text is")[-1]))
            logit[wanted[min(said, len(wanted) - 1)]] = 1.0
            # The text's sum tells texts apart, so that a dropped cache is noticed.
            logit[-1] -= sum(row) % 97
        return CausalLMOutputWithPast(logits=logits, past_key_values=ids)


def test_outcomes_scores_and_record(tokenizer, tmp_path):
    record = evaluate(Copier(tokenizer), tokenizer, CONFIG, tmp_path, progress=False)
    rows = read_rows(tmp_path / "niah.jsonl")
    assert [(row["length"], row["index"]) for row in rows] == [(n, i) for n in (256, 320) for i in range(5)]
    for row in rows:
        assert row["correct"] is True
        assert row["prediction"] == f" {row['answer']}"
        assert row["num_tokens"] + 16 <= row["length"]
    assert record == read_json(tmp_path / "niah.json")
    score = record["scores"][0]
    assert (score["num_correct"], score["num_examples"], score["accuracy"]) == (5, 5, 1.0)
    # Five of five: the exact lower end solves p^5 = 0.025.
    assert score["exact"] == pytest.approx([0.025 ** (1 / 5), 1.0])
    assert score["num_tokens"]["max"] == max(row["num_tokens"] for row in rows[:5])
    assert record["provenance"]["seed"] == 0


def test_a_short_sighted_model_is_wrong_where_the_needle_is_far(tokenizer, tmp_path):
    evaluate(Copier(tokenizer, reach=120), tokenizer, CONFIG, tmp_path, progress=False)
    rows = read_rows(tmp_path / "niah.jsonl")
    assert 0 < sum(row["correct"] for row in rows) < len(rows)
    right, wrong = ([row["depth"] for row in rows if row["correct"] is value] for value in (True, False))
    assert min(right) > max(wrong)


def test_only_lengths_that_ran_are_reported(tokenizer, tmp_path):
    record = evaluate(Copier(tokenizer), tokenizer, CONFIG, tmp_path, progress=False)
    assert [score["length"] for score in record["scores"]] == [256, 320]
    assert all(0 <= score["accuracy"] <= 1 for score in record["scores"])
    assert record["usable_context"][0]["status"] == "beyond the longest tested"
    assert record["usable_context"][0]["length"] is None


def test_resume_equals_uninterrupted(tokenizer, tmp_path):
    def copier(fail_at=None):
        torch.manual_seed(0)
        return Copier(tokenizer, fail_at)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    evaluate(copier(), tokenizer, CONFIG, whole, progress=False)
    with pytest.raises(KeyboardInterrupt):
        evaluate(copier(fail_at=40), tokenizer, CONFIG, broken, progress=False)
    kept = read_rows(broken / "niah.jsonl")
    assert 0 < len(kept) < 10
    assert not (broken / "niah.json").exists()
    # A kill may cut the last line short.
    with open(broken / "niah.jsonl", "a") as file:
        file.write('{"task": "niah_single_1", "le')
    evaluate(copier(), tokenizer, CONFIG, broken, progress=False)
    assert (broken / "niah.jsonl").read_text() == (whole / "niah.jsonl").read_text()


def test_done_is_not_done_again_and_more_is_added(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = Copier(tokenizer)
    first = evaluate(model, tokenizer, CONFIG, tmp_path, progress=False)
    calls = model.calls
    assert evaluate(model, tokenizer, CONFIG, tmp_path, progress=False) == first
    assert model.calls == calls
    more = NiahConfig(**{**CONFIG.__dict__, "lengths": (256, 320, 384), "rows": 2})
    record = evaluate(model, tokenizer, more, tmp_path, progress=False)
    assert [score["num_examples"] for score in record["scores"]] == [5, 5, 5]
    # What was done before took no time now.
    assert [row["num_examples"] for row in record["timings"]] == [0, 0, 5]
    assert record["timings"][2]["num_tokens"] == sum(
        row["num_tokens"] for row in read_rows(tmp_path / "niah.jsonl")[10:]
    )
    assert len(read_rows(tmp_path / "niah.jsonl")) == 15


def test_another_model_in_the_same_folder_is_refused(tokenizer, tmp_path):
    evaluate(Copier(tokenizer), tokenizer, CONFIG, tmp_path, progress=False)
    with pytest.raises(ValueError, match="other weights"):
        evaluate(Copier(tokenizer), tokenizer, CONFIG, tmp_path, progress=False)


def test_impossible_length_is_refused_before_any_work(tokenizer, tmp_path):
    model = Copier(tokenizer)
    with pytest.raises(ValueError, match="smallest"):
        evaluate(model, tokenizer, NiahConfig(lengths=(256, 16)), tmp_path, progress=False)
    assert model.calls == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("niah_single_4",)}, "niah_single_"),
        ({"num_examples": 0}, "num_examples"),
        ({"lengths": ()}, "lengths"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        NiahConfig(**change)


@pytest.mark.parametrize("name", ["llama", "qed_model"])
def test_batch_size_changes_nothing(request, name, tokenizer, tmp_path):
    model = request.getfixturevalue(name)
    texts = []
    for rows in (1, 4, 16):
        config = NiahConfig(lengths=(256,), num_examples=16, max_new_tokens=16, fill="unit", longest_word=6, rows=rows)
        evaluate(model, tokenizer, config, tmp_path / str(rows), progress=False)
        texts.append([row["prediction"] for row in read_rows(tmp_path / str(rows) / "niah.jsonl")])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) > 1


def test_rows_are_plain_json(tokenizer, tmp_path):
    evaluate(Copier(tokenizer), tokenizer, CONFIG, tmp_path, progress=False)
    for line in (tmp_path / "niah.jsonl").read_text().splitlines():
        assert {"task", "length", "index", "num_tokens", "answer", "prediction", "correct"} <= set(json.loads(line))


def test_one_ahead_keeps_order_and_errors():
    made = []

    def make(item):
        made.append(item)
        return 6 // item

    pairs = one_ahead(make, [3, 2, 1, 0])
    assert next(pairs) == 2
    assert made[0] == 3
    assert [next(pairs), next(pairs)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(pairs)
    assert made == [3, 2, 1, 0]
    assert list(one_ahead(make, [])) == []

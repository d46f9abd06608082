import json
import sys

import pytest

from qed.evals import recall
from qed.evals.recall import (
    RecallConfig,
    centred_window,
    contains,
    encode,
    evaluate,
    prompt,
    read_local,
    split_question,
)
from qed.records import read_rows

FILLER = "The grass is green. The sky is blue. The sun is yellow. "
FDA = {
    "key": "device name",
    "value": " Glucometer X1\n",
    "text": f"{FILLER * 3}The device name is Glucometer X1. device name: ",
}
SWDE = {
    "key": "director",
    "value": "Ida Lupino",
    "text": f"Directed by Ida Lupino. {FILLER}Summary of information above: title: Outrage director: ",
}
SQUAD = {
    "question": "The grass in the text is",
    "value": "green",
    "text": f"{FILLER}\nThe grass in the text is ",
    "context": FILLER,
}
DATA = {"fda": [FDA] * 3, "swde": [SWDE, {**SWDE, "value": "I"}], "squad_completion": [SQUAD]}


@pytest.mark.parametrize("protocol", ["whole", "window"])
@pytest.mark.parametrize("task", recall.TASKS)
def test_prompts_end_without_white_space(tokenizer, task, protocol):
    text = tokenizer.decode(prompt(task, protocol, DATA[task][0], tokenizer, RecallConfig()))
    assert text == text.strip()
    assert text.endswith(("device name:", "director:", "Device name:", "Director:", "text is"))


def test_window_protocol_rewrites_the_question():
    document, question = split_question("fda", FDA)
    assert question == "Device name:"
    assert document.endswith("The device name is Glucometer X1.")
    document, question = split_question("swde", SWDE)
    assert (question, "Summary" in document, document[-1]) == ("Director:", False, ".")
    assert split_question("squad_completion", SQUAD) == (FILLER.strip(), "The grass in the text is")
    without = {"value": "green", "text": SQUAD["text"]}
    assert split_question("squad_completion", without) == (FILLER.strip(), "The grass in the text is")


def test_window_keeps_the_answer_that_left_truncation_loses(tokenizer):
    # About 6,000 tokens with the answer near token 500, and a limit of 2,048.
    words = [f"word{i}" for i in range(1700)]
    words[120] = "the secret is Glucometer X1 indeed"
    row = {"key": "secret", "value": "Glucometer X1", "text": " ".join(words) + ". secret:"}
    assert len(encode(tokenizer, row["text"])) > 5500
    config = RecallConfig(max_length=2048, context_tokens=2000)
    whole = prompt("fda", "whole", row, tokenizer, config)
    window = prompt("fda", "window", row, tokenizer, config)
    assert len(whole) == 2048 - 48
    assert "Glucometer X1" not in tokenizer.decode(whole)
    assert "Glucometer X1" in tokenizer.decode(window)
    assert 1940 <= len(window) <= 2000


def test_window_is_centred_and_stays_inside(tokenizer):
    document = " ".join(f"w{i}" for i in range(400))
    inside = centred_window(tokenizer, document, ["w200"], 100)
    before, after = inside.split("w200")
    sizes = [len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)]
    assert sizes[0] == pytest.approx(50, abs=2)
    assert sizes[1] == pytest.approx(50, abs=5)
    assert centred_window(tokenizer, document, ["W0"], 100).startswith("w0 ")
    assert centred_window(tokenizer, document, ["w399"], 100).endswith("w399")
    assert centred_window(tokenizer, document, ["absent"], 100).startswith("w0 ")
    assert centred_window(tokenizer, "short text", ["text"], 100) == "short text"


@pytest.mark.parametrize(
    ("prediction", "value", "right"),
    [
        (" Comedy and more", "comedy", True),
        ("comedy", " comedy\n", True),
        ("drama\ncomedy", "comedy", False),
        ("a.b", "a+b", False),
        ("c++ code", "C++", True),
    ],
)
def test_scoring_strips_and_stops_at_the_line_end(prediction, value, right):
    assert contains(prediction, value) is right


def test_scoring_and_prompts_are_lm_evals(tokenizer):
    fda = pytest.importorskip("lm_eval.tasks.fda.task")
    task = fda.FDA.__new__(fda.FDA)
    assert fda.FDA.VERSION >= 1
    assert recall.TASK_VERSION == fda.FDA.VERSION
    assert encode(tokenizer, task.doc_to_text(FDA)) == prompt("fda", "whole", FDA, tokenizer, RecallConfig())
    for prediction in ("Glucometer X1", " the GLUCOMETER x1 of", "Glucometer", ""):
        assert contains(prediction, FDA["value"]) == bool(task.process_results(FDA, [prediction])["contains"])


def test_outcomes_name_protocol_and_version(llama, tokenizer, tmp_path):
    config = RecallConfig(max_new_tokens=6, rows=4)
    record = evaluate(llama, tokenizer, DATA, config, tmp_path, source="local files", progress=False)
    scores = {(score["task"], score["protocol"]): score for score in record["scores"]}
    assert record["task_version"] == 1
    assert set(scores) == {(task, protocol) for task in recall.TASKS for protocol in ("whole", "window")}
    # The one-character answer is asked whole and dropped by the window protocol.
    assert scores["swde", "whole"]["num_examples"] == scores["swde", "window"]["num_rows"] == 2
    assert scores["swde", "window"]["num_examples"] == 1
    assert scores["fda", "window"]["num_answer_in_prompt"] == 3
    assert len(read_rows(tmp_path / "recall.jsonl")) == 3 + 3 + 2 + 1 + 1 + 1
    assert evaluate(llama, tokenizer, DATA, config, tmp_path, source="local files", progress=False) == record


def test_more_tasks_add_to_what_is_there_and_other_rows_are_refused(llama, tokenizer, tmp_path):
    first = RecallConfig(tasks=("swde",), protocols=("whole",), max_new_tokens=2)
    evaluate(llama, tokenizer, DATA, first, tmp_path, source="local files", progress=False)
    more = RecallConfig(tasks=("swde", "fda"), protocols=("whole",), max_new_tokens=2)
    record = evaluate(llama, tokenizer, DATA, more, tmp_path, source="local files", progress=False)
    assert [score["task"] for score in record["scores"]] == ["swde", "fda"]
    with pytest.raises(ValueError, match="other rows of fda"):
        evaluate(llama, tokenizer, {**DATA, "fda": [FDA]}, more, tmp_path, source="local files", progress=False)


def test_batch_size_changes_nothing(qed_model, tokenizer, tmp_path):
    texts = [f"{FILLER * (1 + i % 3)}The device name is X{i}. device name:" for i in range(16)]
    data = {"fda": [{"key": "device name", "value": f"X{i}", "text": text} for i, text in enumerate(texts)]}
    predictions = []
    for rows in (1, 4, 16):
        config = RecallConfig(tasks=("fda",), max_new_tokens=8, rows=rows)
        evaluate(qed_model, tokenizer, data, config, tmp_path / str(rows), source="local files", progress=False)
        predictions.append([row["prediction"] for row in read_rows(tmp_path / str(rows) / "recall.jsonl")])
    assert predictions[0] == predictions[1] == predictions[2]


def test_local_files(tmp_path):
    for task, rows in DATA.items():
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_local(tmp_path, recall.TASKS) == DATA
    (tmp_path / "fda.jsonl").write_text('{"text": "a", "value": "b"}\n')
    with pytest.raises(ValueError, match="row 1: needs text in key"):
        read_local(tmp_path, ["fda"])
    with pytest.raises(ValueError, match=r"needs .*missing/swde.jsonl"):
        read_local(tmp_path / "missing", ["swde"])


def test_rows_through_the_harness(monkeypatch):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval.tasks.fda.task")
    asked = []

    def load_dataset(path, name, **_):
        asked.append(path)
        return {"validation": datasets.Dataset.from_list([FDA])}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert recall.read_harness(["fda"]) == {"fda": [FDA]}
    assert asked == ["hazyresearch/based-fda"]

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"no network.*fda\.jsonl"):
        recall.read_harness(["fda"])


def test_an_old_harness_is_refused(monkeypatch):
    fda = pytest.importorskip("lm_eval.tasks.fda.task")
    monkeypatch.setattr(fda.FDA, "VERSION", 0)
    with pytest.raises(ValueError, match="version 0"):
        recall.read_harness(["fda"])


def test_missing_harness_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.fda.task", None)
    with pytest.raises(ValueError, match=r"qed-attention\[eval\].*fda.jsonl"):
        recall.read_harness(["fda"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 48, "max_new_tokens": 48}, "leaves no prompt"),
        ({"tasks": ("fdaa",)}, "'fda'"),
        ({"protocols": ("windows",)}, "'window'"),
        ({"context_tokens": 50}, "above the 50"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        RecallConfig(**change)

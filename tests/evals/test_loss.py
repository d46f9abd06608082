import math

import pytest
import torch
import torch.nn.functional as F

from qed.evals.decode import measure_calls
from qed.evals.loss import LossConfig, bucket_nats, evaluate, make_windows
from qed.records import read_rows

TEXTS = [
    "The grass is green. The sky is blue. " * 12,
    "Here we go. There and back again.\n" * 5,
    "The sun is yellow.",
]


def direct(model, windows, edges):
    """Nats by bucket, a token at a time."""
    nats, counts = [0.0] * (len(edges) - 1), [0] * (len(edges) - 1)
    for window in windows:
        with torch.inference_mode():
            logits = model(torch.tensor([window])).logits[0].double()
        for before in range(1, len(window)):
            bucket = max(i for i in range(len(edges) - 1) if edges[i] <= before)
            nats[bucket] -= float(F.log_softmax(logits[before - 1], -1)[window[before]])
            counts[bucket] += 1
    return nats, counts


@pytest.mark.parametrize("chunk_tokens", [7, 64, 4096])
@pytest.mark.parametrize("name", ["llama", "qed_model"])
def test_buckets_are_the_direct_sum(request, name, tokenizer, chunk_tokens):
    model = request.getfixturevalue(name)
    config = LossConfig(length=160, windows="documents")
    windows = make_windows(TEXTS, tokenizer, config)
    assert len({len(window) for window in windows}) > 2
    nats, counts = bucket_nats(model, measure_calls(model), windows, config.edges, chunk_tokens)
    expected_nats, expected_counts = direct(model, windows, config.edges)
    assert counts.sum(0).tolist() == expected_counts
    assert nats.sum(0).tolist() == pytest.approx(expected_nats, rel=1e-5)


def test_record_weighs_every_token_the_same(llama, tokenizer, tmp_path):
    config = LossConfig(length=96, windows="documents", chunk_tokens=32)
    record = evaluate(llama, tokenizer, TEXTS, config, tmp_path, source="test", progress=False)
    nats, counts = direct(llama, make_windows(TEXTS, tokenizer, config), config.edges)
    assert record["loss"] == pytest.approx(sum(nats) / sum(counts), rel=1e-5)
    assert [bucket["num_targets"] for bucket in record["buckets"]] == counts
    assert record["buckets"][0]["loss"] == pytest.approx(nats[0] / counts[0], rel=1e-5)
    assert len(read_rows(tmp_path / "loss.jsonl")) == record["num_windows"]
    assert evaluate(llama, tokenizer, TEXTS, config, tmp_path, source="test", progress=False) == record
    with pytest.raises(ValueError, match="other weights"):
        evaluate(llama, tokenizer, TEXTS[:1], config, tmp_path, source="test", progress=False)


def test_a_uniform_model_loses_the_logarithm_of_the_vocabulary(llama, tokenizer, tmp_path):
    head = llama.lm_head.weight.detach().clone()
    try:
        torch.nn.init.zeros_(llama.lm_head.weight)
        record = evaluate(llama, tokenizer, TEXTS, LossConfig(length=64), tmp_path, source="test", progress=False)
    finally:
        llama.lm_head.weight.data.copy_(head)
    assert record["loss"] == pytest.approx(math.log(len(tokenizer)), rel=1e-6)


def test_windows(tokenizer):
    eos = tokenizer.eos_token_id
    documents = [[*tokenizer(text)["input_ids"], eos] for text in TEXTS]
    stream = [token for document in documents for token in document]
    packed = make_windows(TEXTS, tokenizer, LossConfig(length=50))
    assert [token for window in packed for token in window] == stream[: 50 * (len(stream) // 50)]
    single = make_windows(TEXTS, tokenizer, LossConfig(length=50, windows="documents"))
    assert single[0] == documents[0][:50]
    assert single[-1] == documents[2]
    limited = make_windows(TEXTS, tokenizer, LossConfig(length=50, num_tokens=100))
    assert limited == packed[:2]
    with pytest.raises(ValueError, match="no window of 4096"):
        make_windows(TEXTS, tokenizer, LossConfig(length=4096))


def test_edges():
    assert LossConfig(length=2048).edges == [1, 64, 128, 256, 512, 1024, 2048]
    assert LossConfig(length=40).edges == [1, 40]
    with pytest.raises(ValueError, match="packed"):
        LossConfig(windows="pakced")

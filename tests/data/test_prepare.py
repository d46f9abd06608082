import json
import os
import pickle
import shutil

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from qed.data import prepare as module
from qed.data.prepare import PROGRESS, PrepareConfig, held_out, prepare
from qed.data.shards import MANIFEST, open_rows, read_manifest
from qed.data.vocabulary import seeded

TEXTS = [
    " ".join(f"word{generator.randrange(100)}" for _ in range(generator.randrange(1, 60)))
    for generator in (seeded("text", index) for index in range(300))
]


@pytest.fixture(scope="module")
def place(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare")
    tokenizer.save_pretrained(folder / "tokenizer")
    texts = [*TEXTS, "", "a <s> that is not a BOS", "half \ud800 a pair"]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def settings(place, **changes):
    defaults = {"source": str(place / "texts.jsonl"), "tokenizer": str(place / "tokenizer"), "shard_tokens": 5000}
    return PrepareConfig(**{"validation_share": 0.1, **defaults, **changes})


@pytest.fixture(scope="module")
def prepared(place):
    prepare(settings(place), place / "out", progress=False)
    return place / "out"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def test_every_document_is_one_bos_and_its_tokens(prepared, tokenizer):
    manifest = read_manifest(prepared)
    texts = [*TEXTS, "a <s> that is not a BOS", "half ? a pair"]
    for split in ("train", "validation"):
        data = np.concatenate(
            [np.fromfile(prepared / shard["file"], "<u2") for shard in manifest["splits"][split]["shards"]]
        )
        documents = np.split(data, np.flatnonzero(data == tokenizer.bos_token_id)[1:])
        expected = [text for text in texts if held_out(text, 0.1) == (split == "validation")]
        assert [tokenizer.decode(document[1:]) for document in documents] == expected
        assert len(documents) == manifest["splits"][split]["num_documents"]
        assert len(data) == manifest["splits"][split]["num_tokens"]
    assert manifest["num_read"] == 302
    assert len(manifest["splits"]["train"]["shards"]) > 2
    assert manifest["dtype"] == "<u2"
    assert manifest["tokenizer"]["vocab_size"] == len(tokenizer)
    assert not (prepared / PROGRESS).exists()


def test_validation_share_is_a_property_of_the_text():
    held = {text for text in TEXTS if held_out(text, 0.1)}
    assert held < {text for text in TEXTS if held_out(text, 0.3)}
    assert 0.02 < len(held) / 300 < 0.2
    assert not any(held_out(text, 0.0) for text in TEXTS)


@pytest.mark.parametrize("at", [1, 130, 299])
def test_interrupted_and_resumed_equals_uninterrupted(place, prepared, tmp_path, monkeypatch, at):
    add, seen = module._Writer.add, []

    def interrupted(writer, text, tokens):
        seen.append(text)
        if len(seen) == at:
            raise KeyboardInterrupt
        return add(writer, text, tokens)

    monkeypatch.setattr(module._Writer, "add", interrupted)
    monkeypatch.setattr(module, "_BATCH", 16)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings(place), tmp_path, progress=False)
    with pytest.raises(ValueError, match="or not all"):
        open_rows(tmp_path)
    first_part = len(seen)
    prepare(settings(place), tmp_path, progress=False)
    assert contents(tmp_path) == contents(prepared)
    assert read_manifest(tmp_path)["splits"] == read_manifest(prepared)["splits"]
    if at == 299:
        # the second call did not start over
        assert len(seen) - first_part < 200


def test_killed_inside_a_write_leaves_no_half_shard(place, prepared, tmp_path, monkeypatch):
    replace, calls = os.replace, []

    def killed(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", killed)
    with pytest.raises(OSError, match="run again to go on"):
        prepare(settings(place), tmp_path, progress=False)
    monkeypatch.setattr(module.os, "replace", replace)
    assert not list(tmp_path.glob(".*"))
    prepare(settings(place), tmp_path, progress=False)
    assert contents(tmp_path) == contents(prepared)


def test_finished_is_left_alone_and_another_config_refused(place, prepared, monkeypatch):
    monkeypatch.setattr(module, "load_tokenizer", None)
    assert prepare(settings(place), prepared, progress=False) == read_manifest(prepared)
    with pytest.raises(ValueError, match=r"begun with validation_share = 0\.1, now it is 0\.2"):
        prepare(settings(place, validation_share=0.2), prepared, progress=False)


def test_changed_source_is_refused_on_the_way(place, tmp_path, monkeypatch):
    source = tmp_path / "texts.jsonl"
    shutil.copy(place / "texts.jsonl", source)
    monkeypatch.setattr(module._Writer, "finish", lambda writer, manifest: writer._commit())
    prepare(settings(place, source=str(source)), tmp_path / "out", progress=False)
    monkeypatch.undo()
    source.write_text(source.read_text() + '{"text": "more"}\n')
    with pytest.raises(ValueError, match="begun with files"):
        prepare(settings(place, source=str(source)), tmp_path / "out", progress=False)


def test_number_of_tokens_ends_with_a_whole_document(place, tmp_path):
    manifest = prepare(settings(place, num_tokens=3000), tmp_path, progress=False)
    assert 3000 <= manifest["splits"]["train"]["num_tokens"] < 3300
    assert manifest["num_read"] < 300


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_damaged_shard_is_named_and_refused(prepared, tmp_path, damage):
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    shard = folder / "train-00001.bin"
    data = bytearray(shard.read_bytes())
    if damage == "altered":
        data[100] ^= 1
        shard.write_bytes(data)
        open_rows(folder, check="size")
    elif damage == "truncated":
        shard.write_bytes(data[:-2])
    else:
        shard.unlink()
    with pytest.raises(ValueError, match=rf"train-00001\.bin .*{damage}"):
        open_rows(folder)
    open_rows(folder, split="validation", row_length=64)


@pytest.mark.parametrize("boundaries", ["concatenate", "reset"])
def test_rows_cross_shards_without_loss(prepared, tokenizer, boundaries):
    rows = open_rows(prepared, row_length=333, boundaries=boundaries)
    shards = read_manifest(prepared)["splits"]["train"]["shards"]
    data = np.concatenate([np.fromfile(prepared / shard["file"], "<u2") for shard in shards])
    assert len(rows) == len(data) // 333
    joined = np.concatenate([rows[index]["input_ids"] for index in range(len(rows))])
    assert np.array_equal(joined, data[: len(joined)])
    # by index alone, in any order, and in another process
    again = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 4000
    for index in (len(rows) - 1, 0, len(rows) // 2):
        assert np.array_equal(again[index]["input_ids"], data[index * 333 : (index + 1) * 333])
    if boundaries == "reset":
        row = rows[1]
        starts = np.flatnonzero(row["input_ids"] == tokenizer.bos_token_id).tolist()
        assert row["cu_seqlens"].tolist() == sorted({0, *starts, 333})
        assert (row["labels"][starts] == -100).all()


def test_large_vocabularies_take_four_bytes(tmp_path):
    words = ["</s>", *(f"w{index}" for index in range(66_000))]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    large = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    large.save_pretrained(tmp_path / "large")
    (tmp_path / "x.txt").write_text("w3 w65999 " * 10)
    config = PrepareConfig(source=str(tmp_path / "x.txt"), tokenizer=str(tmp_path / "large"), validation_share=0)
    manifest = prepare(config, tmp_path / "out", progress=False)
    assert manifest["dtype"] == "<u4"
    # this tokenizer has no BOS: EOS begins the document
    assert open_rows(tmp_path / "out", row_length=5)[0]["input_ids"].tolist() == [0, 4, 66_000, 4, 66_000]


def test_wrong_settings(place, tmp_path):
    with pytest.raises(ValueError, match="validation_share must be"):
        PrepareConfig(validation_share=1.0)
    with pytest.raises(ValueError, match="no such file"):
        prepare(settings(place, source=str(tmp_path / "absent")), tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="can't load the tokenizer"):
        prepare(settings(place, tokenizer=str(tmp_path / "absent")), tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="GB more for shards"):
        prepare(settings(place, num_tokens=10**17), tmp_path / "out", progress=False)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match="gave no training tokens"):
        prepare(settings(place, source=str(tmp_path / "blank.txt")), tmp_path / "out", progress=False)

import numpy as np
import pytest

from qed.data.corpus import DocumentConfig, Documents
from qed.data.packing import IGNORED, GeneratedRows, StreamRows, make_row


@pytest.fixture(scope="module")
def documents(tokenizer):
    return Documents(DocumentConfig(), tokenizer, prose=["Some words of prose.\n" * 20])


def test_rows_are_exact_and_indexed(documents, tokenizer):
    rows = GeneratedRows(documents, row_length=400, num_rows=40, seed=1)
    assert len(rows) == 40
    for index in (0, 7, 39):
        row = rows[index]
        assert row["input_ids"].shape == row["labels"].shape == (400,)
        assert row["input_ids"].dtype == row["labels"].dtype == np.int64
        again = GeneratedRows(documents, row_length=400, num_rows=40, seed=1)[index]
        assert all(np.array_equal(row[name], again[name]) for name in row)
    assert not np.array_equal(rows[0]["input_ids"], rows[1]["input_ids"])
    other = GeneratedRows(documents, row_length=400, num_rows=40, seed=2)
    assert not np.array_equal(rows[0]["input_ids"], other[0]["input_ids"])
    with pytest.raises(IndexError):
        rows[40]


def test_no_target_crosses_a_border_when_documents_are_separated(documents, tokenizer):
    rows = GeneratedRows(documents, row_length=400, num_rows=10, seed=1, boundaries="reset")
    for row in (rows[index] for index in range(10)):
        starts = np.flatnonzero(row["input_ids"] == tokenizer.bos_token_id)
        assert row["cu_seqlens"].tolist() == [*starts, 400]
        assert (row["labels"][starts] == IGNORED).all()
        assert (row["labels"] != IGNORED).sum() == 400 - len(starts)


def test_concatenated_rows_train_on_everything_but_the_first(documents):
    row = GeneratedRows(documents, row_length=400, num_rows=10, seed=1)[0]
    assert set(row) == {"input_ids", "labels"}
    assert row["labels"][0] == IGNORED
    assert np.array_equal(row["labels"][1:], row["input_ids"][1:])


def test_answers_only(tokenizer):
    documents = Documents(DocumentConfig(supervise="answers", prose_share=0), tokenizer, prose=["Some words of prose."])
    rows = GeneratedRows(documents, row_length=256, num_rows=20, seed=0)
    for row in (rows[index] for index in range(20)):
        kept = row["labels"] != IGNORED
        assert np.array_equal(row["labels"][kept], row["input_ids"][kept])
        text = tokenizer.decode(row["input_ids"])
        assert tokenizer.decode(row["labels"][kept]) == "".join(
            f" {part[:7]}" for part in text.split("provided text is ")[1:]
        )


def test_rows_too_short_for_a_needle(documents):
    with pytest.raises(ValueError, match=rf"the smallest that always fits one has {documents.smallest}"):
        GeneratedRows(documents, row_length=documents.smallest - 1, num_rows=1, seed=0)


@pytest.mark.parametrize("boundaries", ["concatenate", "reset"])
def test_stream_is_cut_without_loss(boundaries):
    tokens = np.arange(1000, 1100, dtype=np.uint16)
    tokens[[0, 10, 37, 64, 65, 90]] = 1
    rows = StreamRows(tokens, separator=1, row_length=32, boundaries=boundaries)
    assert len(rows) == 3
    assert np.array_equal(np.concatenate([rows[index]["input_ids"] for index in range(3)]), tokens[:96])
    if boundaries == "reset":
        assert [rows[index]["cu_seqlens"].tolist() for index in range(3)] == [[0, 10, 32], [0, 5, 32], [0, 1, 26, 32]]
        assert np.flatnonzero(rows[2]["labels"] == IGNORED).tolist() == [0, 1, 26]
    else:
        assert np.flatnonzero(rows[2]["labels"] == IGNORED).tolist() == [0]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="did you mean 'reset'"):
        make_row(np.zeros(4, dtype=np.int64), [0], "rest")
    with pytest.raises(ValueError, match="do not fill one row"):
        StreamRows(np.zeros(4), separator=1, row_length=8)

import json
import sys

import pytest

from qed.data.sources import find_files, hub_texts, read_texts

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("first line\nsecond, with ä\n", encoding="utf-8")
    rows = [{"text": "one", "id": 1}, {"text": "  "}, {"text": "two"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a").mkdir()
    parquet.write_table(pyarrow.table({"text": ["three", None, "four"], "id": [1, 2, 3]}), tmp_path / "a" / "z.parquet")
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / ".hidden.txt").write_text("not read")
    return tmp_path


def test_folder_is_read_in_the_order_of_names_without_blank_documents(folder):
    assert list(read_texts(folder)) == ["three", "four", "first line\nsecond, with ä\n", "one", "two"]
    assert [file.name for file in find_files(folder)] == ["z.parquet", "b.txt", "c.jsonl"]


def test_one_file_and_a_byte_order_mark(folder):
    path = folder / "mark.txt"
    path.write_bytes(b"\xef\xbb\xbfmarked")
    assert list(read_texts(path)) == ["marked"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "ok"}\n{"text": \n', "line 2: not JSON"),
        ("x.jsonl", b'{"txt": "ok"}\n', "line 1: unknown text field 'text'; did you mean 'txt'"),
        ("x.jsonl", b"[1, 2]\n", "must be a JSON object"),
        ("x.jsonl", b'{"text": 3}\n', "must be text; got int"),
        ("x.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("x.parquet", b"PAR1 nonsense", "can't be read as parquet"),
        ("x.pkl", b"anything", "must be a .txt"),
    ],
)
def test_wrong_contents_name_the_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        list(read_texts(path))
    assert name in str(error.value)


def test_wrong_paths_are_refused_at_the_call(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_texts(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match=r"holds no \.txt"):
        read_texts(tmp_path)


def test_other_text_field(folder):
    (folder / "d.jsonl").write_text('{"body": "found"}\n')
    assert list(read_texts(folder / "d.jsonl", text_field="body")) == ["found"]
    with pytest.raises(ValueError, match="unknown text field 'body'"):
        list(read_texts(folder / "a", text_field="body"))


def test_missing_pyarrow_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'qed-attention\[data\]'"):
        list(read_texts(folder / "a"))


def test_hub_reader_streams_and_skips(folder):
    pytest.importorskip("datasets")
    # a local folder of parquet files opens through the same call as a data set of the hub
    assert list(hub_texts(str(folder / "a"), skip=2)) == ["four"]
    with pytest.raises(ValueError, match="unknown text field 'body'"):
        list(hub_texts(str(folder / "a"), text_field="body"))

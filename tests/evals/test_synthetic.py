import re

import pytest

from qed.evals.recall import TASKS, RecallConfig, read_local, split_question
from qed.evals.synthetic import main, make_rows


@pytest.mark.parametrize("task", TASKS)
def test_rows_hold_their_answer_once_before_the_question(task):
    rows = make_rows(task, 12, 3)
    assert rows == make_rows(task, 20, 3)[:12]
    assert rows[0] != make_rows(task, 1, 4)[0]
    for row in rows:
        document, question = split_question(task, row)
        assert document.count(row["value"]) == row["text"].count(row["value"]) == 1
        assert row["text"].endswith(question)
        # What is asked for has one answer, and the other fact is another.
        assert len(set(re.findall(r"for (\S+) is: \d{7}\.", document))) == 2
        assert re.search(r"number(?:s)? for (\S+)", question).group(1) in document
        assert row["source"].startswith("synthetic")


def test_files_are_what_the_evaluation_reads(tmp_path):
    assert main([str(tmp_path), "--num-rows", "3"]) == 0
    data = read_local(tmp_path, RecallConfig().tasks)
    assert {task: len(rows) for task, rows in data.items()} == dict.fromkeys(TASKS, 3)
    assert data["fda"] == make_rows("fda", 3, 0)

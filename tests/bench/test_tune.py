import ast
from dataclasses import asdict

import pytest

from qed.bench import main
from qed.bench.tune import DEFAULTS, candidates, neighbours, rewrite, search
from qed.ops import tiles

TEXT = """X = 1
TABLE: dict[tuple[str, int, int], dict[str, int]] = {}


def f():
    return {
        1: 2,
    }
"""


def test_search_changes_one_field_at_a_time_and_refuses_what_fails():
    tried = []

    def score(plan):
        tried.append(plan)
        if plan.walk_rows == 128:
            return None
        # noise alone is no reason to change
        return 10 - 2 * (plan.prepare_warps == 1) - 0.05 * (plan.walk_warps == 8) - (plan.gradient_warps == 4)

    start = DEFAULTS
    best, ms = search(start, score)
    assert (best.prepare_warps, best.gradient_warps, best.walk_rows) == (1, 4, start.walk_rows)
    assert best.walk_warps == start.walk_warps
    assert ms == pytest.approx(7)
    assert len(tried) <= 1 + sum(map(len, candidates().values()))
    with pytest.raises(RuntimeError, match="current plan fails"):
        search(start, lambda plan: None)


def test_every_candidate_is_what_the_tests_check():
    plan = asdict(DEFAULTS)
    for field, values in candidates().items():
        assert plan[field] in values
        assert all(isinstance(value, int) for value in values)
        assert {row[field] for row in tiles.SELECTABLE if field in row} <= set(values)


def test_what_the_search_tries_first_is_compiled_ahead():
    tried = []
    search(DEFAULTS, lambda plan: tried.append(plan) or 1.0)
    assert neighbours(DEFAULTS) == tried


def test_the_table_is_rewritten_row_by_row():
    text = rewrite(TEXT, ("sm90", 128, 128), {"walk_rows": 128}, "card one, 1.0 ms")
    text = rewrite(text, ("sm90", 64, 64), {}, "card one, 0.5 ms")
    text = rewrite(text, ("sm90", 128, 128), {"walk_rows": 32, "walk_warps": 2}, "card one, 0.9 ms")
    table = next(node for node in ast.parse(text).body if isinstance(node, ast.AnnAssign))
    assert ast.literal_eval(table.value) == {
        ("sm90", 64, 64): {},
        ("sm90", 128, 128): {"walk_rows": 32, "walk_warps": 2},
    }
    assert "card one, 0.9 ms" in text
    assert "1.0 ms" not in text
    assert text.endswith(TEXT[TEXT.index("\n\ndef f") :])
    with pytest.raises(ValueError, match="no TABLE"):
        rewrite("X = 1\n", ("sm90", 64, 64), {}, "")


def test_the_source_holds_a_table_that_can_be_rewritten():
    with open(tiles.__file__, encoding="utf-8") as file:
        text = rewrite(file.read(), ("sm00", 64, 64), {"walk_rows": 32}, "a card")
    table = next(node for node in ast.parse(text).body if isinstance(node, ast.AnnAssign) and node.target.id == "TABLE")
    assert ast.literal_eval(table.value) == {**tiles.TABLE, ("sm00", 64, 64): {"walk_rows": 32}}


def test_tuning_needs_a_gpu():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        main(["tune", "--device", "cpu"])


@pytest.mark.parametrize("size", ["128", "128x", "0x64", "128x512"])
def test_wrong_sizes_are_named(size, capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--sizes", size])
    assert "is not KxV with widths from 1 to 256" in capsys.readouterr().err

from itertools import islice
from typing import Any

import pytest
import torch

from qed.train import TrainConfig
from qed.train.rows import IGNORED, MicroBatches, RowOrder, collate, count_targets


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"num_tokens": 24 * 8, "batch_tokens": 64, "sequence_length": 8, "micro_batch_rows": 2}
    return TrainConfig(**(values | changes))


def test_every_pass_sees_every_row_once_in_a_new_order() -> None:
    order = RowOrder(10, config())
    passes = [[order[10 * epoch + row] for row in range(10)] for epoch in range(3)]
    assert all(sorted(rows) == list(range(10)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 3
    again = RowOrder(10, config())
    assert [again[position] for position in (25, 3, 14)] == [passes[2][5], passes[0][3], passes[1][4]]
    assert [RowOrder(10, config(seed=1))[row] for row in range(10)] != passes[0]


def test_sequential_order_is_the_data_sets_own() -> None:
    order = RowOrder(3, config(order="sequential"))
    assert [order[position] for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("processes", "rows"), [(1, 8), (1, 2), (2, 2), (4, 1), (2, 4)])
def test_a_step_holds_the_same_rows_however_it_is_split(processes: int, rows: int) -> None:
    whole = [sorted(batch) for batch in MicroBatches(100, config(micro_batch_rows=8))]
    run = config(micro_batch_rows=rows)
    samplers = [MicroBatches(100, run, rank=rank, num_processes=processes) for rank in range(processes)]
    accumulation = run.accumulation_steps(processes)
    batches = [iter(sampler) for sampler in samplers]
    for step in whole:
        taken = [row for rank in batches for micro in islice(rank, accumulation) for row in micro]
        assert sorted(taken) == step


def test_starting_later_gives_the_rest() -> None:
    everything = list(MicroBatches(10, config()))
    assert list(MicroBatches(10, config(), first_step=2)) == everything[2 * 4 :]


def test_packed_rows_lie_end_to_end_and_no_document_predicts_another() -> None:
    tokens = torch.arange(12).reshape(2, 6)
    rows = [
        {"input_ids": tokens[0], "labels": tokens[0].clone(), "cu_seqlens": [0, 4, 6]},
        {"input_ids": tokens[1], "labels": tokens[1].clone(), "cu_seqlens": [0, 6]},
    ]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [list(range(12))]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6, 12]
    assert (batch["labels"][0] == IGNORED).nonzero()[:, 0].tolist() == [0, 4, 6]
    assert int(count_targets(batch["labels"])) == 12 - 3
    assert rows[0]["labels"][0] == 0, "the data set's own tensor was changed"


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        RowOrder(0, config())

from itertools import pairwise
from typing import Any

import pytest
from torch import nn

from qed.model import QEDConfig, no_weight_decay
from qed.train import TrainConfig, build_model
from qed.train.optimizer import make_optimizer, rate_factor


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"num_tokens": 1000, "batch_tokens": 10, "sequence_length": 10, "micro_batch_rows": 1}
    return TrainConfig(**(values | changes))


def tiny() -> nn.Module:
    return build_model(QEDConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_heads=2, head_dim=4,
                                 intermediate_size=16), seed=0)  # fmt: skip


def test_groups_of_the_optimizer_itself() -> None:
    model = tiny()
    optimizer = make_optimizer(model, config(learning_rate=1e-3, weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["name"]: group for group in optimizer.param_groups}
    members = {name: {names[id(parameter)] for parameter in group["params"]} for name, group in groups.items()}

    assert members["theta"] == {f"model.layers.{layer}.mixer.theta" for layer in range(2)}
    assert (groups["theta"]["lr"], groups["theta"]["weight_decay"]) == (1e-2, 0.0)
    assert (groups["plain"]["lr"], groups["plain"]["weight_decay"]) == (1e-3, 0.0)
    assert (groups["decay"]["lr"], groups["decay"]["weight_decay"]) == (1e-3, 0.1)
    # The model's own list says the same, and nothing is left out or counted twice.
    assert members["plain"] | members["theta"] == {name for name in names.values() if no_weight_decay(name)}
    assert any(name.endswith("dt_bias") for name in members["plain"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_a_model_without_theta_has_no_theta_group() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    assert [group["name"] for group in make_optimizer(model, config()).param_groups] == ["decay", "plain"]


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.55), ("cosine", 0.55), ("sqrt", 1 - 0.9 * 0.5**0.5)])
def test_warm_up_stable_decay(shape: Any, middle: float) -> None:
    run = config(warmup_tokens=100, decay_start_tokens=800, decay_shape=shape, final_lr_ratio=0.1)
    factors = [rate_factor(run, step) for step in range(run.num_steps)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:80] == [1.0] * 71
    assert factors[89] == pytest.approx(middle)
    assert factors[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(factors[79:]))


def test_without_a_decay_the_rate_stays() -> None:
    assert {rate_factor(config(), step) for step in range(100)} == {1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_tokens": 15}, "multiple of sequence_length"),
        ({"batch_tokens": 30, "micro_batch_rows": 2}, "3 rows"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"decay_start_tokens": 2000}, "decay_start_tokens must lie between"),
        ({"beta2": 1.0}, "beta2"),
    ],
)
def test_a_config_that_cannot_be_run_says_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_rows_that_do_not_divide_over_processes_are_refused() -> None:
    run = config(batch_tokens=60, micro_batch_rows=2)
    assert [run.accumulation_steps(processes) for processes in (1, 3)] == [3, 1]
    with pytest.raises(ValueError, match="6 rows a step cannot be split evenly over 2 processes"):
        run.accumulation_steps(2)

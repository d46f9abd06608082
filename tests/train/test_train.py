import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qed.config import config_hash
from qed.train import CheckpointError, NonFiniteError, TrainConfig, build_model, checkpoint, train
from qed.train.loss import target_cross_entropy, use_linear_cross_entropy
from qed.train.run import prepare_model


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def run(runs: ModuleType, folder: Path, rows: Any = None, **changes: Any) -> dict[str, Any]:
    config = runs.train_config(**({"log_every_steps": 1, "save_every_steps": 0} | changes))
    return train(
        runs.model_config(dropout=0.0), None, rows or runs.Rows(), config, folder, use_cpu=True, progress=False
    )


def test_a_qed_run_leaves_a_checkpoint_a_log_and_a_record(tmp_path: Path, runs: ModuleType) -> None:
    config = runs.train_config(log_every_steps=5)
    extra = {"arm": "qed"}
    record = train(
        runs.qed_config(), None, runs.Rows(), config, tmp_path, record_extra=extra, use_cpu=True, progress=False
    )
    assert json.loads((tmp_path / "train.json").read_text()) == record
    assert (record["status"], record["num_steps"], record["extra"]) == ("done", runs.STEPS, extra)
    assert record["config_hash"] == config_hash(config)
    assert record["tokens_per_second"] > 0 < record["peak_bytes"]

    rows = read(tmp_path)
    assert [row["step"] for row in rows] == [1, 5, 10, 15, 20, 24]
    assert rows[-1]["tokens"] == runs.STEPS * config.batch_tokens == record["num_tokens"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert 0 <= rows[-1]["data_share"] <= 1
    strength = torch.tensor(rows[-1]["lambda"])
    assert strength.shape == (2, 2)
    assert rows[-1]["lambda_min"] == pytest.approx(float(strength.min()))

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    trained = [layer.mixer.strength().tolist() for layer in loaded.model.layers]
    assert torch.tensor(trained).allclose(torch.tensor(record["lambda"]))
    assert loaded.config.use_cache
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "train.json", "train.jsonl"]


def test_theta_moves_ten_times_as_fast(tmp_path: Path, runs: ModuleType) -> None:
    """One AdamW step moves every parameter by its rate, whatever the gradient's size."""
    one_step = {"num_tokens": 64, "warmup_tokens": 0, "decay_start_tokens": None, "weight_decay": 0.0, "epsilon": 1e-30}
    train(runs.qed_config(), None, runs.Rows(), runs.train_config(**one_step), tmp_path, use_cpu=True, progress=False)
    before = build_model(runs.qed_config(), seed=0).state_dict()
    after = load_file(tmp_path / "checkpoint" / "model.safetensors")
    for name, factor in {"theta": 10, "A_log": 1, "norm.weight": 1}.items():
        key = f"model.layers.0.mixer.{name}"
        moved = (after[key] - before[key]).abs()
        assert moved.allclose(torch.full_like(moved, factor * 1e-2), rtol=1e-3), name


def test_the_same_seed_gives_the_same_bits(tmp_path: Path, runs: ModuleType) -> None:
    losses = []
    for name, seed in {"one": 3, "two": 3, "other": 4}.items():
        torch.manual_seed(len(name))
        run(runs, tmp_path / name, seed=seed)
        losses.append([row["loss"] for row in read(tmp_path / name)])
    assert losses[0] == losses[1] != losses[2]


class Uneven(torch.utils.data.Dataset):
    """Rows of which a varying part carries targets, one row none."""

    def __init__(self, runs: ModuleType) -> None:
        self.rows = runs.Rows()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.rows[index]["input_ids"]
        labels = tokens.clone()
        labels[: 2 * index + 2] = -100
        return {"input_ids": tokens, "labels": labels}


def test_accumulation_weighs_by_token(tmp_path: Path, runs: ModuleType) -> None:
    """Batch 4 x 1 = 2 x 2 = 1 x 4, though the micro-batches differ in targets and some have none."""
    seen = {}
    for rows in (1, 2, 4):
        run(runs, tmp_path / str(rows), Uneven(runs), micro_batch_rows=rows, order="sequential")
        seen[rows] = [(row["loss"], row["grad_norm"]) for row in read(tmp_path / str(rows))]
    for other in (2, 4):
        assert torch.tensor(seen[1]).allclose(torch.tensor(seen[other]), rtol=1e-5, atol=1e-6)

    model, rows = build_model(runs.model_config(dropout=0.0), 0), Uneven(runs)
    batch = {name: torch.stack([rows[index][name] for index in range(4)]) for name in ("input_ids", "labels")}
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert seen[1][0][0] == pytest.approx(float(expected.detach()), abs=1e-6)


@pytest.mark.parametrize("loss", ["logits", "targets"])
def test_without_any_target_the_loss_is_zero(loss: str, tmp_path: Path, runs: ModuleType) -> None:
    class Nothing(runs.Rows):  # type: ignore[name-defined, misc]
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = super().__getitem__(index)
            return {**row, "labels": torch.full_like(row["labels"], -100)}

    short = {"num_tokens": 128, "decay_start_tokens": None, "warmup_tokens": 0}
    record = run(runs, tmp_path, Nothing(), loss=loss, **short)
    assert record["skipped_steps"] == 0
    assert [(row["loss"], row["grad_norm"]) for row in read(tmp_path)] == [(0.0, 0.0)] * 2


def poison(monkeypatch: pytest.MonkeyPatch, bad_steps: set[int]) -> None:
    """Make the loss of some update steps infinite."""
    from qed.train.trainer import RunTrainer

    original = RunTrainer.compute_loss

    def compute_loss(self: Any, *arguments: Any, **keywords: Any) -> Any:
        loss = original(self, *arguments, **keywords)
        return loss * float("inf") if self.state.global_step in bad_steps else loss

    monkeypatch.setattr(RunTrainer, "compute_loss", compute_loss)


def test_a_non_finite_step_is_skipped_and_counted(
    tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {4, 5, 9})
    assert run(runs, tmp_path, max_nonfinite_steps=3)["skipped_steps"] == 3
    rows = read(tmp_path)
    assert [row["step"] for row in rows if row["loss"] is None] == [5, 6, 10]
    assert all(row["loss"] > 0 for row in rows if row["step"] not in (5, 6, 10))
    weights = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_a_skipped_step_changes_no_weight(tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {0, 1})
    run(runs, tmp_path, num_tokens=128, decay_start_tokens=None, warmup_tokens=0)
    before = build_model(runs.model_config(dropout=0.0), 0).state_dict()
    after = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert all(after[name].equal(before[name]) for name in after)


def test_too_many_non_finite_steps_stop_the_run(
    tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(6, 20)))
    with pytest.raises(NonFiniteError, match="step 10: loss or gradient not finite for 4 steps in a row"):
        run(runs, tmp_path, max_nonfinite_steps=4)
    assert not (tmp_path / "train.json").exists()


def test_a_finished_run_is_not_trained_again(tmp_path: Path, runs: ModuleType) -> None:
    first = run(runs, tmp_path)
    before = (tmp_path / "checkpoint" / "model.safetensors").stat().st_mtime_ns
    assert run(runs, tmp_path, log_every_steps=7) == first
    assert (tmp_path / "checkpoint" / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_may_be_given_instead_of_its_config(tmp_path: Path, runs: ModuleType) -> None:
    model = build_model(runs.qed_config(), seed=0)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.5)
    arguments = (model, None, runs.Rows(), runs.train_config(), tmp_path)
    first = train(*arguments, data={"lengths": (8, 16)}, use_cpu=True, progress=False)
    assert train(*arguments, data={"lengths": (8, 16)}, use_cpu=True, progress=False) == first
    assert model.config.use_cache
    trained = load_file(tmp_path / "checkpoint" / "model.safetensors")["model.norm.weight"]
    assert trained.equal(model.model.norm.weight.detach())
    assert abs(float(trained.mean()) - 0.5) < 0.1


@pytest.mark.parametrize("finished", [True, False])
def test_another_config_is_refused_by_key(
    finished: bool, tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not finished:
        poison(monkeypatch, set(range(6, 20)))
        with pytest.raises(NonFiniteError):
            run(runs, tmp_path, save_every_steps=2)
    else:
        run(runs, tmp_path)
    with pytest.raises(ValueError, match=r"train\.weight_decay = 0\.1, this run has 0\.3"):
        run(runs, tmp_path, weight_decay=0.3)
    with pytest.raises(ValueError, match=r"data\.num_rows = 37, this run has 9"):
        run(runs, tmp_path, runs.Rows(9))
    other = runs.model_config(dropout=0.0)
    other.intermediate_size = 48
    with pytest.raises(ValueError, match=r"model\.intermediate_size = 32, this run has 48"):
        train(other, None, runs.Rows(), runs.train_config(), tmp_path)


def test_no_space_is_found_before_anything_is_written(
    tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"step 2 .* 1,000 are free; there is no earlier checkpoint"):
        run(runs, tmp_path, save_every_steps=2)
    assert list((tmp_path / "resume").iterdir()) == []


def test_a_checkpoint_is_read_without_unpickling(tmp_path: Path, runs: ModuleType) -> None:
    poisoned = pytest.MonkeyPatch()
    poison(poisoned, set(range(6, 20)))
    with pytest.raises(NonFiniteError):
        run(runs, tmp_path, save_every_steps=4)
    poisoned.undo()
    (saved,) = checkpoint.list_checkpoints(tmp_path / "resume")[-1:]
    assert {path.suffix for path in saved.iterdir()} == {".json", ".safetensors"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", lambda *arguments, **keywords: pytest.fail("unpickled"))
        assert run(runs, tmp_path)["resumed_at"] == [checkpoint.step_of(saved)]


@pytest.mark.parametrize(
    ("length", "vocab", "words"), [(15, 50, r"sequence_length=16 tokens; got \(15,\)"), (16, 60, "outside the model")]
)
def test_rows_that_do_not_fit_are_refused(
    length: int, vocab: int, words: str, tmp_path: Path, runs: ModuleType
) -> None:
    with pytest.raises(ValueError, match=words):
        run(runs, tmp_path, runs.Rows(length=length, vocab=vocab))


def test_weights_of_16_bits_are_refused(tmp_path: Path, runs: ModuleType) -> None:
    model = build_model(runs.model_config(), 0).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is torch\.bfloat16"):
        train(model, None, runs.Rows(), runs.train_config(), tmp_path)


def test_tensorboard_shows_every_head(tmp_path: Path, runs: ModuleType) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = runs.train_config(num_tokens=256, decay_start_tokens=None, log_every_steps=1, tensorboard=None)
    train(runs.qed_config(), None, runs.Rows(), config, tmp_path, use_cpu=True, progress=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {f"train/lambda/layer{layer:02d}/head{head:02d}" for layer in range(2) for head in range(2)} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


def test_workers_change_no_number(tmp_path: Path, runs: ModuleType) -> None:
    short = {"num_tokens": 256, "decay_start_tokens": None}
    run(runs, tmp_path / "0", **short)
    run(runs, tmp_path / "2", **short, num_workers=2)
    assert [row["loss"] for row in read(tmp_path / "0")] == [row["loss"] for row in read(tmp_path / "2")]


def test_recomputed_activations_change_no_gradient(tmp_path: Path, runs: ModuleType) -> None:
    short = {"num_tokens": 256, "decay_start_tokens": None}
    for name, on in {"kept": False, "recomputed": True}.items():
        config = runs.train_config(log_every_steps=1, activation_checkpointing=on, **short)
        train(runs.qed_config(), None, runs.Rows(), config, tmp_path / name, use_cpu=True, progress=False)
    kept, again = ([(r["loss"], r["grad_norm"]) for r in read(tmp_path / name)] for name in ("kept", "recomputed"))
    assert torch.tensor(kept).allclose(torch.tensor(again), rtol=1e-6)


def test_packed_documents_train(tmp_path: Path, runs: ModuleType) -> None:
    """A step of packed rows equals the same documents one by one."""

    class Packed(runs.Rows):  # type: ignore[name-defined, misc]
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "cu_seqlens": [0, 5, 16]}

    one_step = runs.train_config(num_tokens=64, decay_start_tokens=None, warmup_tokens=0, order="sequential")
    train(runs.qed_config(), None, Packed(), one_step, tmp_path, use_cpu=True, progress=False)
    model, total, count = build_model(runs.qed_config(), 0), 0.0, 0
    for index in range(4):
        tokens = runs.Rows()[index]["input_ids"]
        for document in (tokens[:5], tokens[5:]):
            logits = model(input_ids=document[None]).logits[0, :-1]
            total += float(F.cross_entropy(logits, document[1:], reduction="sum").detach())
            count += len(document) - 1
    assert read(tmp_path)[0]["loss"] == pytest.approx(total / count, abs=1e-5)


def test_loss_from_hidden_states_equals_loss_from_logits(runs: ModuleType) -> None:
    config = runs.qed_config()
    plain, fused = (build_model(config, 0).double() for _ in range(2))
    use_linear_cross_entropy(fused, target_cross_entropy)
    rows = [runs.Rows()[index] for index in range(3)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    batch["labels"][1, :7] = -100
    packed = {name: value.reshape(1, -1) for name, value in batch.items()}
    packed["cu_seqlens"] = torch.tensor([0, 20, 48])
    for inputs, items in ((batch, None), (batch, torch.tensor(99)), (packed, None)):
        losses = [model(**inputs, num_items_in_batch=items).loss for model in (plain, fused)]
        # Transformers' loss rounds the logits to float32, so the two agree to its precision.
        assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-6)
        for loss in losses:
            loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, fused.get_parameter(name).grad, rtol=1e-4, atol=1e-7)
    assert fused(input_ids=batch["input_ids"]).logits.shape == (3, 16, 50)


def test_liger_without_a_gpu_is_refused(tmp_path: Path, runs: ModuleType) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        run(runs, tmp_path, loss="liger")


def test_every_field_has_a_docstring() -> None:
    import ast
    import inspect

    (body,) = (node.body for node in ast.parse(inspect.getsource(TrainConfig)).body if isinstance(node, ast.ClassDef))
    documented = {
        node.target.id  # type: ignore[union-attr]
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.slow
def test_one_compilation_serves_every_layer(runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_block = torch.nn.Module.compile
    # The graph is captured and differentiated as ever; generating machine code would only take time.
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_block(module, backend="aot_eager"))
    config = runs.qed_config()
    plain, compiled = (build_model(config, 0).train() for _ in range(2))
    prepare_model(compiled, runs.train_config(compile=True))
    rows = [runs.Rows()[index] for index in range(2)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    torch._dynamo.utils.counters.clear()
    for model in (plain, compiled):
        model(**batch, use_cache=False).loss.backward()
    counts = torch._dynamo.utils.counters
    assert (counts["stats"]["unique_graphs"], len(counts["graph_break"])) == (1, 0)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad, parameter.grad)

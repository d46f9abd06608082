"""What only a GPU can show; skipped without one."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from qed.model import QEDConfig
from qed.train import TrainingInterrupted, build_model, train
from qed.train.loss import liger_cross_entropy, use_linear_cross_entropy
from qed.train.start import compile_kernels
from qed.train.trainer import RunTrainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def read(folder: Path) -> list[tuple[float, ...]]:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def model_config() -> QEDConfig:
    return QEDConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=32, intermediate_size=64)


def test_the_fused_loss_is_the_loss_from_logits(runs: ModuleType) -> None:
    pytest.importorskip("liger_kernel")
    rows = [runs.Rows(length=128)[index] for index in range(4)]
    batch = {name: torch.stack([row[name] for row in rows]).cuda() for name in ("input_ids", "labels")}
    batch["labels"][1, :70] = -100
    losses, gradients = [], []
    for fused, bf16 in ((False, False), (False, True), (True, True)):
        config = model_config()
        config.backend = None if bf16 else "chunked"
        model = build_model(config, 0).cuda().train()
        if fused:
            use_linear_cross_entropy(model, liger_cross_entropy())
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.double())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double())
    # Not further from float32 than twice what bf16 costs with logits.
    for exact, plain, fused_form in (losses, gradients):
        assert float((fused_form - exact).norm()) < 2 * float((plain - exact).norm()) + 1e-3 * float(exact.norm())


def test_a_run_in_bf16_stops_and_goes_on(tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small rate: bf16 rounds differently where sums are not in one order, and steps multiply the difference.
    config = runs.train_config(log_every_steps=1, save_every_steps=0, learning_rate=1e-3)
    rows = runs.Rows()
    record = train(model_config(), None, rows, config, tmp_path / "whole", progress=False)
    assert record["precision"] == "bf16"
    assert record["peak_bytes"] > 0

    original = RunTrainer._clip_grad_norm

    def stop_at_ten(self: RunTrainer, model: torch.nn.Module) -> torch.Tensor:
        self.stop_requested = self.state.global_step == 9
        return original(self, model)

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "_clip_grad_norm", stop_at_ten)
        with pytest.raises(TrainingInterrupted, match="after step 10"):
            train(model_config(), None, rows, config, tmp_path / "cut", progress=False)
    assert train(model_config(), None, rows, config, tmp_path / "cut", progress=False)["resumed_at"] == [10]
    torch.testing.assert_close(
        torch.tensor(read(tmp_path / "cut")), torch.tensor(read(tmp_path / "whole")), rtol=2e-2, atol=1e-3
    )


def test_compiled_blocks_train_as_eager_ones(tmp_path: Path, runs: ModuleType) -> None:
    # In float32: a compiled block leaves out roundings to bf16 that the other makes.
    short = {"log_every_steps": 1, "num_tokens": 256, "decay_start_tokens": None, "learning_rate": 1e-3}
    short["precision"] = "fp32"
    for name, on in {"eager": False, "compiled": True}.items():
        train(
            model_config(), None, runs.Rows(), runs.train_config(compile=on, **short), tmp_path / name, progress=False
        )
    torch.testing.assert_close(
        torch.tensor(read(tmp_path / "compiled")), torch.tensor(read(tmp_path / "eager")), rtol=2e-3, atol=1e-3
    )


def test_kernels_compiled_ahead_are_those_of_the_step(runs: ModuleType) -> None:
    from triton import knobs

    config = QEDConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, num_heads=2, head_dim=16)
    model = build_model(config, 0).cuda().train()
    shape = runs.train_config(sequence_length=64, micro_batch_rows=2, batch_tokens=128)
    for thread in compile_kernels(model, shape, torch.device("cuda"), bf16=True):
        thread.join()
    compiled: list[str] = []
    tokens = torch.stack([runs.Rows(length=64)[index]["input_ids"] for index in range(2)]).cuda()
    with knobs.compilation.scope(), torch.autocast("cuda", torch.bfloat16):
        knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert compiled == []

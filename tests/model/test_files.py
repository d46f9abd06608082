"""Saving, loading, meta devices and registration."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from qed.model import QEDForCausalLM, QEDModel
from qed.ops import ARMS


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arm", ARMS)
def test_a_checkpoint_comes_back_bit_for_bit(arm, tied, build, tokens, tmp_path):
    model = build(torch.float32, arm=arm, tie_word_embeddings=tied)
    if arm == "qed-rand":
        for layer in model.model.layers:
            layer.mixer.random_direction.copy_(torch.nn.functional.normalize(torch.randn(2, 8), dim=-1))
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is QEDForCausalLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(loaded(tokens(2, 5)).logits, model(tokens(2, 5)).logits)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied


def test_the_backbone_loads_from_a_language_models_checkpoint(build, tokens, tmp_path):
    model = build(torch.float32)
    model.save_pretrained(tmp_path)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is QEDModel
    expected = model(tokens(1, 4), output_hidden_states=True).hidden_states[-1]
    assert torch.equal(backbone(tokens(1, 4)).last_hidden_state, expected)


def test_bfloat16_loading_keeps_decay_theta_and_direction_in_float32(build, tmp_path):
    model = build(torch.float32, arm="qed-rand")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = ("A_log", "dt_bias", "theta", "random_direction")
    for name, value in model.state_dict().items():
        found = loaded.state_dict()[name]
        assert torch.equal(found, value if name.endswith(kept) else value.bfloat16()), name
        assert found.dtype == (torch.float32 if name.endswith(kept) else torch.bfloat16), name
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.state_dict().items())


def test_strength_scale_is_set_at_load_time(build, tokens, tmp_path):
    model, ids = build(torch.float32), tokens(2, 9)
    model.save_pretrained(tmp_path)
    scaled = AutoModelForCausalLM.from_pretrained(tmp_path, strength_scale=-1)
    assert scaled.config.strength_scale == -1
    assert not torch.equal(scaled(ids).logits, model(ids).logits)
    model.config.strength_scale = -1
    assert torch.equal(scaled(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_made_on_meta_is_initialised_like_any_other(tied, config, tokens):
    """Memory is filled with NaN first: whatever is not drawn would show."""
    chosen = config(arm="qed-rand", tie_word_embeddings=tied, initializer_range=0.02)
    with torch.device("meta"):
        model = QEDForCausalLM(chosen)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(0)
    model.init_weights()
    torch.manual_seed(1)
    direct = QEDForCausalLM(chosen)
    for name, value in direct.state_dict().items():
        found = model.state_dict()[name]
        assert found.isfinite().all(), name
        assert found.dtype == value.dtype == torch.float32
        if name.endswith(("theta", "random_direction", "norm.weight", "bias")) and "dt_bias" not in name:
            assert torch.equal(found, value), name
        else:
            assert 0.5 < (found.std() / value.std()).item() < 2 or name.endswith("A_log"), name
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    ids = tokens(1, 4)
    model(ids, labels=ids).loss.backward()


def test_model_and_strength_survive_a_training_step(config, tokens, tmp_path):
    """Step, save, load, step: as if nothing had happened, with tied weights and a direction drawn from a seed."""
    torch.manual_seed(0)
    model, ids = QEDForCausalLM(config(arm="qed-rand")), tokens(2, 6)

    def step(model):
        loss = model(ids, labels=ids).loss
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.sub_(0.1 * grad)
        return loss.item()

    step(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [step(model) for _ in range(2)] == [step(loaded) for _ in range(2)]


@pytest.mark.parametrize(
    "lines",
    [
        "import qed, qed.ops\nassert 'transformers' not in sys.modules\nimport transformers.modeling_layers\n",
        "import transformers.models.auto.configuration_auto\nimport qed\n",
    ],
)
def test_auto_classes_know_the_model_after_import_qed_in_any_order(lines, build, tmp_path):
    build(torch.float32).save_pretrained(tmp_path)
    load = (
        "from transformers import AutoModelForCausalLM\n"
        f"assert type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__ == 'QEDForCausalLM'\n"
    )
    subprocess.run([sys.executable, "-c", f"import sys\n{lines}{load}"], check=True)

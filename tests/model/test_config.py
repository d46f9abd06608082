import pytest
import torch

from qed.model import QEDConfig, QEDForCausalLM, no_weight_decay
from qed.ops import ARMS


def count(config):
    with torch.device("meta"):
        return sum(p.numel() for p in QEDForCausalLM(config).parameters())


def test_default_is_the_papers_340m_model():
    config = QEDConfig()
    assert abs(count(config) - 340e6) < 0.01 * 340e6
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (24, 1024, 6)
    assert config.head_dim == config.value_head_dim == 128
    assert config.layer_types == ["linear_attention"] * 24
    assert not hasattr(config, "max_position_embeddings")


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_with_a_direction_has_one_theta_a_head_more(arm, config):
    gdn2 = count(config(arm="gdn2"))
    assert count(config(arm=arm)) - gdn2 == (0 if arm == "gdn2" else 3 * 2)
    names = dict(QEDForCausalLM(config(arm=arm)).named_buffers())
    assert len(names) == (3 if arm == "qed-rand" else 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": "qed-nogat"}, "did you mean 'qed-nogate'"),
        ({"backend": "chunk"}, "did you mean 'chunked'"),
        ({"strenght_scale": 1.0}, "did you mean 'strength_scale'"),
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1; got 0"),
        ({"head_dim": 8.0}, "head_dim must be a whole number"),
        ({"conv_size": 1}, "conv_size must be a whole number of at least 2"),
        ({"value_head_dim": -1}, "value_head_dim"),
        ({"lambda_max": "high"}, "lambda_max must be a number"),
        ({"strength_scale": float("nan")}, "strength_scale must be a number"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ],
)
def test_wrong_values_are_named(changes, message, config):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_transformers_name_for_the_heads_is_understood(config):
    assert config(num_attention_heads=5).num_heads == 5


def test_a_config_survives_its_file(tmp_path, config):
    written = config(arm="qed-rand", strength_scale=-1, random_direction_seed=7)
    written.save_pretrained(tmp_path)
    assert QEDConfig.from_pretrained(tmp_path).to_diff_dict() == written.to_diff_dict()


def test_weight_decay_spares_decay_norms_theta_and_biases(build):
    spared = {name.split(".")[-1] if "norm" not in name else "norm" for name in names(build()) if no_weight_decay(name)}
    assert spared == {"A_log", "dt_bias", "theta", "norm", "bias"}
    decayed = ("proj.weight", "proj.0.weight", "proj.1.weight", "conv_weight", "embed_tokens.weight")
    assert all(name.endswith(decayed) for name in names(build()) if not no_weight_decay(name))


def names(model):
    return [name for name, _ in model.named_parameters()]

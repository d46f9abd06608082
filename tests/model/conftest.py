import pytest
import torch

from qed.model import QEDConfig, QEDForCausalLM

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 2,
    "head_dim": 8,
    "value_head_dim": 6,
    "intermediate_size": 32,
    # Large enough that tokens differ by much more than rounding.
    "initializer_range": 0.3,
}


@pytest.fixture
def config():
    return lambda **changes: QEDConfig(**{**SIZES, **changes})


@pytest.fixture
def build(config):
    """A float64 model in evaluation mode, every parameter drawn, so that nothing is hidden by a zero or a one."""

    def make(dtype=torch.float64, **changes):
        torch.manual_seed(0)
        model = QEDForCausalLM(config(**changes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", "theta", "bias")) and "dt_bias" not in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return model.to(dtype).eval()

    return make


@pytest.fixture
def tokens():
    return lambda *shape: torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))

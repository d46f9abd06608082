import pytest
import torch

from qed.data.needle import NOISE, introduction, needle_sentence, question
from qed.data.tokenizer import TokenizerConfig, train_tokenizer
from qed.data.vocabulary import load_vocabulary
from qed.model import QEDConfig, QEDForCausalLM

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "value_head_dim": 6,
    "intermediate_size": 32,
    # Large enough that tokens differ by much more than rounding.
    "initializer_range": 0.3,
    "theta_init": 2.0,
    "dt_range": (1e-3, 1e-1),
}


@pytest.fixture(scope="session")
def build():
    """A float64 model in evaluation mode whose strengths are large and differ by head."""

    def make(dtype=torch.float64, **changes):
        torch.manual_seed(0)
        model = QEDForCausalLM(QEDConfig(**{**SIZES, **changes}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", "theta")):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def tokens():
    return lambda *shape: torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def tokenizer():
    """Words of the noise and of the evaluation half's keys, so that a needle fits 256 tokens."""
    words = load_vocabulary("eval")
    needles = [needle_sentence(f"{one}-{two}", "1") for one, two in zip(words.adjectives, words.nouns, strict=False)]
    texts = [NOISE, introduction(), question("able-lamp")] * 9 + needles
    return train_tokenizer(texts, TokenizerConfig(vocab_size=2048))

import pytest

from qed.data.corpus import needle_texts
from qed.data.prose import load_prose
from qed.data.tokenizer import TokenizerConfig, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([*load_prose()[:20], *needle_texts(300, 0)], TokenizerConfig(vocab_size=2048))

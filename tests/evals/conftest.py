import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qed.data.needle import NOISE, introduction, needle_sentence, question
from qed.model import QEDConfig, QEDForCausalLM


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE of 400 tokens with an end-of-text token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [NOISE, introduction(), needle_sentence("able-lamp", "1234567"), question("able-lamp")]
    backend.train_from_iterator(texts * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="session")
def llama(tokenizer):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        # Large weights, so that greedy choices depend on the whole text and are far from ties.
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def qed_model(tokenizer):
    config = QEDConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=16,
        intermediate_size=64,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
        lambda_max=2.0,
    )
    torch.manual_seed(0)
    return QEDForCausalLM(config).eval()

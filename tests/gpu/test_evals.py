"""Greedy decoding on a GPU: the captured step against plain steps, and memory that does not grow with length."""

import pytest
import torch

from qed.data.corpus import needle_texts
from qed.data.needle import NeedleConfig, NeedleTask
from qed.data.tokenizer import TokenizerConfig, train_tokenizer
from qed.evals.decode import greedy, measure_calls
from qed.evals.engine import Engine
from qed.evals.graph import GraphDecoder
from qed.evals.memory import choose_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(needle_texts(100, seed=0), TokenizerConfig(vocab_size=1400))


@pytest.fixture(scope="module")
def model():
    from qed.model import QEDConfig, QEDForCausalLM

    torch.manual_seed(0)
    config = QEDConfig(
        vocab_size=1400, hidden_size=128, num_hidden_layers=2, num_heads=2, head_dim=64, intermediate_size=256,
        initializer_range=0.2,
    )  # fmt: skip
    return QEDForCausalLM(config).eval().cuda()


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1400, (length,), generator=generator).tolist() for length in lengths]


def answer(model, prompts, decoder=None):
    calls = measure_calls(model)
    return greedy(model, calls, prompts, max_new_tokens=24, stop_ids=frozenset({0}), chunk_tokens=128, decoder=decoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_are_the_plain_steps(model, dtype):
    model = model.to(dtype)
    decoder = GraphDecoder()
    for seed, lengths in enumerate([[300, 290, 310, 300], [200, 201, 202, 203], [150, 151]]):
        prompts = prompts_of(lengths, seed)
        assert answer(model, prompts, decoder) == answer(model, prompts)
    # Two batches of four shared a graph.
    assert decoder.num_captures == 2
    model.to(torch.float32)


def test_memory_is_the_same_at_every_length(model):
    decoder, peaks = GraphDecoder(), []
    # Capturing once takes workspaces of its own, larger than this small model's states.
    answer(model, prompts_of([1024] * 8), decoder)
    for length in (1024, 32768):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        answer(model, prompts_of([length] * 8), decoder)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.1 * peaks[0]
    assert decoder.num_captures == 1


def test_batch_size_changes_no_answer_and_lm_evals_are_the_same(model, tokenizer):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    task = NeedleTask(NeedleConfig(length=600, num_answer_tokens=16, fill="unit"), tokenizer, 0)
    examples = [task[i] for i in range(16)]
    assert len({example.num_tokens for example in examples}) > 1
    answers = []
    for rows in (1, 4, 16):
        engine, found = Engine(model, tokenizer, rows=rows, chunk_tokens=128, length=600), {}
        for batch, generated in engine.generate([example.prompt_ids for example in examples], 16):
            found.update(zip(batch, tokenizer.batch_decode(generated, skip_special_tokens=True), strict=True))
        answers.append([found[i] for i in range(16)])
    settings = {"until": [], "max_gen_toks": 16, "do_sample": False}
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(example.prompt, settings), idx=0)
        for example in examples
    ]
    harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=700)
    assert answers[0] == answers[1] == answers[2] == harness.generate_until(requests, disable_tqdm=True)
    assert len(set(answers[0])) > 1


def test_measured_rows_fit(model):
    calls = measure_calls(model)
    rows = choose_rows(model, calls, 512, 32768)
    assert rows > 8
    greedy(model, calls, prompts_of([1024] * rows), max_new_tokens=2, stop_ids=frozenset(), chunk_tokens=512)

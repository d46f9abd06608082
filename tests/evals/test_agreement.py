"""The same checkpoint and the same prompts under lm-eval's own model class give the same outcomes."""

from pathlib import Path

import pytest

from qed.data.needle import NeedleConfig, NeedleTask, score
from qed.evals.decode import greedy, measure_calls, stop_tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, qed_model, tokenizer):
    folder = tmp_path_factory.mktemp("agreement")
    qed_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_outcomes_are_lm_evals_example_by_example(checkpoint, qed_model, tokenizer):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    task = NeedleTask(NeedleConfig(length=320, num_answer_tokens=16, fill="unit"), tokenizer, 0)
    examples = [task[i] for i in range(8)]
    assert len({example.num_tokens for example in examples}) > 1
    ours = greedy(
        qed_model,
        measure_calls(qed_model),
        [example.prompt_ids for example in examples],
        max_new_tokens=16,
        stop_ids=stop_tokens(qed_model, tokenizer),
        chunk_tokens=64,
    )
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in ours]
    lm = huggingface.HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=4, max_length=400)
    requests = [
        Instance(
            request_type="generate_until",
            doc={},
            arguments=(example.prompt, {"until": [], "max_gen_toks": 16, "do_sample": False}),
            idx=0,
        )
        for example in examples
    ]
    assert [lm.tok_encode(example.prompt) for example in examples] == [example.prompt_ids for example in examples]
    theirs = lm.generate_until(requests, disable_tqdm=True)
    assert texts == theirs
    assert len(set(texts)) > 1


@pytest.mark.slow
def test_lm_evals_own_task_scores_the_same(checkpoint, qed_model, tokenizer):
    """S-NIAH-1 made, run and scored by lm-eval; then its prompts by our runner and our scoring."""
    pytest.importorskip("wonderwords")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    import lm_eval
    from lm_eval.tasks import TaskManager

    length = 512
    # All of lm-eval's thirteen thousand task files take half a minute to read.
    manager = TaskManager(
        include_path=Path(lm_eval.__file__).parent / "tasks" / "ruler",
        include_defaults=False,
        metadata={"max_seq_lengths": [length], "tokenizer": str(checkpoint)},
    )
    results = lm_eval.simple_evaluate(
        model=huggingface.HFLM(
            pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=3, max_length=length + 64
        ),
        tasks=["niah_single_1"],
        task_manager=manager,
        samples={"niah_single_1": list(range(6))},
        gen_kwargs={"max_gen_toks": 16},
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = results["samples"]["niah_single_1"]
    prompts = [sample["arguments"][0][0] for sample in samples]
    assert all(prompt.endswith("mentioned in the provided text is") for prompt in prompts)
    ours = greedy(
        qed_model,
        measure_calls(qed_model),
        [tokenizer(prompt)["input_ids"] for prompt in prompts],
        max_new_tokens=16,
        stop_ids=stop_tokens(qed_model, tokenizer),
        chunk_tokens=64,
    )
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in ours]
    assert texts == [sample["resps"][0][0] for sample in samples]
    scores = [score(text, sample["target"][0]) for text, sample in zip(texts, samples, strict=True)]
    assert scores == [sample[str(length)] for sample in samples]

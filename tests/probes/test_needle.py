import pytest
import torch
import torch.nn.functional as F

from qed.probes import ProbeConfig, observe
from qed.probes.inside import look_inside
from qed.probes.measure import needle_windows
from qed.probes.needle import CURVES, follow, make_needles, measure_needles

CONFIG = ProbeConfig(length=256, num_tokens=512, needle_length=256, num_needles=2)


@pytest.fixture(scope="module")
def needles(tokenizer):
    return make_needles(tokenizer, CONFIG)


@pytest.fixture(scope="module")
def model(build, tokenizer):
    return build(vocab_size=len(tokenizer), initializer_range=0.2)


def test_the_answer_is_found_in_the_needle(needles, tokenizer):
    assert len(needles) == 2
    for needle in needles:
        assert needle.example.depth <= 0.3
        assert tokenizer.decode(needle.ids[needle.start : needle.end]).strip() == needle.example.value
        assert needle.ids[: needle.prompt_length] == needle.example.prompt_ids
        assert tokenizer.decode(needle.ids[needle.prompt_length :]).strip() == needle.example.answer
        assert needle.end < needle.prompt_length - 50


def test_windows_are_prompts_with_their_answers(tokenizer):
    windows = needle_windows(tokenizer, CONFIG)
    assert len(windows) == 2
    for window in windows:
        assert len(window) <= CONFIG.length
        text = tokenizer.decode(window)
        assert text.count(text.rsplit(" ", 1)[1]) == 2


def test_curves_are_those_of_a_token_loop(model, needles):
    needle, seen = needles[0], []
    with torch.no_grad(), observe(model, lambda layer, mixer, caught: seen.append(look_inside(mixer, caught)[0])):
        model(torch.tensor([needle.ids]))
    for inside in seen:
        course = follow(inside, needle)
        q, k, v, a, g = (getattr(inside, name)[0] for name in "qkvag")
        T, H, K = k.shape
        size = needle.end - needle.start
        state = torch.zeros(H, K, v.shape[-1], dtype=torch.float64)
        # what is left of each write, as vectors along the key axis, and the residuals
        left, residuals = [], []
        curves = {name: [] for name in CURVES}
        weights, shares = [], []
        for t in range(T):
            decayed = g[t].exp()[..., None] * state
            left = [g[t].exp() * x - k[t] * (a[t] * g[t].exp() * x).sum(-1, keepdim=True) for x in left]
            residual = v[t] - (decayed * a[t][..., None]).sum(-2)
            state = decayed + k[t][..., None] * residual[..., None, :]
            if needle.start <= t < needle.end:
                left.append(k[t])
                residuals.append(residual)
            if t >= needle.end - 1:
                keys = [k[p] for p in range(needle.start, needle.end)]
                reads = [(state * key[..., None]).sum(-2) for key in keys]
                kept = [(key * x).sum(-1) / key.square().sum(-1) for key, x in zip(keys, left, strict=True)]
                along = [(x * r).sum(-1) / r.square().sum(-1) for x, r in zip(reads, residuals, strict=True)]
                cosine = [F.cosine_similarity(x, r, dim=-1) for x, r in zip(reads, residuals, strict=True)]
                asked = [(q[t] * x).sum(-1) for x in left]
                for name, x in zip(CURVES, (kept, cosine, along, asked), strict=True):
                    curves[name].append(torch.stack(x).mean(0))
                j = t - (needle.prompt_length - 1)
                if 0 <= j < min(size, len(needle.ids) - needle.prompt_length):
                    output = (state * q[t][..., None]).sum(-2)
                    weights.append(asked[j])
                    shares.append(asked[j].abs() * residuals[j].norm(dim=-1) / output.norm(dim=-1))
        for name in CURVES:
            torch.testing.assert_close(course.curves[name], torch.stack(curves[name], 1), rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(course.question_weight, torch.stack(weights).mean(0), rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(course.question_share, torch.stack(shares).mean(0), rtol=1e-8, atol=1e-12)


def test_the_record_and_its_rows(model, needles):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record, rows = measure_needles(model, needles, progress=False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    best = max(rows, key=lambda row: row["question_share"])
    assert (record["layer"], record["head"]) == (best["layer"], best["head"])
    for row in rows:
        assert len({len(row[name]) for name in (*CURVES, "tokens_after")}) == 1
        assert row["tokens_after"][-1] == min(one.prompt_length - one.end for one in needles)
    assert len(record["position"]) == len(record["read"])
    assert record["position"] == sorted(record["position"])
    assert record["position"][-1] == needles[0].prompt_length - 1
    assert record["read"][:2] == [0.0, 0.0]
    assert set(record["answer_loss"]) == {"as_trained", "without"}
    losses = []
    for needle in needles:
        with torch.no_grad():
            logits = model(torch.tensor([needle.ids])).logits[0, :-1]
        losses.append(
            F.cross_entropy(logits, torch.tensor(needle.ids[1:]), reduction="none")[needle.prompt_length - 1 :]
        )
    expected = sum(float(x.mean()) for x in losses) / len(losses)
    assert record["answer_loss"]["as_trained"] == pytest.approx(expected, rel=1e-6)
    assert record["answer_loss"]["without"] != record["answer_loss"]["as_trained"]


def test_an_example_that_does_not_fit_or_a_slow_tokenizer_is_refused(tokenizer):
    with pytest.raises(ValueError, match="does not fit"):
        make_needles(tokenizer, ProbeConfig(needle_length=40))
    slow = type("Slow", (), {"is_fast": False, "__getattr__": lambda self, name: getattr(tokenizer, name),
                             "__call__": lambda self, *given, **named: tokenizer(*given, **named)})()  # fmt: skip
    with pytest.raises(ValueError, match="fast tokenizer"):
        make_needles(slow, CONFIG)

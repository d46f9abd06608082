"""What the states hold of a needle while the text goes on, and how strongly the question's query reads it.

A needle's answer is written over its tokens: token ``p`` of it adds ``k_p r_p^T`` to a head's state, with the residual
``r_p = w * v - Sbar^T a``. Every later token multiplies that by its transition, so after token ``t`` it is
``(Phi k_p) r_p^T``, and a probe ``x`` reads ``(x . Phi k_p) r_p`` of it: one number says what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from qed.data.needle import NeedleExample, NeedleTask, needle_sentence
from qed.model.mixer import QEDMixer
from qed.ops import gated_delta_rule

from .hooks import Activations, find_mixers, observe
from .inside import Inside, look_inside, run
from .measure import ProbeConfig, needle_config, strength_scale

# A needle may stand so far into its text that much of it comes after.
DEEPEST, MOST_TRIED = 0.3, 200
MOST_POINTS = 200
QUANTITIES = {
    "kept": "k . Phi k / |k|^2: share of what a token of the answer wrote that its own key still reads, exactly",
    "cosine": "cosine of S^T k (everything the state returns to that key) and the residual r written there",
    "projection": "S^T k . r / |r|^2",
    "asked": "q . Phi k: weight of that write in what each later token's query reads",
}
CURVES = tuple(QUANTITIES)


@dataclass(frozen=True)
class Needle:
    """An example as tokens: ``ids`` is the prompt and the answer, ``start`` to ``end`` the answer within the needle."""

    example: NeedleExample
    ids: list[int]
    start: int
    end: int

    @property
    def prompt_length(self) -> int:
        return self.example.num_tokens


@dataclass(frozen=True)
class Course:
    """One layer: the curves of :data:`QUANTITIES` ``[H, T - end + 1]``, means over the answer's tokens, from the
    needle's last token on.

    ``question_weight`` and ``question_share`` ``[H]``: the weight of each answer token's write where that token is to
    be predicted, and the length of what it contributes over the length of the output there, means over the tokens.
    """

    curves: dict[str, Tensor]
    question_weight: Tensor
    question_share: Tensor


def make_needles(tokenizer: Any, config: ProbeConfig) -> list[Needle]:
    """The first examples whose needle stands early; ``ValueError`` if the length or the tokenizer does not allow it."""
    task = NeedleTask(needle_config(config.needle_length), tokenizer, config.seed)
    found: list[Needle] = []
    for index in range(MOST_TRIED):
        if len(found) == config.num_needles:
            break
        example = task[index]
        if example.depth <= DEEPEST:
            found.append(_needle(example, task, tokenizer))
    if len(found) < config.num_needles:
        raise ValueError(
            f"only {len(found)} of {MOST_TRIED} examples have their needle early; wanted num_needles = "
            f"{config.num_needles}"
        )
    return found


def _needle(example: NeedleExample, task: NeedleTask, tokenizer: Any) -> Needle:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("the needle's tokens are found by their offsets, which needs a fast tokenizer")
    encoded = tokenizer(
        example.prompt, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
    )
    num_before = len(example.prompt_ids) - len(encoded["input_ids"])
    if example.prompt_ids[num_before:] != list(encoded["input_ids"]):
        raise ValueError("the tokenizer cuts the whole prompt differently from its lines")
    sentence = needle_sentence(example.key, example.value, task.config.value_kind)
    begin = example.prompt.index(sentence) + sentence.rindex(example.value)
    inside = [
        i
        for i, (low, high) in enumerate(encoded["offset_mapping"])
        if low < begin + len(example.value) and high > begin
    ]
    ids = task.encode(f"{example.prompt} {example.answer}")
    if ids[: len(example.prompt_ids)] != example.prompt_ids:
        raise ValueError("the tokenizer merges the prompt's end with the answer")
    return Needle(example, ids, num_before + inside[0], num_before + inside[-1] + 1)


def follow(inside: Inside, needle: Needle) -> Course:
    """One layer's course over a whole example (a batch of one)."""
    start, end = needle.start, needle.end
    before = inside.part(slice(0, start))
    state = inside.v.new_zeros(1, *inside.k.shape[2:], inside.v.shape[-1])
    if start:
        state = _recur(before.q, before, before.v, state)[1]
    answer, rest = inside.part(slice(start, end)), inside.part(slice(start, None))
    residual = answer.v - run(answer, state, a=answer.a, direction=answer.a).content
    size = end - start
    marks = torch.zeros(1, rest.k.shape[1], rest.k.shape[2], size, dtype=rest.k.dtype, device=rest.k.device)
    for j in range(size):
        marks[:, j, :, j] = 1
    nothing = marks.new_zeros(1, *rest.k.shape[2:], size)
    output, asked = _recur(rest.q, rest, rest.v, state)[0], _recur(rest.q, rest, marks, nothing)[0]
    kept, cosine, projection = [], [], []
    for j in range(size):
        key = rest.k[:, j : j + 1].expand_as(rest.k)
        own = _recur(key, rest, marks[..., j : j + 1], nothing[..., j : j + 1])[0][..., 0]
        kept.append(own / key.square().sum(-1))
        total, wanted = _recur(key, rest, rest.v, state)[0], residual[:, j : j + 1]
        along = (total * wanted).sum(-1)
        projection.append(along / wanted.square().sum(-1))
        cosine.append(F.cosine_similarity(total, wanted.expand_as(total), dim=-1))
    curves = {
        "kept": torch.stack(kept),
        "cosine": torch.stack(cosine),
        "projection": torch.stack(projection),
        "asked": asked.movedim(-1, 0),
    }
    # token j of the answer is predicted one position before it stands
    places = [needle.prompt_length - 1 + j - start for j in range(min(size, len(needle.ids) - needle.prompt_length))]
    weights = torch.stack([asked[0, place, :, j] for j, place in enumerate(places)])
    parts = weights.abs() * residual[0, : len(places)].norm(dim=-1) / output[0, places].norm(dim=-1)
    return Course({name: x.mean(0)[0, size - 1 :].T for name, x in curves.items()}, weights.mean(0), parts.mean(0))


def measure_needles(
    model: nn.Module, needles: Sequence[Needle], *, progress: bool = True
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record's part ``needle`` and one row of curves a layer and head.

    ``read`` over ``position`` is one example's "kept" in the head that contributes most to the answer, mean over the
    examples; rows are means over the examples, by tokens since the needle.
    """
    mixers = find_mixers(model)
    device = next(model.parameters()).device
    courses: list[list[Course]] = []
    losses: dict[str, list[float]] = {"as_trained": [], "without": []}
    for needle in tqdm(needles, unit="needle", disable=not progress, desc="needles"):
        layers: list[Course] = []

        def receive(
            layer: int,
            mixer: QEDMixer,
            activations: Activations,
            layers: list[Course] = layers,
            needle: Needle = needle,
        ) -> None:
            layers.append(follow(look_inside(mixer, activations)[0], needle))

        ids = torch.tensor([needle.ids], device=device)
        with observe(model, receive):
            losses["as_trained"].append(_answer_loss(model, ids, needle))
        with strength_scale(model, 0.0):
            losses["without"].append(_answer_loss(model, ids, needle))
        courses.append(layers)
    if mixers[0].theta is None:
        del losses["without"]
    return _summarise(needles, courses, {name: sum(x) / len(x) for name, x in losses.items()})


@torch.inference_mode()
def _answer_loss(model: Any, ids: Tensor, needle: Needle) -> float:
    """Mean nats of the answer's tokens."""
    num_answer = ids.shape[1] - needle.prompt_length
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=num_answer + 1).logits[:, :-1]
    return float(F.cross_entropy(logits.mT.float(), ids[:, needle.prompt_length :]))


def _summarise(
    needles: Sequence[Needle], courses: Sequence[Sequence[Course]], losses: dict[str, float]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    def mean(name: str) -> Tensor:
        return torch.stack([torch.stack([getattr(one, name) for one in layers]) for layers in courses]).mean(0).cpu()

    share, weight = mean("question_share"), mean("question_weight")
    num_heads = share.shape[1]
    # to the end of the prompt, which the shortest tail decides
    length = min(needle.prompt_length - needle.end + 1 for needle in needles)
    points = _points(length)
    curves = {
        name: torch.stack([torch.stack([one.curves[name][:, :length] for one in layers]) for layers in courses])
        .mean(0)
        .cpu()
        for name in CURVES
    }
    rows: list[dict[str, Any]] = [
        {
            "quantity": "needle",
            "layer": layer,
            "head": head,
            "question_weight": float(weight[layer, head]),
            "question_share": float(share[layer, head]),
            "tokens_after": points,
            **{name: x[layer, head, points].tolist() for name, x in curves.items()},
        }
        for layer in range(len(share))
        for head in range(num_heads)
    ]
    layer, head = divmod(int(share.argmax()), num_heads)
    needle, own = needles[0], courses[0][layer].curves["kept"][head].cpu()
    shown = _points(needle.prompt_length - needle.end + 1)
    record = {
        "quantity": "share of the needle left under its key",
        "length": needle.example.length,
        "layer": layer,
        "head": head,
        "needle_start": needle.start,
        "needle_end": needle.end,
        "prompt_length": needle.prompt_length,
        "position": [0, needle.start - 1, *(needle.end - 1 + i for i in shown)],
        "read": [0.0, 0.0, *own[shown].tolist()],
        "answer_loss": losses,
        "quantities": QUANTITIES,
        "heads": [
            {
                "layer": row["layer"],
                "head": row["head"],
                "question_weight": row["question_weight"],
                "question_share": row["question_share"],
                **{f"{name}_at_question": row[name][-1] for name in CURVES},
            }
            for row in rows
        ],
        "examples": [
            {
                "index": one.example.index,
                "depth": one.example.depth,
                "key": one.example.key,
                "value": one.example.value,
                "needle_end": one.end,
                "num_tokens": one.prompt_length,
            }
            for one in needles
        ],
    }
    return record, rows


def _points(length: int) -> list[int]:
    step = max(1, -(-length // MOST_POINTS))
    return [*range(0, length - 1, step), length - 1]


def _recur(q: Tensor, inside: Inside, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return gated_delta_rule(q, inside.k, v, inside.a, inside.g, initial_state=state, backend="chunked")

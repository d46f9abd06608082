"""The strength sweep: the same needle examples with every lambda multiplied by s, through prefill and decoding.

``strength.jsonl`` holds one row an example and strength; ``strength.json``, written last, compares every strength with
s = 1 by exact McNemar tests, Holm-corrected over all of the sweep's comparisons.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from .. import statistics
from ..config import to_dict
from ..model.load import fingerprint
from ..records import provenance, write_json
from .decode import evaluating
from .engine import Engine
from .niah import LASTING, SPEED, NiahConfig, Progress, answers, needle_tasks, one_ahead
from .outcomes import Outcomes, finished, run_name, scores

KEY = ("task", "length", "index", "strength")
STRENGTHS = (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class StrengthConfig:
    """``strengths``: the values of s, 1 always among them (the others are compared with it); ``niah``: the examples."""

    strengths: tuple[float, ...] = STRENGTHS
    niah: NiahConfig = field(default_factory=NiahConfig)

    def __post_init__(self) -> None:
        if 1.0 not in self.strengths or len(set(self.strengths)) < len(self.strengths):
            raise ValueError(
                f"strengths must be different and hold 1, which the others are compared with; {self.strengths}"
            )


@contextmanager
def strength_scale(model: nn.Module, scale: float) -> Iterator[None]:
    """Multiply every lambda of ``model`` by ``scale`` inside; weights are not touched.

    Raises:
        ValueError: a model without strengths, for which every ``scale`` would be the same.
    """
    configs = {
        id(config): config for config in (getattr(m, "config", None) for m in model.modules()) if config is not None
    }
    holders = [config for config in configs.values() if hasattr(config, "strength_scale")]
    if not has_strength(model):
        kind = (
            getattr(holders[0], "arm", None) if holders else getattr(model.config, "model_type", type(model).__name__)
        )
        raise ValueError(f"a strength sweep needs a model whose erase vector has a strength; {kind!r} has none")
    before = [config.strength_scale for config in holders]
    try:
        for config in holders:
            config.strength_scale = scale
        yield
    finally:
        for config, value in zip(holders, before, strict=True):
            config.strength_scale = value


def has_strength(model: nn.Module) -> bool:
    """Whether some mixer of ``model`` has a trained strength."""
    return any(getattr(module, "theta", None) is not None for module in model.modules())


def evaluate(
    model: nn.Module, tokenizer: Any, config: StrengthConfig, folder: Path | str, *, progress: bool = True
) -> dict[str, Any]:
    """Run the sweep and return the record of ``folder/strength.json``; resumes and skips as the needle evaluation does.

    Raises:
        ValueError: a model without strengths, or as ``qed.evals.niah.evaluate``.
    """
    folder, niah = Path(folder), config.niah
    tasks = needle_tasks(niah, tokenizer)
    settings = to_dict(config)
    settings["niah"] = {key: value for key, value in settings["niah"].items() if key not in SPEED}
    identity = {**fingerprint(model, tokenizer), "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    lasting = {key: settings["niah"][key] for key in LASTING}
    run = run_name(kind="strength", **identity, **lasting)
    done = finished(folder / "strength.json", run=run, config=settings)
    if done is not None:
        return done
    with strength_scale(model, 1.0):
        pass
    outcomes = Outcomes(folder / "strength.jsonl", run=run, key=KEY)
    started = time.perf_counter()
    with evaluating(model):
        engine = Engine(model, tokenizer, rows=niah.rows, chunk_tokens=niah.chunk_tokens, length=max(niah.lengths))
        with Progress(niah, outcomes, progress, repeats=len(config.strengths)) as bar:
            for strength in config.strengths:
                with strength_scale(model, strength):
                    at_strength = Engine(
                        model, tokenizer, rows=engine.rows, chunk_tokens=niah.chunk_tokens, length=max(niah.lengths)
                    )
                    missing = [
                        (source, [i for i in range(niah.num_examples) if (*key, i, strength) not in outcomes])
                        for key, source in tasks.items()
                    ]
                    for examples in one_ahead(lambda group: [group[0][i] for i in group[1]], missing):
                        answers(
                            at_strength, tokenizer, niah.max_new_tokens, examples, outcomes, bar, {"strength": strength}
                        )
    order = [
        (task, length, i, strength)
        for task, length in tasks
        for strength in config.strengths
        for i in range(niah.num_examples)
    ]
    finished_rows = outcomes.finish(order)
    record = {
        "kind": "strength",
        "run": run,
        "config": settings,
        "identity": identity,
        "scores": scores(
            sorted(finished_rows, key=lambda row: config.strengths.index(row["strength"])),
            ("strength", "task", "length"),
        ),
        "comparisons": compare_strengths(finished_rows),
        "engine": engine.describe(),
        "seconds": round(time.perf_counter() - started, 3),
        "provenance": provenance(seed=niah.seed, device=str(next(model.parameters()).device)),
    }
    write_json(folder / "strength.json", record)
    return record


def compare_strengths(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each strength against s = 1 on the same examples: paired counts, exact p and Holm's p over the whole family.

    ``n01`` counts examples wrong at s = 1 and right at the other strength, ``n10`` the reverse.
    """
    outcomes: dict[tuple[str, int, float], dict[int, bool]] = {}
    for row in rows:
        outcomes.setdefault((row["task"], row["length"], row["strength"]), {})[row["index"]] = row["correct"]
    result: list[dict[str, Any]] = []
    for (task, length, strength), other in outcomes.items():
        base = outcomes.get((task, length, 1.0), {})
        if strength == 1.0:
            continue
        if base.keys() != other.keys():
            raise ValueError(f"strength {strength} and 1 were not given the same examples at {length} tokens of {task}")
        first, second = ([group[i] for i in sorted(group)] for group in (base, other))
        test = statistics.mcnemar(first, second)
        result.append(
            {
                "task": task,
                "length": length,
                "strength": strength,
                "difference": sum(second) / len(second) - sum(first) / len(first),
                "num_examples": len(first),
                **test._asdict(),
            }
        )
    for comparison, adjusted in zip(result, statistics.holm([entry["p"] for entry in result]), strict=True):
        comparison["p_holm"] = adjusted
        comparison["family_size"] = len(result)
    return result

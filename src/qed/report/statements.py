"""Sentences at the head of the page: what was run, whether it learned, what differs. Never more than the runs allow."""

from __future__ import annotations

from typing import Any

from . import text
from .comparisons import CONTRASTS, pooled_table
from .values import LEARNED, Needle


def statements(needle: Needle) -> list[dict[str, str]]:
    """Sentences with a ``tone``: "plain", "caution" (read before anything else) or "finding"."""
    runs = needle.runs
    task = needle.tasks[0] if needle.tasks else None
    arms = list(dict.fromkeys(run.arm for run in runs))
    said = [_plain(_what_was_run(needle, task, arms))]
    said += _learning(needle)
    if task is None:
        return [*said, _caution("No needle outcomes were found, so nothing is compared here.")]
    counts = {arm: sum(run.arm == arm for run in runs) for arm in arms}
    single = [text.arm_label(arm) for arm in arms if counts[arm] == 1]
    pooled = pooled_table(needle, task, *CONTRASTS[0])
    if pooled is not None:
        said.append(_differences(needle, pooled))
    if len(single) == len(arms):
        said.append(
            _caution(
                "One seed an arm: an illustration, not a finding. Between seeds of one arm accuracy past the training "
                "length varies widely, so a difference between two models says little about the two arms."
            )
        )
    elif single:
        said.append(_caution(f"One seed of {_join(single)}: an illustration, not a finding."))
    return said


def _what_was_run(needle: Needle, task: str | None, arms: list[str]) -> str:
    runs = needle.runs
    seeds = {arm: sorted(run.seed for run in runs if run.arm == arm) for arm in arms}
    numbers = sorted({len(found) for found in seeds.values()})
    each = _many(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"
    sentence = f"{_join([text.arm_label(arm) for arm in arms])}, {each} an arm, {_many(len(runs), 'run')} in all"
    sizes = {run.lookup("num_parameters") for run in runs} - {None}
    if sizes:
        sentence += f"; {_span(sizes)} parameters"
    lengths = {run.train_length for run in runs} - {None}
    if lengths:
        sentence += f", trained at {_span(lengths)} tokens"
    if task is not None:
        tested = needle.lengths(task)
        sentence += (
            f", tested on {text.task_label(task)} at {text.length_label(tested[0])} to {text.length_label(tested[-1])}"
        )
    return sentence + "."


def _learning(needle: Needle) -> list[dict[str, str]]:
    learned = {run.name: needle.learned(run) for run in needle.runs}
    unknown = [name for name, value in learned.items() if value is None]
    failed = [run for run in needle.runs if learned[run.name] is False]
    known = len(learned) - len(unknown)
    said = []
    if failed:
        listed = []
        for run in failed:
            at = needle.at_training_length(run)
            assert at is not None
            listed.append(f"{run.name} ({text.percent(at[1][0])} %)")
        said.append(
            _caution(
                f"{len(failed)} of {_many(known, 'run')} never learned the task: below {100 * LEARNED:g} % at the "
                f"training length, where there is nothing to extrapolate: {', '.join(listed)}. What such a run does at "
                "longer lengths says nothing about its arm."
            )
        )
    elif known:
        one = "The run reaches" if known == 1 else f"All {known} runs reach"
        said.append(_plain(f"{one} at least {100 * LEARNED:g} % at the training length: the task was learned."))
    if unknown:
        said.append(
            _caution(
                f"Whether the task was learned is not known for {', '.join(unknown)}: no outcomes at the training "
                "length."
            )
        )
    return said


def _differences(needle: Needle, pooled: dict[str, Any]) -> dict[str, str]:
    rows = pooled["rows"]
    trained = max((run.train_length or 0 for run in needle.runs), default=0)
    parts = [
        f"{text.cell(row['difference'], 'difference')} at {text.length_label(row['length'])}"
        for row in rows
        if row["length"] > trained
    ]
    if not parts:
        return _plain("No length beyond the training length was tested.")
    decided = [row for row in rows if row["length"] > trained and row["p_holm"] < 0.05]
    verdict = (
        f"Of these, {_join([text.length_label(row['length']) for row in decided])} differ from zero (Holm-corrected p "
        "below 0.05)."
        if len(decided) > 1
        else f"Only at {text.length_label(decided[0]['length'])} does it differ from zero (Holm-corrected p below "
        f"0.05)."
        if decided
        else "At none of these lengths does the difference over seeds stand out from zero (Holm-corrected p at least "
        "0.05)."
    )
    num_seeds = rows[0]["num_seeds"]
    return {
        "tone": "finding",
        "text": f"QED minus GDN-2, mean over {num_seeds} seeds in points with its 95 % interval: {'; '.join(parts)}. "
        f"{verdict}",
    }


def _plain(sentence: str) -> dict[str, str]:
    return {"tone": "plain", "text": sentence}


def _caution(sentence: str) -> dict[str, str]:
    return {"tone": "caution", "text": sentence}


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _span(values: set[Any]) -> str:
    low, high = min(values), max(values)
    return text.count(low) if text.count(low) == text.count(high) else f"{text.count(low)} to {text.count(high)}"

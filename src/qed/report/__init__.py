"""Run folders to tables, figures and one self-contained page. Never computes a score and never imports torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .page import report
    from .runs import find_runs

__all__ = ["find_runs", "report"]


def __getattr__(name: str) -> Any:
    # Drawing and statistics are slow to import, and `qed.report.explain` needs neither.
    if name == "report":
        from .page import report

        return report
    if name == "find_runs":
        from .runs import find_runs

        return find_runs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Run folders to tables, figures and one self-contained page. Never computes a score and never imports torch."""

from .page import report
from .runs import find_runs

__all__ = ["find_runs", "report"]

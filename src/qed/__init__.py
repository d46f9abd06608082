"""qed: query-aware linear attention."""

__version__ = "0.1.0"

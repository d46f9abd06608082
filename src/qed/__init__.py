"""qed: query-aware linear attention.

Importing this package lets Transformers' Auto classes load model type ``qed``, without importing Transformers.
"""

from qed.registration import register_when_imported

__version__ = "0.1.0"

register_when_imported()

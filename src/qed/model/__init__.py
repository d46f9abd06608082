"""Hidden states to the operator's inputs, and a causal language model that Transformers loads.

Names are imported on first use: a config can be registered while Transformers itself is still being imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qed.model.config import QEDConfig
    from qed.model.mixer import Padding, QEDMixer
    from qed.model.modeling import QEDForCausalLM, QEDModel, no_weight_decay

__all__ = ["Padding", "QEDConfig", "QEDForCausalLM", "QEDMixer", "QEDModel", "no_weight_decay"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    room = {"QEDConfig": "config", "QEDMixer": "mixer", "Padding": "mixer"}.get(name, "modeling")
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)

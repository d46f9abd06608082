"""The model's configuration, registered with ``AutoConfig`` when this module is imported."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from qed.config import nearest
from qed.ops import ARMS, BACKENDS

_WIDTHS = ("hidden_size", "head_dim", "value_head_dim", "intermediate_size")
_COUNTS = ("vocab_size", "num_hidden_layers", "num_heads")
_NUMBERS = ("norm_eps", "lambda_max", "theta_init", "strength_scale", "initializer_range")
# Keys that Transformers itself writes into a config file beside the fields.
_OTHERS = ("model_type", "quantization_config", "auto_map")


class QEDConfig(PreTrainedConfig):
    """A decoder of mixers and SwiGLU MLPs; the defaults are the paper's 340M model (section 5).

    There is no ``max_position_embeddings``: the state has one size at every length. Tools that look for one fall back
    to a guess: lm-eval takes the tokenizer's ``model_max_length`` or 2048 and cuts prompts on the left, so give it
    ``max_length``.

    Args:
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the residual stream.
        num_hidden_layers: blocks, each one mixer and one MLP.
        num_heads: heads of a mixer (``num_attention_heads`` is the same value).
        head_dim: K, key dimension of a head; also the rank of the decay and output-gate projections.
        value_head_dim: V, value dimension of a head; ``head_dim`` when ``None``.
        intermediate_size: width of the MLP. The paper does not state it; 2496 gives 341M parameters.
        conv_size: width of the causal depthwise convolution, at least 2.
        norm_eps: added to the mean of squares in every RMSNorm.
        arm: a name in ``qed.ops.ARMS``.
        lambda_max: upper bound of the strength, ``lambda = lambda_max * sigmoid(theta)``.
        theta_init: initial theta of every head.
        strength_scale: the ``s`` of the strength sweep: every lambda is multiplied by it. May be set at load time,
            ``from_pretrained(folder, strength_scale=0.5)``, or on a loaded model's config; read at every forward pass.
        random_direction_seed: seed of the fixed unit vectors of arms whose direction is random.
        initializer_range: standard deviation of linear and embedding weights.
        A_range, dt_range: the decay starts at ``-A * dt`` a token, ``A`` drawn uniformly for each head and ``dt``
            log-uniformly for each channel.
        tie_word_embeddings: share the embedding with the output head.
        use_cache: keep the recurrent state in ``generate`` and in evaluation mode.
        layer_types: what Transformers' caches read; every layer is ``"linear_attention"``.
        backend: a name in ``qed.ops.BACKENDS``, or ``None`` to choose by device.

    Raises:
        ValueError: unknown arm, backend or key (the nearest right name is given), or a value out of range.
    """

    model_type = "qed"
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 6
    head_dim: int = 128
    value_head_dim: int | None = None
    intermediate_size: int = 2496
    conv_size: int = 4
    norm_eps: float = 1e-6
    arm: str = "qed"
    lambda_max: float = 0.25
    theta_init: float = -2.0
    strength_scale: float = 1.0
    random_direction_seed: int = 0
    initializer_range: float = 0.02
    A_range: list[float] | tuple[float, ...] = (1.0, 16.0)
    dt_range: list[float] | tuple[float, ...] = (0.001, 0.1)
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    layer_types: list[str] | None = None
    backend: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for key in kwargs:
            if key in vars(self) and key not in _OTHERS and not key.startswith("_"):
                raise ValueError(nearest("model config key", key, [field.name for field in dataclasses.fields(self)]))
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.layer_types is None:
            self.layer_types = ["linear_attention"] * int(self.num_hidden_layers)
        self._check()
        # Auto classes look a model up by the type of a config that exists, so this is the latest moment to register it.
        importlib.import_module("qed.model.modeling")

    def _check(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(nearest("arm", str(self.arm), ARMS))
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(nearest("backend", str(self.backend), BACKENDS))
        least_values = {**dict.fromkeys(_WIDTHS + _COUNTS, 1), "conv_size": 2, "random_direction_seed": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
                raise ValueError(f"{name} must be a number; got {value!r}")
        for name in ("A_range", "dt_range"):
            value = getattr(self, name)
            if len(value) != 2 or not 0 < value[0] <= value[1]:
                raise ValueError(f"{name} must be two numbers, 0 < low <= high; got {value!r}")
        for name in ("norm_eps", "initializer_range"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)!r}")
        if self.layer_types != ["linear_attention"] * self.num_hidden_layers:
            raise ValueError(f"layer_types must be 'linear_attention' in every layer; got {self.layer_types}")


AutoConfig.register("qed", QEDConfig, exist_ok=True)

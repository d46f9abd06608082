"""A causal language model of mixers and SwiGLU MLPs for Transformers 5."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from qed.config import nearest
from qed.model.config import QEDConfig
from qed.model.mixer import Padding, QEDMixer, RMSNorm
from qed.ops import check_cu_seqlens, silu_product

logger = logging.get_logger(__name__)

# The field that outputs keep the cache in; generate passes the cache back under the same name.
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
IGNORED = -100
KEYWORDS = ("output_hidden_states", "output_attentions", "return_dict", "num_items_in_batch", "cu_seq_lens_q")
# What Transformers' flattening collator sends beside cu_seq_lens_q; it says nothing more.
REDUNDANT_KEYWORDS = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "is_causal")


def no_weight_decay(name: str) -> bool:
    """True for the parameters that take no weight decay: decay (A_log, dt_bias), theta, norms and biases."""
    return name.endswith(("A_log", "dt_bias", "theta", "bias", "norm.weight"))


class QEDMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: QEDConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))


class QEDLayer(GradientCheckpointingLayer):
    """Mixer and MLP, each after an RMSNorm and added to the residual stream."""

    def __init__(self, config: QEDConfig, layer_idx: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = QEDMixer(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = QEDMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        padding: Padding | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        mixed = self.mixer(self.mixer_norm(hidden_states), cache=cache, padding=padding, cu_seqlens=cu_seqlens)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class QEDPreTrainedModel(PreTrainedModel):
    """What loading, saving and generation need to know.

    A 16-bit load keeps decay, theta and the random direction in float32. Train from a float32 load under autocast or
    FSDP2's mixed-precision policy: FSDP2 wants one dtype in a group, and the decay is computed in float32 either way.
    """

    config: QEDConfig
    config_class = QEDConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["QEDLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = {"A_log", "dt_bias", "theta", "random_direction"}  # noqa: RUF012
    _can_record_outputs = {"hidden_states": QEDLayer}  # noqa: RUF012
    # Refuses assisted generation: a recurrent state cannot be rolled back.
    _is_stateful = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, QEDMixer):
            module.reset_parameters()


class QEDModel(QEDPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: QEDConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(QEDLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states ``[B, T, D]`` after the final norm.

        Args:
            input_ids: ``[B, T]``, or ``inputs_embeds`` ``[B, T, D]``.
            attention_mask: ``[B, >= T]``, zero at pads, which may be anywhere; the last T columns are read. Pads change
                no state. A step of one token is never a pad.
            position_ids: the model has no positions; where they stop rising by one, a new packed document begins
                (batch of one, no cache). Not read under ``torch.compile``: pass ``cu_seqlens`` there.
            cache: ``DynamicCache(config=model.config)``; ``past_key_values`` is the same under its older name.
            use_cache: return a cache; by default ``config.use_cache``, and not in training.
            cu_seqlens: ``[N + 1]`` offsets of documents packed into a batch of one; nothing passes between documents
                and no cache is returned. ``cu_seq_lens_q`` is the same.

        Raises:
            ValueError: arguments that contradict one another. TypeError: a keyword that the model does not know.
        """
        _check_keywords(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        cu_seqlens = _documents(cu_seqlens, kwargs.get("cu_seq_lens_q"), position_ids, attention_mask)
        cache = self._cache(cache, past_key_values, use_cache, cu_seqlens)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        padding = _padding(attention_mask, hidden_states)
        if cu_seqlens is not None:
            _check_packing(cu_seqlens, hidden_states, padding)
            cu_seqlens = cu_seqlens.to(hidden_states.device)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cache=cache, padding=padding, cu_seqlens=cu_seqlens)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE_FIELD: cache})  # type: ignore[arg-type]

    def _cache(self, cache: Cache | None, older: Cache | None, use_cache: bool | None, cu_seqlens: Any) -> Cache | None:
        if cache is not None and older is not None and cache is not older:
            raise ValueError("cache and past_key_values are two names of one argument; give one of them")
        cache = older if cache is None else cache
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens packs whole documents and cannot continue from a cache")
            if checkpointing:
                raise ValueError("gradient checkpointing would update the given cache twice; turn one of them off")
            if len(cache.layers) != len(self.layers):
                raise ValueError("the cache must be built for this model: DynamicCache(config=model.config)")
            if any(getattr(layer, "record_past", False) for layer in cache.layers):
                raise ValueError("the cache records its past to be cropped; a recurrent state cannot be rolled back")
            return cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        elif use_cache and checkpointing:
            logger.warning_once("use_cache=True does not go with gradient checkpointing; no cache is kept")
            use_cache = False
        return DynamicCache(config=self.config) if use_cache and cu_seqlens is None else None


class QEDForCausalLM(QEDPreTrainedModel, GenerationMixin):
    """The model with an output head, for training and ``generate``."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: QEDConfig) -> None:
        super().__init__(config)
        self.model = QEDModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """``generate`` asks for masks in advance for caches that compile; the 2-D mask is all the model reads."""
        return attention_mask

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        # Before 5.24 generate asks a cache called past_key_values for its length, which linear layers do not keep.
        if CACHE_FIELD != "cache" and model_kwargs.get("cache") is not None:
            model_kwargs[CACHE_FIELD] = model_kwargs.pop("cache")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        if CACHE_FIELD in model_kwargs:
            model_kwargs["cache"] = model_kwargs.pop(CACHE_FIELD)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, vocab]`` and, with labels, the next-token loss; other arguments as in :class:`QEDModel`.

        Args:
            labels: ``[B, T]`` aligned with the input, -100 where ignored. The first token of a packed document is
                never a target. The loss is a mean over targets, or their sum over ``num_items_in_batch``; without any
                target it is 0 with zero gradient.
            logits_to_keep: only the last so many positions (0: all), or their indices.
        """
        cu_seqlens = _documents(cu_seqlens, kwargs.get("cu_seq_lens_q"), position_ids, attention_mask)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden_states = hidden_states[:, logits_to_keep]
        elif logits_to_keep:
            hidden_states = hidden_states[:, -logits_to_keep:]
        logits = self.lm_head(hidden_states)
        loss = None if labels is None else self._loss(logits, labels, cu_seqlens, kwargs.get("num_items_in_batch"))
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE_FIELD: outputs.get(CACHE_FIELD)}
        )

    def _loss(self, logits: Tensor, labels: Tensor, cu_seqlens: Tensor | None, num_items: Any) -> Tensor:
        if logits.shape[:2] != labels.shape:
            raise ValueError(f"labels must be [B, T] = {list(logits.shape[:2])} like logits; got {list(labels.shape)}")
        labels = labels.to(logits.device)
        if cu_seqlens is not None:
            labels = labels.index_fill(1, cu_seqlens[:-1].to(logits.device, torch.int64), IGNORED)
        if num_items is None:
            num_items = (labels[:, 1:] != IGNORED).sum()
        num_items = torch.as_tensor(num_items, device=logits.device).clamp(min=1)
        return self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items)


def _check_keywords(keywords: dict[str, Any]) -> None:
    for key, value in keywords.items():
        if key not in (*KEYWORDS, *REDUNDANT_KEYWORDS):
            raise TypeError(
                nearest("keyword of the model", key, (*inspect.signature(QEDForCausalLM.forward).parameters, *KEYWORDS))
            )
        if key == "output_attentions" and value:
            raise ValueError("output_attentions: a recurrence has no attention matrix; see qed.probes")


def _documents(
    cu_seqlens: Tensor | None, older: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None
) -> Tensor | None:
    """Offsets of packed documents, read from positions when they are not given."""
    if cu_seqlens is not None or older is not None:
        return older if cu_seqlens is None else cu_seqlens
    if position_ids is None or torch.compiler.is_compiling() or position_ids.shape[-1] == 1:
        return None
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    has_pads = False
    if attention_mask is not None and attention_mask.ndim == 2:
        real = attention_mask[:, -position_ids.shape[1] :] != 0
        starts = starts & real[:, 1:] & real[:, :-1]
        has_pads = not bool(real.all())
    if not bool(starts.any()):
        return None
    if has_pads or len(starts) != 1:
        raise ValueError("position_ids restart, which packs documents: that needs a batch of one without pads")
    ends = torch.tensor([0, position_ids.shape[1]], device=starts.device)
    return torch.cat([ends[:1], starts[0].nonzero()[:, 0] + 1, ends[1:]])


def _check_packing(cu_seqlens: Tensor, hidden_states: Tensor, padding: Padding | None) -> None:
    if padding is not None:
        raise ValueError("attention_mask marks pads and cu_seqlens packs documents; give one of them")
    if hidden_states.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into a batch of one; got B = {hidden_states.shape[0]}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be [N + 1] int32 or int64; got {list(cu_seqlens.shape)} {cu_seqlens.dtype}")
    if not torch.compiler.is_compiling():
        check_cu_seqlens(cu_seqlens, hidden_states.shape[1])


def _padding(attention_mask: Tensor | None, hidden_states: Tensor) -> Padding | None:
    """The pads among the last T columns of a 2-D mask; ``None`` without any."""
    B, T = hidden_states.shape[:2]
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(f"attention_mask must be [B, >= T] with B, T = {B}, {T}; got {list(attention_mask.shape)}")
    if T == 1:
        return None
    attention_mask = attention_mask[:, -T:].to(hidden_states.device)
    if not torch.compiler.is_compiling() and bool((attention_mask != 0).all()):
        return None
    return Padding.from_mask(attention_mask)


AutoModel.register(QEDConfig, QEDModel, exist_ok=True)
AutoModelForCausalLM.register(QEDConfig, QEDForCausalLM, exist_ok=True)

"""Hooks on the mixers' projections: they hand activations on and return nothing, so outputs keep their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qed.model.mixer import QEDMixer

PROJECTIONS = {"qkv": "qkv_proj", "gates": "gates_proj", "decay": "decay_proj"}


@dataclass(frozen=True)
class Activations:
    """What one call of a mixer projected: ``qkv`` ``[B, T, 2HK + HV]`` before the convolution, ``gates``
    ``[B, T, HK + HV]`` (erase, write) and ``decay`` ``[B, T, HK]`` before their activations.
    """

    qkv: Tensor
    gates: Tensor
    decay: Tensor


Receiver = Callable[[int, QEDMixer, Activations], None]


def find_mixers(model: nn.Module) -> list[QEDMixer]:
    """The mixers in the order of their layers; ``ValueError`` for a model without any."""
    mixers = [module for module in model.modules() if isinstance(module, QEDMixer)]
    if not mixers:
        raise ValueError(f"probes look into the mixers of this package's models; {type(model).__name__} has none")
    return sorted(mixers, key=lambda mixer: mixer.layer_idx)


@contextmanager
def observe(model: nn.Module, receive: Receiver) -> Iterator[None]:
    """Call ``receive(layer, mixer, activations)`` after every mixer's forward inside the block; no hook is left after.

    Raises ``ValueError`` in a forward pass with pads or packed documents, whose positions are not the tokens'.
    """
    handles: list[Any] = []
    try:
        for layer, mixer in enumerate(find_mixers(model)):
            handles += _attach(layer, mixer, receive)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attach(layer: int, mixer: QEDMixer, receive: Receiver) -> list[Any]:
    caught: dict[str, Tensor] = {}

    def catch(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            caught[name] = output.detach()

        return hook

    def done(module: nn.Module, given: Any, keywords: dict[str, Any], output: Tensor) -> None:
        if keywords.get("padding") is not None or keywords.get("cu_seqlens") is not None:
            raise ValueError("probes take whole sequences of one length: no attention_mask with pads, no cu_seqlens")
        activations = Activations(**caught)
        caught.clear()
        receive(layer, mixer, activations)

    handles: list[Any] = [
        mixer.get_submodule(module).register_forward_hook(catch(name)) for name, module in PROJECTIONS.items()
    ]
    return [*handles, mixer.register_forward_hook(done, with_kwargs=True)]

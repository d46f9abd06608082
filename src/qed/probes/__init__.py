"""Measurements of a loaded model's inside, without changing it (see docs/probes.md)."""

from qed.probes.commands import probe
from qed.probes.hooks import Activations, observe
from qed.probes.measure import ProbeConfig, measure

__all__ = ["Activations", "ProbeConfig", "measure", "observe", "probe"]

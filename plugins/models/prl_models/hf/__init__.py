"""Any transformers model, unmodified: its attention is replaced through transformers' own registry."""

from prl_models.hf.export import export_hf
from prl_models.hf.provider import HfModel, HfProvider

__all__ = ["HfModel", "HfProvider", "export_hf"]

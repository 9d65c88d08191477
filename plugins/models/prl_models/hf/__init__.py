"""Any transformers model, unmodified: its attention is replaced through transformers' own registry.

provider.py   loading and the model
fitness.py    what is refused, and the trial of a loaded model
export.py     writing a Hugging Face folder
"""

from prl_models.hf.export import export_hf
from prl_models.hf.provider import HfModel, HfProvider

__all__ = ["HfModel", "HfProvider", "export_hf"]

"""A Llama with unbounded memory: importing it registers the model with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import FoldedCache
from .configuration import CondenseConfig
from .conversion import to_stock
from .modeling import CondenseForCausalLM, CondenseModel

AutoConfig.register(CondenseConfig.model_type, CondenseConfig)
AutoModel.register(CondenseConfig, CondenseModel)
AutoModelForCausalLM.register(CondenseConfig, CondenseForCausalLM)

__version__ = "0.1.0"
__all__ = ["CondenseConfig", "CondenseForCausalLM", "CondenseModel", "FoldedCache", "to_stock"]

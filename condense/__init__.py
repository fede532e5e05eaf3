"""A Llama with unbounded memory: importing it registers the model with transformers' Auto classes."""

import gc

_collecting = gc.isenabled()
gc.disable()  # torch and transformers leave no garbage, and looking for it takes a fourth of their import
try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .cache import FoldedCache
    from .configuration import CondenseConfig
    from .conversion import to_stock
    from .modeling import CondenseForCausalLM, CondenseModel
    from .version import __version__ as __version__
finally:
    if _collecting:
        gc.enable()

AutoConfig.register(CondenseConfig.model_type, CondenseConfig)
AutoModel.register(CondenseConfig, CondenseModel)
AutoModelForCausalLM.register(CondenseConfig, CondenseForCausalLM)

__all__ = ["CondenseConfig", "CondenseForCausalLM", "CondenseModel", "FoldedCache", "to_stock"]

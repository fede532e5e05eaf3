"""A Llama with unbounded memory: importing it registers the model with transformers' Auto classes."""

import gc

_collecting = gc.isenabled()
gc.disable()  # torch and transformers leave no garbage, and looking for it takes a fourth of their import
try:
    import transformers

    from .configuration import CondenseConfig
    from .hub.conversion import to_stock
    from .hub.registration import register
    from .hub.tested_releases import warn_if_untested
    from .modeling import CondenseForCausalLM, CondenseModel
    from .state.cache import FoldedCache
    from .version import __version__ as __version__
finally:
    if _collecting:
        gc.enable()

warn_if_untested(transformers.__version__)
register(CondenseConfig, CondenseForCausalLM, CondenseModel)

__all__ = ["CondenseConfig", "CondenseForCausalLM", "CondenseModel", "FoldedCache", "to_stock"]

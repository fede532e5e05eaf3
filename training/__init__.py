"""Training from recipes, with the Trainer of transformers and the DeepSpeed launcher."""

from logging import ERROR, getLogger

# PEFT, which the Trainer imports, imports bitsandbytes. It warns of kernels for CPUs that nothing here uses.
getLogger("bitsandbytes.backends.cpu").setLevel(ERROR)

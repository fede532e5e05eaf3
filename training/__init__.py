"""Training from recipes, with the Trainer of transformers and the DeepSpeed launcher."""

from logging import ERROR, getLogger

# The Trainer imports PEFT, and that bitsandbytes, which warns of kernels for CPUs that no training here uses.
getLogger("bitsandbytes.backends.cpu").setLevel(ERROR)

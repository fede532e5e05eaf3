"""What ranks of tests import: the server that forks them imports it once, and leaves it out of garbage collections."""

import gc

gc.disable()  # imports leave no garbage, and looking for it takes a second

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401  # its decorators import torch's compiler
import pytest  # noqa: E402, F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import condense.training.train  # noqa: E402, F401

from . import runs  # noqa: E402, F401

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, of all models
gc.freeze()
gc.enable()

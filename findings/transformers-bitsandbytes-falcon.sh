#!/usr/bin/env bash
# A stock Falcon loaded in 4 or 8 bits is not quantized, and says that it is.
#
# Versions: transformers 5.24.0 (5.23.0 does the same), bitsandbytes 0.50.2, accelerate 1.15.0, torch 2.13.0, Python
#           3.11, CPU; seen on 28 November 2026.
# Seen:     transformers replaces only modules whose type is exactly `nn.Linear`. Falcon's own layers are a subclass
#           of it (`FalconLinear`), so none is replaced: the weights keep their size and the logits don't move, while
#           `is_quantized` and `is_loaded_in_4bit` are True and the config names bitsandbytes. The one line in the log
#           is about "eetq", a library that isn't installed. Where a model mixes both kinds of layers (here a Llama
#           whose MLP uses a subclass), part of it stays in full precision and no line appears at all.
# Expected: every linear layer is quantized, as in a Llama of the same size, or the load fails. The documentation asks
#           for nothing but `torch.nn.Linear` layers, which a subclass is. transformers 5.4.0 quantizes all eight
#           layers.
# Matters:  a Falcon "in 4 bits" takes the memory of the unquantized one, QLoRA trains beside unquantized weights, and
#           the model itself denies it: only counting modules or bytes shows it.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0
env/bin/pip install -q transformers==5.24.0 bitsandbytes==0.50.2 accelerate==1.15.0

HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 env/bin/python -W ignore - <<'PYTHON'
import logging
import sys

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import nn
from transformers import BitsAndBytesConfig, FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()
torch.set_grad_enabled(False)
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)


class Projection(nn.Linear):
    """Is a linear layer in every respect."""


class MixedLlama(LlamaForCausalLM):
    """Has subclassed layers in its MLPs and plain ones in its attention."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            for name, linear in list(layer.mlp.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(layer.mlp, name, Projection(linear.in_features, linear.out_features, bias=False))


sizes = dict(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
ids = torch.arange(16)[None]
seen = {}


def load(kind, config, bits):
    """Saves a random model, loads it in full precision and quantized, and prints what differs."""
    torch.manual_seed(0)
    path = kind.__name__
    kind(config).save_pretrained(path)
    full = kind.from_pretrained(path, dtype=torch.float32)
    warnings.clear()
    quantization = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = kind.from_pretrained(path, dtype=torch.float32, quantization_config=quantization)
    quantized = sum(isinstance(module, (Linear4bit, Linear8bitLt)) for module in model.modules())
    linear = sum(isinstance(module, nn.Linear) for module in model.modules()) - 1  # the head stays as it is
    says = getattr(model, f"is_loaded_in_{bits}bit"), model.config.quantization_config.quant_method.value
    moved = (model(ids).logits - full(ids).logits).abs().max().item()
    print(
        f"{kind.__name__} in {bits} bits: {quantized} of {linear} layers quantized, "
        f"{full.get_memory_footprint()} -> {model.get_memory_footprint()} bytes, logits moved by {moved:.3g}, "
        f"is_quantized {model.is_quantized}, is_loaded_in_{bits}bit {says[0]}, config says {says[1]}"
    )
    print("  log:", warnings or "nothing")
    seen[kind.__name__, bits] = quantized, linear, moved > 0, any("eetq" in line for line in warnings)


llama = LlamaConfig(intermediate_size=256, **sizes)
load(LlamaForCausalLM, llama, 4)
load(FalconForCausalLM, FalconConfig(**sizes), 4)
load(FalconForCausalLM, FalconConfig(**sizes), 8)
load(MixedLlama, llama, 4)

described = {
    ("LlamaForCausalLM", 4): (14, 14, True, False),
    ("FalconForCausalLM", 4): (0, 8, False, True),
    ("FalconForCausalLM", 8): (0, 8, False, True),
    ("MixedLlama", 4): (8, 14, True, False),
}
sys.exit(0 if seen == described else f"Changed: expected {described}")
PYTHON

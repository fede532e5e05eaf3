#!/usr/bin/env bash
# transformers asks for a PEFT that nobody can install.
#
# Versions: transformers 5.24.0, peft 0.21.2, torch 2.13.0, Python 3.11; seen on 28 November 2026.
# Seen:     `model.add_adapter(LoraConfig(...))` raises a ValueError that asks for PEFT 0.22.0 or newer, while 0.21.2
#           is the newest release in the package index. PEFT's own `get_peft_model` adapts the same model with the
#           same configuration without complaint.
# Expected: the newest releases of both packages work together, as pip installs them and as the docstring of
#           `PeftAdapterMixin` says (PEFT 0.20.0 or newer).
# Matters:  the error's remedy can't be followed; loading, adding and switching adapters through transformers is
#           closed to everyone who upgrades. transformers 5.23.0 takes peft 0.21.2.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0
env/bin/pip install -q transformers==5.24.0 peft==0.21.2

if env/bin/pip download -q --no-deps -d newer 'peft>=0.22.0' 2> pip.log; then
  echo "Changed: the package index has PEFT 0.22.0 or newer now."
  exit 1
fi
if ! grep -q 'No matching distribution found' pip.log; then
  cat pip.log
  exit 2
fi
echo "pip: no release of peft satisfies >=0.22.0"

HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 env/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import PeftAdapterMixin

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
lora = LoraConfig(target_modules=["q_proj"])

print("docstring:", next(line.strip() for line in PeftAdapterMixin.__doc__.splitlines() if "PEFT version" in line))
try:
    LlamaForCausalLM(LlamaConfig(**sizes)).add_adapter(lora)
    message = ""
except ValueError as error:
    message = str(error)
print("add_adapter:", message or "worked")

adapted = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), lora)
logits = adapted(input_ids=torch.arange(5)[None]).logits
print("get_peft_model: logits of shape", tuple(logits.shape))

sys.exit(0 if "0.22.0" in message else "Changed: add_adapter no longer asks for PEFT 0.22.0.")
PYTHON

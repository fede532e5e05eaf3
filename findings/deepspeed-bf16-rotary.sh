#!/usr/bin/env bash
# With bf16, DeepSpeed up to 0.19.1 rounds a stock Llama's rotary frequencies to bfloat16.
#
# Versions: DeepSpeed 0.19.1 (0.19.0 does the same) and 0.19.2 for comparison, transformers 5.24.0, torch 2.13.0,
#           Python 3.11, one process on a CPU with gloo (needs a C++ compiler); seen on 28 November 2026.
# Seen:     `deepspeed.initialize` with `"bf16": {"enabled": true}` casts all buffers of the module, not only its
#           parameters. The rotary table `inv_freq` is then bfloat16, and within 4,096 positions the cosines that
#           attention uses are off by up to 1.6. Under 0.19.2 the table stays float32 and the error is 0.
# Expected: the table stays in float32, where transformers keeps it on purpose, also when the model is loaded in
#           bfloat16; the configuration file has no word on buffers in these versions.
# Matters:  the run trains a model with other positions than the one that anyone loads afterwards from its checkpoint,
#           since the table isn't saved; the longer the text, the larger the difference. Two machines whose DeepSpeed
#           differs in its last digit train different models.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0
env/bin/pip install -q transformers==5.24.0 setuptools wheel

for version in 0.19.1 0.19.2; do
  env/bin/pip install -q --no-build-isolation "deepspeed==$version"
  HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 TORCH_EXTENSIONS_DIR="$folder/operators" DS_ACCELERATOR=cpu \
    PATH="$folder/env/bin:$PATH" env/bin/python -W ignore - 2> log.txt <<'PYTHON' || { tail -20 log.txt; exit 1; }
import os
import socket
import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
deepspeed.init_distributed("gloo")

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096, **sizes))
position_ids = torch.arange(4096)[None]


def cosines():
    """Returns the cosines that attention uses, in float32, of shape (1, 4096, 64)."""
    return model.model.rotary_emb(torch.zeros(1), position_ids)[0].detach().clone()


before = cosines()
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
dtype, error = model.model.rotary_emb.inv_freq.dtype, (cosines() - before).abs().max().item()
print(f"DeepSpeed {deepspeed.__version__}: inv_freq is {dtype}, cosines are off by up to {error:.2f}")
torch.distributed.destroy_process_group()

old = deepspeed.__version__.startswith("0.19.1")
unchanged = (dtype is torch.bfloat16 and error > 1) if old else (dtype is torch.float32 and error == 0)
sys.exit(0 if unchanged else "Changed: the table's type is not the one described.")
PYTHON
done

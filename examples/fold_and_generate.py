"""Folds a checkpoint, shows that its state does not grow with the text, and generates.

python examples/fold_and_generate.py [FOLDER or hub id of a Llama, Mistral, Qwen2 or Qwen3]
"""

import sys

import torch
from transformers import AutoTokenizer

from condense import CondenseForCausalLM, FoldedCache

source = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M"
tokenizer = AutoTokenizer.from_pretrained(source)
model = CondenseForCausalLM.from_pretrained(source, segment_length=256).eval()

for num_tokens in (512, 4096):
    ids = torch.randint(len(tokenizer), (1, num_tokens))
    cache = FoldedCache(model.config)
    with torch.no_grad():
        model(ids, cache=cache, logits_to_keep=1)
    print(f"after {num_tokens:,} tokens the state has {cache.num_bytes:,} bytes")

prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32, do_sample=False)[0], skip_special_tokens=True))

model.save_pretrained("folded")  # with a card that says how to load it
tokenizer.save_pretrained("folded")

"""Fine-tunes a folded model with transformers' Trainer, on a text file, with gradients through all segments of a text.

python examples/finetune_with_trainer.py TEXT.txt [FOLDER or hub id]
"""

import sys

import torch
from torch.utils.data import TensorDataset
from transformers import AutoTokenizer, Trainer, TrainingArguments

from condense import CondenseForCausalLM

text = sys.argv[1]
source = sys.argv[2] if len(sys.argv) > 2 else "HuggingFaceTB/SmolLM2-135M"
SEGMENT, SEGMENTS, TEXTS = 256, 8, 64

tokenizer = AutoTokenizer.from_pretrained(source)
model = CondenseForCausalLM.from_pretrained(source, segment_length=SEGMENT)

with open(text, encoding="utf-8") as file:
    ids = tokenizer(file.read(), return_tensors="pt", verbose=False).input_ids[0]
length = SEGMENT * SEGMENTS
texts = ids[: len(ids) // length * length].view(-1, length)[:TEXTS]
assert len(texts) > 0, f"{text} has {len(ids):,} tokens: pass a text of {length:,} or more"

arguments = TrainingArguments(
    "finetuned",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    learning_rate=6e-5,
    warmup_steps=2,
    num_train_epochs=1,
    gradient_checkpointing=True,  # by segments: memory does not grow with the length
    bf16=torch.cuda.is_available(),
    logging_steps=1,
    report_to="none",
)


def batch(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows_BN = torch.stack([row for (row,) in rows])
    return {"input_ids": rows_BN, "labels": rows_BN}


trainer = Trainer(model, arguments, train_dataset=TensorDataset(texts), data_collator=batch)
trainer.train()
trainer.save_model()
tokenizer.save_pretrained("finetuned")

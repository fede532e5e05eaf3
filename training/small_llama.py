"""A small Llama with random weights and a word-level tokenizer for it: no download, no corpus."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .data.passkey import PASSKEY_TEXTS
from .data.recall import RECALL_TEXTS

# For models that look words up; a large Llama has 0.02 and 10,000.
LOOKUP = {"initializer_range": 0.1, "rope_theta": 10.0}
TASKS: dict[str, tuple[list[str], dict[str, float]]] = {  # words of a task, and options of its model
    "passkey": (PASSKEY_TEXTS, {}),
    "recall": (RECALL_TEXTS, LOOKUP),
}

SPLIT = pre_tokenizers.Split(Regex(r"\d|\w+|[^\w\s]"), behavior="removed", invert=True)


def words_of(text: str) -> list[str]:
    """Returns the words, punctuation marks and digits of a text."""
    return [word for word, _ in SPLIT.pre_tokenize_str(text)]


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per word of `texts`, punctuation mark and digit."""
    parts = {part for text in texts for part in text.split()}  # deduplicated first: long texts repeat words
    words = sorted({*words_of(" ".join(parts)), *"0123456789"})
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = SPLIT
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def passkey_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(PASSKEY_TEXTS)


def small_llama(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    width: int = 64,
    layers: int = 2,
    initializer_range: float = 0.02,
    rope_theta: float = 10_000.0,
) -> LlamaForCausalLM:
    """Returns a Llama with random weights. Raises `ValueError` if four heads can't share the width, or without layers.

    `initializer_range` is the standard deviation of the weights; 0.02 is small for widths below 256. `rope_theta` is
    the base of the rotary frequencies; a small one lets a narrow head distinguish tokens up to ten positions away.
    """
    if width < 8 or width % 8 or layers < 1:
        raise ValueError(f"width={width}, layers={layers}: pass a multiple of 8, for four heads, and 1 or more.")
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width * 5 // 2,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2**20,
            initializer_range=initializer_range,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def save_small_llama(
    folder: Path, seed: int = 0, width: int = 64, layers: int = 2, task: str = "passkey"
) -> LlamaForCausalLM:
    """Writes a task's model to a folder as a Llama checkpoint, with a tokenizer that knows the task's words."""
    texts, options = TASKS[task]
    tokenizer = word_tokenizer(texts)
    model = small_llama(tokenizer, seed, width, layers, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model

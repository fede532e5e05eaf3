"""Models in GGUF files, llama.cpp's format: configuration, weights and tokenizer in one file.

transformers reads the weights, and dequantizes them. Its configuration of a file leaves out how rotary positions are
scaled, and its tokenizers split some texts in another way than the model's own, so both are made here.
"""

from .config import (
    HUB_OPTIONS,
    check_gguf,
    config_fields,
    find_file,
    generation_settings,
    split_source,
    stock_config,
    stored_dtype,
)
from .tokenizer import load_tokenizer

__all__ = [
    "HUB_OPTIONS", "check_gguf", "config_fields", "find_file", "generation_settings", "load_tokenizer", "split_source",
    "stock_config", "stored_dtype",
]  # fmt: skip

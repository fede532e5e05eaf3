"""Writes GGUF files of tiny stock models, as llama.cpp's converter does."""

import io

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL, USER_DEFINED, NORMAL = (int(kind) for kind in (
    gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL
))  # fmt: skip
SPECIAL = ("<|end|>", "<|turn|>", "<|pad|>")
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"
PROSE = (
    "In 1999  the crew of 12 sailed 3,400 miles; by 2 o'clock they'd eaten  7 of 88 loaves.\n\n   42 men, it's said,\n"
    "\tcame back. f(1,\n  22) = |  12 |   7 |  x² is 3½ naïve café  9\n    9 lives"
)


def byte_level_tokenizer(vocab_size=320):
    """Returns a tokenizer with the pre-tokenizer of SmolLM: each digit apart, then GPT-2's rule."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(io.StringIO(PROSE * 20), trainer)
    return tokenizer


def tokenizer_fields(tokenizer, **changes):
    """Returns the metadata of a byte-level tokenizer."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def config_fields(config, arch):
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }


def add_field(writer, name, value):
    """Adds a metadata field with the type that llama.cpp's converter gives it."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def stored_tensors(model, arch):
    """Returns the model's weights under their names in a GGUF file; queries and keys of a Llama have another order."""
    config = model.config
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, found = gguf.get_tensor_name_map(key, config.num_hidden_layers), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem[-6:])
        tensor = tensor.float()
        if heads and arch == "llama":
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        found[f"{names.get_name(stem)}.{suffix}"] = tensor.contiguous().numpy()
    return found


def write_gguf(path, model, tokenizer, quantization=None, arch="llama", tensors=None, **fields):
    """Writes a model and the metadata of a tokenizer; matrices are quantized where `quantization` says how."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("A tiny model")
    given = {f"{arch}.{name}": value for name, value in config_fields(model.config, arch).items()}
    for name, value in (given | tokenizer | fields).items():
        if value is not None:
            add_field(writer, name, value)
    for name, array in (stored_tensors(model, arch) | (tensors or {})).items():
        if quantization is not None and array.ndim == 2:
            kind = getattr(gguf.GGMLQuantizationType, quantization)
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stock_model(model_class, **fields):
    """Returns a model of random weights whose sizes GGUF blocks of 32 numbers divide."""
    fields = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rope_theta": 10000.0,
        "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    } | fields  # fmt: skip
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model

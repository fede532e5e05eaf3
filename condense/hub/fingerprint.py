"""Tells a model from any other by the files that its outputs depend on."""

import hashlib
from pathlib import Path

from huggingface_hub import hf_hub_download

from ..gguf_files.header import read_header
from .loading import check_source

# Unlike logs and cards.
SETTINGS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*.tiktoken", "chat_template*",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def fingerprint(source: str, weights: bool = True) -> str:
    """Returns a hash of a model's GGUF file, or the files in its folder, wherever they are; for a model on the hub, its
    id and its commit.

    Without `weights`, only configuration and tokenizer count. Raises `ValueError` as `check_source` does.
    """
    check_source(source, with_weights=False)
    folder, patterns = Path(source), (*SETTINGS, *(WEIGHTS if weights else ()))
    if folder.is_file():
        return _of_gguf(folder, weights)
    if not folder.is_dir():
        return f"{source}@{Path(hf_hub_download(source, 'config.json')).parent.name}"
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _of_gguf(path: Path, weights: bool) -> str:
    with path.open("rb") as file:
        digest = (
            hashlib.file_digest(file, "sha256") if weights else hashlib.sha256(file.read(read_header(path).num_bytes))
        )
    return digest.hexdigest()[:16]

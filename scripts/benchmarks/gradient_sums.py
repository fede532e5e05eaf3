"""Measures errors of gradients in bfloat16, summed over segments by autograd or by condense.ops.shared_weights.

    python -m scripts.benchmarks.gradient_sums --model stories260K --data input.txt

Prints the table in docs/performance.md. The reference is the same model in float64. An error is the norm of the
difference of all gradients, relative to the norm of the reference.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoTokenizer

from condense import CondenseForCausalLM, modeling
from condense.eval.results import Table, hardware
from condense.eval.study.training import PAPERS_MEMORY
from condense.utils.files import read_text

SEGMENT_LENGTH = 16
ORDERS = {
    "in order": {},
    "in order, checkpoints": {"checkpoint_segments": 1},
    "waves of 8, checkpoints": {"checkpoint_segments": 8},
}


def gradients(model: CondenseForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Returns the gradients of all weights for a text [1, N], in float64."""
    model.train().zero_grad()
    model(ids, labels=ids).loss.backward()
    return torch.cat([weight.grad.double().flatten() for weight in model.parameters() if weight.grad is not None])


def errors(model: str, ids: torch.Tensor, options: dict) -> list[float]:
    """Returns the error of autograd's sums, and of sums in float32."""
    options_of_all = {"segment_length": SEGMENT_LENGTH, "attn_implementation": "sdpa", **PAPERS_MEMORY}
    rounded = CondenseForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options_of_all)
    exact = CondenseForCausalLM.from_pretrained(model, dtype=torch.float64, **options_of_all)
    exact.load_state_dict(rounded.state_dict())
    reference = gradients(exact, ids)
    rounded.config.schedule = "wavefront" if options.get("checkpoint_segments", 1) > 1 else "sequential"
    if options:
        rounded.gradient_checkpointing_enable({"use_reentrant": False, **options})
    with mock.patch.object(modeling, "share_weights", return_value=nullcontext()):
        by_autograd = gradients(rounded, ids)
    return [float((found - reference).norm() / reference.norm()) for found in (by_autograd, gradients(rounded, ids))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Llama")
    parser.add_argument("--data", type=Path, required=True, help="a text")
    parser.add_argument("--segments", type=int, nargs="+", default=[64, 1024])
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    num_tokens = SEGMENT_LENGTH * max(options.segments)
    text = read_text(options.data)[: 20 * num_tokens]
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :num_tokens]
    lines = []
    for segments in options.segments:
        for order, settings in ORDERS.items():
            found = errors(options.model, ids[:, : SEGMENT_LENGTH * segments], settings)
            lines.append([str(segments), order, *(f"{100 * error:.2f}" for error in found)])
    print(f"{hardware()}, torch {torch.__version__}, segments of {SEGMENT_LENGTH} tokens")
    columns = ["segments", "order", "sums by autograd [%]", "sums in float32 [%]"]
    print(Table("errors of gradients in bfloat16", columns, lines))


if __name__ == "__main__":
    main()

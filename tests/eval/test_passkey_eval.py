"""Retrieval is counted on what the model itself decodes."""

import csv
import json

import pytest
import torch
from transformers import LlamaForCausalLM

from condense import CondenseForCausalLM
from eval import passkey
from training.small_llama import passkey_tokenizer, small_llama


class Oracle:
    """Answers with the key of the prompt, except for prompts whose key holds a 7: then its last digit is wrong."""

    device = torch.device("cpu")

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, input_ids, attention_mask, max_new_tokens, **options):
        rows = []
        for ids in input_ids:
            key = [word for word in self.tokenizer.decode(ids).split() if word.isdigit()][:4]
            answer = [*key[:3], str((int(key[3]) + 1) % 10)] if "7" in key else key
            rows.append(torch.cat([ids, torch.tensor(self.tokenizer.convert_tokens_to_ids(answer))[:max_new_tokens]]))
        return torch.stack(rows)


def test_counts():
    tokenizer = passkey_tokenizer()
    cells = passkey.measure_passkey(Oracle(tokenizer), tokenizer, [100, 300], (0.0, 0.5), num_prompts=400, seed=1)
    assert [(cell["length"], cell["depth"]) for cell in cells] == [(100, 0), (100, 0.5), (300, 0), (300, 0.5)]
    for cell in cells:
        assert cell["total"] == 400 and cell["accuracy"] == cell["correct"] / 400
        assert abs(cell["accuracy"] - 0.9**4) < 0.1  # four standard deviations
    assert len({cell["correct"] for cell in cells}) > 1  # fresh prompts in each cell


@pytest.mark.parametrize("kind", [CondenseForCausalLM, LlamaForCausalLM])
def test_command_on_folded_and_stock_models(kind, tmp_path, capsys):
    tokenizer = passkey_tokenizer()
    small_llama(tokenizer, seed=0).save_pretrained(tmp_path / "llama")
    fields = {"segment_length": 40} if kind is CondenseForCausalLM else {}
    kind.from_pretrained(tmp_path / "llama", **fields).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--lengths", "80", "200", "--prompts", "3"]
    passkey.main([*arguments, "--longest-trained", "80", "--output", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "passkey.json").read_text())
    assert len(results["cells"]) == 10 and results["segment_length"] == fields.get("segment_length")
    rows = list(csv.DictReader((tmp_path / "out" / "passkey.csv").open()))
    assert [int(row["correct"]) for row in rows] == [cell["correct"] for cell in results["cells"]]
    assert (tmp_path / "out" / "passkey.png").stat().st_size > 5_000
    assert "200 tokens" in capsys.readouterr().out


def test_a_folded_model_answers_as_with_teacher_forcing(tmp_path):
    """Decoding from the state gives what one pass over prompt and answer gives, token by token."""
    tokenizer = passkey_tokenizer()
    small_llama(tokenizer, seed=3).save_pretrained(tmp_path)
    model = CondenseForCausalLM.from_pretrained(tmp_path, segment_length=40).eval()
    model.generation_config.eos_token_id = None
    passkeys = passkey.PasskeyTask(tokenizer).batch(4, 333, passkey.np.random.default_rng(0))
    output = model.generate(passkeys.prompt_ids_BN, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        logits = model(output, use_cache=False).logits
    assert torch.equal(logits[:, -5:-1].argmax(-1), output[:, -4:])


def test_lengths_below_the_frame_are_named():
    tokenizer = passkey_tokenizer()
    with pytest.raises(ValueError, match="needs 70 tokens"):
        passkey.measure_passkey(Oracle(tokenizer), tokenizer, [50], (0.0,), num_prompts=1)

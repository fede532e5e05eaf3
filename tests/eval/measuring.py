"""Helpers of measurement tests: commands, folded checkpoints, stopped measurements, models that follow a rule."""

from types import SimpleNamespace

import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import condense.cli.main
from condense import CondenseForCausalLM
from condense.state.cache_argument import CACHE
from tests.condense.models import PAPERS_MEMORY


def command(*words):
    """Returns what `condense WORDS` prints."""
    done = CliRunner().invoke(condense.cli.main.app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def save_folded(stock, folder, segment_length):
    """Writes a checkpoint folded without training into the paper's model, with its tokenizer; returns its folder."""
    CondenseForCausalLM.from_pretrained(stock, segment_length=segment_length, **PAPERS_MEMORY).save_pretrained(folder)
    AutoTokenizer.from_pretrained(stock).save_pretrained(folder)
    return folder


def stop_within(path, number, characters=20):
    """Cuts records off within a line, as a kill does. Returns the lines that there were."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:number]) + lines[number][:characters])
    return lines


class Writer:
    """A model that writes the words of `answer` after each prompt, and keeps the prompts and options."""

    device, config, generation_config = torch.device("cpu"), None, SimpleNamespace(eos_token_id=None)

    def __init__(self, tokenizer):
        self.tokenizer, self.asked, self.options = tokenizer, [], {}

    def generate(self, input_ids, attention_mask, **options):
        assert attention_mask.all() and not options["do_sample"]
        self.asked, self.options, rows = self.asked + input_ids.tolist(), options, []
        for ids in input_ids:
            said = torch.tensor(self.tokenizer.convert_tokens_to_ids(self.answer(ids)))
            rows.append(torch.cat([ids, said[: options["max_new_tokens"]]]))
        return SimpleNamespace(sequences=torch.stack(rows), **{CACHE: SimpleNamespace(layers=[])})

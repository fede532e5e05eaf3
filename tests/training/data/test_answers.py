"""Questions as they stand, with their answers: what is given, what is asked for, and a recipe that trains on them."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from condense import CondenseForCausalLM
from condense.training.data.answers import AnswerExamples, question_encoder
from condense.training.data.batches import StageBatches
from condense.training.data.documents import Document
from condense.training.data.tasks import make_examples
from condense.training.recipe import QuestionData, load_recipe
from condense.training.small_llama import small_llama, word_tokenizer

from ..recipes import write_recipe
from .test_text import Documents

pytestmark = pytest.mark.unit

TEXTS = ["How many is and Answer : ?", "cat"]


def words(bos=True, eos=True):
    tokenizer = word_tokenizer(TEXTS)
    if bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    else:
        tokenizer.bos_token = None
    if not eos:
        tokenizer.eos_token = None
    return tokenizer


def encoded(tokenizer, prompt, answer, total_length=30):
    (found,) = question_encoder(tokenizer, total_length)([Document("1", prompt, answer)])
    return found


def halves(tokenizer, found):
    """Returns the prompt and its answer."""
    tokens = tokenizer.convert_ids_to_tokens(found.input_ids)
    return " ".join(tokens[: found.num_given]), " ".join(tokens[found.num_given :])


def test_questions_by_hand():
    tokenizer = words()
    assert halves(tokenizer, encoded(tokenizer, "How many?\nAnswer: ", "4")) == ("<s> How many ? Answer :", "4 </s>")
    assert halves(tokenizer, encoded(tokenizer, "1 and 12 is ", "13")) == ("<s> 1 and 1 2 is", "1 3 </s>")
    assert encoded(tokenizer, "How many? ", "4").remark == ""


def test_a_tokenizer_without_bos_or_eos():
    bare = words(bos=False)
    assert halves(bare, encoded(bare, "How many? ", "4")) == ("How many ?", "4 </s>")
    endless = words(eos=False)
    assert halves(endless, encoded(endless, "How many? ", "4")) == ("<s> How many ?", "4")
    assert encoded(bare, " ", "4") == "no token before the answer"
    assert halves(words(), encoded(words(), " ", "4")) == ("<s>", "4 </s>")


def test_an_eos_that_the_answer_ends_with_is_not_doubled():
    tokenizer = words()
    assert halves(tokenizer, encoded(tokenizer, "How many? ", "4</s>")) == ("<s> How many ?", "4 </s>")


def test_what_is_too_long_is_dropped_with_a_reason():
    tokenizer = words()
    assert len(encoded(tokenizer, "How many? ", "4", total_length=6).input_ids) == 6
    assert encoded(tokenizer, "How many? ", "4", total_length=5) == "over 5 tokens"


def test_every_document_of_a_batch():
    documents = [Document(str(n), "How many? " + "cat " * n, str(n)) for n in range(8)]
    found = question_encoder(words(), 9)(documents)
    assert [one if isinstance(one, str) else one.num_given for one in found] == [4, 5, 6, 7, *["over 9 tokens"] * 4]


def byte_level():
    """Returns a tokenizer of bytes that merges " 4" into one token and puts a bos in front."""
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(["<s>", "</s>", *alphabet, "Ġ4"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "4")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_a_token_that_reaches_into_the_answer_belongs_to_it():
    """Prompt and answer are one text: after "is" the model sees " 4", and after "is " it sees "4"."""
    tokenizer = byte_level()
    assert halves(tokenizer, encoded(tokenizer, "is ", "45")) == ("<s> i s", "Ġ4 5 </s>")
    assert halves(tokenizer, encoded(tokenizer, "is ", "54")) == ("<s> i s Ġ", "5 4 </s>")
    assert halves(tokenizer, encoded(tokenizer, "is", " 4")) == ("<s> i s", "Ġ4 </s>")


@pytest.mark.parametrize("template", ["<s> $A </s>", "<s> $A"])
def test_the_answer_s_first_token_is_a_label(template):
    """A template's last token has offset 0, as the prompt has."""
    tokenizer = word_tokenizer(["the cat sat"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    (found,) = question_encoder(tokenizer, 10)([Document("1", "the cat ", "sat")])
    assert tokenizer.decode(found.input_ids[: found.num_given]) == "<s> the cat"
    assert tokenizer.decode(found.input_ids[found.num_given :]) == "sat </s>"


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow does not report where an answer begins: load a fast tokenizer"):
        question_encoder(Slow(), 10)


DOCUMENTS = Documents(range(3, 13), given=2)


def test_the_answer_alone_is_asked_for():
    examples = AnswerExamples(DOCUMENTS, 0, 10, seed=None)
    (example,) = examples.sequence(1, 20)
    assert example.input_ids.tolist() == [100, 101, 102, 103] and example.labels.tolist() == [-100, -100, 102, 103]
    assert example.input_ids.dtype == example.labels.dtype == np.int64


def test_each_document_that_fits_is_taken_once_an_epoch():
    examples = AnswerExamples(DOCUMENTS, 4, 10, seed=3)
    assert (examples.num_sequences(9), examples.num_sequences(12)) == (3, 6)
    assert examples.left_out(9) == "3 longer documents left out" and examples.left_out(12) == ""
    assert examples.fingerprint() == "4 to 10"

    def numbers(total_length, first, count):
        return [int(examples.sequence(first + n, total_length)[0].input_ids[0]) // 100 for n in range(count)]

    assert sorted(numbers(9, 0, 3)) == sorted(numbers(9, 3, 3)) == [4, 5, 6]
    assert sorted(numbers(12, 0, 6)) == [4, 5, 6, 7, 8, 9]
    assert len({tuple(numbers(12, 6 * epoch, 6)) for epoch in range(5)}) > 1  # in another order
    again = AnswerExamples(DOCUMENTS, 4, 10, seed=3)
    assert [int(again.sequence(n, 12)[0].input_ids[0]) // 100 for n in range(12)] == numbers(12, 0, 12)
    with pytest.raises(ValueError, match="no prompt with its answer fits into total_length=6 tokens"):
        examples.sequence(0, 6)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    tokenizer = words()
    small_llama(tokenizer, seed=0, width=32, layers=1).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    with (folder / "questions.jsonl").open("w") as file:
        for n in range(80):
            question = {"prompt": "How many? " + "cat " * (n % 7 + 1), "answer": str(n % 7 + 1)}
            file.write(json.dumps(question) + "\n")
    sources = [{"files": str(folder / "questions.jsonl"), "text": "prompt", "summary": "answer"}]
    data = {"task": "questions", "sources": sources, "prepared": str(folder / "prepared")}
    fields = {"data": data, "micro_batch": 4, "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2}}
    llama = {"source": str(folder / "llama"), "segment_length": 4}
    path = write_recipe(folder, llama, [(10, 6), (12, 30)], global_batch=4, evaluation={"sequences": 5}, **fields)
    return load_recipe(path)


def test_a_recipe_of_questions(recipe):
    tokenizer = words()
    assert isinstance(recipe.data, QuestionData)
    training, held_out = make_examples(recipe, tokenizer)
    assert held_out.num_sequences(12) == 5 and training.num_sequences(12) == 64  # 11 of 80 are longer
    assert 0 < training.num_sequences(10) < 64 and "longer documents left out" in training.left_out(10)
    for examples, count in ((training, 64), (held_out, 5)):
        for number in range(count):
            (example,) = examples.sequence(number, 12)
            shown = tokenizer.convert_ids_to_tokens(example.input_ids)
            asked = example.labels != -100
            repeated = shown.count("cat")
            assert shown == ["<s>", "How", "many", "?", *["cat"] * repeated, str(repeated), "</s>"]
            assert asked.tolist() == [False] * (4 + repeated) + [True, True]
            assert (example.labels[asked] == example.input_ids[asked]).all()


def test_the_recipe_trains(recipe):
    """The loss on held-out answers falls; the prompt's words have no part in it."""
    tokenizer = words()
    training, held_out = make_examples(recipe, tokenizer)
    model = CondenseForCausalLM.from_pretrained(recipe.model.source, segment_length=recipe.model.segment_length).train()
    batches = StageBatches(recipe, training, ranks=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.optimizer.learning_rate)

    def loss_held_out():
        with torch.no_grad():
            losses = []
            for number in range(5):
                (example,) = held_out.sequence(number, 12)
                ids = torch.from_numpy(example.input_ids)[None]
                log_p_NV = model(ids).logits[0].log_softmax(-1)
                num_given = int((example.labels == -100).sum())
                losses += [-log_p_NV[n - 1, ids[0, n]] for n in range(num_given, ids.shape[1])]
                labels = torch.from_numpy(example.labels)[None]
                torch.testing.assert_close(model(ids, labels=labels).loss, torch.stack(losses[-2:]).mean())
            return float(torch.stack(losses).mean())

    before = loss_held_out()
    for step in range(recipe.steps):
        batch = {name: value for name, value in batches[step].items() if name != "name"}
        assert batch["input_ids"].shape[1] <= (10 if step < 6 else 12)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_held_out() < before - 1


def test_too_long_questions_are_counted(recipe):
    shorter = recipe.model_copy(update={"stages": [recipe.stages[0]], "evaluation": None})
    training, _ = make_examples(shorter, words())
    summaries = [json.loads(path.read_text()) for path in recipe.data.prepared.glob("*/summary.json")]
    (summary,) = [summary for summary in summaries if "over 10 tokens" in summary]
    kept = sum(n % 7 + 1 <= 4 for n in range(summary["read"]))
    assert summary["kept"] == kept and summary["over 10 tokens"] == summary["read"] - kept
    assert training.num_sequences(10) == kept and summary["read"] == 80  # all that the file has

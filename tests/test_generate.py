"""`condense generate` against stock models, and the prompts and answers of JSONL files."""

import json
import os
import re
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

import condense.cli.generate
from condense import CondenseForCausalLM
from condense.cli.prompts import AnswerFile, Prompt, read_prompts

from .commands import printed

pytestmark = pytest.mark.process

PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
TEXT = "The grass is green. The sky is blue. The sun is yellow. "


@pytest.fixture(scope="module")
def penalized(llama, tmp_path_factory):
    """The same model, with penalties in its generation_config.json."""
    folder = shutil.copytree(llama, tmp_path_factory.mktemp("penalized"), dirs_exist_ok=True)
    GenerationConfig(**PENALTIES).save_pretrained(folder)
    return folder


def run(*arguments):
    printed("generate", *arguments)


def refusal(*arguments):
    with pytest.raises(ValueError, match=r".") as error:
        run(*arguments)
    return str(error.value)


def text_of(tmp_path, *arguments):
    report = tmp_path / "report.json"
    run(*arguments, "--report", report)
    return json.loads(report.read_text())["text"]


@pytest.mark.parametrize("options", [[], ["--fixed-decoding"]])
@pytest.mark.parametrize(("model_class", "segment_length"), [(LlamaForCausalLM, 512), (CondenseForCausalLM, 16)])
def test_penalties_count_the_prompt(penalized, llama, model_class, segment_length, options, tmp_path):
    """A prompt within a segment has the stock model's answer, and a longer one that of the model in one call."""
    command = ["--prompt", TEXT * 3, "--segment-length", segment_length, "--max-new-tokens", 24, *options]
    given = {"segment_length": segment_length} if model_class is CondenseForCausalLM else {}
    model, tokenizer = model_class.from_pretrained(penalized, **given).eval(), AutoTokenizer.from_pretrained(penalized)
    inputs = tokenizer("<s>" + TEXT * 3, return_tensors="pt", return_token_type_ids=False)
    whole = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text_of(tmp_path, "--model", penalized, *command) == expected
    assert text_of(tmp_path, "--model", llama, *command) != expected  # the control: penalties do something


def write_prompts(path, texts):
    path.write_text("".join(json.dumps({"chat": {"user": text}}) + "\n" for text in texts))
    return ["--prompts", path, "--prompt-field", "chat.user", "--max-new-tokens", 6, "--segment-length", 16]


def test_each_prompt_has_the_answer_that_it_has_by_itself(folded, tmp_path):
    texts, book, answers = ["What is the", "The grass", TEXT], tmp_path / "book.txt", tmp_path / "answers.jsonl"
    book.write_text(TEXT)
    sampling = ["--temperature", 1, "--seed", 3, "--prompt-file", book]
    command = ["--model", folded, *write_prompts(tmp_path / "prompts.jsonl", texts), *sampling, "--answers", answers]
    run(*command)
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(record["line"], record["prompt"]) for record in records] == list(enumerate(texts, 1))
    for record in records:
        alone = ["--model", folded, "--prompt", record["prompt"], *command[6:10], *sampling]
        assert record["text"] == text_of(tmp_path, *alone)
    assert len({record["text"] for record in records}) > 1
    written = answers.read_text()
    run(*command)
    assert answers.read_text() == written  # nothing is left to do


def test_a_stopped_run_loses_no_answer(llama, tmp_path, monkeypatch):
    """The file has each answer as soon as it is written, and the next run goes on after the last complete one."""
    answers, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    command = ["--model", llama, *write_prompts(tmp_path / "prompts.jsonl", ["The grass", "What", "The sky", "blue"])]
    run(*command, "--answers", whole)
    asked, answer = [], condense.cli.generate._answer

    def fails(model, tokenizer, text, *others):
        asked.append(text)
        if len(asked) == 3:
            raise RuntimeError("the machine is switched off")
        return answer(model, tokenizer, text, *others)

    monkeypatch.setattr("condense.cli.generate._answer", fails)
    with pytest.raises(RuntimeError, match="switched off"):
        run(*command, "--answers", answers)
    assert len(answers.read_text().splitlines()) == 2
    with answers.open("a") as file:
        file.write('{"line": 3, "pro')  # torn
    run(*command, "--answers", answers)
    assert asked == ["The grass", "What", "The sky", "The sky", "blue"]

    def texts(path):
        return [(record["line"], record["text"]) for record in map(json.loads, path.read_text().splitlines())]

    assert texts(answers) == texts(whole)


def test_a_file_of_other_answers_is_refused_and_kept(llama, tmp_path):
    answers = tmp_path / "answers.jsonl"
    command = ["--model", llama, *write_prompts(tmp_path / "prompts.jsonl", ["The grass", "What"])]
    run(*command, "--answers", answers)
    written = answers.read_text()
    words = "holds something other than answers to these prompts under these options: pass another --answers"
    assert words in refusal(*command, "--answers", answers, "--temperature", 1)
    assert words in refusal("--model", llama, *write_prompts(tmp_path / "prompts.jsonl", ["The"]), "--answers", answers)
    assert answers.read_text() == written
    for other in ("notes", "notes\n", "[1]\n", '{"line": 1}\n'):
        answers.write_text(other)
        assert words in refusal(*command, "--answers", answers)
        assert answers.read_text() == other


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompt: write one JSON object"),
        (b'{"prompt": "a"}\n{"prompt": ', ":2: not a JSON object in UTF-8 ("),
        (b'\n["a"]', ":2: not a JSON object"),
        (b'{"text": "a", "id": 1}', ":1: field 'prompt' holds no text; the fields are 'text', 'id': name the right"),
        (b'{"prompt": ["a"]}', ":1: field 'prompt' holds no text"),
        (b'{"prompt": ""}', ":1: field 'prompt' holds no text"),
        (b'{"prompt": "\\ud800"}', ":1: field 'prompt' holds no text"),
        (b'{"prompt": "\xff"}', ":1: not a JSON object in UTF-8"),
    ],
)  # fmt: skip
def test_lines_without_a_prompt(content, words, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(words)}"):
        read_prompts(path, "prompt")


def test_lines_and_fields(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": {"b": "one"}}\r\n\r\n{"a.b": "two\\r\\n", "a": {"b": "no"}}')
    assert read_prompts(path, "a.b") == [Prompt(1, "one"), Prompt(3, "two\r\n")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompts", "P"], "needs --answers"),
        (["--prompts", "P", "--answers", "P"], "is the file of --prompts"),
        (["--prompts", "P", "--answers", "A", "--prompt", "a"], "--prompt doesn't go with --prompts"),
        (["--prompts", "P", "--answers", "A", "--report", "R"], "doesn't go with --prompts"),
        (["--prompts", "nowhere", "--answers", "A"], "nowhere can't be read: No such file"),
        (["--prompts", "P", "--answers", "nowhere/A"], "there is no folder"),
        (["--prompt", "a", "--answers", "A"], "needs --prompts"),
    ],
)
def test_options_that_do_not_fit_together(options, words, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "P").write_text('{"prompt": "a"}')
    assert words in refusal("--model", llama, *options)


def test_a_template_that_drops_the_message(llama, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "{{ bos_token }}What is the"
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path)
    assert "leaves out the user's message" in refusal("--model", tmp_path, "--prompt", "The grass", "--chat")


def test_arguments_that_are_not_utf8(error_line, new_process):
    module = "import runpy; runpy.run_module('condense', run_name='__main__', alter_sys=True)"
    done = new_process(module, "generate", "--model", "m", "--prompt", os.fsdecode(b"caf\xe9"))
    expected = "condense: argument caf\\xe9 is not UTF-8: write it in UTF-8"
    assert done.returncode == 1 and done.stderr.startswith(expected) and len(done.stderr.splitlines()) == 1
    assert "or rename the file or folder that it names." in error_line("convert", "\udcff", "there")


def double_the_head(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data.mul_(2)
    model.save_pretrained(folder)


def give_penalties(folder):
    GenerationConfig(**PENALTIES).save_pretrained(folder)


def rename_a_token(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"grass"', '"turf"'))


@pytest.mark.parametrize("change", [double_the_head, give_penalties, rename_a_token])
def test_answers_of_a_model_that_has_changed_are_not_continued(change, llama, tmp_path):
    """A model that was trained further in its folder is another one, and so is one that chooses or writes otherwise."""
    folder, answers = tmp_path / "model", tmp_path / "answers.jsonl"
    shutil.copytree(llama, folder)
    command = ["--model", folder, *write_prompts(tmp_path / "prompts.jsonl", ["The grass", "What"])]
    run(*command, "--answers", answers)
    first, _ = answers.read_text().splitlines(keepends=True)
    answers.write_text(first)  # the run was stopped
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    change(folder)
    assert before != {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "A model with changed files counts as another one." in refusal(*command, "--answers", answers)
    assert answers.read_text() == first


def test_answers_of_a_model_are_continued_wherever_it_is(llama, tmp_path, monkeypatch):
    """Under another path, in another folder, and with a card and a report beside it."""
    folder, answers = tmp_path / "model", tmp_path / "answers.jsonl"
    shutil.copytree(llama, folder)
    options = [*write_prompts(tmp_path / "prompts.jsonl", ["The grass", "What"]), "--answers", answers]
    run("--model", llama, *options)
    written = answers.read_text()
    for name in ("README.md", "report.json", "trainer_state.json"):
        (folder / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for source in (folder, "model", "./model/"):
        run("--model", source, *options)
        assert answers.read_text() == written


def test_one_command_at_a_time_writes_a_file_of_answers(llama, tmp_path):
    """A second one would answer the same prompts again, and the next start would refuse the file."""
    answers = tmp_path / "answers.jsonl"
    command = ["--model", llama, *write_prompts(tmp_path / "prompts.jsonl", ["The grass", "What"])]
    run(*command, "--answers", answers)
    first, _ = answers.read_text().splitlines(keepends=True)
    answers.write_text(first)
    settings = json.loads(first)["settings"]
    with AnswerFile(answers, [Prompt(1, "The grass"), Prompt(2, "What")], settings) as held:
        assert held.num_answered == 1
        words = "answers.jsonl is being written by another process: wait until it ends, or pass another --answers."
        assert refusal(*command, "--answers", answers).endswith(words)
        assert answers.read_text() == first
    run(*command, "--answers", answers)
    assert len(answers.read_text().splitlines()) == 2


def test_a_full_disk_loses_no_answer(llama, tmp_path, new_process):
    """Files may have a few bytes more than one answer: a write beyond them fails as one to a full disk does."""
    answers = tmp_path / "answers.jsonl"
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["The grass", "What"])
    command = ["condense", "generate", "--model", llama, *prompts, "--answers", answers]
    run(*command[2:])
    whole = answers.read_text()
    size = len(whole.splitlines(keepends=True)[0])
    answers.unlink()
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 40},) * 2)\n"
        f"sys.argv = {list(map(str, command))}\n"
        "from condense.cli.main import main; main()"
    )
    done = new_process(code)
    said = "answers.jsonl can't be written: File too large. Make room, and start the same command again: it goes on"
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert len(answers.read_text()) == size + 40
    run(*command[2:])

    def texts(written):
        return [json.loads(line)["text"] for line in written.splitlines()]

    assert texts(answers.read_text()) == texts(whole)


def test_an_interrupted_file_of_answers_says_how_it_goes_on(tmp_path, capsys):
    path, prompts = tmp_path / "answers.jsonl", [Prompt(1, "The grass"), Prompt(2, "What")]

    def answer(text, stream):
        if text == "What":
            raise KeyboardInterrupt
        return {"text": "is green"}

    with AnswerFile(path, prompts, {}) as file, pytest.raises(KeyboardInterrupt):
        condense.cli.generate._answer_all(prompts, file, answer)
    said = f"stopped: {path} keeps the answers that are complete; the same command goes on from there"
    assert capsys.readouterr().err.splitlines()[-1] == said
    with AnswerFile(path, prompts, {}) as file:
        assert file.num_answered == 1


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT * 3)
    return path


SHORT = ["--segment-length", 16, "--max-new-tokens", 12]


@pytest.mark.parametrize("options", [[], ["--fixed-decoding"]])
@pytest.mark.parametrize("prompt", ["The grass is", "The"])
def test_a_book_is_read_once(llama, book, prompt, options, tmp_path):
    """The answer after a state is that after the whole text, and the state is not changed by an answer."""
    command = ["--model", llama, *SHORT, *options]
    state = tmp_path / "book.state"
    first = text_of(tmp_path, *command, "--prompt-file", book, "--save-state", state)
    assert first == text_of(tmp_path, *command, "--prompt-file", book)
    written = state.read_bytes()
    expected = text_of(tmp_path, *command, "--prompt-file", book, "--prompt", prompt)
    for _ in range(2):
        assert text_of(tmp_path, *command, "--load-state", state, "--prompt", prompt) == expected
    assert state.read_bytes() == written
    assert text_of(tmp_path, *command, "--prompt", prompt) != expected


def test_a_second_volume_goes_on_after_the_first(llama, book, tmp_path):
    """A state may replace its own file; no token needs to be written."""
    command, state = ["--model", llama, "--segment-length", 16], tmp_path / "state"
    assert text_of(tmp_path, *command, "--prompt-file", book, "--max-new-tokens", 0, "--save-state", state) == ""
    run(*command, "--prompt-file", book, "--load-state", state, "--save-state", state, "--max-new-tokens", 0)
    (tmp_path / "both.txt").write_text(TEXT * 6)
    expected = text_of(tmp_path, *command, "--prompt-file", tmp_path / "both.txt", "--prompt", "The sky")
    assert text_of(tmp_path, *command, "--load-state", state, "--prompt", "The sky") == expected


def test_each_prompt_continues_the_same_state(llama, book, tmp_path):
    texts, state, answers = ["The grass is", "The", TEXT], tmp_path / "state", tmp_path / "answers.jsonl"
    run("--model", llama, "--segment-length", 16, "--prompt-file", book, "--save-state", state, "--max-new-tokens", 0)
    command = ["--model", llama, *write_prompts(tmp_path / "prompts.jsonl", texts), "--answers", answers]
    run(*command, "--load-state", state)
    found = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    command[4:6] = command[-2:] = []  # the field of --prompts, and --answers
    alone = ["--model", llama, "--segment-length", 16, "--max-new-tokens", 6, "--prompt-file", book]
    assert found == [text_of(tmp_path, *alone, "--prompt", text) for text in texts]
    again = ["--model", llama, *write_prompts(tmp_path / "prompts.jsonl", texts), "--answers", answers]
    assert "under these options" in refusal(*again)  # without the state
    run("--model", llama, "--segment-length", 16, "--prompt", "x", "--save-state", state, "--max-new-tokens", 0)
    assert "under these options" in refusal(*again, "--load-state", state)  # with another one


def test_states_that_do_not_fit_are_refused_before_a_model_is_read(llama, book, tmp_path, monkeypatch):
    state, command = tmp_path / "state", ["--model", llama, "--segment-length", 16]
    run(*command, "--prompt-file", book, "--save-state", state, "--max-new-tokens", 0)
    assert "segment_length=16, and this one has 8" in refusal(
        "--model", llama, "--segment-length", 8, "--load-state", state, "--prompt", "The"
    )
    monkeypatch.setattr("condense.hub.loading.load_model", lambda *_, **__: pytest.fail("read a model"))
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["The"])[:4]
    for arguments, message in (
        (["--load-state", state], "there is no prompt"),
        (["--load-state", book, "--prompt", "The"], "book.txt can't be read as a state"),
        (["--load-state", tmp_path / "no", "--prompt", "The"], "can't be read as a state (No such file"),
        (["--save-state", book, "--prompt", "The"], "book.txt exists and is not a state: pass another path"),
        (["--max-new-tokens", 0, "--prompt", "The"], "--max-new-tokens 0 only reads: pass --save-state"),
        (["--save-state", tmp_path / "no" / "state", "--prompt", "The"], "there is no folder"),
        (["--load-state", state, "--chat", "--prompt", "The"], f"--load-state {state}: --chat wraps"),
        (["--save-state", state, "--chat", "--prompt", "The"], f"--save-state {state}: --chat wraps"),
        (["--save-state", state, *prompts, "--answers", tmp_path / "a"], "doesn't go with --prompts"),
    ):
        assert message in refusal(*command, *arguments)
    assert book.read_text() == TEXT * 3

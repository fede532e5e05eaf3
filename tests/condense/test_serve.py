"""`transformers serve` answers with a folded model, in a process that has not imported this package."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from transformers import AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from condense import CondenseForCausalLM

from ..chat_models import greedy, save_chat_model
from ..conftest import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not is_serve_available(), reason="needs pip install 'transformers[serving]'"),
]

TEXT = "The sky is blue. The sun is yellow. Here we go. There and back again."
START_S = 120


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"), [TEXT])


@contextmanager
def serve(folder, log, *options):
    """Yields a function that posts a request and returns the body of the answer."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address = f"http://localhost:{port}"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--trust-remote-code"]
    command += ["--device", "cpu", "--port", str(port), *options]
    environment = os.environ | {"HF_MODULES_CACHE": str(log.parent / "modules")}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, text=True)
    try:
        begin = time.monotonic()
        while True:
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < begin + START_S, log.read_text()[-3000:]
                time.sleep(0.2)

        def post(path, **body):
            data = json.dumps({"model": str(folder), "temperature": 0, "max_tokens": 20, **body}).encode()
            request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                return answer.read().decode()

        yield post
    finally:
        process.kill()
        process.wait()


def streamed(body):
    """Returns the chunks of an answer."""
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in body.splitlines() if line]


@pytest.mark.parametrize("options", [(), ("--continuous-batching",)], ids=["plain", "continuous batching"])
def test_a_served_model_answers_as_the_model_does(options, chat, tmp_path):
    """Plain and streamed, with and without the chat template, over several segments of 16 tokens.

    Asked for continuous batching, which no folded model has, transformers says so and answers one after the other.
    """
    model, tokenizer = CondenseForCausalLM.from_pretrained(chat), AutoTokenizer.from_pretrained(chat)
    message = [{"role": "user", "content": TEXT}]
    with serve(chat, tmp_path / "log", *options) as post:
        plain = json.loads(post("/v1/completions", prompt=TEXT))["choices"][0]["text"]
        parts = [chunk["text"] for chunk in streamed(post("/v1/completions", prompt=TEXT, stream=True))]
        answer = json.loads(post("/v1/chat/completions", messages=message))["choices"][0]["message"]["content"]
        chunks = streamed(post("/v1/chat/completions", messages=message, stream=True))
    ends = [tokenizer.eos_token_id]
    expected = greedy(model, tokenizer(TEXT).input_ids, ends, 20)
    assert plain == "".join(parts) == tokenizer.decode(expected, skip_special_tokens=True) != ""
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = greedy(model, ids, ends, 20)
    contents = [chunk["delta"].get("content", "") for chunk in chunks]
    assert answer == "".join(contents) == tokenizer.decode(expected, skip_special_tokens=True) != ""
    assert len([content for content in contents if content]) > 3
    assert ("does not support continuous batching" in (tmp_path / "log").read_text()) == bool(options)

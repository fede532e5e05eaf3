"""The long-text benchmarks of lm-evaluation-harness: their tasks, text lengths and samples.

RULER generates 500 samples per task, tokenizer and length at every start. They are generated once here and kept on
disk. `datasets` keeps the texts of the other benchmarks.
"""

import contextlib
import hashlib
import io
import json
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import datasets
import lm_eval.tasks
import numpy as np
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml  # the harness offers no other access to a task's configuration

ENDLESS = ("ruler_vt", "ruler_cwe")  # their generators retry forever if an example does not fit
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MOST_TOKENS = 2  # per word of NOISE; the tokenizer of Llama 3 has 1.3
FILLED = 2 / 3  # a task is left out at a length if its longest sample is shorter than this share of it


@dataclass(frozen=True)
class Benchmark:
    """A group of tasks of the harness.

    `metric` is the one in tables, or None if the metric is named after the length. `source` says where the texts come
    from. `lengths` are the lengths at which texts are generated. It is None for texts that exist, with their own
    lengths, and empty for any length from `shortest`.
    """

    group: str
    metric: str | None
    source: str
    lengths: Sequence[int] | None = None
    shortest: int = 1

    def made_at(self, length: int) -> bool:
        return length >= self.shortest and (not self.lengths or length in self.lengths)


BENCHMARKS = {
    "ruler": Benchmark(
        "ruler",
        None,
        "its generators, which need pip install 'lm-eval[ruler]', and for some tasks nltk's punkt_tab, "
        "baber/paul_graham_essays, SQuAD and HotpotQA",
        lengths=(),
        shortest=1024,
    ),
    "babilong": Benchmark(
        "babilong_longctx", "acc", "RMT-team/babilong-1k-samples", lengths=[2**power for power in range(10, 18)]
    ),
    "longbench2": Benchmark("longbench2", "acc", "recursal/longbench-v2"),
    "infinitebench": Benchmark("infinitebench", "score", "xinrongzhang2022/InfiniteBench"),
    "graphwalks": Benchmark("graphwalks", "f1", "openai/graphwalks"),
}


class Request(NamedTuple):
    """A text to continue or to score, and the tokens that the model must have room for."""

    document: int
    prompt_tokens: int
    answer_tokens: int


@cache
def _manager(**metadata: Hashable) -> TaskManager:
    """Returns the harness's index of tasks, cached because it reads hundreds of files."""
    folder = Path(lm_eval.tasks.__file__).parent
    folders = [folder / name for name in BENCHMARKS]  # the others take seconds
    return TaskManager(include_path=folders, include_defaults=False, metadata=metadata)


def tasks_of(names: Sequence[str]) -> dict[str, str]:
    """Returns the tasks that `names` ask for, each with its benchmark; a name is a benchmark's or a task's.

    Raises `ValueError` for any other name.
    """
    index, found = _manager().task_index, dict[str, str]()
    members = {name: list(dict.fromkeys(_leaves(index, one.group))) for name, one in BENCHMARKS.items()}
    for name in names:
        owners = [name] if name in members else [owner for owner, tasks in members.items() if name in tasks]
        if not owners:
            raise ValueError(
                f"there is no benchmark or task {name!r}: choose from {', '.join(BENCHMARKS)}, or name tasks of them, "
                f"for example {members['ruler'][0]}."
            )
        found |= dict.fromkeys(members.get(name, [name]), owners[0])
    return found


def _leaves(index: dict[str, Any], name: str) -> Iterator[str]:
    entry = index[name]
    below = sorted(entry.tags) if entry.kind.name == "TAG" else (entry.cfg or {}).get("task")
    if isinstance(below, list):
        for member in below:
            yield from _leaves(index, member)
    else:
        yield name


def load_task(benchmark: str, task: str, length: int, source: str, tokenizer: Any, seed: int, folder: Path) -> Any:
    """Returns a task of the harness with its texts; `source` is the folder, hub id or GGUF file of the tokenizer.

    RULER's samples are read from `folder`. They are generated first if missing for this tokenizer, length and seed.
    Raises `ValueError` if the texts cannot be generated or downloaded.
    """
    if task in ENDLESS and (tokens := len(tokenizer(NOISE).input_ids)) > MOST_TOKENS * len(NOISE.split()):
        raise ValueError(
            f"{task} cannot be made for the tokenizer of {source}, which has {tokens} tokens for {len(NOISE.split())} "
            "words: the harness would search forever for a sample that is short enough. Leave the task out."
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # generators print what they try
            if benchmark == "ruler":
                samples = _ruler_samples(task, length, source, tokenizer, seed, folder)
                manager = _manager()
                config = load_yaml(manager.task_index[task].yaml_path, resolve_func=True)
                kept = {"custom_dataset": lambda **_: datasets.load_from_disk(str(samples))}
                loaded = manager.load([config | kept])
            else:
                loaded = _manager(max_seq_lengths=f"{length // 1024}k").load([task])
    except Exception as error:  # from the harness, `datasets` or a server
        raise ValueError(
            f"the texts of {task} can't be loaded ({type(error).__name__}: {' '.join(str(error).split())[:300]}). They "
            f"come from {BENCHMARKS[benchmark].source}. Start once with a network connection, or leave the task out of "
            "--benchmarks."
        ) from error
    loaded["tasks"][task].set_fewshot_seed(seed=seed)
    return loaded["tasks"][task]


def default_folder() -> Path:
    return Path(HF_HOME) / "condense" / "ruler"


def _ruler_samples(task: str, length: int, source: str, tokenizer: Any, seed: int, folder: Path) -> Path:
    """Returns the folder of the samples; one process generates them while the others wait."""
    path = folder / f"{task}-{length}-{_fingerprint(tokenizer)}-seed{seed}-lm_eval{version('lm-eval')}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            random.seed(seed)
            np.random.seed(seed)  # the generators draw from both
            with TemporaryDirectory() as own:
                if Path(source).is_file():  # GGUF, which the generators can't read a tokenizer from
                    tokenizer.save_pretrained(own)
                    source = own
                manager = _manager(pretrained=source, max_seq_lengths=(length,))
                made = manager.load([task])["tasks"][task].dataset
            partial = path.with_name(f"{path.name}.partial")
            datasets.DatasetDict(made).save_to_disk(str(partial))
            partial.replace(path)
    return path


def _fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def longest_sample(task: Any) -> int:
    """Returns the tokens of the longest RULER sample, answer included."""
    return max(task.eval_docs["length"])


def requests_of(task: Any, tokenizer: Any, documents: Sequence[int], default_answer: int) -> list[Request]:
    """Returns these documents' requests, in tokens; `default_answer` is for tasks that don't limit the answer."""
    task.build_all_requests(samples=list(documents), rank=0, world_size=1)
    sizes, found = dict[str, int](), []
    for instance in task.instances:
        prompt, answer = instance.args
        if prompt not in sizes:  # the choices of a question share it
            sizes[prompt] = len(tokenizer(prompt).input_ids)
        if instance.request_type == "generate_until":
            room = answer.get("max_gen_toks", default_answer)
        else:
            room = len(tokenizer(answer, add_special_tokens=False).input_ids) - 1  # the last is predicted and not read
        found.append(Request(documents[instance.doc_id], sizes[prompt], room))
    return found

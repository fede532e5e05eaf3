"""The benchmarks of long text in lm-evaluation-harness: their tasks, the lengths of their texts, and their samples.

RULER makes 500 samples of each task for one tokenizer and one length, again at each start. Here they are made once and
kept; the texts of the other benchmarks are kept by `datasets`.
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
from typing import Any, NamedTuple

import datasets
import lm_eval.tasks
import numpy as np
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml  # the harness has no other way to a task's configuration

ENDLESS = ("ruler_vt", "ruler_cwe")  # their generators try again for ever where an example does not fit
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MOST_TOKENS = 2  # a word of NOISE; the tokenizer of Llama 3 has 1.3
FILLED = 2 / 3  # of a length: a task whose longest sample is shorter than this is not made at that length


@dataclass(frozen=True)
class Benchmark:
    """A group of tasks of the harness.

    `metric` is the one in tables; None where its name is the length. `source` is where the texts come from. `lengths`
    are those that its texts are made at: None for texts with lengths of their own, empty for any length from
    `shortest`.
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
    """A text that a model is asked to continue or to score: the tokens that it must have room for."""

    document: int
    prompt_tokens: int
    answer_tokens: int


@cache
def _manager(**metadata: Hashable) -> TaskManager:
    """Kept, since it reads some hundred files."""
    folder = Path(lm_eval.tasks.__file__).parent
    names = ("ruler", "babilong", "longbench2", "infinitebench", "graphwalks")  # their folders: the others take seconds
    return TaskManager(include_path=[folder / name for name in names], include_defaults=False, metadata=metadata)


def tasks_of(names: Sequence[str]) -> dict[str, str]:
    """The benchmark of each task that `names` ask for; a name is a benchmark's or a task's.

    Raises `ValueError` for a name of neither.
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
    """A task of the harness with its texts; `source` is the folder or hub id of the tokenizer.

    RULER's samples are read from `folder`, and made there if there are none for this tokenizer, length and seed.
    Raises `ValueError` where the texts cannot be made or downloaded.
    """
    if task in ENDLESS and (tokens := len(tokenizer(NOISE).input_ids)) > MOST_TOKENS * len(NOISE.split()):
        raise ValueError(
            f"{task} cannot be made for the tokenizer of {source}, which has {tokens} tokens for {len(NOISE.split())} "
            "words: the harness looks without an end for a sample that is short enough. Leave the task out."
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
    except Exception as error:  # of the harness, of `datasets` or of a server
        raise ValueError(
            f"the texts of {task} cannot be had ({type(error).__name__}: {' '.join(str(error).split())[:300]}). They "
            f"come from {BENCHMARKS[benchmark].source}. Start once where there is a network, or leave the task out of "
            "--benchmarks."
        ) from error
    loaded["tasks"][task].set_fewshot_seed(seed=seed)
    return loaded["tasks"][task]


def default_folder() -> Path:
    return Path(HF_HOME) / "condense" / "ruler"


def _ruler_samples(task: str, length: int, source: str, tokenizer: Any, seed: int, folder: Path) -> Path:
    """The folder of the samples, which are made by one process while the others wait."""
    path = folder / f"{task}-{length}-{_fingerprint(tokenizer)}-seed{seed}-lm_eval{version('lm-eval')}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            random.seed(seed)
            np.random.seed(seed)  # the generators draw from both
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
    """Tokens of the longest of RULER's samples, answer included."""
    return max(task.eval_docs["length"])


def requests_of(task: Any, tokenizer: Any, documents: Sequence[int], default_answer: int) -> list[Request]:
    """The requests of these documents, in tokens; `default_answer` where a task says nothing of the answer's length."""
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

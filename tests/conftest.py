import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import typer.main
import typer.testing

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SLOW_TIMEOUT_S = 1800

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

# Typer builds its tree of commands, which does not change, for each call: many tests spend most of their time on it.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)

LAST = "condense"  # many files of seconds, which fill the workers evenly at the end; the others start processes


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.relative_to(ROOT / "tests").parts[0] == LAST)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def pytest_collection_finish():
    gc.freeze()  # garbage collections, of which each `Trainer.train` makes one, then pass over what imports have made


@pytest.fixture
def without_pictures(monkeypatch):
    """Pictures are drawn, not laid out and not written: that takes longer than a small measurement."""
    monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)
    monkeypatch.setattr("condense.eval.results._save", lambda *_: None)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """The folder of a small Llama with random weights and its tokenizer, for reading only."""
    from condense.training.small_llama import save_small_llama

    folder = tmp_path_factory.mktemp("models") / "llama"
    save_small_llama(folder)
    return folder


@pytest.fixture(scope="session")
def folded(llama) -> Path:
    """The folder of its folded form with segments of 16 tokens and the paper's memory, for reading only."""
    from condense import CondenseForCausalLM

    folder = shutil.copytree(llama, llama.with_name("folded"))
    memory = {"memory_share": 1.0, "sink_token_id": None}
    CondenseForCausalLM.from_pretrained(llama, segment_length=16, **memory).save_pretrained(folder)
    return folder


@pytest.fixture
def no_grad():
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def collected_by_hand():
    """Only reference counts free what is used no more."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Call(NamedTuple):
    arguments: tuple
    options: dict
    result: object


@pytest.fixture
def noted(monkeypatch):
    """Makes a function, or a method of a class, note its calls from now on; returns the list of them."""

    def note(owner, name: str) -> list[Call]:
        calls: list[Call] = []
        function = owner[name] if isinstance(owner, dict) else getattr(owner, name)

        def noting(*arguments, **options):
            result = function(*arguments, **options)
            calls.append(Call(arguments, options, result))
            return result

        (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, noting)
        return calls

    return note


class Said:
    """The lines that `condense.utils.notices` has said since the last `clear`; each may then be said again."""

    def __init__(self, log: pytest.LogCaptureFixture):
        self.log = log
        self.clear()

    def __call__(self) -> list[str]:
        return [record.getMessage() for record in self.log.records if record.name == "condense.utils.notices"]

    def clear(self) -> None:
        from condense.utils import notices

        notices._say.cache_clear()
        self.log.clear()


@pytest.fixture
def said(caplog) -> Said:
    return Said(caplog)


@pytest.fixture
def error_line(monkeypatch, capsys):
    """Runs a command that fails, through the door that a shell uses; returns the only line that it writes."""

    def run(*arguments: object) -> str:
        import condense.cli.main

        monkeypatch.setattr(sys, "argv", ["condense", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            condense.cli.main.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert left.value.code == 1 and line.startswith("condense: ")
        return line

    return run


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real pretrained Llama of 260 thousand parameters, where it is at hand."""
    folder = SHARED / "models" / "stories260K"
    if not folder.exists():
        pytest.skip("needs ../shared/models/stories260K beside the checkout")
    return folder


@pytest.fixture(scope="session")
def novel() -> Path:
    path = SHARED / "data" / "novels" / "Austen_Emma.txt"
    if not path.exists():
        pytest.skip("needs ../shared/data/novels beside the checkout")
    return path


# Each fork leaves the loop and runs its code as `python -c` would.
FORKS_AFTER_IMPORT = """
import gc, json, os, sys
import IMPORTED
gc.freeze()  # a fork would copy what it collects when it ends
for line in sys.stdin:
    code, arguments, folder = json.loads(line)
    if (child := os.fork()) == 0:
        for number, name in enumerate((os.devnull, f"{folder}/stdout", f"{folder}/stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["-c", *arguments]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""


class NewProcesses:
    """Runs code in new processes that have imported one package and nothing else; the import is done once for all."""

    def __init__(self, server: subprocess.Popen, folder: Path):
        self.server, self.folder = server, folder

    def __call__(self, code: str, *arguments: object) -> subprocess.CompletedProcess:
        command = [code, [str(argument) for argument in arguments], str(self.folder)]
        print(json.dumps(command), file=self.server.stdin, flush=True)
        exit_code = int(self.server.stdout.readline())
        return subprocess.CompletedProcess(
            command, exit_code, *((self.folder / name).read_text() for name in ("stdout", "stderr"))
        )


@pytest.fixture(scope="session")
def new_process() -> Iterator[NewProcesses]:
    with new_processes("condense") as processes:
        yield processes


@contextmanager
def new_processes(imported: str) -> Iterator[NewProcesses]:
    """The modules of models' remote code are kept in a folder of these processes."""
    command = [sys.executable, "-c", FORKS_AFTER_IMPORT.replace("IMPORTED", imported)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(
            command,
            cwd=ROOT,
            start_new_session=True,
            env=os.environ | {"HF_MODULES_CACHE": f"{folder}/modules"},
            **pipes,
        ) as server,
    ):
        try:
            yield NewProcesses(server, Path(folder))
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # with a process that a test no longer waits for

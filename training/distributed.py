"""The group of ranks, and the operators that DeepSpeed compiles.

DeepSpeed compiles its operators on first use. If a build is killed, its lock file remains, and every later run would
wait for it forever and print nothing. So each operator is built in this environment's own folder, under a lock that
ends with its process. The process that holds it knows that DeepSpeed's lock file is stale.
"""

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from filelock import FileLock
from torch.utils.cpp_extension import get_default_build_root

OURS = "condense-"  # prefix of folders that only this package builds in


class Process(NamedTuple):
    """This process among the run's, as the launcher's environment variables describe it."""

    rank: int
    num_ranks: int
    launched: bool  # by the DeepSpeed launcher; otherwise a single process without DeepSpeed

    @classmethod
    def from_environment(cls) -> "Process":
        rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return cls(rank, num_ranks, "LOCAL_RANK" in os.environ)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join() -> None:
    """Joins the group through DeepSpeed: ZeRO-3 asks DeepSpeed for the ranks when a model is loaded."""
    import deepspeed.comm

    _guard_builds()
    # An all-reduce for CPU inference, which training never calls. It takes half a minute to compile, and each rank
    # leaves 35 MB in /dev/shm. The attribute `deepspeed.comm.torch` is PyTorch.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.comm.init_distributed()
    dist.barrier()


def leave() -> None:
    """Leaves the group: a rank that exits while the group's threads are alive may abort itself and the others."""
    dist.barrier()
    dist.destroy_process_group()


def is_connection_error(error: RuntimeError) -> bool:
    """Returns whether a rank failed because another one has ended or can't be reached."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _guard_builds() -> None:
    """Makes DeepSpeed build each operator under a lock that other runs of this package respect.

    A TORCH_EXTENSIONS_DIR that the user has set may be shared with other programs, so lock files there are kept.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    if hasattr(OpBuilder.jit_load, "__wrapped__"):
        return
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(get_default_build_root()) / f"{OURS}{_environment()}")
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    build = OpBuilder.jit_load

    @functools.wraps(build)
    def build_alone(self, *arguments, **options):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{self.name}.lock"):
            held = folder / self.name / "lock"
            if held.exists() and folder.name.startswith(OURS):
                print(f"{held} is left from a build that was killed: building {self.name} again", flush=True)
                held.unlink()
            elif held.exists():
                print(f"waiting for {held}: if nothing is building {self.name}, remove that file", flush=True)
            return build(self, *arguments, **options)

    OpBuilder.jit_load = build_alone


def _environment() -> str:
    """Returns a hash of what operators are compiled for: the installation, and the machine with its processor."""
    from deepspeed import __version__

    parts = sys.prefix, torch.__version__, __version__, platform.node()
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]

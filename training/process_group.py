"""The group of ranks: joined through DeepSpeed and left, with nothing staying behind, however a run ends.

DeepSpeed compiles its operators when they are first used, and the file it takes for a lock stays when a build is
killed: every later run would wait for it without end and without a word. Here an operator is built in a folder of
this environment's own, under a lock that dies with its process; who holds that lock knows the file to be stale.

Between CPUs of one machine its all-reduce makes a file of some 35 MB a rank in /dev/shm and never removes it. A file
that is open needs no name, so each rank takes its own away once all of them have opened it.
"""

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock
from torch.utils.cpp_extension import get_default_build_root

OURS = "condense-"  # begins the names of folders in which nobody else builds


def join() -> None:
    """By DeepSpeed itself: ZeRO-3 asks it for the ranks when a model is loaded."""
    import deepspeed.comm

    _guard_builds()
    deepspeed.comm.init_distributed()
    dist.barrier()
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)


def leave() -> None:
    """A rank that leaves with the group's threads alive may abort, and takes the others with it."""
    dist.barrier()
    dist.destroy_process_group()


def _guard_builds() -> None:
    """Whatever operator this process builds from now on, no other run of ours does at the same time.

    In TORCH_EXTENSIONS_DIR, where the user has set it, other programs may build as well: there a lock is left to them.
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
                print(f"{held} is of a build that was killed: building {self.name} again", flush=True)
                held.unlink()
            elif held.exists():
                print(f"waiting for {held}: if nothing is building {self.name}, remove that file", flush=True)
            return build(self, *arguments, **options)

    OpBuilder.jit_load = build_alone


def _environment() -> str:
    """Operators are made for an installation and, as they are compiled for its processor, a machine."""
    from deepspeed import __version__

    parts = sys.prefix, torch.__version__, __version__, platform.node()
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]

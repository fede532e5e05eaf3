"""DeepSpeed's shared memory on CPUs, given back when a run ends, however it ends.

Its all-reduce between ranks of one machine makes a file of some 35 MB a rank in /dev/shm and never removes
it. A file that is open needs no name, so each rank takes its own away once all of them have opened it.
"""

import os
from pathlib import Path

import torch.distributed as dist


def unlink_shared_buffers() -> None:
    """To be called by every rank after `deepspeed.comm.init_distributed`."""
    dist.barrier()
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)

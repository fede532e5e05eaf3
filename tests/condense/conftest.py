import pytest
import torch.distributed as dist


@pytest.fixture
def group_of_one():
    """This process is the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

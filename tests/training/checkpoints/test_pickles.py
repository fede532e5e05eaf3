"""Checkpoints that could run code are refused before DeepSpeed loads them, which would run it."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from condense.training.checkpoints.pickles import check_pickles

pytestmark = pytest.mark.unit


class RunsCode:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """As DeepSpeed lays one out."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    folder = tmp_path / "checkpoint-4" / "global_step4"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step4")
    state = {"loss_scaler": LossScaler(1.0), "zero_stage": ZeroStageEnum(2), "at": fragment_address(3, 4)}
    torch.save({"optimizer_state_dict": state, "fp32": torch.ones(9)}, folder / "zero_pp_rank_0_optim_states.pt")
    torch.save({"module": {"weight": torch.ones(3)}}, folder / "mp_rank_00_model_states.pt")
    check_pickles(folder.parent)
    return folder.parent


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_optim_states.pt", "other.pt"])
def test_code_in_any_file_is_refused_and_not_run(name, checkpoint, tmp_path):
    torch.save({"module": RunsCode(tmp_path / "ran")}, checkpoint / "global_step4" / name)
    with pytest.raises(ValueError, match=rf"{name} holds more than tensors .*mkdir"):
        check_pickles(checkpoint)
    assert not (tmp_path / "ran").exists()
    torch.load(checkpoint / "global_step4" / name, weights_only=False)  # the control: it would have run
    assert (tmp_path / "ran").exists()


class Attribute:
    """Is written as `getattr(owner, name)`, as Python before 3.11.4 writes the member of an enumeration."""

    def __init__(self, owner: object, name: str):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_the_stage_as_an_earlier_python_writes_it(checkpoint):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    path = checkpoint / "global_step4" / "other.pt"
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "gradients")}, path)
    check_pickles(checkpoint)
    for owner, name in ((ZeroStageEnum, "mro"), (LossScaler, "backward")):
        torch.save({"zero_stage": Attribute(owner, name)}, path)
        with pytest.raises(ValueError, match=f"holds more than tensors .*Unsupported use of getattr: {name}"):
            check_pickles(checkpoint)


def test_a_plain_pickle_is_refused(checkpoint, tmp_path):
    path = checkpoint / "global_step4" / "mp_rank_00_model_states.pt"
    path.write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(ValueError, match=path.name):
        check_pickles(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_code_behind_a_link_is_found(checkpoint, tmp_path):
    shutil.move(checkpoint / "global_step4", tmp_path / "elsewhere")
    (checkpoint / "global_step4").symlink_to(tmp_path / "elsewhere")
    torch.save(RunsCode(tmp_path / "ran"), tmp_path / "elsewhere" / "mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match="mkdir"):
        check_pickles(checkpoint)


@pytest.mark.parametrize("name", ["latest", "latest_universal"])
@pytest.mark.parametrize("target", ["../elsewhere", "/tmp/elsewhere", "..", "a/b"])
def test_a_pointer_out_of_the_checkpoint(name, target, checkpoint):
    (checkpoint / name).write_text(target)
    with pytest.raises(ValueError, match=f"{name} names no folder of the checkpoint"):
        check_pickles(checkpoint)


def test_a_truncated_file_is_damaged(checkpoint):
    path = checkpoint / "global_step4" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=f"{path.name} is damaged"):
        check_pickles(checkpoint)


def test_a_folder_that_cannot_be_listed_is_refused(checkpoint, monkeypatch):
    """Its files can still be opened by their names."""
    scandir = os.scandir

    def listed(path):
        if Path(path).name == "global_step4":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    with pytest.raises(ValueError, match="global_step4 can't be read: Permission denied"):
        check_pickles(checkpoint)

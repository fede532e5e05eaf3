"""Plans of models with a depth block against the models themselves: parameters, operations, memory, the table."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typer.testing import CliRunner

from condense import CondenseConfig, CondenseForCausalLM
from condense.cli.main import app
from condense.labs.depth.model import DepthLlamaConfig, DepthLlamaForCausalLM, DepthSettings
from condense.training.planning.fit import reasons_without_waves
from condense.training.planning.operations import count_operations
from condense.training.planning.passes import parameter_shapes

from .shapes import PLAIN, SMALL, recipe
from .test_memory import check_pass

BLOCKS = {
    "euler": {"field_size": 300},
    "rk4": {"field": "mlp_tau", "field_size": 100, "control_size": 3, "solver": "rk4", "steps": 2},
    "layer": {"field": "layer", "steps": 3},
    "adjoint": {"field_size": 300, "steps": 16, "gradient": "adjoint"},
}


class Operations(TorchDispatchMode):
    """FLOPs of matrix products. torch's own counter can't follow gradients that a backward pass takes."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (count := flop_registry.get(function._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def check_operations(model, length, figures):
    ids = torch.zeros(2, length, dtype=torch.long)
    with Operations() as counted:
        model.train()(input_ids=ids, labels=ids).loss.backward()
    assert figures["parameters"] == model.num_parameters()
    assert figures["flops"] / 100 == pytest.approx(counted.flops, rel=0.1)


def folded_config(block, **fields):
    depth = DepthSettings(position=1, num_replaced=2, **(BLOCKS[block] if isinstance(block, str) else block)).to_dict()
    return CondenseConfig(**SMALL | fields, segment_length=32, depth=depth)


def stock_config(block):
    return DepthLlamaConfig(**SMALL, depth=folded_config(block).depth)


@pytest.mark.parametrize("block", BLOCKS)
def test_parameters_and_operations_are_counted(block):
    trained = recipe(128, segment_length=32, attention="eager")
    config = folded_config(block, schedule="sequential")
    model = CondenseForCausalLM._from_config(config, attn_implementation="eager")
    figures = count_operations(config, trained, 1)
    assert [*parameter_shapes(config)] == [parameter.shape for parameter in model.parameters()]
    check_operations(model, 128, figures)


def test_operations_of_a_stock_hybrid():
    config, trained = stock_config("euler"), recipe(64, kind="stock", attention="eager")
    model = DepthLlamaForCausalLM._from_config(config, attn_implementation="eager")
    check_operations(model, 64, count_operations(config, trained, 1))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_pass_of_a_hybrid(block, dtype, checkpointing):
    check_pass(folded_config(block), recipe(96, 2, dtype, "sdpa", checkpointing, segment_length=32))


def test_a_pass_of_a_stock_hybrid():
    check_pass(stock_config("euler"), recipe(64, 2, kind="stock"))


def test_what_a_plan_says_of_waves_and_of_adaptive_solvers(tmp_path):
    trained = recipe(2048, segment_length=32)
    (reason,) = reasons_without_waves(folded_config("euler"), trained, PLAIN, 1).values()
    assert "a depth block" in reason
    folded_config("euler").save_pretrained(tmp_path)
    command = ["train", "passkey_pretrain_1b", f"model={tmp_path}", "model.segment_length=512", "--dry-run"]
    command += ["--report", str(tmp_path / "plan")]
    done = CliRunner().invoke(app, command)
    plan = json.loads((tmp_path / "plan").read_text())["plan"]
    parameters = sum(shape.numel() for shape in parameter_shapes(folded_config("euler")))
    assert f"{parameters:,} parameters" in done.output and plan["parameters"] == parameters
    folded_config({"field_size": 300, "solver": "dopri5"}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'dopri5' chooses them by token"):
        raise CliRunner().invoke(app, command).exception

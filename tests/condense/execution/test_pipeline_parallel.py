"""Pipeline parallelism over several processes against the same model in one process, in float64."""

import threading
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing import get_context, start_processes

from condense.execution.pipeline_parallel import PipelineStage
from condense.layers import RMSNorm

from ...refusals import assert_refused
from ..models import VOCAB, random_ids, tiny_model

pytestmark = pytest.mark.process

TIMEOUT_S = 60
LENGTH = 23  # four whole segments of 5 and a short one
NUM_SEGMENTS = 5
FIVE_LAYERS = {"num_hidden_layers": 5}
NAMES = ("loss", "segment_losses", "segment_targets")


def run_on_ranks(num_ranks, folder, work, *arguments) -> list:
    """Runs `work(*arguments)` on each rank of a process group; returns the results by rank."""
    # A fork server imports the modules once, and the ranks are forked from it.
    get_context("forkserver").set_forkserver_preload([__name__])
    given = (num_ranks, folder, work, arguments)
    context = start_processes(_rank, given, num_ranks, join=False, start_method="forkserver")
    timer = threading.Timer(TIMEOUT_S, lambda: [process.kill() for process in context.processes])
    timer.start()
    try:
        while not context.join():
            pass
    finally:
        timer.cancel()
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def _rank(rank, num_ranks, folder, work, arguments):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S / 2)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", timeout, num_ranks, rank)
    torch.save(work(*arguments), folder / f"{rank}.pt")
    dist.barrier()  # a rank must not end while another still receives its messages
    dist.destroy_process_group()


def text(batch_size=2, length=LENGTH, **more) -> dict:
    ids = random_ids(batch_size, length)
    return {"input_ids": ids, "labels": ids, **more}


def padded(lengths) -> dict:
    """Texts of several lengths, padded on the left."""
    ids = random_ids(len(lengths), max(lengths))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "attention_mask": mask.long()}


def without_labels(begin, end) -> dict:
    ids = random_ids(2, LENGTH)
    return {"input_ids": ids, "labels": ids.index_fill(1, torch.arange(begin, end), -100)}


def fused_norm(norm, hidden):
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def model_of(fields, settings):
    model = tiny_model(**fields).train()
    for module in model.modules():
        if isinstance(module, RMSNorm):  # a Llama's norm is float32: sums in another order would differ by 1e-7
            module.forward = partial(fused_norm, module)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(settings.get("frozen", ())))
    if settings.get("hook_on_embedding"):
        model.model.embed_tokens.register_forward_hook(by_length)
    return model


def by_length(_, given, output):
    """Depends on the length of the text, as the noise of NEFTune does."""
    return output * given[0].shape[1] ** 0.5


def trained_gradients(model) -> dict:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def on_this_rank(cases) -> list:
    """For each case the outputs of training and evaluation, and the gradients; None outside the case's group."""
    results: list = []
    for fields, inputs, settings in cases:
        group = dist.new_group(settings["group"]) if "group" in settings else None
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            results.append(None)
            continue
        model = model_of(fields, settings)
        if settings.get("checkpointing"):
            model.gradient_checkpointing_enable()
        stage = PipelineStage(model, settings.get("layers_per_rank"), group)
        forward_passes = []
        stage.layers[0].register_forward_pre_hook(lambda *_, passes=forward_passes: passes.append(1))
        for _ in range(repeats := settings.get("repeats", 1)):
            trained = stage.loss_and_gradients(**inputs)
        assert len(forward_passes) == repeats * (1 + settings.get("checkpointing", False)) * len(trained.segment_losses)
        gradients = trained_gradients(model)
        evaluated = stage.loss(**{name: value for name, value in inputs.items() if name != "num_items_in_batch"})
        assert not evaluated.loss.requires_grad
        results.append(([{name: output[name] for name in NAMES} for output in (trained, evaluated)], gradients))
    return results


def assert_equals_one_process(case, per_rank) -> None:
    fields, inputs, settings = case
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-13)
    model = model_of(fields, settings)
    for _ in range(settings.get("repeats", 1)):
        output = model(**inputs)
        output.loss.backward()
    expected = {name: output[name].detach() for name in NAMES}
    expected_gradients = trained_gradients(model)

    names = set()
    for (trained, evaluated), gradients in per_rank:
        close(trained, expected)
        if "num_items_in_batch" not in inputs:
            close(evaluated, expected)
        for name, gradient in gradients.items():
            if fields.get("tie_word_embeddings") and name == "lm_head.weight":
                name = "model.embed_tokens.weight"
            close(gradient, expected_gradients[name], msg=lambda text, name=name: f"{settings} {name}: {text}")
            names.add(name)
    assert names == expected_gradients.keys()


TIED = {"tie_word_embeddings": True}
TWO_RANKS = [
    ({}, text(), {}),
    ({}, text(), {"layers_per_rank": [1, 2]}),
    (TIED, text(), {"repeats": 2}),  # gradients accumulate, also those of the copies of a tied weight
    (TIED, text(), {"checkpointing": True}),
    (TIED, text(), {"frozen": ("model.embed_tokens", "model.layers.0", "model.layers.1")}),  # all of the first rank
    ({"bptt_segments": 1}, text(), {}),
    ({"bptt_segments": 2, "memory_source": "layer_input"}, text(), {"checkpointing": True}),
    ({"memory_share": [1.0, 0.0, 0.3]}, text(), {}),
    ({}, padded([9, 23, 14]), {}),
    ({"bptt_segments": 2}, padded([9, 23, 14]), {"checkpointing": True}),
    ({}, without_labels(5, 12), {}),
    ({}, without_labels(14, LENGTH), {}),
    ({}, text(num_items_in_batch=7), {}),
    ({}, text(length=4), {}),  # a single segment
    (TIED, text(), {"hook_on_embedding": True, "repeats": 2}),
    ({}, padded([9, 23, 14]), {"hook_on_embedding": True, "checkpointing": True}),
    ({}, text(), {"hook_on_embedding": True, "frozen": ("model.embed_tokens",)}),
]
THREE_RANKS = [
    (FIVE_LAYERS, text(), {}),
    (FIVE_LAYERS | TIED | {"bptt_segments": 3}, text(), {"layers_per_rank": [1, 3, 1]}),
    (FIVE_LAYERS, padded([9, 23, 14]), {"checkpointing": True}),
    (TIED, text(), {"group": [1, 2]}),  # a subgroup, in which ranks differ from the global ranks
]


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, TWO_RANKS), (3, THREE_RANKS)])
def test_losses_and_gradients_equal_those_of_one_process(num_ranks, cases, tmp_path):
    results = run_on_ranks(num_ranks, tmp_path, on_this_rank, cases)
    for case, per_rank in zip(cases, zip(*results, strict=True), strict=True):
        members = [result for result in per_rank if result is not None]
        assert len(members) == len(case[2].get("group", range(num_ranks)))
        assert_equals_one_process(case, members)


def messages_with_barrier(barrier) -> list:
    """(destination, shape) of each message of this rank.

    The rank waits at `barrier` in every tick in which all ranks have work.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(tiny_model(**FIVE_LAYERS).train())
    sent, ticks = [], {"forward": rank, "backward": num_ranks - 1 - rank}
    isend, backward = dist.isend, torch.autograd.backward

    def tick(direction):
        if num_ranks - 1 <= ticks[direction] < NUM_SEGMENTS:
            barrier.wait(TIMEOUT_S / 3)
        ticks[direction] += 1

    def recorded_isend(tensor, **options):
        sent.append((options["group_dst"], tuple(tensor.shape)))
        return isend(tensor, **options)

    def backward_with_tick(*arguments):
        tick("backward")
        backward(*arguments)

    stage.layers[0].register_forward_pre_hook(lambda *_: tick("forward"))
    with (
        mock.patch.object(dist, "isend", recorded_isend),
        mock.patch.object(torch.autograd, "backward", backward_with_tick),
    ):
        stage.loss_and_gradients(**text())
    assert ticks == {"forward": rank + NUM_SEGMENTS, "backward": num_ranks - 1 - rank + NUM_SEGMENTS}
    return sent


def test_ranks_run_different_segments_at_once_and_send_only_hidden_states(tmp_path):
    # A rank runs segment s while its neighbours run s + 1 and s - 1; otherwise the barrier times out.
    barrier = get_context("forkserver").Barrier(3)
    sent = run_on_ranks(3, tmp_path, messages_with_barrier, barrier)
    shapes = [(2, 5, 24)] * 4 + [(2, 3, 24)]
    assert sent[0] == [(1, shape) for shape in shapes]
    assert sent[1] == [(2, shape) for shape in shapes] + [(0, shape) for shape in shapes[::-1]]
    assert sent[2] == [(1, shape) for shape in shapes[::-1]]


@pytest.mark.usefixtures("group_of_one")
def test_one_rank_equals_one_process():
    case = (TIED, text(), {})
    assert_equals_one_process(case, on_this_rank([case]))


@pytest.mark.usefixtures("group_of_one")
def test_inputs_that_do_not_fit_are_refused():
    model = tiny_model()
    for layers_per_rank in ([2], [1, 2], []):
        assert_refused("add up to the model's layers", PipelineStage, model, layers_per_rank)
    stage = PipelineStage(model)
    assert_refused("hides every token", stage.loss, **text(attention_mask=torch.zeros(2, LENGTH)))
    assert_refused("labels of shape .* one for each token", stage.loss, random_ids(2, LENGTH), labels=random_ids(2, 9))
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB}"):
        stage.loss_and_gradients(random_ids(2, LENGTH) + VOCAB, labels=random_ids(2, LENGTH))

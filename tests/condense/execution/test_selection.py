"""The choice of `schedule="auto"`, and the schedule that runs."""

import pytest
import torch

from condense import FoldedCache
from condense.execution import EXECUTORS, choose_schedule, selection
from condense.execution.selection import faster_as_wave, longest_wave
from condense.segmentation import SegmentPositions

from ...refusals import assert_refused
from ..models import random_ids, tiny_model, torch_checkpoint

pytestmark = pytest.mark.unit


def positions(offsets, segments):
    found = SegmentPositions(len(offsets), 5)
    found.offsets, found.segments = offsets, segments
    return found


@pytest.mark.parametrize(
    ("lengths", "offsets", "segments", "expected"),
    [
        ([23], [0], [0], (4, 1)),
        ([4], [0], [0], (0, 1)),
        ([23, 23], [0, 0], [0, 0], (4, 2)),
        ([23, 60], [0, 0], [0, 0], (8, 1)),  # 4 segments of both rows, then 8 of the longer one
        ([60, 23, 21], [0, 0, 0], [0, 0, 0], (8, 1)),
        ([50, 47, 48], [0, 0, 0], [0, 0, 0], (9, 3)),
        ([23], [2], [3], (4, 1)),  # 3 tokens up to the border, then 20
        ([22], [2], [3], (3, 1)),
        ([2], [2], [3], (0, 1)),
        ([50, 50], [2, 0], [1, 1], (0, 0)),  # rows at different offsets
        ([50, 50], [0, 0], [1, 0], (0, 0)),
    ],
)
def test_longest_wave_counts_segments_and_rows(lengths, offsets, segments, expected):
    assert longest_wave(lengths, positions(offsets, segments)) == expected


@pytest.fixture
def schedules_run(monkeypatch):
    """The names of the schedules that ran, in order."""
    names = []
    for name, run in list(EXECUTORS.items()):
        monkeypatch.setitem(EXECUTORS, name, lambda *args, name=name, run=run: (names.append(name), run(*args))[1])
    return names


def test_the_chosen_schedule_runs(schedules_run, monkeypatch):
    model, ids = tiny_model(), random_ids(2, 100)
    model(ids)
    model(ids[:, :10])
    cache = FoldedCache(model.config)
    for part in ids.split([50, 1, 49], dim=1):
        model(part, past_key_values=cache)
    assert schedules_run == ["wavefront", "sequential", "wavefront", "sequential", "wavefront"]
    schedules_run.clear()
    model.config.schedule = "sequential"
    model(ids)
    monkeypatch.setattr(selection, "choose_schedule", lambda *_: pytest.fail("chose a schedule although one is set"))
    model.config.schedule = "wavefront"
    model(ids[:, :10])
    assert schedules_run == ["sequential", "wavefront"]


@pytest.mark.parametrize("reason", ["hooks", "checkpointing", "autocast", "one layer", "wide"])
def test_auto_takes_the_sequential_order(schedules_run, reason):
    fields = {"one layer": {"num_hidden_layers": 1}, "wide": {"intermediate_size": 4000}}
    model = tiny_model(torch.float32, **fields.get(reason, {}))
    if reason == "hooks":
        model.model.layers[1].register_forward_hook(lambda *_: None)
    if reason == "checkpointing":
        model.train()._set_gradient_checkpointing(True, torch_checkpoint())
    rows = 80 if reason == "wide" else 1
    with torch.autocast("cpu", enabled=reason == "autocast"):
        model(random_ids(1, 25).expand(rows, -1), use_cache=False, logits_to_keep=1)
    assert set(schedules_run) == {"sequential"}


def test_a_wavefront_is_chosen_for_many_segments_and_few_rows():
    model = tiny_model()
    config = model.config  # 3 layers, segments of 5, intermediate size 40
    assert [faster_as_wave(config, segments, 1, "cpu", 4) for segments in (1, 3, 4, 100)] == [False, False, True, True]
    most = selection.CPU_BAND_BYTES // (3 * 5 * 40 * 4)
    assert [faster_as_wave(config, 100, rows, "cpu", 4) for rows in (most, most + 1)] == [True, False]
    most = selection.CUDA_CELL_TOKENS // 5
    assert [faster_as_wave(config, 100, rows, "cuda", 4) for rows in (most, most + 1)] == [True, False]
    assert [faster_as_wave(config, segments, 1, "cuda", 4) for segments in (3, 4)] == [False, True]
    config.num_hidden_layers = 100  # two segments are no wave at any depth
    assert [faster_as_wave(config, segments, 1, "cuda", 4) for segments in (2, 3)] == [False, True]
    config.num_hidden_layers = 3
    assert choose_schedule(config, model.model.layers, [100], positions([0], [0])) == "wavefront"


def test_under_checkpointing_a_wave_is_within_a_group(schedules_run):
    """3 layers: the (4 - 1) (3 - 1) = 6 calls that a group of four segments saves are the least."""
    model, ids = tiny_model().train(), random_ids(1, 60)
    for segments in (3, 4):
        model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=segments))
        model(ids, use_cache=False, logits_to_keep=1)
    assert schedules_run == ["sequential"] * 4 + ["wavefront"] * 3  # an executor for each group of 12 segments


def test_a_wave_of_single_segments_is_refused():
    model, ids = tiny_model(schedule="wavefront").train(), random_ids(1, 60)
    model._set_gradient_checkpointing(True, torch_checkpoint())
    assert_refused("pass checkpoint_segments=2 or more", model, ids, use_cache=False)


def test_layers_that_share_parameters_run_sequentially():
    model = tiny_model(schedule="auto")
    model.model.layers[1] = model.model.layers[0]
    lengths, positions = [400], SegmentPositions(1, model.config.segment_length)
    assert choose_schedule(model.config, model.model.layers, lengths, positions) == "sequential"
    model.config.schedule = "wavefront"
    assert_refused("share parameters", model, random_ids(1, 60))


def test_within_torch_func_auto_runs_sequentially_and_a_wave_is_refused():
    model, ids = tiny_model(attn_implementation="eager"), random_ids(1, 60)
    embeddings = model.model.embed_tokens(ids).detach()

    def last_logits(inputs):
        return model(inputs_embeds=inputs, use_cache=False).logits[0, -1]

    expected = torch.autograd.functional.jacobian(last_logits, embeddings)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(last_logits)(embeddings), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        torch.func.vmap(last_logits)(embeddings[None])[0], last_logits(embeddings), atol=1e-10, rtol=1e-10
    )
    model.config.schedule = "wavefront"
    assert_refused("torch.func", torch.func.jacrev(last_logits), embeddings)

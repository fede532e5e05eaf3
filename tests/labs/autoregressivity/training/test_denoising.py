"""The diffusion model and its switches against plain loops, with diffusers' network and schedulers as the reference."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import get_wsd_schedule

from condense.labs.autoregressivity.training import denoising
from condense.labs.autoregressivity.training.denoiser import DenoiserConfig, DenoiserModel, make_unet
from condense.labs.autoregressivity.training.denoising import Denoising, draw, hidden, validation_states
from condense.labs.autoregressivity.training.diffusion import free_run, noise_schedule, sample, to_images, to_values
from condense.training.data import digits
from condense.training.data.batches import StageBatches
from condense.training.data.digits import load_digits, split
from condense.training.data.tasks import make_examples
from condense.training.planning.dry_run import dry_run
from condense.training.recipe import load_recipe
from condense.training.train import train
from tests.training.recipes import write_recipe
from tests.training.runs import log_lines, logged, run, same_weights

pytestmark = pytest.mark.process

T = 25


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    fields = {"objective": {"kind": "denoising"}, "data": {"task": "digits"}, "checkpoints": {"every": 2, "keep": 2}}
    fields |= {"optimizer": {"learning_rate": 1e-2, "warmup_steps": 1, "weight_decay": 0.0}}
    denoiser, folder = {"kind": "denoiser", "channels": [16]}, tmp_path_factory.mktemp("recipe")
    return write_recipe(folder, denoiser, [(64, 4)], global_batch=6, micro_batch=6, **fields)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return DenoiserModel(DenoiserConfig(channels=[16], steps=T)).eval()


@pytest.fixture(scope="module")
def batch():
    images, _ = load_digits()
    numbers = torch.tensor([5, 11, 400, 1700, 3, 77])
    values = torch.tensor(images[numbers])
    return {"input_ids": values, "labels": values, "places": numbers * 64}


def scheduler(steps=1000, kind="DDPMScheduler"):
    import diffusers

    return getattr(diffusers, kind)(num_train_timesteps=steps, beta_schedule="squaredcos_cap_v2")


def plain_training(recipe, draws, ranks=1):
    """Losses and weights of the stock network with diffusers' loss: no Trainer, none of our model or objective.

    `draws` yields the noise and the times of each micro-batch, given the places of its images.
    """
    torch.manual_seed(recipe.seed)
    unet = make_unet(recipe.model.load_config())
    batches = StageBatches(recipe, make_examples(recipe, None)[0], ranks)
    settings = recipe.optimizer
    optimizer = torch.optim.AdamW(
        unet.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), eps=settings.eps, weight_decay=0.0, fused=True
    )
    rates = get_wsd_schedule(optimizer, 1, recipe.decay_steps, num_training_steps=recipe.steps, min_lr_ratio=0.0)
    per_step = recipe.accumulation(ranks) * ranks
    losses = []
    for step in range(recipe.steps):
        loss = torch.tensor(0.0)
        for part in range(per_step):
            batch = batches[step * per_step + part]
            images = batch["input_ids"].view(-1, 1, 8, 8) / 8 - 1
            noise, times = draws(step, part, batch["places"])
            predicted = unet(scheduler().add_noise(images, noise, times), times).sample
            loss = loss + F.mse_loss(predicted, noise) / per_step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), settings.max_grad_norm)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, unet.state_dict()


@pytest.fixture(scope="module")
def drawn():
    """All that training has drawn, in order."""
    return []


@pytest.fixture(scope="module")
def trained(recipe_file, drawn, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    recipe = load_recipe(recipe_file, [f"output={output}", "evaluation={sequences: 2}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denoising, "draw", lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1])
        train(recipe)
    return recipe


def test_without_a_switch_it_is_plain_ddpm_to_the_bit(trained, drawn):
    assert len(drawn) == trained.steps
    losses, weights = plain_training(trained, lambda step, part, places: drawn[step])
    assert logged(trained.output) == losses
    found = DenoiserModel.from_pretrained(trained.output).state_dict()
    assert {f"experts.0.{name}" for name in weights} == set(found)
    assert all(torch.equal(weights[name.removeprefix("experts.0.")], found[name]) for name in found)


def test_a_resumed_run_has_the_same_noise(trained, tmp_path):
    shutil.copytree(trained.output / "checkpoint-2", tmp_path / "checkpoint-2")
    train(trained.model_copy(update={"output": tmp_path}))
    lines = log_lines(tmp_path)
    assert [line["step"] for line in lines] == [3, 4]
    assert [line["loss"] for line in lines] == logged(trained.output)[2:]
    assert same_weights(trained.output, tmp_path)


@pytest.mark.parametrize("ablation", [{"experts": 4}, {"free_running": 4}])
def test_bfloat16(batch, ablation):
    """As Trainer runs it, within rounding."""
    torch.manual_seed(0)
    objective = Denoising(**ablation)
    model = objective.prepare_model(DenoiserModel(DenoiserConfig(channels=[16])), None)
    losses = []
    for enabled in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled):
            losses.append(objective.losses(model, batch, 6 * 64).loss)
        losses[-1].backward()
    assert losses[0].item() != losses[1].item() and losses[1].item() == pytest.approx(losses[0].item(), rel=0.05)


def test_the_images(batch):
    images, _ = load_digits()
    training, held_out = split()
    assert (len(training), len(held_out)) == (1437, 360) and len({*training, *held_out}) == len(images)
    assert torch.equal(to_values(to_images(batch["input_ids"])), batch["input_ids"])
    assert to_images(torch.tensor([[0, 8, 16] + [0] * 61])).flatten()[:3].tolist() == [-1, 0, 1]


def test_micro_batches_have_the_places_of_their_images(recipe_file):
    recipe = load_recipe(recipe_file, ["micro_batch=3", "stages.0.steps=300"])
    images, _ = load_digits()
    for item in (0, 479, 480):  # the last two are of the second epoch
        part = StageBatches(recipe, make_examples(recipe, None)[0], 1)[item]
        assert torch.equal(part["input_ids"], torch.tensor(images[part["places"] // 64]))


def seen_times(objective, batch, monkeypatch, times):
    """Lets every image of the batch have a given time."""
    noise, _ = draw(batch["places"], T)
    monkeypatch.setattr(denoising, "draw", lambda places, steps: (noise, torch.tensor(times)))
    return noise


def switches(**values):
    """Without the check of `steps`, which 25 steps of a free run would not pass together with another switch."""
    return Denoising.model_construct(steps=T, **values)


def naive_state(model, image, noise, first, last):
    """One image by diffusers' DDIM steps; `first` is the time of the true state."""
    ddim = scheduler(T, "DDIMScheduler")
    ddim.set_timesteps(T)
    state = ddim.add_noise(image[None], noise[None], torch.tensor([first]))
    for time in range(first, last, -1):
        with torch.no_grad():
            state = ddim.step(
                model(state, torch.tensor([time])), time, state, use_clipped_model_output=True
            ).prev_sample
    return state


def naive_loss(model, batch, noise, times, firsts, counted):
    """The mean over images of those counted, by the noise that would make the state of the true image."""
    levels, total = scheduler(T).alphas_cumprod, 0
    for values, eps, time, first, pixels in zip(batch["input_ids"], noise, times, firsts, counted, strict=True):
        image = values.view(1, 8, 8) / 8 - 1
        state = naive_state(model, image, eps, first, time)
        target = (state - levels[time] ** 0.5 * image) / (1 - levels[time]) ** 0.5
        total = total + ((model(state, torch.tensor([time])) - target).square() * pixels.view(8, 8)).sum()
    return total


EVERYTHING = torch.ones(6, 64)


@pytest.mark.parametrize("k", [3, 25, 40])
def test_free_running_against_a_loop_over_images(model, batch, monkeypatch, k):
    """Groups of k steps from the noisy end: a group's first state is true, the others are the model's own."""
    times = [24, 23, 22, 9, 0, 1]
    groups = [list(range(24, -1, -1))[n : n + k] for n in range(0, T, k)]
    firsts = [next(group[0] for group in groups if time in group) for time in times]
    noise = seen_times(switches(), batch, monkeypatch, times)
    found = switches(free_running=k).losses(model, batch, 6 * 64).loss
    expected = naive_loss(model, batch, noise, times, firsts, EVERYTHING) / (6 * 64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.requires_grad


@pytest.mark.parametrize("unknown", ["ignore", "free_run"])
def test_missing_targets_against_a_loop_over_images(model, batch, monkeypatch, unknown):
    objective = switches(missing=0.6, unknown=unknown, seed=4)
    missing = hidden(4, denoising.TIMES, batch["places"], T, 0.6)
    assert (missing.sum(dim=1) == 15).all() and len({tuple(row.tolist()) for row in missing}) == 6
    runs = set()
    for times in ([0, 4, 8, 12, 16, 24], [24, 2, 1, 0, 7, 3], [5, 6, 9, 10, 11, 13]):
        firsts = []
        for row, time in enumerate(times):
            first = time
            while unknown == "free_run" and first < T - 1 and missing[row, first + 1]:
                first += 1
            firsts.append(first)
        counted = EVERYTHING * ~missing[range(6), times][:, None]
        runs |= {f - t for f, t, known in zip(firsts, times, counted[:, 0], strict=True) if known}
        noise = seen_times(objective, batch, monkeypatch, times)
        found = objective.losses(model, batch, 6 * 64).loss
        expected = naive_loss(model, batch, noise, times, firsts, counted) / (6 * 64 * 0.4)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert runs == {0} if unknown == "ignore" else max(runs) > 1


def test_masks_against_a_loop_over_images(model, batch, monkeypatch):
    objective, times = switches(mask=0.5, seed=1), [3, 9, 24, 0, 11, 17]
    masked = hidden(1, denoising.MASKS, batch["places"], 64, 0.5)
    assert (masked.sum(dim=1) == 32).all() and len({tuple(row.tolist()) for row in masked}) == 6
    noise = seen_times(objective, batch, monkeypatch, times)
    expected = naive_loss(model, batch, noise, times, times, (~masked).float()) / (6 * 32)
    torch.testing.assert_close(objective.losses(model, batch, 6 * 64).loss, expected)


@pytest.mark.parametrize("values", [{"missing": 0.6}, {"mask": 0.7}, {"missing": 0.6, "unknown": "free_run"}])
def test_masks_and_missing_targets_belong_to_the_image(model, batch, monkeypatch, values):
    """Alone or among others, at any time of the training: so over epochs, ranks and a resume."""
    times = [3, 9, 24, 0, 11, 17]
    noise = seen_times(None, batch, monkeypatch, times)
    whole = switches(**values).losses(model, batch, 6 * 64).loss
    torch.manual_seed(99)
    parts = 0
    for rows in ([4, 0], [5, 1, 2], [3]):
        drawn = noise[rows], torch.tensor(times)[rows]
        monkeypatch.setattr(denoising, "draw", lambda places, steps, drawn=drawn: drawn)
        part = {name: tensor[rows] for name, tensor in batch.items()}
        parts = parts + switches(**values).losses(model, part, 6 * 64).loss
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("values", [{"missing": 0.6, "unknown": "free_run"}, {"mask": 0.7}])
def test_masks_and_missing_targets_that_are_drawn_anew(model, batch, monkeypatch, values):
    """The same loss as with a fixed choice by the seed that torch's generator gives."""
    seen_times(None, batch, monkeypatch, [3, 9, 24, 0, 11, 17])
    torch.manual_seed(0)
    seeds = [int(torch.randint(2**62, ())) for _ in range(2)]
    torch.manual_seed(0)
    for seed in seeds:
        found = switches(**values, fixed=False).losses(model, batch, 6 * 64).loss
        assert torch.equal(found, switches(**values, seed=seed).losses(model, batch, 6 * 64).loss)
    assert seeds[0] != seeds[1]


def test_draws_differ_by_image_and_by_micro_batch(batch):
    places = torch.arange(2000) * 64
    torch.manual_seed(0)
    (noise, times), (_, other_times) = draw(places, 1000), draw(places, 1000)
    assert not torch.equal(times, other_times)
    torch.manual_seed(0)
    part_noise, part_times = draw(places[500:], 1000)
    assert torch.equal(part_times, times[500:]) and torch.equal(part_noise, noise[500:])
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert noise.std().item() == pytest.approx(1, abs=0.01)
    assert times.min() < 5 and times.max() > 995 and 450 < times.float().mean() < 550


@pytest.mark.parametrize("split", ["interval", "modulo"])
def test_experts_divide_the_times(batch, split, tmp_path):
    """Each expert is a stock network that sees the images of its own times."""
    torch.manual_seed(0)
    model = DenoiserModel(DenoiserConfig(channels=[16], steps=T))
    start = {name: tensor.clone() for name, tensor in model.experts[0].state_dict().items()}
    model.share_out(5, split)
    for expert in model.experts:
        assert all(torch.equal(tensor, start[name]) for name, tensor in expert.state_dict().items())
        torch.nn.init.normal_(expert.conv_out.bias)  # so that they differ
    model.save_pretrained(tmp_path)
    model = DenoiserModel.from_pretrained(tmp_path)
    images, times = torch.randn(6, 1, 8, 8), torch.tensor([0, 4, 5, 24, 23, 11])
    owners = [0, 0, 1, 4, 4, 2] if split == "interval" else [0, 4, 0, 4, 3, 1]
    found = model(images, times)
    for n, (time, owner) in enumerate(zip(times, owners, strict=True)):
        expected = model.experts[owner](images[n : n + 1], (time + 1) * 40 - 1).sample
        torch.testing.assert_close(found[n : n + 1], expected, atol=1e-5, rtol=1e-5)
    found.sum().backward()  # all ranks reduce the gradients of all experts
    gradients = [expert.conv_in.weight.grad for expert in model.experts]
    assert [bool(gradient.any()) for gradient in gradients] == [number in owners for number in range(5)]


def test_the_time_matters(model):
    images = torch.randn(1, 1, 8, 8)
    one, other = (model(images, torch.tensor([time])) for time in (0, 20))
    assert (one - other).abs().max() > 1e-3


def test_the_validation_loss_is_the_same_quantity_for_all_values(model, batch):
    values = batch["input_ids"]
    states, noise, times = validation_states(values, 1000)
    assert len(states) == 6 * 39 and times[:39].tolist() == [25 * n - 1 for n in range(1, 40)]
    for steps in denoising.STEPS:
        others = validation_states(values, steps)
        assert torch.equal(others[0], states) and torch.equal(others[1], noise)
        assert torch.equal((others[2] + 1) * (1000 // steps), times + 1)
    expected = F.mse_loss(model(*validation_states(values, T)[::2]), noise)
    one_by_one = [
        switches(**ablation).evaluation_losses(model, {"input_ids": row[None]})
        for ablation in ({}, {"free_running": 4}, {"missing": 0.5, "unknown": "free_run"}, {"mask": 0.5})
        for row in values
    ]
    for n in range(0, 24, 6):
        sums, targets = (sum(losses[i] for losses in one_by_one[n : n + 6]) for i in (1, 2))
        assert targets.item() == 6 * 39 * 64 and (sums / targets).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("split", ["interval", "modulo"])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_validation_measures_every_expert(batch, split, k):
    """One that never took part would not change the loss."""
    config = DenoiserConfig(channels=[16], num_experts=k, split=split)
    owners = SimpleNamespace(config=config)
    _, _, times = validation_states(batch["input_ids"], 1000)
    counts = DenoiserModel.owners(owners, times).long().bincount(minlength=k)
    assert counts.min() >= 6 * (39 // k) - 6 and counts.sum() == 6 * 39


@pytest.mark.parametrize(("sampler", "steps"), [("ddpm", 25), ("ddpm", 5), ("ddim", 5)])
def test_samples_against_a_loop(model, sampler, steps):
    found = sample(model, 3, steps, sampler, torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    state = torch.randn(3, 1, 8, 8, generator=generator)
    levels = scheduler(T).alphas_cumprod
    for time in range(T - 1, -1, -T // steps):
        level, before = levels[time], levels[time - T // steps] if time >= T // steps else torch.tensor(1.0)
        with torch.no_grad():
            noise = model(state, torch.full((3,), time))
        image = ((state - (1 - level).sqrt() * noise) / level.sqrt()).clamp(-1, 1)
        if sampler == "ddim":
            left = (state - level.sqrt() * image) / (1 - level).sqrt()
            state = before.sqrt() * image + (1 - before).sqrt() * left
            continue
        kept = level / before  # of the signal, from the state before to this one
        mean = before.sqrt() * (1 - kept) / (1 - level) * image + kept.sqrt() * (1 - before) / (1 - level) * state
        state = mean
        if time > 0:
            variance = ((1 - before) / (1 - level) * (1 - kept)).clamp(min=1e-20)
            state = mean + variance.sqrt() * torch.randn(3, 1, 8, 8, generator=generator)
    torch.testing.assert_close(found, state, atol=1e-4, rtol=1e-4)


def test_a_free_run_of_all_steps_is_a_ddim_sample(model):
    state = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    expected = sample(model, 2, T, "ddim", torch.Generator().manual_seed(7))
    found = free_run(model, state, torch.tensor([24, 24]), torch.tensor([-1, -1]), T)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not found.requires_grad


REFUSED = {
    "objective.missing=1.0": "objective.missing=1.0: Input should be less than 1",
    "objective.mask=-0.1": "objective.mask=-0.1: Input should be greater than or equal to 0",
    "objective.experts=3": "experts=3 does not divide 1000 steps: choose a divisor",
    "objective.steps=300": "objective.steps=300: .*choose one of 25, 50, 100, 125, 200, 250, 500, 1000",
    "objective={kind: denoising, mask: 0.5, steps: 500}": "steps=500 and mask=0.5: an ablation changes one of them",
    "objective={kind: next_token}": "data.task=digits and model.kind=denoiser goes with objective.kind=denoising",
    "model={kind: stock, source: m}": "data.task=digits and objective.kind=denoising goes with model.kind=denoiser",
    "data={task: passkey}": "model.kind=denoiser and objective.kind=denoising goes with data.task=digits",
    "stages.0.total_length=128": r"an image has 64 pixels, and the stages have \[128\]",
    "evaluation={sequences: 361}": "evaluation.sequences=361, and 360 images are held out: ask for fewer",
    "model.channels=[20]": r"model.channels=\[20\]: .*give 1 to 4 multiples of 8 of at least 16",
    "model.channels=[8]": r"model.channels=\[8\]: .*give 1 to 4 multiples of 8 of at least 16",
    "gradient_checkpointing=true": "model.kind='denoiser' has none; leave it out",
    "attention=sdpa": "model.kind='denoiser' has no attention=sdpa",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_does_not_fit_is_refused(recipe_file, override):
    with pytest.raises(ValueError, match=REFUSED[override]):
        load_recipe(recipe_file, [override])


def test_a_dry_run_says_that_it_does_not_count_them(recipe_file):
    with pytest.raises(ValueError, match="model.kind='denoiser': a dry run only counts models of the types llama"):
        dry_run(load_recipe(recipe_file))


def test_other_recipes_load_without_the_packages():
    """Each takes seconds: only functions import them."""
    paths = [*Path(denoising.__file__).parent.glob("*.py"), Path(digits.__file__)]
    assert len(paths) > 10
    for path in paths:
        assert not re.search(r"^(from|import) (diffusers|sklearn)", path.read_text(), re.MULTILINE), path


def test_the_missing_extra_is_named_before_anything_is_written(recipe_file, tmp_path, monkeypatch):
    extra = "diffusers>=999; extra == 'autoregressivity'"
    monkeypatch.setattr("condense.extras.requires", lambda name: [extra])
    with pytest.raises(ValueError, match=r"model.kind=denoiser needs diffusers>=999 \(found .*pip install"):
        train(load_recipe(recipe_file, [f"output={tmp_path / 'o'}"]))
    assert not [*tmp_path.iterdir()]


def test_another_model_than_the_objective_asks_for(recipe_file, model, tmp_path):
    model.save_pretrained(tmp_path / "one")
    options = [f"output={tmp_path / 'o'}", f"model.source={tmp_path / 'one'}"]
    with pytest.raises(ValueError, match=r"model.channels=\[24\], and the model in .* has \[16\]: leave it out"):
        load_recipe(recipe_file, [*options, "model.channels=[24]"]).model.load_config()
    loaded = load_recipe(recipe_file, [*options, "objective.experts=2"])
    ready = loaded.objective.prepare_model(loaded.model.load("auto", 0.0), loaded)
    assert json.loads(ready.config.to_json_string())["num_experts"] == 2 and ready.config.steps == 1000
    with pytest.raises(ValueError, match="the model has 2 experts by interval, and the objective asks for 4"):
        ready.share_out(4, "interval")
    with pytest.raises(ValueError, match="steps=10 does not divide the 25 steps of the model"):
        sample(model, 1, 10)
    with pytest.raises(ValueError, match="attention_dropout=0.1: model.kind=denoiser has none"):
        loaded.model.load("auto", 0.1)


# Where a gradient is little more than rounding, Adam moves a weight by it unless eps is large.
TWO_RANKS = ["global_batch=16", "micro_batch=4", "optimizer.eps=1e-4"]


@pytest.mark.slow
def test_two_ranks_of_zero_2_train_as_one_plain_process(recipe_file, tmp_path):
    """By the launcher, with two micro-batches on each rank."""
    recipe = load_recipe(recipe_file, ["output=o", *TWO_RANKS])
    torch.manual_seed(recipe.seed)
    torch.empty((), dtype=torch.int64).random_()  # the base seed that a DataLoader draws
    seeds = [int(torch.randint(2**62, ())) for _ in range(2 * recipe.steps)]  # of the micro-batches of each rank

    def draws(step, part, places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randint", lambda *_: seeds[2 * step + part // 2])
            return draw(places, 1000)

    losses, weights = plain_training(recipe, draws, ranks=2)
    found, _ = run(recipe_file, tmp_path, *TWO_RANKS, launcher=True)
    assert found == pytest.approx(losses, abs=1e-5)
    trained = DenoiserModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[f"experts.0.{name}"], tensor, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ablation", ["experts=4", "free_running=8"])
def test_an_ablation_on_two_ranks_resumes(recipe_file, tmp_path, ablation):
    """A micro-batch of 4 images leaves some of the 4 experts of a rank idle."""
    options = [*TWO_RANKS, f"objective.{ablation}"]
    whole, _ = run(recipe_file, tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed, printed = run(recipe_file, tmp_path / "resumed", *options)
    assert "resuming from" in printed and resumed == whole[2:]


def test_the_schedule_means_the_same_noise_at_each_number_of_steps():
    levels = noise_schedule(1000).alphas_cumprod
    for steps in (500, 250, 125):
        coarse = noise_schedule(steps).alphas_cumprod[:-1]
        torch.testing.assert_close(coarse, levels[1000 // steps - 1 :: 1000 // steps][:-1], atol=2e-5, rtol=1e-3)

"""The grid of ablations: what is trained, how it is compared, and one property from end to end."""

import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from math import log
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from condense.cli.main import app
from condense.eval.report import write_report
from condense.eval.results import write_results
from condense.eval.runner import run_on_ranks
from condense.labs.autoregressivity.study import training
from condense.labs.autoregressivity.study.ablation import Ablation, changes
from condense.labs.autoregressivity.study.experiments import EXPERIMENTS, ablate, ablate_all
from condense.labs.autoregressivity.study.grid import (
    CONTROL,
    KS,
    MODELS,
    NEUTRAL,
    PROPERTIES,
    cells_of,
    is_halved,
    objective_of,
    values_of,
)
from condense.labs.autoregressivity.study.options import AblationOptions
from condense.labs.autoregressivity.study.pictures import draw_summary
from condense.labs.autoregressivity.study.setup import SMALL as SMALL_SIZE
from condense.labs.autoregressivity.study.setup import Setup, Size
from condense.labs.autoregressivity.study.summary import summarize, tables
from condense.labs.autoregressivity.study.text_quality import generate, text_quality
from condense.labs.autoregressivity.study.training import loss_at
from condense.labs.autoregressivity.training.denoiser import LONGEST
from condense.training.data.batches import StageBatches
from condense.training.data.tasks import make_examples
from condense.training.recipe.objectives import OBJECTIVES

pytestmark = pytest.mark.process

SMALL = AblationOptions(small=True, seeds=1)


def test_every_value_is_an_objective_and_every_property_can_be_halved():
    for name in PROPERTIES:
        cells = cells_of(name, range(2))
        assert len({cell.folder for cell in cells}) == len(set(cells)) == len(cells)
        for cell in cells:
            OBJECTIVES.parse(objective_of(cell))
        for model in MODELS:
            values = values_of(name, model)
            assert is_halved(values[0].level) or is_halved(values[1].level)
            assert all(is_halved(value.level) for value in values_of(name, model, small=True))
    assert objective_of(cells_of("weight_sharing", range(1))[0])["kind"] == "next_token"


def test_changes_by_hand():
    """An ablated model with twice the operations is read at half of the steps, and k heads by the loss as generated."""
    neutral = {"loss": 2.0, "operations_per_step": 10.0}
    curve = [{"step": 0, "loss": 5.0}, {"step": 4, "loss": 4.0}, {"step": 8, "loss": 3.0}]
    ablated = {"loss": 3.0, "operations_per_step": 20.0, "curve": curve}
    expected = {"change": [0.5], "change_at_equal_operations": [1.0], "operations": [2.0]}
    assert_close(changes([(neutral, ablated)]), expected)
    cheaper = ablated | {"operations_per_step": 5.0}
    assert changes([(neutral, cheaper)])["change_at_equal_operations"] == pytest.approx([0.5])
    heads = ablated | {"curve": [point | {"loss_as_generated": point["loss"] + 1} for point in curve]}
    as_generated = {"change": [1.0], "change_at_equal_operations": [1.5], "operations": [2.0]}
    assert_close(changes([(neutral, heads)]), as_generated | {"change_of_head_1": [0.5]})


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(values) for name, values in expected.items())


def test_losses_between_validations_follow_a_power_law():
    curve = [{"step": 0, "loss": 7.0}, *({"step": step, "loss": 9 * step**-0.3} for step in (40, 80, 120, 320))]
    for step in (40, 50, 107, 200, 320):
        assert loss_at(curve, step) == pytest.approx(9 * step**-0.3)
    assert loss_at(curve, 0) == pytest.approx(7) and curve[1]["loss"] < loss_at(curve, 30) < loss_at(curve, 3) < 7


def test_the_quality_of_texts_by_hand():
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                             num_attention_heads=1)).eval()  # fmt: skip
    text = torch.tensor([[1, 2, 3, 3, 3, 4], [1, 2, 3, 4, 3, 4]])
    found = text_quality(reference, text, prompt_length=2)
    log_probs = reference(text).logits.log_softmax(-1)
    losses = [-log_probs[row, t - 1, text[row, t]].item() for row in range(2) for t in range(2, 6)]
    assert found["reference_loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)
    assert found["entropy"] == pytest.approx(-5 / 8 * log(5 / 8) - 3 / 8 * log(3 / 8))
    assert found["distinct_1"] == 2 / 8 and found["distinct_2"] == 3 / 6
    written = generate(reference, text[:, :2], 4, seed=1)
    assert written.shape == (2, 6) and torch.equal(written, generate(reference, text[:, :2], 4, seed=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    ablate("complete_supervision", folder, SMALL)
    return folder


def test_a_property_from_end_to_end(folder):
    results = json.loads((folder / "ablation_complete_supervision.json").read_text())
    assert [(value["model"], value["level"]) for value in results["values"]] == [(model, 0.5) for model in MODELS]
    by_name = {(cell["ablated"], cell["model"]): cell for cell in results["cells"]}
    assert len(by_name) == 6
    for model in MODELS:
        neutral, ablated = by_name[NEUTRAL, model], by_name["complete_supervision", model]
        assert neutral["curve"][0]["loss"] == pytest.approx(ablated["curve"][0]["loss"])  # the same quantity
        assert ablated["loss"] != neutral["loss"] and ablated["curve"][-1]["step"] == 4
        assert ablated["parameters"] == neutral["parameters"]
    assert (folder / "ablation_complete_supervision.png").exists()
    assert not list((folder / "runs").iterdir())
    costs, texts, digits = Ablation.tables(results)
    assert len(costs.rows) == 6 and texts.rows[0][0] == digits.rows[0][0] == "real"
    assert "complete supervision" in write_report(folder).read_text()


def operations_of(folder, model, objective):
    setup = Setup(SMALL, folder)
    return training.count_operations(setup.language_recipe(model, objective, 0, folder / "unused"))[0]


def test_operations_of_a_stock_llama_by_hand(folder):
    size, vocab_size = Setup(SMALL, folder).size, len(Setup(SMALL, folder).tokenizer)
    tokens, hidden, inner = size.batch * size.length, size.hidden_size, 40
    weights = 4 * hidden * hidden + 3 * hidden * inner + hidden * vocab_size
    attention = 2 * size.length * hidden  # scores and sums of values for a token
    expected = 3 * 2 * tokens * (weights + attention)
    assert operations_of(folder, "stock", {"kind": "next_token"}) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("objective", [{"kind": "next_token"}, {"kind": "multi_token", "tokens": 2}])
def test_operations_are_those_of_torch_without_what_is_computed_again(folder, objective, monkeypatch):
    found = operations_of(folder, "folded", objective)
    monkeypatch.setattr("condense.loss.checkpoint", lambda function, *args, **options: function(*args))
    recipe = Setup(SMALL, folder).language_recipe("folded", objective, 0, folder / "unused")
    model = recipe.objective.prepare_model(recipe.model.load("auto", 0.0), recipe).train()
    examples, _ = make_examples(recipe, recipe.model.load_tokenizer(recipe.model.load_config()))
    batch = {name: value for name, value in StageBatches(recipe, examples, ranks=1)[0].items() if name != "name"}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        recipe.objective.losses(model, batch, 100).loss.backward()
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_decoding_without_gradients_counts_once(folder):
    """One of two tokens is decoded in a separate forward pass, beside the pass with gradients."""
    plain = operations_of(folder, "stock", {"kind": "next_token"})
    fed = operations_of(folder, "stock", {"kind": "free_running", "steps": 2, "feedback": "argmax"})
    assert 1.2 * plain < fed < 1.4 * plain


def test_two_commands_train_a_model_once(tmp_path, monkeypatch):
    trained = []

    def train(cell, setup):
        sleep(0.2)
        trained.append(cell)
        return {"loss": 1.0}

    monkeypatch.setattr(training, "_train", train)
    cell, setup = cells_of("task_subdivision", range(1))[0], SimpleNamespace(output=tmp_path, described_with_judge=dict)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: training.trained_cell(cell, setup), range(2)))
    assert trained == [cell] and found == [{"loss": 1.0}] * 2


@pytest.mark.usefixtures("without_pictures")
def test_a_stopped_grid_goes_on(folder, monkeypatch):
    """A trained model is not trained again, not even for another property."""
    monkeypatch.setattr(
        "condense.labs.autoregressivity.study.training._train", lambda cell, setup: pytest.fail(cell.folder)
    )
    (folder / "ablation_complete_supervision.records.jsonl").unlink()
    ablate("complete_supervision", folder, SMALL)
    again = Ablation("task_subdivision", SMALL, folder)
    neutral = [cell for cell in again.items() if cell.ablated == NEUTRAL]
    assert len(neutral) == 3 and all(again.measure(cell)["loss"] for cell in neutral)


def test_the_summary_ranks_by_cost(tmp_path):
    """Means 10, 50, -10, 20, 0 % with half-widths of 63.5 times the difference of two seeds."""

    def found(change, difference, **further):
        value = {"variant": "", "level": 2, "change": [change, change + difference],
                 "change_at_equal_operations": [0.0, 0.0], **further}  # fmt: skip
        return {"seeds": 2, "values": [value | {"model": model} for model in MODELS]}

    changes_of = dict(zip(PROPERTIES, (0.1, 0.5, -0.1, 0.2, 0.0), strict=True))
    results = {name: found(change, 0.0) for name, change in changes_of.items()}
    summary = summarize(results)
    write_results(tmp_path / "ablation", summary, summary["rows"])
    draw_summary(summary, tmp_path / "ablation")
    first, every = tables(json.loads((tmp_path / "ablation.json").read_text()))
    names = [row[0] for row in first.rows]
    assert names[:2] == ["weight sharing", "frequent supervision"] and names[-1] == "teacher forcing"
    by_name = {row[0]: row for row in first.rows}
    assert [by_name[name.replace("_", " ")][1] for name in PROPERTIES] == ["3", "1", "5", "2", "4"]
    # The loss of the diffusion model does not see its steps; the other properties have the ranks 1 to 4.
    assert by_name["task subdivision"][7:] == ["-"] * 3
    assert [by_name[name.replace("_", " ")][7] for name in list(PROPERTIES)[1:]] == ["1", "4", "2", "3"]
    assert len(every.rows) == 15

    results["frequent_supervision"] = found(0.2, 0.02)  # from 0.083 to 0.337
    results["complete_supervision"] = found(0.0, -0.002)  # below it
    for model in MODELS:
        values = results["weight_sharing"]["values"]
        values += [value | {"variant": name, "change": [change] * 2} for name, change in (("w", 0.7), (CONTROL, 0.9))
                   for value in values[:3] if value["model"] == model]  # fmt: skip
    first, _ = tables(summarize(results))
    by_name = {row[0]: row for row in first.rows}
    ranks = [by_name[name.replace("_", " ")][1] for name in PROPERTIES]
    assert ranks == ["2-3", "1", "5", "2-3", "4"]
    assert by_name["weight sharing"][3] == "w: 70.0 [70.0, 70.0]" and by_name["teacher forcing"][3] == "-"


@pytest.mark.usefixtures("without_pictures")
def test_samples_of_fewer_steps_take_fewer_evaluations(folder):
    """Models of 1,000 / k steps take 40 / k evaluations, which are 25 of 1,000 steps apart and reach all residues."""
    ablate("task_subdivision", folder, SMALL)
    results = json.loads((folder / "ablation_task_subdivision.json").read_text())
    evaluations = {c["level"]: c["quality"]["evaluations"] for c in results["cells"] if c["model"] == "diffusion"}
    assert evaluations == {0: SMALL_SIZE.sampling_steps, 2: SMALL_SIZE.sampling_steps // 2}
    by_model = {value["model"]: value for value in results["values"]}
    assert "frechet_difference" in by_model["diffusion"] and "change_of_head_1" in by_model["folded"]
    assert "see its samples" in Ablation.tables(results)[0].title
    apart = LONGEST // Size().sampling_steps
    for k in KS:
        assert {time % k for time in range(apart - 1, LONGEST, apart)} == set(range(k))
        assert (LONGEST // k) % (Size().sampling_steps // k) == 0


def test_measurements_are_compared_by_contents_and_not_by_names(folder, tmp_path):
    texts = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "d.txt")]
    for number, path in enumerate(texts):
        path.write_text("some words " * (2 + number % 2))
    one, other, swapped = (
        Setup(AblationOptions(text=texts[n], held_out=texts[m]), folder) for n, m in ((0, 1), (2, 3), (1, 0))
    )
    assert one.described() == other.described() != swapped.described()
    assert one.text_names == "a.txt, b.txt"
    own = Setup(SMALL, folder).described_with_judge()
    for name in ("copy", "changed"):
        shutil.copytree(folder / "inputs/reference", tmp_path / name)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "changed")
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "changed")
    config = json.loads((shutil.copytree(tmp_path / "copy", tmp_path / "eps") / "config.json").read_text())
    (tmp_path / "eps" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    copy, changed, eps = (
        Setup(AblationOptions(small=True, seeds=1, reference=str(tmp_path / name)), folder)
        for name in ("copy", "changed", "eps")
    )
    assert copy.described_with_judge() == own
    assert own not in (changed.described_with_judge(), eps.described_with_judge())
    with pytest.raises(ValueError, match="was judged by another reference model"):
        training.trained_cell(cells_of("complete_supervision", range(1))[0], changed)


def test_only_the_first_process_of_all_ablations_has_results(tmp_path, monkeypatch):
    monkeypatch.setattr("condense.labs.autoregressivity.study.experiments.ablate", lambda *arguments: None)
    assert ablate_all(tmp_path, SMALL) == {} and not list(tmp_path.iterdir())


def test_refusals(folder, tmp_path):
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in texts:
        path.write_text("some words " * 2000)
    with pytest.raises(ValueError, match="has models of other texts or sizes: pass another --output"):
        Setup(AblationOptions(text=texts[0], held_out=texts[1]), folder).make()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=301, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))  # fmt: skip
    model.save_pretrained(tmp_path / "other")
    tokenizer = Setup(SMALL, folder).tokenizer
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="has another tokenizer than the ablated models"):
        Setup(AblationOptions(small=True, reference=str(tmp_path / "other")), folder).make()
    with pytest.raises(ValueError, match="--text and --held-out belong together"):
        AblationOptions(text=tmp_path)
    with pytest.raises(ValueError, match="text to train on and to evaluate with"):
        AblationOptions(text=tmp_path / "one.txt", held_out=tmp_path / "runs" / ".." / "one.txt")


@pytest.mark.slow
def test_all_of_it_small(tmp_path):
    results = ablate_all(tmp_path, SMALL)
    assert len(results) == len(EXPERIMENTS) + 1 and len(tables(results["ablation"])[0].rows) == 5
    assert "what it costs to halve each property" in write_report(tmp_path).read_text()


@pytest.mark.slow
def test_processes_share_the_models(tmp_path):
    one = ablate("task_subdivision", tmp_path / "one", SMALL)
    two = ablate("task_subdivision", tmp_path / "two", AblationOptions(small=True, seeds=1, ranks=2))
    assert [cell["curve"] for cell in one["cells"]] == [cell["curve"] for cell in two["cells"]]


def test_the_command_passes_its_arguments_to_processes(tmp_path, monkeypatch):
    passed = []
    call_on_ranks = "condense.eval.runner.call_on_ranks"
    monkeypatch.setattr(call_on_ranks, lambda number, *work: passed.append((number, pickle.dumps(work))))
    options = ["--small", "--ranks", "2", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["study", "ablations", "sampling", *options])
    assert isinstance(done.exception, FileNotFoundError), done.exception  # the processes write no results here
    ((number, work),) = passed
    called, make_task, kind, *_ = pickle.loads(work)
    assert (number, called, kind) == (2, run_on_ranks, "ablation_sampling") and make_task.args == ("sampling",)

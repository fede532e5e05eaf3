"""A saved model loads in a process that has not imported this package, with `trust_remote_code=True`."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from condense import CondenseConfig, CondenseForCausalLM, CondenseModel, to_stock
from condense.extras import how_to_install
from condense.hub.remote_code import MODULE
from condense.labs.autoregressivity.model import MultiTokenForCausalLM, PositionExpertsForCausalLM
from condense.labs.depth.model import to_depth_llama
from tests.labs.depth.model.models import depth_model

from ...conftest import new_processes
from ..models import tiny_config, tiny_model

pytestmark = pytest.mark.process

PRELUDE = """
import json, sys
assert "condense" not in sys.modules
def show(value):
    print("shown", json.dumps(value))
"""
GENERATES = """
import torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    show([type(model).__name__, model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9).tolist()])
"""


@pytest.fixture(scope="module")
def fresh():
    """Runs code in new processes that have imported transformers; returns what the code shows."""
    with new_processes("torch, transformers.pipelines, transformers.models.llama.modeling_llama") as processes:

        def run(code, *arguments):
            done = processes(PRELUDE + code, *arguments)
            assert done.returncode == 0, done.stderr[-3000:]
            lines = [line.partition("shown ") for line in done.stdout.splitlines()]
            return [json.loads(value) for _, found, value in lines if found]

        yield run


@torch.no_grad()
def generated(model):
    return [type(model).__name__, model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9).tolist()]


KINDS = {
    "folded": lambda: tiny_model(torch.float32),
    "qwen3": lambda: tiny_model(torch.float32, family="qwen3"),
    "depth": lambda: depth_model().float(),
    "depth llama": lambda: to_depth_llama(depth_model().float()),
    "heads": lambda: MultiTokenForCausalLM.from_base(tiny_model(torch.float32), 2),
    "experts of stock": lambda: PositionExpertsForCausalLM.from_base(to_stock(tiny_model(torch.float32)), 2, "modulo"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_loads(kind, fresh, tmp_path):
    model = KINDS[kind]()
    model.save_pretrained(tmp_path)
    assert fresh(GENERATES, tmp_path) == [generated(model)]


def test_what_was_loaded_by_it_is_saved_like_any_other_and_may_be_moved(fresh, tmp_path):
    """transformers would copy the package's modules into the folder."""
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path / "first")
    code = """
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/first", trust_remote_code=True).save_pretrained(sys.argv[1] + "/2")
"""
    fresh(code, tmp_path)
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert {path.name for path in (tmp_path / "2").iterdir()} == names
    assert [name for name in names if name.endswith(".py")] == [f"{MODULE}.py"]
    for name in ("config.json", f"{MODULE}.py"):
        assert (tmp_path / "2" / name).read_text() == (tmp_path / "first" / name).read_text()
    shutil.move(tmp_path / "2", tmp_path / "moved to 3.1-x")
    shutil.rmtree(tmp_path / "first")
    assert fresh(GENERATES, tmp_path / "moved to 3.1-x") == [generated(model)]


def test_two_models_in_one_process(fresh, tmp_path):
    models = [tiny_model(torch.float32, seed=seed) for seed in (1, 2)]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
    assert fresh(GENERATES, tmp_path / "0", tmp_path / "1") == [generated(model) for model in models]


def test_a_model_without_a_head_and_a_configuration(fresh, tmp_path):
    CondenseModel(tiny_config()).save_pretrained(tmp_path / "model")
    tiny_config(segment_length=7).save_pretrained(tmp_path / "configuration")
    code = """
from transformers import AutoConfig, AutoModel
config = AutoConfig.from_pretrained(sys.argv[1] + "/configuration", trust_remote_code=True)
model = AutoModel.from_pretrained(sys.argv[1] + "/model", trust_remote_code=True)
show([type(model).__name__, config.segment_length])
"""
    assert fresh(code, tmp_path) == [["CondenseModel", 7]]


def test_without_trust_the_error_names_it_and_nothing_runs(fresh, folded):
    code = """
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
for load in (AutoModelForCausalLM.from_pretrained, lambda folder: pipeline("text-generation", model=folder)):
    try:
        load(sys.argv[1])
    except ValueError as error:
        show(str(error))
assert AutoTokenizer.from_pretrained(sys.argv[1])("The sky").input_ids
assert "condense" not in sys.modules
"""
    said = fresh(code, folded)
    assert len(said) == 2 and all("pass the argument `trust_remote_code=True`" in line for line in said)


def test_where_the_package_is_not_installed_the_error_says_how(fresh, folded):
    """transformers itself would tell to install the package `condense` of PyPI, which is somebody else's."""
    code = """
sys.modules["condense"] = None
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    show(str(error))
"""
    (said,) = fresh(code, folded)
    assert "the package condense-llama, which is not on PyPI" in said and said.endswith(f"): {how_to_install()}.")


def test_a_pipeline(fresh, folded):
    code = """
from transformers import pipeline
generate = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
show(generate("The sky is", max_new_tokens=5, do_sample=False, return_tensors=True)[0]["generated_token_ids"])
"""
    model, tokenizer = CondenseForCausalLM.from_pretrained(folded), AutoTokenizer.from_pretrained(folded)
    ids = model.generate(**tokenizer("The sky is", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert fresh(code, folded) == ids.tolist()


TASK = """
task: mini
dataset_path: json
dataset_kwargs: {data_files: FOLDER/mini.jsonl}
test_split: train
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: " {{answer}}"
metric_list: [{metric: perplexity}]
"""


def test_the_harness_runs_it_as_hf(fresh, folded, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra harness")
    code = """
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
found = simple_evaluate(
    "hf", model_args={"pretrained": sys.argv[1], "trust_remote_code": True, "device": "cpu", "dtype": "float32"},
    tasks=["mini"], task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False), bootstrap_iters=0,
)
show(found["results"]["mini"]["perplexity,none"])
"""
    text = "The sky is blue. The sun is yellow. Here we go. There and back again. "
    (tmp_path / "mini.jsonl").write_text(json.dumps({"text": text.strip(), "answer": "Here we go"}))
    (tmp_path / "mini.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    found = fresh(code, folded, tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(folded), CondenseForCausalLM.from_pretrained(folded)
    ids = tokenizer(text + "Here we go", return_tensors="pt").input_ids
    num = len(tokenizer("Here we go").input_ids)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, -num - 1 : -1], ids[0, -num:], reduction="sum")
    assert found == [pytest.approx(losses.exp().item(), rel=1e-4)]


def test_trl_and_peft(fresh, folded, tmp_path):
    for package in ("trl", "datasets", "peft"):
        pytest.importorskip(package)
    code = """
import datasets, peft, trl
assert "condense" not in sys.modules
arguments = trl.SFTConfig(
    output_dir=sys.argv[2], max_steps=1, per_device_train_batch_size=2, max_length=64, report_to="none", use_cpu=True,
    bf16=False, model_init_kwargs={"trust_remote_code": True},
)
data = datasets.Dataset.from_dict({"text": ["The sky is blue. The sun is yellow."] * 4})
trainer = trl.SFTTrainer(
    sys.argv[1], args=arguments, train_dataset=data, peft_config=peft.LoraConfig(task_type="CAUSAL_LM")
)
trainer.train()
trainer.save_model(sys.argv[2] + "/adapters")
show([type(trainer.model.base_model.model).__name__])
"""
    assert fresh(code, folded, tmp_path) == [["CondenseForCausalLM"]]
    code = """
from peft import AutoPeftModelForCausalLM
assert "condense" not in sys.modules
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1] + "/adapters", trust_remote_code=True)
show([type(model.base_model.model).__name__, model.config.segment_length])
"""
    assert fresh(code, tmp_path) == [["CondenseForCausalLM", 16]]


def test_the_code_of_a_folder_is_not_run_where_the_package_was_imported(tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    (tmp_path / f"{MODULE}.py").write_text("raise AssertionError")
    for auto in (AutoConfig, AutoModel, AutoModelForCausalLM):
        assert auto.from_pretrained(tmp_path, trust_remote_code=True) is not None


def test_another_map_in_a_checkpoint_is_not_passed_on(llama, tmp_path):
    """Neither folding a model that has its own remote code nor converting back writes the names of that code."""
    folder = shutil.copytree(llama, tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    foreign = {"AutoConfig": "theirs.Config", "AutoModelForSequenceClassification": "theirs.Classifier"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": foreign}))
    model = CondenseForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "folded")
    written = json.loads((tmp_path / "folded" / "config.json").read_text())
    assert written["auto_map"] == dict(CondenseConfig.auto_map) and "theirs" not in str(written)
    to_stock(CondenseForCausalLM.from_pretrained(tmp_path / "folded")).save_pretrained(tmp_path / "stock")
    assert "auto_map" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    assert not (tmp_path / "stock" / f"{MODULE}.py").exists()


def test_a_wrapper_names_its_own_code_and_its_base_none(tmp_path):
    MultiTokenForCausalLM.from_base(tiny_model(torch.float32), 2).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"]["AutoConfig"] == f"{MODULE}.MultiTokenConfig" and "auto_map" not in written["base"]

"""Where libraries look for a model by its names, the models of this package are found."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import AutoModelForCausalLM, pipeline
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from condense import CondenseForCausalLM, CondenseModel
from condense.labs.autoregressivity import model as autoregressivity
from condense.labs.depth import model as depth

pytestmark = pytest.mark.process

CAUSAL_LMS = [
    CondenseForCausalLM,
    depth.DepthLlamaForCausalLM,
    autoregressivity.BlockDiffusionForCausalLM,
    autoregressivity.MultiTokenForCausalLM,
    autoregressivity.PositionExpertsForCausalLM,
]


def by_name(parameter):
    return parameter.__name__


@pytest.mark.parametrize("model_class", CAUSAL_LMS, ids=by_name)
def test_a_causal_language_model_is_in_the_tables(model_class):
    config_class = model_class.config_class
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config_class.model_type] == model_class.__name__
    assert AutoModelForCausalLM._model_mapping[config_class] is model_class


@pytest.mark.parametrize("model_class", [*CAUSAL_LMS, CondenseModel, depth.DepthLlamaModel], ids=by_name)
def test_a_class_is_found_where_a_checkpoint_names_it(model_class):
    assert getattr(transformers, model_class.__name__) is model_class


@pytest.mark.parametrize("before", ["import transformers", "import transformers, transformers.processing_utils", ""])
def test_a_class_is_found_by_libraries_imported_before_and_after(before):
    """transformers makes a second module of itself when it loads its processors."""
    code = f"""
{before}
import condense
from transformers import ProcessorMixin
class After:
    import transformers
held = {{After.transformers, *([transformers] if "transformers" in globals() else [])}}
assert all(module.CondenseForCausalLM is condense.CondenseForCausalLM for module in held)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_base_models_are_in_the_tables():
    for model_class in (CondenseModel, depth.DepthLlamaModel):
        assert MODEL_MAPPING_NAMES[model_class.config_class.model_type] == model_class.__name__


def test_the_package_registers_the_model(new_process):
    code = (
        "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names\n"
        "assert names['condense_llama'] == 'CondenseForCausalLM'"
    )
    run = new_process(code)
    assert run.returncode == 0, run.stderr


def test_a_pipeline_supports_the_model(folded, caplog):
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.ERROR):
        generate = pipeline("text-generation", model=str(folded))
    assert isinstance(generate.model, CondenseForCausalLM)
    assert "not supported" not in caplog.text
    assert generate("The sky is", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("The sky is")


def test_trl_trains_a_folded_folder(folded, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, max_length=64, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"text": ["The sky is blue. The sun is yellow."] * 4})
    trainer = trl.SFTTrainer(str(folded), args=arguments, train_dataset=data)
    assert type(trainer.model) is CondenseForCausalLM and trainer.model.config.segment_length == 16
    trainer.train()
    trainer.save_model(tmp_path / "trained")
    again = trl.SFTTrainer(str(tmp_path / "trained"), args=arguments, train_dataset=data)  # the file has an auto_map
    assert type(again.model) is CondenseForCausalLM

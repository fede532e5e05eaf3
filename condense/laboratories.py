"""The laboratories' additions to the core: dotted names, each imported when it is first used.

The core imports no laboratory (tests/test_architecture.py). A new decoder block, model, objective or command is a line
here and a class in its laboratory.
"""

import importlib

# Blocks of the decoder stack, by the field of the configuration that holds their settings.
DECODER_BLOCKS = {"depth": "condense.labs.depth.model.block:DepthBlock"}

# Stock models with such a block, by model type.
DEPTH_LLAMA = "condense_depth_llama"
STOCK_MODELS = {DEPTH_LLAMA: "condense.labs.depth.model.llama:DepthLlamaForCausalLM"}

# Packages that register models with transformers' Auto classes, by model type.
REGISTERED_BY = {
    DEPTH_LLAMA: "condense.labs.depth.model",
    "condense_block_diffusion": "condense.labs.autoregressivity.model",
    "condense_multi_token": "condense.labs.autoregressivity.model",
    "condense_position_experts": "condense.labs.autoregressivity.model",
}

# Kinds of a recipe's `model` and `objective`.
MODEL_KINDS = {
    "denoiser": "condense.labs.autoregressivity.training.denoiser_kind:DenoiserKind",
}
OBJECTIVES = {
    "duration_jitter": "condense.labs.continuity.training.duration_jitter:DurationJitter",
    "block_diffusion": "condense.labs.autoregressivity.training.block_diffusion:BlockDiffusion",
    "denoising": "condense.labs.autoregressivity.training.denoising:Denoising",
    "free_running": "condense.labs.autoregressivity.training.free_running:FreeRunning",
    "missing_targets": "condense.labs.autoregressivity.training.missing_targets:MissingTargets",
    "multi_token": "condense.labs.autoregressivity.training.multi_token:MultiToken",
    "partial_logits": "condense.labs.autoregressivity.training.partial_logits:PartialLogits",
    "position_experts": "condense.labs.autoregressivity.training.position_experts:PositionExperts",
    "speech_rate": "condense.labs.autoregressivity.training.speech_rate:SpeechRateObjective",
    "synthetic_states": "condense.labs.autoregressivity.training.synthetic_states:SyntheticStates",
}

# Options of `condense convert` that describe a decoder block.
BLOCK_OPTIONS = "condense.labs.depth.study.conversion:BlockOptions"

# Commands `condense NAME` and `condense study NAME`.
COMMANDS = {"probe": "condense.labs.continuity.study.command:probe"}
STUDIES = {
    "ingredients": "condense.labs.ingredients.study.command:ingredients",
    "depth": "condense.labs.depth.study.command:depth",
    "ablations": "condense.labs.autoregressivity.study.command:ablations",
}

# Commands `condense sample NAME`.
SAMPLES = {"questions": "condense.labs.continuity.study.command:questions"}

# Functions from the kind of a result to the object with its tables, by the kind's first word.
SHOWN_BY = {
    "ingredients": "condense.labs.ingredients.study.study:shown_by",
    "probe": "condense.labs.continuity.study.probes:shown_by",
    "depth": "condense.labs.depth.study.experiments:shown_by",
    "ablation": "condense.labs.autoregressivity.study.experiments:shown_by",
}


def register_models() -> None:
    """Registers the laboratories' models with transformers' Auto classes, as `import condense` does folded ones."""
    for package in dict.fromkeys(REGISTERED_BY.values()):
        importlib.import_module(package)

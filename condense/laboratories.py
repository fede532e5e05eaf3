"""The laboratories' additions to the core: dotted names, each imported when it is first used.

The core imports no laboratory (tests/test_architecture.py). A new decoder block, model, objective or command is a line
here and a class in its laboratory.
"""

import importlib

# Blocks of the decoder stack, by the field of the configuration that holds their settings.
DECODER_BLOCKS = {"depth": "condense.depth.block:DepthBlock"}

# Stock models with such a block, by model type.
DEPTH_LLAMA = "condense_depth_llama"
STOCK_MODELS = {DEPTH_LLAMA: "condense.depth.llama:DepthLlamaForCausalLM"}

# Packages that register models with transformers' Auto classes, by model type.
REGISTERED_BY = {
    DEPTH_LLAMA: "condense.depth",
    "condense_block_diffusion": "condense.autoregressivity",
    "condense_multi_token": "condense.autoregressivity",
    "condense_position_experts": "condense.autoregressivity",
}

# Kinds of a recipe's `model` and `objective`.
MODEL_KINDS = {
    "denoiser": "condense.training.autoregressivity.denoiser_kind:DenoiserKind",
}
OBJECTIVES = {
    "duration_jitter": "condense.training.continuity.duration_jitter:DurationJitter",
    "block_diffusion": "condense.training.autoregressivity.block_diffusion:BlockDiffusion",
    "denoising": "condense.training.autoregressivity.denoising:Denoising",
    "free_running": "condense.training.autoregressivity.free_running:FreeRunning",
    "missing_targets": "condense.training.autoregressivity.missing_targets:MissingTargets",
    "multi_token": "condense.training.autoregressivity.multi_token:MultiToken",
    "partial_logits": "condense.training.autoregressivity.partial_logits:PartialLogits",
    "position_experts": "condense.training.autoregressivity.position_experts:PositionExperts",
    "speech_rate": "condense.training.autoregressivity.speech_rate:SpeechRateObjective",
    "synthetic_states": "condense.training.autoregressivity.synthetic_states:SyntheticStates",
}

# Options of `condense convert` that describe a decoder block.
BLOCK_OPTIONS = "condense.eval.depth.conversion:BlockOptions"

# Commands `condense NAME` and `condense study NAME`.
COMMANDS = {"probe": "condense.eval.continuity.command:probe"}
STUDIES = {
    "ingredients": "condense.eval.ingredients.command:ingredients",
    "depth": "condense.eval.depth.command:depth",
    "ablations": "condense.eval.autoregressivity.command:ablations",
}

# Commands `condense sample NAME`.
SAMPLES = {"questions": "condense.eval.continuity.command:questions"}

# Functions from the kind of a result to the object with its tables, by the kind's first word.
SHOWN_BY = {
    "ingredients": "condense.eval.ingredients.study:shown_by",
    "probe": "condense.eval.continuity.probes:shown_by",
    "depth": "condense.eval.depth.experiments:shown_by",
    "ablation": "condense.eval.autoregressivity.experiments:shown_by",
}


def register_models() -> None:
    """Registers the laboratories' models with transformers' Auto classes, as `import condense` does folded ones."""
    for package in dict.fromkeys(REGISTERED_BY.values()):
        importlib.import_module(package)

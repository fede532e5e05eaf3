"""A run as one object: what is trained, on what data, for how long, and where it is written."""

from .data import (
    BadDocuments,
    Data,
    DigitsData,
    DocumentData,
    FactsData,
    GeneratedData,
    PasskeyData,
    QuestionData,
    RecallData,
    SampleData,
    Source,
    SummarizationData,
    TextData,
)
from .loading import load_recipe
from .lora import LoRA
from .models import MODELS, ModelKind
from .objectives import OBJECTIVES, Losses, ObjectiveKind
from .schema import Checkpoints, Curriculum, Evaluation, Optimizer, Recipe, Stage
from .section import MAY_CHANGE, MAY_CHANGE_FROM_HERE, Section

__all__ = [
    "MAY_CHANGE",
    "MAY_CHANGE_FROM_HERE",
    "MODELS",
    "OBJECTIVES",
    "BadDocuments",
    "Checkpoints",
    "Curriculum",
    "Data",
    "DigitsData",
    "DocumentData",
    "Evaluation",
    "FactsData",
    "GeneratedData",
    "LoRA",
    "Losses",
    "ModelKind",
    "ObjectiveKind",
    "Optimizer",
    "PasskeyData",
    "QuestionData",
    "RecallData",
    "Recipe",
    "SampleData",
    "Section",
    "Source",
    "Stage",
    "SummarizationData",
    "TextData",
    "load_recipe",
]

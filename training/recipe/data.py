"""The keys of `data`: what a run is trained on."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..data.fact_kinds import KINDS, check_kinds
from ..data.recall import Form
from .section import MAY_CHANGE, Section


class Source(Section):
    """Documents: local files by name or glob pattern (.txt, .jsonl, .parquet), or a data set of the hub."""

    files: str | None = None
    hub: str | None = Field(None, description="OWNER/NAME, streamed")
    name: str | None = Field(None, description="configuration of the hub's data set")
    split: str | None = Field(None, description="of the hub's data set; None: train")
    revision: str | None = Field(None, description="branch, tag or commit of the hub's data set")
    text: str = Field(
        "text", description="field with the document, such as text or content.text; the items of a list are joined"
    )
    summary: str = Field("summary", description="field with its summary; of a list, the first item")
    at_least: dict[str, float] = Field(
        {}, description="numeric fields and their lowest values: documents below are dropped before tokenisation"
    )

    @property
    def label(self) -> str:
        """Returns the pattern of files, or the data set of the hub with its configuration and split."""
        return self.files or ":".join(part for part in (self.hub, self.name, self.split) if part)

    @model_validator(mode="after")
    def _one_place(self):
        if (self.files is None) == (self.hub is None):
            raise ValueError("a source names either files or hub")
        if self.files is not None and (self.name or self.split or self.revision):
            raise ValueError("name, split and revision belong to a source of the hub, not to files")
        return self


BadDocuments = Literal["skip", "refuse"]


class DocumentData(Section):
    """The base of tasks that read documents."""

    sources: list[Source] = Field(min_length=1)
    bad_documents: BadDocuments = Field("refuse", description="broken lines, missing fields, ...")
    prepared: Annotated[Path, MAY_CHANGE] = Field(Path("runs/prepared"), description="folder of documents as tokens")
    max_documents: int | None = Field(
        None,
        ge=1,
        description="documents to keep, the first ones; None: all of files, or as many as the steps need of the hub",
    )


class TextData(DocumentData):
    """Text to predict."""

    task: Literal["text"]
    min_tokens: int = Field(2, ge=2, description="shorter documents are dropped")
    fit: Literal["cut", "pack"] = Field(
        "pack", description="cut: whole pieces of the total length; pack: remainders share sequences"
    )


class SummarizationData(DocumentData):
    """Documents, each followed by a summary to predict."""

    task: Literal["summarization"]
    too_long: Literal["drop", "cut"] = Field("drop", description="cut: the document loses its end")


class QuestionData(DocumentData):
    """Prompts, used unchanged, each followed by an answer to predict."""

    task: Literal["questions"]


class GeneratedData(Section):
    """Texts that are generated, each with an answer to predict."""

    task: str
    background: int = Field(2, ge=0, description="tokens of each text, besides the answer, that are trained on")
    shortest: float = Field(0.5, gt=0, le=1, description="length of the shortest text as a share of the total length")


class AskedData(GeneratedData):
    """The base of texts that have several things to ask about."""

    questions: int = Field(
        1, ge=1, description="in a training text, each about another key or fact; fewer if more do not fit"
    )
    brief: float = Field(
        0.0, ge=0, le=1, description="share of training questions that end at the word to look up; the answer follows"
    )


class PasskeyData(GeneratedData):
    """Numbers to find in irrelevant text; one is asked for."""

    task: Literal["passkey"]
    num_keys: int = Field(1, ge=1, description="in a text")
    num_digits: int = Field(4, ge=1, description="of each key")
    early_questions: int = Field(
        0, ge=0, description="maximum questions behind the key in a training text, for one digit, which is a label only"
    )


class RecallData(AskedData):
    """Keys with values, in sentences between irrelevant ones; the value of a key is asked for."""

    task: Literal["recall"]
    pairs: int = Field(16, ge=1, description="maximum keys in a text, which has any number from 1")
    form: Form = Field("single", description="single: one value a key; multi_value; overwritten: the last one counts")
    values: int = Field(2, ge=1, description="of each key, with form=multi_value")
    overwritten: float = Field(0.5, ge=0, le=1, description="share of keys whose value changes, with form=overwritten")

    @model_validator(mode="after")
    def _used(self):
        for name, form in (("values", "multi_value"), ("overwritten", "overwritten")):
            if self.form != form and getattr(self, name) != RecallData.model_fields[name].default:
                raise ValueError(f"{name} goes with form={form}, not with form={self.form}: leave it out")
        return self


class FactsData(AskedData):
    """Facts in other text, and a question about them whose answer is one word."""

    task: Literal["facts"]
    kinds: list[str] = Field(list(KINDS), description=f"of questions: {', '.join(KINDS)}")
    facts: int = Field(6, ge=1, description="maximum facts in a text, which has any number that its kind allows")
    early_questions: int = Field(
        0,
        ge=0,
        description="maximum questions between sentences after the last fact in training; answers are labels only",
    )
    distractors: int = Field(
        0, ge=0, description="maximum source sentences in a training text that contain a fact word"
    )
    sources: list[Source] = Field([], description="files with the text between the facts; none: a few short sentences")

    @model_validator(mode="after")
    def _possible(self):
        check_kinds(self.kinds, self.facts)
        if any(source.files is None for source in self.sources):
            raise ValueError("sources: the text between facts comes from files: name files, or leave the sources out")
        return self


class SampleData(Section):
    """Texts that the model samples from itself, with full attention: training that needs no data."""

    task: Literal["samples"]
    texts: int | None = Field(None, ge=1, description="different texts to train on; None: as many as the steps need")
    temperature: float = Field(1.0, gt=0)
    seed: int = Field(0, ge=0, lt=2**32, description="of the texts; the recipe's own seed does not change them")
    prepared: Annotated[Path, MAY_CHANGE] = Field(Path("runs/prepared"), description="folder that keeps the texts")


class DigitsData(Section):
    """Handwritten digits: images of 8 x 8 pixels, each a sequence of 64, which come with scikit-learn."""

    task: Literal["digits"]


Data = Annotated[
    TextData | SummarizationData | QuestionData | PasskeyData | FactsData | RecallData | SampleData | DigitsData,
    Field(discriminator="task"),
]

"""A curriculum: lengths that grow as the loss falls, and the batches of those lengths.

The length of a step is decided two steps ahead and recorded, since the next batch is fetched before a step ends. So a
resumed run makes the same batches as a run that was never stopped.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ..recipe import Curriculum, GeneratedData, Recipe
from .examples import GeneratedTask

STATE_FILE = "curriculum.json"


class CurriculumState:
    """The lengths reached so far, each with the step it begins at, and the losses that the next growth depends on."""

    def __init__(self, curriculum: Curriculum):
        self.curriculum = curriculum
        self.milestones = [(0, curriculum.first_segments)]
        self.losses: list[float] = []

    @property
    def segments(self) -> int:
        return self.milestones[-1][1]

    def at(self, step: int, generator: np.random.Generator) -> int:
        """Returns the segments of the text at a step; after the last growth, some steps review an earlier length."""
        reached = [segments for start, segments in self.milestones if start <= step]
        if reached[-1] == self.curriculum.last_segments and generator.random() < self.curriculum.review:
            return int(generator.choice(reached))
        return reached[-1]

    def observe(self, step: int, loss: float, num_steps: int) -> bool:
        """Records the mean loss of the last `num_steps` steps. Returns whether the text grows."""
        self.losses = [*self.losses, loss][-max(1, self.curriculum.patience // num_steps) :]
        full = len(self.losses) * num_steps >= self.curriculum.patience
        is_low = np.mean(self.losses) < self.curriculum.loss_below
        if not (full and is_low) or self.segments == self.curriculum.last_segments:
            return False
        lengths = self.curriculum.lengths
        self.milestones.append((step + 2, lengths[lengths.index(self.segments) + 1]))
        self.losses = []
        return True

    def save(self, folder: Path) -> None:
        state = {"milestones": self.milestones, "losses": self.losses}
        (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        self.milestones, self.losses = [tuple(item) for item in state["milestones"]], state["losses"]


class CurriculumBatches(Dataset):
    """Item i is the i-th micro-batch of the run, the same at any time."""

    def __init__(
        self, recipe: Recipe, state: CurriculumState, task: GeneratedTask, segment_length: int, world_size: int
    ):
        self.recipe, self.state, self.task = recipe, state, task
        self.segment_length, self.world_size = segment_length, world_size
        assert recipe.curriculum is not None and isinstance(recipe.data, GeneratedData)
        self.background = recipe.data.background
        self.curriculum = recipe.curriculum
        self.curriculum.check_holds_longest(segment_length, world_size)
        # Refuses texts that do not fit the first or the last length, before the first step.
        shortest = self.curriculum.first_segments * segment_length
        task.training_batch(1, shortest, self.background, np.random.default_rng(recipe.seed))
        longest = self.curriculum.last_segments * segment_length
        task.example(longest, 1.0, self.background, np.random.default_rng(recipe.seed))

    def __len__(self) -> int:
        return self.recipe.steps * self.world_size

    def __getitem__(self, index: int) -> dict[str, Any]:
        step = index // self.world_size
        segments = self.state.at(step, np.random.default_rng([self.recipe.seed, step]))
        generator = np.random.default_rng([self.recipe.seed, step, index])
        # Passkey texts grow by whole fillers: lengths within a single segment would leave some of its positions without
        # the question. So any length above the previous one of the curriculum is drawn.
        lengths = self.curriculum.lengths
        shorter = lengths[max(lengths.index(segments) - 1, 0)] * self.segment_length
        longest = segments * self.segment_length
        num_tokens = int(generator.integers(min(shorter + 1, longest), longest + 1))
        num_rows = self.curriculum.tokens_per_step // (longest * self.world_size)
        batch = self.task.training_batch(num_rows, num_tokens, self.background, generator)
        return batch | {"name": f"micro-batch {index}"}

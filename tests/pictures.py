from pathlib import Path

import numpy as np
from PIL import Image


def is_drawn(path: Path) -> bool:
    """Whether a saved picture shows data or their legend, which are in color, and not axes and text only."""
    with Image.open(path) as image:
        channels = np.asarray(image.convert("RGB")).astype(int)
    saturation = channels.max(axis=-1) - channels.min(axis=-1)
    return int((saturation > 60).sum()) > 200  # the points of a few small markers

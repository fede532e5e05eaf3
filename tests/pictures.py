from pathlib import Path

import numpy as np
from PIL import Image


def is_drawn(path: Path) -> bool:
    """Whether a saved picture shows more than its frame: text and curves leave many shades, and ink."""
    with Image.open(path) as image:
        gray = np.asarray(image.convert("L"))
    return len(np.unique(gray)) > 50 and float((gray < 128).mean()) > 0.005

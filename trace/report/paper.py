"""The paper's numbers as data (`paper.yaml`), and the model they are for."""

from pathlib import Path
from typing import Any

import yaml

PAPER = Path(__file__).with_name("paper.yaml")
PAPER_MODEL = Path(__file__).with_name("qwen3_5_35b_a3b.json")


def paper_numbers() -> dict[str, Any]:
    """Every number that public accounts of the paper give; a cell that they do not give is absent."""
    return yaml.safe_load(PAPER.read_text())

"""Step metrics on disk: one JSON object per line, appended, cut back to the checkpoint when a run resumes."""

import json
import os
from pathlib import Path


class MetricsLog:
    """Append-only ``metrics.jsonl`` of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, float]]:
        """All rows; a last line torn by a kill is ignored."""
        if not self.path.is_file():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def truncate(self, *, steps: int) -> None:
        """Keep the rows of the first ``steps`` steps: what a resumed run will not repeat."""
        rows = [row for row in self.rows() if row["step"] < steps]
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def append(self, row: dict[str, float]) -> None:
        """Add one step's metrics."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

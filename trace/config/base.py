"""The base of every configuration section, and the digest two artifacts are compared by.

Sections are frozen and reject unknown keys, so a misspelt key is an error and a section may be hashed.
"""

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen configuration section; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    def digest(self, *, exclude: set[str] | None = None) -> str:
        """16 hex digits over the canonical JSON of this section (``exclude`` drops top-level fields)."""
        return digest_of(self.model_dump(mode="json", exclude=exclude))


def digest_of(value: Any) -> str:
    """16 hex digits of SHA-256 over canonical JSON (sorted keys, no white space)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]

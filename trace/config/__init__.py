"""Typed, torch-free configuration: one frozen pydantic section per file, unknown keys are errors."""

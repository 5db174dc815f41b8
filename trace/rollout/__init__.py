"""Rollout engines: vLLM through its public extension points, and a plain PyTorch oracle."""

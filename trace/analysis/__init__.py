"""Measurements on recorded rollouts: one set of trajectories, many forwards of the trainer over it."""

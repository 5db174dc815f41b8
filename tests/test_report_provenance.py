"""Where the trainings of a page were made."""

from trace_rl.report.collect import TRAIN_KEYS
from trace_rl.report.sections.provenance import trained_at, trained_on

AMD = {"cpu": "an AMD", "cores": 2, "memory_gib": 4.0, "accelerators": [], "platform": "Linux"}
INTEL = AMD | {"cpu": "an Intel"}


def summary(*records):
    """One method, a seed a record."""
    return {"methods": {"qat": {str(seed): record for seed, record in enumerate(records)}}}


def test_a_resumed_training_names_both_commits_and_machines():
    first = {"from_step": 0, "commit": {"id": "aaa", "dirty": False}, "machine": AMD}
    then = {"from_step": 20, "commit": {"id": "bbb", "dirty": True}, "machine": INTEL}
    found = summary({"made_by": [first, then]}, {"made_by": [first]}, {"made_by": None}, {})
    assert "made_by" in TRAIN_KEYS
    assert trained_at(found) == "aaa (2); bbb with uncommitted changes (1)"
    assert trained_on(found) == "an AMD, 2 cores (2); an Intel, 2 cores (1)"


def test_trainings_that_left_nothing_are_not_given_a_commit():
    assert trained_at(summary({}, {"made_by": None})) == "not recorded"

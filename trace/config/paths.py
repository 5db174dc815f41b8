"""Where a run keeps its artifacts: the one map that stages and rules share.

Everything under ``root/<run>``. ``state`` is undeclared to Snakemake (which deletes declared outputs before a job):
a killed stage resumes from there.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run."""

    run: str
    root: Path = Path("results")

    @property
    def base(self) -> Path:
        return self.root / self.run

    @property
    def checkpoint(self) -> Path:
        """The policy before RL: a Hugging Face checkpoint directory with ``manifest.json``."""
        return self.base / "checkpoint"

    @property
    def data(self) -> Path:
        """``sft.jsonl``, ``rl.jsonl``, one ``<task>.jsonl`` per evaluation task, ``manifest.json``."""
        return self.base / "data"

    @property
    def scales(self) -> Path:
        """Static encode scales (JSON)."""
        return self.base / "calibration" / "scales.json"

    @property
    def calibration_metrics(self) -> Path:
        return self.base / "calibration" / "metrics.json"

    @property
    def importance(self) -> Path:
        """Summed squares of the routed experts' input columns (safetensors), for ``hscale``."""
        return self.base / "calibration" / "importance.safetensors"

    def audit(self, formats: str) -> Path:
        """Scope audit of some formats, by ``FormatChoice.slug``."""
        return self.base / "audit" / f"{formats}.json"

    def parity(self, formats: str) -> Path:
        """Parity of trainer and engine in some formats, by ``FormatChoice.slug``."""
        return self.base / "parity" / f"{formats}.json"

    def train(self, method: str, seed: int) -> Path:
        """Final ``policy/`` (Hugging Face directory), ``metrics.jsonl`` (one line per step), ``metrics.json``."""
        return self.base / "train" / method / f"seed{seed}"

    def quantized(self, method: str, seed: int) -> Path:
        """Packed export of a PTQ method with ``metrics.json``."""
        return self.base / "quantize" / method / f"seed{seed}"

    def evaluation(self, method: str, seed: int) -> Path:
        return self.base / "evaluate" / method / f"seed{seed}" / "metrics.json"

    @property
    def evaluation_start(self) -> Path:
        """Evaluation of the policy before RL."""
        return self.base / "evaluate" / "start" / "metrics.json"

    def gap_sources(self, seed: int) -> Path:
        """What the train-rollout gap is made of, measured on the policies of one seed."""
        return self.base / "analysis" / "gap_sources" / f"seed{seed}.json"

    def ratio(self, seed: int) -> Path:
        """How well trainers' importance ratios track the engine's under staleness."""
        return self.base / "analysis" / "ratio" / f"seed{seed}.json"

    @property
    def bench_rollout(self) -> Path:
        return self.base / "bench" / "rollout.json"

    @property
    def bench_step(self) -> Path:
        return self.base / "bench" / "step.json"

    @property
    def bench_kernels(self) -> Path:
        return self.base / "bench" / "kernels.json"

    @property
    def bench_moe(self) -> Path:
        return self.base / "bench" / "moe.json"

    @property
    def bench_model(self) -> Path:
        """The analytic decode model beside what the other benchmarks measured."""
        return self.base / "bench" / "model.json"

    @property
    def summary(self) -> Path:
        return self.base / "summary.json"

    @property
    def report(self) -> Path:
        """``index.html``, ``report.md`` and figures."""
        return self.base / "report"

    def target_report(self, target: str) -> Path:
        """Page, Markdown, figures and ``summary.json`` of one of the paper's tables (or of all: ``paper``)."""
        return self.report / target

    @property
    def locks(self) -> Path:
        """A lock file per running job."""
        return self.base / "locks"

    def state(self, stage: str, *parts: str) -> Path:
        """Working directory of a resumable stage."""
        return self.base.joinpath("state", stage, *parts)

"""Configuration: generated files in step with the types, errors that name the key, and what a stage depends on."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from trace_rl import cli, formats
from trace_rl.config import blocks, generate, stages, targets
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.load import load_experiment, load_method, load_suite, parse_experiment
from trace_rl.config.overrides import with_overrides
from trace_rl.config.quant import BF16, PRESETS, SCOPES, FormatChoice, FormatName, QuantSpec
from trace_rl.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = sorted(file for file in (ROOT / "config").glob("**/*.yaml") if file.parent.name != "methods")
METHODS = sorted((ROOT / "config/methods").glob("*.yaml"))


@pytest.mark.parametrize("path", sorted(generate.generated(ROOT)), ids=lambda path: path.name)
def test_generated_files_are_in_step_with_the_types(path):
    assert path.read_text() == generate.generated(ROOT)[path], "run `trace-rl config write`"


def test_the_default_file_is_the_default_experiment():
    assert load_experiment(ROOT / "config/config.yaml") == ExperimentConfig()


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_shipped_experiment_is_valid(path):
    experiment = load_experiment(path)
    assert load_suite(experiment, root=ROOT)
    Draft202012Validator(generate.experiment_schema()).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_target_of_every_shipped_experiment_has_its_methods(path, target):
    experiment = load_experiment(path)
    methods = targets.target_methods(experiment, target, root=ROOT)
    assert tuple(methods) == targets.target_names(experiment, target)
    assert all(method.name == name for name, method in methods.items())


def test_a_grid_leaves_out_what_the_experiment_says_anyway():
    tables = {
        "staleness": ["trace", "qat@loss.tis_cap=null"],
        "staleness_only": [],
        "staleness_levels": [0, 3],
        "staleness_learning_rates": [3e-4, 1e-5],
        "staleness_steps": None,
    }
    experiment = ExperimentConfig(tables=tables)
    names = targets.target_names(experiment, "staleness")
    assert names == (
        "trace",
        "trace@training.learning_rate=1e-05",
        "trace@training.staleness=3",
        "trace@training.staleness=3+training.learning_rate=1e-05",
        "qat@loss.tis_cap=null",
        "qat@loss.tis_cap=null+training.learning_rate=1e-05",
        "qat@loss.tis_cap=null+training.staleness=3",
        "qat@loss.tis_cap=null+training.staleness=3+training.learning_rate=1e-05",
    )
    last = targets.target_methods(experiment, "staleness", root=ROOT)[names[-1]]
    assert (last.training.staleness, last.training.learning_rate, last.loss.tis_cap) == (3, 1e-5, None)
    stale = ExperimentConfig(tables=tables, training={"staleness": 3, "learning_rate": 1e-5})
    assert "trace" in targets.target_names(stale, "staleness")
    assert "trace@training.staleness=0+training.learning_rate=0.0003" in targets.target_names(stale, "staleness")


def test_methods_that_differ_only_under_staleness_are_not_trained_without_it():
    tables = {"staleness": ["trace"], "staleness_only": ["trace_anchored"], "staleness_learning_rates": [3e-4]}
    experiment = ExperimentConfig(tables=tables | {"staleness_steps": None})
    assert targets.target_names(experiment, "staleness") == (
        "trace",
        "trace@training.staleness=1",
        "trace@training.staleness=3",
        "trace_anchored@training.staleness=1",
        "trace_anchored@training.staleness=3",
    )


@given(st.fixed_dictionaries({scope: st.sampled_from(get_args(FormatName)) for scope in SCOPES}))
def test_formats_survive_their_slug(by_scope):
    try:
        choice = FormatChoice(**by_scope)
    except ValidationError:
        assume(False)
    assert re.fullmatch(r"[a-z0-9_-]+", choice.slug)
    assert FormatChoice.from_slug(choice.slug) == choice


@pytest.mark.parametrize("slug", ["fp4", "nvfp4-nvfp4", "mxfp8-nvfp4-nvfp4", "nvfp4-nvfp4-fp3", ""])
def test_another_word_is_no_format(slug):
    with pytest.raises(ValueError, match="nvfp4|format"):
        FormatChoice.from_slug(slug)


@pytest.mark.parametrize(
    ("base", "variant"),
    [
        ("trace", "trace@training.staleness=0"),
        ("trace", "trace@training.learning_rate=0.0003"),
        ("trace", "trace@training.max_new_tokens=48"),
        ("trace", "trace@format=nvfp4"),
        ("trace@guidance.bits=2", "trace@guidance.bits=2+training.staleness=0"),
        ("trace_full", "trace@guidance.bits=4+guidance.layers=all"),
        ("trace@guidance.tensors=k,v", "trace@guidance.tensors=v,k"),
        # A trainer that rounds to nearest anyway, or not at all.
        ("qat", "qat@ratio.mismatch=rtn"),
        ("qat@training.staleness=3", "qat@training.staleness=3+ratio.staleness=rtn"),
        ("bf16@training.staleness=3", "bf16@training.staleness=3+ratio.staleness=bf16"),
        # Nothing is stale: pi_old is one policy, and with one update it is pi_theta.
        ("trace", "trace_anchored"),
        ("qat", "qat@ratio.old_policy=current"),
        ("trace", "trace@ratio.staleness=bf16"),
        (
            "trace@training.updates_per_rollout=2",
            "trace@training.updates_per_rollout=2+ratio.old_policy=current",
        ),
        # Stale, but pi_old is pi_theta where the batch is trained once.
        (
            "trace@training.staleness=3+ratio.old_policy=current",
            "trace@training.staleness=3+ratio.old_policy=current+ratio.staleness=bf16",
        ),
    ],
)
def test_a_variant_that_says_what_holds_anyway_is_not_trained_twice(base, variant):
    experiment = ExperimentConfig(tables={"table6": [variant, base]})
    with pytest.raises(UserError, match="is the same run as"):
        targets.target_methods(experiment, "table6", root=ROOT)


@pytest.mark.parametrize(
    "names",
    [
        ("trace", "trace_unpinned"),
        ("trace", "trace@ratio.mismatch=rtn"),
        ("qat@training.staleness=3", "qat@training.staleness=3+ratio.staleness=bf16"),
        ("qat@training.staleness=3", "qat@training.staleness=3+ratio.old_policy=current"),
        ("trace@training.staleness=3", "trace_anchored@training.staleness=3"),
        ("trace@training.updates_per_rollout=2", "trace_anchored@training.updates_per_rollout=2"),
    ],
)
def test_ratios_that_make_a_difference_are_two_runs(names):
    experiment = ExperimentConfig(tables={"table6": names})
    assert tuple(targets.target_methods(experiment, "table6", root=ROOT)) == names


@settings(max_examples=50, deadline=None)
@given(
    level=st.integers(0, 3), rate=st.floats(1e-7, 0.9, allow_subnormal=False), steps=st.none() | st.integers(1, 10_000)
)
def test_a_grid_point_survives_its_name(level, rate, steps):
    tables = {
        "staleness": ["qat"],
        "staleness_only": [],
        "staleness_levels": [level],
        "staleness_learning_rates": [rate],
        "staleness_steps": steps,
    }
    experiment = ExperimentConfig(tables=tables)
    (method,) = targets.target_methods(experiment, "staleness", root=ROOT).values()
    effective = with_overrides(experiment, method).training
    assert (effective.staleness, effective.learning_rate) == (level, rate)
    assert effective.steps == (steps or experiment.training.steps)


def test_the_core_suite_takes_one_seed_and_the_tables_all():
    experiment = ExperimentConfig(suite={"seeds": [4, 2]}, stability={"seeds": [7]})
    assert targets.core_seeds(experiment) == (4,)
    assert targets.target_seeds(experiment, "paper") == (4, 2)
    assert targets.target_seeds(experiment, "stability") == (7,)
    assert stages.stage_config(experiment, "summary")["suite"]["seeds"] == [4]
    assert stages.stage_config(experiment, "tables")["suite"]["seeds"] == [4, 2]


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_every_shipped_method_is_valid(path):
    load_method(path)
    Draft202012Validator(generate.method_schema()).validate(yaml.safe_load(path.read_text()))


def test_every_key_has_a_meaning():
    rows = [line for line in generate.keys_table().splitlines() if line.startswith("| `")]
    bare = [line for line in rows if line.endswith("|  |") and "source`" not in line and "kind`" not in line]
    assert rows
    assert not bare


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"trainig": {}}, "x.yaml: trainig: unknown key; remove it or correct its spelling"),
        ({"checkpoint": {"source": "hub", "repo": "a/b"}}, "checkpoint.hub.revision: Field required"),
        ({"checkpoint": {"source": "ftp"}}, "checkpoint"),
        ({"checkpoint": {"model": {"hidden_size": 100}, "source": "cold_start"}}, "multiple of the block size 16"),
        ({"sampling": {"max_new_tokens": 999}}, "raise max_model_len"),
        ({"training": {"problems": "sum"}}, "data.source generated has math and code"),
        ({"training": {"problems": "math"}, "data": {"source": "packaged"}}, "data.source packaged has sum"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: Input should be greater than 0"),
        ({"training": {"staleness": 9}}, "raise max_version_diff or lower staleness"),
        ({"suite": {"seeds": [1, 1]}}, "suite.seeds [1, 1] names a seed twice"),
        ({"stability": {"seeds": [-1]}}, "stability.seeds [-1] names a negative seed"),
    ],
)
def test_a_mistake_is_one_line_with_key_and_remedy(data, message):
    with pytest.raises(UserError) as caught:
        parse_experiment(data, source="x.yaml")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


RAGGED = "head_dim 32 is not a multiple of the FP4 block size 64 of hif4, the format of kv; set format.kv: mxfp4"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": "hif4"}, f"format hif4: checkpoint.model: {RAGGED}, or change the model"),
        ({"format": {"kv": "hif4"}, "checkpoint": {"source": "cold_start"}}, RAGGED),
        (
            {"format": "mxfp4", "checkpoint": {"source": "cold_start", "model": {"moe_intermediate_size": 48}}},
            "moe_intermediate_size 48 is not a multiple of the FP4 block size 32 of mxfp4, the format of weights; "
            "set format.weights: nvfp4",
        ),
    ],
)
def test_a_format_whose_blocks_do_not_fit_the_miniature_is_refused_before_it_is_trained(data, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse_experiment(data, source="x.yaml")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "data",
    [
        {"format": {"weights": "hif4", "activations": "hif4", "kv": "mxfp4"}},
        {"format": "hif4", "checkpoint": {"source": "cold_start", "model": {"head_dim": 64}}},
        {"format": "hif4", "checkpoint": {"source": "local", "path": "elsewhere"}},
    ],
)
@pytest.mark.parametrize("stage", stages.SECTIONS)
def test_blocks_that_fit_and_models_that_the_configuration_does_not_know_are_accepted(stage, data):
    experiment = parse_experiment(data, source="x.yaml")
    own, _ = cli.load(stages.canonical_json(stages.stage_config(experiment, stage)), Path("results"), None)
    for config in (experiment, own):
        method = load_method(ROOT / "config/methods/qat@training.staleness=1.yaml")
        assert with_overrides(config, method).format == config.format
        tables = config.tables.model_copy(update={"table6": ("qat", "bf16@training.staleness=1")})
        config = config.model_copy(update={"tables": tables})
        assert targets.target_methods(config, "table6", root=ROOT)


@pytest.mark.parametrize("name", ["qat@format=hif4", "fp4_naive@format.kv=hif4", "ptq_nvfp4@format=hif4"])
def test_a_method_whose_blocks_do_not_fit_the_miniature_is_refused_before_any_job(name):
    message = re.escape(f"method {name}: checkpoint.model: {RAGGED}")
    experiment = parse_experiment({"tables": {"table6": ["bf16", name]}}, source="x.yaml")
    with pytest.raises(UserError, match=message):
        targets.target_methods(experiment, "table6", root=ROOT)
    core = parse_experiment({"suite": {"methods": ["bf16", name]}}, source="x.yaml")
    with pytest.raises(UserError, match=message):
        load_suite(core, root=ROOT)
    local = {"checkpoint": {"source": "local", "path": "elsewhere"}}
    assert targets.target_methods(
        parse_experiment({"tables": {"table6": ["bf16", name]}} | local, source="x.yaml"), "table6", root=ROOT
    )


def test_block_sizes_are_those_of_the_formats():
    assert {name: formats.get(name).block_size for name in get_args(FormatName)} == blocks.BLOCK_SIZES


@pytest.mark.parametrize("stage", stages.SECTIONS)
def test_a_stage_gets_a_valid_experiment_that_keeps_its_settings(stage):
    experiment = parse_experiment({"run": "r", "training": {"steps": 7}, "suite": {"seeds": [3]}}, source="x")
    given = stages.stage_config(experiment, stage)
    parsed = parse_experiment(json.loads(stages.canonical_json(given)), source="--config", whole=False)
    assert stages.stage_config(parsed, stage) == given
    assert ("training" in given) == ("training" in stages.SECTIONS[stage])


@pytest.mark.parametrize("stage", stages.SECTIONS)
def test_a_stage_reads_only_the_settings_it_is_given(stage):
    files = stages.module_files()
    module = f"trace_rl.stages.{stage}"
    own = {name for name in stages.closure(module) if name in files and not name.startswith("trace_rl.stages.")}
    own |= {module} | ({"trace_rl.stages.cold_start"} if stage == "checkpoint" else set())
    read = {
        section
        for name in own
        for section in re.findall(
            r"(?<![\w.])(?:self\.|this\.|context\.)?config\.(\w+)\b(?! import)", files[name].read_text()
        )
        if section in ExperimentConfig.model_fields
    }
    given = {name.partition(".")[0] for name in stages.SECTIONS[stage]}
    assert read <= given


def test_a_stage_depends_on_what_it_imports_and_on_nothing_else():
    train, report, checkpoint = (
        stages.closure(f"trace_rl.stages.{name}") for name in ("train", "report", "checkpoint")
    )
    loss, figures, plugin = (
        "trace_rl.rl.losses.grpo",
        "trace_rl.report.figures.canvas",
        "trace_rl.rollout.vllm_plugin.moe",
    )
    assert loss in train
    assert plugin in train
    # What of the configuration computes: a method's quantization, the experiment with a variant's budget.
    assert {f"trace_rl.config.{name}" for name in ("quant", "guidance", "loss", "method", "overrides")} <= train
    assert not {f"trace_rl.config.{name}" for name in ("load", "tables", "training", "experiment")} & train
    assert figures in report
    assert figures not in train
    assert loss not in report | checkpoint
    assert not {name for name in train | report | checkpoint if re.search(r"\.(tracking|errors|cli)$", name)}
    assert any(name.endswith(".j2") for name in report)
    assert {f"trace_rl.kernels/csrc/{name}" for name in ("moe_experts.cpp", "fp4_rows.h", "fp4_block.h")} <= train


@pytest.fixture
def package(tmp_path):
    """A package in miniature and its digests."""
    files = {
        "trace_rl.a": "from trace_rl.b import f\n\n\ndef main():\n    from trace_rl import lazy\n",
        "trace_rl.b": '"""Doc."""\n\n\ndef f():\n    return 1\n',
        "trace_rl.lazy": "PLUGIN = 'trace_rl.plugin.Worker'\nPAGE = 'page.j2'\n",
        "trace_rl.plugin": "class Worker: ...\n",
        "trace_rl.other": "import trace_rl.b\n",
    }
    (tmp_path / "page.j2").write_text("<p>")
    (tmp_path / "unused.j2").write_text("<p>")
    for name, text in files.items():
        (tmp_path / f"{name.rpartition('.')[2]}.py").write_text(text)
    return {name: tmp_path / f"{name.rpartition('.')[2]}.py" for name in files}


def test_imports_inside_functions_names_in_strings_and_templates_count(package):
    sources = stages.scan(package)
    assert sources["trace_rl.a"].uses == ("trace_rl.b", "trace_rl.lazy")
    assert sources["trace_rl.lazy"].uses == ("trace_rl.plugin", "trace_rl/page.j2")
    assert sources["trace_rl.other"].uses == ("trace_rl.b",)


def test_comments_and_docstrings_do_not_change_a_digest_and_code_does(package):
    before = stages.scan(package)["trace_rl.b"].digest
    package["trace_rl.b"].write_text('"""Other."""\n\ndef f():  # why\n    return 1\n')
    assert stages.scan(package)["trace_rl.b"].digest == before
    package["trace_rl.b"].write_text("def f():\n    return 2\n")
    assert stages.scan(package)["trace_rl.b"].digest != before


def test_configuration_needs_no_torch():
    code = (
        "import sys; from trace_rl.config import generate, load, stages; import trace_rl.tracking;"
        "stages.code_digest('train'); print(sorted({'torch', 'vllm', 'mlflow', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", PRESETS)
def test_a_format_is_one_word_or_one_per_scope_and_survives_json(name):
    choice = FormatChoice.model_validate(name)
    assert choice.preset == str(choice) == choice.model_dump(mode="json") == name
    assert FormatChoice(**PRESETS[name]) == choice
    quant = QuantSpec(format=name)
    assert QuantSpec.model_validate(json.loads(json.dumps(quant.model_dump(mode="json")))) == quant
    assert QuantSpec(**quant.model_dump(mode="json")) == quant


def test_formats_by_scope_survive_json_and_hash_by_what_they_quantize():
    parts = {"weights": "hif4", "activations": "mxfp8", "kv": "mxfp4_even"}
    quant = QuantSpec(format=parts)
    assert quant.model_dump(mode="json")["format"] == parts
    assert QuantSpec.model_validate_json(quant.model_dump_json()) == quant
    assert [quant.format_of(where) for where in ("weights", "fc1", "fc2", "k", "v")] == [
        "hif4", "mxfp8", "mxfp8", "mxfp4_even", "mxfp4_even"]  # fmt: skip
    assert quant.recordable() == ("k", "v")
    hashes = {QuantSpec(format=name).hash() for name in PRESETS}
    assert len(hashes | {quant.hash(), BF16.hash()}) == len(PRESETS) + 2
    # The format of a scope in BF16 is no part of what is quantized.
    off = {"activations": False, "kv": False}
    assert QuantSpec(format="mxfp4", **off).hash() == QuantSpec(format="mxfp4_w4a8", **off).hash()
    assert QuantSpec(format="mxfp4", weights=False, **off).hash() == BF16.hash()


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("mxfp6", "format 'mxfp6' is unknown; choose one of nvfp4"),
        ("mxfp8", "format 'mxfp8' is unknown"),
        ({"weights": "int4"}, "format.weights"),
        ({"weights": "mxfp8"}, "Set weights: mxfp4; format mxfp4_w4a8"),
        ({"kv": "mxfp8"}, "Set kv: mxfp4"),
        ({"activations": "hscale"}, "Set activations: nvfp4"),
        ({"kv": "hscale"}, "Set kv: nvfp4"),
        ("hscale", "set format: nvfp4 and use ptq_hscale"),
    ],
)
def test_a_senseless_format_is_refused_with_a_remedy(format, message):
    with pytest.raises(UserError) as caught:
        parse_experiment({"format": format}, source="x.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            "trace@format=mxfp4_w4a8",
            "guidance of fc1 follows E2M1 codewords, and mxfp8 has none; set guidance.tensors: k,v",
        ),
        ("trace@format.kv=hif4", "hif4 has none; set guidance.tensors: fc1"),
        ("trace@format=hif4", "set guidance: null"),
        ("qat@format=hscale", "quantize afterwards with ptq_hscale"),
        ("trace@format=fouroversix_mae+guidance.scale_bits=2", "fouroversix picks between two far ones"),
        ("ptq_4over6@format.weights=mxfp8", "Set weights: mxfp4"),
    ],
)
def test_a_format_that_does_not_suit_a_method_is_refused_with_a_remedy(variant, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_method(ROOT / f"config/methods/{variant}.yaml")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("trace@guidance.bits==", "Input should be 1, 2, 3 or 4"),
        ("trace@guidance.bits=*x", "Input should be 1, 2, 3 or 4"),
        ("trace@guidance.bits=[1", "Input should be 1, 2, 3 or 4"),
        ("trace@training.steps=2001-13-45", "training.steps: Input should be a valid integer"),
        ("bf16@format=mxfp4", "format has no effect where neither rollout nor trainer is FP4"),
        ("sc@ratio.old_policy=current", "ratio has no effect on score centering"),
        ("x" * 300, "a name of at most 200"),
        ("trace@guidance.tensors=k,k", "guidance.tensors k, k names a tensor twice; name each once"),
        ("trace@rollout.residual=sparse", "set rollout.residual: none or drop fc1"),
        ("resq@guidance.bits=1", "guidance of fc1 follows Q(X), and with rollout.residual: sparse the engine"),
    ],
)
def test_a_variant_without_sense_is_one_error(variant, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_method(ROOT / f"config/methods/{variant}.yaml")


def test_variants_set_formats_and_guided_tensors():
    method = load_method(ROOT / "config/methods/trace@format=mxfp4_w4a8+guidance.tensors=k,v.yaml")
    assert method.guidance.tensors == ("k", "v")
    assert (
        method.rollout_quant(FormatChoice()) == method.trainer_quant(FormatChoice()) == QuantSpec(format="mxfp4_w4a8")
    )
    assert load_method(ROOT / "config/methods/trace@guidance.tensors=fc1.yaml").guidance.tensors == ("fc1",)
    naive = load_method(ROOT / "config/methods/fp4_naive@format.kv=mxfp4.yaml")
    assert naive.trainer_quant(FormatChoice()).format_of("k") == "mxfp4"
    plain = load_method(ROOT / "config/methods/trace.yaml")
    assert plain.rollout_quant(FormatChoice.model_validate("mxfp4")) == QuantSpec(format="mxfp4")
    with pytest.raises(UserError, match="set guidance: null"):
        plain.rollout_quant(FormatChoice.model_validate("hif4"))


def test_guided_tensors_are_some_each_once_in_the_order_of_a_record():
    with pytest.raises(ValidationError, match="guidance of nothing is qat; name some of fc1, k, v, or set guidance"):
        GuidanceSpec(tensors=[])
    assert GuidanceSpec(tensors=("v", "fc1", "k")) == GuidanceSpec()
    assert load_method(ROOT / "config/methods/trace@guidance.tensors=v,k.yaml").guidance.tensors == ("k", "v")
    # K and V have no residual: what is recorded of them is what the engine multiplies with.
    assert load_method(ROOT / "config/methods/resq@guidance.tensors=v,k.yaml").guidance.tensors == ("k", "v")


def test_two_bit_scales_are_refused_for_fouroversix(tmp_path: Path) -> None:
    text = (ROOT / "config/methods/trace.yaml").read_text()
    assert "{bits: 1, layers: deeper_half}" in text
    (tmp_path / "trace.yaml").write_text(text.replace("deeper_half}", "deeper_half, scale_bits: 2}"))
    suite = {"methods": ["trace"], "methods_dir": str(tmp_path)}
    assert load_suite(ExperimentConfig(suite=suite))["trace"].guidance.scale_bits == 2
    with pytest.raises(UserError, match="fouroversix"):
        load_suite(ExperimentConfig(suite=suite, format="fouroversix"))

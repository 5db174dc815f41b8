"""The paper's accuracy tables as claims: tables 1, 4, 5, 6 and 7, and what of table 2 has no counterpart here."""

from typing import Any

from trace_rl.report.claim import NOT_REPORTED, Claim, accuracy_difference, compare_accuracy
from trace_rl.report.estimate import UNTESTED, parity
from trace_rl.report.labels import base, changes

TABLE4_COLUMNS = {"mxfp4": "w4a4_kv4", "mxfp4_w4a4": "w4a4_kv4", "mxfp4_w4a8": "w4a8_kv4"}
"""The paper's column of each MXFP4 format."""
TABLE4_WORDS = {"w4a8_kv4": "W4A8 KV4", "w4a4_kv4": "W4A4 KV4"}
"""The paper's columns in words; 8-bit activations first, as `table4` compares them with 4-bit ones."""
TABLE5_ROWS = {
    "trace": "r_1bit_l20",
    "trace@guidance.layers=last_quarter": "r_1bit_l10",
    "trace@guidance.layers=last_eighth": "r_1bit_l5",
}
"""The paper's rows: one bit in the deepest 20, 10 and 5 of 40 layers."""
TABLE7_WORDS = {"ptq_nvfp4": "NVFP4", "ptq_4over6": "Four-over-Six", "ptq_hscale": "H-Scale"}


def accuracy_claims(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """Claims of every accuracy table whose methods were run."""
    return [
        *table1(summary, paper),
        *table2(paper),
        *table4(summary, paper),
        *table5(summary, paper),
        *table6(summary, paper),
        *table7(summary, paper),
    ]


def table1(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """The average of the main comparison."""
    cells = paper["table1"]["average"]
    rows = []
    for statement, first, second, expected in (
        ("Plain FP4 QAT loses accuracy against BF16 RL", "qat", "bf16", -1),
        ("TRACE beats plain QAT", "trace", "qat", 1),
        ("QUADS beats plain QAT", "quads", "qat", 1),
        ("QUADS loses accuracy against BF16 RL", "quads", "bf16", -1),
        ("TRACE beats QUADS", "trace", "quads", 1),
    ):
        rows += compare_accuracy(
            summary,
            topic="table1",
            statement=statement,
            first=first,
            second=second,
            paper=(cells.get(first), cells.get(second)),
            expected=expected,
        )
    compared = accuracy_difference(summary, "trace", "bf16")
    if compared is not None:
        statement = "TRACE in FP4 execution is on par with BF16 RL in BF16 execution"
        rows.append(
            Claim("table1", statement, f"{cells['trace']} vs {cells['bf16']}", compared[0], parity(compared[1]))
        )
    hmmt = paper["table1"]["hmmt25"]
    numbers = ", ".join(f"{name} {hmmt.get(name, NOT_REPORTED)}" for name in ("bf16", "qat", "quads", "trace"))
    rows.append(Claim("table1", "HMMT25 alone", numbers, "no counterpart: no such task here", UNTESTED))
    return rows


def table2(paper: dict[str, Any]) -> list[Claim]:
    """Larger models: named, so that nothing of the paper is passed over in silence."""
    rows = []
    for task, cells in paper["table2"].items():
        numbers = ", ".join(f"{key} {cells[key]}" for key in ("bf16", "trace"))
        model = f", {cells['model']}" if "model" in cells else ""
        rows.append(Claim("table2", f"{task}{model}", numbers, "no model of this size here", UNTESTED))
    return rows


def table4_cells(summary: dict[str, Any]) -> dict[str, dict[str, str]]:
    """{the paper's column: {qat or trace: method of this run}}."""
    cells: dict[str, dict[str, str]] = {}
    for name in summary["methods"]:
        varied = changes(name)
        column = TABLE4_COLUMNS.get(varied.get("format", ""))
        others = varied.keys() - {"format", "guidance.tensors"}  # FP8 activations leave KV alone to guide
        if column and base(name) in ("qat", "trace") and not others:
            cells.setdefault(column, {})[base(name)] = name
    return cells


def table4(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """MXFP4, with 4-bit and with 8-bit activations."""
    cells, rows = table4_cells(summary), []
    for column, words in TABLE4_WORDS.items():
        names, numbers = cells.get(column, {}), paper["table4"][column]
        if len(names) == 2:
            rows += compare_accuracy(
                summary,
                topic="table4",
                statement=f"TRACE beats plain QAT in MXFP4 {words}",
                first=names["trace"],
                second=names["qat"],
                paper=(numbers["trace"], numbers["qat"]),
                expected=1,
            )
    for method, words, guided in (("qat", "plain QAT", ""), ("trace", "TRACE", "; guiding K and V alone with 8 bits")):
        eight, four = (cells.get(column, {}).get(method) for column in TABLE4_WORDS)
        if eight and four:
            rows += compare_accuracy(
                summary,
                topic="table4",
                statement=f"8-bit activations beat 4-bit ones under {words} (MXFP4{guided})",
                first=eight,
                second=four,
                paper=tuple(paper["table4"][column][method] for column in TABLE4_WORDS),
                expected=1,
            )
    return rows


def table5(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """More guided layers are better."""
    rows = []
    half, quarter, eighth = TABLE5_ROWS
    for statement, first, second in (
        ("Guiding half of the layers beats guiding a quarter (TRACE, 1 bit)", half, quarter),
        ("Guiding a quarter of the layers beats guiding an eighth (TRACE, 1 bit)", quarter, eighth),
        ("Guiding half of the layers beats guiding an eighth (TRACE, 1 bit)", half, eighth),
    ):
        rows += compare_accuracy(
            summary,
            topic="table5",
            statement=statement,
            first=first,
            second=second,
            paper=tuple(paper["table5"][TABLE5_ROWS[name]] for name in (first, second)),
            expected=1,
        )
    return rows


def table6(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """TRACE against score centering."""
    cells = paper["table6"]
    return compare_accuracy(
        summary,
        topic="table6",
        statement="TRACE beats score centering",
        first="trace",
        second="sc",
        paper=(cells["trace"], cells["score_centering"]),
        expected=1,
    )


def table7(summary: dict[str, Any], paper: dict[str, Any]) -> list[Claim]:
    """FP4 in the loop against quantization afterwards, and the better post-hoc quantizers against plain NVFP4."""
    cells, rows = paper["table7"], []
    for name, words in TABLE7_WORDS.items():
        rows += compare_accuracy(
            summary,
            topic="table7",
            statement=f"FP4 in the loop (TRACE) beats quantizing the BF16 policy afterwards with {words}",
            first="trace",
            second=name,
            paper=(cells["trace"], cells[name]),
            expected=1,
        )
    for first, second in (("ptq_4over6", "ptq_nvfp4"), ("ptq_hscale", "ptq_4over6")):
        rows += compare_accuracy(
            summary,
            topic="table7",
            statement=f"Afterwards, {TABLE7_WORDS[first]} beats {TABLE7_WORDS[second]}",
            first=first,
            second=second,
            paper=(cells[first], cells[second]),
            expected=1,
        )
    return rows

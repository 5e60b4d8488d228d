"""Traces of FlashInfer, as files: definitions of its norms, and workloads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The format is that of flashinfer/trace/template.py, build_fi_trace_fn, and of the files that FlashInfer keeps in
# tests/trace/fi_trace_out, both at commit fb28d724 of github.com/flashinfer-ai/flashinfer; references are shortened.
# Workloads follow docs/flashinfer-trace/workload.mdx at commit 40e6ca78 of github.com/flashinfer-ai/flashinfer-bench.
REFERENCE = (
    "import torch\n\n@torch.no_grad()\ndef _reference(hidden_states, weight):\n    EPS = 1e-6\n    return None\n"
)
ROWS, WEIGHT = ["batch_size", "hidden_size"], ["hidden_size"]


def tensor(shape: list[str], dtype: str) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype}


def dumped(op: str, d: int = 4096, dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
    """What FlashInfer dumps for a function of flashinfer.norm."""
    inputs = {"hidden_states": tensor(ROWS, dtype), "weight": tensor(WEIGHT, dtype)}
    outputs = {"output": tensor(ROWS, dtype)}
    if "add" in op:
        inputs = {**inputs, "residual": tensor(ROWS, dtype)}
        outputs["residual"] = tensor(ROWS, dtype)
    if op == "layernorm":
        inputs |= {name: tensor(WEIGHT, "float32") for name in ("weight", "bias")}
    return {
        "name": f"{op}_h{d}",
        "description": "Epsilon is fixed at 1e-6.",
        "op_type": "layernorm" if op == "layernorm" else "rmsnorm",
        "tags": [f"fi_api:flashinfer.norm.{op}", "status:verified"],
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": d}},
        "inputs": inputs,
        "outputs": outputs,
        "reference": REFERENCE,
        "init": "import torch\n",
        **changes,
    }


def workload(definition: str, **axes: Any) -> dict[str, Any]:
    """A line of a .jsonl file of FlashInfer-Bench."""
    inputs = {"hidden_states": {"type": "random"}}
    held = {"uuid": "6120f144", "axes": axes, "inputs": inputs}
    return {"definition": definition, "solution": None, "workload": held, "evaluation": None}


def write(folder: Path, *definitions: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for definition in definitions:
        (folder / f"{definition['name']}.json").write_text(json.dumps(definition, indent=2))


def lines(*values: Any) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)

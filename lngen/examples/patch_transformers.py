"""Times a training step of models of Hugging Face transformers: as they are, patched in one line, with Liger's norms.

    python -m lngen.examples.patch_transformers                       eight families, on a GPU
    python -m lngen.examples.patch_transformers --models llama,bert --tokens 512 --out FILE
    python -m lngen.examples.patch_transformers --compiled            with torch.compile as well, sums fused or not
    python -m lngen.examples.patch_transformers --tiny --models llama       one small step on the CPU

The line is ``lngen.torch.patch(model)``. Models have random weights, in bf16 on a GPU; a step is forward, backward and
AdamW, in sequences of at most 1024 tokens. ``--models``: names in ``FAMILIES``. Liger's norms are its own patch of the
model's family, with nothing but the norms. ``--compiled`` adds the ways of ``COMPILED``: backend ``lngen``, Inductor
alone, Inductor with lngen's norms, and that with its sums fused.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VOCABULARY, SEQUENCE = 32000, 1024
ROUNDS, STEPS = 7, 5
DECODER = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": SEQUENCE, "vocab_size": VOCABULARY,
}  # fmt: skip
GPT2 = {"n_embd": 1024, "n_layer": 12, "n_head": 16, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
BERT = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
    "max_position_embeddings": SEQUENCE, "vocab_size": VOCABULARY,
}  # fmt: skip
# The name of a family: its class, that of its configuration, and the configuration.
FAMILIES: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 128}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 128}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**DECODER, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
}
SMALL = {  # in place of these
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "n_embd": 64, "n_layer": 2, "n_head": 4,
}  # fmt: skip


def lngen(model: Any) -> Any:
    """The line."""
    import lngen.torch

    lngen.torch.patch(model)
    return model


def fused(model: Any) -> Any:
    """All else as in eager."""
    import torch

    return torch.compile(lngen(model), backend="lngen")


def inductor(model: Any) -> Any:
    """No norm of lngen's."""
    import torch

    return torch.compile(model)


def inductor_patched(model: Any) -> Any:
    """Sums are Inductor's."""
    import torch

    return torch.compile(lngen(model))


def inductor_fused(model: Any) -> Any:
    """All but norms and their sums is Inductor's."""
    import torch

    from lngen.torch import FusePass

    return torch.compile(lngen(model), options={"pre_grad_custom_pass": FusePass()})


# Ways to run a model, with their titles; each returns the model, changed or compiled.
COMPILED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fused": ('backend="lngen"', fused),
    "inductor": ("Inductor", inductor),
    "inductor_patched": ("Inductor, patched", inductor_patched),
    "inductor_fused": ("Inductor, fused", inductor_fused),
}
TITLES = {"lngen": "patched", "liger": "Liger's norms", **{name: title for name, (title, _) in COMPILED.items()}}


def liger(model: Any) -> None:
    """Liger's norms, by its own patch of the family."""
    apply = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{model.config.model_type}")
    known = apply.__code__.co_varnames[: apply.__code__.co_argcount]
    norms = {name: name in ("rms_norm", "layer_norm") for name in known if name != "model"}
    apply(model=model, **norms)


def trained(model: Any, tokens: int) -> Callable[[], Any]:
    """A training step, which returns its loss."""
    import torch

    torch.manual_seed(1)  # the same words for every model
    words = torch.randint(model.config.vocab_size, (max(1, tokens // SEQUENCE), min(tokens, SEQUENCE)))
    words = words.to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

    def step() -> Any:
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measured(family: str, tokens: int, tiny: bool, compiled: bool) -> dict[str, float]:
    """Milliseconds by ``eager``, ``lngen`` and ``liger``, which is absent where Liger has no patch.

    ``compiled``: and by the ways of ``COMPILED``.
    """
    import torch

    from lngen.examples.gpt_step import timed

    transformers = import_module("transformers")
    model_class, config_class, config = FAMILIES[family]
    small = {k: v for k, v in SMALL.items() if k in config} if tiny else {}
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    whole = getattr(transformers, config_class)(**{**config, **small})
    eager = getattr(transformers, model_class)(whole).to(device, dtype)
    eager.eval()  # no dropout, so that losses compare
    models = {"eager": eager, "lngen": lngen(copy.deepcopy(eager))}
    torch.compiler.reset()  # forgets another number of tokens, beside which graphs would be compiled for any number
    for name, (_, way) in COMPILED.items() if compiled else ():
        models[name] = way(copy.deepcopy(eager))
    if find_spec("liger_kernel") and torch.cuda.is_available():
        models["liger"] = copy.deepcopy(eager)
        try:  # last, since it changes the family's module as well
            liger(models["liger"])
        except AttributeError:
            del models["liger"]
    steps = {name: trained(model, tokens) for name, model in models.items()}
    times, losses = timed(steps, *((1, 1) if tiny else (ROUNDS, STEPS)))
    spread = max(abs(loss - losses["eager"]) for loss in losses.values())
    print(f"{family}, {tokens} tokens: {told(times)}; losses agree to {spread:.1e}", flush=True)
    return times


def told(times: Mapping[str, float]) -> str:
    """The times, and how many times as fast as eager."""
    return ", ".join(f"{name} {ms:.1f} ms ({times['eager'] / ms:.2f})" for name, ms in times.items())


def table(rows: Sequence[tuple[str, int, Mapping[str, float]]], compiled: bool) -> str:
    """Milliseconds of eager, and how many times as fast the others are, as Markdown."""
    names = ("lngen", *(COMPILED if compiled else ()), "liger")
    titles = " | ".join(f"{TITLES[name]}, ms | times" for name in names)
    lines = [f"| model | tokens | eager, ms | {titles} |", "|" + "---|" * (3 + 2 * len(names))]
    for family, tokens, times in rows:
        cells = [f"{times['eager']:.1f}"]
        for name in names:
            cells += [f"{times[name]:.1f}", f"{times['eager'] / times[name]:.2f}"] if name in times else ["", ""]
        lines.append(f"| {family} | {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """0; 3 without a GPU or without transformers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(FAMILIES), help="families, comma separated")
    parser.add_argument("--tokens", default=f"{8 * SEQUENCE},512", help="tokens of a step, comma separated")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile as well")
    parser.add_argument("--tiny", action="store_true", help="one small size, a step")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    import torch

    for missing, absent in (("transformers", not find_spec("transformers")), ("a GPU", not torch.cuda.is_available())):
        if absent and not (options.tiny and missing == "a GPU"):
            print(f"{missing} is expected, and not found; --tiny runs on the CPU, with transformers", file=sys.stderr)
            return 3
    warnings.filterwarnings("ignore", "lngen.torch.patch", UserWarning)  # which patch gives on the CPU
    every = [32] if options.tiny else [int(n) for n in options.tokens.split(",")]
    rows = [(f, n, measured(f, n, options.tiny, options.compiled)) for f in options.models.split(",") for n in every]
    text = table(rows, options.compiled)
    if options.out:
        where = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
        versions = [f"{name} {import_module(name).__version__}" for name in ("torch", "transformers")]
        options.out.write_text(f"{where}{', '.join(versions)}, a training step in bf16\n\n{text}")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

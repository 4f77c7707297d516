"""Serve a 2:4 model: export a finished run, load it, and generate from it.

    python examples/serve_model.py                 # trains a tiny GPT-2 first
    python examples/serve_model.py --run runs/MODEL-DATA/METHOD-TAG-HASH/seed0

Needs the extra `hf`. transformers loads the export as any other model; `models.sparse.load` also
runs it packed, where that is faster: on an NVIDIA GPU since Ampere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from experiments import pretrain
from models.packed import limits_of
from models.sparse import load

TINY = ("model=gpt2_pico", "data=stdlib", "data.vocab_size=512", "train=quickstart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="directory of a finished run")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps without --run")
    parser.add_argument("--to", type=Path, default=Path("runs/examples/export"))
    options = parser.parse_args()
    run = options.run
    if run is None:
        given = [*TINY, "method=s_ste", f"train.steps={options.steps}", "train.warmup_steps=1"]
        config = pretrain.load(given)
        pretrain.run(config, print)
        run = config.directory()
    command = [sys.executable, "-m", "experiments.export", f"run={run}", f"to={options.to}"]
    command.append("dtype=bf16")  # sparse products take it
    subprocess.run(command, check=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = AutoModelForCausalLM.from_pretrained(options.to).to(device)
    model = load(options.to, device)
    print(f"linears that run packed, and for how many tokens: {limits_of(model)}")
    prompt = torch.arange(8, device=device)[None]
    told = [one.generate(prompt, max_new_tokens=8, do_sample=False) for one in (plain, model)]
    print(f"the same tokens as transformers': {torch.equal(*told)}")


if __name__ == "__main__":
    main()

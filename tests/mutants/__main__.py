"""Break the source on purpose, one fault at a time, and tell which faults the tests miss.

    python -m tests.mutants [FILE-OR-NUMBER ...]     # all, or those of some files or numbers

Each entry of mutants.yaml replaces one piece of source text in a copy of the repository and runs
the tests that must fail then. Exit status 0 only if every fault is caught.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common_kernels", "methods", "models", "experiments", "reproduce", "tests")


def main(chosen: list[str]) -> int:
    mutants = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text(encoding="utf-8"))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, copy / name)
        for name in ("pyproject.toml", "README.md", "docs", "examples"):
            (copy / name).symlink_to(ROOT / name)
        for number, mutant in enumerate(mutants, 1):
            file, old, new, tests = (mutant[key] for key in ("file", "old", "new", "tests"))
            if chosen and not {str(number), file} & {*chosen}:
                continue
            path = copy / file
            text = path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                verdict = f"{text.count(old)} places have this text; it must be one"
            else:
                path.write_text(text.replace(old, new), encoding="utf-8")
                verdict = _run(copy, tests)
                path.write_text(text, encoding="utf-8")
            missed += verdict != "caught"
            print(f"{number:3} {verdict:8} {file}: {old.strip()!r} -> {new.strip()!r}", flush=True)
    print(f"{missed} missed")
    return 1 if missed else 0


def _run(copy: Path, tests: str) -> str:
    """`caught` if one of the tests fails, or is killed by a signal; `missed` if all pass."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    command += ["-m", "not extra", *shlex.split(tests)]  # as run.sh runs them
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode <= 1:
        return "caught" if done.returncode else "missed"
    return f"pytest ended with status {done.returncode}: {done.stdout[-500:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

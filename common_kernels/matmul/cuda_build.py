"""Compilation of the CUDA sources of `common_kernels/csrc` with nvcc, when they are first needed.

A library is called with addresses through ctypes and does not link to torch, so it works with every
version of torch. Libraries are kept in `$XDG_CACHE_HOME/sparse24/cuda/<hash>`; the hash covers
source, flags, compiler and headers.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "csrc"
FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-diag-suppress", "20012",
    "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC,-fvisibility=hidden",
    "-shared",
)  # fmt: skip


class BuildError(RuntimeError):
    """A source cannot be compiled on this machine; the message says why."""


def missing() -> str | None:
    """One line that says what this machine lacks to compile the sources; None if nothing."""
    lacking = []
    if compiler() is None:
        lacking.append("nvcc (on PATH, under CUDA_HOME, or from the package nvidia-cuda-nvcc)")
    if headers() is None:
        lacking.append("the headers of CUTLASS (package nvidia-cutlass, or CUTLASS_PATH)")
    return f"{' and '.join(lacking)} cannot be found" if lacking else None


@functools.cache
def compiler() -> Path | None:
    """The nvcc under CUDA_HOME, else that on PATH, else that of the package nvidia-cuda-nvcc."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home, "bin", "nvcc")] if home else []
    found = shutil.which("nvcc")
    places += [Path(found)] if found else []
    places += [root / "bin" / "nvcc" for root in _cuda_packages()]
    return next((place for place in places if place.is_file()), None)


@functools.cache
def headers() -> Path | None:
    """The root of CUTLASS' sources: CUTLASS_PATH, else that of the package nvidia-cutlass."""
    named = os.environ.get("CUTLASS_PATH")
    places = [Path(named)] if named else []
    package = importlib.util.find_spec("cutlass_library")
    if package is not None and package.submodule_search_locations:
        places.append(Path(package.submodule_search_locations[0]) / "source")
    header = "include/cutlass/cutlass.h"
    return next((place for place in places if (place / header).is_file()), None)


def _cuda_packages() -> list[Path]:
    """Folders of NVIDIA's Python packages, one for each major version of CUDA, newest first."""
    package = importlib.util.find_spec("nvidia")
    roots = list(package.submodule_search_locations or ()) if package else []
    return sorted((p for root in roots for p in Path(root).glob("cu*") if p.is_dir()), reverse=True)


def command(source: Path, defines: Mapping[str, int], to: Path) -> list[str]:
    """The nvcc command that builds the library `to`."""
    nvcc, cutlass = compiler(), headers()
    assert nvcc is not None and cutlass is not None  # else there is no `folder`
    includes = [cutlass / "include", cutlass / "tools/util/include"]
    includes += [root / "include" for root in _cuda_packages()]
    return [
        str(nvcc), *FLAGS, *(f"-D{name}={value}" for name, value in defines.items()),
        *(f"-I{path}" for path in includes if path.is_dir()),
        *(f"-L{root / 'lib'}" for root in _cuda_packages()), "-o", str(to), str(source),
    ]  # fmt: skip


@functools.cache
def folder(source: Path) -> Path:
    """The folder for the libraries of a source in its present text, built by this compiler. Raises
    BuildError without compiler or headers."""
    nvcc, cutlass = compiler(), headers()
    if nvcc is None or cutlass is None:
        raise BuildError(str(missing()))
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{nvcc} does not run: {error}") from error
    known = hashlib.sha256(source.read_bytes())
    versions = done.stdout, (cutlass / "include/cutlass/version.h").read_text()
    known.update(repr((FLAGS, *versions)).encode())
    return cache() / known.hexdigest()[:16]


def cache() -> Path:
    """The folder for everything that is compiled."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sparse24" / "cuda"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build(source: Path, wanted: Mapping[str, Mapping[str, int]]) -> dict[str, Path]:
    """The libraries of a source for several sets of macros, `wanted`, by the library's name.
    Missing ones are compiled in parallel. Raises BuildError if compiler or headers are missing, or
    the compiler fails (with its first error)."""
    place = folder(source)
    paths = {name: place / f"{name}.so" for name in wanted}
    commands = {
        path: functools.partial(command, source, wanted[name]) for name, path in paths.items()
    }
    make(place, commands, "CUDA kernels")
    return paths


def make(place: Path, commands: Mapping[Path, Callable[[Path], list[str]]], what: str) -> None:
    """Compile those libraries in the folder `place` that are missing, in parallel."""
    if all(path.is_file() for path in commands):
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        with alone(place.with_suffix(".lock"), what):
            todo = [path for path in commands if not path.is_file()]
            workers = max(1, min(len(todo), os.cpu_count() or 1))
            if todo:
                say(f"compiling {len(todo)} {what}, {workers} at a time, into {place}")
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(compiled, [commands[path] for path in todo], todo))
    except OSError as error:
        raise BuildError(
            f"{what} cannot be kept in {place} ({error}); set XDG_CACHE_HOME to a folder that can "
            "be written"
        ) from error


@contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Hold the lock: one process of this machine compiles, and the others use the result."""
    import fcntl  # missing on Windows, where nothing is compiled

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process compiles {what}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled(command: Callable[[Path], list[str]], to: Path) -> None:
    """Compile to a temporary file, which is given to `command`, and move it to `to`, so that no
    process sees half a library. Raises BuildError with the compiler's first error."""
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        made = Path(scratch) / to.name
        words = command(made)
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode or not made.is_file():
            lines = f"{done.stderr}\n{done.stdout}".splitlines()
            signs = ("error:", "fatal:", "cannot find")
            first = next((line for line in lines if any(s in line for s in signs)), "no message")
            name = Path(words[0]).name
            raise BuildError(f"{name} cannot compile {to.stem}: {first.strip()}")
        made.replace(to)

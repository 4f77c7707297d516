"""Compiling CUDA sources: what is looked for, what is kept, and what is said when it fails."""

import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common_kernels.matmul import cuda, cuda_build, unavailable
from common_kernels.matmul.cusparselt import Problem
from common_kernels.pack import cpu
from tests.each import each

# Writes its own arguments into the library, or fails on the macro FAIL.
NVCC = f"""#!{sys.executable}
import sys
if "--version" in sys.argv:
    print("release 13.2")
    sys.exit()
if "-DFAIL=1" in sys.argv:
    sys.exit("a.cu(3): error: no such luck")
with open(sys.argv[sys.argv.index("-o") + 1], "w") as file:
    file.write(" ".join(sys.argv))
"""


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """A stand-in for nvcc and for CUTLASS' sources; returns the source to compile."""
    nvcc = tmp_path / "home/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    headers = tmp_path / "cutlass/include/cutlass"
    headers.mkdir(parents=True)
    for name in ("cutlass.h", "version.h"):
        (headers / name).write_text("4.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    source = tmp_path / "a.cu"
    source.write_text("// nothing")
    yield source
    forget()


def forget():
    for cached in (cuda_build.compiler, cuda_build.headers, cuda_build.folder):
        cached.cache_clear()


def test_libraries_are_compiled_once_and_in_one_piece(toolchain, capfd):
    wanted = {"one": {"TILE_M": 128}, "two": {"TILE_M": 64}}
    paths = cuda_build.build(toolchain, wanted)
    assert "-DTILE_M=128" in paths["one"].read_text() and "sm_90a" in paths["one"].read_text()
    assert "-DTILE_M=64" in paths["two"].read_text()
    assert "compiling 2 CUDA kernels" in capfd.readouterr().err
    assert sorted(paths["one"].parent.iterdir()) == [paths["one"], paths["two"]]
    assert cuda_build.build(toolchain, wanted) == paths
    assert not capfd.readouterr().err  # nothing more was compiled


def test_processes_that_start_together_compile_once(toolchain, capfd):
    """One of two builds at a time waits and finds the library."""
    nvcc = cuda_build.compiler()
    nvcc.write_text(NVCC.replace("with open", "import time; time.sleep(0.3)\nwith open"))
    cuda_build.folder.cache_clear()
    cuda_build.folder(toolchain)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: cuda_build.build(toolchain, {"one": {}}), range(2)))
    assert made[0] == made[1] and made[0]["one"].is_file()
    said = capfd.readouterr().err
    assert said.count("compiling 1") == said.count("waiting for it") == 1


def test_another_source_or_compiler_makes_another_library(toolchain):
    found = [cuda_build.folder(toolchain)]
    compiler = cuda_build.compiler()
    for path, text in ((toolchain, "// another"), (compiler, NVCC.replace("13.2", "13.3"))):
        path.write_text(text)
        cuda_build.folder.cache_clear()
        found.append(cuda_build.folder(toolchain))
    assert len(set(found)) == 3


def test_a_failure_is_one_line_and_leaves_nothing(toolchain, tmp_path, monkeypatch):
    """It is a `BuildError`, without which products go on as cuSPARSELt's."""

    def fails(said, **macros):
        with pytest.raises(cuda_build.BuildError, match=said):
            cuda_build.build(toolchain, {"bad": macros})

    fails(r"bad: a\.cu\(3\): error: no such luck$", FAIL=1)
    assert not list(cuda_build.folder(toolchain).iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    forget()
    fails(r"cannot be kept in .*; set XDG_CACHE_HOME")
    cuda_build.compiler().write_text("#!/bin/false")
    forget()
    fails(r"nvcc does not run: ")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cuda_build.importlib.util, "find_spec", lambda _: None)
    forget()
    missing = cuda_build.missing()
    assert "nvidia-cuda-nvcc" in missing and "nvidia-cutlass" in missing


def test_kernels_that_cannot_be_compiled_are_tried_once(monkeypatch):
    tried = []

    def build(source, wanted):
        tried.append(list(wanted))
        raise cuda_build.BuildError("no such luck")

    monkeypatch.setattr(cuda_build, "build", build)
    for cached in (cuda._built, cuda._library):
        cached.cache_clear()
    alike = [c for c in cuda.CONFIGS if c.dtype == torch.bfloat16 and not c.few]
    for config in alike:
        with pytest.raises(cuda_build.BuildError, match="no such luck"):
            cuda._library(config)
    cuda._built.cache_clear()
    assert tried == [[config.name for config in alike]]


def test_kernels_are_named_apart_and_their_macros_differ():
    names = {config.name for config in cuda.CONFIGS}
    macros = {tuple(config.macros().items()) for config in cuda.CONFIGS}
    assert len(names) == len(macros) == len(cuda.CONFIGS)
    source = cuda.SOURCE.read_text()
    for macro in cuda.CONFIGS[0].macros():
        assert macro in source
    for name, _ in cuda._Sizes._fields_:
        assert name in source


FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NARROW, WIDE = cuda.LAYOUTS
WGRAD = {"dense_transposed": False, "result_transposed": False}
FP8_WGRAD = {"result_transposed": False, "out_dtype": torch.float32}


@each(
    ("layout", "change", "found"),
    [
        (NARROW, {}, {"bf16_128x256x64_2x1_shared"}),
        (NARROW, {"tokens": 7}, {"bf16_128x256x64_2x1_shared"}),
        (WIDE, {"tokens": 129}, {"bf16_128x192x128_2x1_pingpong"}),
        (WIDE, {"tokens": 128}, {c.name.replace("_stream_k", "") for c in cuda.CONFIGS if c.few}),
        (NARROW, {"dtype": torch.float16, "out_dtype": torch.float16}, set()),
        (NARROW, {"dtype": FP8}, {"e4m3_128x256x128_2x1_shared", "e4m3_128x128x256_2x1_pingpong"}),
        (WIDE, {"dtype": FP8}, set()),
        (NARROW, {"dtype": E5M2} | FP8_WGRAD,
         {"e5m2_128x128x128_2x1_shared_wgrad", "e5m2_128x256x128_2x1_shared_wgrad"}),
        (NARROW, {"dtype": E5M2} | FP8_WGRAD | WGRAD, set()),
        (NARROW, {"out_dtype": torch.float32}, set()),
        (NARROW, WGRAD, {"bf16_128x256x64_2x1_shared_wgrad"}),
        (NARROW, WGRAD | {"tokens": 7}, set()),
        (NARROW, {"result_transposed": False}, set()),
    ],
)  # fmt: skip
def test_a_kernel_serves_what_it_was_compiled_for(layout, change, found):
    bf16 = dict.fromkeys(("dtype", "out_dtype"), torch.bfloat16)
    form = dict.fromkeys(("dense_transposed", "result_transposed"), True)
    problem = Problem(128, 128, **{"tokens": 640} | bf16 | form | change, layout=layout)
    names = {c.name.replace("_stream_k", "") for c in cuda.configs(problem)}
    assert names == found
    assert len(cuda.algorithms(problem)) == len(cuda.ORDERS) * len(cuda.configs(problem))


HOPPER = torch.cuda.is_available() and not unavailable("cuda", "cuda", torch.bfloat16)


# A kernel takes some 45 s to compile: without the GPU that needs them all, one is.
COMPILED = [
    config for config in (cuda.CONFIGS if HOPPER else cuda.CONFIGS[-1:]) if not cuda_build.missing()
]


@pytest.mark.skipif(not COMPILED, reason="needs nvcc and CUTLASS")
@each("config", COMPILED)
def test_a_kernel_reads_metadata_where_the_packer_writes_them(config):
    """This needs no GPU."""
    alone = {config.name: config.macros()}
    library = cuda._load(cuda_build.build(cuda.SOURCE, alone)[config.name])
    rows, columns = 128, 256
    form = cpu.LAYOUTS[config.layout].forms[config.dtype.itemsize]
    order = cpu.addresses(form.order, rows, columns)
    for row in range(0, rows, 3):
        for group in range(columns // 4):
            assert library.metadata_place(rows, columns, row, 4 * group) == order[row, group]

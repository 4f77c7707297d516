"""Every Triton kernel compiles for every NVIDIA GPU since Ampere; none is needed."""

import os
import subprocess
import sys

import pytest

from common_kernels.backend import HAS_TRITON


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
def test_every_kernel_compiles_for_six_architectures():
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.common_kernels.compiled"]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]

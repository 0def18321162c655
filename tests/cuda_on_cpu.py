"""Runs the CUDA C++ kernels on a CPU: g++ compiles them with ``warp_emulator.h``."""

import ctypes
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from ahop_layers.ops.gpu import nvrtc

KERNELS = {
    "attend.cu": {"attend_forward": "Forward"},
    "attend_backward.cu": {"attend_backward": "Backward"},
    "attend_sums.cu": dict.fromkeys(("attend_statistics", "attend_weights"), "Backward"),
    "missing.cu": {"score_missing": "Missing"},
    "score.cu": dict.fromkeys(("score_prepare", "score"), "ScoreCall"),
    "score_backward.cu": dict.fromkeys(
        ("score_prepare", "score_backward", "score_sum", "score_sum_weights"), "ScoreCall"
    ),
}
LAUNCH = """
extern "C" void launch_{name}(const {parameter}* p, int thread_blocks, int threads, int bytes) {{
    emulator::launch(thread_blocks, threads, bytes, [=] {{ {name}(*p); }});
}}
"""


class EmulatedKernel:
    """Has the interface of :class:`ahop_layers.ops.gpu.nvrtc.Kernel`."""

    def __init__(self, source, name, constants, index):
        self.function = getattr(_library(source, constants), f"launch_{name}")

    def launch(self, thread_blocks, threads, shared, arguments, stream):
        self.function(arguments, thread_blocks, threads, shared)


@lru_cache(maxsize=None)
def _library(source, constants):
    code = f'#include "{source}"\n'
    code += "".join(LAUNCH.format(name=name, parameter=parameter) for name, parameter in KERNELS[source].items())
    return compile_for_cpu(code, dict(constants))


def compile_for_cpu(code, constants):
    """Compiles CUDA C++ as C++ and loads the library."""
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{nvrtc.SOURCES}", f"-I{Path(__file__).parent}"]
    flags += [f"-DAHOP_{name.upper()}={int(value)}" for name, value in constants.items()]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        subprocess.run(["g++", *flags, "-x", "c++", "-", "-o", library], input=code, text=True, check=True)
        return ctypes.CDLL(str(library))

"""NVRTC, NVIDIA's run-time compiler, through ctypes: locates it, and compiles CUDA C++ for one type of GPU.

torch's CUDA builds include it, so no compiler has to be installed. Independent of torch's objects and of the driver,
and needs no GPU. Failures raise NvrtcError, which explains them in one sentence.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

# IEEE single precision throughout: no contraction, no flushing of denormals, exact division.
STRICT: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
MAJORS: Final = (13, 12, 11)  # versions of CUDA that are tried if torch's version is unknown

_BESIDE: Final = re.compile(r"builtins|\.alt\.")  # other libraries in the same folders
_OK: Final = 0
_NEEDED: Final = (
    *("nvrtcVersion", "nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs", "nvrtcCreateProgram"),
    *("nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN", "nvrtcGetPTXSize", "nvrtcGetPTX"),
    *("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcDestroyProgram", "nvrtcGetErrorString"),
)


class NvrtcError(Exception):
    """There is no NVRTC, or it cannot compile the source for the GPU."""


def load(folders: Iterable[Path], majors: Iterable[int] = MAJORS) -> ctypes.CDLL:
    """Load NVRTC of one of the CUDA versions, from the folders (see `folders_of`) or the system's search path.

    Raises NvrtcError if there is none, or none that can be loaded.
    """
    wrong = ""
    for candidate in candidates(list(folders), list(majors)):
        inside = candidate.parent != Path()
        try:
            if inside:  # preload its second library, which it opens by name
                for half in sorted(candidate.parent.glob("*nvrtc-builtins*")):
                    if ".alt." not in half.name:
                        ctypes.CDLL(str(half))
            return ctypes.CDLL(str(candidate))
        except OSError as error:
            wrong = wrong or (f": {error}" if inside else "")
    what = f"cannot be loaded{wrong}" if wrong else "was not found"
    raise NvrtcError(f"NVRTC, the compiler that torch's CUDA builds bring, {what}")


def folders_of(site: Path) -> list[Path]:
    """Folders below a site-packages folder where pip puts NVRTC, alone or with torch."""
    under = ("nvidia/*/lib", "nvidia/*/bin", "nvidia/*/bin/*", "torch/lib")
    return [folder for pattern in under for folder in sorted(site.glob(pattern))]


def candidates(folders: list[Path], majors: list[int]) -> Iterator[Path]:
    """Paths that may be NVRTC, followed by the bare names for the system's search path."""
    for major in majors:
        if sys.platform == "win32":
            pattern, names = f"nvrtc64_{major}*_0.dll", (f"nvrtc64_{major}0_0.dll",)
        else:
            pattern, names = f"libnvrtc[.-]*so*{major}*", (f"libnvrtc.so.{major}",)
        for folder in folders:
            yield from (path for path in sorted(folder.glob(pattern)) if not _BESIDE.search(path.name))
        yield from map(Path, names)


class Nvrtc:
    """A loaded NVRTC. Raises NvrtcError if the library is another one, or too old."""

    def __init__(self, library: ctypes.CDLL) -> None:
        missing = [name for name in _NEEDED if not hasattr(library, name)]
        if missing:
            raise NvrtcError(f"this NVRTC is too old for peerd: it has no {missing[0]}")
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """The GPU architectures that it supports: 90 is compute capability 9.0."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def target(self, capability: tuple[int, int]) -> str:
        """Compilation target for a GPU: its own machine code or, for a newer GPU, PTX, which the driver translates."""
        wanted = capability[0] * 10 + capability[1]
        known = self.architectures()
        if wanted in known:
            return f"sm_{wanted}"
        older = [architecture for architecture in known if architecture < wanted]
        if not older:
            version = ".".join(map(str, self.version))
            raise NvrtcError(f"NVRTC {version} does not compile for a GPU as old as compute capability {wanted / 10}")
        return f"compute_{older[-1]}"

    def compile(self, source: str, headers: Mapping[str, str], target: str, defines: Iterable[str] = ()) -> bytes:
        """Compile the source to machine code (target sm_...) or PTX (compute_...). NvrtcError has the first error
        message.
        """
        program = ctypes.c_void_p()
        count = len(headers)
        texts = (ctypes.c_char_p * count)(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * count)(*(name.encode() for name in headers))
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"peerd.cu", count, texts, names)
        try:
            options = [f"--gpu-architecture={target}", *STRICT, *(f"--define-macro={each}" for each in defines)]
            packed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), packed)
            if code != _OK:
                raise NvrtcError(f"NVRTC rejected peerd's kernels: {self._first_complaint(program)}")
            return self._bytes("CUBIN" if target.startswith("sm_") else "PTX", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _first_complaint(self, program: ctypes.c_void_p) -> str:
        log = self._bytes("ProgramLog", program).decode(errors="replace").rstrip("\0")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line), lines[0] if lines else "no message")

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        held = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, held)
        return held.raw

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code != _OK:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise NvrtcError(f"NVRTC failed in {name}: {(describe(code) or b'unknown error').decode()}")

"""Create `.venv`: check the machine, choose the CPU or the GPU build, install the tested versions.

Uses only the standard library, and syntax that an old Python can parse, so that it can print what to do. A stamp in the
environment makes further calls return within milliseconds.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
LOCKS = {"cpu": ROOT / "requirements" / "cpu.lock", "gpu": ROOT / "requirements" / "gpu.lock"}
PYTHON = (3, 11)
GIB = 1024**3
DISK = {"cpu": 8 * GIB, "gpu": 25 * GIB}
# Their default builds need CUDA: beside a CPU build of torch they break `import transformers`.
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


class SetupError(Exception):
    """Error with its remedy, in one sentence."""


def main() -> int:
    try:
        device = choose_device(os.environ.get("ALIGNMENT_DEVICE", ""))
        check_python(sys.version_info[:2])
        stamp = VENV / "alignment-setup"
        state = fingerprint(device)
        if stamp.is_file() and stamp.read_text() == state:
            return 0
        check_machine(device)
        create_environment()
        install(device)
        compile_operators(device)
        stamp.write_text(state)
    except SetupError as error:
        print("setup: %s" % error, file=sys.stderr)
        return 1
    print("setup: done (%s build) in %s" % (device, VENV))
    return 0


def check_python(version: "tuple[int, ...]") -> None:
    if tuple(version) < PYTHON:
        raise SetupError(
            "this is Python %d.%d, but 3.11 or later is needed: install one and name it, as in "
            "`make setup PYTHON=python3.11`." % tuple(version)
        )


def choose_device(requested: str) -> str:
    """Return `requested`, the value of ALIGNMENT_DEVICE; if unset, "gpu" if `nvidia-smi` lists one, else "cpu"."""
    if requested:
        if requested not in DISK:
            raise SetupError("ALIGNMENT_DEVICE is %r: set it to cpu or gpu, or unset it." % requested)
        return requested
    program = shutil.which("nvidia-smi")
    if program is None:
        return "cpu"
    listing = subprocess.run([program, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return "gpu" if listing.returncode == 0 and b"GPU " in listing.stdout else "cpu"


def check_machine(device: str) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError("the pinned builds are for Linux on x86-64: use such a machine, a container or WSL 2.")
    if device == "cpu":
        check_cpu(Path("/proc/cpuinfo").read_text())
    check_compiler(os.environ.get("CXX", "g++"))
    check_headers(Path(sysconfig.get_paths()["include"]))
    check_disk(ROOT, DISK[device])


def check_cpu(cpuinfo: str) -> None:
    if "avx2" not in cpuinfo:
        raise SetupError(
            "this CPU has no AVX2, which the CPU build of vLLM needs: use a machine that has it, or an NVIDIA GPU."
        )


def check_compiler(compiler: str) -> None:
    """Check that the compiler works, not only exists: DeepSpeed compiles an operator at its first start."""
    if shutil.which(compiler) is None:
        raise SetupError(
            "there is no C++ compiler (%s): install one, for example with `apt-get install g++`." % compiler
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n")
        command = [compiler, "-o", str(Path(folder) / "probe"), str(source)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SetupError(
            "the C++ compiler %s cannot compile a small program: repair it, for example with "
            "`apt-get install --reinstall g++`." % compiler
        )


def check_headers(include: Path) -> None:
    if not (include / "Python.h").is_file():
        raise SetupError(
            "Python's own headers are missing (%s): install them, for example with `apt-get install python3-dev`."
            % (include / "Python.h")
        )


def check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(str(folder)).free
    if free < needed:
        raise SetupError(
            "%.1f GiB are free at %s, but the installation needs %.0f: free some, or clone the repository elsewhere."
            % (free / GIB, folder, needed / GIB)
        )


def fingerprint(device: str) -> str:
    """Return a value that changes with everything that defines the environment."""
    digest = hashlib.sha256(("%s %s %s" % (device, sys.version, VENV)).encode())
    for file in (Path(__file__), LOCKS[device], ROOT / "pyproject.toml"):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def create_environment() -> None:
    if (VENV / "bin" / "python").is_file() and (VENV / "bin" / "pip").is_file():
        return
    print("setup: creating %s" % VENV, flush=True)
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], stdout=subprocess.PIPE)
    if done.returncode:
        raise SetupError(
            "Python cannot create a virtual environment: install its module, for example with "
            "`apt-get install python3-venv`."
        )


def install(device: str) -> None:
    print("setup: installing the %s build; this takes some minutes" % device, flush=True)
    pip("install", "--no-deps", "-r", str(LOCKS[device]))
    if device == "cpu":
        pip("uninstall", "-y", *UNWANTED_ON_CPU)
    pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def pip(*arguments: str) -> None:
    """Run pip. Raises SetupError with the remedy for pip's error."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    log = VENV / "setup.log"
    lines = []
    with log.open("a") as out:
        out.write("\n$ %s\n" % " ".join(command))
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode("utf-8", errors="replace")
            out.write(line)
            lines.append(line)
            show_progress(line, sum(text.startswith("Collecting ") for text in lines))
        process.wait()
    if process.returncode:
        raise SetupError("%s. pip's full log: %s." % (explain("".join(lines)).rstrip("."), log))


def show_progress(line: str, collected: int) -> None:
    if line.startswith("Collecting ") and collected % 25 == 0:
        print("setup: %d packages downloaded" % collected, flush=True)
    if line.startswith("Installing collected packages"):
        print("setup: installing them", flush=True)


def explain(output: str) -> str:
    """Return one sentence about a failure of pip, from its output."""
    errors = [line[len("ERROR:") :].strip() for line in output.splitlines() if line.startswith("ERROR:")]
    text = " ".join(errors)
    if "torch==" in text and "+cpu" in text:
        return (
            "pip cannot find PyTorch's CPU build: give it PyTorch's CPU wheel index, whose address is on PyTorch's "
            "installation page, as in `PIP_EXTRA_INDEX_URL=<that address> make setup`."
        )
    if "No space left on device" in output:
        return "the disk is full: free some space and repeat `make setup`."
    if "No matching distribution" in text or "Could not find a version" in text:
        last = [error for error in errors if "No matching distribution" in error] or errors
        return "pip cannot find a package, %s: check the network and pip's index, then repeat `make setup`." % last[-1]
    return "pip failed, %s: repeat `make setup`." % (errors[-1] if errors else "without a message")


def compile_operators(device: str) -> None:
    """Compile DeepSpeed's operator for CPU workers into torch's cache, so that the first job need not."""
    if device != "cpu":
        return
    print("setup: compiling DeepSpeed's CPU operator", flush=True)
    code = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)"
    # torch finds ninja through PATH
    environment = dict(os.environ, DS_ACCELERATOR="cpu", PATH="%s:%s" % (VENV / "bin", os.environ.get("PATH", "")))
    log = VENV / "setup.log"
    with log.open("a") as out:
        out.write("\n$ compile DeepSpeed's operator\n")
        out.flush()
        try:
            done = subprocess.run(
                [str(VENV / "bin" / "python"), "-c", code],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=600,
            )
        except subprocess.TimeoutExpired:
            raise SetupError(
                "compiling DeepSpeed's operator hangs, as it does after a compilation was killed: "
                "remove ~/.cache/torch_extensions and repeat `make setup`."
            ) from None
    if done.returncode:
        raise SetupError("DeepSpeed's operator does not compile: read the end of %s." % log)


if __name__ == "__main__":
    sys.exit(main())

"""Create `.venv`: check the machine, choose the CPU or the GPU build, install the tested versions.

With the folder of a kit (`make kit`) as its argument, packages come from there alone.

Uses only the standard library, and syntax that an old Python can parse, so that it can print what to do. A stamp in the
environment makes further calls return within milliseconds.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from deployments import kit_folder
from deployments.kit_folder import KitError

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
        kit = Path(sys.argv[1]).resolve() if sys.argv[1:] else None
        left_out = check_kit(kit, device, sys.version_info[:2]) if kit else []
        stamp = VENV / "alignment-setup"
        state = fingerprint(device)
        if stamp.is_file() and stamp.read_text() == state:
            return 0
        check_machine(device)
        create_environment(bool(left_out))
        install(device, kit, left_out)
        compile_operators(device)
        stamp.write_text(state)
    except (SetupError, KitError) as error:
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


def check_kit(kit: Path, device: str, version: "tuple[int, ...]") -> "list[str]":
    """Return the packages that a kit was collected without, which this Python must have."""
    description = kit_folder.read(kit)
    if description["for"] != device:
        raise SetupError(
            "the kit %s is for %s, and this is a set-up for %s: collect it with `make kit FOR=%s`, or set "
            "ALIGNMENT_DEVICE." % (kit, description["for"], device, device)
        )
    if description["python"] != "%d.%d" % tuple(version):
        raise SetupError(
            "the kit %s is for Python %s, and this is Python %d.%d: name the other one, as in `make setup KIT=%s "
            "PYTHON=python%s`." % (kit, description["python"], version[0], version[1], kit, description["python"])
        )
    left_out = description["without"]  # type: list[str]
    return left_out


def check_machine(device: str) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError("the pinned builds are for Linux on x86-64: use such a machine, a container or WSL 2.")
    if device == "cpu":
        check_cpu(Path("/proc/cpuinfo").read_text())
        check_library("libnuma.so.1", "libnuma1")
    check_compiler(os.environ.get("CXX", "g++"))
    check_headers(Path(sysconfig.get_paths()["include"]))
    check_disk(ROOT, DISK[device])


def check_cpu(cpuinfo: str) -> None:
    if "avx2" not in cpuinfo:
        raise SetupError(
            "this CPU has no AVX2, which the CPU build of vLLM needs: use a machine that has it, or an NVIDIA GPU."
        )


def check_library(name: str, package: str) -> None:
    """Check a library of the system that vLLM's kernels for CPUs need, and that no wheel brings."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise SetupError(
            "%s, which the CPU build of vLLM needs, cannot be loaded (%s): install it, for example with "
            "`apt-get install %s`." % (name, error, package)
        ) from error


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


def create_environment(with_those_of_python: bool) -> None:
    """Create .venv if it is not there; `with_those_of_python`: it has the packages of this Python too."""
    if (VENV / "bin" / "python").is_file() and (VENV / "bin" / "pip").is_file():
        return
    print("setup: creating %s" % VENV, flush=True)
    sites = ["--system-site-packages"] if with_those_of_python else []
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", *sites, str(VENV)], stdout=subprocess.PIPE)
    if done.returncode:
        raise SetupError(
            "Python cannot create a virtual environment: install its module, for example with "
            "`apt-get install python3-venv`."
        )


def install(device: str, kit: "Path | None", left_out: "list[str]") -> None:
    print("setup: installing the %s build; this takes some minutes" % device, flush=True)
    if kit:
        install_kit(kit, LOCKS[device], left_out)
    else:
        pip("install", "--no-deps", "--no-compile", "-r", str(LOCKS[device]))
    if device == "cpu":
        pip("uninstall", "-y", *unusable())
    pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    compile_modules()


def compile_modules() -> None:
    """Write the bytecode of all packages on all cores; pip takes one."""
    site = next((VENV / "lib").glob("python*")) / "site-packages"
    command = [str(VENV / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(site)]
    # Some packages have modules of other versions of Python: neither the messages nor the exit status are of use.
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def unusable() -> "list[str]":
    """Return the packages of UNWANTED_ON_CPU to remove: all but a torchvision that imports beside this build of torch.

    Engines need it for most models that read images.
    """
    command = [str(VENV / "bin" / "python"), "-c", "import torchvision"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [name for name in UNWANTED_ON_CPU if done.returncode or name != "torchvision"]


def install_kit(kit: Path, lock: Path, left_out: "list[str]") -> None:
    """Install a lock from a kit, without an index. Of the packages `left_out` any version that is there will do."""
    with tempfile.TemporaryDirectory(dir=str(VENV)) as folder:
        wheels = kit_folder.joined(kit, Path(folder) / "joined")
        links = ["--find-links=%s" % place for place in sorted({wheel.parent for wheel in wheels})]
        pins = Path(folder) / lock.name
        pins.write_text(unpinned(lock.read_text(), left_out))
        pip("install", "--no-deps", "--no-compile", "--no-index", *links, "-r", str(pins), of_kit=True)


def unpinned(lock: str, names: "list[str]") -> str:
    """Return the text of a lock with these packages in any version."""

    def free(pin: "re.Match[str]") -> str:
        return pin.group(1) if re.sub("[-_.]+", "-", pin.group(1)).lower() in names else pin.group()

    return re.sub(r"^([\w.-]+)==[^;\s]+", free, lock, flags=re.MULTILINE)


def pip(*arguments: str, of_kit: bool = False) -> None:
    """Run pip. Raises SetupError with the remedy for pip's error."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    log = VENV / "setup.log"
    lines = []
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process, log.open("a") as out:
        out.write("\n$ %s\n" % " ".join(command))
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode("utf-8", errors="replace")
            out.write(line)
            lines.append(line)
            show_progress(line, sum(text.startswith("Collecting ") for text in lines))
    if process.returncode:
        raise SetupError("%s. pip's full log: %s." % (explain("".join(lines), of_kit).rstrip("."), log))


def show_progress(line: str, collected: int) -> None:
    if line.startswith("Collecting ") and collected % 25 == 0:
        print("setup: %d packages downloaded" % collected, flush=True)
    if line.startswith("Installing collected packages"):
        print("setup: installing them", flush=True)


def explain(output: str, of_kit: bool = False) -> str:
    """Return one sentence about a failure of pip, from its output; `of_kit`: that had a kit in place of an index."""
    errors = [line[len("ERROR:") :].strip() for line in output.splitlines() if line.startswith("ERROR:")]
    text = " ".join(errors)
    absent = [error for error in errors if "No matching distribution" in error]
    if of_kit and absent:
        return (
            "the kit lacks a package, %s: install it in this Python if the kit was collected without it, or collect "
            "the kit again from this version of the repository." % absent[-1]
        )
    if "torch==" in text and "+cpu" in text:
        return (
            "pip cannot find PyTorch's CPU build: give it PyTorch's CPU wheel index, whose address is on PyTorch's "
            "installation page, as in `PIP_EXTRA_INDEX_URL=<that address> make setup`."
        )
    if "No space left on device" in output:
        return "the disk is full: free some space and repeat `make setup`."
    if "No matching distribution" in text or "Could not find a version" in text:
        last = (absent or errors)[-1]
        return "pip cannot find a package, %s: check the network and pip's index, then repeat `make setup`." % last
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

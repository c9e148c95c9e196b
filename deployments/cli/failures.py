"""Messages for failures outside the commands: standard streams, disks and files."""

from __future__ import annotations

import errno
import io
import os
import re
import ssl
import sys
from collections.abc import Sequence
from typing import Any

from rlhf_core.config.texts import is_unicode
from rlhf_core.errors import AlignmentError, RecipeError, StackError, one_line
from rlhf_core.stages.full_disk import explained
from rlhf_core.system.streams import escape_unknown_signs

_TOO_LARGE = re.compile(r"\[Errno 27\]|os error 27\b")  # also of libraries that raise errors of their own
_CERTIFICATES = ("PREFECT_API_SSL_CERT_FILE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
_OUTPUT = "standard output"
_STREAMS = {"stdin": ("input", "</dev/null"), "stdout": ("output", ">/dev/null"), "stderr": ("error", "2>/dev/null")}


class _StandardOutput(io.FileIO):
    """Standard output that names itself in its errors, as other files do."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _OUTPUT
            raise


def prepare_streams() -> None:
    """Raise StackError for a closed standard stream: the next file that is opened would take its place."""
    for name, (what, instead) in _STREAMS.items():
        if getattr(sys, name) is None:
            raise StackError(f"standard {what} is closed: give the command one, such as {instead}")
    escape_unknown_signs()
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper) and type(getattr(before.buffer, "raw", before.buffer)) is io.FileIO:
        raw = _StandardOutput(before.fileno(), "w", closefd=False)
        by_lines = before.line_buffering or before.write_through  # PYTHONUNBUFFERED
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=by_lines)


def require_unicode(arguments: Sequence[str]) -> None:
    """Raise RecipeError for an argument that no recipe, store or server can hold."""
    for argument in arguments:
        if not is_unicode(argument):
            shown = one_line(argument)
            raise RecipeError(f"the argument `{shown}` is not UTF-8: write it again, or rename the file")


def explanation(error: Exception) -> str | None:
    """Return one sentence for an error of the machine, or of a library about it; None: a defect.

    Empty string: broken pipe.
    """
    if isinstance(error, AlignmentError):
        return str(error)
    if isinstance(error, OSError) and error.filename == _OUTPUT:
        _drop_output()
        what = f"standard output cannot be written ({error.strerror}): free space there, or give it another file"
        return "" if error.errno == errno.EPIPE else what
    if _TOO_LARGE.search(str(error)):
        place = getattr(error, "filename", None) or "a file"
        return f"{place} may not grow as it has to (`ulimit -f` says how far): raise the limit"
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # which `tempfile` tried to write
        return f"{error.strerror}: free space there, or set TMPDIR to a folder that can be written"
    if isinstance(error, OSError) and error.filename is None and (certificate_problem := _certificates(error)):
        return certificate_problem
    if (full := explained(error)) is not error:
        return str(full)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}: correct the path, or what may be done there"
    return None


def _certificates(error: OSError) -> str | None:
    """Name the certificate file that cannot be loaded: the error of `ssl` does not."""
    files = {name: os.environ[name] for name in _CERTIFICATES if os.environ.get(name)}
    for name, file in files.items():
        try:
            ssl.create_default_context(cafile=file)
        except OSError as load_error:
            if load_error.errno == error.errno:
                return f"{name} is {file}, not a file of certificates ({load_error.strerror}): correct or unset it"
    return None


def _drop_output() -> None:
    """Drop buffered output, whose writing would fail again when Python ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
    os.close(null)

"""Namespaces of a command: its own files, processes and loopback, as an unprivileged user. Only the standard library.

The root of its files is a folder of the node, in which the system's programs and libraries are visible, read-only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rlhf_core.processes.keeper import call

_NEW_FILES, _NEW_NAME, _NEW_IPC, _NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_NO_SET_UID, _NO_DEVICES, _NO_PROGRAMS, _READ_ONLY = 2, 4, 8, 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # alike on all architectures
_HERE, _ALL_BELOW, _OF_DESCRIPTOR, _CLONE, _FROM_DESCRIPTOR = -100, 0x8000, 0x1000, 1, 4
_DROP_BOUND, _LAST_CAPABILITY = 24, 63
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # of a network interface
_NOBODY = 65534  # user and group
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FOLDERS = ("/app", "/dev/shm", "/etc", "/logs/agent", "/logs/verifier", "/proc", "/root", "/tests", "/tmp")  # noqa: S108
_LINKS = {
    "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}  # fmt: skip
_FILES = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "/etc/group": "root:x:0:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
}


def give(root: int) -> None:
    """Give an open folder, which will be a root, to the user that its commands are outside."""
    if os.geteuid() == 0:
        os.fchown(root, _NOBODY, _NOBODY)


def leave_user() -> None:
    """Enter a new user namespace, whose root is this process's user outside, or `nobody` if that is root; further
    children have new process ids. Raises OSError.

    The limit of a user's processes binds everyone but the root of the node.
    """
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        call("unshare", _NEW_USER | _NEW_PROCESSES)
        _map("self", user, group)
        return
    unshared, ready = os.pipe()
    here = os.getpid()
    helper = os.fork()  # remains outside, where alone it may map another user
    if helper == 0:
        status = 1
        try:
            os.close(ready)
            if os.read(unshared, 1):
                _map(str(here), _NOBODY, _NOBODY)
                status = 0
        finally:
            os._exit(status)
    os.close(unshared)
    call("unshare", _NEW_USER | _NEW_PROCESSES)
    os.write(ready, b"1")
    os.close(ready)
    if os.waitpid(helper, 0)[1]:
        raise PermissionError("the root of a new user namespace cannot be mapped to `nobody`")


def _map(process: str, user: int, group: int) -> None:
    for path, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/{process}/{path}", "w") as file:
            file.write(text)


def enter(root: str, readable: Sequence[str]) -> None:
    """Make `root` the root of this process's files, and give it a network of its own, in which only its loopback is.

    Called by the first process of a process namespace. readable: paths of the node that are visible. What an earlier
    command has removed of its root is restored; after the change of roots no link of it leads out. Raises OSError.
    """
    call("unshare", _NEW_FILES | _NEW_NETWORK | _NEW_IPC | _NEW_NAME)
    socket.sethostname("sandbox")
    _raise_loopback()
    _mount(None, "/", _PRIVATE | _RECURSIVE)
    links = {path: os.readlink(path) for path in readable if os.path.islink(path)} | _LINKS
    trees = {path: _tree(path, _READ_ONLY | _NO_SET_UID | _NO_DEVICES) for path in readable if path not in links}
    trees |= {path: _tree(path, 0) for path in _DEVICES}
    _mount(root, root, _BIND | _RECURSIVE)
    os.chdir(root)
    _restrict(_HERE, ".", _NO_SET_UID | _NO_DEVICES)
    node = os.open("/", os.O_PATH | os.O_DIRECTORY)
    call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    os.chdir("/")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _restore(links, {path: stat.S_ISDIR(os.fstat(tree).st_mode) for path, tree in trees.items()})
    for path, tree in trees.items():
        _called(f"{path} cannot be mounted", "syscall", _MOVE_MOUNT, tree, b"", _HERE, path.encode(), _FROM_DESCRIPTOR)
    _mount("proc", "/proc", _NO_SET_UID | _NO_DEVICES | _NO_PROGRAMS, "proc")
    _restrict(_HERE, "/proc", _READ_ONLY)  # the node's root may write the kernel's settings there, without capabilities
    os.fchdir(node)
    call("umount2", b".", _DETACH)
    os.chdir("/")
    for descriptor in (*trees.values(), node):
        os.close(descriptor)
    with suppress(OSError):  # beyond the last one that the kernel has
        for capability in range(_LAST_CAPABILITY + 1):
            call("prctl", _DROP_BOUND, capability, 0, 0, 0)


def _restore(links: Mapping[str, str], mounted: Mapping[str, bool]) -> None:
    """Make what is missing of the root. mounted: whether there is to be a folder, or a file, by path."""
    for path in (*_FOLDERS, *(path for path, is_folder in mounted.items() if is_folder)):
        if not os.path.isdir(path):
            _clear(path)
            os.makedirs(path)
    for path, target in links.items():
        if not os.path.islink(path) or os.readlink(path) != target:
            _clear(path)
            os.symlink(target, path)
    for path, text in {**_FILES, **{path: "" for path, is_folder in mounted.items() if not is_folder}}.items():
        if not os.path.isfile(path):
            _clear(path)
            with open(path, "x") as file:
                file.write(text)


def _clear(path: str) -> None:
    """Remove whatever is at the path, and make its parent a folder."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _clear(parent)
        os.mkdir(parent)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _tree(path: str, attributes: int) -> int:
    """Return a copy of the mounts at a path of the node, which are nowhere yet."""
    flags = _CLONE | _ALL_BELOW | os.O_CLOEXEC
    tree = _called(f"{path} cannot be mounted", "syscall", _OPEN_TREE, _HERE, os.fsencode(path), flags)
    if attributes:
        _restrict(tree, "", attributes)
    return tree


def _mount(source: str | None, target: str, flags: int, kind: str | None = None) -> None:
    from_path, kind_name = (None if text is None else os.fsencode(text) for text in (source, kind))
    what = f"{source or 'private'} cannot be mounted"
    _called(what, "mount", from_path, os.fsencode(target), kind_name, flags, None)


def _called(what: str, name: str, *arguments: object) -> int:
    """Call a function of the C library. what: what is not possible if it fails, for the OSError."""
    try:
        return call(name, *arguments)
    except OSError as error:
        raise OSError(error.errno, f"{what}: {os.strerror(error.errno or 0)}") from error


def _restrict(descriptor: int, path: str, attributes: int) -> None:
    """Set attributes of a mount and all below it; others stay as they are."""
    given = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _ALL_BELOW | (0 if path else _OF_DESCRIPTOR)
    call("syscall", _MOUNT_SETATTR, descriptor, os.fsencode(path), flags, ctypes.byref(given), 32)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, asked), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
